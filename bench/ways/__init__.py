"""
Ways to decide on events with one store: ours, what others would use, and the driver alone.

    python -m ways KIND WAY PORT NAME [--quick]     (in this folder's parent)

One way is measured in a process of its own, on a server that `stores.py` started.

A way is a context that gives one function, which decides on a batch and tells how many
duplicates were in it. The floors get keys and no events: they do the round trips of a batch
with the smallest thing that claims and commits, and nothing else. All run on uvloop, where
there is a loop at all.
"""

import hashlib
import math
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from traffic import is_repeat, make_events

WINDOW_S = 6 * 86_400
LEASE_S = 30
REGION = "us-east-1"

Decide = Callable[[list[bytes]], Awaitable[int]]


class Address(NamedTuple):
    """Where a way keeps what it remembers: a database, table or bucket of its own."""

    kind: str
    port: int
    name: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Way(NamedTuple):
    """How to decide, on how many events at once, and how many batches at the same time."""

    found: str
    """
    Which function of which module opens it: a context that gives a `Decide`.

    One that is called `measure` does all the measuring itself.
    """
    batch: int = 1
    in_flight: int = 1
    is_keyed: bool = False
    """It gets keys and no events."""
    most: int = 40_000
    """No more events than this, however much time is left."""
    needs: str = ""
    """The package without which there is no such way."""

    @property
    def function(self) -> Any:
        module, _, name = self.found.partition(":")
        return getattr(import_module(f"ways.{module}"), name)

    @property
    def is_there(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None

    @property
    def back(self) -> int:
        """How far back the first of a re-emission is: it must not be on its way any more."""
        return 1003 if self.in_flight > 1 else max(10, self.batch) + 3

    @property
    def warm(self) -> int:
        """How many events go before the measured ones, of which a fifth is repeated."""
        return math.ceil((self.back + 1) / self.batch) * self.batch

    def supply(self, count: int, *, first: int = 0) -> list[bytes]:
        if not self.is_keyed:
            return make_events(count, first=first, back=self.back)
        numbers = (at - self.back if is_repeat(at, self.back) else at for at in range(count))
        return [hashlib.sha256(b"%d" % (first + number)).digest() for number in numbers]


def check(count: int, found: int, expected: int) -> None:
    if found != expected:
        raise SystemExit(f"{found} duplicates were found among {count} events, not {expected}")


def ours(most: int) -> dict[str, Way]:
    return {
        "ours-1": Way("gateway:ours", 1, most=most // 4),
        "ours-10": Way("gateway:ours", 10, most=most // 2),
        "ours-100": Way("gateway:ours", 100, most=most),
        "ours-4x100": Way("gateway:ours", 100, 4, most=most),
    }


POWERTOOLS = "aws_lambda_powertools"
CONNECT = Way("connect:measure", needs="mq_bridge_connect")

WAYS: dict[str, dict[str, Way]] = {
    "memory": {
        **ours(40_000),
        "powertools": Way("powertools:memory", needs=POWERTOOLS),
        "connect": CONNECT,
    },
    "redis": {
        **ours(40_000),
        "powertools": Way("powertools:redis", most=10_000, needs=POWERTOOLS),
        "connect": CONNECT,
        "single": Way("redis_driver:single", most=10_000),
        "floor-1": Way("redis_driver:calls", is_keyed=True, most=10_000),
        "floor-100": Way("redis_driver:floor", 100, is_keyed=True, most=400_000),
    },
    "postgres": {
        **ours(40_000),
        "single": Way("postgres_driver:single", most=10_000),
        "floor-100": Way("postgres_driver:floor", 100, is_keyed=True, most=200_000),
    },
    "dynamodb": {
        **ours(20_000),
        "powertools": Way("powertools:dynamodb", most=5_000, needs=POWERTOOLS),
        "single": Way("aws_sdk:single_dynamodb", most=5_000),
        "floor-100": Way("aws_sdk:floor_dynamodb", 100, is_keyed=True, most=40_000),
    },
    "s3": {
        **{name: way for name, way in ours(5_000).items() if way.in_flight == 1},
        "single": Way("aws_sdk:single_s3", most=2_000),
        "floor-100": Way("aws_sdk:floor_s3", 100, is_keyed=True, most=5_000),
    },
}
