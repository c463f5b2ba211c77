import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.faults.doubles import CountingDice

from oncebridge.engine.breaker import Breaker

NOW = 100.0


def breaker(limit=3, fraction=0.5):
    return Breaker(limit, CountingDice(fraction))


def opened(limit=3, fraction=0.5):
    found = breaker(limit, fraction)
    for _ in range(limit):
        found.failed(NOW)
    return found


def test_it_lets_everything_pass_while_all_is_well():
    found = breaker()
    assert found.admits(NOW)
    assert found.admits(NOW)
    assert found.left_s(NOW) == 0
    assert not found.is_open


def test_it_opens_after_so_many_failures_in_a_row():
    found = breaker(3)
    found.failed(NOW)
    found.failed(NOW)
    assert not found.is_open
    found.failed(NOW)
    assert found.is_open
    assert (found.failures, found.opened) == (3, 1)
    assert not found.admits(NOW)


def test_a_success_in_between_begins_the_count_anew():
    found = breaker(3)
    for _ in range(5):
        found.failed(NOW)
        found.failed(NOW)
        found.succeeded()
    assert not found.is_open
    assert found.failures == 0


def test_a_closed_door_opens_it_at_once():
    found = breaker(5)
    found.failed(NOW, at_once=True)
    assert found.is_open
    assert 0 < found.left_s(NOW) <= 1


@pytest.mark.parametrize(("fraction", "wait"), [(0.0, 0.5), (0.5, 0.75), (0.999, 0.9995)])
def test_the_first_wait_is_drawn_from_half_a_second_to_one(fraction, wait):
    found = opened(fraction=fraction)
    assert found.left_s(NOW) == pytest.approx(wait)
    assert not found.admits(NOW + wait - 0.001)
    assert found.left_s(NOW + wait + 0.001) == 0
    assert found.admits(NOW + wait + 0.001)


def test_when_its_time_has_come_one_may_try_and_no_other():
    found = opened()
    assert found.admits(NOW + 1)
    assert not found.admits(NOW + 1)
    assert not found.admits(NOW + 5)
    assert found.left_s(NOW + 5) > 0


def test_while_one_tries_the_others_are_told_to_ask_again_soon():
    found = opened()
    assert found.admits(NOW + 1)
    assert 0 < found.left_s(NOW + 1) <= 1
    assert 0 < found.left_s(NOW + 30.5) <= 0.5


def test_a_try_that_goes_through_closes_it_and_the_next_wait_is_short_again():
    found = opened()
    found.admits(NOW + 1)
    found.failed(NOW + 1)
    found.admits(NOW + 10)
    found.succeeded()
    assert not found.is_open
    assert found.left_s(NOW + 10) == 0
    found.failed(NOW + 11, at_once=True)
    assert found.left_s(NOW + 11) == pytest.approx(0.75)
    assert found.opened == 2


def test_each_try_that_fails_doubles_the_wait_up_to_half_a_minute():
    found = opened(fraction=0.999999)
    now, waits = NOW, []
    for _ in range(8):
        waits.append(round(found.left_s(now)))
        now += found.left_s(now)
        assert found.admits(now)
        found.failed(now)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_failures_of_what_was_sent_before_it_opened_do_not_push_the_next_try_away():
    found = opened()
    until = NOW + found.left_s(NOW)
    for _ in range(50):
        found.failed(NOW + 0.1)
    assert NOW + found.left_s(NOW) == until
    assert found.opened == 1


def test_a_late_success_of_what_was_sent_before_closes_it():
    found = opened()
    found.succeeded()
    assert not found.is_open
    assert found.admits(NOW)


def test_a_try_that_came_to_nothing_lets_the_next_one_try_at_once():
    found = opened()
    assert found.admits(NOW + 1)
    found.abandoned()
    assert found.is_open
    assert found.left_s(NOW + 1) == 0
    assert found.admits(NOW + 1)


def test_a_try_that_is_never_heard_of_again_does_not_keep_it_open_for_ever():
    found = opened()
    assert found.admits(NOW + 1)
    assert not found.admits(NOW + 30.9)
    assert found.admits(NOW + 31.1)
    assert not found.admits(NOW + 31.2)


def test_nothing_changes_when_a_try_is_abandoned_that_has_already_failed():
    found = opened()
    found.admits(NOW + 1)
    found.failed(NOW + 1)
    left = found.left_s(NOW + 1)
    found.abandoned()
    assert found.left_s(NOW + 1) == left > 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "fail", "at once", "succeed", "abandon"]),
            st.floats(0, 40),
        ),
        max_size=60,
    ),
    st.integers(1, 6),
    st.floats(0, 0.999),
)
def test_whatever_happens_it_says_the_truth_and_never_shuts_for_good(steps, limit, fraction):
    found = breaker(limit, fraction)
    now, row = NOW, 0
    for step, passes in steps:
        now += passes
        left = found.left_s(now)
        assert 0 <= left <= 30
        match step:
            case "ask":
                was_open = found.is_open
                assert found.admits(now) is (left == 0)
                if was_open and left == 0:
                    assert not found.admits(now), "a second one may try"
            case "fail":
                row += 1
                was_open = found.is_open
                found.failed(now)
                assert found.is_open is (was_open or row >= limit)
            case "at once":
                row += 1
                found.failed(now, at_once=True)
                assert found.is_open
            case "succeed":
                row = 0
                found.succeeded()
                assert not found.is_open
            case "abandon":
                found.abandoned()
        assert found.failures == row
    assert found.admits(now + 31)
