"""Each fault, planted in a set-up that is in order otherwise, is found, and nothing else is."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.check.aws_town import ORGANISATION, Town, codes
from tests.servers.guarded_aws import ACCOUNT, GuardedAws

from oncebridge.check.finding import Severity

PARTNER = f"aws.partner/genesys.com/cloud/{ORGANISATION}"
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


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
def fifo_town(guarded_aws: GuardedAws) -> Iterator[Town]:
    with Town(guarded_aws, fifo=True) as made:
        yield made


Plant = Callable[[Town], Any]


def genesys_detail(town: Town) -> None:
    settings(preset="genesys", window="6d")(town)
    target(InputPath="$.detail")(town)


def settings(**given: str) -> Plant:
    return lambda town: town.settings.update(given)


def queue(which: str, **attributes: str) -> Plant:
    return lambda town: town.set(getattr(town, which), **attributes)


def target(**changes: Any) -> Plant:
    return lambda town: town.retarget(**changes)


def redrive(receives: int = 100, to: str = "failed") -> Plant:
    def plant(town: Town) -> None:
        arn = town.arn(getattr(town, to)) if hasattr(town, to) else town.arn(f"/{to}")
        policy = {"deadLetterTargetArn": arn, "maxReceiveCount": str(receives)}
        town.set(town.source, RedrivePolicy=json.dumps(policy))

    return plant


def no_redrive(town: Town) -> None:
    town.source = town.queue("bare", MessageRetentionPeriod="345600")
    town.allow(town.source, town.rule)
    town.retarget()


def redrive_to_nowhere(town: Town) -> None:
    town.sqs.delete_queue(QueueUrl=town.failed)


def dead_with_redrive(town: Town) -> None:
    policy = {"deadLetterTargetArn": town.arn(town.failed), "maxReceiveCount": "5"}
    town.set(town.dead, RedrivePolicy=json.dumps(policy))


def open_door(town: Town) -> None:
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "sqs:*", "Resource": "*"}
    told = town.sqs.get_queue_attributes(QueueUrl=town.source, AttributeNames=["Policy"])
    policy = json.loads(told["Attributes"]["Policy"])
    policy["Statement"].append(everybody)
    town.set(town.source, Policy=json.dumps(policy))


def closed_door(town: Town) -> None:
    town.allow(town.source, f"arn:aws:events:us-east-1:{ACCOUNT}:rule/another")


def unclear_door(town: Town) -> None:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": town.arn(town.source),
        "Condition": {"StringEquals": {"aws:PrincipalOrgID": "o-invented"}},
    }
    town.set(town.source, Policy=json.dumps({"Statement": [statement]}))


def second_rule(town: Town, **given: Any) -> None:
    other = town.add_rule("second", **given)
    town.allow(town.source, town.rule, other)
    town.allow(town.undelivered, town.rule, other)


def rule_on_another_bus(town: Town) -> None:
    """A rule forwards to a second bus, from which another rule leads to the queue."""
    bus = town.add_bus(f"{town.name}-second")
    town.events.put_rule(
        Name="forward", EventBusName=town.bus, EventPattern='{"source": [{"prefix": "com."}]}'
    )
    town.events.put_targets(
        Rule="forward", EventBusName=town.bus, Targets=[{"Id": "bus", "Arn": bus}]
    )
    second_rule(town, bus=f"{town.name}-second")


def two_integrations(town: Town) -> None:
    rules = []
    for suffix in ("prod", "test"):
        name = f"{PARTNER}/{town.name}-{suffix}"
        town.add_bus(name)
        pattern = {"source": [{"prefix": "aws.partner/genesys.com"}]}
        rules.append(town.add_rule(suffix, bus=name, pattern=pattern))
    for url in (town.source, town.undelivered):
        town.allow(url, town.rule, *rules)


def disabled(town: Town) -> None:
    town.events.disable_rule(Name=f"{town.name}-rule", EventBusName=town.bus)


def disabled_second(town: Town) -> None:
    town.add_rule("second")  # which nobody has to let send
    town.events.disable_rule(Name=f"{town.name}-second", EventBusName=town.bus)


def nothing_leads_here(town: Town) -> None:
    town.events.remove_targets(
        Rule=f"{town.name}-rule", EventBusName=town.bus, Ids=["oncebridge-0"]
    )


def undelivered_is_gone(town: Town) -> None:
    town.sqs.delete_queue(QueueUrl=town.undelivered)


def undelivered_is_closed(town: Town) -> None:
    town.set(town.undelivered, Policy="")


def archive(town: Town) -> None:
    arn = town.events.describe_event_bus(Name=town.bus)["Arn"]
    town.events.create_archive(ArchiveName=f"{town.name}-all", EventSourceArn=arn, RetentionDays=30)


def table(**changes: Any) -> Plant:
    def plant(town: Town) -> None:
        town.table = town.add_table(**changes)

    return plant


def expiry(**changes: Any) -> Plant:
    def plant(town: Town) -> None:
        off = {"Enabled": False, "AttributeName": "x"}
        town.dynamodb.update_time_to_live(TableName=town.table, TimeToLiveSpecification=off)
        if changes:
            town.dynamodb.update_time_to_live(TableName=town.table, TimeToLiveSpecification=changes)

    return plant


def sink_to_own_bus(town: Town) -> None:
    town.settings["sink"] = f"events://{town.bus}"


FAULTS = [
    # the queue
    ("source-missing", ERROR, "no queue", settings(source="sqs://nobody-has-made-it")),
    ("sqs-visibility", ERROR, "a long lease", settings(lease="3m")),
    ("sqs-no-redrive", WARNING, "no redrive policy", no_redrive),
    ("sqs-redrives-early", WARNING, "5 receives", redrive(5)),
    ("sqs-redrives-early", WARNING, "many attempts", settings(max_attempts="99")),
    ("sqs-redrive-target", ERROR, "failed is gone", redrive_to_nowhere),
    ("sqs-redrive-retention", WARNING, "short", queue("failed", MessageRetentionPeriod="345600")),
    ("window-horizon", WARNING, "retention", queue("source", MessageRetentionPeriod="1000000")),
    ("window-horizon", WARNING, "a short window", settings(window="1d")),
    ("window-horizon", WARNING, "Genesys", settings(window="108h", preset="genesys")),
    ("sqs-delay", NOTE, "late", queue("source", DelaySeconds="30")),
    ("sqs-policy-open", ERROR, "for everybody", open_door),
    ("sqs-policy-closed", ERROR, "for another rule", closed_door),
    ("sqs-policy-unclear", NOTE, "a condition", unclear_door),
    ("key-rights", NOTE, "a key", queue("source", KmsMasterKeyId="alias/oncebridge")),
    ("sqs-aws-key", ERROR, "AWS's key", queue("source", KmsMasterKeyId="alias/aws/sqs")),
    ("sqs-aws-key", ERROR, "undelivered", queue("undelivered", KmsMasterKeyId="alias/aws/sqs")),
    # dead letters
    ("dead-missing", ERROR, "no queue", settings(dead="sqs://nobody-has-made-it")),
    ("dead-is-redrive-target", NOTE, "the same", redrive(to="dead")),
    ("dead-retention", WARNING, "4 days", queue("dead", MessageRetentionPeriod="345600")),
    ("dead-has-redrive", WARNING, "redriven", dead_with_redrive),
    ("dead-unencrypted", NOTE, "in plain", queue("dead", SqsManagedSseEnabled="false")),
    # rules
    ("rule-none", NOTE, "no rule", nothing_leads_here),
    ("rule-disabled", ERROR, "disabled", disabled),
    ("rule-disabled", NOTE, "one of two", disabled_second),
    ("target-input", ERROR, "the detail alone", target(InputPath="$.detail")),
    ("target-input", WARNING, "the detail alone, of Genesys", genesys_detail),
    ("target-input", ERROR, "a constant", target(Input='{"detail": {}}')),
    (
        "target-input",
        WARNING,
        "without the id",
        target(
            InputTransformer={
                "InputPathsMap": {"s": "$.source", "t": "$.detail-type", "d": "$.detail"},
                "InputTemplate": '{"source": <s>, "detail-type": <t>, "detail": <d>}',
            }
        ),
    ),
    (
        "rule-retries",
        WARNING,
        "not again",
        target(RetryPolicy={"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": 86400}),
    ),
    ("rule-no-dead-letters", WARNING, "dropped", target(DeadLetterConfig=None)),
    ("rule-dead-letters-missing", ERROR, "gone", undelivered_is_gone),
    ("sqs-policy-closed", ERROR, "undelivered", undelivered_is_closed),
    ("rules-overlap", WARNING, "the same pattern", second_rule),
    (
        "rules-overlap",
        WARNING,
        "a wider pattern",
        partial(second_rule, pattern={"source": [{"prefix": "com.example"}]}),
    ),
    (
        "rules-overlap",
        NOTE,
        "perhaps",
        partial(second_rule, pattern={"detail-type": ["order placed"]}),
    ),
    ("rules-overlap", WARNING, "over a second bus", rule_on_another_bus),
    (
        "target-twice",
        WARNING,
        "one rule, two targets",
        lambda town: town.add_rule("rule", targets=[{}, {}]),
    ),
    ("genesys-two-buses", WARNING, "prod and test", two_integrations),
    ("bus-archive", NOTE, "an archive", archive),
    # the table
    ("store-missing", ERROR, "no table", settings(store="dynamodb://nobody-has-made-it")),
    ("dynamodb-ttl", WARNING, "off", expiry()),
    ("dynamodb-ttl", WARNING, "elsewhere", expiry(Enabled=True, AttributeName="ttl")),
    (
        "dynamodb-key",
        ERROR,
        "a text",
        table(AttributeDefinitions=[{"AttributeName": "k", "AttributeType": "S"}]),
    ),
    (
        "dynamodb-capacity",
        WARNING,
        "5 writes",
        table(
            BillingMode="PROVISIONED",
            ProvisionedThroughput={"ReadCapacityUnits": 5, "WriteCapacityUnits": 5},
        ),
    ),
    ("dynamodb-deletion", NOTE, "unprotected", table(DeletionProtectionEnabled=False)),
    # where events go
    ("sink-missing", ERROR, "no bus", settings(sink="events://nobody-has-made-it")),
    ("sink-missing", ERROR, "no queue", settings(sink="sqs://nobody-has-made-it")),
    ("sink-missing", ERROR, "no stream", settings(sink="kinesis://nobody-has-made-it")),
    (
        "sink-missing",
        ERROR,
        "no topic",
        settings(sink=f"sns:arn:aws:sns:us-east-1:{ACCOUNT}:nobody-has-made-it"),
    ),
    ("sink-feeds-source", WARNING, "its own bus", sink_to_own_bus),
]


@pytest.mark.parametrize(
    ("code", "severity", "plant"),
    [pytest.param(c, s, plant, id=f"{c}: {name}") for c, s, name, plant in FAULTS],
)
async def test_a_fault_is_found_and_nothing_else(
    town: Town, code: str, severity: Severity, plant: Plant
) -> None:
    plant(town)
    checkup = await town.check()
    assert codes(checkup) == [code]
    assert {finding.severity for finding in checkup.findings} == {severity}
    for finding in checkup.findings:
        assert finding.docs == f"docs/check-aws.md#{code}"
        assert finding.seen
        assert finding.why.endswith(".")
        assert finding.fix


async def test_nothing_is_wrong_with_what_is_in_order(town: Town) -> None:
    assert codes(await town.check()) == []


def allow_account(town: Town) -> None:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": ["events.amazonaws.com"]},
        "Action": ["SQS:Send*"],
        "Resource": "*",
        "Condition": {"StringEquals": {"AWS:SourceAccount": ACCOUNT}},
    }
    town.set(town.source, Policy=json.dumps({"Statement": statement}))


def canary(town: Town) -> None:
    """Rules that go by the clock are on the default bus only; the emulator has them anywhere."""
    name = f"{town.name}-canary"
    rule = town.events.put_rule(
        Name=name, EventBusName=town.bus, ScheduleExpression="rate(5 minutes)"
    )["RuleArn"]
    target = town.target(Id="it", Arn=town.arn(town.source), Input='{"source": "canary"}')
    town.events.put_targets(Rule=name, EventBusName=town.bus, Targets=[target])
    for url in (town.source, town.undelivered):
        town.allow(url, town.rule, rule)


HARMLESS = [
    ("bare and the detail alone", [settings(bare="true"), target(InputPath="$.detail")]),
    (
        "a transformer that keeps all",
        [target(InputTransformer={"InputTemplate": "<aws.events.event.json>"})],
    ),
    ("another visibility timeout", [queue("source", VisibilityTimeout="0")]),
    (
        "rules that exclude each other",
        [partial(second_rule, pattern={"source": ["com.example.returns"]})],
    ),
    ("an account in the condition", [allow_account]),
    (
        "its own bus, whose rule is for other sources",
        [sink_to_own_bus, settings(**{"sink.source": "crm.clean"})],
    ),
    ("a schedule that sends a text of its own", [canary]),
]


@pytest.mark.parametrize("plants", [pytest.param(plants, id=name) for name, plants in HARMLESS])
async def test_what_is_harmless_is_not_told(town: Town, plants: list[Plant]) -> None:
    for plant in plants:
        plant(town)
    assert codes(await town.check()) == []


async def test_a_retry_policy_without_dead_letters_loses_events(town: Town) -> None:
    town.retarget(RetryPolicy={"MaximumEventAgeInSeconds": 60}, DeadLetterConfig=None)
    checkup = await town.check()
    assert codes(checkup) == ["rule-no-dead-letters", "rule-retries"]
    (finding,) = [one for one in checkup.findings if one.code == "rule-retries"]
    assert finding.severity is ERROR
    assert "for 1m at most" in finding.seen


async def test_the_horizon_is_told_as_a_sum(town: Town) -> None:
    town.settings |= {"window": "4d", "preset": "genesys"}
    (finding,) = (await town.check()).findings
    rule = f"rule {town.name}-rule ({town.bus})"
    assert finding.seen == (
        "window is 4d; messages are kept for 4d; a copy can be published as late as "
        f"4d (Genesys Cloud publishes again) + 1d ({rule} tries again) = 5d"
    )
    assert 'window = "6d"' in finding.fix


# --- FIFO queues ------------------------------------------------------------------------------


async def test_content_based_deduplication_of_a_fifo_queue_is_a_note(fifo_town: Town) -> None:
    checkup = await fifo_town.check()
    assert codes(checkup) == ["sqs-fifo-content-dedup"]
    assert checkup.findings[0].severity is NOTE


async def test_a_fifo_queue_needs_a_group(fifo_town: Town) -> None:
    fifo_town.retarget(SqsParameters=None)
    assert codes(await fifo_town.check()) == ["rule-fifo-group", "sqs-fifo-content-dedup"]


async def test_a_rule_cannot_send_to_a_fifo_queue_without_deduplication(fifo_town: Town) -> None:
    fifo_town.set(fifo_town.source, ContentBasedDeduplication="false")
    assert codes(await fifo_town.check()) == ["sqs-fifo-no-dedup"]
