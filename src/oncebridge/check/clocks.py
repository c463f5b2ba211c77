"""
How far this host's clock is from the one that a store goes by.

Each sample asks what time it is over there, and takes the middle of the round trip for the moment
of the answer: it is wrong by half the round trip at most. The quickest of several counts.
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
    """How far ahead the other clock is, and how far off that may be."""

    ahead_ms: int
    give_or_take_ms: int

    @property
    def surely_ms(self) -> int:
        """The least that they are apart."""
        return max(abs(self.ahead_ms) - self.give_or_take_ms, 0)


async def measure(
    theirs: Callable[[], Awaitable[int]], ours: Clock, samples: int = _SAMPLES
) -> Skew:
    """Compare two clocks."""
    time = asyncio.get_running_loop().time
    best: Skew | None = None
    for _ in range(samples):
        before, started = ours(), time()
        told = await theirs()
        round_ms = round((time() - started) * 1000)
        skew = Skew(told - before - round_ms // 2, round_ms // 2 + 1)
        if best is None or skew.give_or_take_ms < best.give_or_take_ms:
            best = skew
    assert best is not None  # noqa: S101 - there is one sample at least
    return best


def judge(subject: str, skew: Skew, checkup: Checkup, *, decides: bool) -> None:
    """Tell what a difference means; *decides* says that the store's own clock is what counts."""
    if skew.surely_ms <= _MUCH_MS:
        checkup.report_passed(
            subject, f"its clock and this host's agree ({abs(skew.ahead_ms)} ms apart)"
        )
        return
    where = "ahead of" if skew.ahead_ms > 0 else "behind"
    if decides:
        severity = Severity.NOTE
        why = (
            "Leases and windows go by the store's clock, so nothing is lost or repeated; but the "
            "times in logs, dead letters and explanations do not fit together."
        )
    else:
        severity = Severity.ERROR if skew.surely_ms > _TOO_MUCH_MS else Severity.WARNING
        why = (
            "Leases and windows go by the clocks of the workers: one that is ahead takes over what "
            "another still holds, and both deliver."
        )
    checkup.report(
        "clock-skew",
        severity,
        subject,
        seen=f"its clock is {abs(skew.ahead_ms) / 1000:.1f} s {where} this host's",
        why=why,
        fix="Keep both clocks right by NTP; on this host, see how it stands:\ntimedatectl timesync-status",
    )
