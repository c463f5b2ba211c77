"""What is said of repeats: what they have in common with the first, and what they have not."""

import json
from itertools import product

import pytest
from tests.audit.recordings import event, lines, raw

from oncebridge import Rule
from oncebridge.audit.engine import audit
from oncebridge.audit.findings import Findings
from oncebridge.audit.suggest import suggest
from oncebridge.engine.causes import Cause, Sighting, duplicate_cause
from oncebridge.genesys.simulator import simulate

FIELDS = Rule.parse({"name": "by order", "key": ["detail.order"], "scope": "organisation"})
GENESYS = "aws.partner/genesys.com/cloud/o"


def record(tmp_path, *raws):
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(*raws))
    return path


@pytest.fixture
def causes_of(monkeypatch):
    """Audit, and give the report and the cause that was named for each line."""
    named = {}
    name_causes = Findings.name_causes

    def spy(self):
        name_causes(self)
        named.update(self._table.rows("SELECT line, cause FROM repeats JOIN arrivals USING (ord)"))

    def run(path, rules):
        named.clear()
        return audit([path], rules), {line: Cause(cause) for line, cause in named.items()}

    monkeypatch.setattr(Findings, "name_causes", spy)
    return run


def test_sql_and_python_name_the_same_cause(tmp_path, causes_of):
    """Of all that may or may not be the same in two arrivals."""
    firsts = product(["i1", ""], [f"{GENESYS}/a"], ["1", ""], ["x", ""], ["", "r1"])
    laters = list(
        product(
            ["i1", "i2", ""],
            [f"{GENESYS}/a", f"{GENESYS}/b"],
            ["1", "2", ""],
            ["x", "y", ""],
            ["", "r1", "r2"],
        )
    )
    raws, expected = [], {}
    for number, (first, later) in enumerate(product(firsts, laters)):
        one, two = Sighting(*first), Sighting(*later)
        raws += [seen(number, one), seen(number, two)]
        expected[2 * number + 1] = duplicate_cause(one, two)
    _, named = causes_of(record(tmp_path, *raws), [FIELDS])
    assert named == expected
    assert set(expected.values()) == {
        *(Cause.REDELIVERY, Cause.RE_EMISSION, Cause.SECOND_INTEGRATION, Cause.SECOND_BUS),
        *(Cause.REPLAY, Cause.UNKNOWN),
    }


def test_sql_and_python_name_the_same_cause_of_a_copy_of_a_copy(tmp_path, causes_of):
    first = Sighting("i1", f"{GENESYS}/a", "1", "x", "")
    between = Sighting("i2", f"{GENESYS}/b", "2", "y", "")
    raws, expected = [], {}
    laters = product(["i2", "i3"], [f"{GENESYS}/a"], ["1", "3"], ["x", "y"], ["", "r1"])
    for number, later in enumerate(laters):
        last = Sighting(*later)
        raws += [seen(number, one) for one in (first, between, last)]
        expected[3 * number + 1] = duplicate_cause(first, between)
        expected[3 * number + 2] = duplicate_cause(first, last, id_was_seen=last.id == "i2")
    _, named = causes_of(record(tmp_path, *raws), [FIELDS])
    assert named == expected


def seen(number, sighting):
    """Make an arrival of the event *number* that came as *sighting* says."""
    whole = event(detail={"order": number}, source=sighting.source)
    ways = {
        "id": sighting.id,
        "account": sighting.account,
        "region": sighting.region,
        "replay-name": sighting.replay,
    }
    whole |= ways
    return json.dumps({name: value for name, value in whole.items() if value != ""}).encode()


# --- the same key, and other content --------------------------------------------------------


def order(id_, number=1, **detail):
    return raw(id=id_, detail={"order": number, **detail})


def found(report):
    return {one.kind: one.count for one in report.suspicions}


def test_a_key_that_takes_different_events_for_one_is_told(tmp_path, causes_of):
    path = record(
        tmp_path,
        order("i1", v=1),
        order("i2", v=2),  # lost
        order("i3", v=1),
        order("i2", v=2),  # lost, and sent again
        order("i1", v=3),  # lost, and its id is another's
        order("i4", 2, v=9),
    )
    report, named = causes_of(path, [FIELDS])
    assert named == {
        1: Cause.UNKNOWN,
        2: Cause.RE_EMISSION,
        3: Cause.REDELIVERY,
        4: Cause.ID_REUSED,
    }
    assert found(report) == {"other-content": 3}
    examples = report.suspicions[0].examples
    assert [(one.place, one.first_place) for one in examples] == [
        (f"{path}:{line}", f"{path}:1") for line in (2, 4, 5)
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"key": ["detail.order"], "ignore": ["detail.sent"]},
        {"tiers": [{"key": ["detail.order"]}, {"key": "content", "ignore": ["detail.sent"]}]},
        {
            "tiers": [
                {"key": "content", "ignore": ["detail.sent", "detail.by"]},
                {"key": ["detail.order"]},
            ]
        },
    ],
)
def test_what_the_rule_ignores_is_no_other_content(more, tmp_path):
    rule = Rule.parse({"name": "by order", **more})
    path = record(tmp_path, order("i1", sent=1), order("i2", sent=2))
    report = audit([path], [rule])
    assert [(one.cause, one.count) for one in report.causes] == [(Cause.RE_EMISSION, 1)]
    assert found(report) == {}


def test_a_tier_that_takes_different_events_for_one_is_told(tmp_path, causes_of):
    rule = Rule.parse(
        {
            "name": "tiers",
            "tiers": [{"key": "id", "window": "5m", "check": False}, {"key": "content"}],
        }
    )
    path = record(tmp_path, order("i1", v=1), order("i1", v=2), order("i1", v=1))
    report, named = causes_of(path, [rule])
    assert named == {1: Cause.ID_REUSED, 2: Cause.REDELIVERY}
    assert found(report) == {"other-content": 1}


def test_where_the_content_is_compared_nothing_is_suspected(tmp_path):
    rule = Rule.parse({"name": "checked", "key": ["detail.order"], "check": True})
    path = record(tmp_path, order("i1", v=1), order("i2", v=2), order("i3", v=2))
    assert found(audit([path], [rule])) == {}


def test_what_genesys_writes_anew_each_time_is_no_other_content(tmp_path):
    """Of the simulator's events, all are told that are lost, and no others."""
    stream = list(simulate(3, 3_000))
    path = record(tmp_path, *(arrival.raw.replace(b"\n", b" ") for arrival in stream))
    key = ["detail.eventBody.conversationId"]
    rule = Rule.parse({"name": "by conversation", "key": key, "scope": "organisation"})
    firsts, other = {}, 0
    for arrival in stream:
        whole = json.loads(arrival.raw)
        conversation = whole["detail"]["eventBody"].get("conversationId")
        if conversation is not None:
            first = firsts.setdefault((conversation, whole["detail-type"]), arrival.truth)
            other += first != arrival.truth
    assert found(audit([path], [rule]))["other-content"] == other > 100


def test_the_suggestion_says_what_to_do_about_it(tmp_path):
    report = audit([record(tmp_path, order("i1", v=1), order("i2", v=2))], [FIELDS])
    (reason,) = [one for one in suggest(report).reasons if "(other content)" in one]
    assert reason.startswith("1 arrival")
    assert "check = true" in reason
