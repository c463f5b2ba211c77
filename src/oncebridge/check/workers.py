"""What the workers that share the store have reported."""

from oncebridge.check.finding import Checkup, Severity
from oncebridge.config import Setup
from oncebridge.errors import ConfigError, StoreError
from oncebridge.lookup import is_not_ours, opened_to_look
from oncebridge.reach import is_missing, is_out_of_reach
from oncebridge.watch import fleet


async def check_workers(setup: Setup, checkup: Checkup) -> None:
    """Read the workers' reports, if the store can be opened without making anything."""
    place = setup.config.store
    if is_out_of_reach(place) or is_missing(place) or is_not_ours(place):
        return
    try:
        store = await opened_to_look(place)
    except (StoreError, ConfigError):
        return  # the check of the store reports it
    try:
        counts = (await fleet.read(store)).total
    except StoreError:
        return
    finally:
        await store.aclose()
    for name, route in sorted(counts.routes.items()):
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
