"""Sums add up in any order; histograms stay usable whatever somebody has written of them."""

import math
from bisect import bisect_left
from functools import reduce
from operator import add

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dashboard.fleets import histogram

from oncebridge.observe.counts import (
    ITEMS,
    LAGS,
    MINUTES,
    SECONDS,
    CallCounts,
    Counts,
    Histogram,
    RouteCounts,
)

COUNTS = st.lists(st.integers(0, 5), max_size=40)


@pytest.mark.parametrize(
    ("counts", "value"),
    [
        ([], None),
        ([0, 0], None),
        ([4], 0.05),
        ([0, 2], 0.3),
        ([0] * 13 + [1], 86400.0),
        ([0] * 16 + [1], 86400.0),
        ([1] * 17, 180.0),
    ],
)
def test_a_quantile_is_told_of_more_or_fewer_places_than_there_should_be(counts, value):
    assert Histogram(counts, 1.0).quantile(0.5, LAGS) == (value and pytest.approx(value))


@given(COUNTS, st.floats(0, 1), st.sampled_from([SECONDS, LAGS, ITEMS]))
def test_whatever_was_counted_lies_within_the_ends(counts, part, ends):
    found = Histogram(counts, 1.0).quantile(part, ends)
    assert (found is None) == (not any(counts))
    assert found is None or 0 <= found <= ends[-1]


@given(COUNTS, st.sampled_from([SECONDS, LAGS, ITEMS]))
def test_what_is_told_has_all_places_and_loses_nothing(counts, ends):
    fitted = Histogram(counts, 1.0).fitted(ends)
    assert len(fitted) == len(ends) + 1
    assert sum(fitted) == sum(counts)
    assert fitted[: len(counts)][: len(ends)] == counts[: len(ends)]


@given(COUNTS, COUNTS)
def test_unequal_ones_add_up_and_can_be_taken_away_again(one, other):
    added = Histogram(one, 1.0) + Histogram(other, 2.0)
    assert added.count == sum(one) + sum(other)
    left = added - Histogram(other, 2.0)
    assert left.fitted([1.0] * 40) == Histogram(one).fitted([1.0] * 40)


# --- everything together ------------------------------------------------------------------


NAMES = st.sampled_from(["a", "b"])
SUMS = st.dictionaries(NAMES, st.integers(1, 1000), min_size=1, max_size=2)
EACH = st.dictionaries(NAMES, SUMS, max_size=2)


@st.composite
def histograms(draw):
    # Whole numbers, as the sum of others depends on their order.
    return histogram([float(v) for v in draw(st.lists(st.integers(0, 100), max_size=3))], SECONDS)


HISTOGRAMS = histograms()
ROUTES = st.builds(RouteCounts, SUMS, EACH, SUMS, *[HISTOGRAMS] * 4, st.integers(0, 9))
CALLS = st.builds(CallCounts, HISTOGRAMS, HISTOGRAMS, st.integers(0, 9))
ALL = st.builds(
    Counts,
    st.dictionaries(NAMES, ROUTES, max_size=2),
    st.dictionaries(NAMES, CALLS, max_size=2),
    st.dictionaries(st.integers(0, 3), SUMS, max_size=2),
    EACH,
    SUMS,
)


@given(ALL, ALL, ALL)
def test_it_does_not_matter_in_which_order_workers_are_added(one, two, three):
    assert (one + two) + three == one + (two + three)
    assert one + two == two + one


@given(ALL)
def test_nothing_added_changes_nothing(counts):
    assert counts + Counts() == counts
    assert Counts() + counts == counts


@given(ALL, ALL)
def test_adding_changes_neither_of_the_two(one, two):
    before = msgspec.msgpack.encode([one, two])
    total = one + two
    for route in total.routes.values():
        route.took.counts.append(1)
        route.books["a"] = 0
    assert msgspec.msgpack.encode([one, two]) == before


@given(ALL, ALL)
def test_what_was_taken_away_makes_it_whole_again(earlier, since):
    """A worker that begins anew tells what it counted since: nothing twice, nothing lost."""
    now = earlier + since
    assert (now - earlier) + earlier == now


@given(st.lists(ALL, max_size=4))
def test_what_is_written_down_is_what_is_read(several):
    total = reduce(add, several, Counts())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(total), type=Counts) == total


def test_what_is_left_of_nothing_is_left_out():
    """Of topics, entities and minutes not all is kept, so that less may be there than before."""
    earlier = Counts(topics={"t": {"arrived": 9}, "u": {"arrived": 4}}, entities={"e": 5})
    now = Counts(topics={"t": {"arrived": 3}, "u": {"arrived": 6}}, entities={"e": 2, "f": 1})
    since = now - earlier
    assert since.topics == {"u": {"arrived": 2}}
    assert since.entities == {"f": 1}


def test_only_the_last_hour_and_the_noisiest_are_kept():
    counts = Counts(
        {"crm": RouteCounts({"arrived": 3})},
        minutes={minute: {"delivered": 1} for minute in range(100)},
        topics={f"t{n}": {"arrived": n} for n in range(9)},
        entities={f"e{n}": n for n in range(9)},
    )
    kept = counts.trimmed(99, 2)
    assert kept.routes == counts.routes
    assert sorted(kept.minutes) == list(range(100 - MINUTES, 100))
    assert kept.topics == {"t8": {"arrived": 8}, "t7": {"arrived": 7}}
    assert kept.entities == {"e8": 8, "e7": 7}
    assert counts.trimmed(99).topics == counts.topics


# --- guesses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "part", "guess"),
    [
        ([0.3], 0.5, 0.375),
        ([0.3] * 4, 0.25, 0.3125),
        ([0.3] * 4, 1.0, 0.5),
        ([0.05, 0.3, 2.0, 99.0], 0.5, 0.5),
        ([99.0], 0.5, 60.0),
        ([0.5], 1.0, 0.5),
    ],
)
def test_a_quantile_is_guessed_within_its_place(values, part, guess):
    found = histogram(values, SECONDS)
    assert found.quantile(part, SECONDS) == pytest.approx(guess)
    assert found.count == len(values)
    assert found.sum == pytest.approx(sum(values))


@given(st.lists(st.floats(0, 60), min_size=1), st.floats(0.01, 1))
def test_a_guess_is_in_the_same_place_as_the_value(values, part):
    guess = histogram(values, SECONDS).quantile(part, SECONDS)
    rank = max(1, math.ceil(part * len(values)))
    true = sorted(values)[rank - 1]
    place = bisect_left(SECONDS, true)
    low = SECONDS[place - 1] if place else 0.0
    assert low - 1e-9 <= guess <= SECONDS[place] + 1e-9
