"""Simple keys are held to the events that the report counts."""

import pytest
from tests.audit.recordings import START_MS, lines, raw
from tests.audit.test_engine import logged, naive

from oncebridge import Rule
from oncebridge.audit.engine import audit

SHORT = Rule.parse({"name": "short", "window": "5m"})
MINUTE = 60_000


def about(number, minute, id_="i"):
    detail = {"conversationId": f"c{number}", "n": number}
    return logged(START_MS + minute * MINUTE, raw(id=id_, detail=detail))


def audited(tmp_path, rules, *raws):
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(*raws))
    return audit([path], rules)


def test_what_comes_again_after_the_window_is_not_lost(tmp_path):
    report = audited(tmp_path, [SHORT], about(1, 0), about(1, 60), about(2, 61, "other"))
    assert report.logical == 2
    assert naive(report) == {
        "conversation-id": (0, 0),
        "envelope-id": (0, 0),
        "detail-hash": (0, 0),
        "five-minutes": (0, 0),
    }


@pytest.mark.parametrize("times", [2, 3, 20])
def test_however_often_it_comes_again_it_is_one_event(times, tmp_path):
    """Each time twice; by its id, only what came under a new one passes."""
    pairs = [about(1, 60 * n + m, f"i{n}") for n in range(times) for m in (0, 1)]
    report = audited(tmp_path, [SHORT], about(2, 0, "i0"), *pairs)
    assert report.logical == 2
    assert naive(report)["conversation-id"] == (0, 0)
    # that of the first time is taken; the second stands for the event, the rest beside it
    assert naive(report)["envelope-id"] == (0, times - 2)


def test_what_the_rules_discard_is_not_lost(tmp_path):
    rules = [
        Rule.parse({"name": "gone", "match": {"source": ["gone"]}, "discard": True}),
        Rule.parse(
            {
                "name": "strict",
                "match": {"source": ["strict"]},
                "key": ["detail.missing"],
                "on_missing": "dead",
            }
        ),
    ]
    raws = [
        raw(id="i", source=source, detail={"conversationId": "c", "n": n})
        for source in ("gone", "strict", "kept")
        for n in range(3)
    ]
    report = audited(tmp_path, rules, *raws)
    assert report.logical == 3
    assert naive(report) == {
        "conversation-id": (2, 0),
        "envelope-id": (2, 0),
        "detail-hash": (0, 0),
        "five-minutes": (0, 0),
    }


def test_a_repeat_of_what_is_no_event_saves_none(tmp_path):
    """Of an outdated state and its copy, nothing is lost and nothing is missed."""
    rule = Rule.parse({"name": "r", "latest": {"entity": "detail.e", "version": "detail.v"}})

    def state(id_, version):
        return raw(id=id_, detail={"e": "E", "v": version})

    report = audited(tmp_path, [rule], state("a", 2), state("a", 1), state("b", 1), state("c", 3))
    assert report.logical == 2
    assert naive(report)["envelope-id"] == (0, 1)  # b, which the rule drops
