"""`oncebridge run` dies and leaves under load, between real HTTP on both sides."""

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


@pytest.mark.parametrize("spool", [False, True], ids=["direct", "spool"])
def test_a_service_that_is_killed_loses_nothing(seed, spool):
    kills = sized(3, 12)
    report = happens(ServiceRun(seed=seed, events=sized(500, 2500), kills=kills, spool=spool))
    assert report.kills == kills
    assert not report.judgement.violations, report.told()
    assert report.judgement.lost == 0
    assert report.judgement.unexplained == 0


def test_a_service_that_is_asked_to_leave_repeats_nothing(seed):
    calm = ServiceRun(
        seed=seed,
        events=sized(500, 2500),
        terms=sized(3, 10),
        lease_s=15,
        sink_timeout_s=10,
        commit_budget_s=4,
    )
    report = happens(calm)
    assert report.terms == calm.terms
    assert not report.judgement.violations, report.told()
    assert report.judgement.lost == 0
    assert report.judgement.extra == 0, report.told()
