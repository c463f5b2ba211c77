"""What the workers that share the store have reported."""

from pathlib import Path

from oncebridge.base.formatting import instant
from oncebridge.check.files import has_write_ahead_log
from oncebridge.check.finding import Checkup, Severity
from oncebridge.errors import ConfigError, StoreError
from oncebridge.observe import fleet
from oncebridge.observe.agreement import differences, lost_routes
from oncebridge.operate.lookup import is_not_ours, opened_to_look
from oncebridge.operate.reachability import is_missing, is_out_of_reach
from oncebridge.service.addresses import StorePlace, scheme_of
from oncebridge.service.config import Setup


async def check_workers(setup: Setup, checkup: Checkup) -> None:
    """Read the workers' reports, if the store can be opened without making anything."""
    place = setup.config.store
    if is_out_of_reach(place) or is_missing(place) or is_not_ours(place) or _would_change(place):
        return
    try:
        store = await opened_to_look(place)
    except (StoreError, ConfigError):
        return  # the check of the store reports it
    try:
        view = await fleet.read(store)
    except StoreError:
        return
    finally:
        await store.aclose()
    lost_ms = max((report.state.store.records_lost_ms for report in view.reports), default=0)
    if lost_ms:
        checkup.find(
            "records-lost",
            Severity.WARNING,
            "store",
            seen=f"a worker noticed at {instant(lost_ms)} UTC that the store had lost its records",
            why="The store was wiped, or replaced by an empty one. Events that were delivered "
            "before may be delivered once more.",
            fix="Find out who or what emptied it (FLUSHALL, a restart without persistence, "
            "eviction), and let receivers check the Idempotency-Key meanwhile.",
        )
    _check_agreement(view, setup, checkup)
    for name, route in sorted(view.total.routes.items()):
        runs = route.books.get("stale_runs", 0)
        if runs:
            checkup.find(
                "stale-runs",
                Severity.WARNING,
                f"route {name}",
                seen=f"{runs} times, 20 or more events of one entity in a row were stale",
                why="One wrong version (milliseconds for seconds, a date far ahead) makes every true "
                "update of its entity stale until the window of its rule is over.",
                fix="Find the entity in the log line oncebridge.stale_run, and clear it:\n"
                "oncebridge forget ENTITY_KEY",
            )


def _would_change(place: StorePlace) -> bool:
    """Return whether opening a SQLite file would switch its write-ahead log on."""
    if scheme_of(place.url) != "sqlite":
        return False
    try:
        return not has_write_ahead_log(Path(place.url.partition(":")[2]))
    except OSError:
        return True  # the check of files reports it


def _check_agreement(view: fleet.FleetView, setup: Setup, checkup: Checkup) -> None:
    routes = [route.name for route in setup.routes]
    for one in (*lost_routes(view, routes), *differences(view)):
        checkup.find(
            one.code,
            Severity.WARNING,
            f"route {one.route}",
            seen=one.seen,
            why=one.why,
            fix=one.fix,
        )
