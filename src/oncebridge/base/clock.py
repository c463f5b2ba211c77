"""
Where time and chance come in.

Everything else is handed a `Clock` or `Dice`, so that a test can move time and a
simulation can replay a run from its seed. Durations are measured with the running
loop's `time()`; only what is written down (when an event arrived, when a record
ends) is wall-clock time.
"""

import asyncio
import os  # the one module that may ask the machine
import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

Clock = Callable[[], int]
"""Milliseconds since 1970."""


def system_clock() -> int:
    """Tell this host's time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def steady_clock() -> Clock:
    """
    Make a clock that starts at this host's time and then counts on, whatever its clock is set to.

    Time that a virtual machine sleeps through counts too, where the system can tell.
    """
    started_ms = system_clock()
    ticks = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    started_ns = time.clock_gettime_ns(ticks)
    return lambda: started_ms + (time.clock_gettime_ns(ticks) - started_ns) // 1_000_000


class Dice(Protocol):
    """What the gateway draws: tokens that never repeat, and jitter."""

    def tokens(self, count: int) -> list[bytes]:
        """Draw *count* tokens of 128 random bits, each unlike any other ever drawn."""
        ...

    def fraction(self) -> float:
        """Draw a number from 0 up to, not including, 1."""
        ...


class SystemDice:
    """
    Draw from the operating system.

    Tokens are drawn per batch and never kept for later: a buffer would hand the same
    tokens to both sides of a fork.
    """

    def tokens(self, count: int) -> list[bytes]:
        drawn = os.urandom(16 * count)
        return [drawn[at : at + 16] for at in range(0, 16 * count, 16)]

    def fraction(self) -> float:
        return random.random()  # noqa: S311 - jitter, not a secret


def ms(duration: timedelta) -> int:
    """Count the whole milliseconds of *duration*."""
    return duration // timedelta(milliseconds=1)


async def wait_until_set(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for *event*, at most *seconds*; True if it was set in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
