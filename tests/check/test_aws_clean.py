"""What our own templates make, with the configuration of the docs, has nothing to be found."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.aws.cloudformation import Stack
from tests.check.aws_account import ORGANISATION, client
from tests.servers.aws import fresh
from tests.servers.guarded_aws import GuardedAws

from oncebridge.aws.templates.rendering import stack
from oncebridge.check.aws import check_aws
from oncebridge.check.finding import Checkup
from oncebridge.service.config import load


@pytest.fixture(autouse=True)
def administrator(encrypted_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", encrypted_aws.endpoint)
    monkeypatch.setenv("AWS_CA_BUNDLE", encrypted_aws.authority)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def name() -> str:
    return fresh("clean")


@pytest.fixture
def bus(encrypted_aws: GuardedAws, name: str) -> Iterator[dict[str, str]]:
    """Take an event source of Genesys Cloud into use; give the parameters that name it."""
    events = client(encrypted_aws.endpoint, "events")
    partner = f"aws.partner/genesys.com/cloud/{ORGANISATION}/{name}"
    events.create_event_bus(Name=partner)
    yield {"OrganizationId": ORGANISATION, "EventSourceSuffix": name}
    for rule in events.list_rules(EventBusName=partner)["Rules"]:
        named = {"EventBusName": partner, "Rule": rule["Name"]}
        ids = [one["Id"] for one in events.list_targets_by_rule(**named)["Targets"]]
        events.remove_targets(**named, Ids=ids)
        events.delete_rule(EventBusName=partner, Name=rule["Name"])
    events.delete_event_bus(Name=partner)


def deploy(endpoint: str, name: str, text: str, parameters: dict[str, str]) -> dict[str, str]:
    """Make a stack, and give its outputs."""
    cloudformation = client(endpoint, "cloudformation")
    cloudformation.create_stack(
        StackName=name,
        TemplateBody=text,
        Capabilities=["CAPABILITY_IAM"],
        Parameters=[
            {"ParameterKey": key, "ParameterValue": value}
            for key, value in ({"Name": name} | parameters).items()
        ],
    )
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        (found,) = cloudformation.describe_stacks(StackName=name)["Stacks"]
        if not found["StackStatus"].endswith("IN_PROGRESS"):
            break
        time.sleep(0.05)
    assert found["StackStatus"] == "CREATE_COMPLETE", found
    finish_table(endpoint, name, Stack(text, Name=name, **parameters).resources["Table"])
    return {one["OutputKey"]: one["OutputValue"] for one in found["Outputs"]}


def finish_table(endpoint: str, name: str, wanted: dict[str, Any]) -> None:
    """Do what the template says, and the emulator's CloudFormation leaves out."""
    dynamodb = client(endpoint, "dynamodb")
    for operation, setting in (
        (dynamodb.update_time_to_live, "TimeToLiveSpecification"),
        (dynamodb.update_continuous_backups, "PointInTimeRecoverySpecification"),
    ):
        operation(TableName=name, **{setting: wanted[setting]})


def told(checkup: Checkup) -> tuple[list[Any], list[Any], set[str]]:
    return checkup.findings, checkup.not_checked, {one.subject for one in checkup.passed}


async def test_the_stack_of_the_workers(
    encrypted_aws: GuardedAws, bus: dict[str, str], name: str
) -> None:
    outputs = deploy(encrypted_aws.endpoint, name, stack("worker"), bus)
    flags = {
        "source": outputs["Source"],
        "store": outputs["Store"],
        "dead": outputs["Dead"],
        "sink": "https://crm.example.com/hooks/genesys",
        "preset": "genesys",
    }
    checkup = Checkup()
    await check_aws(load(flags=flags, environment={}), checkup, role=outputs["RoleArn"])
    partner = f"aws.partner/genesys.com/cloud/{ORGANISATION}/{name}"
    assert told(checkup) == (
        [],
        [],
        {
            "Genesys Cloud event sources",
            f"queue {name}",
            f"queue {name}-dead",
            f"queue {name}-undelivered",
            f"rights of {outputs['RoleArn']}",
            f"rule {name} ({partner})",
            f"table {name}",
            "this host's clock",
        },
    )


async def test_the_stack_of_the_function(
    encrypted_aws: GuardedAws, bus: dict[str, str], name: str
) -> None:
    s3 = client(encrypted_aws.endpoint, "s3")
    s3.create_bucket(Bucket=name)
    s3.put_object(Bucket=name, Key="code.zip", Body=b"PK\5\6" + bytes(18))
    sink = "https://crm.example.com/hooks/genesys"
    parameters = bus | {"CodeBucket": name, "CodeKey": "code.zip", "Sink": sink}
    deploy(encrypted_aws.endpoint, name, stack("lambda"), parameters)
    flags = {
        "source": "-",
        "store": f"dynamodb://{name}",
        "dead": f"sqs://{name}-dead",
        "sink": sink,
        "preset": "genesys",
    }
    checkup = Checkup()
    await check_aws(load(flags=flags, environment={}), checkup, functions=[name])
    findings, blind, subjects = told(checkup)
    assert (findings, blind) == ([], [])
    assert {f"queue {name}", f"mapping of {name} to {name}"} <= subjects
    role = client(encrypted_aws.endpoint, "lambda").get_function_configuration(FunctionName=name)
    assert f"rights of {role['Role']}" in subjects
    lambda_ = client(encrypted_aws.endpoint, "lambda")
    for mapping in lambda_.list_event_source_mappings(FunctionName=name)["EventSourceMappings"]:
        lambda_.delete_event_source_mapping(UUID=mapping["UUID"])
