"""
Workers die, freeze and leave while they share one SQLite file.

A new seed every time; it stands in the output, and `python -m tests.chaos.run --seed` takes it.
"""

from random import SystemRandom

import pytest

from .harness import Run, run


@pytest.fixture
def seed():
    return SystemRandom().randrange(2**32)


def happens(plan):
    report = run(plan)
    print(report.told())
    return report


def test_nothing_is_lost_or_repeated_without_an_excuse(seed):
    report = happens(Run(seed=seed, events=4000, kills=52, stops=5, unclear=0.003))
    assert report.kills == 52
    assert report.stops == 5
    assert not report.judgement.violations, report.told()
    assert report.judgement.lost == 0
    assert report.judgement.unexplained == 0


def test_leaving_in_good_order_repeats_nothing(seed):
    # Nobody dies here, so leases may be long, and a slow machine makes no answer unclear.
    calm = Run(
        seed=seed, events=3000, terms=20, lease_s=7, sink_timeout_s=5, visibility_s=8, unclear=0
    )
    report = happens(calm)
    assert report.terms == 20
    assert not report.judgement.violations, report.told()
    assert report.judgement.lost == 0
    assert report.judgement.extra == 0, report.told()


def test_a_mark_before_the_delivery_is_convicted_of_loss(seed):
    report = happens(Run(seed=seed, kind="controls:mark-before", events=1500, kills=20))
    assert report.judgement.lost > 0, report.told()


def test_a_mark_after_the_delivery_is_convicted_of_repeats(seed):
    report = happens(Run(seed=seed, kind="controls:mark-after", events=1500, kills=20))
    assert report.judgement.unexplained > 0, report.told()
