"""What an audit says of small recordings, of which all is known."""

import json
from datetime import timedelta
from itertools import product

import pytest
from tests.audit.recordings import CONTENT, START_MS, audited, event, lines, raw

from oncebridge import Rule, Verdict
from oncebridge.audit import table
from oncebridge.audit.engine import audit
from oncebridge.audit.report import NamedCounts
from oncebridge.engine.causes import Cause, Sighting, duplicate_cause
from oncebridge.events.framing import as_line
from oncebridge.genesys.preset import genesys_rules
from oncebridge.genesys.simulator import simulate

DELIVERED, DUPLICATE = Verdict.DELIVERED, Verdict.DUPLICATE
BY_ID = Rule.parse({"name": "by id", "key": "id"})


def record(tmp_path, *raws, name="recorded.ndjson"):
    path = tmp_path / name
    path.write_bytes(lines(*raws))
    return path


def logged(at_ms, text):
    return json.dumps({"timestamp": at_ms, "message": text.decode()}).encode()


# --- when things arrived --------------------------------------------------------------------


def test_an_event_arrives_no_earlier_than_what_is_before_it_in_its_file(tmp_path):
    path = record(tmp_path, raw(1, at_s=0), raw(2, at_s=30), raw(1, at_s=0), raw(3, at_s=20))
    report = audit([path], [])
    assert report.clock == "published"
    assert (report.first_ms, report.last_ms) == (START_MS, START_MS + 30_000)
    assert (report.gaps.count, report.gaps.max_ms) == (1, 30_000)


def test_files_are_merged_by_time(tmp_path):
    late = record(tmp_path, raw(1, id="late", at_s=30), name="a.ndjson")
    early = record(tmp_path, raw(2, at_s=0), raw(1, id="early", at_s=10), name="b.ndjson")
    _, told = audited([late, early])
    assert told == [
        (f"{early}:1", "delivered", ""),
        (f"{early}:2", "delivered", ""),
        (f"{late}:1", "duplicate", f"{early}:2"),
    ]


def test_the_timestamp_of_genesys_is_exact_to_the_millisecond(tmp_path):
    def published(second, millis, **envelope):
        stamp = f"2026-03-19T10:15:{second:02}.{millis:03}Z"
        return raw(1, at_s=second, detail={"timestamp": stamp, "n": 1}, **envelope)

    path = record(tmp_path, published(1, 250), published(2, 125, id="other"))
    rule = Rule.parse({"name": "genesys-like", "ignore": ["detail.timestamp"]})
    assert audit([path], [rule]).gaps.max_ms == 875


def test_a_timestamp_that_is_no_publication_does_not_count(tmp_path):
    old = {"timestamp": "2019-01-01T00:00:00.000Z"}
    report = audit([record(tmp_path, raw(1, at_s=5, detail=old))], [])
    assert report.first_ms == START_MS + 5_000


def test_times_of_tomorrow_are_ignored(tmp_path):
    future = json.dumps(event(2) | {"time": "2999-01-01T00:00:00Z"}).encode()
    report = audit([record(tmp_path, raw(1), future, raw(1, at_s=9))], [])
    assert report.last_ms == START_MS + 9_000


def test_recorded_times_count_more_than_the_order_of_lines(tmp_path):
    path = record(
        tmp_path,
        logged(START_MS + 700, raw(1, id="second")),
        logged(START_MS + 200, raw(1, id="first", at_s=59)),
    )
    report, told = audited(path)
    assert told == [(f"{path}:2", "delivered", ""), (f"{path}:1", "duplicate", f"{path}:2")]
    assert (report.clock, report.gaps.max_ms) == ("recorded", 500)
    assert (report.first_ms, report.last_ms) == (START_MS + 200, START_MS + 700)


def test_without_any_time_the_order_of_lines_counts(tmp_path):
    report, told = audited(record(tmp_path, *(raw(n, at_s=None) for n in (1, 2, 1))))
    assert [verdict for _, verdict, _ in told] == ["delivered", "delivered", "duplicate"]
    assert (report.clock, report.first_ms, report.last_ms) == ("none", None, None)
    assert report.gaps is None
    assert report.over_time == ()
    assert report.causes[0].examples[0].gap_ms is None


def test_events_before_the_first_time_arrived_then(tmp_path):
    path = record(tmp_path, raw(1, at_s=None), raw(2, at_s=7), raw(1, at_s=9))
    report = audit([path], [])
    assert (report.first_ms, report.gaps.max_ms) == (START_MS + 7_000, 2_000)


@pytest.mark.parametrize("bits", [62, 20])
def test_times_that_lie_ages_apart_fit_too(bits, tmp_path, monkeypatch):
    """Where time and place need more than 62 bits, they get more."""
    monkeypatch.setattr(table, "_BITS", bits)
    ancient = json.dumps(event(11) | {"time": "1970-01-02T00:00:00Z"}).encode()
    path = record(tmp_path, ancient, *(raw(n % 10, id=f"i{n}", at_s=n % 60) for n in range(200)))
    report = audit([path], [CONTENT], candidate=[BY_ID])
    assert (report.events, report.logical) == (201, 11)
    assert report.first_ms == 86_400_000
    assert sum(sum(moment.verdicts.values()) for moment in report.over_time) == 201
    assert report.trial.changed == 190
    assert naive(report)["detail-hash"] == (0, 0)


def test_a_window_ends_to_the_millisecond(tmp_path):
    rule = Rule.parse({"name": "short", "window": "1s"})
    for gap, verdict in ((999, "duplicate"), (1_000, "delivered")):
        path = record(tmp_path, logged(START_MS, raw(1)), logged(START_MS + gap, raw(1, id="i")))
        report, told = audited(path, [rule])
        assert told[1][1] == verdict
        assert report.logical == 1  # delivered again, and still the same


# --- causes ---------------------------------------------------------------------------------


def test_causes_are_named_as_explain_names_them(tmp_path):
    """Whatever differs between two arrivals, SQL says what Python says."""
    ids, sources = ["i1", "i2", None], ["shop", "other"]
    regions, replays = ["us-east-1", None], [None, "r1", "r2"]
    sightings = list(product(ids, sources, regions, replays))
    rule = Rule.parse({"name": "any source", "key": ["detail.n"], "scope": "organisation"})
    genesys = {name: f"aws.partner/genesys.com/cloud/o/{name}" for name in sources}
    texts, expected = [], []
    for number, (one, two) in enumerate(product(sightings, sightings)):
        pair = []
        for id_, source, region, replay in (one, two):
            whole = event(number, source=genesys[source], region=region, replay_name=replay)
            whole.pop("id")
            texts.append(json.dumps(whole | ({"id": id_} if id_ else {})).encode())
            sees = (id_, genesys[source], "123456789012", region, replay)
            pair.append(Sighting(*(each or "" for each in sees)))
        expected.append(duplicate_cause(*pair))
    report = audit([record(tmp_path, *texts)], [rule])
    assert {found.cause: found.count for found in report.causes} == {
        cause: expected.count(cause) for cause in set(expected)
    }


def test_a_copy_of_a_copy_is_a_redelivery(tmp_path):
    path = record(tmp_path, raw(1, id="a"), raw(1, id="b"), raw(1, id="b"), raw(1, id="a"))
    counts = {found.cause: found.count for found in audit([path], []).causes}
    assert counts == {Cause.REDELIVERY: 2, Cause.RE_EMISSION: 1}


def test_causes_come_with_gaps_and_examples(tmp_path):
    path = record(
        tmp_path,
        *(logged(START_MS + gap, raw(1, id=f"i{gap}")) for gap in (0, 5, 50, 2_000, 90_000)),
    )
    report = audit([path], [], most_examples=2)
    (found,) = report.causes
    assert (found.cause, found.count, found.gaps) == (Cause.RE_EMISSION, 4, report.gaps)
    assert (found.gaps.p50_ms, found.gaps.p90_ms, found.gaps.max_ms) == (50, 90_000, 90_000)
    assert [bar for bar in found.gaps.histogram if bar[1]] == [
        *((10, 1), (100, 1), (5_000, 1), (300_000, 1)),
    ]
    assert [(one.place, one.gap_ms) for one in found.examples] == [
        (f"{path}:2", 5),
        (f"{path}:3", 50),
    ]
    first = found.examples[0]
    assert (first.id, first.first_id, first.first_place) == ("i5", "i0", f"{path}:1")
    assert (first.source, first.detail_type) == ("shop", "Order")


def test_newest_wins_and_quiet_have_causes_of_their_own(tmp_path):
    def state(version, name):
        return raw(0, id=f"{version}{name}", detail={"e": "E", "v": version, "s": name})

    rule = Rule.parse(
        {
            "name": "states",
            "latest": {"entity": "detail.e", "version": "detail.v"},
            "quiet": {"entity": "detail.e", "state": "detail.s", "for": "500ms"},
        }
    )
    stream = [state(2, "a"), state(1, "b"), state(3, "a"), state(1, "b")]
    report, told = audited(record(tmp_path, *stream), [rule])
    assert [verdict for _, verdict, _ in told] == ["delivered", "stale", "unchanged", "duplicate"]
    assert {found.cause: found.count for found in report.causes} == {
        Cause.OUT_OF_ORDER: 1,
        Cause.DOUBLE_EMISSION: 1,
        Cause.REDELIVERY: 1,
    }
    assert report.logical == 1
    assert report.suspicions == ()


@pytest.mark.parametrize("policy", ["deliver", "dead", "duplicate"])
def test_an_id_with_other_content_is_told(policy, tmp_path):
    rule = Rule.parse({"name": "by id", "key": "id", "on_conflict": policy})
    path = record(tmp_path, raw(1, id="i"), raw(2, id="i"), raw(2, id="i"), raw(1, id="i"))
    report, told = audited(path, [rule])
    assert [verdict for _, verdict, _ in told] == [
        "delivered",
        "conflict",
        "duplicate",
        "duplicate",
    ]
    counts = {found.cause: found.count for found in report.causes}
    if policy == "deliver":
        assert counts == {Cause.REDELIVERY: 2}
        assert [(one.kind, one.count) for one in report.suspicions] == [("id-reused", 1)]
        assert report.logical == 2
    else:
        assert counts == {Cause.REDELIVERY: 2, Cause.ID_REUSED: 1}
        assert report.suspicions == ()
        assert report.logical == 1


def test_an_id_that_hides_other_content_is_told(tmp_path):
    rule = Rule.parse({"name": "by id", "key": "id", "check": False})
    report = audit([record(tmp_path, raw(1, id="i"), raw(2, id="i"), raw(1, id="i"))], [rule])
    counts = {found.cause: found.count for found in report.causes}
    assert counts == {Cause.ID_REUSED: 1, Cause.REDELIVERY: 1}


# --- suspicions -----------------------------------------------------------------------------


def body(at_ms, conversation="c1", **more):
    inner = {"conversationId": conversation, "eventTime": START_MS + at_ms, **more}
    return {"topicName": "t", "eventBody": inner}


def suspected(report):
    return {one.kind: one.count for one in report.suspicions}


def test_the_same_state_again_at_once_is_suspected(tmp_path):
    def at(ms, **more):
        return logged(START_MS + ms, raw(0, id=f"i{ms}", detail=body(ms, **more)))

    path = record(
        tmp_path, at(0), at(300), at(900), at(950, state="new"), at(960, conversation="c2")
    )
    report = audit([path], [])
    assert suspected(report) == {"double-emission": 1}
    (example,) = report.suspicions[0].examples
    assert (example.place, example.first_place, example.gap_ms) == (f"{path}:2", f"{path}:1", 300)
    assert example.entity == "c1"
    assert suspected(audit([path], [], quiet=timedelta(seconds=1))) == {"double-emission": 2}
    rule = Rule.parse(
        {
            "name": "quiet",
            "quiet": {"entity": "detail.eventBody.state", "state": "detail.topicName", "for": "1s"},
        }
    )
    assert "double-emission" not in suspected(audit([path], [rule]))


def test_events_that_overtook_each_other_are_suspected(tmp_path):
    def at(arrived, happened, topic="Order"):
        detail = body(happened, n=arrived)
        return logged(
            START_MS + arrived, raw(0, id=f"i{arrived}", detail=detail, detail_type=topic)
        )

    path = record(tmp_path, at(0, 500), at(1, 400), at(2, 450), at(3, 600), at(4, 100, "Other"))
    report = audit([path], [])
    assert suspected(report) == {"out-of-order": 2}
    assert [one.first_place for one in report.suspicions[0].examples] == [f"{path}:1"] * 2


def test_a_repeat_behind_another_state_may_be_a_return(tmp_path):
    def presence(status, number, **more):
        detail = {"topicName": "v2.users.u.presence", "eventBody": {"status": status, **more}}
        return raw(0, id=f"i{number}", detail=detail)

    there_and_back = [presence("on", 1), presence("off", 2), presence("on", 3), presence("on", 4)]
    report = audit([record(tmp_path, *there_and_back)], [])
    assert suspected(report) == {"return": 1}
    assert report.suspicions[0].examples[0].place.endswith(":3")
    # with a time in it, the same content is the same event
    dated = {"modifiedDate": "2026-03-19T10:15:00Z"}
    timed = [presence("on", 1, **dated), presence("off", 2, **dated), presence("on", 3, **dated)]
    assert suspected(audit([record(tmp_path, *timed)], [])) == {}


# --- naive keys -----------------------------------------------------------------------------


def naive(report):
    return {one.name: (one.lost, one.let_through) for one in report.naive}


def test_naive_keys_lose_and_let_through(tmp_path):
    def about(conversation, number, minute=0, **envelope):
        detail = {"conversationId": conversation, "n": number, "timestamp": envelope.pop("t", "")}
        return logged(START_MS + minute * 60_000, raw(0, detail=detail, **envelope))

    rule = Rule.parse({"name": "ours", "ignore": ["detail.timestamp"]})
    path = record(
        tmp_path,
        about("c1", 1, id="a"),
        about("c1", 1, id="a", minute=1),  # redelivered
        about("c1", 2, id="b", minute=2),  # another event of the same conversation
        about("c1", 2, id="c", minute=3, t="later"),  # published again
        about("c2", 3, id="a", minute=4),  # an id that was there before
        about("c2", 3, id="d", minute=9),  # after five minutes
        about("c2", 3, id="e", minute=10, t="again"),
    )
    report = audit([path], [rule])
    assert (report.events, report.logical) == (7, 3)
    assert naive(report) == {
        "conversation-id": (1, 0),  # 2 is never seen
        "envelope-id": (0, 2),  # c; of 3, d passes for a, and e beside it
        "detail-hash": (0, 2),  # c and e
        "five-minutes": (0, 1),  # d
    }
    lost = report.naive[0].examples
    assert [(one.place, one.first_place) for one in lost] == [(f"{path}:3", f"{path}:1")]
    let_through = report.naive[3].examples
    assert [(one.place, one.first_place) for one in let_through] == [(f"{path}:6", f"{path}:5")]


def test_what_a_naive_key_does_not_find_passes(tmp_path):
    path = record(tmp_path, raw(1, id="a"), raw(1, id="b"), raw(2))
    report = audit([path], [])
    assert naive(report)["conversation-id"] == (0, 1)
    assert naive(report)["detail-hash"] == (0, 0)


def test_the_naive_keys_agree_with_counting_by_hand(tmp_path):
    stream = list(simulate(4, 3_000))
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(b"".join(as_line(arrival.raw) for arrival in stream))
    report = audit([path], genesys_rules())
    events = [json.loads(arrival.raw) for arrival in stream]
    keys = {
        "conversation-id": lambda e: e["detail"]["eventBody"].get("conversationId"),
        "envelope-id": lambda e: e["id"],
        "detail-hash": lambda e: json.dumps(_whole(e["detail"]), sort_keys=True),
    }
    for name, key in keys.items():
        seen, passed = set(), []
        for arrival, one in zip(stream, events, strict=True):
            value = key(one)
            if value is None or value not in seen:
                passed.append(arrival.truth)
            seen.add(value)
        logical = len({arrival.truth for arrival in stream})
        expected = logical - len(set(passed)), len(passed) - len(set(passed))
        assert naive(report)[name] == expected


def _whole(value):
    """Write 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


# --- counts ---------------------------------------------------------------------------------


def test_everything_is_counted_once(tmp_path):
    rules = [
        Rule.parse({"name": "gone", "match": {"source": ["a"]}, "discard": True}),
        Rule.parse({"name": "as it is", "match": {"source": ["b"]}, "key": "none"}),
        Rule.parse(
            {
                "name": "strict",
                "match": {"source": ["c"]},
                "key": ["detail.missing"],
                "on_missing": "dead",
            }
        ),
    ]
    raws = [raw(1, source=source) for source in "aabbccddd"]
    report = audit([record(tmp_path, *raws, b"junk", b"{}")], rules)
    assert report.verdicts == {
        DELIVERED: 1,
        DUPLICATE: 2,
        Verdict.DEAD: 2,
        Verdict.BYPASSED: 2,
        Verdict.DISCARDED: 2,
    }
    assert (report.records, report.events, report.logical) == (11, 9, 3)
    assert report.unreadable == {"not-json": 1, "no-detail": 1}
    assert {tally.name: (tally.arrivals, tally.repeats) for tally in report.rules} == {
        "default": (3, 2),
        "gone": (2, 0),
        "as it is": (2, 0),
        "strict": (2, 0),
    }
    assert sum(sum(moment.verdicts.values()) for moment in report.over_time) == 9
    assert report.window_ms == 6 * 86_400_000


def test_the_noisiest_come_first(tmp_path):
    def about(conversation, number, topic):
        return raw(0, detail={"conversationId": conversation, "n": number}, detail_type=topic)

    raws = [about("calm", n, "A") for n in range(5)] + [about("noisy", 1, "B")] * 4
    raws += [about("11111111-2222-4333-a444-555555555555", 1, "B")] * 2
    report = audit([record(tmp_path, *raws)], [])
    assert report.topics == (NamedCounts("B", 6, 4), NamedCounts("A", 5, 0))
    assert report.entities == (
        NamedCounts("noisy", 4, 3),
        NamedCounts("11111111-2222-4333-a444-555555555555", 2, 1),
        NamedCounts("calm", 5, 0),
    )
    assert report.sources == (NamedCounts("shop", 11, 4),)


def test_only_ten_of_each_are_listed(tmp_path):
    raws = [raw(n, source=f"s{n:02}", detail_type=f"t{n}") for n in range(30)]
    report = audit([record(tmp_path, *raws)], [])
    assert [tally.name for tally in report.sources] == [f"s{n:02}" for n in range(10)]
    assert len(report.topics) == 10


@pytest.mark.parametrize("span_s", [1, 59, 5_000, 86_400, 40 * 86_400, 4_000 * 86_400])
def test_the_course_of_time_has_at_most_120_moments(span_s, tmp_path):
    raws = [logged(START_MS + span_s * 10 * n, raw(n % 7, id=f"i{n}")) for n in range(101)]
    report = audit([record(tmp_path, *raws)], [])
    assert 1 <= len(report.over_time) <= 120
    begins = [moment.begins_ms for moment in report.over_time]
    assert begins == sorted(begins)
    assert begins[0] <= report.first_ms
    counted = sum(sum(moment.verdicts.values()) for moment in report.over_time)
    assert counted == report.events == 101


# --- two sets of rules ----------------------------------------------------------------------


def test_a_trial_tells_each_arrival_that_comes_out_otherwise(tmp_path):
    path = record(tmp_path, raw(1, id="a"), raw(1, id="a"), raw(1, id="b"), raw(2))
    told = []
    report = audit([path], [CONTENT], candidate=[BY_ID], differences=told.append)
    assert report.trial.changed == 1
    assert report.trial.by_change == ((DUPLICATE, DELIVERED, 1),)
    assert report.trial.differences == tuple(told)
    (difference,) = told
    assert (difference.place, difference.id, difference.same_as) == (f"{path}:3", "b", f"{path}:1")
    assert (difference.rule_before, difference.rule_after) == ("content", "by id")
    assert audit([path], [CONTENT], candidate=[CONTENT]).trial.changed == 0
    assert audit([path], [CONTENT]).trial is None


def test_a_trial_of_another_window_alone(tmp_path):
    path = record(tmp_path, logged(START_MS, raw(1)), logged(START_MS + 2_000, raw(1)))
    trial = audit([path], [], candidate=[], candidate_window=timedelta(seconds=1)).trial
    assert trial.by_change == ((DUPLICATE, DELIVERED, 1),)
    assert trial.differences[0].rule_after == "default"


def test_a_report_keeps_a_thousand_differences_and_counts_all(tmp_path):
    path = record(tmp_path, *(raw(1, id=f"i{n}") for n in range(1_500)))
    report = audit([path], [CONTENT], candidate=[BY_ID])
    assert (report.trial.changed, len(report.trial.differences)) == (1_499, 1_000)
    places = [int(one.place.rpartition(":")[2]) for one in report.trial.differences]
    assert places == list(range(2, 1_002))
    told = []
    audit([path], [CONTENT], candidate=[BY_ID], differences=told.append)
    assert len(told) == 1_499


# --- odd input ------------------------------------------------------------------------------


def test_nothing_at_all_is_a_report_too(tmp_path):
    report = audit([record(tmp_path)], [])
    assert (report.files, report.records, report.events, report.logical) == (1, 0, 0, 0)
    assert (report.causes, report.gaps, report.clock) == ((), None, "none")
    assert all((one.lost, one.let_through) == (0, 0) for one in report.naive)


def test_what_is_odd_in_an_event_is_no_trouble(tmp_path):
    odd = 'tab\there\nline "quote" \\ back \x00 \x1b[31m \U0001f600 <b>'
    texts = [
        raw(1, id=odd, source=odd, detail_type=odd, account=odd, replay_name=odd),
        raw(1, id=odd + "2", source=odd, detail_type=odd, detail={"conversationId": odd, "n": 1}),
        raw(1, id="x" * 10_000),
        json.dumps(event(1) | {"id": 7, "source": None, "time": [], "region": {}}).encode(),
        json.dumps({"detail": {"n": 1}}).encode(),
        json.dumps({"detail": {"timestamp": 5, "eventBody": 7, "conversationId": []}}).encode(),
        json.dumps({"detail": {}}).encode(),
        b'{"id":"i","detail":{"big":123456789012345678901234567890,"float":1e-7}}',
    ]
    report = audit([record(tmp_path, *texts)], genesys_rules())
    assert (report.events, report.unreadable) == (8, {})
    assert NamedCounts(odd, 2, 0) in report.sources
    assert odd in [tally.name for tally in report.entities]


def test_versions_of_any_length_are_compared(tmp_path):
    rule = Rule.parse({"name": "r", "latest": {"entity": "detail.e", "version": "detail.v"}})
    versions = [10**30, 10**30 - 1, 10**30 + 1, 1e29, -(10**25), 2e30]
    raws = [raw(0, detail={"e": "E", "v": version}) for version in versions]
    _, told = audited(record(tmp_path, *raws), [rule])
    found = [verdict for _, verdict, _ in told]
    assert found == ["delivered", "stale", "delivered", "stale", "stale", "delivered"]


def test_the_same_comes_out_with_and_without_workers(tmp_path):
    for seed in (1, 2):
        texts = [arrival.raw.replace(b"\n", b" ") for arrival in simulate(seed, 1_500)]
        record(tmp_path, *texts, b"junk", name=f"{seed}.ndjson")
    alone = audit([tmp_path], genesys_rules(), workers=0, candidate=[])
    several = audit([tmp_path], genesys_rules(), workers=3, candidate=[])
    for field in alone.__struct_fields__:
        if field != "took_s":
            assert getattr(several, field) == getattr(alone, field), field


def test_progress_rises_to_all_of_it(tmp_path):
    path = record(tmp_path, *(raw(n) for n in range(20_000)))
    seen = []
    audit([path], [], workers=2, progress=lambda done, size: seen.append((done, size)))
    size = path.stat().st_size
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)
    assert len(seen) > 1
