"""Each fault, planted in a set-up that is in order otherwise, is found, and nothing else is."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.check.aws_account import ORGANISATION, AwsAccount, codes
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
def account(guarded_aws: GuardedAws) -> Iterator[AwsAccount]:
    with AwsAccount(guarded_aws) as made:
        yield made


@pytest.fixture
def fifo_town(guarded_aws: GuardedAws) -> Iterator[AwsAccount]:
    with AwsAccount(guarded_aws, fifo=True) as made:
        yield made


Plant = Callable[[AwsAccount], Any]


def genesys_detail(account: AwsAccount) -> None:
    settings(preset="genesys", window="6d")(account)
    target(InputPath="$.detail")(account)


def settings(**given: str) -> Plant:
    return lambda account: account.settings.update(given)


def queue(which: str, **attributes: str) -> Plant:
    return lambda account: account.set(getattr(account, which), **attributes)


def target(**changes: Any) -> Plant:
    return lambda account: account.retarget(**changes)


def redrive(receives: int = 100, to: str = "failed") -> Plant:
    def plant(account: AwsAccount) -> None:
        arn = account.arn(getattr(account, to)) if hasattr(account, to) else account.arn(f"/{to}")
        policy = {"deadLetterTargetArn": arn, "maxReceiveCount": str(receives)}
        account.set(account.source, RedrivePolicy=json.dumps(policy))

    return plant


def no_redrive(account: AwsAccount) -> None:
    account.source = account.queue("bare", MessageRetentionPeriod="345600")
    account.allow(account.source, account.rule)
    account.retarget()


def redrive_to_nowhere(account: AwsAccount) -> None:
    account.sqs.delete_queue(QueueUrl=account.failed)


def dead_with_redrive(account: AwsAccount) -> None:
    policy = {"deadLetterTargetArn": account.arn(account.failed), "maxReceiveCount": "5"}
    account.set(account.dead, RedrivePolicy=json.dumps(policy))


def open_door(account: AwsAccount) -> None:
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "sqs:*", "Resource": "*"}
    told = account.sqs.get_queue_attributes(QueueUrl=account.source, AttributeNames=["Policy"])
    policy = json.loads(told["Attributes"]["Policy"])
    policy["Statement"].append(everybody)
    account.set(account.source, Policy=json.dumps(policy))


def closed_door(account: AwsAccount) -> None:
    account.allow(account.source, f"arn:aws:events:us-east-1:{ACCOUNT}:rule/another")


def unclear_door(account: AwsAccount) -> None:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "events.amazonaws.com"},
        "Action": "sqs:SendMessage",
        "Resource": account.arn(account.source),
        "Condition": {"StringEquals": {"aws:PrincipalOrgID": "o-invented"}},
    }
    account.set(account.source, Policy=json.dumps({"Statement": [statement]}))


def second_rule(account: AwsAccount, **given: Any) -> None:
    other = account.add_rule("second", **given)
    account.allow(account.source, account.rule, other)
    account.allow(account.undelivered, account.rule, other)


def rule_on_another_bus(account: AwsAccount) -> None:
    """A rule forwards to a second bus, from which another rule leads to the queue."""
    bus = account.add_bus(f"{account.name}-second")
    account.events.put_rule(
        Name="forward", EventBusName=account.bus, EventPattern='{"source": [{"prefix": "com."}]}'
    )
    account.events.put_targets(
        Rule="forward", EventBusName=account.bus, Targets=[{"Id": "bus", "Arn": bus}]
    )
    second_rule(account, bus=f"{account.name}-second")


def two_integrations(account: AwsAccount) -> None:
    rules = []
    for suffix in ("prod", "test"):
        name = f"{PARTNER}/{account.name}-{suffix}"
        account.add_bus(name)
        pattern = {"source": [{"prefix": "aws.partner/genesys.com"}]}
        rules.append(account.add_rule(suffix, bus=name, pattern=pattern))
    for url in (account.source, account.undelivered):
        account.allow(url, account.rule, *rules)


def disabled(account: AwsAccount) -> None:
    account.events.disable_rule(Name=f"{account.name}-rule", EventBusName=account.bus)


def disabled_second(account: AwsAccount) -> None:
    account.add_rule("second")  # which nobody has to let send
    account.events.disable_rule(Name=f"{account.name}-second", EventBusName=account.bus)


def nothing_leads_here(account: AwsAccount) -> None:
    account.events.remove_targets(
        Rule=f"{account.name}-rule", EventBusName=account.bus, Ids=["oncebridge-0"]
    )


def undelivered_is_gone(account: AwsAccount) -> None:
    account.sqs.delete_queue(QueueUrl=account.undelivered)


def undelivered_is_closed(account: AwsAccount) -> None:
    account.set(account.undelivered, Policy="")


def archive(account: AwsAccount) -> None:
    arn = account.events.describe_event_bus(Name=account.bus)["Arn"]
    account.events.create_archive(
        ArchiveName=f"{account.name}-all", EventSourceArn=arn, RetentionDays=30
    )


def table(**changes: Any) -> Plant:
    def plant(account: AwsAccount) -> None:
        account.table = account.add_table(**changes)

    return plant


def expiry(**changes: Any) -> Plant:
    def plant(account: AwsAccount) -> None:
        off = {"Enabled": False, "AttributeName": "x"}
        account.dynamodb.update_time_to_live(TableName=account.table, TimeToLiveSpecification=off)
        if changes:
            account.dynamodb.update_time_to_live(
                TableName=account.table, TimeToLiveSpecification=changes
            )

    return plant


def sink_to_own_bus(account: AwsAccount) -> None:
    account.settings["sink"] = f"events://{account.bus}"


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
        lambda account: account.add_rule("rule", targets=[{}, {}]),
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
    account: AwsAccount, code: str, severity: Severity, plant: Plant
) -> None:
    plant(account)
    checkup = await account.check()
    assert codes(checkup) == [code]
    assert {finding.severity for finding in checkup.findings} == {severity}
    for finding in checkup.findings:
        assert finding.docs == f"docs/check-aws.md#{code}"
        assert finding.seen
        assert finding.why.endswith(".")
        assert finding.fix


async def test_nothing_is_wrong_with_what_is_in_order(account: AwsAccount) -> None:
    assert codes(await account.check()) == []


def allow_account(account: AwsAccount) -> None:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": ["events.amazonaws.com"]},
        "Action": ["SQS:Send*"],
        "Resource": "*",
        "Condition": {"StringEquals": {"AWS:SourceAccount": ACCOUNT}},
    }
    account.set(account.source, Policy=json.dumps({"Statement": statement}))


def canary(account: AwsAccount) -> None:
    """Rules that go by the clock are on the default bus only; the emulator has them anywhere."""
    name = f"{account.name}-canary"
    rule = account.events.put_rule(
        Name=name, EventBusName=account.bus, ScheduleExpression="rate(5 minutes)"
    )["RuleArn"]
    target = account.target(Id="it", Arn=account.arn(account.source), Input='{"source": "canary"}')
    account.events.put_targets(Rule=name, EventBusName=account.bus, Targets=[target])
    for url in (account.source, account.undelivered):
        account.allow(url, account.rule, rule)


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
async def test_what_is_harmless_is_not_told(account: AwsAccount, plants: list[Plant]) -> None:
    for plant in plants:
        plant(account)
    assert codes(await account.check()) == []


async def test_a_retry_policy_without_dead_letters_loses_events(account: AwsAccount) -> None:
    account.retarget(RetryPolicy={"MaximumEventAgeInSeconds": 60}, DeadLetterConfig=None)
    checkup = await account.check()
    assert codes(checkup) == ["rule-no-dead-letters", "rule-retries"]
    (finding,) = [one for one in checkup.findings if one.code == "rule-retries"]
    assert finding.severity is ERROR
    assert "for 1m at most" in finding.seen


async def test_the_horizon_is_told_as_a_sum(account: AwsAccount) -> None:
    account.settings |= {"window": "4d", "preset": "genesys"}
    (finding,) = (await account.check()).findings
    rule = f"rule {account.name}-rule ({account.bus})"
    assert finding.seen == (
        "window is 4d; messages are kept for 4d; an event can be redelivered after "
        f"4d (Genesys Cloud retries) + 1d ({rule} retries) = 5d"
    )
    assert 'window = "6d"' in finding.fix


# --- FIFO queues ------------------------------------------------------------------------------


async def test_content_based_deduplication_of_a_fifo_queue_is_a_note(fifo_town: AwsAccount) -> None:
    checkup = await fifo_town.check()
    assert codes(checkup) == ["sqs-fifo-content-dedup"]
    assert checkup.findings[0].severity is NOTE


async def test_a_fifo_queue_needs_a_group(fifo_town: AwsAccount) -> None:
    fifo_town.retarget(SqsParameters=None)
    assert codes(await fifo_town.check()) == ["rule-fifo-group", "sqs-fifo-content-dedup"]


async def test_a_rule_cannot_send_to_a_fifo_queue_without_deduplication(
    fifo_town: AwsAccount,
) -> None:
    fifo_town.set(fifo_town.source, ContentBasedDeduplication="false")
    assert codes(await fifo_town.check()) == ["sqs-fifo-no-dedup"]
