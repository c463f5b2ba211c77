import gzip
import json
import resource
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.http.live import PATH, Answer, Desk, event, live, prepare, read_answer
from tests.http.targets import TLS

from oncebridge.base.clock import SystemDice
from oncebridge.engine import pauses
from oncebridge.engine.router import RouterAnswer
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.errors import ConfigError, DeadLetterError, StoreUnavailable
from oncebridge.service import config
from oncebridge.sinks.api import Closed, Never, No, Unknown, Yes
from oncebridge.sources.http.source import HttpSource, HttpSourceOptions, _response

NDJSON = "application/x-ndjson"
PROMPT = "300ms"


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture
def door(tmp_path, desk):
    with live(tmp_path, desk, backoff="20ms") as running:
        yield running


def is_later(answer):
    """Tell whether *answer* asks for another try, as EventBridge understands it."""
    return answer.status == 503 and answer.retry_after > 0


def in_background(running, *args, **kwargs):
    """Send while the test goes on."""
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(running.ask, *args, **kwargs)
    pool.shutdown(wait=False)
    return answer


# --- one event ----------------------------------------------------------------------------


def test_an_event_is_delivered_as_it_came_and_its_repeat_is_a_duplicate(door, desk):
    body = b' {"detail": {"order": 1.0, "note": "gr\xc3\xbc\\u00df"},\n "id":"a"}\n'
    first, again = door.post(body), door.post(body)
    assert (first.status, first.json["verdict"]) == (200, "delivered")
    assert (again.status, again.json["verdict"]) == (200, "duplicate")
    assert first.json["key"] == again.json["key"] == desk.taken[0].idempotency_key
    assert first.json["rule"] == "default"
    assert desk.bodies == [body]


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "text/plain", "", "rubbish/;;"]
)
def test_the_content_type_does_not_keep_an_event_out(door, kind):
    assert door.post(event(1), kind=kind).verdicts == ["delivered"]


def test_what_an_api_destination_sends_is_taken(door, desk):
    headers = {
        "User-Agent": "Amazon/EventBridge/ApiDestinations",
        "Content-Type": "application/json; charset=utf-8",
        "Range": "bytes=0-1048575",
        "Accept-Encoding": "gzip,deflate",
        "Connection": "close",
    }
    answer = door.ask("POST", body=event(1), headers=headers)
    assert (answer.status, answer.verdicts) == (200, ["delivered"])
    assert answer.headers["connection"] == "close"
    assert "content-range" not in answer.headers


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("spool", [{}, {"spool": "spool.db"}], ids=["", "spool"])
def test_a_body_without_a_length_is_refused_and_nothing_is_taken(tmp_path, version, spool):
    flags = {name: f"{tmp_path}/{file}" for name, file in spool.items()}
    with live(tmp_path, source__oauth="shop:chalk-on-the-board", **flags) as running:
        for path, status in ((PATH, 401), ("/oauth/token", 411)):
            assert _without_length(running, path, version).status == status
    with live(tmp_path, **flags) as running:
        answer = _without_length(running, PATH, version)
        assert answer.status == 411
        assert "Content-Length" in answer.json["error"]
        assert running.counts["arrived"] == 0
        assert running.buried() == []
        assert running.ask("POST", body=b"").status == (202 if spool else 200)


def _without_length(running, path, version):
    with running.line() as line:
        line.sendall(f"POST {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode() + event(1))
        return read_answer(line)


def test_what_is_no_event_is_kept_as_it_came_and_answered_with_200(door):
    answer = door.post(b"{not json\xff")
    assert (answer.status, answer.json["verdict"]) == (200, "dead")
    assert answer.json["reason"].startswith("not-json")
    (letter,) = door.buried()
    assert letter.raw == b"{not json\xff"


def test_an_event_the_sink_will_never_take_is_dead_and_answered_with_200(door, desk):
    desk.answer = Never("422")
    answer = door.post(event(1))
    assert (answer.status, answer.verdicts) == (200, ["dead"])
    (letter,) = door.buried()
    assert (letter.raw, letter.reason) == (event(1), "rejected")
    assert door.post(event(1)).verdicts == ["duplicate"]


def test_what_a_rule_discards_is_answered_with_200(tmp_path):
    file = tmp_path / "oncebridge.toml"
    file.write_text(
        '[[rules]]\nname = "noise"\nmatch = { source = ["com.example.shop"] }\ndiscard = true\n'
    )
    running = prepare(tmp_path)
    rules = config.load(file, environment={}).routes[0].rules
    route = running.setup.routes[0]
    running.setup = _with(running.setup, routes=(_with(route, rules=rules),))
    running.start()
    try:
        answer = running.post(event(1))
        assert (answer.status, answer.verdicts) == (200, ["discarded"])
    finally:
        running.stop()


def _with(struct, **changes):
    from msgspec.structs import replace

    return replace(struct, **changes)


# --- several events -----------------------------------------------------------------------

FRAMINGS = {
    "array": lambda events: (b"[" + b",".join(events) + b"]", "application/json"),
    "array over lines": lambda events: (
        b" [\n  " + b",\n  ".join(events) + b"\n]\n",
        "application/json",
    ),
    "ndjson": lambda events: (b"\n".join(events), NDJSON),
    "ndjson with blank lines": lambda events: (b"\r\n\r\n".join(events) + b"\r\n", NDJSON),
    "ndjson by its look": lambda events: (b"\n".join(events) + b"\n", "application/json"),
}


@pytest.mark.parametrize("framed", FRAMINGS.values(), ids=FRAMINGS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "gzip"])
def test_many_events_get_one_status_each_in_their_order(door, desk, framed, is_packed):
    events = [event(1), event(2), event(1), event(3)]
    body, kind = framed(events)
    if is_packed:
        answer = door.post(gzip.compress(body), kind=kind, Content_Encoding="gzip")
    else:
        answer = door.post(body, kind=kind)
    assert answer.status == 200
    assert [result["status"] for result in answer.json["results"]] == [200] * 4
    assert answer.verdicts == ["delivered", "delivered", "duplicate", "delivered"]
    assert sorted(desk.bodies) == sorted([event(1), event(2), event(3)])


def test_a_single_event_is_answered_with_one_result_also_with_blanks_around_it(door):
    for body in (event(1), event(1) + b"\n", b"\n\t " + event(1) + b"\r\n"):
        assert "status" in door.post(body).json
    assert "status" in door.post(event(1) + b"\n", kind=NDJSON).json
    assert len(door.post(b"[" + event(1) + b"]").json["results"]) == 1


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"[]", ""), (b" [ ]\n", ""), (b"", NDJSON), (b"\n\r\n \n", NDJSON)],
)
def test_nothing_at_all_has_no_results(door, body, kind):
    answer = door.post(body, kind=kind)
    assert (answer.status, answer.json) == (200, {"results": []})
    assert door.counts["arrived"] == 0


def test_the_worst_status_is_that_of_the_whole(door, desk):
    wanting = {event(2): Unknown("timeout"), event(3): Never("422")}
    desk.answer = lambda delivery: wanting.get(delivery.event.raw, Yes())
    body = b"[" + b",".join([event(1), event(2), b"7", event(3)]) + b"]"
    answer = door.post(body)
    assert is_later(answer)
    assert [result["status"] for result in answer.results] == [200, 503, 200, 200]
    assert answer.verdicts == ["delivered", "failed", "dead", "dead"]
    asked = answer.results[1]["retry_after"]
    assert answer.retry_after == asked
    assert isinstance(asked, int)
    wanting.clear()
    door.until(lambda: door.post(event(2)).verdicts == ["delivered"])
    again = door.post(body)
    assert again.status == 200
    assert again.verdicts == ["duplicate"] * 4
    assert sorted(desk.bodies) == [event(1), event(2)]


def test_one_bad_line_among_many_is_dead_alone(door, desk):
    lines = [event(1), b'{"detail":', event(2)]
    answer = door.post(b"\n".join(lines), kind=NDJSON)
    assert (answer.status, answer.verdicts) == (200, ["delivered", "dead", "delivered"])
    assert [letter.raw for letter in door.buried()] == [b'{"detail":']


def test_more_events_than_one_request_may_bring_are_refused_at_once(tmp_path):
    with live(tmp_path, source__max_events="3") as running:
        assert running.post(b"\n".join([event(n) for n in range(3)]), kind=NDJSON).status == 200
        assert running.post(b"\n".join([event(n) for n in range(4)]), kind=NDJSON).status == 413
        assert running.counts["arrived"] == 3


def test_a_body_of_a_million_records_costs_next_to_nothing(door):
    body = b"[" + b"1," * (2**20 - 2) + b"1]"
    answer = door.post(body)
    assert answer.status == 413
    assert answer.took < 2
    assert len(answer.body) < 200
    assert door.counts["arrived"] == 0
    assert door.passes(1)


def test_small_and_large_events_of_one_entity_stay_in_order(tmp_path, desk):
    file = tmp_path / "oncebridge.toml"
    file.write_text('[[rules]]\nname = "all"\nentity = "detail.who"\n')
    running = prepare(tmp_path, desk, batch="2")
    route = running.setup.routes[0]
    rules = config.load(file, environment={}).routes[0].rules
    settings = _with(route.settings, order="entity")
    route = _with(route, rules=rules, settings=settings)
    running.setup = _with(running.setup, routes=(route,))
    running.start()
    try:
        sizes = [1, 100_000, 1, 50_000, 1]
        details = [{"who": "a", "n": n, "pad": "x" * size} for n, size in enumerate(sizes)]
        events = [event(detail["n"], detail=detail) for detail in details]
        answer = running.post(b"[" + b",".join(events) + b"]")
        assert answer.verdicts == ["delivered"] * 5
        assert desk.bodies == events
    finally:
        running.stop()


# --- costly bodies ------------------------------------------------------------------------

OBJECTS = b'{"detail":{"a":[' + b"{}," * 690_000 + b"{}]}}"
LARGE = event(1, detail={"pad": "x" * 100_000})


@pytest.fixture
def busy(door):
    """Hold the turn for costly work, as another body would."""
    turn = door.service.router.cpu_turns
    door.do(turn._lock.acquire)
    yield turn
    door.do(lambda: turn._lock.locked() and turn._lock.release())


def test_a_body_of_many_small_objects_is_kept_whole_and_acknowledged(door):
    answer = door.post(OBJECTS)
    assert (answer.status, answer.verdicts) == (200, ["dead"])
    assert answer.json["reason"].startswith("too-many-values")
    packed = gzip.compress(OBJECTS)
    answer = door.post(packed, Content_Encoding="gzip")
    assert (answer.status, answer.verdicts) == (200, ["dead"])
    assert "gzip" in answer.json["reason"]
    assert [letter.raw for letter in door.buried()] == [OBJECTS, packed]
    assert door.passes(1)


@pytest.mark.usefixtures("busy")
def test_small_bodies_do_not_wait_for_large_ones(door):
    large = in_background(door, "POST", body=LARGE, headers={})
    door.until(lambda: door.service.sources[0]._queued == len(LARGE))
    assert door.passes(2)
    assert door.post(b"[" + event(3) + b"," + event(4) + b"]").verdicts == ["delivered"] * 2
    assert door.post(gzip.compress(event(5)), Content_Encoding="gzip").verdicts == ["delivered"]
    assert not large.done()


def test_a_large_body_is_taken_when_its_turn_comes(door, busy, desk):
    large = in_background(door, "POST", body=LARGE, headers={})
    door.until(lambda: door.service.sources[0]._queued == len(LARGE))
    door.do(busy._lock.release)
    assert large.result(20).verdicts == ["delivered"]
    assert desk.bodies == [LARGE]
    assert door.service.sources[0]._queued == 0


def test_a_large_body_whose_turn_comes_too_late_has_to_come_again(tmp_path, desk):
    with live(tmp_path, desk, source__answer_within=PROMPT) as door:
        turn = door.service.router.cpu_turns
        door.do(turn._lock.acquire)
        assert is_later(door.post(LARGE))
        door.do(turn._lock.release)
        door.until(lambda: door.service.sources[0]._queued == 0)
        assert door.counts["arrived"] == 0
        assert desk.begun == 0
        assert door.post(LARGE).verdicts == ["delivered"]


@pytest.mark.usefixtures("busy")
def test_large_bodies_that_wait_have_a_limit_together(door, monkeypatch):
    monkeypatch.setattr("oncebridge.sources.http.source._MOST_QUEUED", 150_000)
    in_background(door, "POST", body=LARGE, headers={})
    door.until(lambda: door.service.sources[0]._queued == len(LARGE))
    answer = door.post(LARGE)
    assert is_later(answer)
    assert "too many" in answer.json["error"]
    assert door.passes(2)


def test_a_large_body_that_fails_unforeseen_has_to_come_again(door, monkeypatch, caplog):
    def broken(*_, **__):
        raise ZeroDivisionError("payload")

    with monkeypatch.context() as patched:
        patched.setattr("oncebridge.sources.http.source.split_body", broken)
        assert is_later(door.post(LARGE))
    assert [r.error for r in caplog.records if r.name == "oncebridge"] == ["ZeroDivisionError"]
    assert "payload" not in caplog.text
    assert door.post(LARGE).verdicts == ["delivered"]


# --- gzip ---------------------------------------------------------------------------------


def test_a_packed_event_is_delivered_unpacked(door, desk):
    members = gzip.compress(event(1)[:20]) + gzip.compress(event(1)[20:])
    assert door.post(members, Content_Encoding="gzip").verdicts == ["delivered"]
    assert door.post(event(1)).verdicts == ["duplicate"]
    assert door.post(gzip.compress(event(2)), Content_Encoding=" X-GZIP ").verdicts == ["delivered"]
    assert desk.bodies == [event(1), event(2)]


def test_gzip_that_is_damaged_is_kept_whole_whatever_the_content_type(door):
    # with line feeds inside, which must not be taken for the ends of records
    packed = gzip.compress(bytes(range(256)) * 4, mtime=0x0A0A0A0A)
    broken = [packed[:-9], packed + b"\nmore", packed[:30] + b"\n\n" + packed[32:], b"\n\n[1]"]
    for kind, verdict in (("application/json", "dead"), (NDJSON, "duplicate")):
        for body in broken:
            answer = door.post(body, kind=kind, Content_Encoding="gzip")
            assert (answer.status, answer.json["verdict"]) == (200, verdict)
    assert [letter.raw for letter in door.buried()] == broken


def test_a_gzip_bomb_is_refused_quickly_and_flat(door):
    bomb = gzip.compress(bytes(100 * 10**6))
    assert len(bomb) < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answers = [door.post(bomb, Content_Encoding="gzip") for _ in range(5)]
    assert {answer.status for answer in answers} == {413}
    assert max(answer.took for answer in answers) < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000
    assert door.counts["arrived"] == 0
    assert door.passes(1)


def test_a_body_of_many_tiny_gzip_members_does_not_hold_the_others_up(door):
    body = gzip.compress(b"") * (2**21 // len(gzip.compress(b"")))
    answer = door.post(body, Content_Encoding="gzip")
    assert answer.status == 200
    assert answer.took < 3


@pytest.mark.parametrize(
    "codings",
    [["br"], ["deflate"], ["gzip, gzip"], ["gzip", "gzip"], ["identity", "gzip"], ["gzip", "br"]],
)
def test_a_coding_that_is_not_gzip_is_refused_before_the_body(door, codings):
    head = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Length: 1000"]
    head += [f"Content-Encoding: {coding}" for coding in codings]
    with door.line() as line:
        line.sendall("\r\n".join([*head, "", ""]).encode())
        answer = read_answer(line)
    assert answer.status == 415
    assert answer.headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize("coding", ["identity", "IDENTITY", ""])
def test_a_body_that_is_not_packed_may_say_so(door, coding):
    assert door.post(event(1), Content_Encoding=coding).verdicts == ["delivered"]


# --- limits -------------------------------------------------------------------------------


def test_a_body_at_the_limit_passes_and_one_above_does_not(tmp_path):
    with live(tmp_path, source__max_body="1KiB") as running:
        at = event(1, detail={"pad": ""})
        at = event(1, detail={"pad": "x" * (1024 - len(at))})
        assert len(at) == 1024
        assert running.post(at).verdicts == ["delivered"]
        assert running.post(at + b" ").status == 413
        packed = gzip.compress(at)
        assert running.post(packed, Content_Encoding="gzip").verdicts == ["duplicate"]
        assert running.post(gzip.compress(at + b" "), Content_Encoding="gzip").status == 413
        assert running.counts["arrived"] == 2


def test_an_event_of_one_mebibyte_passes_with_its_envelope(door, desk):
    body = event(1, detail={"pad": "x" * 2**20})
    assert door.post(body).verdicts == ["delivered"]
    assert desk.bodies == [body]


def test_a_body_in_chunks_is_counted_too(tmp_path):
    with live(tmp_path, source__max_body="1KiB") as running, running.line() as line:
        line.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            + b"400\r\n"
            + b"x" * 1024
            + b"\r\n1\r\nx\r\n0\r\n\r\n"
        )
        assert read_answer(line).status == 413
        assert running.counts["arrived"] == 0


def test_a_body_that_comes_too_slowly_is_given_up(tmp_path):
    with live(tmp_path, source__body_time=PROMPT) as running, running.line() as line:
        line.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode()
        )
        assert read_answer(line).status == 408
        assert running.counts["arrived"] == 0
        assert running.passes(1)


def test_headers_beyond_the_limit_are_refused(tmp_path):
    with live(tmp_path, source__max_head="1KiB") as running:
        assert running.post(event(1), X_Long="x" * 1024).status == 431
        assert running.post(event(1), X_Long="x" * 500).verdicts == ["delivered"]


def test_one_connection_too_many_is_told_to_come_again(tmp_path, desk):
    desk.hold()
    with live(tmp_path, desk, source__max_connections="2") as running:
        waiting = [
            in_background(running, "POST", body=event(n), headers={}, timeout=20) for n in (1, 2)
        ]
        running.until(lambda: desk.begun == 2)
        answer = running.post(event(3))
        assert is_later(answer)
        assert "error" in answer.json
        for path in ("/healthz", "/readyz"):
            assert running.get(path).status == 200
        desk.let_go()
        assert [answer.result().status for answer in waiting] == [200, 200]
        running.until(lambda: running.post(event(3)).status == 200)


def test_idle_connections_keep_nobody_out(tmp_path):
    with (
        live(tmp_path, source__max_connections="20", source__max_connections_per_peer="20") as door,
        ExitStack() as lines,
    ):
        for _ in range(60):
            lines.enter_context(door.line())
        assert door.passes(1)
        assert door.get("/readyz").status == 200


def test_one_address_has_no_more_connections_than_the_setting_says(tmp_path):
    with live(tmp_path, source__max_connections_per_peer="3") as door, ExitStack() as lines:
        for _ in range(10):
            lines.enter_context(door.line())
        assert door.passes(1)
        assert door.do(lambda: door.service.sources[0]._server.connections) <= 3


# --- paths and methods --------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/event", "/events/", "/events/x", "/Events", "/oauth/token"]
)
def test_nothing_is_elsewhere(door, path):
    assert door.ask("POST", path, event(1)).status == 404
    assert door.counts["arrived"] == 0


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_events_are_posted(door, method):
    answer = door.ask(method, PATH)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json"])
def test_health_is_asked_for_and_nothing_else(door, path):
    answer = door.ask("POST", path, b"")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
    bare = door.ask("HEAD", path)
    assert (bare.status, bare.body) == (200, b"")


def test_a_query_is_no_hindrance(door):
    assert door.ask("POST", f"{PATH}?from=rule", event(1)).verdicts == ["delivered"]


# --- later --------------------------------------------------------------------------------

REFUSALS = {
    "nothing was sent": No("refused"),
    "no clear answer": Unknown("timeout"),
    "the door is shut": Closed("401"),
    "the sink asks for less than nothing": No("refused", retry_after_ms=-5000),
    "the sink asks for a moment": No("refused", retry_after_ms=1),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_what_the_sink_does_not_take_has_to_come_again(door, desk, refusal):
    desk.answer = refusal
    answer = door.post(event(1))
    assert is_later(answer)
    assert answer.verdicts == ["failed"]
    assert not door.buried()
    desk.answer = Yes()
    door.until(lambda: door.post(event(1)).verdicts == ["delivered"])
    assert desk.bodies == [event(1)]


def test_while_the_sink_is_down_it_is_not_ready_and_everything_has_to_come_again(door, desk):
    desk.answer = Closed("403")
    assert all(is_later(door.post(event(number))) for number in range(5))
    tried = desk.begun
    answers = [door.post(event(number)) for number in range(5, 9)]
    assert all(is_later(answer) for answer in answers)
    assert desk.begun == tried
    ready = door.get("/readyz")
    assert ready.json == {"ready": False, "reasons": ["desk: the sink is down"]}
    assert is_later(ready)
    assert door.get("/healthz").status == 200
    desk.answer = Yes()
    door.until(lambda: door.post(event(1)).verdicts == ["delivered"])
    assert door.get("/readyz").json == {"ready": True}


@pytest.mark.parametrize("refusal", [No("refused"), Closed("403")], ids=["refused", "shut"])
def test_a_moment_without_the_sink_costs_no_more_than_moments(tmp_path, desk, refusal):
    desk.answer = refusal
    desk.hold()
    with live(tmp_path, desk) as running, ThreadPoolExecutor(50) as pool:
        bodies = [event(number) for number in range(50)]
        answers = [pool.submit(running.post, body) for body in bodies]
        running.until(lambda: desk.begun == 50)
        desk.let_go()
        assert max(answer.result().retry_after for answer in answers) <= 5
        desk.answer = Yes()
        running.until(lambda: {running.post(body).status for body in bodies} == {200})
        assert sorted(desk.bodies) == sorted(bodies)


def test_while_it_is_paused_it_is_not_ready_and_everything_has_to_come_again(door, desk):
    door.do(lambda: pauses.pause(door.store, ["desk"], SystemDice()))
    door.until(lambda: door.get("/readyz").status == 503)
    assert door.get("/readyz").json["reasons"] == ["desk: paused"]
    assert is_later(door.post(event(1)))
    assert desk.begun == 0
    door.do(lambda: pauses.resume(door.store, ["desk"]))
    door.until(lambda: door.get("/readyz").status == 200)
    assert door.passes(1)


def test_while_the_store_is_down_it_is_not_ready_and_nothing_is_sent(door, desk):
    door.store.broken = StoreUnavailable("the disk is away")
    for number in range(5):
        answer = door.post(event(number))
        assert is_later(answer)
        assert answer.verdicts == ["failed"]
    ready = door.get("/readyz")
    assert is_later(ready)
    assert ready.json["reasons"] == ["desk: the store is down"]
    assert desk.begun == 0
    door.store.broken = None
    door.until(lambda: door.post(event(1)).verdicts == ["delivered"])
    assert door.get("/readyz").status == 200


def test_a_store_that_is_away_from_the_start_may_come_later(tmp_path, desk):
    running = prepare(tmp_path, desk)
    running.store.broken = StoreUnavailable("the disk is away")
    running.start()
    try:
        for number in range(6):
            answer = running.post(event(number))
            assert is_later(answer)
            assert answer.json["reason"].startswith("the store did not answer")
        reasons = ["the store is not available yet", "desk: the store is down"]
        assert running.get("/readyz").json["reasons"] == reasons
        assert desk.begun == 0
        running.store.broken = None
        running.until(lambda: running.post(event(1)).status == 200)
        running.until(lambda: running.get("/readyz").status == 200)
        assert desk.bodies == [event(1)]
    finally:
        running.stop()


def test_while_the_dead_letters_cannot_be_written_nothing_is_acknowledged(door, monkeypatch):
    async def full(letters):
        raise DeadLetterError("the disk is full")

    monkeypatch.setattr(door.setup.config.dead.opened, "put", full)
    answer = door.post(b"rubbish")
    assert is_later(answer)
    assert answer.verdicts == ["failed"]
    monkeypatch.undo()
    door.until(lambda: door.post(b"rubbish").verdicts == ["dead"])
    assert [letter.raw for letter in door.buried()] == [b"rubbish"]


def test_too_much_at_once_has_to_come_again_and_then_passes(tmp_path, desk):
    desk.hold()
    with live(tmp_path, desk, source__answer_within=PROMPT) as running:
        running.service._direct._pump.most_in_hand = 50
        few, many = [b"\n".join([event(n) for n in range(count)]) for count in (30, 80)]
        full = ["too many events in progress"]
        answer = running.post(many, kind=NDJSON)  # too large for what is left to such requests
        assert is_later(answer)
        assert [r["reason"] for r in answer.results] == full * 80
        for expected in (0, 30):  # a request is refused as a whole
            answer = running.post(few, kind=NDJSON)
            assert is_later(answer)
            assert [r["reason"] for r in answer.results].count(*full) == expected
        desk.let_go()
        running.until(lambda: running.counts["in_flight"] == 0)
        assert [running.post(event(number)).status for number in range(80)] == [200] * 80
        assert len(set(desk.bodies)) == len(desk.bodies) == 80


@pytest.mark.full
def test_a_sink_that_takes_a_minute_is_not_waited_for(tmp_path, desk):
    """The one test with the real bound: EventBridge hangs up after five seconds."""
    desk.hold()
    with live(tmp_path, desk) as running:
        answer = running.post(event(1))
        assert answer.took < 4.8
        assert answer.took > 4.3
        assert is_later(answer)
        assert "verdict" not in answer.json
        busy = running.post(event(1))
        assert busy.took < 1
        assert is_later(busy)
        assert busy.verdicts == ["busy"]
        desk.let_go()
        running.until(lambda: running.counts["delivered"] == 1)
        assert running.post(event(1)).verdicts == ["duplicate"]
        assert desk.bodies == [event(1)]


def test_an_array_with_one_slow_event_tells_what_is_known_of_the_others(tmp_path, desk):
    with live(tmp_path, desk, source__answer_within=PROMPT) as running:
        assert running.passes(1)
        desk.hold()
        answer = running.post(b"[" + b",".join([event(1), b"7", event(2)]) + b"]")
        assert is_later(answer)
        assert answer.took < 0.7
        assert [result["status"] for result in answer.results] == [200, 200, 503]
        assert answer.verdicts == ["duplicate", "dead", None]


def test_answers_that_came_in_time_are_not_given_again(tmp_path, desk):
    with live(tmp_path, desk, source__answer_within=PROMPT) as running, running.line() as line:
        request = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(event(1))}\r\n\r\n"
        )
        desk.hold()
        line.sendall(request.encode() + event(1))
        assert read_answer(line).status == 503
        desk.let_go()
        running.until(lambda: running.counts["delivered"] == 1)
        line.sendall(request.encode() + event(1))
        assert read_answer(line).verdicts == ["duplicate"]


def test_a_client_that_hangs_up_changes_nothing(tmp_path, desk):
    desk.hold()
    with live(tmp_path, desk) as running:
        for number in range(1, 6):
            with running.line() as line:
                body = event(number)
                head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
                line.sendall(head.encode() + body)
                running.until(lambda number=number: desk.begun == number)
                if number % 2:  # the hard way
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        desk.let_go()
        running.until(lambda: running.counts["delivered"] == 5)
        assert sorted(desk.bodies) == [event(number) for number in range(1, 6)]
        assert [running.post(event(n)).verdicts for n in range(1, 6)] == [["duplicate"]] * 5


def test_a_body_that_is_cut_off_is_no_arrival(door):
    with door.line() as line:
        line.sendall(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n".encode()
        )
        line.sendall(event(1)[:100])
    assert door.passes(2)
    assert door.counts["arrived"] == 1


def test_the_same_event_twice_at_once_is_delivered_once(door, desk):
    for number in range(20):
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(door.post, [event(number)] * 4))
        statuses = {answer.status for answer in answers}
        assert statuses <= {200, 503}
        assert all(is_later(answer) for answer in answers if answer.status != 200)
    assert sorted(desk.bodies) == sorted(event(number) for number in range(20))


# --- a stop -------------------------------------------------------------------------------


def test_a_stop_finishes_what_was_sent_and_hands_the_rest_back(tmp_path):
    class Narrow(Desk):
        concurrency = 1

    desk = Narrow()
    desk.hold()
    running = prepare(tmp_path, desk)
    running.start()
    sent = in_background(running, "POST", body=event(1))
    running.until(lambda: desk.begun == 1)
    queued = in_background(running, "POST", body=event(2))
    running.until(lambda: running.counts["arrived"] == 2)
    running.loop.call_soon_threadsafe(running.service.stop)
    running.until(lambda: running.do(running.service.router.gateways[0].not_ready))
    with pytest.raises(ConnectionRefusedError):
        running.get("/healthz")
    desk.let_go()
    assert sent.result(5).verdicts == ["delivered"]
    later = queued.result(5)
    assert is_later(later)
    assert "shutting down" in later.json["reason"]
    running.stop()
    assert running.drained
    assert desk.bodies == [event(1)]
    with live(tmp_path, desk) as again:
        assert again.post(event(1)).verdicts == ["duplicate"]
        assert again.post(event(2)).verdicts == ["delivered"]


def test_a_stop_whose_time_is_over_tells_those_who_wait_to_come_again(tmp_path, desk):
    desk.hold()
    running = prepare(tmp_path, desk)
    running.grace = timedelta(milliseconds=100)
    running.start()
    sent = in_background(running, "POST", body=event(1))
    running.until(lambda: desk.begun == 1)
    began = time.monotonic()
    running.loop.call_soon_threadsafe(running.service.stop)
    assert is_later(sent.result(5))
    desk.let_go()
    running.stop()
    assert time.monotonic() - began < 2
    assert not running.drained


def test_a_connection_that_is_open_during_a_stop_hears_that_it_is_not_ready(tmp_path, desk):
    desk.hold()
    running = prepare(tmp_path, desk)
    running.start()
    with running.line() as line:
        line.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n")  # the rest comes later
        sent = in_background(running, "POST", body=event(1))
        running.until(lambda: desk.begun == 1)
        running.loop.call_soon_threadsafe(running.service.stop)
        running.until(lambda: running.do(running.service.router.gateways[0].not_ready))
        line.sendall(b"\r\n")
        answer = read_answer(line)
        assert is_later(answer)
        assert "shutting down" in answer.json["reasons"][0]
        assert answer.headers["connection"] == "close"
    desk.let_go()
    assert sent.result(5).status == 200
    running.stop()


# --- several routes -----------------------------------------------------------------------


@pytest.fixture
def fork(tmp_path):
    """Two routes with sinks of their own: orders go to both, returns to the second alone."""
    file = tmp_path / "oncebridge.toml"
    file.write_text(
        f"""
        source = "http://127.0.0.1:0{PATH}"
        store = "sqlite:{tmp_path}/seen.db"
        dead = "sqlite:{tmp_path}/dead.db"
        [[routes]]
        name = "orders"
        sink = "-"
        match = {{ detail-type = ["Order Placed"] }}
        rules = [{{ name = "one order", key = "content" }}]
        [[routes]]
        name = "shop"
        sink = "-"
        match = {{ source = ["com.example.shop"] }}
        rules = [{{ name = "one envelope", key = "id" }}]
        """
    )
    setup = config.load(file, environment={})
    desks = {"orders": Desk(), "shop": Desk()}
    routes = tuple(
        _with(route, sink=_with(route.sink, opened=desks[route.name])) for route in setup.routes
    )
    running = prepare(tmp_path)
    running.setup = _with(setup, routes=routes)
    running.start()
    yield running, desks
    running.stop()


def test_an_event_is_done_when_all_its_routes_are(fork):
    running, desks = fork
    desks["shop"].answer = Unknown("timeout")
    answer = running.post(event(1))
    assert is_later(answer)
    assert answer.verdicts == ["failed"]
    desks["shop"].answer = Yes()
    running.until(lambda: running.post(event(1)).status == 200)
    assert desks["orders"].bodies == desks["shop"].bodies == [event(1)]
    answer = running.post(event(1))
    assert (answer.json["status"], answer.json["verdict"]) == (200, "duplicate")


def test_each_route_is_answered_for_with_its_own_rule_and_verdict(fork):
    running, desks = fork
    desks["shop"].answer = Unknown("timeout")
    answer = running.post(event(1)).json
    assert (answer["status"], answer["verdict"], answer["reason"]) == (503, "failed", "timeout")
    assert {"rule", "key"}.isdisjoint(answer)  # whose would they be?
    orders, shop = answer["routes"]["orders"], answer["routes"]["shop"]
    keys = orders.pop("key"), shop.pop("key")
    assert len({*keys, ""}) == 3
    assert orders == {"verdict": "delivered", "rule": "one order"}
    assert shop == {"verdict": "failed", "rule": "one envelope", "reason": "timeout"}
    desks["shop"].answer = Yes()
    running.until(lambda: running.post(event(1)).status == 200)
    answer = running.post(event(1)).json
    assert answer == {
        "status": 200,
        "verdict": "duplicate",
        "routes": {
            "orders": {"verdict": "duplicate", "rule": "one order", "key": keys[0]},
            "shop": {"verdict": "duplicate", "rule": "one envelope", "key": keys[1]},
        },
    }
    described = json.loads(running.get("/openapi.json").body)["components"]["schemas"]["Result"]
    jsonschema_rs.validate(described, answer)


def test_an_event_that_one_of_several_routes_is_for_is_answered_like_any_other(fork):
    running, _ = fork
    answer = running.post(event(2, **{"detail-type": "Return"})).json
    assert {**answer, "key": ""} == {
        "status": 200,
        "verdict": "delivered",
        "rule": "one envelope",
        "key": "",
    }


def test_what_no_route_is_for_is_dead_beside_what_has_one(fork):
    running, desks = fork
    strange = event(9, source="com.example.mill", **{"detail-type": "Grain"})
    body = (
        b"[" + b",".join([event(1), strange, b"{}", event(2, **{"detail-type": "Return"})]) + b"]"
    )
    answer = running.post(body)
    assert (answer.status, answer.verdicts) == (200, ["delivered", "dead", "dead", "delivered"])
    assert {letter.raw for letter in running.buried()} == {strange, b"{}"}
    assert len(desks["orders"].taken) == 1
    assert len(desks["shop"].taken) == 2
    assert running.post(strange).verdicts == ["dead"]


def test_what_no_route_is_for_comes_again_while_the_dead_letters_cannot_be_opened(
    fork, monkeypatch
):
    running, _ = fork
    strange = event(9, source="com.example.mill", **{"detail-type": "Grain"})

    async def away():
        raise StoreUnavailable("the disk is away")

    monkeypatch.setattr(running.setup.config.dead.opened, "open", away)
    answer = running.post(strange)
    assert is_later(answer)
    assert answer.took < 1
    monkeypatch.undo()
    assert running.post(strange).verdicts == ["dead"]
    assert running.service._direct._pump.untold == 0


# --- with a spool -------------------------------------------------------------------------


def test_with_a_spool_the_answer_is_202_when_it_is_on_disk(tmp_path, desk):
    desk.hold()
    with live(tmp_path, desk, spool=f"{tmp_path}/spool.db") as running:
        one, many = running.post(event(1)), running.post(event(1) + b"\n" + event(2))
        assert (one.status, one.json) == (202, {"status": 202, "spooled": True})
        assert (many.status, [r["status"] for r in many.results]) == (202, [202, 202])
        assert running.post(b"rubbish").status == 202
        desk.let_go()
        running.until(lambda: running.counts["arrived"] == 4 and not running.counts["in_flight"])
        assert sorted(desk.bodies) == [event(1), event(2)]
        assert [letter.raw for letter in running.buried()] == [b"rubbish"]
        running.until(lambda: running.service.spool.depth == 0)


# --- the answer itself --------------------------------------------------------------------

OUTCOMES = st.builds(
    Outcome,
    verdict=st.sampled_from(Verdict),
    acknowledge=st.booleans(),
    key=st.binary(max_size=33),
    retry_after_ms=st.integers(-(10**12), 10**12),
    reason=st.text(max_size=20),
)
ANSWERS = st.none() | st.builds(
    RouterAnswer,
    acknowledge=st.booleans(),
    verdict=st.none() | st.sampled_from(Verdict),
    retry_after_ms=st.integers(-(10**12), 10**12),
    reason=st.text(max_size=20),
    outcomes=st.lists(st.tuples(st.sampled_from("ab"), OUTCOMES), max_size=3).map(tuple),
)


@given(answers=st.lists(ANSWERS, min_size=1, max_size=6), is_one=st.booleans())
def test_an_answer_is_200_202_or_503_and_retry_after_is_a_positive_integer(answers, is_one):
    answers = answers[:1] if is_one else answers
    response = _response(answers, is_one=is_one)
    waits = [value for name, value in response.headers if name == "Retry-After"]
    said = Answer(response.status, {}, response.body)
    acknowledged = [answer is not None and answer.acknowledge for answer in answers]
    assert (response.status == 503) is not all(acknowledged)
    assert response.status in (200, 202, 503)
    assert len(said.results) == len(answers)
    assert [result["status"] != 503 for result in said.results] == acknowledged
    if response.status == 503:
        (wait,) = waits
        assert wait.isdigit()
        asked = [result["retry_after"] for result in said.results if result["status"] == 503]
        assert min(asked) >= 1
        assert int(wait) == max(asked)
    else:
        assert not waits


# --- the address --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1/events", "the port is missing"),
        ("http://127.0.0.1:99999/events", "host or port"),
        ("http://127.0.0.1:x/events", "host or port"),
        ("http://:8080/events", "HOST:PORT/PATH"),
        ("http://127.0.0.1:8080/events?a=b", "HOST:PORT/PATH"),
        ("http://127.0.0.1:8080/events#a", "HOST:PORT/PATH"),
        ("http://mill:grain@127.0.0.1:8080/events", "send with api_keys, basic"),
        ("http://127.0.0.1:8080/healthz", "/healthz is reserved"),
        ("http://127.0.0.1:8080/oauth/token", "/oauth/token is reserved"),
        ("https://127.0.0.1:8080/events", "tls_cert"),
        ("http://mill:7grain/x@127.0.0.1:80/", "host or port"),
        ("http://[::1:8080/events", "host or port"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_what_to_do(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(None, environment={}, flags={"source": url, "store": "memory:"})
    assert "grain" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        HttpSource.from_url(url)
    assert ":grain" not in str(caught.value)


def test_a_certificate_goes_with_https_only():
    with pytest.raises(ConfigError, match="https"):
        HttpSource.from_url("http://127.0.0.1:1/", HttpSourceOptions(tls_cert="a.pem"))


@pytest.mark.parametrize("name", ["none.pem", "locked.pem", "ca.pem"])
def test_a_certificate_that_cannot_be_used_is_told_and_nobody_is_asked_for_a_password(
    tmp_path, name
):
    running = prepare(
        tmp_path, source=f"https://127.0.0.1:0{PATH}", source__tls_cert=str(TLS / name)
    )
    with pytest.raises(ConfigError, match="cannot be loaded"):
        running.start()


def test_https_is_spoken_with_a_certificate(tmp_path):
    import ssl

    certificate = str(TLS / "localhost.pem")
    with live(
        tmp_path, source=f"https://localhost:0{PATH}", source__tls_cert=certificate
    ) as running:
        context = ssl.create_default_context(cafile=TLS / "ca.pem")
        with (
            running.line() as line,
            closing(context.wrap_socket(line, server_hostname="localhost")) as secure,
        ):
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(event(1))}\r\n\r\n"
            secure.sendall(head.encode() + event(1))
            assert read_answer(secure).verdicts == ["delivered"]
        assert running.service.sources[0].url == f"https://localhost:{running.port}{PATH}"


def test_a_path_of_ones_own_is_listened_on(tmp_path):
    with live(tmp_path, source="http://127.0.0.1:0/hooks/genesys") as running:
        assert running.ask("POST", "/hooks/genesys", event(1)).verdicts == ["delivered"]
        assert running.ask("POST", PATH, event(1)).status == 404
        paths = json.loads(running.get("/openapi.json").body)["paths"]
        assert "/hooks/genesys" in paths
        assert running.service.sources[0].url.endswith("/hooks/genesys")


def test_a_port_in_use_is_told(tmp_path, door):
    other = prepare(
        tmp_path / "none",
        source=f"http://127.0.0.1:{door.port}{PATH}",
        store="memory:",
        dead="memory:",
    )
    with pytest.raises(ConfigError, match="another program uses this port already"):
        other.start()


def test_many_clients_at_once_are_all_answered_and_the_books_balance(door, desk):
    bodies = [event(number % 150) for number in range(300)]
    done = []
    lock = threading.Lock()

    def send(some):
        for body in some:
            answer = door.post(body)
            while answer.status == 503:
                time.sleep(0.05)
                answer = door.post(body)
            with lock:
                done.append(answer.verdicts[0])

    threads = [threading.Thread(target=send, args=(bodies[at::8],)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(desk.bodies)) == sorted(desk.bodies)
    assert done.count("delivered") == len(desk.bodies) == 150
    assert done.count("duplicate") == 150
    assert door.balance()["in_flight"] == 0


def test_packed_and_plain_have_the_same_key(door):
    raw = zlib.compressobj(wbits=31)
    packed = raw.compress(event(5)) + raw.flush()
    keys = {
        door.post(event(5)).json["key"],
        door.post(packed, Content_Encoding="gzip").json["key"],
        door.post(b"[" + event(5) + b"]").results[0]["key"],
        door.post(event(5) + b"\n" + event(6), kind=NDJSON).results[0]["key"],
    }
    assert len(keys) == 1
