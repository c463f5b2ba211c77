"""What is advised helps and does no harm: commands are run, and it is looked at what is left."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.check.aws_town import Function, Town, client, codes, destination
from tests.check.commands import check_command
from tests.servers.aws_overlay import Answer, Asked, Forward, Overlay, overlaid
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.check.aws import check_aws
from oncebridge.check.aws.account import Reader, Where
from oncebridge.check.aws.commands import aws, migrate
from oncebridge.check.aws.context import Visit
from oncebridge.check.aws.feeds import Bus, Feed, Feeds
from oncebridge.check.aws.mappings import SourceMapping
from oncebridge.check.aws.overlaps import check_twice
from oncebridge.check.finding import Checkup, Finding
from oncebridge.service.config import load


@pytest.fixture(autouse=True)
def administrator(guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded_aws.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def town(guarded_aws: GuardedAws) -> Iterator[Town]:
    with Town(guarded_aws) as made:
        yield made


@pytest.fixture
def overlay(guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> Iterator[Overlay]:
    with overlaid(guarded_aws.endpoint) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


def only(checkup: Checkup, code: str) -> Finding:
    (found,) = [finding for finding in checkup.findings if finding.code == code]
    return found


# --- rules ------------------------------------------------------------------------------------


async def test_of_two_rules_the_narrow_one_is_needless(town: Town) -> None:
    """And only as far as it leads here: its other targets stay."""
    narrow = "a-narrow"  # which comes before the other
    pattern = {"source": ["com.example.orders"], "detail-type": ["order placed"]}
    other = {"Id": "elsewhere", "Arn": town.arn(town.failed)}
    rule = town.add_rule(narrow, pattern=pattern, targets=[{}, other])
    for url in (town.source, town.undelivered):
        town.allow(url, town.rule, rule)
    finding = only(await town.check(), "rules-overlap")
    assert town.follow(finding) == ["events remove-targets"]
    assert codes(await town.check()) == []
    for name, kept in ((narrow, "elsewhere"), ("rule", "oncebridge-0")):
        named = {"EventBusName": town.bus, "Rule": f"{town.name}-{name}"}
        targets = town.events.list_targets_by_rule(**named)["Targets"]
        assert [one["Id"] for one in targets] == [kept]


@pytest.mark.parametrize("is_forwarded", [False, True])
async def test_what_may_lose_events_is_no_command(town: Town, *, is_forwarded: bool) -> None:
    bus, pattern = town.bus, {"detail-type": ["order placed"]}
    if is_forwarded:
        bus, pattern = f"{town.name}-second", {"source": ["com.example.orders"]}
        forward = {"Rule": "forward", "EventBusName": town.bus}
        arn = town.add_bus(bus)
        town.events.put_rule(Name="forward", EventBusName=town.bus, EventPattern='{"id": ["x"]}')
        town.events.put_targets(**forward, Targets=[{"Id": "bus", "Arn": arn}])
    rule = town.add_rule("second", bus=bus, pattern=pattern)
    for url in (town.source, town.undelivered):
        town.allow(url, town.rule, rule)
    finding = only(await town.check(), "rules-overlap")
    assert "aws " not in finding.fix


async def test_one_command_has_all_changes_of_a_target(town: Town) -> None:
    town.retarget(
        RetryPolicy={"MaximumRetryAttempts": 0}, DeadLetterConfig=None, InputPath="$.detail"
    )
    checkup = await town.check()
    assert codes(checkup) == ["rule-no-dead-letters", "rule-retries", "target-input"]
    commands = {
        line for one in checkup.findings for line in one.fix.splitlines() if line[:4] == "aws "
    }
    assert len(commands) == 1
    town.follow(checkup.findings[0], **{"QUEUE-ARN": town.arn(town.undelivered)})
    assert codes(await town.check()) == []


async def test_what_a_target_sends_along_is_not_shown(town: Town) -> None:
    name = destination(town)
    secret = "invented-key-of-somebody"
    listed = town.events.list_targets_by_rule(Rule=f"{town.name}-api", EventBusName=town.bus)
    (target,) = listed["Targets"]
    del target["DeadLetterConfig"]
    target["HttpParameters"] = {"HeaderParameters": {"x-api-key": secret}}
    town.events.put_targets(Rule=f"{town.name}-api", EventBusName=town.bus, Targets=[target])
    town.settings["source"] = "-"
    checkup = await town.check(destinations=[name])
    assert codes(checkup) == ["rule-no-dead-letters"]
    assert secret not in "".join(map(repr, (checkup.findings, checkup.passed, checkup.blind)))
    listed, put_into, put = checkup.findings[0].fix.splitlines()[1:]
    assert listed.endswith("> target.json")
    assert put_into == 'put into it: "DeadLetterConfig": {"Arn": "QUEUE-ARN"}'
    assert put.endswith("--targets file://target.json")
    town.retarget(Input=json.dumps({"key": secret}))
    del town.settings["source"]
    checkup = await town.check()
    assert secret not in "".join(map(repr, (checkup.findings, checkup.passed, checkup.blind)))
    town.follow(only(checkup, "target-input"))
    assert codes(await town.check()) == []


async def test_a_short_window_is_no_reason_to_keep_less(town: Town) -> None:
    town.settings["window"] = "2d"
    finding = only(await town.check(), "window-horizon")
    assert finding.fix == 'Remember for longer, with a day to spare:\nwindow = "5d"'


async def test_one_rule_feeds_two_sources(town: Town, tmp_path: Path) -> None:
    second = town.queue("second", MessageRetentionPeriod="345600")
    redrive = {"deadLetterTargetArn": town.arn(town.failed), "maxReceiveCount": "100"}
    town.set(second, RedrivePolicy=json.dumps(redrive))
    town.allow(second, town.rule)
    town.add_rule("rule", targets=[{}, {"Arn": town.arn(second)}])
    flags = town.flags()
    file = tmp_path / "it.toml"
    file.write_text(f'source = ["{flags.pop("source")}", "sqs://{town.name}-second"]\n')
    checkup = Checkup()
    await check_aws(load(file, environment={}, flags=flags), checkup)
    assert codes(checkup) == ["target-twice"]
    assert f"to queue {town.name}-in and queue {town.name}-second" in checkup.findings[0].seen


async def test_a_queue_and_a_rule_bring_a_function_the_same(town: Town) -> None:
    function = Function(town)
    function.reads(town.arn(town.source))
    rule = town.add_rule("direct", to=function.arn)
    town.allow(town.undelivered, town.rule, rule)
    town.settings["source"] = "-"
    function.lambda_.put_function_event_invoke_config(
        FunctionName=function.name,
        DestinationConfig={"OnFailure": {"Destination": town.arn(town.failed)}},
    )
    checkup = await town.check(functions=[function.name])
    assert codes(checkup) == ["rules-overlap"]
    assert checkup.findings[0].subject == f"function {function.name} and queue {town.name}-in"
    assert "aws " not in checkup.findings[0].fix


def feed(at: int) -> Feed:
    return Feed(
        bus=Bus("default", "arn"),
        rule=f"rule-{at}",
        rule_arn=f"arn-{at}",
        pattern={"source": [f"com.example.{at}"]},
        is_scheduled=False,
        is_enabled=True,
        target={"Id": "it"},
        to="queue in",
        where=Where(),
    )


async def test_a_rule_is_not_needless_beside_one_that_spoils_events(town: Town) -> None:
    town.retarget(InputPath="$.detail.eventBody")
    rule = town.add_rule("whole", pattern={"source": ["com.example.orders"], "id": ["x"]})
    for url in (town.source, town.undelivered):
        town.allow(url, town.rule, rule)
    checkup = await town.check()
    assert codes(checkup) == ["rules-overlap", "target-input"]
    assert "aws " not in only(checkup, "rules-overlap").fix


async def test_others_have_their_turn_while_many_rules_are_compared() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    checkup = Checkup()
    flags = {"source": "-", "store": "memory:", "sink": "-", "dead": "memory:"}
    visit = Visit(load(flags=flags, environment={}), checkup, Reader())
    counting = asyncio.ensure_future(count())
    await check_twice(visit, [Feeds(tuple(map(feed, range(150))), is_sure=True, to="queue in")])
    counting.cancel()
    assert [one.what for one in checkup.passed] == ["no two rules bring the same events"]
    assert turns > 20  # of 11,175 pairs


# --- Lambda -----------------------------------------------------------------------------------


async def test_a_mapping_that_was_turned_off_is_left_alone(town: Town) -> None:
    function = Function(town)
    function.reads(town.arn(town.source), FunctionResponseTypes=[])
    checkup = await town.check()
    assert codes(checkup) == ["mapping-and-worker"]
    assert town.follow(checkup.findings[0]) == ["lambda update-event-source-mapping"]
    assert codes(await town.check()) == []


@pytest.mark.parametrize(
    ("state", "is_enabled"),
    [
        *[(state, True) for state in ("Creating", "Enabled", "Enabling", "Updating")],
        *[(state, False) for state in ("Disabled", "Disabling", "Deleting")],
    ],
)
def test_the_state_of_a_mapping(state: str, *, is_enabled: bool) -> None:
    assert SourceMapping({"State": state}, Where()).is_enabled is is_enabled


async def test_the_mapping_of_another_function_is_the_one_to_go(town: Town) -> None:
    names = ("intruder", "own")
    functions = {name: Function(town, name) for name in names}
    for function in functions.values():
        function.reads(town.arn(town.source))
    town.settings["source"] = "-"
    own = functions["own"].name
    finding = only(await town.check(functions=[own]), "mapping-several")
    uuid = town.mappings.pop(names.index("intruder"))
    assert f"--uuid {uuid}" in finding.fix
    assert town.follow(finding) == ["lambda delete-event-source-mapping"]
    assert codes(await town.check(functions=[own])) == []


async def test_who_takes_dead_letters_away_is_who_does(town: Town) -> None:
    for name, is_on in (("off", False), ("on", True)):
        Function(town, name).reads(town.arn(town.dead), Enabled=is_on)
    finding = only(await town.check(), "dead-has-consumer")
    assert finding.seen == f"Lambda reads it for {town.name}-on"
    town.follow(finding)
    assert codes(await town.check()) == []


async def test_a_failure_destination_is_added_to_what_there_is(town: Town) -> None:
    function = Function(town)
    rule = town.add_rule("direct", to=function.arn)
    town.allow(town.undelivered, town.rule, rule)
    success = {"OnSuccess": {"Destination": town.arn(town.dead)}}
    failure = {"OnFailure": {"Destination": "QUEUE-ARN"}}
    town.settings["source"] = "-"

    async def advised() -> tuple[str, dict[str, Any]]:
        finding = only(await town.check(functions=[function.name]), "function-no-destination")
        called = check_command(finding.fix.splitlines()[-1])
        assert called is not None
        return called[1], called[2]["DestinationConfig"]

    assert await advised() == ("put_function_event_invoke_config", failure)
    function.lambda_.put_function_event_invoke_config(
        FunctionName=function.name, MaximumRetryAttempts=1, DestinationConfig=success
    )
    # To put it would take the attempts away.
    assert await advised() == ("update_function_event_invoke_config", success | failure)


# --- streams ----------------------------------------------------------------------------------


class Stream:
    """A stream of the town that a rule leads to."""

    def __init__(self, town: Town) -> None:
        kinesis = client(town.endpoint, "kinesis")
        self.name = f"{town.name}-stream"
        self.arn = f"arn:aws:kinesis:us-east-1:{ACCOUNT}:stream/{self.name}"
        kinesis.create_stream(StreamName=self.name, ShardCount=1)
        kinesis.increase_stream_retention_period(StreamName=self.name, RetentionPeriodHours=96)
        rule = town.add_rule("stream", to=self.arn, pattern={"source": ["com.example.stream"]})
        town.allow(town.undelivered, town.rule, rule)


_READING: dict[str, Any] = {
    "StartingPosition": "TRIM_HORIZON",
    "BisectBatchOnFunctionError": True,
    "MaximumRetryAttempts": 100,
    "MaximumRecordAgeInSeconds": -1,
}


async def test_who_else_reads_a_stream_is_no_concern_of_workers(town: Town) -> None:
    stream = Stream(town)
    Function(town).reads(stream.arn, StartingPosition="LATEST", FunctionResponseTypes=[])
    town.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await town.check()) == []


async def test_a_function_with_a_consumer_of_its_own(town: Town, overlay: Overlay) -> None:
    stream, function = Stream(town), Function(town)
    failed = {"OnFailure": {"Destination": town.arn(town.failed)}}
    function.reads(stream.arn, **_READING, DestinationConfig=failed)
    asked: list[Asked] = []

    def consumer(_: Asked, forward: Forward) -> Answer:
        status, body = forward()
        arn = f"{stream.arn}/consumer/own:1700000000"
        return status, body.replace(f'"{stream.arn}"'.encode(), f'"{arn}"'.encode())

    def described(question: Asked, forward: Forward) -> Answer:
        asked.append(question)
        return forward()

    overlay.changes["lambda:ListEventSourceMappings"] = consumer
    overlay.changes["kinesis:DescribeStreamSummary"] = described
    town.settings["source"] = "-"
    checkup = await town.check(functions=[function.name])
    assert codes(checkup) == []
    subjects = {one.subject for one in checkup.passed}
    assert {f"stream {stream.name}", f"mapping of {stream.name} to {function.name}"} <= subjects
    assert asked == [{"StreamARN": stream.arn}]  # which may be another account's


async def test_a_failure_destination_is_kept(town: Town) -> None:
    stream, function = Stream(town), Function(town)
    failed = {"OnFailure": {"Destination": town.arn(town.failed)}}
    reading = _READING | {"MaximumRetryAttempts": -1}
    function.reads(stream.arn, **reading, DestinationConfig=failed)
    town.settings["source"] = "-"
    finding = only(await town.check(functions=[function.name]), "mapping-blocks-shard")
    assert json.dumps(failed) in finding.fix
    town.follow(finding)
    assert codes(await town.check(functions=[function.name])) == []


# --- commands ---------------------------------------------------------------------------------


async def test_commands_are_for_the_region_of_the_address(town: Town) -> None:
    town.source = town.queue("bare", MessageRetentionPeriod="345600")
    town.allow(town.source, town.rule)
    town.retarget(DeadLetterConfig=None)
    town.table = town.add_table(DeletionProtectionEnabled=False)
    town.settings["source"] = f"sqs://{town.source.rpartition('/')[2]}?region=us-east-1"
    town.settings["store"] = f"dynamodb://{town.table}?region=us-east-1"
    checkup = await town.check()
    assert codes(checkup) == ["dynamodb-deletion", "rule-no-dead-letters", "sqs-no-redrive"]
    for finding in checkup.findings:
        lines = [line for line in finding.fix.splitlines() if line.startswith("aws ")]
        assert lines
        assert all(line.endswith(" --region us-east-1") for line in lines)


def test_words_of_a_command_are_safe_in_a_shell() -> None:
    where = Where("eu-west-1", "my own", "http://127.0.0.1:1", "sqs")
    assert aws(where, "sqs", "create-queue", "--queue-name", "$(reboot)") == (
        "aws sqs create-queue --queue-name '$(reboot)' --region eu-west-1 --profile 'my own' "
        "--endpoint-url http://127.0.0.1:1"
    )
    assert "endpoint" not in aws(where, "events", "list-rules")
    assert aws(Where(), "events", "list-rules") == "aws events list-rules"
    assert migrate(where, "dynamodb", "it") == (
        "oncebridge migrate --store 'dynamodb://it?region=eu-west-1'"
    )
