"""
What is wrong with settings that are each allowed: with the world they are for, or together.

Nothing is opened and nobody is asked. How long an event may come again is known for what sends
it: EventBridge tries for a day, and Genesys publishes again for four. A queue or a stream keeps
it longer still; that is looked up at AWS (`oncebridge.check.aws`).
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final

from oncebridge.base.durations import format_duration
from oncebridge.check.finding import Checkup, Finding, Severity
from oncebridge.check.rules import RuleContext, is_genesys, lint, mentions_genesys
from oncebridge.engine.settings import Settings
from oncebridge.events.key import IdKey
from oncebridge.events.rules import Rule, Tier
from oncebridge.operate.operator_log import KEPT_MS, MOST_ACTS
from oncebridge.service.addresses import scheme_of
from oncebridge.service.config import Route, Setup

EVENTBRIDGE_RETRIES: Final = timedelta(days=1)
GENESYS_RETRIES: Final = timedelta(days=4) + EVENTBRIDGE_RETRIES
_LONG_LEASE: Final = timedelta(minutes=15)
_KEPT: Final = timedelta(milliseconds=KEPT_MS)
_FROM_FILES: Final = ("file", "-")


def check_settings(setup: Setup, checkup: Checkup) -> None:
    """Look at all that the configuration says by itself."""
    _check_windows(setup, checkup)
    for route in setup.routes:
        _check_route(setup, route, checkup)
    _check_modes(setup, checkup)
    _check_operation(setup, checkup)


def check_rules(setup: Setup, checkup: Checkup) -> None:
    """Look at the rules of every route; what routes share is told once."""
    about = _about(setup)
    found: dict[tuple[str, str, str], Finding] = {}
    for route in setup.routes:
        rules, own = _rules(setup, route)
        wrong = lint(rules, about, own=own)
        found |= {(one.code, one.subject, one.seen): one for one in wrong}
        if not wrong:
            checkup.report_passed(f"route {route.name}", "its rules")
    checkup.findings += found.values()


def is_service(setup: Setup) -> bool:
    """Return whether it runs on; what reads files comes to its end."""
    return any(scheme_of(place.url) not in _FROM_FILES for place in setup.config.source)


def _about(setup: Setup) -> RuleContext:
    config = setup.config
    prefixes = tuple(config.genesys.sources)
    allowed = config.allow.sources
    return RuleContext(
        preset=config.preset,
        genesys=prefixes,
        is_genesys=any(source.startswith(prefixes) for source in allowed)
        or any(mentions_genesys(_rules(setup, route)[0], prefixes) for route in setup.routes),
    )


def _rules(setup: Setup, route: Route) -> tuple[list[Rule], int]:
    """Return the rules of a route, and how many of them somebody wrote; a preset's come after."""
    of_routes = {way.name: len(way.rules) for way in setup.config.routes}
    rules = [rule for rule in route.rules if rule.guard is None]
    return rules, len(setup.config.rules) + of_routes.get(route.name, 0)


# --- how long an event may come again -----------------------------------------------------------


def _check_windows(setup: Setup, checkup: Checkup) -> None:
    if not is_service(setup):
        return
    about = _about(setup)
    short: dict[tuple[timedelta, timedelta], dict[str, None]] = {}
    common: dict[str, timedelta] = {}
    for route in setup.routes:
        for name, window, needed in _windows(_rules(setup, route)[0], route.settings, about):
            if window < needed and window == setup.config.window:
                common[name] = needed
            elif window < needed:
                short.setdefault((window, needed), {})[name] = None
    if common:  # one setting, so one answer: what suits all of them
        _short(setup, setup.config.window, max(common.values()), list(common), checkup)
    for (window, needed), names in short.items():
        _short(setup, window, needed, list(names), checkup)
    if not common and not short:
        checkup.report_passed("windows", "each outlasts the retries of what sends events")


def _windows(
    rules: Sequence[Rule], settings: Settings, about: RuleContext
) -> Iterator[tuple[str, timedelta, timedelta]]:
    """List what each rule recognises an event for, and what it should."""
    default = Rule(name="", tiers=(Tier(window=settings.window),))
    for rule in [*rules, default]:
        if rule.tiers:
            # What is published again has another id, so only the other tiers know it.
            lasting = [tier.window for tier in rule.tiers if not isinstance(tier.key, IdKey)]
            name = f"rule {rule.name}" if rule.name else "events that no rule matches"
            if lasting and is_genesys(rule.match, about):
                yield name, max(lasting), GENESYS_RETRIES
            else:
                yield name, max(tier.window for tier in rule.tiers), EVENTBRIDGE_RETRIES
        if rule.match is None:
            return


def _short(
    setup: Setup, window: timedelta, needed: timedelta, names: Sequence[str], checkup: Checkup
) -> None:
    is_common = window == setup.config.window
    subject = "window" if is_common else ", ".join(names)
    where = f" ({', '.join(names)})" if is_common else ""
    advised = format_duration(needed + timedelta(days=1))
    is_genesys_time = needed == GENESYS_RETRIES
    tiers = "; of several tiers, in one that does not go by the id" if is_genesys_time else ""
    why = (
        "Genesys publishes again for up to four days, and EventBridge tries to deliver for another"
        if is_genesys_time
        else "EventBridge tries to deliver for 24 hours"
    )
    checkup.report(
        "window-short",
        Severity.WARNING,
        subject,
        seen=f"an event is remembered for {format_duration(window)}{where}",
        why=f"{why}. What comes again later than {format_duration(window)} after its delivery, as "
        "after an outage, is delivered a second time.",
        fix=f"Remember it for {format_duration(needed)} at least, better with a margin"
        f'{tiers}:\nwindow = "{advised}"',
    )


# --- one route ----------------------------------------------------------------------------------


def _check_route(setup: Setup, route: Route, checkup: Checkup) -> None:
    settings = route.settings
    subject = f"route {route.name}"
    if settings.lease > _LONG_LEASE:
        checkup.report(
            "lease-long",
            Severity.NOTE,
            subject,
            seen=f"lease = {format_duration(settings.lease)}",
            why="When a worker dies, nobody may send what it held until the lease ends.",
            fix='A lease is prolonged while its worker lives, so it can be short:\nlease = "30s"',
        )
    if settings.max_attempts == 1:
        checkup.report(
            "attempts-one",
            Severity.WARNING,
            subject,
            seen="max_attempts = 1",
            why="One time-out or one 500 of the sink, and the event is in the dead letters.",
            fix="Make more attempts; each carries the same Idempotency-Key:\nmax_attempts = 8",
        )
    _check_patience(setup, route, subject, checkup)


def _check_patience(setup: Setup, route: Route, subject: str, checkup: Checkup) -> None:
    settings = route.settings
    pauses = [
        min(settings.backoff * 2 ** min(n, 40), settings.max_backoff)
        for n in range(min(settings.max_attempts, 10_000) - 1)
    ]
    shortest = min(
        [max(tier.window for tier in rule.tiers) for rule in route.rules if rule.tiers]
        or [settings.window]
    )
    if max(pauses, default=timedelta()) >= shortest:
        checkup.report(
            "backoff-window",
            Severity.WARNING,
            subject,
            seen=f"a pause between attempts may be {format_duration(max(pauses))} long, and a "
            f"window is {format_duration(shortest)}",
            why="The attempts are remembered for as long as the window: the count begins anew, and "
            "an event that can never succeed is tried for ever.",
            fix='Keep the pauses below the window:\nmax_backoff = "5m"',
        )
    takes_http = any(scheme_of(place.url).startswith("http") for place in setup.config.source)
    total = sum(pauses, timedelta())
    if takes_http and setup.config.spool is None and total > EVENTBRIDGE_RETRIES:
        checkup.report(
            "attempts-outlast",
            Severity.WARNING,
            subject,
            seen=f"{settings.max_attempts} attempts may take {total.days} days and more",
            why="EventBridge gives up after 24 hours: such an event is lost, or in the dead-letter "
            "queue of its rule, before it is in the dead letters here.",
            fix="Make fewer attempts or shorter pauses, or take arrivals on disk first:\n"
            'spool = "oncebridge-spool.db"',
        )


# --- the whole ----------------------------------------------------------------------------------


def _check_modes(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    shadowed = [route.name for route in setup.routes if route.settings.mode == "shadow"]
    if shadowed:
        checkup.report(
            "shadow",
            Severity.NOTE,
            f"route {', '.join(shadowed)}",
            seen='mode = "shadow"',
            why="Everything is forwarded, duplicates too; what would be dropped is only counted.",
            fix='When the counts are right:\nmode = "enforce"',
        )
    if config.on_store_outage == "deliver":
        checkup.report(
            "outage-deliver",
            Severity.NOTE,
            "on_store_outage",
            seen='on_store_outage = "deliver"',
            why="While the store is down every copy is sent, marked as unprotected.",
            fix="If the receiver cannot bear that, hand events back meanwhile; nothing is lost:\n"
            'on_store_outage = "hold"',
        )
    if config.bare and not any(_takes_bare(route) for route in setup.routes):
        checkup.report(
            "bare-unneeded",
            Severity.NOTE,
            "bare",
            seen="bare = true, and all rules match by source or detail-type",
            why="An event without an envelope has neither, so no rule is for it; and any JSON "
            "object is taken for an event instead of going to the dead letters.",
            fix="Leave it out, or add a rule for what has no envelope:\nbare = false",
        )
    has_matches = all(route.match is not None for route in setup.routes)
    if has_matches and config.unrouted == "discard":
        checkup.report(
            "unrouted-discard",
            Severity.NOTE,
            "unrouted",
            seen='unrouted = "discard", and every route has a match',
            why="An event that no route is for, as after a change of its detail-type, is dropped.",
            fix='Keep such events until it is clear that nobody wants them:\nunrouted = "dead"',
        )


def _takes_bare(route: Route) -> bool:
    rules = [rule for rule in route.rules if rule.guard is None]
    named = {"source", "detail-type"}
    return not rules or any(
        rule.bare is not None or rule.match is None or not rule.match.fields & named
        for rule in rules
    )


def _check_operation(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    schemes = {scheme_of(place.url) for place in config.source}
    if schemes & {"sqs", "kinesis"} and not schemes & {"http", "https"} and config.health is None:
        checkup.report(
            "health-missing",
            Severity.NOTE,
            "health",
            seen="a worker without a health address",
            why="Nobody can ask whether it lives and whether events pass: a worker that hangs is "
            "not restarted, and a deployment that does not work goes on.",
            fix='Answer /healthz and /readyz:\nhealth = "http://127.0.0.1:8081"',
        )
    if config.audit is None and is_service(setup):
        checkup.report(
            "audit-missing",
            Severity.NOTE,
            "audit",
            seen="no file for what operators do",
            why="Who let an event pass again, dropped a dead letter or paused a route stands in "
            "the log, and in the store for a while: the last "
            f"{MOST_ACTS} acts on each event and route, for {_KEPT.days} days.",
            fix='Keep all of it:\naudit = "oncebridge-audit.ndjson"',
        )
