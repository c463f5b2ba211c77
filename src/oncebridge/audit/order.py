"""
When arrivals came, by the times that stand in a recording, some of which may be wrong.

What lies behind something in its file came no earlier. So an arrival of which no time was
recorded is taken to have come at the latest time so far: when something before it was
recorded, or when it or something before it was published.

One wrong time must not carry away all that follow, or no repeat would be within its window
any more. So a time that is more than an hour ahead, and the first one, counts only if most
of the next few are no earlier (give or take the hour). A pause of hours is one where they
are; a wrong clock is one where they are not.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

_LEAP_MS: Final = 3_600_000
_WITNESSES: Final = 7


class ArrivalTimes(Struct, frozen=True, gc=False):
    """When the arrivals of one chunk came."""

    latest: list[int | None]
    """Of each, the latest time so far that counts; None before the first."""
    first_ms: int | None
    end_ms: int | None
    sure_ms: int | None
    """The latest that the next chunk may go by: what comes last here has no witness yet."""


def arrival_times(times: Sequence[int | None]) -> ArrivalTimes:
    """Return when arrivals came that say *times* of themselves, one after the other."""
    latest: list[int | None] = []
    first = now = sure = None
    for place, time in enumerate(times):
        if time is not None and (now is None or time > now):
            if now is not None and time - now <= _LEAP_MS:
                now = sure = time
            else:
                agree, differ = _heard(times, place, time - _LEAP_MS)
                if agree > differ:
                    now = sure = time
                elif not differ:  # nobody comes after it
                    now = time
            first = now if first is None else first
        latest.append(now)
    return ArrivalTimes(latest, first, now, sure)


def _heard(times: Sequence[int | None], place: int, since: int) -> tuple[int, int]:
    """Count, of the next few with a time, those that are no earlier than *since*, and the rest."""
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
