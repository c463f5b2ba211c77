"""Functions that run oncebridge, and Lambda's readers of queues and streams."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.check.aws_account import AwsAccount, Function, client, codes, destination
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.check.finding import Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING


@pytest.fixture(autouse=True)
def administrator(guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded_aws.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def account(guarded_aws: GuardedAws) -> Iterator[AwsAccount]:
    """Make a account that no worker reads: what brings a function events is found through it."""
    with AwsAccount(guarded_aws) as made:
        made.settings["source"] = "-"
        yield made


@pytest.mark.parametrize(
    ("given", "timeout_s", "expected", "severity"),
    [
        ({}, 20, [], None),
        ({"FunctionResponseTypes": []}, 20, ["mapping-batch-failures"], ERROR),
        ({}, 21, ["sqs-visibility"], WARNING),
        ({}, 121, ["sqs-visibility"], ERROR),
        ({"MaximumBatchingWindowInSeconds": 5}, 20, ["sqs-visibility"], WARNING),
        ({"Enabled": False}, 20, ["mapping-disabled"], WARNING),
        (
            {"FilterCriteria": {"Filters": [{"Pattern": "{}"}]}},
            20,
            ["mapping-filter"],
            Severity.NOTE,
        ),
    ],
)
async def test_a_function_that_reads_a_queue(
    account: AwsAccount,
    given: dict[str, Any],
    timeout_s: int,
    expected: list[str],
    severity: Severity | None,
) -> None:
    function = Function(account, timeout_s=timeout_s)
    function.reads(account.arn(account.source), **given)
    checkup = await account.check(functions=[function.name])
    assert codes(checkup) == expected
    assert [finding.severity for finding in checkup.findings] == [severity] * len(expected)


async def test_workers_and_a_function_read_one_queue(account: AwsAccount) -> None:
    function = Function(account)
    function.reads(account.arn(account.source))
    del account.settings["source"]
    checkup = await account.check()
    assert codes(checkup) == ["mapping-and-worker"]
    assert f"--function {function.name}" in checkup.findings[0].fix


async def test_two_functions_read_one_queue(account: AwsAccount) -> None:
    functions = [Function(account, name) for name in ("one", "two")]
    for function in functions:
        function.reads(account.arn(account.source))
    assert codes(await account.check(functions=[functions[0].name])) == ["mapping-several"]


async def test_a_function_takes_the_dead_letters_away(account: AwsAccount) -> None:
    function = Function(account)
    function.reads(account.arn(account.dead))
    del account.settings["source"]
    assert codes(await account.check()) == ["dead-has-consumer"]


async def test_a_function_that_is_not_there(account: AwsAccount) -> None:
    assert codes(await account.check(functions=["nobody-has-made-it"])) == ["function-missing"]


async def test_a_function_that_rules_call_directly(account: AwsAccount) -> None:
    function = Function(account)
    rule = account.add_rule("direct", to=function.arn)
    account.allow(account.undelivered, account.rule, rule)
    checkup = await account.check(functions=[function.name])
    assert codes(checkup) == ["function-no-destination"]
    destination = {"OnFailure": {"Destination": account.arn(account.failed)}}
    function.lambda_.put_function_event_invoke_config(
        FunctionName=function.name, DestinationConfig=destination
    )
    assert codes(await account.check(functions=[function.name])) == []


async def test_what_a_function_reads_is_where_its_events_go(account: AwsAccount) -> None:
    function = Function(account)
    function.reads(account.arn(account.source))
    name = account.source.rpartition("/")[2]
    account.settings["sink"] = f"sqs://{name}"
    assert codes(await account.check(functions=[function.name])) == ["sink-is-source"]
    del account.settings["sink"]
    account.dead = account.source
    assert codes(await account.check(functions=[function.name])) == ["dead-is-source"]


# --- API destinations -------------------------------------------------------------------------


async def test_an_api_destination_and_its_rules(account: AwsAccount) -> None:
    name = destination(account)
    assert codes(await account.check(destinations=[name])) == []
    assert codes(await account.check(destinations=["nobody"])) == ["destination-missing"]
    account.settings["window"] = "12h"
    assert codes(await account.check(destinations=[name])) == ["window-horizon"]


async def test_an_api_destination_that_does_not_post(account: AwsAccount) -> None:
    name = destination(account, "PUT")
    assert codes(await account.check(destinations=[name])) == ["destination-unfit"]


# --- streams ----------------------------------------------------------------------------------


class Stream:
    """A stream that a rule of the account leads to."""

    def __init__(self, account: AwsAccount, **target: Any) -> None:
        self.kinesis = client(account.endpoint, "kinesis")
        self.name = f"{account.name}-stream"
        self.kinesis.create_stream(StreamName=self.name, ShardCount=1)
        self.arn = f"arn:aws:kinesis:us-east-1:{ACCOUNT}:stream/{self.name}"
        usual = {"KinesisParameters": {"PartitionKeyPath": "$.detail.id"}}
        rule = account.add_rule("stream", to=self.arn, targets=[usual | target])
        account.allow(account.undelivered, account.rule, rule)
        self.keep(96)

    def keep(self, hours: int) -> None:
        self.kinesis.increase_stream_retention_period(
            StreamName=self.name, RetentionPeriodHours=hours
        )


async def test_a_stream_that_workers_read(account: AwsAccount) -> None:
    stream = Stream(account)
    account.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await account.check()) == []
    stream.keep(200)
    assert codes(await account.check()) == ["window-horizon"]


async def test_a_stream_that_is_named_by_its_arn(account: AwsAccount) -> None:
    stream = Stream(account)
    account.settings["source"] = f"kinesis:{stream.arn}"
    assert codes(await account.check()) == []


async def test_a_stream_that_keeps_records_for_a_day(account: AwsAccount) -> None:
    stream = Stream(account)
    stream.kinesis.decrease_stream_retention_period(StreamName=stream.name, RetentionPeriodHours=24)
    account.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await account.check()) == ["kinesis-retention"]


async def test_a_stream_without_a_partition_key(account: AwsAccount) -> None:
    """It matters where order does."""
    stream = Stream(account, KinesisParameters=None)
    account.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await account.check()) == []
    account.settings |= {"preset": "genesys", "order": "entity"}
    assert codes(await account.check()) == ["kinesis-partition-key"]


async def test_a_stream_that_is_not_there(account: AwsAccount) -> None:
    account.settings["source"] = "kinesis://nobody-has-made-it"
    assert codes(await account.check()) == ["source-missing"]


async def test_a_stream_with_a_key_of_ones_own(account: AwsAccount) -> None:
    stream = Stream(account)
    stream.kinesis.start_stream_encryption(
        StreamName=stream.name, EncryptionType="KMS", KeyId="alias/oncebridge"
    )
    account.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await account.check()) == ["key-rights"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"FunctionResponseTypes": []}, ["mapping-batch-failures"]),
        ({"BisectBatchOnFunctionError": False}, ["mapping-bisect"]),
        (
            {"MaximumRetryAttempts": -1, "DestinationConfig": {}},
            ["mapping-blocks-shard"],
        ),
        ({"DestinationConfig": {}}, ["mapping-no-destination"]),
    ],
)
async def test_a_function_that_reads_a_stream(
    account: AwsAccount, given: dict[str, Any], expected: list[str]
) -> None:
    stream, function = Stream(account), Function(account)
    usual = {
        "StartingPosition": "TRIM_HORIZON",
        "BisectBatchOnFunctionError": True,
        "MaximumRetryAttempts": 100,
        "MaximumRecordAgeInSeconds": -1,
        "DestinationConfig": {"OnFailure": {"Destination": account.arn(account.failed)}},
    }
    function.reads(stream.arn, **(usual | given))
    assert codes(await account.check(functions=[function.name])) == expected
