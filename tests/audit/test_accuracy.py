"""On streams that know their own truth, every repeat is found, and its cause is named."""

from collections import Counter
from datetime import UTC, datetime
from random import Random

import pytest
from msgspec.structs import replace
from tests.size import full

from oncebridge import Rule, Verdict
from oncebridge.audit.engine import audit
from oncebridge.audit.findings import Findings
from oncebridge.engine.causes import Cause
from oncebridge.events.framing import as_line
from oncebridge.genesys.preset import genesys_rules
from oncebridge.genesys.simulator import REPEATS, START_MS, Label, simulate

CAUSES = {
    Label.REDELIVERY: Cause.REDELIVERY,
    Label.REORDERED: Cause.REDELIVERY,
    Label.RE_EMISSION: Cause.RE_EMISSION,
    Label.SECOND_INTEGRATION: Cause.SECOND_INTEGRATION,
    Label.REPLAY: Cause.REPLAY,
}
DAY_MS = 86_400_000


def write(path, stream):
    with path.open("wb") as file:
        file.writelines(as_line(arrival.raw) for arrival in stream)


def causes_by_line(path, monkeypatch, **options):
    """Audit *path*, and keep the cause that was named for each line."""
    named = {}
    name_causes = Findings.name_causes

    def spy(self):
        name_causes(self)
        for line, cause, verdict, first in self._table.rows(
            "SELECT later.line, cause, verdict, earlier.line FROM repeats "
            "JOIN arrivals later ON later.ord = repeats.ord "
            "LEFT JOIN arrivals earlier ON earlier.ord = repeats.first"
        ):
            named[line] = cause, verdict, first

    monkeypatch.setattr(Findings, "name_causes", spy)
    return audit([path], genesys_rules(), **options), named


def check(stream, report, named):
    """Hold what was found against what is true."""
    firsts = {}
    for line, arrival in enumerate(stream):
        firsts.setdefault(arrival.truth, line)
    repeats = {line for line, one in enumerate(stream) if firsts[one.truth] != line}
    assert set(named) == repeats  # nothing merged, nothing missed
    assert all(stream[first].truth == stream[line].truth for line, (*_, first) in named.items())
    assert report.logical == len(firsts)
    assert report.events == len(stream)
    assert report.verdicts[Verdict.DUPLICATE] == len(repeats)
    asked = right = 0
    for line in repeats:
        if stream[line].label in REPEATS:
            asked += 1
            right += named[line][0] == CAUSES[stream[line].label]
    assert asked > len(stream) / 5
    assert right / asked >= 0.99, (right, asked)
    assert Counter(cause for cause, *_ in named.values()) == {
        found.cause: found.count for found in report.causes
    }


@pytest.mark.parametrize("seed", [1, *full(2, 3)])
def test_the_cause_of_nearly_every_repeat_is_named(seed, tmp_path, monkeypatch):
    stream = list(simulate(seed, 20_000))
    path = tmp_path / "recorded.ndjson"
    write(path, stream)
    report, named = causes_by_line(path, monkeypatch)
    check(stream, report, named)
    assert report.clock == "published"
    assert report.unreadable == {}


@pytest.mark.full
def test_repeats_that_come_days_later_are_found_in_the_log_of_a_week(tmp_path, monkeypatch):
    """Up to nearly six days late, by the clock of the log; gaps are told to the millisecond."""
    dice = Random(7)
    late = []
    for arrival in simulate(6, 20_000):
        days = dice.random() * 5.9 if arrival.label in REPEATS and dice.random() < 0.5 else 0
        late.append(replace(arrival, at_ms=arrival.at_ms + int(days * DAY_MS)))
    stream = sorted(late, key=lambda arrival: arrival.at_ms)
    path = tmp_path / "exported"
    with path.open("wb") as file:
        for arrival in stream:
            at = datetime.fromtimestamp((START_MS + arrival.at_ms) / 1000, UTC)
            stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            file.write(f"{stamp} ".encode() + as_line(arrival.raw))
    report, named = causes_by_line(path, monkeypatch)
    check(stream, report, named)
    assert report.clock == "recorded"
    firsts = {arrival.truth: arrival.at_ms for arrival in reversed(stream)}
    gaps = [stream[line].at_ms - firsts[stream[line].truth] for line in named]
    assert report.gaps.max_ms == max(gaps) > 5 * DAY_MS
    assert abs(report.gaps.p50_ms - sorted(gaps)[len(gaps) // 2]) < DAY_MS / 20
    assert sum(many for _, many in report.gaps.histogram) == len(gaps)


def test_several_files_are_one_recording(tmp_path):
    """Four files of as many days, read by two workers."""
    streams = [list(simulate(seed, 3_000, start_ms=START_MS + seed * DAY_MS)) for seed in range(4)]
    for number, stream in enumerate(streams):
        write(tmp_path / f"{number}.ndjson", stream)
    report = audit([tmp_path], genesys_rules(), workers=2)
    truths = sum(len({arrival.truth for arrival in stream}) for stream in streams)
    assert (report.files, report.events, report.logical) == (4, 12_000, truths)
    assert report.last_ms - report.first_ms > 3 * DAY_MS


def test_a_window_of_ten_seconds_lets_late_repeats_pass(tmp_path):
    stream = list(simulate(5, 5_000))
    path = tmp_path / "recorded.ndjson"
    write(path, stream)
    spec = {"ignore": ["detail.timestamp", "detail.metadata"], "scope": "organisation"}
    short = [Rule.parse({"name": "short", "window": "10s", **spec})]
    long = [Rule.parse({"name": "long", **spec})]
    report = audit([path], long, candidate=short)
    assert report.trial is not None
    passed = report.gaps.count - sum(
        many for bound, many in report.gaps.histogram if bound <= 10_000
    )
    # A late repeat that is delivered again starts a window in which another may fall.
    assert 0.8 * passed < report.trial.changed <= passed
    assert {change[:2] for change in report.trial.by_change} == {
        (Verdict.DUPLICATE, Verdict.DELIVERED)
    }
    assert audit([path], short).logical == report.logical  # the same events, some of them twice
