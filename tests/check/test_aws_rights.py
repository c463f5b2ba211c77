"""Missing rights are named by action and resource, as IAM judges them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.check.aws_account import AwsAccount, Function, client, codes, role
from tests.servers.aws_overlay import Answer, Asked, Forward, overlaid
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.aws.templates.access import ACTIONS
from oncebridge.check.aws import check_aws
from oncebridge.check.finding import Checkup
from oncebridge.service.config import load

EVERYTHING = {"Effect": "Allow", "Action": "*", "Resource": "*"}


@pytest.fixture(autouse=True)
def administrator(guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded_aws.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def account(guarded_aws: GuardedAws) -> Iterator[AwsAccount]:
    with AwsAccount(guarded_aws) as made:
        yield made


def statements(account: AwsAccount) -> list[dict[str, Any]]:
    """Allow what a worker of the account needs, and nothing else."""
    table = f"arn:aws:dynamodb:us-east-1:{ACCOUNT}:table/{account.table}"
    return [
        {
            "Effect": "Allow",
            "Action": list(ACTIONS["source.sqs"]),
            "Resource": account.arn(account.source),
        },
        {
            "Effect": "Allow",
            "Action": list(ACTIONS["dead.sqs"]),
            "Resource": account.arn(account.dead),
        },
        {"Effect": "Allow", "Action": list(ACTIONS["store.dynamodb"]), "Resource": table},
    ]


async def test_a_role_with_all_that_is_needed(account: AwsAccount) -> None:
    arn = role(account.endpoint, account.name, *statements(account))
    checkup = await account.check(role=arn)
    assert codes(checkup) == []
    assert [one.what for one in checkup.passed if one.subject == f"rights of {arn}"] == [
        "it has all rights that are needed"
    ]


async def test_each_missing_action_is_named_with_its_resource(account: AwsAccount) -> None:
    allowed = statements(account)
    allowed[0]["Action"].remove("sqs:DeleteMessage")
    allowed[2]["Action"].remove("dynamodb:PartiQLUpdate")
    arn = role(account.endpoint, account.name, *allowed)
    checkup = await account.check(role=arn)
    assert codes(checkup) == ["rights-missing"]
    table = f"arn:aws:dynamodb:us-east-1:{ACCOUNT}:table/{account.table}"
    assert [one.seen for one in checkup.findings] == [
        f"no policy allows sqs:DeleteMessage on {account.arn(account.source)}",
        f"no policy allows dynamodb:PartiQLUpdate on {table}",
    ]
    assert "oncebridge template iam" in checkup.findings[0].fix


async def test_an_explicit_deny_is_told_as_one(account: AwsAccount) -> None:
    deny = {"Effect": "Deny", "Action": "sqs:SendMessage", "Resource": "*"}
    arn = role(account.endpoint, account.name, EVERYTHING, deny)
    (finding,) = (await account.check(role=arn)).findings
    assert finding.seen == f"a policy denies sqs:SendMessage on {account.arn(account.dead)}"
    assert "Deny" in finding.fix


async def test_the_policy_of_the_queue_is_enough_in_one_account(account: AwsAccount) -> None:
    allowed = statements(account)[1:]
    arn = role(account.endpoint, account.name, *allowed)
    assert codes(await account.check(role=arn)) == ["rights-missing"]
    told = account.sqs.get_queue_attributes(QueueUrl=account.source, AttributeNames=["Policy"])
    policy = json.loads(told["Attributes"]["Policy"])
    policy["Statement"].append(
        {
            "Effect": "Allow",
            "Principal": {"AWS": arn},
            "Action": "sqs:*",
            "Resource": account.arn(account.source),
        }
    )
    account.set(account.source, Policy=json.dumps(policy))
    assert codes(await account.check(role=arn)) == []


async def test_that_its_account_is_allowed_hands_the_question_to_iam(account: AwsAccount) -> None:
    """The console gives every queue such a statement."""
    arn = role(account.endpoint, account.name, *statements(account)[1:])
    told = account.sqs.get_queue_attributes(QueueUrl=account.source, AttributeNames=["Policy"])
    policy = json.loads(told["Attributes"]["Policy"])
    root = {"Effect": "Allow", "Action": "SQS:*", "Resource": account.arn(account.source)}
    root |= {"Principal": {"AWS": f"arn:aws:iam::{ACCOUNT}:root"}}
    policy["Statement"].append(root)
    account.set(account.source, Policy=json.dumps(policy))
    checkup = await account.check(role=arn)
    assert codes(checkup) == ["rights-missing"]
    assert len(checkup.findings) == len(ACTIONS["source.sqs"])


async def test_what_a_policy_of_the_role_cannot_mend(
    account: AwsAccount, guarded_aws: GuardedAws
) -> None:
    """A limit of the organisation, and one of the role; the emulator has neither."""
    limits = {
        "PermissionsBoundary": "its permissions boundary does not allow",
        "Organizations": "a policy of the organisation (SCP) does not allow",
    }

    def limited(limit: str, forward: Forward) -> Answer:
        status, body = forward()
        name = f"AllowedBy{limit}"
        told = f"<{limit}DecisionDetail><{name}>false</{name}></{limit}DecisionDetail>"
        return status, body.replace(b"</EvalDecision>", b"</EvalDecision>" + told.encode())

    arn = role(account.endpoint, account.name, *statements(account)[1:])
    with overlaid(guarded_aws.endpoint) as overlay, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", overlay.endpoint)
        for limit, seen in limits.items():
            overlay.changes["iam:SimulatePrincipalPolicy"] = lambda _, forward, it=limit: limited(
                it, forward
            )
            checkup = await account.check(role=arn)
            assert len(checkup.findings) == len(ACTIONS["source.sqs"])
            for finding in checkup.findings:
                assert finding.seen.startswith(f"{seen} sqs:")
                assert "oncebridge template" not in finding.fix


async def test_secrets_that_are_kept_at_aws_have_to_be_read(
    account: AwsAccount, tmp_path: Path
) -> None:
    ssm, secrets = client(account.endpoint, "ssm"), client(account.endpoint, "secretsmanager")
    ssm.put_parameter(
        Name=f"/{account.name}/key", Value="whsec_aW52ZW50ZWQtaW52ZW50ZWQtaW52ZW50", Type="String"
    )
    secrets.create_secret(Name=f"{account.name}-token", SecretString="invented")
    file = tmp_path / "it.toml"
    file.write_text(
        "".join(f'{name} = "{url}"\n' for name, url in account.flags().items() if name != "sink")
        + f'[sink]\nurl = "https://crm.example.com/hooks"\nsign = ["ssm:/{account.name}/key"]\n'
        f'headers = {{ authorization = "secretsmanager:{account.name}-token" }}\n'
    )
    checkup = Checkup()
    arn = role(account.endpoint, account.name, *statements(account))
    await check_aws(load(file, environment={}), checkup, role=arn)
    parameter = f"arn:aws:ssm:us-east-1:{ACCOUNT}:parameter/{account.name}/key"
    assert [one.seen for one in checkup.findings] == [
        f"no policy allows ssm:GetParameter on {parameter}"
    ]
    # A policy may name a secret with the end that it was given, which is not known here.
    assert [one.needs for one in checkup.not_checked] == [
        "the whole ARN of the secret instead of its name"
    ]


async def test_who_has_assumed_a_role_is_asked_about_by_that_role(
    account: AwsAccount, guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    arn = role(account.endpoint, account.name, EVERYTHING, path="/service/")
    assert arn.endswith(f"role/service/{account.name}")
    sts = client(account.endpoint, "sts")
    session = sts.assume_role(RoleArn=arn, RoleSessionName="worker")["Credentials"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", session["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", session["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", session["SessionToken"])
    with overlaid(guarded_aws.endpoint) as overlay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", overlay.endpoint)
        asked: list[str] = []

        def simulated(_: Asked, forward: Forward) -> Answer:
            asked.append("iam")
            return forward()

        overlay.changes["iam:SimulatePrincipalPolicy"] = simulated
        checkup = await account.check()
    # The emulator looks a role up by what follows role/, which is not its name under a path.
    assert {one.subject for one in checkup.findings} <= {f"rights of {arn}"}
    assert not checkup.not_checked
    assert asked


async def test_a_path_that_may_not_be_looked_up_is_guessed(
    account: AwsAccount, guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    arn = role(account.endpoint, account.name, EVERYTHING)
    session = client(account.endpoint, "sts").assume_role(RoleArn=arn, RoleSessionName="worker")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", session["Credentials"]["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", session["Credentials"]["SecretAccessKey"])
    monkeypatch.setenv("AWS_SESSION_TOKEN", session["Credentials"]["SessionToken"])
    with overlaid(guarded_aws.endpoint) as overlay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", overlay.endpoint)
        overlay.deny("iam:GetRole")
        checkup = await account.check()
    assert codes(checkup) == []
    assert f"rights of {arn}" in {one.subject for one in checkup.passed}


async def test_a_role_that_is_not_there(account: AwsAccount, guarded_aws: GuardedAws) -> None:
    with overlaid(guarded_aws.endpoint) as overlay, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", overlay.endpoint)
        overlay.say("iam:SimulatePrincipalPolicy", 404, {"__type": "NoSuchEntity"})
        checkup = await account.check(role=f"arn:aws:iam::{ACCOUNT}:role/nobody")
    assert [one.needs for one in checkup.not_checked] == [
        "the ARN of an existing user or role: --role ARN"
    ]
    assert checkup.findings == []


async def test_a_federated_user_cannot_be_asked_about(account: AwsAccount) -> None:
    checkup = await account.check(role=f"arn:aws:sts::{ACCOUNT}:federated-user/somebody")
    assert [one.needs for one in checkup.not_checked] == ["the ARN of a user or role: --role ARN"]


async def test_a_function_is_asked_about_by_its_own_role(account: AwsAccount) -> None:
    function = Function(account)
    function.reads(account.arn(account.source))
    iam = client(account.endpoint, "iam")
    deny = {"Effect": "Deny", "Action": "sqs:ReceiveMessage", "Resource": "*"}
    document = {"Version": "2012-10-17", "Statement": [EVERYTHING, deny]}
    iam.put_role_policy(
        RoleName=function.name, PolicyName="it", PolicyDocument=json.dumps(document)
    )
    account.settings["source"] = "-"
    checkup = await account.check(functions=[function.name])
    # Of its dead letters a function reads none, so that is not missed.
    assert [one.seen for one in checkup.findings] == [
        f"a policy denies sqs:ReceiveMessage on {account.arn(account.source)}"
    ]


async def test_what_hangs_on_a_condition_is_not_taken_for_denied(
    account: AwsAccount, guarded_aws: GuardedAws
) -> None:
    """IAM says which values it would have to know; the emulator does not."""

    def unknown(_: Asked, forward: Forward) -> Answer:
        status, body = forward()
        told = body.replace(
            b"<MissingContextValues></MissingContextValues>",
            b"<MissingContextValues><member>aws:SourceVpce</member></MissingContextValues>",
        )
        assert told != body
        return status, told

    arn = role(account.endpoint, account.name, *statements(account)[1:])
    with overlaid(guarded_aws.endpoint) as overlay, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", overlay.endpoint)
        overlay.changes["iam:SimulatePrincipalPolicy"] = unknown
        checkup = await account.check(role=arn)
    assert checkup.findings == []
    assert {one.needs for one in checkup.not_checked} == {
        "a real call: its policies depend on aws:SourceVpce"
    }
    assert len(checkup.not_checked) == len(ACTIONS["source.sqs"])
