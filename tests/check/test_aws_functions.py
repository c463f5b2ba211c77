"""Functions that run oncebridge, and Lambda's readers of queues and streams."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.check.aws_town import Function, Town, client, codes, destination
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.check.finding import Severity

ERROR, WARNING = Severity.ERROR, Severity.WARNING


@pytest.fixture(autouse=True)
def administrator(guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded_aws.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def town(guarded_aws: GuardedAws) -> Iterator[Town]:
    """Make a town that no worker reads: what brings a function events is found through it."""
    with Town(guarded_aws) as made:
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
    town: Town,
    given: dict[str, Any],
    timeout_s: int,
    expected: list[str],
    severity: Severity | None,
) -> None:
    function = Function(town, timeout_s=timeout_s)
    function.reads(town.arn(town.source), **given)
    checkup = await town.check(functions=[function.name])
    assert codes(checkup) == expected
    assert [finding.severity for finding in checkup.findings] == [severity] * len(expected)


async def test_workers_and_a_function_read_one_queue(town: Town) -> None:
    function = Function(town)
    function.reads(town.arn(town.source))
    del town.settings["source"]
    checkup = await town.check()
    assert codes(checkup) == ["mapping-and-worker"]
    assert f"--function {function.name}" in checkup.findings[0].fix


async def test_two_functions_read_one_queue(town: Town) -> None:
    functions = [Function(town, name) for name in ("one", "two")]
    for function in functions:
        function.reads(town.arn(town.source))
    assert codes(await town.check(functions=[functions[0].name])) == ["mapping-several"]


async def test_a_function_takes_the_dead_letters_away(town: Town) -> None:
    function = Function(town)
    function.reads(town.arn(town.dead))
    del town.settings["source"]
    assert codes(await town.check()) == ["dead-has-consumer"]


async def test_a_function_that_is_not_there(town: Town) -> None:
    assert codes(await town.check(functions=["nobody-has-made-it"])) == ["function-missing"]


async def test_a_function_that_rules_call_directly(town: Town) -> None:
    function = Function(town)
    rule = town.add_rule("direct", to=function.arn)
    town.allow(town.undelivered, town.rule, rule)
    checkup = await town.check(functions=[function.name])
    assert codes(checkup) == ["function-no-destination"]
    destination = {"OnFailure": {"Destination": town.arn(town.failed)}}
    function.lambda_.put_function_event_invoke_config(
        FunctionName=function.name, DestinationConfig=destination
    )
    assert codes(await town.check(functions=[function.name])) == []


async def test_what_a_function_reads_is_where_its_events_go(town: Town) -> None:
    function = Function(town)
    function.reads(town.arn(town.source))
    name = town.source.rpartition("/")[2]
    town.settings["sink"] = f"sqs://{name}"
    assert codes(await town.check(functions=[function.name])) == ["sink-is-source"]
    del town.settings["sink"]
    town.dead = town.source
    assert codes(await town.check(functions=[function.name])) == ["dead-is-source"]


# --- API destinations -------------------------------------------------------------------------


async def test_an_api_destination_and_its_rules(town: Town) -> None:
    name = destination(town)
    assert codes(await town.check(destinations=[name])) == []
    assert codes(await town.check(destinations=["nobody"])) == ["destination-missing"]
    town.settings["window"] = "12h"
    assert codes(await town.check(destinations=[name])) == ["window-horizon"]


async def test_an_api_destination_that_does_not_post(town: Town) -> None:
    name = destination(town, "PUT")
    assert codes(await town.check(destinations=[name])) == ["destination-unfit"]


# --- streams ----------------------------------------------------------------------------------


class Stream:
    """A stream that a rule of the town leads to."""

    def __init__(self, town: Town, **target: Any) -> None:
        self.kinesis = client(town.endpoint, "kinesis")
        self.name = f"{town.name}-stream"
        self.kinesis.create_stream(StreamName=self.name, ShardCount=1)
        self.arn = f"arn:aws:kinesis:us-east-1:{ACCOUNT}:stream/{self.name}"
        usual = {"KinesisParameters": {"PartitionKeyPath": "$.detail.id"}}
        rule = town.add_rule("stream", to=self.arn, targets=[usual | target])
        town.allow(town.undelivered, town.rule, rule)
        self.keep(96)

    def keep(self, hours: int) -> None:
        self.kinesis.increase_stream_retention_period(
            StreamName=self.name, RetentionPeriodHours=hours
        )


async def test_a_stream_that_workers_read(town: Town) -> None:
    stream = Stream(town)
    town.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await town.check()) == []
    stream.keep(200)
    assert codes(await town.check()) == ["window-horizon"]


async def test_a_stream_that_is_named_by_its_arn(town: Town) -> None:
    stream = Stream(town)
    town.settings["source"] = f"kinesis:{stream.arn}"
    assert codes(await town.check()) == []


async def test_a_stream_that_keeps_records_for_a_day(town: Town) -> None:
    stream = Stream(town)
    stream.kinesis.decrease_stream_retention_period(StreamName=stream.name, RetentionPeriodHours=24)
    town.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await town.check()) == ["kinesis-retention"]


async def test_a_stream_without_a_partition_key(town: Town) -> None:
    """It matters where order does."""
    stream = Stream(town, KinesisParameters=None)
    town.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await town.check()) == []
    town.settings |= {"preset": "genesys", "order": "entity"}
    assert codes(await town.check()) == ["kinesis-partition-key"]


async def test_a_stream_that_is_not_there(town: Town) -> None:
    town.settings["source"] = "kinesis://nobody-has-made-it"
    assert codes(await town.check()) == ["source-missing"]


async def test_a_stream_with_a_key_of_ones_own(town: Town) -> None:
    stream = Stream(town)
    stream.kinesis.start_stream_encryption(
        StreamName=stream.name, EncryptionType="KMS", KeyId="alias/oncebridge"
    )
    town.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await town.check()) == ["key-rights"]


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
    town: Town, given: dict[str, Any], expected: list[str]
) -> None:
    stream, function = Stream(town), Function(town)
    usual = {
        "StartingPosition": "TRIM_HORIZON",
        "BisectBatchOnFunctionError": True,
        "MaximumRetryAttempts": 100,
        "MaximumRecordAgeInSeconds": -1,
        "DestinationConfig": {"OnFailure": {"Destination": town.arn(town.failed)}},
    }
    function.reads(stream.arn, **(usual | given))
    assert codes(await town.check(functions=[function.name])) == expected
