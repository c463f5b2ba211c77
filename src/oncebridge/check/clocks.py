"""
Compare this host's clock with the clock of a store.

Each sample asks the store for its time, and assumes that it answered in the middle of the round
trip: the error is half the round trip at most. The fastest of several samples counts.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from oncebridge.base.clock import Clock
from oncebridge.check.finding import Checkup, Severity

_SAMPLES: Final = 5
_MUCH_MS: Final = 2_000
_TOO_MUCH_MS: Final = 10_000


class Skew(Struct, frozen=True):
    """How far ahead the other clock is, and the error of the measurement."""

    ahead_ms: int
    give_or_take_ms: int

    @property
    def surely_ms(self) -> int:
        """The smallest possible difference."""
        return max(abs(self.ahead_ms) - self.give_or_take_ms, 0)


async def measure(
    theirs: Callable[[], Awaitable[int]], ours: Clock, samples: int = _SAMPLES
) -> Skew:
    """Compare two clocks."""
    time = asyncio.get_running_loop().time
    best: Skew | None = None
    for _ in range(samples):
        before, started = ours(), time()
        their_ms = await theirs()
        round_ms = round((time() - started) * 1000)
        skew = Skew(their_ms - before - round_ms // 2, round_ms // 2 + 1)
        if best is None or skew.give_or_take_ms < best.give_or_take_ms:
            best = skew
    assert best is not None  # noqa: S101 - there is one sample at least
    return best


def judge(subject: str, skew: Skew, checkup: Checkup, *, decides: bool) -> None:
    """Report a difference; with *decides*, leases and windows use the store's own clock."""
    if skew.surely_ms <= _MUCH_MS:
        checkup.report_passed(
            subject, f"its clock and this host's agree ({abs(skew.ahead_ms)} ms apart)"
        )
        return
    where = "ahead of" if skew.ahead_ms > 0 else "behind"
    if decides:
        severity = Severity.NOTE
        why = (
            "Leases and windows use the store's clock, so no event is lost or delivered twice. But "
            "times in logs, dead letters and explanations do not match."
        )
    else:
        severity = Severity.ERROR if skew.surely_ms > _TOO_MUCH_MS else Severity.WARNING
        why = (
            "Leases and windows use the clocks of the workers. A worker whose clock is ahead takes "
            "over events that another still holds, and both deliver them."
        )
    checkup.report(
        "clock-skew",
        severity,
        subject,
        seen=f"its clock is {abs(skew.ahead_ms) / 1000:.1f} s {where} this host's",
        why=why,
        fix="Synchronise both clocks by NTP. The state of this host:\ntimedatectl timesync-status",
    )
