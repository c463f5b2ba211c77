"""Rules that bring events: whether there are any, what they leave out, and what is behind them."""

import asyncio
from collections.abc import Sequence

from oncebridge.check.aws.account import AwsLocation
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.feeds import Bus, EventFeed, EventFeeds, partner_sources
from oncebridge.check.aws.targets import check_target
from oncebridge.check.finding import Severity


async def check_feeds(context: AwsContext, feeds: EventFeeds, where: AwsLocation) -> None:
    """Look at all rules that lead to one place."""
    subject = feeds.to
    if not feeds.found:
        if feeds.is_sure:
            context.report(
                "rule-none",
                Severity.NOTE,
                subject,
                seen="no rule of any bus in this account and Region has it as a target",
                why="If EventBridge is to feed it, nothing will come. Topics, pipes, other "
                "accounts and Regions that may feed it cannot be seen from here.",
                fix="If a rule is missing, `oncebridge template worker` prints one.",
            )
        return
    is_any_enabled = any(feed.is_enabled for feed in feeds.found)
    for feed in feeds.found:
        _check_state(context, feed, is_alone=not is_any_enabled)
        if feed.is_enabled:
            await check_target(context, feed)
    _check_genesys(context, subject, feeds.found)
    buses = {feed.bus.name: feed.bus for feed in feeds.found}.values()
    await asyncio.gather(*[_check_archives(context, bus, where) for bus in buses])


def _check_state(context: AwsContext, feed: EventFeed, *, is_alone: bool) -> None:
    if feed.is_enabled:
        context.report_passed(feed.subject, "enabled")
        return
    context.report(
        "rule-disabled",
        Severity.ERROR if is_alone else Severity.NOTE,
        feed.subject,
        seen="the rule is disabled" + (", and no other brings events" if is_alone else ""),
        why="Events that it would match are not delivered, and not kept: they are gone.",
        fix=feed.command("enable-rule", named="--name"),
    )


# --- Genesys Cloud, archives ------------------------------------------------------------------


def _check_genesys(context: AwsContext, subject: str, several: Sequence[EventFeed]) -> None:
    by_organisation: dict[str, set[str]] = {}
    for feed in several:
        if feed.bus.organisation and feed.is_enabled:
            by_organisation.setdefault(feed.bus.organisation, set()).add(feed.bus.name)
    for organisation, names in by_organisation.items():
        if len(names) < 2:
            continue
        suffixes = ", ".join(sorted(name.rpartition("/")[2] for name in names))
        is_one = context.setup.config.genesys.scope == "organisation"
        context.report(
            "genesys-two-buses",
            Severity.WARNING,
            subject,
            seen=f"{len(names)} integrations of organisation {organisation} feed it: {suffixes}",
            why="A topic that both integrations select is published twice, with two ids and two "
            "sources. "
            + (
                "oncebridge takes them for one (genesys.scope), as long as its preset or a rule "
                "with that scope decides."
                if is_one and context.setup.config.preset == "genesys"
                else "With this configuration both are passed on."
            ),
            fix="Give each integration topics of its own (Genesys Cloud: Admin, Integrations, "
            "Topic Filtering), or disable one rule. To take both for one:\n"
            'preset = "genesys"\n[genesys]\nscope = "organisation"',
        )


async def check_partner_sources(context: AwsContext, where: AwsLocation) -> None:
    """Look for event sources of Genesys Cloud that nobody has taken into use."""
    subject = "Genesys Cloud event sources"
    asked = partner_sources(context.at("events", where))
    found = await context.look(subject, "whether they are in use", asked)
    if found is None:
        return
    waiting = [one for one in found if one.get("State") == "PENDING"]
    for one in waiting:
        name = one.get("Name", "")
        context.report(
            "genesys-pending",
            Severity.WARNING,
            f"event source {name}",
            seen="its state is PENDING: it has no event bus",
            why="It takes what Genesys Cloud sends and delivers nothing, and in the end expires.",
            fix="Make its bus (and then a rule), or remove the integration in Genesys Cloud:\n"
            + aws(
                where,
                "events",
                "create-event-bus",
                *("--name", name, "--event-source-name", name),
            ),
        )
    if not waiting:
        context.report_passed(subject, "none is pending")


async def _check_archives(context: AwsContext, bus: Bus, where: AwsLocation) -> None:
    if not bus.arn:
        return
    events = context.at("events", where)
    asked = events.ask_all("ListArchives", "Archives", EventSourceArn=bus.arn)
    found = await context.look_if_exists(f"bus {bus.name}", "its archives", asked)
    for one in found or ():
        days = one.get("RetentionDays") or 0
        rules = {rule.on_replay for route in context.setup.routes for rule in route.rules}
        how = ", ".join(sorted(rules or {"deduplicate"}))
        context.report(
            "bus-archive",
            Severity.NOTE,
            f"bus {bus.name}",
            seen=f"archive {one.get('ArchiveName')} keeps events "
            + (f"for {days} days" if days else "for ever"),
            why=f"A replay brings them here again; on_replay is {how}. With `deduplicate`, what "
            "is within its window is dropped, and what is older is passed on again.",
            fix='Decide which you want: on_replay = "deduplicate", "deliver" or "separate" in a '
            "rule; and replay to other rules with FilterArns.",
        )


def is_genesys(context: AwsContext, several: Sequence[EventFeed]) -> bool:
    """Return whether events of Genesys Cloud come this way."""
    return context.setup.config.preset == "genesys" or any(feed.is_genesys for feed in several)
