"""
Workers die, freeze and leave while they share a store, and servers die under them.

A new seed every time; it stands in the output, and `python -m tests.chaos.run --seed` takes it.
"""

from random import SystemRandom

import pytest
from tests.size import full, sized

from .harness import Run, run
from .plans import FAR

FULL = {
    "sqlite": {"events": 4000, "kills": 52, "stops": 5},
    "redis": {"events": 5000, "kills": 16, "stops": 2},
    "postgres": {"events": 5000, "kills": 16, "stops": 2},
    # Emulators: slower, and a claim is taken over two seconds later for the sake of clocks.
    "dynamodb": {"events": 800, "kills": 5, "stops": 1},
    "s3": {"events": 800, "kills": 5, "stops": 1},
}
QUICK = {"events": 600, "kills": 4, "stops": 1}
STORES = ["sqlite", "redis", "postgres", *full("dynamodb", "s3")]


@pytest.fixture
def seed():
    return SystemRandom().randrange(2**32)


def happens(plan):
    """Let it happen, all of it."""
    report = run(plan)
    print(report.told())
    assert (report.kills, report.stops) == (plan.kills, plan.stops)
    assert (report.terms, report.crashes) == (plan.terms, plan.crashes)
    return report


def assert_right(report):
    assert not report.judgement.violations, report.told()
    assert report.judgement.lost == 0
    assert report.judgement.unexplained == 0


@pytest.mark.parametrize("store", STORES)
def test_nothing_is_lost_or_repeated_without_an_excuse(seed, store):
    assert_right(happens(Run(seed=seed, store=store, unclear=0.003, **sized(QUICK, FULL[store]))))


@pytest.mark.parametrize("store", ["redis:always", *full("postgres")])
def test_a_server_that_is_killed_has_not_forgotten_what_it_said(seed, store):
    size = sized(
        {"events": 600, "kills": 2, "crashes": 1}, {"events": 3000, "kills": 4, "crashes": 3}
    )
    report = happens(Run(seed=seed, store=store, **size))
    assert_right(report)
    assert "forgotten" not in report.judgement.excuses


@pytest.mark.full
def test_a_server_that_forgets_loses_no_event(seed):
    report = happens(Run(seed=seed, store="redis:memory", events=3000, kills=4, crashes=2))
    assert_right(report)
    assert report.judgement.excuses["forgotten"] > 0, "or the server had not forgotten"


def test_one_transaction_needs_no_excuse(seed):
    size = sized(QUICK, FULL["postgres"])
    plan = Run(seed=seed, store="postgres", sink="statement", **size)
    report = happens(plan)
    assert_right(report)
    assert report.judgement.extra == 0


@pytest.mark.full
@pytest.mark.parametrize("sink", ["statement", "table"])
def test_one_transaction_needs_no_excuse_when_the_server_is_killed(seed, sink):
    plan = Run(seed=seed, store="postgres", sink=sink, events=2000, kills=3, crashes=2)
    report = happens(plan)
    assert_right(report)
    assert report.judgement.extra == 0


@pytest.mark.parametrize(
    ("store", "events"),
    [
        ("sqlite", sized(600, 3000)),
        *full(("redis", 1500), ("postgres", 1500)),
    ],
)
def test_leaving_in_good_order_repeats_nothing(seed, store, events):
    # Nobody dies here, so leases may be long, and a slow machine makes no answer unclear.
    calm = {"lease_s": 7, "sink_timeout_s": 5, "visibility_s": 8}
    report = happens(Run(seed=seed, store=store, events=events, terms=events // 150, **calm))
    assert_right(report)
    assert report.judgement.extra == 0, report.told()


def test_a_mark_before_the_delivery_is_convicted_of_loss(seed):
    size = sized({"events": 800, "kills": 10}, {"events": 1500, "kills": 20})
    report = happens(Run(seed=seed, kind="controls:mark-before", **FAR, **size))
    assert report.judgement.lost > 0, report.told()


@pytest.mark.full
def test_a_mark_after_the_delivery_is_convicted_of_repeats(seed):
    report = happens(Run(seed=seed, kind="controls:mark-after", **FAR, events=1500, kills=20))
    assert report.judgement.unexplained > 0, report.told()


@pytest.mark.full
def test_two_transactions_are_convicted_of_repeats(seed):
    apart = {"store": "postgres", "sink": "statement", "apart": True}
    report = happens(Run(seed=seed, **apart, **FAR, events=1500, kills=15))
    assert report.judgement.lost == 0, report.told()
    assert report.judgement.unexplained > 0, report.told()
