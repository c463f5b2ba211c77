"""
Half an hour at a steady rate, as a table: `make soak`, which is `python -m tests.chaos.soak`.

Four services run side by side, one on each store, with 200 arrivals a second each, three of ten
of them repeats, and a kill -9 every two minutes (not on the one that keeps all in memory, which
would forget it). Exit code 0 means that nothing grows once it has warmed up, that no store holds
more than it has to, that no descriptor is left open, that nothing was lost or repeated without a
kill to excuse it, and that the counts agreed at every minute.
"""

import argparse
import asyncio
import json
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom
from statistics import median
from typing import Any, NamedTuple

import uvloop

from .growth import Sample, Trend, trend
from .steady import Steady, SteadyReport, SteadyRun
from .stores import StoreHome, home_of
from .table import columns

_ROOT = Path(__file__).parents[2]
_STORES = ("memory", "sqlite", "redis", "postgres")

_RSS_MB_PER_H = 1.0
_RSS_MB = 200.0
_FDS_PER_H = 10.0
"""Connections come and go with the load, so a handful more is no leak."""
_FLAT = 0.05
"""How much of its size a file or table may surely grow by in an hour."""
_OVER = 1.05
_GRACE_S = {"redis": 15.0}
"""How long after its window a key is gone: Redis sees to it itself,"""
_PURGED_S = 60.0
"""and a service purges what is over every ten seconds, a part of a table each time."""
_OF_ITS_OWN = 400
"""Records besides those of events: the counts of each worker, and pages of history."""
_SIZES = ("file", "wal", "table", "index", "memory")


class Finding(NamedTuple):
    """One thing that was measured, and whether it is as it should be."""

    what: str
    value: str
    limit: str
    is_right: bool


def main(argv: Sequence[str] | None = None) -> int:
    asked = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    print(f"seed {asked.seed}, {asked.minutes:g} minutes, window {asked.window:g} s", flush=True)
    reports = uvloop.run(_all(list(_plans(asked))))
    warm_s = warm_up_s(asked.minutes * 60, asked.window)
    judged = {report.run.store: list(findings(report, warm_s)) for report in reports}
    rows = [("store", "what", "measured", "allowed", "")]
    for store, found in judged.items():
        rows += [(store, *f[:3], "right" if f.is_right else "VIOLATED") for f in found]
    print()
    print("\n".join(columns(rows)))
    for report in reports:
        for fault in report.faults[:20]:
            print(f"{report.run.store}: {fault}")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(_told(asked, warm_s, reports, judged), indent=1) + "\n")
    print(f"\nall samples are in {asked.out}")
    is_right = all(f.is_right for found in judged.values() for f in found)
    if not is_right:
        print(f"again: python -m tests.chaos.soak --seed {asked.seed} --minutes {asked.minutes:g}")
    return 0 if is_right else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A steady rate for a long time: does it grow?")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--stores", type=_stores, default=_STORES, help=",".join(_STORES))
    parser.add_argument("--rate", type=float, default=200, help="arrivals a second, each store")
    parser.add_argument("--window", type=float, default=180, help="in seconds, 60 at least")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(2**32))
    parser.add_argument("--out", type=Path, default=_ROOT / "build" / "soak.json")
    return parser.parse_args(argv)


def _stores(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(_STORES):
        raise argparse.ArgumentTypeError(f"no such store: {', '.join(sorted(unknown))}")
    return names


def _plans(asked: argparse.Namespace) -> Iterator[SteadyRun]:
    for store in asked.stores:
        plan = SteadyRun(
            seed=asked.seed,
            store=store,
            seconds=asked.minutes * 60,
            rate=asked.rate,
            window_s=asked.window,
        )
        if store == "memory":
            cap = int(most_keys(plan))
            plan = SteadyRun(**{**vars(plan), "kill_every_s": 0, "max_keys": cap})
        yield plan


async def _all(plans: Sequence[SteadyRun]) -> list[SteadyReport]:
    return list(await asyncio.gather(*map(run, plans)))


async def run(plan: SteadyRun) -> SteadyReport:
    """Run to the end, and clean up."""
    folder = Path(tempfile.mkdtemp(prefix="oncebridge-soak-"))
    try:
        with _home(plan.store, folder) as home:
            return await Steady(plan, folder, home, _tell).run()
    finally:
        shutil.rmtree(folder)


def _tell(report: SteadyReport) -> None:
    now = {name: samples[-1][1] for name, samples in report.series.items()}
    sizes = ", ".join(f"{name} {value:.5g}" for name, value in now.items() if name != "rss")
    print(
        f"{report.minutes} min, {report.run.store}: RSS {now['rss']:.1f} MB, {sizes}; "
        f"{report.brought} copies, {report.lost} lost, {report.extra} extra, "
        f"{len(report.faults)} faults",
        flush=True,
    )


def _home(store: str, folder: Path) -> AbstractContextManager[StoreHome]:
    return nullcontext(StoreHome(url="memory:")) if store == "memory" else home_of(store, folder)


# --- the judge ---------------------------------------------------------------------------


def warm_up_s(seconds: float, window_s: float) -> float:
    """Tell how long it may grow: until windows have passed, and a third of the time at least."""
    return max(2 * window_s, seconds / 3)


def most_keys(plan: SteadyRun) -> float:
    grace_s = _GRACE_S.get(plan.store, _PURGED_S)
    return plan.new_per_s * (plan.window_s + grace_s) * _OVER + _OF_ITS_OWN


def findings(report: SteadyReport, warm_s: float) -> Iterator[Finding]:
    """Hold everything that was measured against what is allowed."""
    warm = {
        name: [sample for sample in samples if sample[0] >= warm_s]
        for name, samples in report.series.items()
    }
    if not warm.get("rss"):
        yield Finding("samples after warm-up", "none", "some", is_right=False)
        return
    # Points enough for a slope of a short run, and not closer than a minute in a long one.
    step_s = min(60.0, (report.run.seconds - warm_s) / 20)

    def steady(what: str, name: str, allowed: float) -> Finding:
        return _steady(what, warm[name], trend(warm[name], step_s), allowed)

    yield steady("RSS, MB", "rss", _RSS_MB_PER_H)
    most = max(value for _, value in warm["rss"])
    yield Finding("RSS at most, MB", f"{most:.1f}", f"< {_RSS_MB:.0f}", most < _RSS_MB)
    yield steady("open files", "fds", _FDS_PER_H)
    yield steady("threads", "threads", 0.0)
    for name in _SIZES:
        if name in warm:
            level = median(value for _, value in warm[name])
            yield steady(f"{name}, MB", name, max(_FLAT * level, 0.1))
    yield _of_keys(report)
    yield from _of_events(report)


def _steady(what: str, samples: Sequence[Sample], found: Trend, allowed: float) -> Finding:
    """Find growth only where the whole interval lies above what is allowed."""
    level = median(value for _, value in samples)
    return Finding(what, f"{level:.1f}, {found}", f"≤ {allowed:+.2f}/h", found.low <= allowed)


def _of_keys(report: SteadyReport) -> Finding:
    most = max(value for _, value in report.series["keys"])
    allowed = most_keys(report.run)
    return Finding("keys at most", f"{most:.0f}", f"≤ {allowed:.0f}", most <= allowed)


def _of_events(report: SteadyReport) -> Iterator[Finding]:
    plan = report.run
    rate, least = report.brought / plan.seconds, 0.95 * plan.rate
    yield Finding("arrivals/s", f"{rate:.1f}", f"≥ {least:.1f}", rate >= least)
    yield Finding("lost", f"{report.lost} of {report.events} events", "0", not report.lost)
    why = ", ".join(f"{n} {excuse}" for excuse, n in sorted(report.excuses.items()))
    repeated = f"{report.extra} ({why})" if why else f"{report.extra}"
    yield Finding(
        f"repeated, {report.kills} kills", repeated, "all excused", not report.unexplained
    )
    if plan.max_keys:
        is_full = 0.95 * plan.max_keys <= report.kept_at_cap <= plan.max_keys
        yield Finding("keys at the cap", f"{report.kept_at_cap}", f"≤ {plan.max_keys}", is_full)
        refused = report.refused_at_cap
        yield Finding("refused at the cap", f"{refused}", "> 0", refused > 0)
    yield Finding("counts compared", f"{report.minutes} times", "agree", not report.faults)


# --- telling -----------------------------------------------------------------------------


def _told(
    asked: argparse.Namespace,
    warm_s: float,
    reports: Sequence[SteadyReport],
    judged: Mapping[str, Sequence[Finding]],
) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "seed": asked.seed,
        "minutes": asked.minutes,
        "rate": asked.rate,
        "window_s": asked.window,
        "warm_up_s": warm_s,
        "stores": {
            report.run.store: {
                "findings": [found._asdict() for found in judged[report.run.store]],
                "arrivals": report.arrivals,
                "events": report.events,
                "kills": report.kills,
                "brought": report.brought,
                "faults": report.faults[:100],
                "series": report.series,
            }
            for report in reports
        },
    }


if __name__ == "__main__":
    sys.exit(main())
