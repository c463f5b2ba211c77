"""
Whatever is read here was written by somebody else.

Each parser is fed for a while with arbitrary bytes and with bytes that nearly are what they
should be. It gives an answer or one of its own errors, never another, and never none. Where
there is a second, slower way to the same answer, the two are compared.
"""

import base64
import gzip
import http.client
import io
import itertools
import json
import socket
from contextlib import suppress
from io import BytesIO

import pytest
from hypothesis import assume, target
from hypothesis import strategies as st
from tests.fuzz.for_a_while import for_a_while
from tests.fuzz.slow_reader import Refused, exactly, read_slowly
from tests.fuzz.strategies import (
    decimals,
    details,
    envelopes,
    floats,
    integers,
    mutated,
    names,
    plain,
    scalars,
    spelt,
    texts,
    values,
)
from tests.http.live import PATH, Desk, event, live

from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError, EventError
from oncebridge.events.canonical import canonical
from oncebridge.events.event import REASONS, Unreadable, parse, read
from oncebridge.events.framing import BadGzip, RecordReader, TooLarge, as_line, gunzip, split_body
from oncebridge.events.pattern import Pattern
from oncebridge.events.rules import Rule, RuleSet
from oncebridge.http.auth import AuthOptions, RequestAuthenticator
from oncebridge.http.server import Request
from oncebridge.service import config

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
RULES = RuleSet([], namespace="fuzz")
raw_events = envelopes.flatmap(spelt)

# --- events -------------------------------------------------------------------------------


def test_reading_an_event_gives_what_stands_there_or_a_reason():
    def holds(raw, apart):
        found = read(raw, apart=tuple(apart))
        assert found.raw == raw
        try:
            expected = read_slowly(raw)
        except Refused:
            assert isinstance(found, Unreadable)
            assert found.reason in REASONS
            with pytest.raises(EventError):
                parse(raw)
            return
        assert not isinstance(found, Unreadable), found.reason
        assert exactly(found.detail) == exactly(expected)
        assert found.canonical == parse(raw).canonical == canonical(expected)
        RULES.plan(found)
        assert "detail" in found.envelope

    tricky = mutated(raw_events | envelopes.map(plain))
    for_a_while(
        holds,
        tricky | st.binary(max_size=60) | values.map(plain) | st.just(b""),
        st.lists(st.sampled_from(["a", "b", "id", "detail"]), max_size=2, unique=True),
    )


def test_reading_a_decimal_keeps_it_or_gives_a_reason():
    def holds(one, other):
        raw = f'{{"source":"s","detail":{{"a":{one},"b":[{other}, {one}]}}}}'.encode()
        found = read(raw)
        try:
            expected = read_slowly(raw)
        except Refused:
            assert isinstance(found, Unreadable)
            return
        assert exactly(found.detail) == exactly(expected)
        assert found.canonical == read(raw, apart=("b",)).canonical == canonical(expected)
        RULES.plan(found)

    for_a_while(holds, decimals, decimals, share=0.5)


# --- keys ---------------------------------------------------------------------------------


def key_of(raw, rules=RULES):
    return rules.plan(parse(raw)).key


@st.composite
def changed_in_one_place(draw, value):
    """Change one leaf, one name or one length somewhere in *value*."""
    match value:
        case dict() if value and draw(st.integers(0, 3)):
            name = draw(st.sampled_from(sorted(value)))
            return {**value, name: draw(changed_in_one_place(value[name]))}
        case dict():
            name = draw(names.filter(lambda name: name not in value))
            return {**value, name: draw(scalars)}
        case list() if value and draw(st.integers(0, 3)):
            at = draw(st.integers(0, len(value) - 1))
            return [*value[:at], draw(changed_in_one_place(value[at])), *value[at + 1 :]]
        case list():
            return [*value, draw(scalars)]
        case bool():
            return not value
        case int():
            return value + draw(st.sampled_from([1, -1, 2**53, 10**20]))
        case float():
            return draw(floats.filter(lambda other: other != value))
        case str():
            return draw(texts.filter(lambda other: other != value))
        case _:
            return draw(scalars.filter(lambda other: other is not None))


def framings(raw, filler):
    """Give the same event as each way of sending it gives it."""
    line = as_line(raw).strip()
    yield from split_body(raw)
    yield split_body(b"[" + raw + b"]")[0]
    yield split_body(b"[" + filler + b" , " + raw + b"\n]")[1]
    yield split_body(line + b"\n" + filler, content_type="application/x-ndjson; charset=utf-8")[0]
    yield split_body(gunzip(gzip.compress(raw, 1), 2**21))[0]
    # A file is read as lines if its second line is an object in itself, so the layout goes.
    for text in (line, b"[" + filler + b",\n" + raw + b"]", filler + b"\n" + line):
        yield list(RecordReader(BytesIO(text)))[-1].raw
        yield list(RecordReader(BytesIO(gzip.compress(text, 1)), chunk=7))[-1].raw


def test_the_same_event_has_the_same_key_however_it_is_spelt_and_sent():
    def holds(spellings):
        one, other = spellings
        keys = {key_of(raw) for raw in [one, other, *framings(one, event(7))]}
        assert len(keys) == 1
        (key,) = keys
        assert not key or len(key) > 16

    pairs = envelopes.flatmap(lambda value: st.tuples(spelt(value), spelt(value)))
    for_a_while(holds, pairs, share=0.5)


def test_two_events_that_differ_in_one_place_have_two_keys():
    def holds(pair, kinds):
        detail, other = pair
        assume(canonical(detail) != canonical(other))
        first = plain({**kinds, "detail": detail})
        assert key_of(first) != key_of(plain({**kinds, "detail": other}))
        source = {**kinds, "source": kinds.get("source", "") + "x"}
        assert key_of(first) != key_of(plain({**source, "detail": detail}))

    pairs = details.flatmap(lambda value: st.tuples(st.just(value), changed_in_one_place(value)))
    kinds = st.fixed_dictionaries({}, optional={"source": texts, "detail-type": texts})
    for_a_while(holds, pairs, kinds, share=0.5)


KEYS = ["detail.a", "detail.order", "detail.a[0].b", "length(detail.a)", "detail.a.*", "id"]
PATTERN = {"detail": {"a": [{"numeric": [">", 0]}, {"prefix": "x"}, {"exists": False}]}}


def test_rules_find_a_plan_for_every_event():
    fields = Rule.parse({"name": "fields", "key": KEYS, "match": PATTERN})
    latest = Rule.parse(
        {
            "name": "latest",
            "key": "id",
            "latest": {"entity": "detail.order", "version": "detail.a"},
            "quiet": {"entity": "detail.order", "state": "detail.b", "for": "1s"},
        }
    )
    rules = RuleSet([fields, latest], namespace="fuzz")
    match = Pattern.compile(PATTERN, "match")

    def holds(raw):
        found = read(raw)
        if not isinstance(found, Unreadable):
            match.matches(found.envelope)
            plan = rules.plan(found)
            assert plan == rules.plan(parse(raw))
            assert all(len(part.key) > 16 for part in plan.parts)

    for_a_while(holds, mutated(raw_events), share=0.4)


# --- records ------------------------------------------------------------------------------

LAYOUT = b" \t\r\n[],"
lines = st.lists(mutated(envelopes.map(plain)) | st.binary(max_size=20), max_size=6)
bodies = (
    mutated(raw_events)
    | lines.map(b"\n".join)
    | lines.map(lambda some: b"[" + b",".join(some) + b"]")
    | mutated(st.lists(raw_events, max_size=4).map(lambda some: b"[" + b", ".join(some) + b"]"))
    | st.binary(max_size=80)
)
kinds = st.sampled_from(["", "application/json", "application/x-ndjson", "APPLICATION/JSONL ;a"])


def without(body, records):
    """Take the records out of the body, in their order; give what is left."""
    left, at = b"", 0
    for record in records:
        found = body.index(record, at)
        left += body[at:found]
        at = found + len(record)
    return left + body[at:]


def test_taking_a_body_apart_leaves_nothing_out():
    def holds(body, kind):
        records = split_body(body, content_type=kind)
        assert not without(body, records).strip(LAYOUT)
        if kind in ("", "application/json"):
            try:
                whole = json.loads(body, parse_constant=float)
            except (ValueError, RecursionError):
                whole = None
            if isinstance(whole, list) and not body.startswith(b"\xef\xbb\xbf"):
                assert len(records) in (len(whole), 1)

    for_a_while(holds, bodies, kinds, share=0.3)


def test_a_file_read_in_pieces_is_read_the_same_and_can_be_gone_on_with_anywhere():
    def holds(body, chunk, is_packed, cut):
        assume(not body.startswith(b"\x1f\x8b"))
        stored = gzip.compress(body, 1) if is_packed else body

        def records(**how):
            return list(RecordReader(BytesIO(stored), **how))

        whole = records()
        assert records(chunk=chunk) == whole
        raws = [record.raw for record in whole]
        assert not without(body, raws).removeprefix(b"\xef\xbb\xbf").strip(LAYOUT)
        assert all(raw == raw.strip(b" \t\r\n") and raw for raw in raws)
        if whole:
            at = cut % len(whole)
            left = records(chunk=chunk, start=whole[at].end, line=whole[at].last_line)
            assert left == whole[at + 1 :]
        for record in whole:
            assert record.line == 1 + body[: body.index(record.raw)].count(b"\n") or (
                body.count(record.raw) > 1
            )

    for_a_while(holds, bodies, st.integers(1, 60), st.booleans(), st.integers(0, 100), share=0.5)


def test_unpacking_gives_what_was_packed_or_says_what_is_wrong():
    def found_in(packed, limit):
        try:
            return gunzip(packed, limit)
        except BadGzip:
            return None

    def holds(content, packed, limit):
        made = gzip.compress(content, 1)
        if len(content) <= limit:
            assert gunzip(made, limit) == content
            assert gunzip(made + made, 2 * limit) == content * 2
        else:
            with pytest.raises(TooLarge):
                gunzip(made, limit)
        with suppress(TooLarge):
            found = found_in(packed, limit)
            assert found is None or (len(found) <= limit and found == gzip.decompress(packed))

    packed = mutated(st.binary(max_size=200).map(lambda some: gzip.compress(some, 1)))
    for_a_while(holds, st.binary(max_size=300), packed, st.integers(0, 250), share=0.2)


# --- HTTP ---------------------------------------------------------------------------------

EVENT = event(1)
REQUESTS = [
    b"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
    % (len(EVENT), EVENT),
    b"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    b"Content-Length: %d\r\n\r\n%b\n%b" % (2 * len(EVENT) + 1, EVENT, EVENT),
    b"POST /events HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x;x=y\r\n%b\r\n0\r\nX-T: 1\r\n\r\n" % (len(EVENT), EVENT),
    b"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b"
    % (len(gzip.compress(EVENT, mtime=0)), gzip.compress(EVENT, mtime=0)),
    b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /openapi.json HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    (
        b"POST /oauth/token HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic c2hvcDpjaGFsaw==\r\n"
        b"Content-Length: 29\r\n\r\ngrant_type=client_credentials"
    ),
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
]
WORDS = [
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\0", b"\x80", b"/", b"?", b"%00"),
    *(b"POST ", b"GET ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"HTTP/1.1", b"HTTP/1.0", b"/events"),
    *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: +5\r\n"),
    *(b"Content-Length: 99999999999999999999\r\n", b"Content-Length : 5\r\n", b" folded\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    *(b"5\r\nhello\r\n", b"FFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"Connection: close\r\n"),
    *(b"Expect: 100-continue\r\n", b"Expect: rain\r\n", b"Upgrade: h2c\r\n", b"Host: b\r\n"),
    *(b"Origin: http://localhost\r\n", b"Sec-Fetch-Site: cross-site\r\n"),
    *(b"X: " + b"y" * 40_000 + b"\r\n", b"Content-Encoding: gzip\r\n", b"\x16\x03\x01\x02\x00"),
]
STATUSES = {100, 200, 202, 400, 401, 403, 404, 405, 408, 411, 413, 415, 417, 431, 501, 503, 505}


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    with live(tmp_path_factory.mktemp("fuzz"), Desk(), source__max_body="64KiB") as running:
        yield running


def talk(port, pieces):
    """Send, say no more, and give all that comes back."""
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                line.sendall(piece)
            line.shutdown(socket.SHUT_WR)
        said = b""
        with suppress(ConnectionResetError):
            while piece := line.recv(65536):
                said += piece
        return said


class Said:
    """Bytes that `http.client` can read answers from."""

    def __init__(self, data):
        self.file = io.BytesIO(data)

    def makefile(self, _mode):
        return self.file


def answers_in(said, request):
    """Take what was said apart into answers, to the last byte."""
    source = Said(said)
    found = []
    while source.file.tell() < len(said):
        at = source.file.tell()
        assert said.startswith(b"HTTP/1.1 ", at), said[at:]
        if said.startswith(b"HTTP/1.1 100 ", at):
            source.file.seek(said.index(b"\r\n\r\n", at) + 4)
            continue
        response = http.client.HTTPResponse(source, method="GET")
        response.begin()
        length = response.getheader("Content-Length")
        body_at = said.index(b"\r\n\r\n", at) + 4
        is_bare = b"HEAD" in request and not said.startswith(b"{", body_at)
        body = b"" if is_bare else said[body_at : body_at + int(length or 0)]
        assert is_bare or len(body) == int(length or 0)
        source.file = io.BytesIO(said)
        source.file.seek(body_at + len(body))
        found.append((response.status, response.getheader("Retry-After"), body))
    return found


def test_whatever_is_sent_the_server_answers_or_hangs_up_and_serves_the_next(door):
    turns = itertools.count()

    def holds(request):
        for status, wait, body in answers_in(talk(door.port, [request]), request):
            assert status in STATUSES
            assert (status == 503) is (wait is not None)
            assert wait is None or int(wait) > 0
            if body:
                json.loads(body)
        assert not door.unhandled
        target(float(len(request)))
        if next(turns) % 50 == 0:
            counts = door.balance()
            assert counts["arrived"] == counts["delivered"] + counts["duplicate"] + counts["dead"]

    for_a_while(
        holds, mutated(st.sampled_from(REQUESTS), WORDS) | st.binary(max_size=80), share=0.6
    )
    door.until(lambda: door.counts["in_flight"] == 0)
    assert door.passes(10**6)
    assert door.balance()["dead"] == len(door.buried())


def test_how_a_request_is_cut_into_pieces_does_not_matter(door):
    def holds(request, cuts):
        places = sorted({cut % (len(request) + 1) for cut in cuts})
        bounds = [0, *places, len(request)]
        pieces = [request[a:b] for a, b in itertools.pairwise(bounds)]
        whole = answers_in(talk(door.port, [request]), request)
        split_up = answers_in(talk(door.port, pieces), request)
        # Which of two faults is seen first may depend on how much was there to look at.
        alike = {431: 400}
        statuses = [[alike.get(said, said) for said, _, _ in some] for some in (whole, split_up)]
        assert statuses[0] == statuses[1]

    cuts = st.lists(st.integers(0, 10**6), max_size=5)
    for_a_while(holds, mutated(st.sampled_from(REQUESTS), WORDS), cuts, share=0.4)


# --- who may send -------------------------------------------------------------------------

SECRETS = {
    "api_keys": "apple-key-of-a-mill",
    "basic": "mill:grain-in-the-sacks",
    "bearer": "plum-token-of-a-mill",
    "oauth": "shop:chalk-on-the-board",
}
GUARD = RequestAuthenticator(
    AuthOptions(
        hmac=(Secret("cedar-secret-of-the-wood"),), **{k: (Secret(s),) for k, s in SECRETS.items()}
    ),
    lambda: 1_790_000_000_000,
)
PROOFS = [
    b"apple-key-of-a-mill",
    b"plum-token-of-a-mill",
    base64.b64encode(b"mill:grain-in-the-sacks"),
]
header_names = st.sampled_from(
    [b"authorization", b"x-api-key", b"x-oncebridge-timestamp", b"x-oncebridge-signature"]
)
header_values = mutated(
    st.sampled_from(
        [
            *(
                b"apple-key-of-a-mill",
                b"Basic bWlsbDpncmFpbi1pbi10aGUtc2Fja3M=",
                b"Bearer plum-token-of-a-mill",
                b"Bearer 1790003600." + b"a" * 64,
            ),
            *(
                b"1790000000",
                b"v1=" + b"0" * 64,
                b"",
                b"Basic shop:chalk-on-the-board",
                b"Bearer shop:chalk-on-the-board",
            ),
        ]
    ),
    [*PROOFS, b" ", b",", b".", b"=", b"\xff", b"v1=", b"Bearer ", b"Basic ", b"9" * 5000, b"\0"],
)
requests = st.builds(
    Request,
    method=st.just("POST"),
    path=st.just(PATH),
    query=st.just(""),
    headers=st.lists(st.tuples(header_names, header_values), max_size=4).map(tuple),
    body=mutated(
        st.sampled_from(
            [b"", b"grant_type=client_credentials&client_id=shop&client_secret=chalk-on-the-board"]
        ),
        [b"%", b"%ff", b"&", b"=", b";", b"+", b"\xff", b"grant_type", b"client_id=shop", b"\0"],
    ),
)


def test_nobody_is_let_in_who_does_not_know_a_secret():
    def holds(request):
        let_in = GUARD.admits(request, with_body=True)
        assert not let_in or GUARD.admits(request, with_body=False)
        if let_in:
            values = [value for _, value in request.headers]
            assert any(proof in value for proof in PROOFS for value in values)
        answer = GUARD.token(request, "127.0.0.1")
        assert answer.status in (200, 400, 401, 429)
        said = json.loads(answer.body)
        if answer.status == 200:
            knows = b"chalk-on-the-board" in request.body or any(
                base64.b64encode(b"shop:chalk-on-the-board") in value
                for _, value in request.headers
            )
            assert knows
            bearer = (b"authorization", b"Bearer " + said["access_token"].encode())
            asked = Request("POST", PATH, "", (bearer,))
            assert GUARD.admits(asked, with_body=True)

    for_a_while(holds, requests, share=0.5)


# --- configuration ------------------------------------------------------------------------

CONFIG = """
source = { url = "http://127.0.0.1:8080/events", api_keys = ["apple-key-of-a-mill"], max_body = "2MiB" }
store = "memory:"
sink = { url = "https://crm.example.com/hook", timeout = "5s" }
dead = "memory:"
preset = "genesys"
window = "6d"
lease = "30s"
mode = "shadow"
batch = 10
limits = { max_bytes = "1MiB", max_depth = 50 }
[[rules]]
name = "call"
match = { source = ["genesys.cloud"], detail-type = [{ prefix = "Conversation" }] }
key = ["detail.conversation_id", "detail.status"]
quiet = { entity = "detail.conversation_id", state = "detail.status", for = "500ms" }
[[rules]]
name = "tiers"
tiers = [ { key = "id", window = "5m" }, { key = "content", ignore = ["detail.sentAt"] } ]
"""
TOML = [
    *(
        b'"',
        b"'",
        b"=",
        b"[",
        b"]",
        b"[[",
        b"]]",
        b"{",
        b"}",
        b",",
        b".",
        b"\n",
        b"#",
        b"\\",
        b"\0",
    ),
    *(b"true", b"-1", b"0", b"1e400", b"nan", b"inf", b"9" * 5000, b"2026-03-01", b'""', b"[]"),
    *(
        b'"6d"',
        b'"-1s"',
        b'"1e9d"',
        b'"99999999999d"',
        b'"memory:"',
        b'"sqlite:"',
        b'"-"',
        b'"env:"',
    ),
    *(b'"http://"', b'"http://[::1"', b'"http://a:b@c:99999/?x#y"', b'"file:"', b'"env:NO_SUCH"'),
    *(b"routes = [{name = 1}]\n", b"[[routes]]\n", b"spool = 1\n", b"rules = 7\n", b"\xff"),
    *(b'"detail[?"', b'"length("', b"{ prefix = 1 }", b'{ numeric = ["<"] }', b'{ "$or" = [] }'),
]
SETTINGS = """
    source store sink dead window lease limits limits.max_depth source.api_keys source.url
    source.max_body sink.rate sink.headers.x sink..x batch mode rules routes grace order rate bare
    spool x .
"""
TEXTS = """
    - memory: sqlite: 5s -5s 1/s 0/s 1MiB true 7 -7 nan shadow http://127.0.0.1:0/ http://[
    https://crm.example.com/ a,b,, [] {} env: file:/none http://a:99999/ http://127.0.0.1:0/healthz
"""
setting_names = st.sampled_from([*SETTINGS.split(), ""])
setting_values = st.sampled_from([*TEXTS.split(), "", "\0", "é" * 200]) | texts


def test_a_configuration_is_read_or_every_mistake_in_it_is_told(tmp_path):
    file = tmp_path / "oncebridge.toml"

    def holds(text, flags, environment):
        # What names a module would import it, which is no part of this.
        assume(b"python" not in text)
        file.write_bytes(text)
        named = {f"ONCEBRIDGE_{k.upper().replace('.', '__')}": v for k, v in environment.items()}
        try:
            setup = config.load(file, environment=named, flags=flags)
        except ConfigError:
            return
        assert setup.routes
        assert setup.config.store.opened is not None

    for_a_while(
        holds,
        mutated(st.sampled_from([CONFIG.encode(), b""]), TOML) | st.binary(max_size=40),
        st.dictionaries(setting_names, setting_values, max_size=2),
        st.dictionaries(setting_names, setting_values, max_size=2),
        share=0.8,
    )
    assert list(tmp_path.iterdir()) == [file]


def test_numbers_of_any_size_keep_their_worth():
    def holds(number):
        one, other = (plain({"detail": {"n": n}}) for n in (number, number + 1))
        assert parse(one).detail["n"] == number
        assert key_of(one) != key_of(other)

    for_a_while(holds, integers, share=0.1)
