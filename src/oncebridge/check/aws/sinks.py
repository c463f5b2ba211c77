"""Check sinks on AWS: whether they exist, and whether they lead back to a source."""

from collections.abc import Sequence

from oncebridge.check.aws import queues, streams
from oncebridge.check.aws.account import NoSuchResource
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsAddress, AwsContext
from oncebridge.check.aws.feeds import EventFeed
from oncebridge.check.aws.patterns import Overlap, RulePattern, overlap
from oncebridge.check.aws.queues import QueueDescription
from oncebridge.check.finding import Severity


async def check_sink(
    context: AwsContext,
    address: AwsAddress,
    by_function: Sequence[QueueDescription],
    several: Sequence[EventFeed],
) -> None:
    """
    Check a sink against the feeds *several* and the queues *by_function* of functions.

    Whether a source with an address is the sink is checked by the addresses.
    """
    match address.scheme:
        case "sqs":
            await _check_queue(context, address, by_function)
        case "kinesis":
            if await streams.of_address(context, address) is not None:
                context.report_passed(f"stream {address.name}", "it exists")
        case "events":
            await _check_bus(context, address, several)
        case "sns":
            await _check_topic(context, address)


async def _check_queue(
    context: AwsContext, address: AwsAddress, by_function: Sequence[QueueDescription]
) -> None:
    queue = await queues.of_address(context, address)
    if queue is None:
        return
    if queue.arn not in [source.arn for source in by_function]:
        context.report_passed(queue.subject, "it exists")
        return
    plain = queue.name.removesuffix(".fifo")
    context.report(
        "sink-is-source",
        Severity.ERROR,
        queue.subject,
        seen="events are sent to the queue that they come from",
        why="Each event arrives again as its own duplicate, and no other consumer receives it.",
        fix="Use another queue:\n"
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
        found = await context.look(subject, "whether it exists", asked)
    except NoSuchResource:
        context.report(
            "sink-missing",
            Severity.ERROR,
            subject,
            seen="the bus does not exist",
            why="AWS accepts events for a bus that does not exist, and drops them.",
            fix="Fix the name or Region in the address, or create the bus:\n"
            + aws(address.where, "events", "create-event-bus", "--name", address.name),
        )
        return
    if found is None:
        return
    back = [
        feed for feed in several if feed.bus.arn == found.get("Arn") and _may_match(feed, address)
    ]
    if not back:
        context.report_passed(subject, "it exists, and does not lead back to a source")
        return
    context.report(
        "sink-feeds-source",
        Severity.WARNING,
        subject,
        seen=f"events are sent to it, and its {back[0].subject} sends events here",
        why="Delivered events that match the rule arrive again. oncebridge recognises them, and puts "
        "them into the dead letters.",
        fix="Exclude the source of the sink in the rule, or use another bus:\n"
        + aws(address.where, "events", "create-event-bus", "--name", f"{address.name}-once"),
    )


def _may_match(feed: EventFeed, address: AwsAddress) -> bool:
    """Return whether a rule may match events of the sink, by their source."""
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
        if await context.look(subject, "whether it exists", asked) is not None:
            context.report_passed(subject, "it exists")
    except NoSuchResource:
        context.report(
            "sink-missing",
            Severity.ERROR,
            subject,
            seen="the topic does not exist",
            why="oncebridge does not start without it.",
            fix="Fix the ARN, or create the topic:\n"
            + aws(address.where, "sns", "create-topic", "--name", address.name),
        )
