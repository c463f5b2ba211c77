"""
The sources of time and randomness.

Other modules get a `Clock` or `Dice` as an argument, so that a test can move time and a
simulation can replay a run from its seed. Durations are measured with the running loop's
`time()`; only stored times (when an event arrived, when a record expires) are wall-clock
time.
"""

import asyncio
import os  # no other module reads the system's time or randomness
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

Clock = Callable[[], int]
"""Milliseconds since 1970."""


def system_clock() -> int:
    """Return this host's time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def steady_clock() -> Clock:
    """
    Return a clock that starts at this host's time and ignores later changes of it.

    Time during which a virtual machine is suspended counts too, where the system reports it.
    """
    started_ms = system_clock()
    ticks = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    started_ns = time.clock_gettime_ns(ticks)
    return lambda: started_ms + (time.clock_gettime_ns(ticks) - started_ns) // 1_000_000


class Dice(Protocol):
    """A source of randomness: unique tokens, and jitter."""

    def tokens(self, count: int) -> list[bytes]:
        """Return *count* tokens of 128 random bits, each different from all others ever drawn."""
        ...

    def fraction(self) -> float:
        """Return a number from 0 up to, not including, 1."""
        ...


class SystemDice:
    """
    Randomness of the operating system.

    Tokens are drawn per batch and never kept for later: after a fork, both processes would
    use the same buffered tokens.
    """

    def tokens(self, count: int) -> list[bytes]:
        drawn = os.urandom(16 * count)
        return [drawn[at : at + 16] for at in range(0, 16 * count, 16)]

    def fraction(self) -> float:
        return random.random()  # noqa: S311 - jitter, not a secret


def ms(duration: timedelta) -> int:
    """Return the whole milliseconds of *duration*."""
    return duration // timedelta(milliseconds=1)


async def wait_until_set(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for *event*, at most *seconds*; True if it was set in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
