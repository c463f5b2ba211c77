"""When arrivals came, though one or the other time is wrong."""

import json
from datetime import UTC, datetime

import pytest
from tests.audit.recordings import START_MS, event, lines

from oncebridge import Rule, Verdict
from oncebridge.audit.engine import audit
from oncebridge.audit.order import arrival_times

HOUR = 3_600_000
FAR = 10**13
"""A time that is no time of the recording."""


@pytest.mark.parametrize(
    ("times", "latest"),
    [
        ([], []),
        ([None, None], [None, None]),
        ([5, 3, None, 9], [5, 5, 5, 9]),
        ([0, FAR, 1, 2], [0, 0, 1, 2]),
        ([FAR, 0, 1, 2], [None, 0, 1, 2]),
        ([None, 0, FAR, None, FAR, 1, 2, 3, 4, 5], [None, 0, 0, 0, 0, 1, 2, 3, 4, 5]),
        # a pause of hours, and another
        ([0, 9 * HOUR, 18 * HOUR, 1, 18 * HOUR], [0, *[9 * HOUR] * 3, 18 * HOUR]),
        # each is hours after the one before; of the last nobody can say
        ([n * 5 * HOUR for n in range(20)], [n * 5 * HOUR for n in range(20)]),
        # what is behind a pause is mixed with what was sent before
        ([0, *[9 * HOUR, 9 * HOUR, 0] * 5], [0, *[9 * HOUR] * 15]),
    ],
)
def test_a_leap_counts_where_what_follows_agrees(times, latest):
    assert arrival_times(times).latest == latest


def test_what_comes_last_in_a_chunk_is_not_for_the_next_to_go_by():
    order = arrival_times([1, 2, FAR])
    assert (order.first_ms, order.sure_ms, order.end_ms) == (1, 2, FAR)
    order = arrival_times([1, 2, FAR, FAR])
    assert (order.sure_ms, order.end_ms) == (FAR, FAR)


# --- in whole recordings --------------------------------------------------------------------


def stamped(number, at_s, **envelope):
    at = datetime.fromtimestamp(START_MS / 1000 + at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return event(number, time=at, **envelope)


def queued(whole, at_s):
    attributes = {"SentTimestamp": str(START_MS + at_s * 1000)}
    return {
        "MessageId": "m",
        "ReceiptHandle": "r",
        "Body": json.dumps(whole),
        "Attributes": attributes,
    }


def recorded(tmp_path, *wholes):
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(*(json.dumps(whole).encode() for whole in wholes)))
    return path


BASE = [stamped(n, n * 10) for n in range(100)]
DAYS = 200 * 86_400


@pytest.mark.parametrize("place", [0, 50, 100, 150, 200])
def test_one_event_of_another_day_hides_no_repeat(place, tmp_path):
    stream = BASE + BASE
    stream.insert(place, stamped(1_000, DAYS))
    report = audit([recorded(tmp_path, *stream)], [])
    assert report.verdicts[Verdict.DUPLICATE] == 100
    assert (report.logical, report.first_ms) == (101, START_MS)
    assert report.gaps.max_ms == 990_000
    if place < 200:
        assert report.last_ms == START_MS + 990_000


def test_one_event_of_another_day_at_the_end_of_a_block_hides_no_repeat(tmp_path):
    """Blocks are of two megabytes, and who reads one does not know the next."""
    long = {"text": "x" * 200_000}
    first = [stamped(n, n * 10, detail=long | {"n": n}) for n in range(30)]
    for at in range(8, 13):  # the first block ends behind the tenth or the eleventh
        stream = first + first
        stream.insert(at, stamped(1_000, DAYS, detail=long))
        report = audit([recorded(tmp_path, *stream)], [])
        assert report.verdicts[Verdict.DUPLICATE] == 30


def test_a_wrong_time_that_was_recorded_hides_no_repeat(tmp_path):
    stream = [queued(whole, n * 10 + 1) for n, whole in enumerate(BASE)]
    stream.append(queued(stamped(1_000, 0), 10**11))
    stream += [queued(whole, 2_000 + n) for n, whole in enumerate(BASE)]
    report = audit([recorded(tmp_path, *stream)], [])
    assert report.verdicts[Verdict.DUPLICATE] == 100
    assert (report.clock, report.last_ms) == ("recorded", START_MS + 2_099_000)


def test_pauses_of_hours_are_no_mistakes(tmp_path):
    """One event in five hours; each is published again when the next one but three comes."""
    hours = [stamped(n, n * 18_000) for n in range(12)]
    again = [stamped(n, (n + 3) * 18_000, id=f"again-{n}") for n in range(9)]
    stream = sorted([*hours, *again], key=lambda whole: whole["time"])
    report = audit([recorded(tmp_path, *stream)], [])
    assert (report.gaps.count, report.gaps.p50_ms, report.gaps.max_ms) == (9, 15 * HOUR, 15 * HOUR)
    short = [Rule.parse({"name": "short", "window": "14h"})]
    assert audit([recorded(tmp_path, *stream)], short).gaps is None


def test_what_is_behind_something_recorded_came_no_earlier(tmp_path):
    """A copy without a time of arrival, ten minutes after its publication."""
    stream = []
    for number, whole in enumerate(BASE[:50]):
        stream += [queued(whole, number * 10 + 600), whole]
    path = recorded(tmp_path, *stream)
    report = audit([path], [])
    assert report.gaps.max_ms == 0
    (found,) = report.causes
    first = found.examples[0]
    assert (found.count, first.place, first.first_place) == (50, f"{path}:2", f"{path}:1")
