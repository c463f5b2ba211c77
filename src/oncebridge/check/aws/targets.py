"""
Targets of rules: what they send, for how long they try, and what becomes of what they cannot.

A target can only be replaced as a whole, so all that is to be changed at one is found out first
(`with_changes`), and every finding gives the same command.
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
from oncebridge.check.aws.queues import SqsQueue, check_key, make, read_arn
from oncebridge.check.finding import Severity

_SHORTEST_AGE: Final = timedelta(hours=1)
_FEWEST_ATTEMPTS: Final = 10
_USUAL: Final = {"MaximumEventAgeInSeconds": 86400, "MaximumRetryAttempts": MOST_ATTEMPTS}
_CONVERSATION: Final = "$.detail.eventBody.conversationId"


def with_changes(
    context: AwsContext, feeds: EventFeeds, *, is_fifo: bool = False, is_stream: bool = False
) -> EventFeeds:
    """Find out what is to be changed at each target."""
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
    """Return whether messages to a FIFO queue are given what it demands."""
    return bool((feed.target.get("SqsParameters") or {}).get("MessageGroupId"))


def needs_key(context: AwsContext, feed: EventFeed) -> bool:
    """Return whether records of a stream have to stay in order, and do not."""
    if (feed.target.get("KinesisParameters") or {}).get("PartitionKeyPath"):
        return False
    return any(
        route.settings.order == "entity" or any(rule.latest for rule in route.rules)
        for route in context.setup.routes
    )


async def check_target(context: AwsContext, feed: EventFeed) -> None:
    """Look at a target of a rule that is enabled."""
    _check_input(context, feed)
    await _check_retries(context, feed)


# --- what is sent ---------------------------------------------------------------------------


def _check_input(context: AwsContext, feed: EventFeed) -> None:
    sent = sent_input(feed.target, bare=_is_bare(context))
    told = _input_problem(context, feed)
    if told is None:
        context.report_passed(feed.subject, f"sends {_sent_text(feed, sent)}")
        return
    severity, seen, why = told
    hint = "\nor take the detail alone for an event:\nbare = true" if sent.is_bare else ""
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
        return "a text of its own, by the clock"
    return f"the event{'s detail' if sent.is_bare else ' whole'}"


def _input_problem(context: AwsContext, feed: EventFeed) -> tuple[Severity, str, str] | None:
    """Say what is wrong with what is sent; None where nothing is."""
    bare = _is_bare(context)
    sent = sent_input(feed.target, bare=bare)
    if sent.is_constant and (feed.is_scheduled or not feed.rule_arn):
        return None  # there is no event that it could send, or that is not known
    says = f"the target has {sent.says}"
    if not sent.says or not (sent.lost or not sent.is_event):
        return None
    if sent.is_constant:
        why = "Every event arrives as the same text: the first is passed on, and all others are "
        return Severity.ERROR, says, why + "taken for its duplicates, or for no events at all."
    if not sent.is_event and sent.is_bare and context.setup.config.preset == "genesys":
        why = (
            "Genesys details are recognised without their envelope, except by HTTP. Whatever else "
        )
        why += "the rule matches goes to the dead letters, and id and source are gone: copies with "
        return Severity.WARNING, says, why + "an envelope and copies without one are two events."
    if not sent.is_event:
        why = "What arrives is no event to oncebridge, and goes to the dead letters."
        return Severity.ERROR, f"{says}, and bare = {str(bare).lower()}", why
    if sent.is_bare:
        return None  # and bare = true, so it is meant
    lost = ", ".join(name.replace("_", "-") for name in sent.lost)
    seen = f"{says}, which leaves out or changes: {lost}"
    if "detail" in sent.lost:
        why = "Events are told apart by their detail. Two that differ in what is left out are "
        return Severity.ERROR, seen, why + "taken for the same, and the second is lost."
    is_by_source = context.setup.config.preset != "none" and "source" in sent.lost
    if is_by_source or "detail_type" in sent.lost:
        why = "Rules do not recognise the events by it any more, so others decide what is the same."
        return (Severity.ERROR if is_by_source else Severity.WARNING), seen, why
    why = (
        "A redelivery can not be told from an event that was published again, and rules with "
        'key = "id" fall back to the content.'
    )
    return Severity.WARNING, seen, why


# --- what becomes of an event that cannot be delivered ----------------------------------------


async def _check_retries(context: AwsContext, feed: EventFeed) -> None:
    if is_short(feed):
        context.report(
            "rule-retries",
            Severity.WARNING if feed.dead else Severity.ERROR,
            feed.subject,
            seen=f"EventBridge tries {feed.attempts} times again, for {format_duration(feed.age)} "
            "at most",
            why="A target that throttles or is away for longer than that costs events"
            + (", which then wait in the dead-letter queue." if feed.dead else "; they are gone."),
            fix=feed.fix("Let it try for a day, as it does by itself"),
        )
    else:
        context.report_passed(feed.subject, f"tries for {format_duration(feed.age)}")
    if not feed.dead:
        context.report(
            "rule-no-dead-letters",
            Severity.WARNING,
            feed.subject,
            seen="the target has no dead-letter queue",
            why="What cannot be delivered (a queue that is gone, a policy, a key, a day of "
            "throttling) is dropped without a trace.",
            fix=feed.fix("Keep it in a queue of its own, as `oncebridge template worker` does"),
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
            seen=f"its dead-letter queue {name} is not there",
            why="What cannot be delivered is dropped without a trace.",
            fix="Make it, and let EventBridge send to it:\n"
            + make(feed.where, name, keeps_long=True),
        )
        return
    if queue is not None:
        check_policy(context, queue, [feed], is_aside=True)
        check_key(context, queue, is_aside=True)


def check_policy(
    context: AwsContext, queue: SqsQueue, several: Sequence[EventFeed], *, is_aside: bool = False
) -> None:
    """
    See whether EventBridge may send to a queue for each of its rules.

    With *is_aside* it is the queue for what they cannot deliver.
    """
    for feed in several:
        if not feed.is_enabled or not feed.rule_arn:
            continue  # it sends nothing, or it is not known which rule it is
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
                seen=f"whether its policy lets {feed.subject} send depends on conditions other "
                "than aws:SourceArn and aws:SourceAccount",
                why="If they do not hold, EventBridge is denied, and events are not delivered.",
                fix="See FailedInvocations of the rule in CloudWatch, or allow it plainly:\n"
                + _statement(queue, feed),
            )
        else:
            context.report(
                "sqs-policy-closed",
                Severity.ERROR,
                queue.subject,
                seen=f"its policy does not let {EVENTS} send for {feed.subject}",
                why=_denied(feed, is_aside=is_aside),
                fix=f"Add this statement to the policy of the queue:\n{_statement(queue, feed)}",
            )


def _denied(feed: EventFeed, *, is_aside: bool) -> str:
    if is_aside:
        return "What the rule cannot deliver cannot be set aside either, and is dropped."
    end = "sets the event aside." if feed.dead else "drops the event."
    return f"EventBridge is denied, does not try again, and {end}"


def _statement(queue: SqsQueue, feed: EventFeed) -> str:
    statement: dict[str, Any] = {
        "Effect": "Allow",
        "Principal": {"Service": EVENTS},
        "Action": "sqs:SendMessage",
        "Resource": queue.arn,
        "Condition": {"ArnEquals": {"aws:SourceArn": feed.rule_arn}},
    }
    return json.dumps(statement)
