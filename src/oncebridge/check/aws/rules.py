"""Check EventBridge rules: state, targets, Genesys sources, archives."""

import asyncio
from collections.abc import Sequence

from oncebridge.check.aws.account import AwsLocation
from oncebridge.check.aws.commands import aws
from oncebridge.check.aws.context import AwsContext
from oncebridge.check.aws.feeds import Bus, EventFeed, EventFeeds, partner_sources
from oncebridge.check.aws.targets import check_target
from oncebridge.check.finding import Severity


async def check_feeds(context: AwsContext, feeds: EventFeeds, where: AwsLocation) -> None:
    """Check all rules that send events to one target."""
    subject = feeds.to
    if not feeds.found:
        if feeds.is_sure:
            context.report(
                "rule-none",
                Severity.NOTE,
                subject,
                seen="no rule of any bus in this account and Region has it as a target",
                why="If EventBridge is its source, nothing arrives. Topics, pipes, other accounts and "
                "other Regions are not checked.",
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
        seen="the rule is disabled" + (", and no other rule sends events" if is_alone else ""),
        why="Events that it would match are not delivered and not kept.",
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
            seen=f"{len(names)} integrations of organisation {organisation} send events to it: {suffixes}",
            why="A topic that both integrations select is published twice, with different ids and "
            "sources. "
            + (
                "oncebridge treats them as one source (genesys.scope) if the preset, or a rule with "
                "that scope, matches."
                if is_one and context.setup.config.preset == "genesys"
                else "With this configuration both are delivered."
            ),
            fix="Select each topic in one integration only (Genesys Cloud: Admin, Integrations, "
            "Topic Filtering), or disable one rule. To treat both as one source:\n"
            'preset = "genesys"\n[genesys]\nscope = "organisation"',
        )


async def check_partner_sources(context: AwsContext, where: AwsLocation) -> None:
    """Check for event sources of Genesys Cloud without an event bus."""
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
            why="It accepts events of Genesys Cloud, delivers none, and expires.",
            fix="Create its bus (and then a rule), or remove the integration in Genesys Cloud:\n"
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
            + (f"for {days} days" if days else "forever"),
            why=f"A replay sends them here again; on_replay is {how}. With `deduplicate`, events "
            "within their window are dropped, and older ones are delivered again.",
            fix='Set on_replay = "deduplicate", "deliver" or "separate" in a rule; or limit a replay '
            "to other rules with FilterArns.",
        )


def is_genesys(context: AwsContext, several: Sequence[EventFeed]) -> bool:
    """Return whether the feeds send events of Genesys Cloud."""
    return context.setup.config.preset == "genesys" or any(feed.is_genesys for feed in several)
