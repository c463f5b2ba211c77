"""A test of the test: the oracle excuses what it should, and nothing else."""

from collections import Counter

import pytest

from .feeds import out_of_order
from .oracle import Delivery, History, judge, judge_shadow


def delivered(event=0, *, by=1, at=10.0, claimed_at=None, key=None, attempt=1):
    return Delivery(
        event, key or f"k{event}", by, attempt, at - 0.1 if claimed_at is None else claimed_at, at
    )


def history(*deliveries, events=1, **seen):
    return History(events, capacity=10, deliveries=list(deliveries), **seen)


def test_one_delivery_each_is_right():
    judged = judge(history(delivered(0), delivered(1), events=2))
    assert (judged.lost, judged.extra, judged.unexplained, judged.violations) == (0, 0, 0, [])


def test_an_event_that_never_came_is_lost():
    judged = judge(history(delivered(1), events=3))
    assert judged.lost == 2
    assert judged.violations == ["event 0 is lost", "event 2 is lost"]


def test_a_repeat_without_a_fault_is_not_explained():
    judged = judge(history(delivered(by=1), delivered(by=2, at=11)))
    assert (judged.extra, judged.unexplained) == (1, 1)
    assert len(judged.violations) == 1


def test_three_deliveries_and_one_kill_leave_one_not_explained():
    seen = history(delivered(by=1), delivered(by=2, at=11), delivered(by=3, at=12), killed={1})
    assert (judge(seen).extra, judge(seen).unexplained) == (2, 1)


def test_a_kill_excuses_what_was_in_hand():
    judged = judge(history(delivered(by=1), delivered(by=2, at=11), killed={1}))
    assert (judged.extra, judged.unexplained, judged.violations) == (1, 0, [])
    assert judged.excuses == {"killed": 1}


def test_a_kill_does_not_excuse_what_had_been_let_go():
    seen = history(delivered(by=1), delivered(by=2, at=11), killed={1}, settled={(1, 0): [10.5]})
    assert judge(seen).unexplained == 1


def test_letting_go_before_the_delivery_says_nothing_about_it():
    seen = history(delivered(by=1), delivered(by=2, at=11), killed={1}, settled={(1, 0): [9.5]})
    assert judge(seen).unexplained == 0


@pytest.mark.parametrize(
    ("stop", "explained"),
    [
        ((10.2, 13), True),  # frozen between the delivery and letting go
        ((9.95, 13), True),  # frozen between claim and delivery
        ((5, 9), False),  # before the claim
        ((14.5, 18), False),  # after letting go
    ],
)
def test_a_stop_excuses_what_it_fell_into(stop, explained):
    seen = history(
        delivered(by=1), delivered(by=2, at=12), stops={1: [stop]}, settled={(1, 0): [14.0]}
    )
    assert judge(seen).unexplained == (0 if explained else 1)


def test_a_frozen_process_may_deliver_after_its_successor():
    late = delivered(by=1, claimed_at=5, at=12)
    judged = judge(history(delivered(by=2, at=11), late, stops={1: [(5.1, 11.9)]}))
    assert (judged.extra, judged.unexplained) == (1, 0)


def test_an_unclear_answer_excuses_its_own_attempt_only():
    first, second, third = (delivered(by=1, at=10 + n, attempt=n) for n in (1, 2, 3))
    unclear = {(1, "k0", 1)}
    assert judge(history(first, second, unclear=unclear)).unexplained == 0
    assert judge(history(first, second, third, unclear=unclear)).unexplained == 1


def test_a_late_commit_is_an_excuse():
    judged = judge(history(delivered(by=1), delivered(by=2, at=13), late={(1, "k0", 1)}))
    assert judged.excuses == {"late": 1}
    assert judged.violations == []


def test_a_late_commit_excuses_its_own_attempt_only():
    first, second = (delivered(by=1, at=10 + n, attempt=n) for n in (1, 2))
    assert judge(history(first, second, late={(1, "k0", 3)})).unexplained == 1


@pytest.mark.parametrize(
    ("lost_at", "explained"),
    [
        (11, True),  # between the two claims
        (9, False),  # before both: it knew of the first when it was asked for the second
        (13, False),  # after both
    ],
)
def test_a_store_that_lost_its_memory_could_not_know_of_what_was_before(lost_at, explained):
    judged = judge(history(delivered(by=1, at=10), delivered(by=2, at=12), losses=[lost_at]))
    assert judged.extra == 1
    assert judged.unexplained == (0 if explained else 1)
    assert judged.excuses == ({"forgotten": 1} if explained else {})


def test_a_loss_of_memory_excuses_no_repeat_on_the_same_side_of_it():
    thrice = [delivered(by=n, at=10 + n) for n in (1, 2, 3)]
    judged = judge(history(*thrice, losses=[12.5]))
    assert (judged.extra, judged.unexplained) == (2, 1)
    assert judged.excuses == {"forgotten": 1}


def test_a_send_on_its_way_while_the_memory_is_lost_belongs_to_the_old_one():
    sent = delivered(by=1, claimed_at=10, at=11.5)
    judged = judge(history(sent, delivered(by=2, at=12), losses=[11]))
    assert (judged.unexplained, judged.excuses) == (0, {"forgotten": 1})


def test_each_loss_starts_the_count_anew_and_other_excuses_count_beside_it():
    four = [delivered(by=n, at=10 * n) for n in (1, 2, 3, 4)]
    judged = judge(history(*four, losses=[15, 25], killed={3}))
    assert (judged.extra, judged.unexplained) == (3, 0)
    assert judged.excuses == {"forgotten": 2, "killed": 1}


def test_nothing_is_excused_where_event_and_commit_are_one_step():
    twice = delivered(by=1), delivered(by=2, at=11)
    excuses = {
        "killed": {1},
        "stops": {1: [(9.95, 13)]},
        "unclear": {(1, "k0", 1)},
        "late": {(1, "k0", 1)},
    }
    judged = judge(history(*twice, exactly_once=True, **excuses))
    assert (judged.extra, judged.unexplained, judged.excuses) == (1, 1, {})


def test_an_event_keeps_its_key():
    seen = history(delivered(by=1), delivered(by=2, at=11, key="other"), killed={1})
    assert judge(seen).violations == ["event 0 went out under 2 keys"]


def test_a_key_stands_for_one_event():
    seen = history(delivered(0, key="same"), delivered(1, key="same"), events=2)
    assert judge(seen).violations == ["key same stands for 2 events"]


def test_a_kill_excuses_no_more_than_was_in_hand():
    twice = [delivered(event, by=by) for event in range(11) for by in (1, 2)]
    judged = judge(history(*twice, events=11, killed={1}))
    assert judged.unexplained == 0
    assert judged.violations == ["11 extra deliveries for 1 processes killed"]


def test_other_faults_are_violations():
    assert judge(history(delivered(), faults=["stuck"])).violations == ["stuck"]


def test_what_was_sent_without_a_claim_is_excused_once():
    without = delivered(by=1)._replace(unprotected=True)
    judged = judge(history(without, delivered(by=2, at=11)))
    assert (judged.extra, judged.unexplained, judged.excuses) == (1, 0, {"unprotected": 1})
    judged = judge(history(without, delivered(by=2, at=11), delivered(by=3, at=12)))
    assert (judged.extra, judged.unexplained) == (2, 1)


@pytest.mark.parametrize(
    ("copies", "received", "lost", "unexplained"),
    [(2, 2, 0, 0), (1, 2, 0, 0), (3, 3, 1, 0), (1, 1, 0, 1)],
)
def test_in_shadow_mode_each_copy_is_delivered(copies, received, lost, unexplained):
    twice = history(delivered(by=1), delivered(by=2, at=11))
    judged = judge_shadow(twice, Counter({0: copies}), Counter({0: received}))
    assert (judged.lost, judged.unexplained) == (lost, unexplained)
    assert len(judged.violations) == lost + unexplained


def test_a_conversation_keeps_its_order():
    put = [4, 1, 5, 0, 5]
    right = [delivered(event, at=at) for at, event in enumerate([1, 4, 1, 0, 5, 4])]
    assert out_of_order(put, right) == []
    wrong = [delivered(event, at=at) for at, event in enumerate([0, 4, 1, 5])]
    assert out_of_order(put, wrong) == ["conversation 0 was put as [1, 0] and delivered as [0, 1]"]
