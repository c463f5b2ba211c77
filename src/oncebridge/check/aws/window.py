"""
How long after an event a copy of it can come, and whether it is still remembered then.

Genesys Cloud publishes again for up to four days, EventBridge tries for as long as the rule says,
and then a message waits in its queue for as long as nobody reads it. The first two add up, and
the window has to be longer. It has to be longer than the queue's retention too: so long one
message can come back. Only if copies come late *and* then wait do all three add up; what is left
for that is told.
"""

from datetime import timedelta
from typing import Final

from oncebridge.base.durations import format_duration
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.feeds import LONGEST_AGE, EventFeeds
from oncebridge.check.aws.rules import is_genesys
from oncebridge.check.finding import Severity

GENESYS_AGAIN: Final = timedelta(days=4)
"""So long Genesys Cloud sends again what EventBridge did not take."""


def check_window(
    context: AwsContext, feeds: EventFeeds, *, retention: timedelta | None = None
) -> None:
    """
    See whether every window outlasts what may bring an event again by one way.

    *retention* is how long messages are kept there, if they are.
    """
    subject, several = feeds.to, feeds.found
    window, whose = _shortest(context)
    parts: list[tuple[timedelta, str]] = []
    if is_genesys(context, several):
        parts.append((GENESYS_AGAIN, "Genesys Cloud publishes again"))
    if several:
        slowest = max(several, key=lambda feed: feed.age)
        parts.append((slowest.age, f"{slowest.subject} tries again"))
    elif not feeds.is_sure:
        parts.append((LONGEST_AGE, "EventBridge tries again, unless its rule says otherwise"))
    again = sum((time for time, _ in parts), timedelta())
    summed = " + ".join(f"{format_duration(time)} ({why})" for time, why in parts)
    longest = max(again, retention or timedelta())
    kept = "" if retention is None else f"messages are kept for {_short(retention)}"
    if window >= longest:
        left = f"{format_duration(window - again)} left for a backlog"
        told = [kept, f"{summed}, with {left}" if parts else ""]
        covered = "; ".join(one for one in told if one)
        context.report_passed(
            subject, f"window: {format_duration(window)} is long enough ({covered})"
        )
        return
    late = f"a copy can be published as late as {summed}"
    if len(parts) > 1:
        late += f" = {format_duration(again)}"
    seen = "; ".join(
        one for one in (f"{whose} is {format_duration(window)}", kept, late if parts else "") if one
    )
    wished = _whole_days(longest + timedelta(days=1))
    context.report(
        "window-horizon",
        Severity.WARNING,
        subject,
        seen=seen,
        why="What comes again after its window is taken for new, and passed on a second time.",
        fix=f'Remember for longer, with a day to spare:\nwindow = "{wished}"',
    )


def _shortest(context: AwsContext) -> tuple[timedelta, str]:
    """Find the shortest window: of a rule, by its longest tier, or of whatever no rule matches."""
    found: list[tuple[timedelta, str]] = []
    for route in context.setup.routes:
        found.append((route.settings.window, "window"))
        for rule in route.rules:
            if rule.tiers:
                longest = max(tier.window for tier in rule.tiers)
                found.append((longest, f"the window of rule {rule.name!r}"))
    return min(found, key=lambda one: one[0])


def _short(time: timedelta) -> str:
    """Write a duration; one of days that are not whole, in days all the same."""
    day = timedelta(days=1)
    return format_duration(time) if time < day or not time % day else f"{time / day:.1f}d"


def _whole_days(time: timedelta) -> str:
    return f"{-(-time // timedelta(days=1))}d"
