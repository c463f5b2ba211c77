"""Where events go on AWS: whether it is there, and whether it leads back."""

from collections.abc import Sequence

from oncebridge.check.aws import queues, streams
from oncebridge.check.aws.account import NoSuchResource
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.aws.feeds import EventFeed
from oncebridge.check.aws.patterns import Overlap, RulePattern, overlap
from oncebridge.check.aws.queues import SqsQueue
from oncebridge.check.finding import Severity


async def check_sink(
    context: AwsContext,
    address: AwsAddress,
    by_function: Sequence[SqsQueue],
    several: Sequence[EventFeed],
) -> None:
    """
    Look at where events go; *several* is what brings them, and *by_function* where from.

    Whether a source that has an address is the sink, the addresses say.
    """
    match address.scheme:
        case "sqs":
            await _check_queue(context, address, by_function)
        case "kinesis":
            if await streams.of_address(context, address) is not None:
                context.report_passed(f"stream {address.name}", "it is there")
        case "events":
            await _check_bus(context, address, several)
        case "sns":
            await _check_topic(context, address)


async def _check_queue(
    context: AwsContext, address: AwsAddress, by_function: Sequence[SqsQueue]
) -> None:
    queue = await queues.of_address(context, address)
    if queue is None:
        return
    if queue.arn not in [source.arn for source in by_function]:
        context.report_passed(queue.subject, "it is there")
        return
    plain = queue.name.removesuffix(".fifo")
    context.report(
        "sink-is-source",
        Severity.ERROR,
        queue.subject,
        seen="events are sent to the queue that they come from",
        why="Each comes back as its own duplicate, and nobody else reads it.",
        fix="Send to another queue:\n"
        f"{queues.make(queue.where, f'{plain}-out')}\n"
        f'sink = "sqs://{plain}-out"',
    )


async def _check_bus(
    context: AwsContext, address: AwsAddress, several: Sequence[EventFeed]
) -> None:
    subject = f"bus {address.name}"
    name = address.name
    if address.resource.account:  # by its ARN, since it may be another account's
        where = address.resource
        name = f"arn:{where.partition}:events:{where.region}:{where.account}:{where.name}"
    try:
        asked = context.at("events", address.where).ask("DescribeEventBus", Name=name)
        found = await context.look(subject, "whether it is there", asked)
    except NoSuchResource:
        context.report(
            "sink-missing",
            Severity.ERROR,
            subject,
            seen="there is no such bus",
            why="AWS takes events for a bus that does not exist, and drops them.",
            fix="Put the name or Region in the address right, or make the bus:\n"
            + aws(address.where, "events", "create-event-bus", "--name", address.name),
        )
        return
    if found is None:
        return
    back = [
        feed for feed in several if feed.bus.arn == found.get("Arn") and _may_match(feed, address)
    ]
    if not back:
        context.report_passed(subject, "it is there, and does not lead back")
        return
    context.report(
        "sink-feeds-source",
        Severity.WARNING,
        subject,
        seen=f"events are sent to it, and its {back[0].subject} brings events here",
        why="Whatever that rule matches of our own output comes back. oncebridge recognises it, "
        "and puts it into the dead letters.",
        fix="Let the rule match only what is not ours, by its source, or send to another bus:\n"
        + aws(address.where, "events", "create-event-bus", "--name", f"{address.name}-once"),
    )


def _may_match(feed: EventFeed, address: AwsAddress) -> bool:
    """Return whether a rule may match what we send, as far as its source tells."""
    ours = address.options.source
    if feed.pattern is None:
        return not feed.is_scheduled
    if not feed.is_enabled or ours is None:
        return feed.is_enabled
    sent = RulePattern.of({"source": [ours]})
    return overlap(sent, RulePattern.of(feed.pattern)) is not Overlap.NEVER


async def _check_topic(context: AwsContext, address: AwsAddress) -> None:
    where = address.resource
    arn = f"arn:{where.partition or 'aws'}:sns:{where.region}:{where.account}:{where.name}"
    subject = f"topic {address.name}"
    try:
        asked = context.at("sns", address.where).ask("GetTopicAttributes", TopicArn=arn)
        if await context.look(subject, "whether it is there", asked) is not None:
            context.report_passed(subject, "it is there")
    except NoSuchResource:
        context.report(
            "sink-missing",
            Severity.ERROR,
            subject,
            seen="there is no such topic",
            why="oncebridge does not start without it.",
            fix="Put the ARN right, or make the topic:\n"
            + aws(address.where, "sns", "create-topic", "--name", address.name),
        )
