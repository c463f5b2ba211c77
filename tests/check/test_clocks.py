"""Two clocks compared over a slow line, and what a difference means to whom."""

import asyncio

import pytest

from oncebridge.base.clock import system_clock
from oncebridge.check.clocks import Skew, judge, measure
from oncebridge.check.finding import Checkup, Severity


@pytest.mark.parametrize("ahead_ms", [0, 7_000, -45_000])
async def test_a_difference_is_measured_in_the_middle_of_the_round_trip(ahead_ms):
    async def theirs() -> int:
        await asyncio.sleep(0.02)
        told = system_clock() + ahead_ms
        await asyncio.sleep(0.02)
        return told

    skew = await measure(theirs, system_clock)
    assert abs(skew.ahead_ms - ahead_ms) <= skew.give_or_take_ms
    assert 20 <= skew.give_or_take_ms < 2_000


async def test_the_quickest_sample_counts():
    pauses = [0.3, 0.0, 0.3]

    async def theirs() -> int:
        told = system_clock()
        await asyncio.sleep(pauses.pop(0))
        return told

    skew = await measure(theirs, system_clock, samples=3)
    assert skew.give_or_take_ms < 150
    assert not pauses


@pytest.mark.parametrize(
    ("skew", "decides", "severity"),
    [
        (Skew(1_900, 5), False, None),
        (Skew(2_500, 5), False, Severity.WARNING),
        (Skew(-2_500, 5), False, Severity.WARNING),
        (Skew(2_500, 1_000), False, None),  # it may as well be the line
        (Skew(11_000, 5), False, Severity.ERROR),
        (Skew(-3_600_000, 5), True, Severity.NOTE),
        (Skew(100, 5), True, None),
    ],
)
def test_what_a_difference_means_depends_on_whose_clock_decides(skew, decides, severity):
    checkup = Checkup()
    judge("store x", skew, checkup, decides=decides)
    assert [one.severity for one in checkup.findings] == ([severity] if severity else [])
    assert len(checkup.passed) == (0 if severity else 1)
    if severity:
        assert checkup.findings[0].code == "clock-skew"
        assert ("ahead of" if skew.ahead_ms > 0 else "behind") in checkup.findings[0].seen
