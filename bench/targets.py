"""
Targets from the beginning, one line for each aim.

The rows are those of the other topics; here each stands beside the peer or the floor that its
aim names. A line whose row was not measured is left out.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import cold
import decisions
import keys
import service
import sizes
from table import Line, Measure, Results, Topic

import stores


class Target(NamedTuple):
    """One target: the row it needs, its name, and how its line is made."""

    row: str
    work: str
    tell: Callable[[Results, str], Line]
    ratios: Callable[[Results], list[float]] | None = None
    """Ours divided by the peer, run by run, for the chart."""
    aim: float | None = None

    @property
    def short(self) -> str:
        return self.work.removeprefix("decision ").removeprefix("on ")


def _key(name: str, work: str) -> Target:
    return Target(
        name,
        work,
        lambda results, work: keys.line(results, name, work),
        lambda results: keys.ratios(results, name),
        keys.AIM,
    )


def _store(name: str, beside: stores.Beside, work: str, floor: str = "floor-100") -> Target:
    is_cost = beside.by == "cost"
    assert beside.aim is not None

    def ratios(results: Results) -> list[float]:
        found = stores.ratios(results, name, beside)
        return [1 / cost for cost in found] if is_cost else found

    return Target(
        name,
        work,
        lambda results, work: stores.line(results, name, beside, work, floor),
        ratios,
        1 / beside.aim if is_cost else beside.aim,
    )


ALL = (
    _key("key-compact", "key of an event, vs. json + sha256"),
    _store("redis", stores.REDIS_POWERTOOLS, "decision on Redis, vs. Powertools"),
    _store("redis", stores.REDIS_CONNECT, "decision on Redis, vs. Redpanda Connect"),
    _store("redis", stores.REDIS_FLOOR, "decision on Redis, vs. the raw driver"),
    _store("redis", stores.REDIS_ONE, "one at a time on Redis, vs. Powertools", "single"),
    _store("postgres", stores.POSTGRES_SINGLE, "decision on PostgreSQL, vs. one by one"),
    _store("dynamodb", stores.DYNAMODB_CPU, "CPU on DynamoDB, vs. Powertools"),
    Target(
        "sqlite-1",
        "decision on SQLite, durable",
        lambda results, work: decisions.line(results, "sqlite-1", work),
    ),
    _store("memory-peers", stores.MEMORY_POWERTOOLS, "decision in memory, vs. Powertools"),
    _store("memory-peers", stores.MEMORY_CONNECT, "decision in memory, vs. Redpanda Connect"),
    Target("sizes-memory", "memory of a key", sizes.bytes_line),
    Target(
        "sizes-memory",
        "decision in memory, by the number of keys",
        lambda results, work: sizes.flat_line(results, work, "whole"),
    ),
    Target(
        "http",
        "HTTP → SQLite → HTTP, vs. no gateway",
        lambda results, work: service.line(results, 64, work),
        lambda results: service.ratios(results, 64),
        service.AIM,
    ),
    Target("cold", "cold import in Lambda, in addition to boto3", cold.line),
)


def lines(results: Results) -> Iterator[Line]:
    for target in ALL:
        if results.get(target.row):
            yield target.tell(results, target.work)


def _rows() -> dict[str, Measure]:
    known = (keys, decisions, stores, sizes, service, cold)
    rows = {name: row for module in known for name, row in module.TOPIC.rows.items()}
    return {target.row: rows[target.row] for target in ALL}


TOPIC = Topic(
    "targets",
    "Targets",
    _rows(),
    lines,
    "Decisions in batches of 100, one batch at a time, unless another number is given; a fifth of "
    "the events are duplicates. CPU is that of the client. The floor is the same work with the "
    "driver alone, or with nothing in between.",
)
