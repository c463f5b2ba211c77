import random
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncebridge.aws.skewed_clock import SkewedClock
from oncebridge.testing import ManualClock


class Service:
    """Somebody who answers, on a host whose clock differs from ours by *offset_ms*."""

    def __init__(self, offset_ms, seed=0):
        self.local = ManualClock(1_700_000_000_123)
        self.clock = SkewedClock(self.local)
        self.offset_ms = offset_ms
        self.dice = random.Random(seed)

    def answer(self, there_ms=5, back_ms=5, *, offset_ms=None):
        asked = self.local()
        self.local.advance(there_ms)
        offset = self.offset_ms if offset_ms is None else offset_ms
        date = formatdate((self.local() + offset) // 1000, usegmt=True)
        self.local.advance(back_ms)
        self.clock.note(date.encode(), asked, self.local())

    def answers(self, count, every_ms=337):
        for _ in range(count):
            self.local.advance(every_ms)
            self.answer(self.dice.randrange(40), self.dice.randrange(40))

    @property
    def wrong_by_ms(self):
        return abs(self.clock.offset_ms - self.offset_ms)


offsets = st.integers(-3_600_000, 3_600_000)
trips = st.integers(0, 3000)


def test_before_the_first_answer_it_is_this_hosts_time():
    local = ManualClock()
    clock = SkewedClock(local)
    assert (clock.now_ms(), clock.offset_ms, clock.error_ms) == (local(), 0, None)


@given(offsets, trips, trips, st.integers(0, 999))
def test_one_answer_is_good_to_half_a_second_and_half_its_trip(offset, there, back, phase):
    service = Service(offset)
    service.local.advance(phase)
    service.answer(there, back)
    width = 1000 + there + back
    known = width if service.clock.offset_ms == 0 else (width + 1) // 2
    assert service.clock.error_ms <= known
    assert service.wrong_by_ms <= service.clock.error_ms


def test_hosts_that_keep_their_clocks_agree_to_the_millisecond():
    hosts = [Service(0, seed) for seed in range(5)]
    for host in hosts:
        host.local.advance(host.dice.randrange(1000))
        host.answers(3)
    assert {host.clock.offset_ms for host in hosts} == {0}


@given(offsets, st.lists(st.tuples(trips, trips, st.integers(0, 5000)), min_size=1, max_size=40))
def test_it_is_never_further_off_than_it_says(offset, asked):
    service = Service(offset)
    for there, back, pause in asked:
        service.local.advance(pause)
        service.answer(there, back)
        assert service.wrong_by_ms <= service.clock.error_ms


@pytest.mark.parametrize("offset", [-600_000, -1400, -3, 0, 1, 999, 2500])
@pytest.mark.parametrize("seed", range(5))
def test_a_few_answers_are_good_to_a_tenth_of_a_second(offset, seed):
    service = Service(offset, seed)
    service.answers(15)
    assert service.wrong_by_ms <= 100
    assert service.clock.error_ms <= 150


def test_answers_in_quick_succession_count_once():
    service = Service(0)
    for _ in range(100):
        service.answer(0, 1)
    assert len(service.clock._ranges) == 1


def test_one_who_is_contradicted_by_the_others_is_outvoted():
    service = Service(300)
    service.answers(6)
    service.local.advance(500)
    service.answer(offset_ms=-90_000)
    service.answers(6)
    assert service.wrong_by_ms <= 150


def test_a_slow_answer_does_not_spoil_what_was_known():
    service = Service(300)
    service.answers(10)
    known = service.clock.error_ms
    service.answer(4000, 0)
    assert service.wrong_by_ms <= service.clock.error_ms <= known


@pytest.mark.parametrize("step", [-60_000, -4000, 4000, 60_000, 3_600_000])
def test_a_clock_that_is_set_is_noticed_after_three_answers(step):
    service = Service(0)
    service.answers(15)
    service.local.now_ms += step  # this host's
    service.offset_ms -= step
    service.answers(3)
    assert service.wrong_by_ms <= 500
    service.answers(12)
    assert service.wrong_by_ms <= 150


def test_a_clock_that_drifts_is_followed():
    service = Service(0)
    for _ in range(200):
        service.offset_ms += 10  # of 1 s, which is a very bad clock
        service.answers(1, every_ms=1000)
    assert service.wrong_by_ms <= 600


def test_what_was_learned_long_ago_does_not_count():
    service = Service(0)
    service.answers(15)
    service.local.advance(3_600_000)
    service.offset_ms = 700
    service.answers(1)
    assert len(service.clock._ranges) == 1
    assert service.wrong_by_ms <= service.clock.error_ms


@pytest.mark.parametrize(
    "date", [b"", b"soon", b"Thu, 99 Foo 2026 00:00:00 GMT", b"\xff\xfe", b"1700000000"]
)
def test_a_date_that_makes_no_sense_is_passed_over(date):
    service = Service(0)
    service.clock.note(date, service.local(), service.local() + 5)
    assert service.clock.error_ms is None


def test_an_answer_across_a_change_of_this_hosts_clock_says_nothing():
    service = Service(1700)
    service.answers(5)
    known = service.clock.offset_ms
    asked = service.local()
    date = formatdate(asked // 1000, usegmt=True).encode()
    service.clock.note(date, asked, asked - 3000)
    assert service.clock.offset_ms == known
    assert not service.clock._ranges  # what was learned before the change counts no more


def test_time_stands_still_rather_than_go_back_a_little():
    local = ManualClock()
    clock = SkewedClock(local)
    clock.offset_ms = 400
    told = clock.now_ms()
    clock.offset_ms = 0
    assert clock.now_ms() == told
    local.advance(401)
    assert clock.now_ms() == told + 1


def test_time_follows_a_clock_that_was_set_back():
    local = ManualClock()
    clock = SkewedClock(local)
    told = clock.now_ms()
    local.now_ms -= 60_000
    assert clock.now_ms() == told - 60_000


def test_setting_the_clock_of_this_host_moves_nothing(monkeypatch):
    import time

    clock = SkewedClock()
    before = clock.now_ms()
    real = time.time_ns
    for jump_s in (-3600, 3600):
        monkeypatch.setattr(time, "time_ns", lambda jump_s=jump_s: real() + jump_s * 10**9)
        assert 0 <= clock.now_ms() - before < 60_000
