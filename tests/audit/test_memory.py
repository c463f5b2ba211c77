"""However long a recording and whatever stands in it, what is remembered of it is bounded."""

import json
import tempfile
from contextlib import closing

import pytest
from hypothesis import given, settings
from tests.audit import test_judge
from tests.audit.recordings import START_MS, event, lines, raw
from tests.size import examples

from oncebridge import Rule
from oncebridge.audit import judge, rows
from oncebridge.audit.engine import audit
from oncebridge.audit.judge import Judge
from oncebridge.audit.table import Table
from oncebridge.errors import ConfigError
from oncebridge.events.event import Limits, read
from oncebridge.events.rules import RuleSet

# --- groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [100, 5_000])
def test_a_chain_of_keys_is_one_group_in_few_rounds(count, tmp_path, monkeypatch):
    """Each has the id of the one before or its content, in turn."""
    rounds = 0
    run = Table.run

    def counted(self, sql):
        nonlocal rounds
        rounds += "TABLE jumped" in sql and "CREATE TEMP" in sql
        run(self, sql)

    monkeypatch.setattr(Table, "run", counted)
    raws = [raw((n + 1) // 2, id=f"i{n // 2}") for n in range(count)]
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(*raws))
    tiers = [{"key": "id", "window": "5m", "check": False}, {"key": "content"}]
    report = audit([path], [Rule.parse({"name": "chained", "tiers": tiers})])
    assert report.logical == count // 2  # those of which neither id nor content was delivered
    assert rounds <= 2 * count.bit_length()


# --- the judge ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["content", "sliding", "two tiers", "both", "id, unchecked"])
@settings(max_examples=examples(25), deadline=None)
@given(stream=test_judge.streams())
def test_what_is_over_may_be_forgotten(name, stream):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "_FEW", 0)
        forgetful = test_judge.by_a_judge([test_judge.rule(name)], stream)
    assert forgetful == test_judge.by_a_judge([test_judge.rule(name)], stream)


def test_a_judge_keeps_no_more_than_the_windows_need():
    rule = Rule.parse(
        {
            "name": "states",
            "window": "1m",
            "latest": {"entity": "detail.e", "version": "detail.n"},
        }
    )
    rules, one = RuleSet([rule], namespace="audit"), Judge()
    most = 0
    for number in range(5_000):
        plan = rules.plan(read(json.dumps(event(detail={"e": "E", "n": number})).encode()))
        one.judge(number, START_MS + number * 1_000, plan)
        most = max(most, len(one._records) + len(one._entities))
    assert most < 1_100


def test_delivered_again_is_known_though_the_record_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "_FEW", 0)
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(
        lines(
            *(
                json.dumps({"timestamp": START_MS + at, "message": raw(n).decode()}).encode()
                for at, n in ((0, 1), (1, 2), (5_000, 1), (5_001, 3), (20_000, 1))
            )
        )
    )
    report = audit([path], [Rule.parse({"name": "short", "window": "1s"})])
    assert (report.logical, report.after_window) == (3, 2)


# --- texts ----------------------------------------------------------------------------------


def test_long_texts_are_not_remembered_for_ever(tmp_path):
    job = rows.Job(tmp_path, RuleSet([], namespace="audit"), None, Limits(), False, 10**15)
    with closing(rows.RowWriter(job, 0, 1)) as scribe:
        for number in range(40):
            long = f"{number} " + "x" * 600_000
            scribe._add(read(raw(number, id=long, source=long, detail_type=long)), number, None)
        names = sum(map(len, scribe._names._seen))
        kinds = sum(len(text or "") for kind in scribe._kinds._numbers for text in kind[:5])
    assert 0 < names <= 9_000_000
    assert 0 < kinds <= 10_000_000


# --- where it is kept -----------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["g[1]*", "it's", "{a,b}", "[!x]", "%41 #"])
def test_temporary_files_may_lie_anywhere(odd, tmp_path, monkeypatch):
    folder = tmp_path / odd
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(raw(1), raw(1), raw(2)))
    report = audit([path], [])
    assert (report.events, report.logical) == (3, 2)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("odd", ["what?", "back\\slash", "\udcff"])
def test_where_they_cannot_lie_is_said(odd, tmp_path, monkeypatch):
    folder = tmp_path / odd
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(raw(1)))
    with pytest.raises(ConfigError, match="TMPDIR"):
        audit([path], [])
    assert list(folder.iterdir()) == []
