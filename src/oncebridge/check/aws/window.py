"""
Check that windows are longer than the time in which an event can be redelivered.

Genesys Cloud retries for up to four days, EventBridge for as long as the rule says, and then a
message waits in its queue until it is read. The window has to be longer than the sum of the first
two, and longer than the retention of the queue. All three add up only if a late copy also waits;
the time left for that is reported.
"""

from datetime import timedelta
from typing import Final

from oncebridge.base.durations import format_duration
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.feeds import LONGEST_AGE, EventFeeds
from oncebridge.check.aws.rules import is_genesys
from oncebridge.check.finding import Severity

GENESYS_AGAIN: Final = timedelta(days=4)
"""How long Genesys Cloud retries what EventBridge did not accept."""


def check_window(
    context: AwsContext, feeds: EventFeeds, *, retention: timedelta | None = None
) -> None:
    """
    Check that every window is longer than an event can be redelivered by these feeds.

    *retention* is how long the queue or stream keeps messages, if there is one.
    """
    subject, several = feeds.to, feeds.found
    window, whose = _shortest(context)
    parts: list[tuple[timedelta, str]] = []
    if is_genesys(context, several):
        parts.append((GENESYS_AGAIN, "Genesys Cloud retries"))
    if several:
        slowest = max(several, key=lambda feed: feed.age)
        parts.append((slowest.age, f"{slowest.subject} retries"))
    elif not feeds.is_sure:
        parts.append((LONGEST_AGE, "EventBridge retries, unless its rule says otherwise"))
    again = sum((time for time, _ in parts), timedelta())
    summed = " + ".join(f"{format_duration(time)} ({why})" for time, why in parts)
    longest = max(again, retention or timedelta())
    kept = "" if retention is None else f"messages are kept for {_short(retention)}"
    if window >= longest:
        left = f"{format_duration(window - again)} left for a backlog"
        texts = [kept, f"{summed}, with {left}" if parts else ""]
        covered = "; ".join(one for one in texts if one)
        context.report_passed(
            subject, f"window: {format_duration(window)} is long enough ({covered})"
        )
        return
    late = f"an event can be redelivered after {summed}"
    if len(parts) > 1:
        late += f" = {format_duration(again)}"
    seen = "; ".join(
        one for one in (f"{whose} is {format_duration(window)}", kept, late if parts else "") if one
    )
    required = _whole_days(longest + timedelta(days=1))
    context.report(
        "window-horizon",
        Severity.WARNING,
        subject,
        seen=seen,
        why="An event that is redelivered after its window counts as new, and is delivered twice.",
        fix=f'Use a longer window, with a day to spare:\nwindow = "{required}"',
    )


def _shortest(context: AwsContext) -> tuple[timedelta, str]:
    """Return the shortest window of a rule (its longest tier) or of events that no rule matches."""
    found: list[tuple[timedelta, str]] = []
    for route in context.setup.routes:
        found.append((route.settings.window, "window"))
        for rule in route.rules:
            if rule.tiers:
                longest = max(tier.window for tier in rule.tiers)
                found.append((longest, f"the window of rule {rule.name!r}"))
    return min(found, key=lambda one: one[0])


def _short(time: timedelta) -> str:
    """Return a duration as text; above a day in days."""
    day = timedelta(days=1)
    return format_duration(time) if time < day or not time % day else f"{time / day:.1f}d"


def _whole_days(time: timedelta) -> str:
    return f"{-(-time // timedelta(days=1))}d"
