"""What is advised helps and does no harm: commands are run, and it is looked at what is left."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.check.aws_account import AwsAccount, Function, client, codes, destination
from tests.check.commands import check_command
from tests.servers.aws_overlay import Answer, Asked, Forward, Overlay, overlaid
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.check.aws import check_aws
from oncebridge.check.aws.account import AwsLocation, AwsReader
from oncebridge.check.aws.commands import aws, migrate
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.feeds import Bus, EventFeed, EventFeeds
from oncebridge.check.aws.mappings import SourceMapping
from oncebridge.check.aws.overlaps import check_overlaps
from oncebridge.check.finding import Checkup, Finding
from oncebridge.service.config import load


@pytest.fixture(autouse=True)
def administrator(guarded_aws: GuardedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", guarded_aws.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture
def account(guarded_aws: GuardedAws) -> Iterator[AwsAccount]:
    with AwsAccount(guarded_aws) as made:
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


async def test_of_two_rules_the_narrow_one_is_needless(account: AwsAccount) -> None:
    """And only as far as it leads here: its other targets stay."""
    narrow = "a-narrow"  # which comes before the other
    pattern = {"source": ["com.example.orders"], "detail-type": ["order placed"]}
    other = {"Id": "elsewhere", "Arn": account.arn(account.failed)}
    rule = account.add_rule(narrow, pattern=pattern, targets=[{}, other])
    for url in (account.source, account.undelivered):
        account.allow(url, account.rule, rule)
    finding = only(await account.check(), "rules-overlap")
    assert account.follow(finding) == ["events remove-targets"]
    assert codes(await account.check()) == []
    for name, kept in ((narrow, "elsewhere"), ("rule", "oncebridge-0")):
        named = {"EventBusName": account.bus, "Rule": f"{account.name}-{name}"}
        targets = account.events.list_targets_by_rule(**named)["Targets"]
        assert [one["Id"] for one in targets] == [kept]


@pytest.mark.parametrize("is_forwarded", [False, True])
async def test_what_may_lose_events_is_no_command(
    account: AwsAccount, *, is_forwarded: bool
) -> None:
    bus, pattern = account.bus, {"detail-type": ["order placed"]}
    if is_forwarded:
        bus, pattern = f"{account.name}-second", {"source": ["com.example.orders"]}
        forward = {"Rule": "forward", "EventBusName": account.bus}
        arn = account.add_bus(bus)
        account.events.put_rule(
            Name="forward", EventBusName=account.bus, EventPattern='{"id": ["x"]}'
        )
        account.events.put_targets(**forward, Targets=[{"Id": "bus", "Arn": arn}])
    rule = account.add_rule("second", bus=bus, pattern=pattern)
    for url in (account.source, account.undelivered):
        account.allow(url, account.rule, rule)
    finding = only(await account.check(), "rules-overlap")
    assert "aws " not in finding.fix


async def test_one_command_has_all_changes_of_a_target(account: AwsAccount) -> None:
    account.retarget(
        RetryPolicy={"MaximumRetryAttempts": 0}, DeadLetterConfig=None, InputPath="$.detail"
    )
    checkup = await account.check()
    assert codes(checkup) == ["rule-no-dead-letters", "rule-retries", "target-input"]
    commands = {
        line for one in checkup.findings for line in one.fix.splitlines() if line[:4] == "aws "
    }
    assert len(commands) == 1
    account.follow(checkup.findings[0], **{"QUEUE-ARN": account.arn(account.undelivered)})
    assert codes(await account.check()) == []


async def test_what_a_target_sends_along_is_not_shown(account: AwsAccount) -> None:
    name = destination(account)
    secret = "invented-key-of-somebody"
    listed = account.events.list_targets_by_rule(
        Rule=f"{account.name}-api", EventBusName=account.bus
    )
    (target,) = listed["Targets"]
    del target["DeadLetterConfig"]
    target["HttpParameters"] = {"HeaderParameters": {"x-api-key": secret}}
    account.events.put_targets(
        Rule=f"{account.name}-api", EventBusName=account.bus, Targets=[target]
    )
    account.settings["source"] = "-"
    checkup = await account.check(destinations=[name])
    assert codes(checkup) == ["rule-no-dead-letters"]
    assert secret not in "".join(map(repr, (checkup.findings, checkup.passed, checkup.not_checked)))
    listed, added, put = checkup.findings[0].fix.splitlines()[1:]
    assert listed.endswith("> target.json")
    assert added == 'add to it: "DeadLetterConfig": {"Arn": "QUEUE-ARN"}'
    assert put.endswith("--targets file://target.json")
    account.retarget(Input=json.dumps({"key": secret}))
    del account.settings["source"]
    checkup = await account.check()
    assert secret not in "".join(map(repr, (checkup.findings, checkup.passed, checkup.not_checked)))
    account.follow(only(checkup, "target-input"))
    assert codes(await account.check()) == []


async def test_a_short_window_is_no_reason_to_keep_less(account: AwsAccount) -> None:
    account.settings["window"] = "2d"
    finding = only(await account.check(), "window-horizon")
    assert finding.fix == 'Use a longer window, with a day to spare:\nwindow = "5d"'


async def test_one_rule_feeds_two_sources(account: AwsAccount, tmp_path: Path) -> None:
    second = account.queue("second", MessageRetentionPeriod="345600")
    redrive = {"deadLetterTargetArn": account.arn(account.failed), "maxReceiveCount": "100"}
    account.set(second, RedrivePolicy=json.dumps(redrive))
    account.allow(second, account.rule)
    account.add_rule("rule", targets=[{}, {"Arn": account.arn(second)}])
    flags = account.flags()
    file = tmp_path / "it.toml"
    file.write_text(f'source = ["{flags.pop("source")}", "sqs://{account.name}-second"]\n')
    checkup = Checkup()
    await check_aws(load(file, environment={}, flags=flags), checkup)
    assert codes(checkup) == ["target-twice"]
    assert f"to queue {account.name}-in and queue {account.name}-second" in checkup.findings[0].seen


async def test_a_queue_and_a_rule_bring_a_function_the_same(account: AwsAccount) -> None:
    function = Function(account)
    function.reads(account.arn(account.source))
    rule = account.add_rule("direct", to=function.arn)
    account.allow(account.undelivered, account.rule, rule)
    account.settings["source"] = "-"
    function.lambda_.put_function_event_invoke_config(
        FunctionName=function.name,
        DestinationConfig={"OnFailure": {"Destination": account.arn(account.failed)}},
    )
    checkup = await account.check(functions=[function.name])
    assert codes(checkup) == ["rules-overlap"]
    assert checkup.findings[0].subject == f"function {function.name} and queue {account.name}-in"
    assert "aws " not in checkup.findings[0].fix


def feed(at: int) -> EventFeed:
    return EventFeed(
        bus=Bus("default", "arn"),
        rule=f"rule-{at}",
        rule_arn=f"arn-{at}",
        pattern={"source": [f"com.example.{at}"]},
        is_scheduled=False,
        is_enabled=True,
        target={"Id": "it"},
        to="queue in",
        where=AwsLocation(),
    )


async def test_a_rule_is_not_needless_beside_one_that_spoils_events(account: AwsAccount) -> None:
    account.retarget(InputPath="$.detail.eventBody")
    rule = account.add_rule("whole", pattern={"source": ["com.example.orders"], "id": ["x"]})
    for url in (account.source, account.undelivered):
        account.allow(url, account.rule, rule)
    checkup = await account.check()
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
    context = AwsContext(load(flags=flags, environment={}), checkup, AwsReader())
    counting = asyncio.ensure_future(count())
    await check_overlaps(
        context, [EventFeeds(tuple(map(feed, range(150))), is_sure=True, to="queue in")]
    )
    counting.cancel()
    assert [one.what for one in checkup.passed] == ["no two rules send the same events"]
    assert turns > 20  # of 11,175 pairs


# --- Lambda -----------------------------------------------------------------------------------


async def test_a_mapping_that_was_turned_off_is_left_alone(account: AwsAccount) -> None:
    function = Function(account)
    function.reads(account.arn(account.source), FunctionResponseTypes=[])
    checkup = await account.check()
    assert codes(checkup) == ["mapping-and-worker"]
    assert account.follow(checkup.findings[0]) == ["lambda update-event-source-mapping"]
    assert codes(await account.check()) == []


@pytest.mark.parametrize(
    ("state", "is_enabled"),
    [
        *[(state, True) for state in ("Creating", "Enabled", "Enabling", "Updating")],
        *[(state, False) for state in ("Disabled", "Disabling", "Deleting")],
    ],
)
def test_the_state_of_a_mapping(state: str, *, is_enabled: bool) -> None:
    assert SourceMapping({"State": state}, AwsLocation()).is_enabled is is_enabled


async def test_the_mapping_of_another_function_is_the_one_to_go(account: AwsAccount) -> None:
    names = ("intruder", "own")
    functions = {name: Function(account, name) for name in names}
    for function in functions.values():
        function.reads(account.arn(account.source))
    account.settings["source"] = "-"
    own = functions["own"].name
    finding = only(await account.check(functions=[own]), "mapping-several")
    uuid = account.mappings.pop(names.index("intruder"))
    assert f"--uuid {uuid}" in finding.fix
    assert account.follow(finding) == ["lambda delete-event-source-mapping"]
    assert codes(await account.check(functions=[own])) == []


async def test_who_takes_dead_letters_away_is_who_does(account: AwsAccount) -> None:
    for name, is_on in (("off", False), ("on", True)):
        Function(account, name).reads(account.arn(account.dead), Enabled=is_on)
    finding = only(await account.check(), "dead-has-consumer")
    assert finding.seen == f"Lambda reads it for {account.name}-on"
    account.follow(finding)
    assert codes(await account.check()) == []


async def test_a_failure_destination_is_added_to_what_there_is(account: AwsAccount) -> None:
    function = Function(account)
    rule = account.add_rule("direct", to=function.arn)
    account.allow(account.undelivered, account.rule, rule)
    success = {"OnSuccess": {"Destination": account.arn(account.dead)}}
    failure = {"OnFailure": {"Destination": "QUEUE-ARN"}}
    account.settings["source"] = "-"

    async def advised() -> tuple[str, dict[str, Any]]:
        finding = only(await account.check(functions=[function.name]), "function-no-destination")
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
    """A stream of the account that a rule leads to."""

    def __init__(self, account: AwsAccount) -> None:
        kinesis = client(account.endpoint, "kinesis")
        self.name = f"{account.name}-stream"
        self.arn = f"arn:aws:kinesis:us-east-1:{ACCOUNT}:stream/{self.name}"
        kinesis.create_stream(StreamName=self.name, ShardCount=1)
        kinesis.increase_stream_retention_period(StreamName=self.name, RetentionPeriodHours=96)
        rule = account.add_rule("stream", to=self.arn, pattern={"source": ["com.example.stream"]})
        account.allow(account.undelivered, account.rule, rule)


_READING: dict[str, Any] = {
    "StartingPosition": "TRIM_HORIZON",
    "BisectBatchOnFunctionError": True,
    "MaximumRetryAttempts": 100,
    "MaximumRecordAgeInSeconds": -1,
}


async def test_who_else_reads_a_stream_is_no_concern_of_workers(account: AwsAccount) -> None:
    stream = Stream(account)
    Function(account).reads(stream.arn, StartingPosition="LATEST", FunctionResponseTypes=[])
    account.settings["source"] = f"kinesis://{stream.name}"
    assert codes(await account.check()) == []


async def test_a_function_with_a_consumer_of_its_own(account: AwsAccount, overlay: Overlay) -> None:
    stream, function = Stream(account), Function(account)
    failed = {"OnFailure": {"Destination": account.arn(account.failed)}}
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
    account.settings["source"] = "-"
    checkup = await account.check(functions=[function.name])
    assert codes(checkup) == []
    subjects = {one.subject for one in checkup.passed}
    assert {f"stream {stream.name}", f"mapping of {stream.name} to {function.name}"} <= subjects
    assert asked == [{"StreamARN": stream.arn}]  # which may be another account's


async def test_a_failure_destination_is_kept(account: AwsAccount) -> None:
    stream, function = Stream(account), Function(account)
    failed = {"OnFailure": {"Destination": account.arn(account.failed)}}
    reading = _READING | {"MaximumRetryAttempts": -1}
    function.reads(stream.arn, **reading, DestinationConfig=failed)
    account.settings["source"] = "-"
    finding = only(await account.check(functions=[function.name]), "mapping-blocks-shard")
    assert json.dumps(failed) in finding.fix
    account.follow(finding)
    assert codes(await account.check(functions=[function.name])) == []


# --- commands ---------------------------------------------------------------------------------


async def test_commands_are_for_the_region_of_the_address(account: AwsAccount) -> None:
    account.source = account.queue("bare", MessageRetentionPeriod="345600")
    account.allow(account.source, account.rule)
    account.retarget(DeadLetterConfig=None)
    account.table = account.add_table(DeletionProtectionEnabled=False)
    account.settings["source"] = f"sqs://{account.source.rpartition('/')[2]}?region=us-east-1"
    account.settings["store"] = f"dynamodb://{account.table}?region=us-east-1"
    checkup = await account.check()
    assert codes(checkup) == ["dynamodb-deletion", "rule-no-dead-letters", "sqs-no-redrive"]
    for finding in checkup.findings:
        lines = [line for line in finding.fix.splitlines() if line.startswith("aws ")]
        assert lines
        assert all(line.endswith(" --region us-east-1") for line in lines)


def test_words_of_a_command_are_safe_in_a_shell() -> None:
    where = AwsLocation("eu-west-1", "my own", "http://127.0.0.1:1", "sqs")
    assert aws(where, "sqs", "create-queue", "--queue-name", "$(reboot)") == (
        "aws sqs create-queue --queue-name '$(reboot)' --region eu-west-1 --profile 'my own' "
        "--endpoint-url http://127.0.0.1:1"
    )
    assert "endpoint" not in aws(where, "events", "list-rules")
    assert aws(AwsLocation(), "events", "list-rules") == "aws events list-rules"
    assert migrate(where, "dynamodb", "it") == (
        "oncebridge migrate --store 'dynamodb://it?region=eu-west-1'"
    )
