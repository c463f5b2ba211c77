"""Where events go on AWS: whether it is there, and whether it leads back."""

from collections.abc import Sequence

from oncebridge.check.aws import queues, streams
from oncebridge.check.aws.account import Absent
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import Spot, Visit
from oncebridge.check.aws.feeds import Feed
from oncebridge.check.aws.patterns import Overlap, Pattern, overlap
from oncebridge.check.aws.queues import Queue
from oncebridge.check.finding import Severity


async def check_sink(
    visit: Visit, spot: Spot, by_function: Sequence[Queue], several: Sequence[Feed]
) -> None:
    """
    Look at where events go; *several* is what brings them, and *by_function* where from.

    Whether a source that has an address is the sink, the addresses say.
    """
    match spot.scheme:
        case "sqs":
            await _check_queue(visit, spot, by_function)
        case "kinesis":
            if await streams.of_spot(visit, spot) is not None:
                visit.fine(f"stream {spot.name}", "it is there")
        case "events":
            await _check_bus(visit, spot, several)
        case "sns":
            await _check_topic(visit, spot)


async def _check_queue(visit: Visit, spot: Spot, by_function: Sequence[Queue]) -> None:
    queue = await queues.of_spot(visit, spot)
    if queue is None:
        return
    if queue.arn not in [source.arn for source in by_function]:
        visit.fine(queue.subject, "it is there")
        return
    plain = queue.name.removesuffix(".fifo")
    visit.find(
        "sink-is-source",
        Severity.ERROR,
        queue.subject,
        seen="events are sent to the queue that they come from",
        why="Each comes back as its own duplicate, and nobody else reads it.",
        fix="Send to another queue:\n"
        f"{queues.make(queue.where, f'{plain}-out')}\n"
        f'sink = "sqs://{plain}-out"',
    )


async def _check_bus(visit: Visit, spot: Spot, several: Sequence[Feed]) -> None:
    subject = f"bus {spot.name}"
    name = spot.name
    if spot.resource.account:  # by its ARN, since it may be another account's
        where = spot.resource
        name = f"arn:{where.partition}:events:{where.region}:{where.account}:{where.name}"
    try:
        asked = visit.at("events", spot.where).ask("DescribeEventBus", Name=name)
        found = await visit.look(subject, "whether it is there", asked)
    except Absent:
        visit.find(
            "sink-missing",
            Severity.ERROR,
            subject,
            seen="there is no such bus",
            why="AWS takes events for a bus that does not exist, and drops them.",
            fix="Put the name or Region in the address right, or make the bus:\n"
            + aws(spot.where, "events", "create-event-bus", "--name", spot.name),
        )
        return
    if found is None:
        return
    back = [feed for feed in several if feed.bus.arn == found.get("Arn") and _may_match(feed, spot)]
    if not back:
        visit.fine(subject, "it is there, and does not lead back")
        return
    visit.find(
        "sink-feeds-source",
        Severity.WARNING,
        subject,
        seen=f"events are sent to it, and its {back[0].subject} brings events here",
        why="Whatever that rule matches of our own output comes back. oncebridge recognises it, "
        "and puts it into the dead letters.",
        fix="Let the rule match only what is not ours, by its source, or send to another bus:\n"
        + aws(spot.where, "events", "create-event-bus", "--name", f"{spot.name}-once"),
    )


def _may_match(feed: Feed, spot: Spot) -> bool:
    """Return whether a rule may match what we send, as far as its source tells."""
    ours = spot.options.source
    if feed.pattern is None:
        return not feed.is_scheduled
    if not feed.is_enabled or ours is None:
        return feed.is_enabled
    sent = Pattern.of({"source": [ours]})
    return overlap(sent, Pattern.of(feed.pattern)) is not Overlap.NEVER


async def _check_topic(visit: Visit, spot: Spot) -> None:
    where = spot.resource
    arn = f"arn:{where.partition or 'aws'}:sns:{where.region}:{where.account}:{where.name}"
    subject = f"topic {spot.name}"
    try:
        asked = visit.at("sns", spot.where).ask("GetTopicAttributes", TopicArn=arn)
        if await visit.look(subject, "whether it is there", asked) is not None:
            visit.fine(subject, "it is there")
    except Absent:
        visit.find(
            "sink-missing",
            Severity.ERROR,
            subject,
            seen="there is no such topic",
            why="oncebridge does not start without it.",
            fix="Put the ARN right, or make the topic:\n"
            + aws(spot.where, "sns", "create-topic", "--name", spot.name),
        )
