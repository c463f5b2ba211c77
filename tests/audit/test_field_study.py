"""What a sample tells of events that no rule is for."""

import json

import pytest
from tests.audit.recordings import lines, raw

from oncebridge.audit.engine import audit
from oncebridge.audit.field_study import study
from oncebridge.audit.report import FieldStudy
from oncebridge.audit.suggest import suggest
from oncebridge.events.canonical import canonical
from oncebridge.events.exact_float import ExactFloat
from oncebridge.events.key import ContentKey, FieldsKey
from oncebridge.events.rules import Rule


def studied(*details):
    return study("shop", "Order", [canonical(detail) for detail in details])


def test_a_field_is_noise_if_it_is_about_the_sending_and_alone_differs():
    found = studied(
        *({"order": order, "sentAt": sent, "attempt": sent} for order in "abc" for sent in (1, 2))
    )
    assert found.volatile == ("detail.attempt", "detail.sentAt")
    assert (found.identifying, found.sampled, found.would_merge) == (None, 6, 3)


def test_decimals_that_a_double_rounds_alike_differ():
    prices = ["1.000000000000000001", "1.000000000000000002", "1.000000000000000003"]
    found = studied(*({"price": ExactFloat(price)} for price in prices))
    assert (found.sampled, found.would_merge) == (3, 0)


def test_a_time_that_may_be_the_events_own_is_no_noise():
    found = studied(*({"door": "open", "timestamp": at} for at in range(5)))
    assert (found.volatile, found.identifying, found.would_merge) == ((), None, 0)


def test_an_event_id_proves_what_is_noise():
    found = studied(
        *(
            {"event_id": f"e{n}", "state": f"s{n}", "timestamp": at}
            for n in range(4)
            for at in range(1 + n % 2)
        )
    )
    assert (found.identifying, found.volatile) == ("detail.event_id", ("detail.timestamp",))
    assert (found.sampled, found.would_merge) == (6, 2)


def test_an_event_id_needs_no_repeats_to_be_believed():
    found = studied(*({"data": {"eventId": 1 + n, "n": 1}} for n in range(5)))
    assert (found.identifying, found.would_merge) == ("detail.data.eventId", 0)


def test_an_id_with_several_states_is_the_entity_and_no_identity():
    found = studied(
        *(
            {"orderId": f"o{n}", "status": status, "updated_at": n}
            for n in range(5)
            for status in ("new", "paid", "sent")
        )
    )
    assert (found.identifying, found.entity) == (None, "detail.orderId")
    assert (found.volatile, found.would_merge) == ((), 0)


def test_an_id_that_never_comes_again_is_not_believed_on_its_own():
    found = studied(*({"orderId": n, "sum": n} for n in range(10)))
    assert found.identifying is None


def test_an_event_id_with_other_content_is_none():
    found = studied(*({"event_id": 1 + n % 3, "total": n} for n in range(9)))
    assert found.identifying is None


@pytest.mark.parametrize(
    "differing",
    ["openedAt", "time", "deliveredAt", "messageId", "requestId", "process", "batch_id"],
)
def test_the_same_thing_at_another_time_is_another_event(differing):
    found = studied(
        *({"doorId": f"d{n % 5}", "wing": f"w{n % 5}", differing: f"x{n}"} for n in range(40))
    )
    assert (found.identifying, found.entity) == (None, "detail.doorId")
    assert "detail.openedAt" not in found.volatile


@pytest.mark.parametrize("stamp", ["sentAt", "published_at", "attempt", "retryCount", "traceId"])
def test_an_id_that_comes_again_with_another_stamp_of_the_sending_identifies(stamp):
    found = studied(
        *({"orderId": f"o{n}", "sum": n, stamp: again} for n in range(9) for again in (1, 2))
    )
    assert (found.identifying, found.volatile) == ("detail.orderId", (f"detail.{stamp}",))


def test_an_id_that_is_all_there_is_identifies_nothing():
    found = studied(
        *({"deviceId": f"d{n % 5}", "status": "ok", "sentAt": n + 1} for n in range(40))
    )
    assert (found.identifying, found.volatile) == (None, ("detail.sentAt",))


def test_a_suggestion_never_merges_doors_that_are_opened_again(tmp_path):
    raws = [
        raw(n, detail={"doorId": f"d{n % 5}", "openedAt": f"2026-03-19T10:{n:02}:00Z"})
        for n in range(40)
    ]
    path = tmp_path / "doors.ndjson"
    path.write_bytes(lines(*raws))
    suggestion = suggest(audit([path], []))
    assert "[[rules]]" not in suggestion.toml


def test_the_conversation_is_the_entity():
    found = studied(*({"conversationId": f"c{n % 2}", "state": n, "userId": n} for n in range(9)))
    assert found.entity == "detail.conversationId"


def test_what_all_have_in_common_is_no_entity():
    found = studied(*({"tenantId": "t", "n": n} for n in range(30)))
    assert found.entity is None


@pytest.mark.parametrize("name", ["odd name", "a.b", "*", 'quo"te', "ünï", "1st", ""])
def test_paths_are_written_as_keys_take_them(name):
    found = studied(*({name: {"event_id": 1 + n % 3, "sentAt": n}, "x": 1} for n in range(6)))
    assert found.identifying is not None
    FieldsKey([found.identifying])
    ContentKey(found.volatile)
    assert len(found.volatile) == 1


@pytest.mark.parametrize(
    "details",
    [
        [{"a": [{"b": 1}]}, {"a": []}, {"a": None}],
        [{"id": True}, {"id": {}}, {"id": [1]}],
        [{"id": 1.5}, {"id": 1}, {"id": "1"}],
        [{"n": {str(k): {str(j): j for j in range(30)} for k in range(30)}}] * 3,
    ],
)
def test_odd_details_are_studied_too(details):
    found = studied(*details)
    assert found.sampled == 3
    assert found.would_merge == 0


def test_an_audit_studies_what_no_rule_is_for(tmp_path):
    known = Rule.parse({"name": "known", "match": {"source": ["known"]}})
    raws = [raw(0, detail={"event_id": 1 + n // 2, "sentAt": n}) for n in range(10)]
    raws += [raw(n, source="known") for n in range(5)] + [raw(1, source="rare")]
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(*raws))
    for workers in (0, 2):
        report = audit([path], [known], workers=workers)
        assert report.studies == (
            FieldStudy(
                source="shop",
                detail_type="Order",
                sampled=10,
                volatile=("detail.sentAt",),
                identifying="detail.event_id",
                entity=None,
                would_merge=5,
            ),
        )


def test_a_sample_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("oncebridge.audit.rows.Samples.most_of_kind", 20)
    monkeypatch.setattr("oncebridge.audit.rows.Samples.most_kinds", 3)
    raws = [raw(n, source=f"s{n % 5}") for n in range(500)]
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(*raws))
    assert [one.sampled for one in audit([path], []).studies] == [20] * 3
    monkeypatch.setattr("oncebridge.audit.rows.Samples.most_bytes", 1_000)
    assert sum(one.sampled for one in audit([path], []).studies) * len(raws[0]) <= 1_000
    assert json.loads(raws[0])["source"] == "s0"
