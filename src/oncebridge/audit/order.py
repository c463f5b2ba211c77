"""
Find when arrivals came, by the times of a recording, some of which may be wrong.

A record came no earlier than the records before it in its file. So an arrival without a recorded
time is assumed to have come at the latest time so far: the recorded time of an earlier one, or the
publication time of itself or an earlier one.

One wrong time must not affect all later ones, or no duplicate would be within its window any more.
So the first time, and a time that is more than an hour ahead, counts only if most of the next few
are not earlier (within the hour). After a pause of hours they are not; after a wrong clock they
are.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

_LEAP_MS: Final = 3_600_000
_WITNESSES: Final = 7


class ArrivalTimes(Struct, frozen=True, gc=False):
    """The times of the arrivals of one chunk."""

    latest: list[int | None]
    """For each arrival the latest valid time so far; None before the first."""
    first_ms: int | None
    end_ms: int | None
    sure_ms: int | None
    """The latest time that is confirmed, for the next chunk."""


def arrival_times(times: Sequence[int | None]) -> ArrivalTimes:
    """Return the times of arrivals whose records have *times*, in order."""
    latest: list[int | None] = []
    first = now = sure = None
    for place, time in enumerate(times):
        if time is not None and (now is None or time > now):
            if now is not None and time - now <= _LEAP_MS:
                now = sure = time
            else:
                agree, differ = _count_witnesses(times, place, time - _LEAP_MS)
                if agree > differ:
                    now = sure = time
                elif not differ:  # no later time to compare with
                    now = time
            first = now if first is None else first
        latest.append(now)
    return ArrivalTimes(latest, first, now, sure)


def _count_witnesses(times: Sequence[int | None], place: int, since: int) -> tuple[int, int]:
    """Count the next few times: those from *since* on, and the earlier ones."""
    agree = differ = 0
    for at in range(place + 1, len(times)):
        time = times[at]
        if time is not None:
            if time >= since:
                agree += 1
            else:
                differ += 1
            if agree + differ == _WITNESSES:
                break
    return agree, differ
