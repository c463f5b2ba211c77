"""Whatever keeps the check from looking is said, the rest is looked at, and nothing is changed."""

import asyncio
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from tests.check.aws_account import ORGANISATION, AwsAccount, Function, client, codes, destination
from tests.servers.aws_overlay import Answer, Asked, Change, Forward, Overlay, overlaid
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.aws.skewed_clock import SkewedClock
from oncebridge.base.clock import system_clock
from oncebridge.check.aws import check_aws
from oncebridge.check.aws.account import AwsLocation, AwsReader, NotReadable
from oncebridge.check.finding import Checkup, Severity
from oncebridge.service.config import load

SOURCE = f"aws.partner/genesys.com/cloud/{ORGANISATION}/pending"


@pytest.fixture(autouse=True)
def administrator(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", overlay.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def overlay(guarded_aws: GuardedAws) -> Iterator[Overlay]:
    with overlaid(guarded_aws.endpoint) as made:
        yield made


@pytest.fixture
def account(guarded_aws: GuardedAws) -> Iterator[AwsAccount]:
    with AwsAccount(guarded_aws) as made:
        yield made


class Everything:
    """A set-up in which every call of a check is made."""

    def __init__(self, account: AwsAccount) -> None:
        self.name = account.name
        client(account.endpoint, "s3").create_bucket(Bucket=account.name)
        topic = client(account.endpoint, "sns").create_topic(Name=account.name)["TopicArn"]
        stream = f"{account.name}-stream"
        client(account.endpoint, "kinesis").create_stream(StreamName=stream, ShardCount=1)
        function = Function(account)
        function.reads(account.arn(account.source))
        account.add_rule("direct", to=function.arn, pattern={"source": ["com.example.direct"]})
        table = account.add_table(DeletionProtectionEnabled=False)
        routes = [("topic", f"sns:{topic}"), ("bus", f"events://{account.bus}")]
        self.flags = account.flags() | {"source": f"kinesis://{stream}", "preset": "genesys"}
        self.flags |= {"store": f"dynamodb://{table}", "sink": routes[0][1]}
        self.more = {"source": "-", "dead": "memory:", "sink": routes[1][1]}
        self.more |= {"store": f"s3://{account.name}/keys"}
        self.function, self.destination = function.name, destination(account)
        self.role = f"arn:aws:iam::{ACCOUNT}:role/{function.name}"

    async def check(self, *, only: str = "") -> Checkup:
        """Check two configurations that have nothing in common; *only* the one that asks it."""
        checkup = Checkup()
        if not only.startswith(("s3:", "events:DescribeEventBus")):
            setup = load(flags=self.flags, environment={})
            asked = {"functions": [self.function], "destinations": [self.destination]}
            await check_aws(setup, checkup, **asked, role=self.role)
        if not only or only.startswith(("s3:", "events:DescribeEventBus")):
            await check_aws(load(flags=self.flags | self.more, environment={}), checkup)
        return checkup


ACTIONS = [
    "dynamodb:DescribeContinuousBackups",
    "dynamodb:DescribeTable",
    "dynamodb:DescribeTimeToLive",
    "events:DescribeApiDestination",
    "events:DescribeEventBus",
    "events:ListArchives",
    "events:ListEventBuses",
    "events:ListEventSources",
    "events:ListRuleNamesByTarget",
    "events:ListRules",
    "events:ListTargetsByRule",
    "iam:SimulatePrincipalPolicy",
    "kinesis:DescribeStreamSummary",
    "lambda:GetFunctionConfiguration",
    "lambda:GetFunctionEventInvokeConfig",
    "lambda:ListEventSourceMappings",
    "s3:GetBucketVersioning",
    "s3:GetLifecycleConfiguration",
    "sns:GetTopicAttributes",
    "sqs:GetQueueAttributes",
    "sqs:GetQueueUrl",
    "sts:GetCallerIdentity",
]


async def test_nothing_is_asked_for_but_to_read(
    account: AwsAccount, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are seen twice: by botocore, and by the server; what is listed above is all."""
    called: list[str] = []
    original = botocore.session.Session.create_client

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        made.meta.events.register("before-call", lambda model, **_: called.append(model.name))
        return made

    everything = Everything(account)
    monkeypatch.setattr(botocore.session.Session, "create_client", watched)
    checkup = await everything.check()
    assert not checkup.not_checked
    assert len(called) == len(overlay.asked) > 40
    assert all(re.match(r"Get|List|Describe|Simulate", name) for name in called)
    assert sorted(set(overlay.asked)) == ACTIONS


async def test_what_does_more_than_read_cannot_be_called() -> None:
    sqs = AwsReader().at("sqs", AwsLocation())
    for operation in ("ReceiveMessage", "SetQueueAttributes", "DeleteMessage", "get_queue_url"):
        with pytest.raises(ValueError, match="more than read"):
            await sqs.ask(operation)


async def test_each_right_can_be_missing(account: AwsAccount, overlay: Overlay) -> None:
    everything = Everything(account)
    whole = await everything.check()
    for action in ACTIONS:
        overlay.changes.clear()
        overlay.deny(action)
        checkup = await everything.check(only=action)
        assert {blind.needs for blind in checkup.not_checked} == {action}, action
        # What could not be seen is not found, and nothing else is.
        found = {(one.code, one.subject) for one in checkup.findings}
        assert found <= {(one.code, one.subject) for one in whole.findings}, action
        assert checkup.passed, action


async def test_no_right_at_all(account: AwsAccount, overlay: Overlay) -> None:
    everything = Everything(account)
    for action in ACTIONS:
        overlay.deny(action)
    checkup = await everything.check()
    assert checkup.findings == []
    assert {one.subject for one in checkup.passed} == {"this host's clock"}
    assert "sqs:GetQueueUrl" in {blind.needs for blind in checkup.not_checked}


async def test_real_iam_denies_a_user(
    account: AwsAccount, guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    iam = guarded_aws.client("iam")
    iam.create_user(UserName=account.name)
    statements = [
        {"Effect": "Allow", "Action": "*", "Resource": "*"},
        {"Effect": "Deny", "Action": "events:ListEventBuses", "Resource": "*"},
    ]
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_user_policy(UserName=account.name, PolicyName="it", PolicyDocument=document)
    key = iam.create_access_key(UserName=account.name)["AccessKey"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded_aws.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    checkup = await account.check()
    assert [(one.subject, one.needs) for one in checkup.not_checked] == [
        ("EventBridge", "events:ListEventBuses")
    ]
    assert checkup.findings == []  # and not that no rule leads here


# --- nobody answers ---------------------------------------------------------------------------


async def test_nobody_answers(account: AwsAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        checkup = await account.check()
    assert checkup.findings == []
    assert checkup.passed == []
    needs = {blind.needs for blind in checkup.not_checked}
    assert needs == {
        f"a response of {service} (EndpointConnectionError)"
        for service in ("sqs", "dynamodb", "sts")
    }


async def test_nobody_is_asking(account: AwsAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    checkup = await account.check()
    assert checkup.findings == []
    assert {blind.needs for blind in checkup.not_checked} == {
        "AWS credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    }


async def test_no_region(account: AwsAccount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    checkup = await account.check()
    assert checkup.findings == []
    regions = [blind.needs for blind in checkup.not_checked if "Region" in blind.needs]
    assert regions[0] == "an AWS Region: set AWS_REGION, or region= in the address"


async def test_credentials_that_are_not_accepted(
    account: AwsAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODYEXAMPLE")
    checkup = await account.check()
    assert checkup.findings == []
    assert all(blind.needs.startswith("credentials") for blind in checkup.not_checked), (
        checkup.not_checked
    )


async def test_an_answer_that_nobody_expects_is_quoted_by_its_code_only(
    account: AwsAccount, overlay: Overlay
) -> None:
    overlay.say("sqs:GetQueueUrl", 400, {"__type": "Strange", "message": "secret"})
    checkup = await account.check()
    assert "a response to sqs:GetQueueUrl other than Strange" in {
        b.needs for b in checkup.not_checked
    }
    assert "secret" not in repr(checkup.not_checked)


async def test_nobody_is_asked_where_nothing_is_on_aws(overlay: Overlay) -> None:
    checkup = Checkup()
    flags = {"source": "-", "store": "memory:", "sink": "-", "dead": "memory:"}
    await check_aws(load(flags=flags, environment={}), checkup)
    assert (checkup.findings, checkup.not_checked, checkup.passed) == ([], [], [])
    assert overlay.asked == []


async def test_a_queue_that_is_hidden_is_not_taken_for_gone(
    account: AwsAccount, overlay: Overlay
) -> None:
    """SQS says the same to somebody who may not ask for it as of a queue that is not there."""
    overlay.deny("sqs:GetQueueUrl")
    hidden = overlay.changes["sqs:GetQueueUrl"]

    def answer(asked: Asked, forward: Forward) -> Answer:
        is_own = asked["QueueName"].endswith(("-in", "-dead"))
        return forward() if is_own else hidden(asked, forward)

    overlay.changes["sqs:GetQueueUrl"] = answer
    checkup = await account.check()
    assert checkup.findings == []
    assert {(one.subject, one.needs) for one in checkup.not_checked} == {
        (f"queue {account.name}-{name}", "sqs:GetQueueUrl") for name in ("failed", "undelivered")
    }


@pytest.mark.parametrize(
    ("profile", "needs"),
    [
        ("over", "a login: aws sso login --profile over"),
        ("nobody has it", "an existing profile: 'nobody has it' does not exist"),
    ],
)
async def test_a_login_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, needs: str
) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile over]\nsso_session = it\nsso_account_id = 111122223333\nsso_role_name = role\n"
        "[sso-session it]\nsso_start_url = https://it.example.com/start\nsso_region = us-east-1\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", profile)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    checkup = Checkup()
    flags = {"source": "sqs://in", "store": "memory:", "sink": "-", "dead": "memory:"}
    await check_aws(load(flags=flags, environment={}), checkup)
    assert checkup.findings == []
    assert {one.needs for one in checkup.not_checked} == {needs}


async def test_a_signature_that_is_not_accepted(overlay: Overlay) -> None:
    overlay.say("sts:GetCallerIdentity", 403, {"__type": "SignatureDoesNotMatch"})
    reader = AwsReader()
    with pytest.raises(NotReadable, match="check the secret key and this host's clock"):
        await reader.at("sts", AwsLocation()).ask("GetCallerIdentity")
    await reader.aclose()


# --- several pages, busy moments --------------------------------------------------------------


async def test_throttled_calls_are_tried_again(account: AwsAccount, overlay: Overlay) -> None:
    refused: list[str] = []

    def busy(_: Asked, forward: Forward) -> Answer:
        refused.append("once")
        if len(refused) > 1:
            return forward()
        return 400, b'{"__type": "ThrottlingException", "message": "Rate exceeded"}'

    overlay.changes["events:ListEventBuses"] = busy
    assert codes(await account.check()) == []
    assert len(refused) == 2


async def test_every_page_is_read(account: AwsAccount, overlay: Overlay) -> None:
    """Of each list only the first is told; the next page begins with the second."""

    def paged(member: str, told: str = "NextToken") -> Any:
        def change(asked: Asked, forward: Forward) -> Answer:
            status, body = forward()
            answer = json.loads(body)
            at = int(asked.get("NextToken") or 0)
            rest = answer[member][at:]
            return status, json.dumps(
                {member: rest[:1]} | ({told: str(at + 1)} if len(rest) > 1 else {})
            ).encode()

        return change

    overlay.changes["events:ListEventBuses"] = paged("EventBuses")
    overlay.changes["events:ListRuleNamesByTarget"] = paged("RuleNames")
    overlay.changes["events:ListTargetsByRule"] = paged("Targets")
    rules = [account.rule, account.add_rule("second", targets=[{}, {}])]
    for url in (account.source, account.undelivered):
        account.allow(url, *rules)
    assert codes(await account.check()) == ["rules-overlap", "target-twice"]


async def test_a_list_without_an_end(overlay: Overlay) -> None:
    answer = {"EventBuses": [], "NextToken": "again"}
    overlay.say("events:ListEventBuses", 200, answer)
    reader = AwsReader()
    with pytest.raises(NotReadable, match="ListEventBuses that is not the same page again"):
        async with asyncio.timeout(30):
            await reader.at("events", AwsLocation()).ask_all("ListEventBuses", "EventBuses")
    await reader.aclose()


class Crowd:
    """Many rules of the account's bus that lead to its queue; they match the same events."""

    def __init__(self, account: AwsAccount, overlay: Overlay, many: int) -> None:
        self.busy = self.most = 0
        self._account, self._lock = account, threading.Lock()
        self._names = [f"rule-{at}" for at in range(many)]
        changes = overlay.changes
        changes["events:ListRuleNamesByTarget"] = self._of_bus({"RuleNames": self._names})
        changes["events:ListRules"] = self._of_bus({"Rules": [*map(self._rule, self._names)]})
        changes["events:ListTargetsByRule"] = self._targets
        condition = {"StringEquals": {"aws:SourceAccount": ACCOUNT}}
        for url in (account.source, account.undelivered):
            account.allow(url)
            told = account.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["Policy"])
            policy = json.loads(told["Attributes"]["Policy"])
            policy["Statement"][0]["Condition"] = condition
            account.set(url, Policy=json.dumps(policy))

    def _of_bus(self, answer: Asked) -> Change:
        told = json.dumps(answer).encode()
        return lambda asked, forward: (
            (200, told) if asked["EventBusName"] == self._account.bus else forward()
        )

    def _rule(self, name: str) -> Asked:
        arn = f"arn:aws:events:us-east-1:{ACCOUNT}:rule/{self._account.bus}/{name}"
        pattern = '{"source": ["com.example.orders"]}'
        return {"Name": name, "Arn": arn, "State": "ENABLED", "EventPattern": pattern}

    def _targets(self, _: Asked, __: Forward) -> Answer:
        with self._lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(0.02)
        with self._lock:
            self.busy -= 1
        target = self._account.target(Id="it", Arn=self._account.arn(self._account.source))
        return 200, json.dumps({"Targets": [target]}).encode()


async def test_many_rules_are_told_of_once_and_asked_about_together(
    account: AwsAccount, overlay: Overlay
) -> None:
    crowd = Crowd(account, overlay, 60)
    checkup = await account.check()
    assert codes(checkup) == ["rules-overlap"]
    (finding,) = checkup.findings
    assert finding.seen.endswith("; and 1,767 more pairs of rules")
    assert finding.fix.endswith("(and 56 more)")
    assert len(finding.seen) + len(finding.fix) < 2_000
    assert 1 < crowd.most <= 8
    asked = Counter(overlay.asked)
    assert asked["events:ListTargetsByRule"] == 60
    assert asked["events:ListRules"] == 1
    assert asked["events:DescribeRule"] == 0


# --- what the emulator does not have ----------------------------------------------------------


async def test_an_event_source_that_nobody_has_taken_into_use(
    account: AwsAccount, overlay: Overlay
) -> None:
    sources = [{"Name": SOURCE, "State": "PENDING"}, {"Name": f"{SOURCE}-2", "State": "ACTIVE"}]
    overlay.say("events:ListEventSources", 200, {"EventSources": sources})
    account.settings |= {"preset": "genesys"}
    checkup = await account.check()
    assert codes(checkup) == ["genesys-pending"]
    assert checkup.findings[0].subject == f"event source {SOURCE}"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"TableStatus": "CREATING"}, "dynamodb-status"),
        ({"TableStatus": "INACCESSIBLE_ENCRYPTION_CREDENTIALS"}, "dynamodb-status"),
        ({"Replicas": [{"RegionName": "eu-west-1"}]}, "dynamodb-replicated"),
        ({"GlobalTableVersion": "2017.11.29"}, "dynamodb-replicated"),
        (
            {"Replicas": [{"RegionName": "eu-west-1"}], "MultiRegionConsistency": "STRONG"},
            None,
        ),
    ],
)
async def test_tables_that_the_emulator_cannot_make(
    account: AwsAccount, overlay: Overlay, change: dict[str, Any], code: str | None
) -> None:
    def spoilt(_: Asked, forward: Forward) -> Answer:
        status, body = forward()
        answer = json.loads(body)
        answer["Table"] |= change
        return status, json.dumps(answer).encode()

    overlay.changes["dynamodb:DescribeTable"] = spoilt
    checkup = await account.check()
    assert codes(checkup) == ([code] if code else [])
    for finding in checkup.findings:
        assert ("wait table-exists" in finding.fix) == ("CREATING" in finding.seen)


# --- the time ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("off_s", "severity"),
    [(0, None), (2, None), (-8, Severity.WARNING), (20, Severity.WARNING), (300, Severity.ERROR)],
)
async def test_this_hosts_clock(account: AwsAccount, off_s: int, severity: Severity | None) -> None:
    checkup = await account.check(clock=lambda: system_clock() + off_s * 1000)
    assert codes(checkup) == ([] if severity is None else ["clock-aws"])
    for finding in checkup.findings:
        assert finding.severity is severity
        assert ("ahead of" if off_s > 0 else "behind") in finding.seen


def test_the_clock_is_the_one_that_the_stores_use() -> None:
    assert isinstance(AwsReader().clock, SkewedClock)
