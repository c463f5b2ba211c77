"""`oncebridge run` dies and leaves under load, behind an event bus and its queue, or on a stream."""

from random import SystemRandom

import pytest
from tests.size import sized

from .service import ServiceRun, run


@pytest.fixture
def seed():
    return SystemRandom().randrange(2**32)


def happens(plan):
    report = run(plan)
    print(report.told())
    return report


def test_workers_on_a_queue_that_are_killed_lose_nothing_and_leave_nothing(seed):
    kills = sized(2, 8)
    plan = ServiceRun(seed=seed, feed="queue", events=sized(300, 1500), kills=kills, services=3)
    report = happens(plan)
    assert report.kills == kills
    assert not report.judgement.violations, report.told()
    assert report.judgement.lost == 0
    assert report.judgement.unexplained == 0


@pytest.mark.full
def test_workers_on_a_queue_that_are_asked_to_leave_repeat_nothing(seed):
    calm = ServiceRun(
        seed=seed,
        feed="queue",
        events=1000,
        terms=5,
        services=2,
        lease_s=15,
        sink_timeout_s=10,
        commit_budget_s=4,
    )
    report = happens(calm)
    assert report.terms == 5
    assert not report.judgement.violations, report.told()
    assert report.judgement.extra == 0, report.told()


@pytest.mark.full
def test_workers_on_a_stream_that_are_killed_while_it_is_resharded_lose_nothing(seed):
    report = happens(ServiceRun(seed=seed, feed="stream", events=4000, kills=2))
    assert report.kills == 2
    assert not report.judgement.violations, report.told()
    assert report.judgement.lost == 0
    assert report.judgement.unexplained == 0
