"""
Check SQS queues: sources, and the queue for dead letters.

A worker sets its own visibility timeout with every receive, and extends it while it processes a
message; so the visibility timeout of a queue that only workers read does not matter. For a queue
that Lambda reads it does, and is checked with the mappings.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.durations import format_duration
from oncebridge.check.aws.account import AwsLocation, NoSuchResource
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.aws.policies import open_to_all
from oncebridge.check.finding import Severity
from oncebridge.sources.sqs.source import SPARE_RECEIVES

LONGEST_RETENTION: Final = timedelta(days=14)


class QueueDescription(Struct, frozen=True):
    """A queue as SQS describes it."""

    name: str
    url: str
    arn: str
    where: AwsLocation
    attributes: dict[str, str]

    @property
    def subject(self) -> str:
        return f"queue {self.name}"

    @property
    def is_fifo(self) -> bool:
        return self.name.endswith(".fifo")

    @property
    def visibility(self) -> timedelta:
        return self._time("VisibilityTimeout", 30)

    @property
    def retention(self) -> timedelta:
        return self._time("MessageRetentionPeriod", 345_600)

    @property
    def delay(self) -> timedelta:
        return self._time("DelaySeconds", 0)

    @property
    def policy(self) -> str:
        return self.attributes.get("Policy", "")

    @property
    def key(self) -> str:
        return self.attributes.get("KmsMasterKeyId", "")

    @property
    def redrive(self) -> tuple[str, int] | None:
        """The ARN of the dead-letter queue, and maxReceiveCount; None without a redrive policy."""
        try:
            found = json.loads(self.attributes.get("RedrivePolicy") or "{}")
            return str(found["deadLetterTargetArn"]), int(found["maxReceiveCount"])
        except (ValueError, KeyError, TypeError):
            return None

    def _time(self, name: str, default: int) -> timedelta:
        return timedelta(seconds=int(self.attributes.get(name, default)))

    def command(self, **attributes: str) -> str:
        """Return the command that sets *attributes*."""
        given = ("--queue-url", self.url, "--attributes", json.dumps(attributes))
        return aws(self.where, "sqs", "set-queue-attributes", *given)


async def read(
    context: AwsContext, name: str, where: AwsLocation, *, account: str = ""
) -> QueueDescription | None:
    """Read a queue; None if that is denied. Raises `NoSuchResource`."""
    sqs = context.at("sqs", where)
    subject, what = f"queue {name}", "its settings"
    owner = {"QueueOwnerAWSAccountId": account} if account else {}
    located = await context.look(subject, what, sqs.ask("GetQueueUrl", QueueName=name, **owner))
    if located is None:
        return None
    asked = sqs.ask("GetQueueAttributes", QueueUrl=located["QueueUrl"], AttributeNames=["All"])
    described = await context.look(subject, what, asked)
    if described is None:
        return None
    attributes: dict[str, str] = described.get("Attributes") or {}
    return QueueDescription(
        name, located["QueueUrl"], attributes.get("QueueArn", ""), where, attributes
    )


async def read_arn(context: AwsContext, arn: str, where: AwsLocation) -> QueueDescription | None:
    """Read the queue with this ARN, which may be in another account."""
    _, _, _, region, account, name = arn.split(":", 5)
    there = replace(where, region=region or where.region)
    return await read(context, name, there, account=account)


async def of_address(context: AwsContext, address: AwsAddress) -> QueueDescription | None:
    """Read the queue of an address; a missing one is a finding."""
    try:
        return await read(context, address.name, address.where, account=address.resource.account)
    except NoSuchResource:
        code = "dead-missing" if address.kind == "dead" else f"{address.kind}-missing"
        context.report(
            code,
            Severity.ERROR,
            f"queue {address.name}",
            seen=f"the queue does not exist in {await _region(context, address)}, or access is denied",
            why="oncebridge does not start without it.",
            fix="Fix the name, Region or account in the address, or create the queue:\n"
            + make(address.where, address.name, keeps_long=address.kind == "dead"),
        )
        return None


def make(where: AwsLocation, name: str, *, keeps_long: bool = False) -> str:
    """Return the command that creates a queue; FIFO if its name ends with .fifo."""
    attributes = ["MessageRetentionPeriod=1209600"] if keeps_long else []
    attributes += ["FifoQueue=true"] if name.endswith(".fifo") else []
    given = ("--attributes", ",".join(attributes)) if attributes else ()
    return aws(where, "sqs", "create-queue", "--queue-name", name, *given)


async def _region(context: AwsContext, address: AwsAddress) -> str:
    return await context.at("sqs", address.where).region()


# --- the queue that events come from ----------------------------------------------------------


async def check_source(context: AwsContext, queue: QueueDescription) -> None:
    """Check the settings of a source queue."""
    await _check_redrive(context, queue)
    _check_open(context, queue)
    if queue.is_fifo and queue.attributes.get("ContentBasedDeduplication") == "true":
        context.report(
            "sqs-fifo-content-dedup",
            Severity.NOTE,
            queue.subject,
            seen="a FIFO queue with ContentBasedDeduplication",
            why="SQS compares whole messages, including the id that EventBridge assigns, for 5 "
            "minutes. It only removes a second send of the same delivery: not an event that was "
            "published again, arrived by a second bus or arrived later.",
            fix="No action needed while oncebridge reads the queue: EventBridge cannot send to a FIFO "
            "queue without this setting. Do not rely on it for deduplication.",
        )
    if queue.delay:
        context.report(
            "sqs-delay",
            Severity.NOTE,
            queue.subject,
            seen=f"DelaySeconds is {queue.delay.total_seconds():.0f}",
            why="It delays every event. oncebridge does not need it to recognise duplicates.",
            fix=f"Set it to 0:\n{queue.command(DelaySeconds='0')}",
        )


async def _check_redrive(context: AwsContext, queue: QueueDescription) -> None:
    attempts = max(route.settings.max_attempts for route in context.setup.routes)
    needed = attempts + SPARE_RECEIVES
    if queue.redrive is None:
        target = queue.arn.removesuffix(queue.name) + _failed(queue)
        policy = json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": "100"})
        context.report(
            "sqs-no-redrive",
            Severity.WARNING,
            queue.subject,
            seen="the queue has no redrive policy",
            why="A message that crashes its consumer is redelivered until its retention of "
            f"{format_duration(queue.retention)} ends, and is then deleted.",
            fix="Let SQS move such messages to a queue that keeps them for 14 days:\n"
            f"{_make_failed(queue)}\n{queue.command(RedrivePolicy=policy)}",
        )
        return
    target, receives = queue.redrive
    if receives < needed:
        policy = json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": "100"})
        context.report(
            "sqs-redrives-early",
            Severity.WARNING,
            queue.subject,
            seen=f"maxReceiveCount is {receives}; {attempts} attempts (max_attempts) and "
            f"{SPARE_RECEIVES} receives without an attempt need {needed}",
            why="SQS moves messages away before oncebridge has used all attempts. After an outage, "
            "valid events are in the dead-letter queue without a reason, and are not delivered.",
            fix=f"Raise it to 100, as in our template:\n{queue.command(RedrivePolicy=policy)}",
        )
    else:
        context.report_passed(
            queue.subject, f"redrive: maxReceiveCount {receives}, at least {needed}"
        )
    await _check_redrive_target(context, queue, target)


async def _check_redrive_target(context: AwsContext, queue: QueueDescription, target: str) -> None:
    name = target.rpartition(":")[2]
    try:
        aside = await read_arn(context, target, queue.where)
    except NoSuchResource:
        aside, is_there = None, False
    else:
        is_there = True
    if not is_there or name.endswith(".fifo") != queue.is_fifo:
        kind = "FIFO" if queue.is_fifo else "standard"
        context.report(
            "sqs-redrive-target",
            Severity.ERROR,
            queue.subject,
            seen=f"its dead-letter queue {name} "
            + ("is of the other type" if is_there else "does not exist"),
            why="SQS cannot move messages there: they are redelivered until their retention ends.",
            fix=f"Create a {kind} queue, and set it in the redrive policy:\n{_make_failed(queue)}",
        )
    elif aside is not None and aside.retention <= queue.retention:
        context.report(
            "sqs-redrive-retention",
            Severity.WARNING,
            aside.subject,
            seen=f"it keeps messages for {format_duration(aside.retention)}, and {queue.name} "
            f"for {format_duration(queue.retention)}",
            why="A message keeps its age when SQS moves it. A message that was retried for the whole "
            "retention of the queue is deleted as soon as it is moved.",
            fix=f"Keep messages for 14 days:\n{aside.command(MessageRetentionPeriod='1209600')}",
        )
    elif aside is not None:
        context.report_passed(queue.subject, f"redrive: {name} keeps messages for longer")


def _failed(queue: QueueDescription) -> str:
    if queue.is_fifo:
        return f"{queue.name.removesuffix('.fifo')}-failed.fifo"
    return f"{queue.name}-failed"


def _make_failed(queue: QueueDescription) -> str:
    return make(queue.where, _failed(queue), keeps_long=True)


def _check_open(context: AwsContext, queue: QueueDescription) -> None:
    allowed = open_to_all(queue.policy)
    if not allowed:
        context.report_passed(queue.subject, "policy: no access for everyone without a condition")
        return
    context.report(
        "sqs-policy-open",
        Severity.ERROR,
        queue.subject,
        seen=f"its policy allows {', '.join(allowed)} to everyone, without a condition",
        why="Anyone with an AWS account can send messages that are delivered as events"
        + (", or remove events." if _takes(allowed) else "."),
        fix="Allow only events.amazonaws.com, and only for your rule, as `oncebridge template "
        "worker` does:\n"
        + json.dumps(
            {
                "Effect": "Allow",
                "Principal": {"Service": "events.amazonaws.com"},
                "Action": "sqs:SendMessage",
                "Resource": queue.arn,
                "Condition": {"ArnEquals": {"aws:SourceArn": "RULE-ARN"}},
            }
        ),
    )


def _takes(actions: Sequence[str]) -> bool:
    return any(
        action.lower() in ("*", "sqs:*")
        or "receive" in action.lower()
        or "delete" in action.lower()
        for action in actions
    )


def check_key(context: AwsContext, queue: QueueDescription, *, is_aside: bool = False) -> None:
    """Check whether EventBridge can use the key of a queue that it sends to."""
    if not queue.key:
        return
    lost = "undeliverable events are dropped" if is_aside else "nothing is delivered"
    if queue.key.endswith("alias/aws/sqs"):
        context.report(
            "sqs-aws-key",
            Severity.ERROR,
            queue.subject,
            seen=f"it is encrypted with {queue.key}, the AWS managed key for SQS",
            why=f"EventBridge cannot use that key, and its policy cannot be changed: {lost}.",
            fix="Let SQS encrypt without KMS, or use a key of yours:\n"
            + queue.command(KmsMasterKeyId="", SqsManagedSseEnabled="true"),
        )
        return
    context.report(
        "key-rights",
        Severity.NOTE,
        queue.subject,
        seen="it is encrypted with a KMS key of yours, whose policy is not checked",
        why="The policy of the key has to allow kms:Decrypt and kms:GenerateDataKey to EventBridge, "
        f"and kms:Decrypt to the reader of the queue. Otherwise {lost}.",
        fix="Add to the policy of the key:\n"
        '{"Effect": "Allow", "Principal": {"Service": "events.amazonaws.com"}, '
        '"Action": ["kms:Decrypt", "kms:GenerateDataKey"], "Resource": "*"}',
    )


# --- the queue that dead letters go to --------------------------------------------------------


async def check_dead(
    context: AwsContext,
    queue: QueueDescription,
    sources: Sequence[QueueDescription],
    by_function: Sequence[QueueDescription],
) -> None:
    """
    Check the queue for dead letters, also against the source queues.

    Whether it is a source is checked here for queues that functions read; `endpoints` checks others.
    """
    subject = queue.subject
    for source in sources:
        if source.arn == queue.arn:
            if source not in by_function:
                return
            plain = queue.name.removesuffix(".fifo")
            context.report(
                "dead-is-source",
                Severity.ERROR,
                subject,
                seen="dead letters go to the queue that events come from",
                why="A dead letter is read as an event and becomes a dead letter again, forever.",
                fix="Use a separate queue for dead letters:\n"
                f"{make(queue.where, f'{plain}-dead', keeps_long=True)}\n"
                f'dead = "sqs://{plain}-dead"',
            )
            return
        if source.redrive is not None and source.redrive[0] == queue.arn:
            context.report(
                "dead-is-redrive-target",
                Severity.NOTE,
                subject,
                seen=f"SQS also moves messages of {source.name} there",
                why="Dead letters of oncebridge have a reason; messages that SQS has moved do not, and "
                "are listed as `foreign`. An alarm on the queue cannot distinguish them.",
                fix="To separate them, use a queue for each, as `oncebridge template worker` does.",
            )
    if queue.retention < LONGEST_RETENTION:
        context.report(
            "dead-retention",
            Severity.WARNING,
            subject,
            seen=f"it keeps messages for {format_duration(queue.retention)}",
            why="After that, SQS deletes the dead letters.",
            fix="Keep them for 14 days, the maximum (or use `sqlite:` or `file:`):\n"
            + queue.command(MessageRetentionPeriod="1209600"),
        )
    else:
        context.report_passed(subject, "dead letters: kept for 14d")
    if queue.redrive is not None:
        context.report(
            "dead-has-redrive",
            Severity.WARNING,
            subject,
            seen=f"it has a redrive policy (maxReceiveCount {queue.redrive[1]})",
            why="A queue can only be read by receiving messages. Every `oncebridge dead list` counts, "
            "and SQS moves the dead letters away.",
            fix=f"Remove the redrive policy:\n{queue.command(RedrivePolicy='')}",
        )
    if not queue.key and queue.attributes.get("SqsManagedSseEnabled") == "false":
        context.report(
            "dead-unencrypted",
            Severity.NOTE,
            subject,
            seen="it is not encrypted",
            why="Dead letters are whole events, which may contain personal data.",
            fix="Turn on encryption by SQS, which is free:\n"
            + queue.command(SqsManagedSseEnabled="true"),
        )
    _check_open(context, queue)
