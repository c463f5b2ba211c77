"""
Queues: the one that events come from, and the one that dead letters go to.

A worker asks for a visibility of its own with every receive, and extends it while a message is
in hand; so of a queue that only workers read, the visibility timeout does not matter. That of a
queue which Lambda reads does, and is looked at with the mappings.
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


class SqsQueue(Struct, frozen=True):
    """A queue as SQS describes it."""

    name: str
    url: str
    arn: str
    where: AwsLocation
    told: dict[str, str]

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
        return self.told.get("Policy", "")

    @property
    def key(self) -> str:
        return self.told.get("KmsMasterKeyId", "")

    @property
    def redrive(self) -> tuple[str, int] | None:
        """Where messages are moved that came back too often, and how often that is."""
        try:
            found = json.loads(self.told.get("RedrivePolicy") or "{}")
            return str(found["deadLetterTargetArn"]), int(found["maxReceiveCount"])
        except (ValueError, KeyError, TypeError):
            return None

    def _time(self, name: str, default: int) -> timedelta:
        return timedelta(seconds=int(self.told.get(name, default)))

    def command(self, **attributes: str) -> str:
        """Write what sets *attributes*."""
        given = ("--queue-url", self.url, "--attributes", json.dumps(attributes))
        return aws(self.where, "sqs", "set-queue-attributes", *given)


async def read(
    context: AwsContext, name: str, where: AwsLocation, *, account: str = ""
) -> SqsQueue | None:
    """Look at a queue; None where it cannot be. Raises `NoSuchResource`."""
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
    told: dict[str, str] = described.get("Attributes") or {}
    return SqsQueue(name, located["QueueUrl"], told.get("QueueArn", ""), where, told)


async def read_arn(context: AwsContext, arn: str, where: AwsLocation) -> SqsQueue | None:
    """Look at the queue with this ARN, which may be of another account."""
    _, _, _, region, account, name = arn.split(":", 5)
    there = replace(where, region=region or where.region)
    return await read(context, name, there, account=account)


async def of_address(context: AwsContext, address: AwsAddress) -> SqsQueue | None:
    """Look at the queue of an address; that it is not there is a finding."""
    try:
        return await read(context, address.name, address.where, account=address.resource.account)
    except NoSuchResource:
        code = "dead-missing" if address.kind == "dead" else f"{address.kind}-missing"
        context.report(
            code,
            Severity.ERROR,
            f"queue {address.name}",
            seen=f"there is no such queue in {await _region(context, address)}, or it is not for us",
            why="oncebridge does not start without it.",
            fix="Put the name, Region or account in the address right, or make the queue:\n"
            + make(address.where, address.name, keeps_long=address.kind == "dead"),
        )
        return None


def make(where: AwsLocation, name: str, *, keeps_long: bool = False) -> str:
    """Write what makes a queue, of the type that its name says."""
    attributes = ["MessageRetentionPeriod=1209600"] if keeps_long else []
    attributes += ["FifoQueue=true"] if name.endswith(".fifo") else []
    given = ("--attributes", ",".join(attributes)) if attributes else ()
    return aws(where, "sqs", "create-queue", "--queue-name", name, *given)


async def _region(context: AwsContext, address: AwsAddress) -> str:
    return await context.at("sqs", address.where).region()


# --- the queue that events come from ----------------------------------------------------------


async def check_source(context: AwsContext, queue: SqsQueue) -> None:
    """Look at all that is set at a queue from which events come."""
    await _check_redrive(context, queue)
    _check_open(context, queue)
    if queue.is_fifo and queue.told.get("ContentBasedDeduplication") == "true":
        context.report(
            "sqs-fifo-content-dedup",
            Severity.NOTE,
            queue.subject,
            seen="a FIFO queue with ContentBasedDeduplication",
            why="SQS compares whole messages, with the id that EventBridge gave each, and for 5 "
            "minutes. It removes a second send of one delivery, and nothing else: no event that "
            "was published again, came by a second rule's bus or came later.",
            fix="Nothing, as long as oncebridge reads the queue (EventBridge cannot send to a "
            "FIFO queue without this setting). Do not take it for a protection.",
        )
    if queue.delay:
        context.report(
            "sqs-delay",
            Severity.NOTE,
            queue.subject,
            seen=f"DelaySeconds is {queue.delay.total_seconds():.0f}",
            why="Every event is late by that much, and nothing is gained: oncebridge needs no "
            "pause to tell events apart.",
            fix=f"Take it away:\n{queue.command(DelaySeconds='0')}",
        )


async def _check_redrive(context: AwsContext, queue: SqsQueue) -> None:
    attempts = max(route.settings.max_attempts for route in context.setup.routes)
    needed = attempts + SPARE_RECEIVES
    if queue.redrive is None:
        target = queue.arn.removesuffix(queue.name) + _failed(queue)
        policy = json.dumps({"deadLetterTargetArn": target, "maxReceiveCount": "100"})
        context.report(
            "sqs-no-redrive",
            Severity.WARNING,
            queue.subject,
            seen="there is no redrive policy",
            why="A message that kills whoever reads it comes back until its retention of "
            f"{format_duration(queue.retention)} is over, and is then deleted unseen.",
            fix="Have SQS set it aside, in a queue that keeps it for 14 days:\n"
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
            f"{SPARE_RECEIVES} receives that are nobody's fault need {needed}",
            why="SQS takes messages away before oncebridge has given up on them: after an outage "
            "good events lie in the dead-letter queue, without a reason, and nobody passes them on.",
            fix=f"Raise it, to 100 as our template does:\n{queue.command(RedrivePolicy=policy)}",
        )
    else:
        context.report_passed(
            queue.subject, f"redrive: maxReceiveCount {receives}, at least {needed}"
        )
    await _check_redrive_target(context, queue, target)


async def _check_redrive_target(context: AwsContext, queue: SqsQueue, target: str) -> None:
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
            + ("is of the other type" if is_there else "is not there"),
            why="SQS cannot move messages there: they come back until their retention is over.",
            fix=f"Make a {kind} queue, and name it in the redrive policy:\n{_make_failed(queue)}",
        )
    elif aside is not None and aside.retention <= queue.retention:
        context.report(
            "sqs-redrive-retention",
            Severity.WARNING,
            aside.subject,
            seen=f"it keeps messages for {format_duration(aside.retention)}, and {queue.name} "
            f"for {format_duration(queue.retention)}",
            why="A message keeps its age when it is moved. One that was tried for as long as the "
            "queue keeps it is deleted as soon as it is set aside.",
            fix=f"Keep it for 14 days:\n{aside.command(MessageRetentionPeriod='1209600')}",
        )
    elif aside is not None:
        context.report_passed(queue.subject, f"redrive: {name} keeps messages for longer")


def _failed(queue: SqsQueue) -> str:
    if queue.is_fifo:
        return f"{queue.name.removesuffix('.fifo')}-failed.fifo"
    return f"{queue.name}-failed"


def _make_failed(queue: SqsQueue) -> str:
    return make(queue.where, _failed(queue), keeps_long=True)


def _check_open(context: AwsContext, queue: SqsQueue) -> None:
    allowed = open_to_all(queue.policy)
    if not allowed:
        context.report_passed(queue.subject, "policy: open to nobody without a condition")
        return
    context.report(
        "sqs-policy-open",
        Severity.ERROR,
        queue.subject,
        seen=f"its policy allows {', '.join(allowed)} to everybody, without a condition",
        why="Anybody with an AWS account can send what is then passed on as an event"
        + (", or take events away." if _takes(allowed) else "."),
        fix="Allow events.amazonaws.com alone, and for your rule only, as `oncebridge template "
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


def check_key(context: AwsContext, queue: SqsQueue, *, is_aside: bool = False) -> None:
    """See whether EventBridge can use the key of a queue that it sends to."""
    if not queue.key:
        return
    lost = "what it cannot deliver is dropped" if is_aside else "nothing is delivered"
    if queue.key.endswith("alias/aws/sqs"):
        context.report(
            "sqs-aws-key",
            Severity.ERROR,
            queue.subject,
            seen=f"it is encrypted with {queue.key}, AWS's own key for SQS",
            why=f"EventBridge may not use that key, and its policy cannot be changed: {lost}.",
            fix="Let SQS encrypt without KMS, or use a key of yours:\n"
            + queue.command(KmsMasterKeyId="", SqsManagedSseEnabled="true"),
        )
        return
    context.report(
        "key-rights",
        Severity.NOTE,
        queue.subject,
        seen="it is encrypted with a key of yours, whose policy is not looked at",
        why="EventBridge has to be allowed kms:Decrypt and kms:GenerateDataKey by the policy of "
        f"the key, and whoever reads the queue kms:Decrypt. Where not, {lost}.",
        fix="Add to the policy of the key:\n"
        '{"Effect": "Allow", "Principal": {"Service": "events.amazonaws.com"}, '
        '"Action": ["kms:Decrypt", "kms:GenerateDataKey"], "Resource": "*"}',
    )


# --- the queue that dead letters go to --------------------------------------------------------


async def check_dead(
    context: AwsContext,
    queue: SqsQueue,
    sources: Sequence[SqsQueue],
    by_function: Sequence[SqsQueue],
) -> None:
    """
    Look at a queue that keeps dead letters, beside those that events come from.

    That it is one of them is told of those that a function reads; of others the addresses say it.
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
                why="What can never succeed is read again as an event, and dies again, for ever.",
                fix="Give dead letters a queue of their own:\n"
                f"{make(queue.where, f'{plain}-dead', keeps_long=True)}\n"
                f'dead = "sqs://{plain}-dead"',
            )
            return
        if source.redrive is not None and source.redrive[0] == queue.arn:
            context.report(
                "dead-is-redrive-target",
                Severity.NOTE,
                subject,
                seen=f"SQS moves messages of {source.name} there, too",
                why="Letters of oncebridge say why an event died; what SQS has moved does not, "
                "and is listed as `foreign`. An alarm on the queue does not tell one from the "
                "other.",
                fix="If that is not wanted, give each a queue of its own, as `oncebridge template "
                "worker` does.",
            )
    if queue.retention < LONGEST_RETENTION:
        context.report(
            "dead-retention",
            Severity.WARNING,
            subject,
            seen=f"it keeps messages for {format_duration(queue.retention)}",
            why="SQS then deletes dead letters, whether or not somebody has looked at them.",
            fix="Keep them for 14 days, the most there is (or in `sqlite:` or `file:`):\n"
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
            why="A queue can only be read by receiving: every `oncebridge dead list` counts, and "
            "SQS moves the letters away.",
            fix=f"Take it away:\n{queue.command(RedrivePolicy='')}",
        )
    if not queue.key and queue.told.get("SqsManagedSseEnabled") == "false":
        context.report(
            "dead-unencrypted",
            Severity.NOTE,
            subject,
            seen="it is not encrypted",
            why="Dead letters are whole events, which may hold personal data, kept for days.",
            fix="Let SQS encrypt it, which costs nothing:\n"
            + queue.command(SqsManagedSseEnabled="true"),
        )
    _check_open(context, queue)
