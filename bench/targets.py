"""
Targets from the beginning, one line for each aim.

The rows are those of the other topics; here each stands beside the peer or the floor that its
aim names. A line whose row was not measured is left out.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import calls
import cold
import decisions
import keys
import latency
import service
import sizes
import watch_path
from table import Line, Measure, Results, Topic

import stores


class Target(NamedTuple):
    """One target: the row it needs, its name, and how its line is made."""

    row: str
    work: str
    tell: Callable[[Results, str], Line]
    ratios: Callable[[Results], list[float]] | None = None
    """Ours divided by the peer, run by run, for the chart; of a cost, the inverse."""
    aim: float | None = None


def _cost(
    row: str,
    work: str,
    tell: Callable[[Results, str], Line],
    costs: Callable[[Results], list[float]],
    aim: float,
) -> Target:
    return Target(row, work, tell, lambda results: [1 / cost for cost in costs(results)], 1 / aim)


def _store(name: str, beside: stores.Beside, work: str, floor: str = "floor-100") -> Target:
    assert beside.aim is not None

    def tell(results: Results, work: str) -> Line:
        return stores.line(results, name, beside, work, floor)

    def ratios(results: Results) -> list[float]:
        return stores.ratios(results, name, beside)

    if beside.by in stores.COSTS:
        return _cost(name, work, tell, ratios, beside.aim)
    return Target(name, work, tell, ratios, beside.aim)


ALL = (
    _store("redis", stores.REDIS_POWERTOOLS, "Redis 1 x 100, vs. Powertools"),
    _store("redis", stores.REDIS_CONNECT, "Redis 1 x 100, vs. Redpanda Connect"),
    _store("redis", stores.REDIS_FLOOR, "Redis 1 x 100, vs. the raw driver"),
    _store("redis", stores.REDIS_FOUR, "Redis 4 x 100, vs. Powertools"),
    _store("redis", stores.REDIS_ONE, "Redis 1 x 1, vs. Powertools", "floor-1"),
    _store("redis", stores.REDIS_ONE_CPU, "Redis 1 x 1, CPU vs. the driver's two calls", "floor-1"),
    _store("postgres", stores.POSTGRES_SINGLE, "PostgreSQL 1 x 100, vs. one by one"),
    _store("postgres", stores.POSTGRES_ONE, "PostgreSQL 1 x 1, vs. one by one", ""),
    Target(
        "sqlite-1",
        "SQLite 1 x 100, durable, vs. the raw driver",
        lambda results, work: decisions.line(results, "sqlite-1", work),
        lambda results: decisions.ratios(results, "sqlite-1"),
        decisions.AIM_SQLITE,
    ),
    Target("sizes-sqlite", "SQLite at 10⁶ keys, vs. at 10⁴", sizes.sqlite_line),
    _store("memory-peers", stores.MEMORY_POWERTOOLS, "memory 1 x 100, vs. Powertools"),
    _store("memory-peers", stores.MEMORY_CONNECT, "memory 1 x 100, vs. Redpanda Connect"),
    _store("memory-peers", stores.MEMORY_ONE, "memory 1 x 1, vs. Powertools"),
    Target("sizes-memory", "memory of a key", sizes.bytes_line),
    Target(
        "sizes-memory",
        "memory 1 x 100, by the number of keys",
        lambda results, work: sizes.flat_line(results, work, "whole"),
    ),
    _store("dynamodb", stores.DYNAMODB_CPU, "DynamoDB 1 x 100, CPU vs. Powertools"),
    _cost(
        "key-compact",
        "key of an event, vs. msgspec",
        lambda results, work: keys.line(results, "key-compact", work),
        lambda results: keys.ratios(results, "key-compact"),
        keys.AIM,
    ),
    Target("calls", "function calls for an event, 1 x 100", calls.line),
    Target(
        "http",
        "HTTP → SQLite → HTTP, vs. no gateway",
        lambda results, work: service.line(results, 64, work),
        lambda results: service.ratios(results, 64),
        service.AIM,
    ),
    Target(f"latency-{latency.HALF}", "HTTP → SQLite → HTTP, p50 at half load", latency.half_line),
    Target(
        "watch-seen",
        "history, dashboard and scrapes, vs. none",
        watch_path.line,
        watch_path.ratios,
        watch_path.AIM_SEEN,
    ),
    Target("cold", "cold import in Lambda, in addition to boto3", cold.line),
    Target("command", "`oncebridge --version`", cold.command_line),
)


def lines(results: Results) -> Iterator[Line]:
    for target in ALL:
        if results.get(target.row):
            yield target.tell(results, target.work)


def _rows() -> dict[str, Measure]:
    known = (stores, decisions, sizes, keys, calls, service, latency, watch_path, cold)
    rows = {name: row for module in known for name, row in module.TOPIC.rows.items()}
    return {target.row: rows[target.row] for target in ALL}


TOPIC = Topic(
    "targets",
    "Targets",
    _rows(),
    lines,
    "1 x 100: decisions in batches of 100 events, one batch at a time; 4 x 100: four at a time; 1 x 1: one "
    "event at a time. A fifth of the events are duplicates. CPU is that of the client. The floor is the "
    "same work with the driver alone, or with nothing in between.",
)
