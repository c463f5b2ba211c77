"""
Check settings that are valid alone, but wrong together or for the sender of the events.

Nothing is opened and no server is called. How long an event may be redelivered is known by its
sender: EventBridge retries for a day, and Genesys publishes again for four. A queue or a stream
keeps it longer; `oncebridge.check.aws` looks that up.
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
    """Check the configuration by itself."""
    _check_windows(setup, checkup)
    for route in setup.routes:
        _check_route(setup, route, checkup)
    _check_modes(setup, checkup)
    _check_operation(setup, checkup)


def check_rules(setup: Setup, checkup: Checkup) -> None:
    """Check the rules of every route; rules that routes share are reported once."""
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
    """Return whether it runs as a service; a run that reads files ends."""
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
    """Return the rules of a route, and how many are the user's own; a preset's come after."""
    of_routes = {way.name: len(way.rules) for way in setup.config.routes}
    rules = [rule for rule in route.rules if rule.guard is None]
    return rules, len(setup.config.rules) + of_routes.get(route.name, 0)


# --- how long an event may be redelivered -----------------------------------------------------------


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
    if common:  # one setting, so one finding: the longest that is needed
        _short(setup, setup.config.window, max(common.values()), list(common), checkup)
    for (window, needed), names in short.items():
        _short(setup, window, needed, list(names), checkup)
    if not common and not short:
        checkup.report_passed("windows", "each is longer than the retries of the sender")


def _windows(
    rules: Sequence[Rule], settings: Settings, about: RuleContext
) -> Iterator[tuple[str, timedelta, timedelta]]:
    """Return the window of each rule, and the window that it needs."""
    default = Rule(name="", tiers=(Tier(window=settings.window),))
    for rule in [*rules, default]:
        if rule.tiers:
            # An event that is published again has another id, so only the other tiers recognise it.
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
    tiers = ", in a tier whose key is not the id" if is_genesys_time else ""
    why = (
        "Genesys retries for up to four days, and EventBridge for another 24 hours"
        if is_genesys_time
        else "EventBridge retries for 24 hours"
    )
    checkup.report(
        "window-short",
        Severity.WARNING,
        subject,
        seen=f"an event is remembered for {format_duration(window)}{where}",
        why=f"{why}. An event that is redelivered more than {format_duration(window)} after its "
        "delivery, for example after an outage, is delivered twice.",
        fix=f"Remember it for at least {format_duration(needed)}, better with a margin"
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
            why="If a worker dies, no other worker can deliver the events it held until the lease ends.",
            fix='A running worker extends its leases, so the lease can be short:\nlease = "30s"',
        )
    if settings.max_attempts == 1:
        checkup.report(
            "attempts-one",
            Severity.WARNING,
            subject,
            seen="max_attempts = 1",
            why="After one timeout or one 500 of the sink, the event is a dead letter.",
            fix="Allow more attempts; all of them send the same Idempotency-Key:\nmax_attempts = 8",
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
            why="Attempts are counted for the length of the window. After a longer pause the count "
            "starts again, and an event that can never succeed is retried forever.",
            fix='Keep the pauses shorter than the window:\nmax_backoff = "5m"',
        )
    takes_http = any(scheme_of(place.url).startswith("http") for place in setup.config.source)
    total = sum(pauses, timedelta())
    if takes_http and setup.config.spool is None and total > EVENTBRIDGE_RETRIES:
        checkup.report(
            "attempts-outlast",
            Severity.WARNING,
            subject,
            seen=f"{settings.max_attempts} attempts may take {total.days} days or more",
            why="EventBridge gives up after 24 hours. The event is then lost, or in the dead-letter "
            "queue of its rule, before oncebridge makes it a dead letter.",
            fix="Use fewer attempts or shorter pauses, or write arrivals to disk first:\n"
            'spool = "oncebridge-spool.db"',
        )


# --- the service ----------------------------------------------------------------------------------


def _check_modes(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    shadowed = [route.name for route in setup.routes if route.settings.mode == "shadow"]
    if shadowed:
        checkup.report(
            "shadow",
            Severity.NOTE,
            f"route {', '.join(shadowed)}",
            seen='mode = "shadow"',
            why="All events are delivered, duplicates too. Duplicates are only counted.",
            fix='When the counts are as expected:\nmode = "enforce"',
        )
    if config.on_store_outage == "deliver":
        checkup.report(
            "outage-deliver",
            Severity.NOTE,
            "on_store_outage",
            seen='on_store_outage = "deliver"',
            why="While the store is unavailable, duplicates are delivered too, marked as unprotected.",
            fix="If the receiver cannot handle duplicates, return events to the source instead:\n"
            'on_store_outage = "hold"',
        )
    if config.bare and not any(_takes_bare(route) for route in setup.routes):
        checkup.report(
            "bare-unneeded",
            Severity.NOTE,
            "bare",
            seen="bare = true, and all rules match by source or detail-type",
            why="An event without an envelope has neither, so no rule matches it. And any JSON object "
            "is treated as an event instead of going to the dead letters.",
            fix="Remove the setting, or add a rule for events without an envelope:\nbare = false",
        )
    has_matches = all(route.match is not None for route in setup.routes)
    if has_matches and config.unrouted == "discard":
        checkup.report(
            "unrouted-discard",
            Severity.NOTE,
            "unrouted",
            seen='unrouted = "discard", and every route has a match',
            why="An event that no route matches, for example after its detail-type changed, is dropped.",
            fix='Keep such events in the dead letters instead:\nunrouted = "dead"',
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
            why="A load balancer or orchestrator cannot tell whether the worker runs and delivers. A "
            "worker that hangs is not restarted, and a failed deployment continues.",
            fix='Serve /healthz and /readyz:\nhealth = "http://127.0.0.1:8081"',
        )
    if config.audit is None and is_service(setup):
        checkup.report(
            "audit-missing",
            Severity.NOTE,
            "audit",
            seen="no file for operator actions",
            why="Operator actions (such as forget, drop and pause) are only in the log, and for a time "
            f"in the store: the last {MOST_ACTS} actions on each event and route, for "
            f"{_KEPT.days} days.",
            fix='Keep all of them:\naudit = "oncebridge-audit.ndjson"',
        )
