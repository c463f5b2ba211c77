"""
Check targets of rules: what they send, how long they retry, and their dead-letter queues.

A target can only be replaced as a whole, so all changes to it are collected first (`with_changes`),
and every finding has the same command.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from msgspec.structs import replace

from oncebridge.base.durations import format_duration
from oncebridge.check.aws.account import NoSuchResource
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.feeds import MOST_ATTEMPTS, EventFeed, EventFeeds
from oncebridge.check.aws.inputs import SentInput, sent_input
from oncebridge.check.aws.policies import EVENTS, lets_send
from oncebridge.check.aws.queues import QueueDescription, check_key, make, read_arn
from oncebridge.check.finding import Severity

_SHORTEST_AGE: Final = timedelta(hours=1)
_FEWEST_ATTEMPTS: Final = 10
_USUAL: Final = {"MaximumEventAgeInSeconds": 86400, "MaximumRetryAttempts": MOST_ATTEMPTS}
_CONVERSATION: Final = "$.detail.eventBody.conversationId"


def with_changes(
    context: AwsContext, feeds: EventFeeds, *, is_fifo: bool = False, is_stream: bool = False
) -> EventFeeds:
    """Return the feeds with the changes to make at each target."""
    return replace(
        feeds,
        found=tuple(
            replace(feed, changes=_changes(context, feed, is_fifo=is_fifo, is_stream=is_stream))
            for feed in feeds.found
        ),
    )


def _changes(
    context: AwsContext, feed: EventFeed, *, is_fifo: bool, is_stream: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if feed.is_enabled and _input_problem(context, feed) is not None:
        found |= {"Input": None, "InputPath": None, "InputTransformer": None}
    if feed.is_enabled and is_short(feed):
        found["RetryPolicy"] = _USUAL
    if feed.is_enabled and not feed.dead:
        found["DeadLetterConfig"] = {"Arn": "QUEUE-ARN"}
    if is_fifo and not has_group(feed):
        found["SqsParameters"] = {"MessageGroupId": _CONVERSATION if feed.is_genesys else "all"}
    if is_stream and needs_key(context, feed):
        entity = _CONVERSATION if feed.is_genesys else "$.detail.ENTITY"
        found["KinesisParameters"] = {"PartitionKeyPath": entity}
    return found


def is_short(feed: EventFeed) -> bool:
    """Return whether EventBridge gives up too soon."""
    return feed.attempts < _FEWEST_ATTEMPTS or feed.age < _SHORTEST_AGE


def has_group(feed: EventFeed) -> bool:
    """Return whether the target sets a MessageGroupId."""
    return bool((feed.target.get("SqsParameters") or {}).get("MessageGroupId"))


def needs_key(context: AwsContext, feed: EventFeed) -> bool:
    """Return whether records of a stream must stay in order, but have no partition key."""
    if (feed.target.get("KinesisParameters") or {}).get("PartitionKeyPath"):
        return False
    return any(
        route.settings.order == "entity" or any(rule.latest for rule in route.rules)
        for route in context.setup.routes
    )


async def check_target(context: AwsContext, feed: EventFeed) -> None:
    """Check a target of an enabled rule."""
    _check_input(context, feed)
    await _check_retries(context, feed)


# --- what is sent ---------------------------------------------------------------------------


def _check_input(context: AwsContext, feed: EventFeed) -> None:
    sent = sent_input(feed.target, bare=_is_bare(context))
    problem = _input_problem(context, feed)
    if problem is None:
        context.report_passed(feed.subject, f"sends {_sent_text(feed, sent)}")
        return
    severity, seen, why = problem
    hint = "\nor accept the detail alone as an event:\nbare = true" if sent.is_bare else ""
    context.report(
        "target-input",
        severity,
        feed.subject,
        seen=seen,
        why=why,
        fix=feed.fix("Send the event as it is") + hint,
    )


def _is_bare(context: AwsContext) -> bool:
    return all(route.settings.bare for route in context.setup.routes)


def _sent_text(feed: EventFeed, sent: SentInput) -> str:
    if feed.is_scheduled and sent.is_constant:
        return "a constant text, by a schedule"
    return f"the event{'s detail' if sent.is_bare else ' whole'}"


def _input_problem(context: AwsContext, feed: EventFeed) -> tuple[Severity, str, str] | None:
    """Return severity, seen and why if the target changes events; otherwise None."""
    bare = _is_bare(context)
    sent = sent_input(feed.target, bare=bare)
    if sent.is_constant and (feed.is_scheduled or not feed.rule_arn):
        return None  # it has no event to send, or that is not known
    says = f"the target has {sent.says}"
    if not sent.says or not (sent.lost or not sent.is_event):
        return None
    if sent.is_constant:
        why = "Every event arrives as the same text: the first is delivered, and all others are "
        return Severity.ERROR, says, why + "treated as its duplicates, or as unreadable."
    if not sent.is_event and sent.is_bare and context.setup.config.preset == "genesys":
        why = "Genesys details are recognised without their envelope, except by HTTP. Other events of "
        why += "the rule go to the dead letters. Id and source are missing, so a copy with an "
        return Severity.WARNING, says, why + "envelope and a copy without one are different events."
    if not sent.is_event:
        why = "oncebridge cannot read it as an event, and puts it into the dead letters."
        return Severity.ERROR, f"{says}, and bare = {str(bare).lower()}", why
    if sent.is_bare:
        return None  # and bare = true, so it is intended
    lost = ", ".join(name.replace("_", "-") for name in sent.lost)
    seen = f"{says}, which removes or changes: {lost}"
    if "detail" in sent.lost:
        why = "Events are identified by their detail. Two that differ only in the removed part are "
        return Severity.ERROR, seen, why + "treated as the same event, and the second is lost."
    is_by_source = context.setup.config.preset != "none" and "source" in sent.lost
    if is_by_source or "detail_type" in sent.lost:
        why = "Rules that match by it do not match any more, so other rules decide."
        return (Severity.ERROR if is_by_source else Severity.WARNING), seen, why
    why = (
        "A redelivery cannot be distinguished from an event that was published again, and rules "
        'with key = "id" use the content instead.'
    )
    return Severity.WARNING, seen, why


# --- retries and dead-letter queues ----------------------------------------


async def _check_retries(context: AwsContext, feed: EventFeed) -> None:
    if is_short(feed):
        context.report(
            "rule-retries",
            Severity.WARNING if feed.dead else Severity.ERROR,
            feed.subject,
            seen=f"EventBridge retries {feed.attempts} times, for {format_duration(feed.age)} at most",
            why="If the target is throttled or unavailable for longer, events "
            + ("go to the dead-letter queue." if feed.dead else "are lost."),
            fix=feed.fix("Let it retry for a day, which is the default"),
        )
    else:
        context.report_passed(feed.subject, f"retries for {format_duration(feed.age)}")
    if not feed.dead:
        context.report(
            "rule-no-dead-letters",
            Severity.WARNING,
            feed.subject,
            seen="the target has no dead-letter queue",
            why="Events that cannot be delivered (a deleted queue, a policy, a key, a day of "
            "throttling) are dropped without a trace.",
            fix=feed.fix("Set a dead-letter queue, as `oncebridge template worker` does"),
        )
        return
    await _check_undelivered(context, feed)


async def _check_undelivered(context: AwsContext, feed: EventFeed) -> None:
    name = feed.dead.rpartition(":")[2]
    try:
        queue = await read_arn(context, feed.dead, feed.where)
    except NoSuchResource:
        context.report(
            "rule-dead-letters-missing",
            Severity.ERROR,
            feed.subject,
            seen=f"its dead-letter queue {name} does not exist",
            why="Events that cannot be delivered are dropped without a trace.",
            fix="Create it, and allow EventBridge to send to it:\n"
            + make(feed.where, name, keeps_long=True),
        )
        return
    if queue is not None:
        check_policy(context, queue, [feed], is_aside=True)
        check_key(context, queue, is_aside=True)


def check_policy(
    context: AwsContext,
    queue: QueueDescription,
    several: Sequence[EventFeed],
    *,
    is_aside: bool = False,
) -> None:
    """
    Check whether EventBridge may send to a queue for each of its rules.

    With *is_aside* it is their dead-letter queue.
    """
    for feed in several:
        if not feed.is_enabled or not feed.rule_arn:
            continue  # it sends nothing, or the rule is not known
        if feed.target.get("RoleArn") and not is_aside:
            continue  # it sends as that role
        answer = lets_send(queue.policy, rule=feed.rule_arn, queue=queue.arn)
        if answer:
            context.report_passed(queue.subject, f"policy: {feed.subject} may send")
        elif answer is None:
            context.report(
                "sqs-policy-unclear",
                Severity.NOTE,
                queue.subject,
                seen=f"whether its policy allows {feed.subject} to send depends on conditions other "
                "than aws:SourceArn and aws:SourceAccount",
                why="If they are not met, EventBridge is denied, and events are not delivered.",
                fix="Check FailedInvocations of the rule in CloudWatch, or allow it without them:\n"
                + _statement(queue, feed),
            )
        else:
            context.report(
                "sqs-policy-closed",
                Severity.ERROR,
                queue.subject,
                seen=f"its policy does not allow {EVENTS} to send for {feed.subject}",
                why=_denied(feed, is_aside=is_aside),
                fix=f"Add this statement to the policy of the queue:\n{_statement(queue, feed)}",
            )


def _denied(feed: EventFeed, *, is_aside: bool) -> str:
    if is_aside:
        return "Events that the rule cannot deliver are dropped."
    end = "moves the event to the dead-letter queue." if feed.dead else "drops the event."
    return f"EventBridge is denied, does not retry, and {end}"


def _statement(queue: QueueDescription, feed: EventFeed) -> str:
    statement: dict[str, Any] = {
        "Effect": "Allow",
        "Principal": {"Service": EVENTS},
        "Action": "sqs:SendMessage",
        "Resource": queue.arn,
        "Condition": {"ArnEquals": {"aws:SourceArn": feed.rule_arn}},
    }
    return json.dumps(statement)
