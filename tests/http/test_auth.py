import base64
import gzip
import hashlib
import hmac
import json
import time
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.http.live import PATH, event, live, read_answer

from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError
from oncebridge.http.auth import AuthOptions, RequestAuthenticator
from oncebridge.http.server import Request
from oncebridge.service import config

NOW_S = 1_790_000_000
HERE = "127.0.0.1"
KINDS = {
    "api_keys": ("apple-key-of-a-mill", "berry-key-of-a-mill"),
    "basic": ("mill:grain-in-the-sacks", "barn:straw:and:hay:and:oats"),
    "bearer": ("plum-token-of-a-mill", "pear-token-of-a-mill"),
    "oauth": ("shop:chalk-on-the-board", "desk:slate-on-the-roofs"),
    "hmac": ("cedar-secret-of-the-wood", "maple-secret-of-the-wood"),
}
HEADER = "X-Mill-Key"


class Clock:
    """The time as the test says; a service in another thread may look."""

    def __init__(self):
        self.now_s = NOW_S

    def __call__(self):
        return self.now_s * 1000


def options(*kinds, **others):
    named = {kind: tuple(Secret(text) for text in KINDS[kind]) for kind in kinds or KINDS}
    return AuthOptions(**{"api_key_header": HEADER, **named, **others})


def request(*headers, body=b"", method="POST", path=PATH):
    lowered = tuple((name.lower().encode(), value.encode()) for name, value in headers)
    return Request(method, path, "", lowered, body)


def guard(*kinds, clock=None, **others):
    return RequestAuthenticator(options(*kinds, **others), clock or Clock())


def admits(guard, *headers, body=b""):
    """Ask as the server does: with the head alone, and then with the body."""
    asked = request(*headers, body=body)
    with_head = guard.admits(asked, with_body=False)
    return with_head and guard.admits(asked, with_body=True)


def basic(pair):
    return ("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())


def bearer(token):
    return ("Authorization", f"Bearer {token}")


def signature(secret, body, at=NOW_S):
    made = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return ("X-Oncebridge-Timestamp", str(at)), ("X-Oncebridge-Signature", f"v1={made}")


def token_request(client=None, *, basic_client=None, grant="client_credentials", **more):
    form = {"grant_type": grant, **more}
    if client:
        form["client_id"], form["client_secret"] = client.split(":", 1)
    headers = [basic(basic_client)] if basic_client else []
    return request(*headers, body=urlencode(form).encode(), path="/oauth/token")


def issue(guard, client="shop:chalk-on-the-board"):
    answer = guard.token(token_request(client), HERE)
    assert answer.status == 200
    return json.loads(answer.body)["access_token"]


# --- what is let in -----------------------------------------------------------------------


@pytest.mark.parametrize("key", KINDS["api_keys"])
def test_either_of_two_api_keys_is_let_in_by_the_header_of_its_own_name(key):
    assert admits(guard("api_keys"), (HEADER, key))
    assert admits(guard("api_keys"), (HEADER.upper(), key))
    assert not admits(guard("api_keys"), ("X-Api-Key", key))


def test_the_header_of_an_api_key_is_x_api_key_unless_named():
    assert admits(
        guard("api_keys", api_key_header="x-api-key"), ("X-API-Key", "apple-key-of-a-mill")
    )
    assert AuthOptions().api_key_header == "x-api-key"


@pytest.mark.parametrize("pair", KINDS["basic"])
def test_either_of_two_basic_pairs_is_let_in_whatever_the_case_of_the_scheme(pair):
    name, value = basic(pair)
    for scheme in ("Basic", "basic", "BASIC"):
        assert admits(guard("basic"), (name, value.replace("Basic", scheme)))


@pytest.mark.parametrize("token", KINDS["bearer"])
def test_either_of_two_bearer_tokens_is_let_in(token):
    assert admits(guard("bearer"), bearer(token))
    assert admits(guard("bearer"), ("Authorization", f"bearer   {token}"))


@pytest.mark.parametrize("secret", KINDS["hmac"])
def test_a_signature_with_either_of_two_secrets_is_let_in(secret):
    body = event(1)
    assert admits(guard("hmac"), *signature(secret, body), body=body)
    assert admits(guard("hmac"), *signature(secret, b""), body=b"")


@pytest.mark.parametrize("client", KINDS["oauth"])
def test_a_client_gets_a_token_by_form_or_by_basic_and_is_let_in_with_it(client):
    door = guard("oauth")
    for asked in (token_request(client), token_request(basic_client=client)):
        answer = door.token(asked, HERE)
        assert answer.status == 200
        assert ("Cache-Control", "no-store") in answer.headers
        said = json.loads(answer.body)
        assert said["token_type"] == "Bearer"
        assert said["expires_in"] == 3600
        assert admits(door, bearer(said["access_token"]))


def test_any_one_kind_will_do_where_several_are_configured():
    door, body = guard(), event(1)
    for headers in (
        [(HEADER, "berry-key-of-a-mill")],
        [basic("mill:grain-in-the-sacks")],
        [bearer("pear-token-of-a-mill")],
        [bearer(issue(door))],
        [*signature("cedar-secret-of-the-wood", body)],
    ):
        assert admits(door, *headers, body=body)


def test_without_any_kind_everybody_is_let_in():
    assert admits(RequestAuthenticator(AuthOptions(), Clock()))


def test_a_secret_that_is_not_ascii_is_compared_as_its_bytes():
    door = RequestAuthenticator(
        AuthOptions(api_keys=(Secret("schlüssel-der-mühle"), Secret("k\udcff" * 9))), Clock()
    )
    for value in ("schlüssel-der-mühle".encode(), b"k\xff" * 9):
        asked = Request("POST", PATH, "", ((b"x-api-key", value),))
        assert door.admits(asked, with_body=False)


# --- what is not --------------------------------------------------------------------------

WRONG = {
    "nothing": [],
    "another key": [(HEADER, "cherry-key")],
    "an empty key": [(HEADER, "")],
    "the beginning of a key": [(HEADER, "apple-key-of-a-mil")],
    "more than a key": [(HEADER, "apple-key-of-a-mill2")],
    "a key in capitals": [(HEADER, "APPLE-KEY-OF-A-MILL")],
    "two keys": [(HEADER, "apple-key-of-a-mill"), (HEADER, "berry-key-of-a-mill")],
    "the same key twice": [(HEADER, "apple-key-of-a-mill"), (HEADER, "apple-key-of-a-mill")],
    "keys joined with a comma": [(HEADER, "apple-key-of-a-mill, berry-key-of-a-mill")],
    "a key as bearer": [bearer("apple-key-of-a-mill")],
    "a bearer token as key": [(HEADER, "plum-token-of-a-mill")],
    "another password": [basic("mill:flour")],
    "another user": [basic("miller:grain-in-the-sacks")],
    "a user alone": [basic("mill")],
    "an empty pair": [basic(":")],
    "a basic pair in clear": [("Authorization", "Basic mill:grain-in-the-sacks")],
    "basic that is not base64": [("Authorization", "Basic ***")],
    "a basic pair as bearer": [bearer("mill:grain-in-the-sacks")],
    "a client as basic": [basic("shop:chalk-on-the-board")],
    "a client as bearer": [bearer("shop:chalk-on-the-board")],
    "a bearer token as basic": [("Authorization", "Basic plum-token-of-a-mill")],
    "another bearer token": [bearer("fig-token")],
    "an empty bearer token": [bearer("")],
    "two bearer tokens": [bearer("plum-token-of-a-mill"), bearer("pear-token-of-a-mill")],
    "a good token beside a bad one": [bearer("plum-token-of-a-mill"), bearer("fig-token")],
    "a good token beside an unknown scheme": [
        bearer("plum-token-of-a-mill"),
        ("Authorization", "Digest username=mill"),
    ],
    "a good pair beside a good token": [
        basic("mill:grain-in-the-sacks"),
        bearer("plum-token-of-a-mill"),
    ],
    "a token without a scheme": [("Authorization", "plum-token-of-a-mill")],
    "a scheme alone": [("Authorization", "Bearer")],
    "a token in a header of another name": [("X-Authorization", "Bearer plum-token-of-a-mill")],
    "a secret as its own signature": [
        ("X-Oncebridge-Timestamp", str(NOW_S)),
        ("X-Oncebridge-Signature", "v1=cedar-secret-of-the-wood"),
    ],
    "an hmac secret as bearer": [bearer("cedar-secret-of-the-wood")],
    "an hmac secret as key": [(HEADER, "cedar-secret-of-the-wood")],
    "a token nobody issued": [bearer(f"{NOW_S + 60}.{'0' * 64}")],
    "a token without an end": [bearer("." + "0" * 64)],
    "half a token": [bearer(f"{NOW_S + 60}.")],
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_what_is_wrong_missing_or_given_twice_is_not_let_in(headers):
    assert not admits(guard(), *headers, body=event(1))


def test_a_secret_of_one_kind_does_not_open_the_door_of_another():
    body = event(1)
    texts = {text for own in KINDS.values() for text in own}
    for kind, own in KINDS.items():
        door = guard(kind)
        for text in texts - set(own):
            assert not admits(door, (HEADER, text))
            assert not admits(door, basic(text))
            assert not admits(door, bearer(text))
            assert not admits(door, *signature(text, body), body=body)
            if kind == "oauth":
                assert door.token(token_request(basic_client=text), HERE).status in (401, 429)


def test_a_signature_cannot_be_made_with_the_secret_of_another_kind():
    body, door = event(1), guard()
    for kind in set(KINDS) - {"hmac"}:
        for secret in KINDS[kind]:
            assert not admits(door, *signature(secret, body), body=body)


def test_a_signature_of_a_sender_is_no_token_and_a_token_no_signature():
    # One and the same secret for both: what it signs must not be mistaken for the other.
    both = (Secret("shop:chalk-on-the-board"),)
    door = RequestAuthenticator(AuthOptions(oauth=both, hmac=both), Clock())
    ends = NOW_S + 60
    _, (_, signed) = signature("shop:chalk-on-the-board", str(ends).encode())
    assert not admits(door, bearer(f"{ends}.{signed.removeprefix('v1=')}"))
    _, _, token = issue(door).partition(".")
    stamped = ("X-Oncebridge-Timestamp", str(NOW_S)), ("X-Oncebridge-Signature", f"v1={token}")
    assert not admits(door, *stamped, body=b"")


@pytest.mark.parametrize(
    ("apart_s", "is_let_in"), [(0, True), (300, True), (-300, True), (301, False), (-301, False)]
)
def test_a_signature_is_good_for_five_minutes_either_way(apart_s, is_let_in):
    body = event(1)
    signed = signature("cedar-secret-of-the-wood", body, NOW_S + apart_s)
    assert admits(guard("hmac"), *signed, body=body) is is_let_in


def test_a_signature_that_is_too_old_or_none_is_refused_before_the_body_is_read():
    door, body = guard("hmac"), event(1)
    stale = request(*signature("cedar-secret-of-the-wood", body, NOW_S - 301))
    assert not door.admits(stale, with_body=False)
    time_of_now, _ = signature("cedar-secret-of-the-wood", body)
    assert not door.admits(request(time_of_now, ("X-Oncebridge-Signature", "v1=")), with_body=False)
    fresh = request(*signature("cedar-secret-of-the-wood", body))
    assert door.admits(fresh, with_body=False)


BAD_SIGNATURES = {
    "no time": lambda time, signed: [signed],
    "no signature": lambda time, signed: [time],
    "the time twice": lambda time, signed: [time, time, signed],
    "the signature twice": lambda time, signed: [time, signed, signed],
    "a time with a sign": lambda time, signed: [(time[0], f"+{time[1]}"), signed],
    "a time with blanks inside": lambda time, signed: [(time[0], f"{time[1]} 0"), signed],
    "a time in other digits": lambda time, signed: [(time[0], "١٧٩"), signed],
    "an endless time": lambda time, signed: [(time[0], "9" * 5000), signed],
    "an empty time": lambda time, signed: [(time[0], ""), signed],
    "a second later": lambda time, signed: [(time[0], str(NOW_S + 1)), signed],
    "no version": lambda time, signed: [time, (signed[0], signed[1].removeprefix("v1="))],
    "another version": lambda time, signed: [time, (signed[0], signed[1].replace("v1", "v2"))],
    "capitals": lambda time, signed: [time, (signed[0], "v1=" + signed[1][3:].upper())],
    "cut short": lambda time, signed: [time, (signed[0], signed[1][:-1])],
    "an empty signature": lambda time, signed: [time, (signed[0], "v1=")],
}


@pytest.mark.parametrize("spoil", BAD_SIGNATURES.values(), ids=BAD_SIGNATURES)
def test_a_signature_that_is_not_whole_is_not_let_in(spoil):
    body = b'{"detail":{"order":7}}'
    headers = spoil(*signature("cedar-secret-of-the-wood", body))
    assert not admits(guard("hmac"), *headers, body=body)


@given(body=st.binary(max_size=200), other=st.binary(max_size=200))
def test_a_signature_holds_for_its_own_body_only(body, other):
    signed = signature("maple-secret-of-the-wood", body)
    assert admits(guard("hmac"), *signed, body=body)
    assert admits(guard("hmac"), *signed, body=other) is (body == other)


PLAIN = ("Content-Type", "application/json")
OTHER_READINGS = {
    "another type": [("Content-Type", "application/x-ndjson")],
    "no type": [],
    "packed": [PLAIN, ("Content-Encoding", "gzip")],
    "identity": [PLAIN, ("Content-Encoding", "identity")],
    "two types": [PLAIN, ("Content-Type", "application/x-ndjson")],
}


@pytest.mark.parametrize("others", OTHER_READINGS.values(), ids=OTHER_READINGS)
def test_a_signature_is_bound_to_how_its_body_was_first_read(others):
    known, body = guard("hmac"), b"[1,\n2]"
    signed = signature("cedar-secret-of-the-wood", body)
    for _ in range(2):
        assert admits(known, *signed, PLAIN, body=body)
        assert not admits(known, *signed, *others, body=body)
    assert admits(
        known, *signature("cedar-secret-of-the-wood", body, NOW_S + 1), *others, body=body
    )


def test_a_signature_is_bound_for_as_long_as_it_is_valid():
    clock, body = Clock(), b"{}"
    known = guard("hmac", clock=clock)
    assert admits(known, *signature("maple-secret-of-the-wood", b"first", NOW_S), body=b"first")
    clock.now_s += 299
    signed = signature("maple-secret-of-the-wood", body, clock.now_s + 300)
    assert admits(known, *signed, PLAIN, body=body)
    for _ in range(6):
        clock.now_s += 100
        assert admits(known, *signature("maple-secret-of-the-wood", b"x", clock.now_s), body=b"x")
        assert not admits(known, *signed, body=body)
        assert admits(known, *signed, PLAIN, body=body)
    clock.now_s += 1
    assert not admits(known, *signed, PLAIN, body=body), "it has expired"


def test_the_signatures_that_are_kept_have_a_limit(monkeypatch):
    monkeypatch.setattr("oncebridge.http.auth._MOST_SIGNATURES", 10)
    known = guard("hmac")
    for number in range(100):
        body = b"%d" % number
        assert admits(known, *signature("cedar-secret-of-the-wood", body), body=body)
        assert not admits(known, *signature("cedar-secret-of-the-wood", body), PLAIN, body=body)
        assert len(known._accepted._newer) + len(known._accepted._older) <= 10


@given(st.binary(max_size=20))
def test_a_signed_request_that_is_sent_again_as_it_was_is_let_in(body):
    known = guard("hmac")
    for _ in range(3):
        assert admits(known, *signature("cedar-secret-of-the-wood", body), PLAIN, body=body)


# --- tokens ------------------------------------------------------------------------------


def test_a_token_ends_after_an_hour():
    clock = Clock()
    door = guard("oauth", clock=clock)
    token = issue(door)
    clock.now_s += 3599
    assert admits(door, bearer(token))
    clock.now_s += 1
    assert not admits(door, bearer(token))


def test_a_token_outlasts_a_restart_and_not_the_secret_it_was_issued_for():
    token = issue(guard("oauth"), "desk:slate-on-the-roofs")
    assert admits(guard("oauth"), bearer(token))
    without = RequestAuthenticator(AuthOptions(oauth=(Secret("shop:chalk-on-the-board"),)), Clock())
    assert not admits(without, bearer(token))


@given(at=st.integers(0, 74), other=st.sampled_from("0123456789abcdefABCDEF.-_ "))
def test_a_token_that_was_tampered_with_is_not_let_in(at, other):
    door = guard("oauth")
    token = issue(door)
    at %= len(token)
    tampered = token[:at] + other + token[at + 1 :]
    assert admits(door, bearer(tampered)) is (tampered == token)


@pytest.mark.parametrize(
    "asked",
    [
        token_request("shop:slate-on-the-roofs"),
        token_request("desk:chalk-on-the-board"),
        token_request("nobody:chalk-on-the-board"),
        token_request(basic_client="shop:slate-on-the-roofs"),
        token_request(),
        token_request(client_id="shop"),
        token_request(client_secret="chalk-on-the-board"),
        token_request(client_id="shop", client_secret=""),
        token_request("shop:chalk-on-the-board", basic_client="shop:chalk-on-the-board"),
        request(("Authorization", "Basic ***"), body=b"grant_type=client_credentials"),
        request(
            basic("shop:chalk-on-the-board"),
            basic("shop:chalk-on-the-board"),
            body=b"grant_type=client_credentials",
        ),
    ],
)
def test_a_client_that_is_not_known_gets_no_token(asked):
    answer = guard("oauth").token(asked, HERE)
    assert answer.status == 401
    assert json.loads(answer.body) == {"error": "invalid_client"}
    assert dict(answer.headers)["WWW-Authenticate"].startswith("Basic")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"grant_type=password&client_id=shop&client_secret=chalk-on-the-board",
        b"grant_type=client_credentials&grant_type=client_credentials&client_id=shop",
        b"client_id=shop&client_secret=chalk-on-the-board",
        b"\xff\xfe\x00%zz=%",
        b'{"grant_type":"client_credentials"}',
        b"&" * 4096,
    ],
)
def test_a_token_is_issued_for_client_credentials_alone(body):
    answer = guard("oauth").token(request(body=body, path="/oauth/token"), HERE)
    assert answer.status == 400
    assert json.loads(answer.body) == {"error": "unsupported_grant_type"}


# --- over the wire ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clock():
    return Clock()


@pytest.fixture(scope="module")
def gate(tmp_path_factory, clock):
    flags = {f"source__{kind}": ",".join(texts) for kind, texts in KINDS.items()}
    with live(
        tmp_path_factory.mktemp("gate"), clock=clock, source__api_key_header=HEADER, **flags
    ) as running:
        yield running


@pytest.fixture
def untouched(gate):
    """Check that nothing reached the books, the store or the dead letters."""

    def seen():
        return gate.counts, gate.store.asked.copy(), len(gate.buried())

    before = None
    while before != (before := seen()):  # an earlier copy of a dead letter may still be counted
        time.sleep(0.05)
    yield
    assert seen() == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_a_refusal_is_a_401_and_touches_neither_store_nor_dead_letters(gate, headers):
    answer = gate.ask("POST", body=event(1), headers=headers)
    assert answer.status == 401
    assert (
        answer.headers["www-authenticate"] == 'Basic realm="oncebridge", Bearer realm="oncebridge"'
    )
    assert "error" in answer.json


@pytest.mark.usefixtures("untouched")
def test_an_event_that_was_changed_on_its_way_is_refused(gate):
    signed = signature("cedar-secret-of-the-wood", event(1))
    assert gate.ask("POST", body=event(2), headers=signed).status == 401
    assert gate.ask("POST", body=event(1) + b" ", headers=signed).status == 401


@pytest.mark.usefixtures("untouched")
def test_a_body_is_not_asked_for_when_the_head_gives_nobody_away(gate):
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 900\r\n\r\n"
    with gate.line() as line:
        line.sendall(head.encode())
        line.settimeout(5)
        assert line.recv(12) == b"HTTP/1.1 401"


@pytest.mark.usefixtures("untouched")
def test_a_body_that_is_too_large_is_a_401_for_a_stranger_and_a_413_for_a_friend(gate):
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {2**21 + 1}\r\n"
    friend = f"{HEADER}: apple-key-of-a-mill\r\n"
    for more, status in (("", 401), (friend, 413)):
        with gate.line() as line:
            line.sendall(f"{head}{more}\r\n".encode())
            assert read_answer(line).status == status


@pytest.mark.usefixtures("untouched")
def test_a_coding_that_is_not_known_is_a_401_for_a_stranger_and_a_415_for_a_friend(gate):
    for headers, status in (
        ({"Content-Encoding": "br"}, 401),
        (
            {"Content-Encoding": "br", HEADER: "apple-key-of-a-mill"},
            415,
        ),
    ):
        assert gate.ask("POST", body=b"x", headers=headers).status == status


@pytest.mark.parametrize("path", ["/oauth/token", "/healthz", "/readyz", "/openapi.json"])
def test_a_stranger_cannot_make_it_keep_more_than_a_form(gate, path):
    method = "POST" if path == "/oauth/token" else "GET"
    for framing, status in (("Content-Length: 4097", 413), ("Transfer-Encoding: chunked", 411)):
        with gate.line() as line:
            line.sendall(f"{method} {path} HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n".encode())
            assert read_answer(line).status == status


def test_events_pass_with_every_kind(gate, clock):
    bodies = [event(number) for number in range(100, 106)]
    packed = gzip.compress(bodies[5])
    answer = gate.ask("POST", "/oauth/token", token_request("shop:chalk-on-the-board").body)
    token = answer.json["access_token"]
    now = clock.now_s
    sent = [
        (bodies[0], [(HEADER, "berry-key-of-a-mill")]),
        (bodies[1], [basic("barn:straw:and:hay:and:oats")]),
        (bodies[2], [bearer("plum-token-of-a-mill")]),
        (bodies[3], [bearer(token)]),
        (bodies[4], [*signature("maple-secret-of-the-wood", bodies[4], now)]),
        (
            packed,
            [*signature("cedar-secret-of-the-wood", packed, now), ("Content-Encoding", "gzip")],
        ),
    ]
    for body, headers in sent:
        answer = gate.ask("POST", body=body, headers=headers)
        assert (answer.status, answer.verdicts) == (200, ["delivered"])


def test_a_packed_body_is_signed_as_it_is_sent(gate, clock):
    body = event(200)
    headers = [
        *signature("cedar-secret-of-the-wood", body, clock.now_s),
        ("Content-Encoding", "gzip"),
    ]
    assert gate.ask("POST", body=gzip.compress(body), headers=headers).status == 401


def test_a_signed_request_under_another_content_type_or_encoding_buries_nothing(gate, clock):
    body = b'{"not an event":\n1}\n{"nor":\n2}'
    signed = signature("cedar-secret-of-the-wood", body, clock.now_s)
    first = gate.ask("POST", body=body, headers=[*signed, PLAIN])
    assert (first.status, first.verdicts) == (200, ["dead"])
    buried = len(gate.buried())
    for others in OTHER_READINGS.values():
        answer = gate.ask("POST", body=body, headers=[*signed, *others])
        assert answer.status == 401
    assert len(gate.buried()) == buried
    assert gate.ask("POST", body=body, headers=[*signed, PLAIN]).status == 200


def test_a_token_is_refused_over_the_wire_when_its_hour_is_over(gate, clock):
    answer = gate.ask("POST", "/oauth/token", token_request("shop:chalk-on-the-board").body)
    headers = [bearer(answer.json["access_token"])]
    clock.now_s += 3601
    try:
        assert gate.ask("POST", body=event(300), headers=headers).status == 401
    finally:
        clock.now_s -= 3601


def test_health_is_told_to_everybody(gate):
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert gate.get(path).status == 200


# --- wrong clients -------------------------------------------------------------------------

GUESS = token_request("shop:slate-on-the-roofs").body
RIGHT = token_request("shop:chalk-on-the-board").body


def test_whoever_guesses_a_client_secret_is_told_to_wait_and_the_right_one_is_not(tmp_path, caplog):
    clock = Clock()
    with live(tmp_path, clock=clock, source__oauth="shop:chalk-on-the-board") as running:
        asked = [running.ask("POST", "/oauth/token", GUESS) for _ in range(12)]
        assert [answer.status for answer in asked] == [401] * 10 + [429] * 2
        assert asked[-1].retry_after == 60
        assert "correct the client_id" in asked[-1].json["error_description"]
        # who has the secret is let in, also from the address of somebody who has not
        assert running.ask("POST", "/oauth/token", RIGHT).status == 200
        assert running.ask("POST", "/oauth/token", GUESS).status == 429
        clock.now_s += 60
        assert running.ask("POST", "/oauth/token", GUESS).status == 401
    told = [record for record in caplog.records if record.msg == "oncebridge.oauth_client_refused"]
    assert [record.peer for record in told] == [HERE] * 11
    assert "slate" not in caplog.text


@pytest.mark.parametrize(
    ("proxies", "statuses"), [({}, {401, 429}), ({"source__trusted_proxies": HERE}, {401})]
)
def test_clients_are_told_apart_behind_proxies_that_are_named_and_no_others(
    tmp_path, proxies, statuses
):
    with live(tmp_path, source__oauth="shop:chalk-on-the-board", **proxies) as running:
        asked = [
            running.ask(
                "POST", "/oauth/token", GUESS, {"X-Forwarded-For": f"10.0.0.1, 198.51.100.{last}"}
            )
            for last in range(15)
        ]
    assert {answer.status for answer in asked} == statuses


@pytest.mark.parametrize("text", ["10.0.0.0/33", "proxy.example.com", "0.0.0.0/0", "::/0"])
def test_what_is_no_proxy_is_refused(text):
    with pytest.raises(ConfigError, match=r"source\.trusted_proxies"):
        load("http://127.0.0.1:1/events", trusted_proxies=f"10.0.0.1,{text}")


def test_tokens_are_issued_only_where_clients_are_configured(tmp_path):
    with live(tmp_path, source__bearer="plum-token-of-a-mill") as running:
        asked = token_request("shop:chalk-on-the-board").body
        assert running.ask("POST", "/oauth/token", asked).status == 404
        answer = running.ask("POST", body=event(1))
        assert answer.headers["www-authenticate"] == 'Bearer realm="oncebridge"'


# --- at the start -------------------------------------------------------------------------


def load(source, **flags):
    named = {f"source.{name}": text for name, text in flags.items()}
    return config.load(None, environment={}, flags={"source": source, "store": "memory:", **named})


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "[::]",
        "gate.example",
        "192.0.2.7",
        "10.0.0.1",
        "169.254.1.1",
        "[2001:db8::7]",
        "[fe80::1]",
        "[::ffff:0.0.0.0]",
        "127.0.0.1.gate.example",
        "localhost.gate.example",
    ],
)
def test_an_address_that_others_can_reach_needs_to_know_who_may_send(host):
    with pytest.raises(ConfigError, match="no auth is configured: set api_keys, basic, bearer"):
        load(f"http://{host}:8080/events")
    for kind, texts in KINDS.items():
        assert load(f"http://{host}:8080/events", **{kind: texts[0]})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "localhost", "LOCALHOST", "[::1]"])
def test_an_address_of_this_machine_alone_needs_nothing(host):
    assert load(f"http://{host}:8080/events")


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_secret_is_refused(kind, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    monkeypatch.setenv("MILL_EMPTY", "")
    monkeypatch.delenv("MILL_MISSING", raising=False)
    for text in (f"file:{empty}", "env:MILL_EMPTY", "env:MILL_MISSING", f"file:{tmp_path}/none"):
        with pytest.raises(ConfigError, match=kind):
            load("http://127.0.0.1:1/events", **{kind: text})
    file = tmp_path / "oncebridge.toml"
    file.write_text(f'[source]\nurl = "http://127.0.0.1:1/events"\n{kind} = [""]\n')
    with pytest.raises(ConfigError, match=kind):
        config.load(file, environment={})


@pytest.mark.parametrize("kind", ["basic", "oauth"])
@pytest.mark.parametrize("pair", [":", "mill:", ":grain", "millgrain"])
def test_a_pair_with_an_empty_half_is_refused_and_not_shown(kind, pair):
    with pytest.raises(ConfigError, match="two parts separated by a colon") as caught:
        RequestAuthenticator(
            AuthOptions(**{kind: (Secret("good:pair-of-two-parts"), Secret(pair))}), Clock()
        )
    assert caught.value.where == f"{kind}[1]"
    assert pair == ":" or pair not in str(caught.value)


@pytest.mark.parametrize("kind", ["api_keys", "bearer"])
@pytest.mark.parametrize(
    "text",
    [
        f"{text}-of-some-length{end}"
        for text, end in (
            (" key", ""),
            ("key", " "),
            ("two\nlines", ""),
            ("bell", "\a"),
            ("tab", "\t"),
        )
    ],
)
def test_a_secret_that_no_header_can_carry_is_refused_and_not_shown(kind, text):
    with pytest.raises(ConfigError, match="one line without spaces at its start or end") as caught:
        RequestAuthenticator(AuthOptions(**{kind: (Secret(text),)}), Clock())
    assert caught.value.where == f"{kind}[0]"
    assert text not in str(caught.value)


WEAK = {
    "15 characters": "fifteen-letters",
    "three": "qz7",
    "blanks": " " * 20,
    "lines": "\n" * 20,
    "short between blanks": "short".center(20),
}


@pytest.mark.parametrize("place", ["written", "variable", "file"])
@pytest.mark.parametrize("weak", WEAK.values(), ids=WEAK)
@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_that_can_be_guessed_is_refused_and_how_to_make_one_is_said(
    kind, weak, place, tmp_path, monkeypatch
):
    text = f"mill:{weak}" if kind in ("basic", "oauth") else weak
    (tmp_path / "weak").write_text(text)
    monkeypatch.setenv("MILL_WEAK", text)
    given = {"written": text, "variable": "env:MILL_WEAK", "file": f"file:{tmp_path}/weak"}[place]
    file = tmp_path / "oncebridge.toml"
    good = f"mill:{'x' * 16}"
    file.write_text(
        f'[source]\nurl = "http://127.0.0.1:1/events"\n{kind} = {json.dumps([good, given])}\n'
    )
    with pytest.raises(ConfigError) as caught:
        config.load(file, environment={})
    assert f"source.{kind}[1]: " in str(caught.value)
    is_cut_off = place == "file" and not weak.strip("\n")  # the end of a file is no part of it
    assert ("openssl rand -hex 24" in str(caught.value)) is not is_cut_off
    assert not weak.strip() or weak.strip() not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_characters_are_enough(kind):
    text = f"mill:{'x' * 16}" if kind in ("basic", "oauth") else "x" * 16
    assert load("http://127.0.0.1:1/events", **{kind: text})


@pytest.mark.parametrize("name", ["", "x key", "x-key:", "schlüssel", "x\r\ny"])
def test_what_is_no_name_of_a_header_is_refused(name):
    with pytest.raises(ConfigError, match="is not a header name"):
        RequestAuthenticator(
            AuthOptions(api_keys=(Secret("k" * 16),), api_key_header=name), Clock()
        )


def test_no_secret_is_shown_in_what_is_printed():
    shown = repr(options()) + str(guard().refusal())
    assert not [text for texts in KINDS.values() for text in texts if text in shown]


def test_telling_secrets_apart_takes_all_of_them_whichever_matches(monkeypatch):
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        "oncebridge.http.auth.hmac.compare_digest",
        lambda one, other: compared.append(other) or compare(one, other),
    )
    assert admits(guard("api_keys"), (HEADER, "apple-key-of-a-mill"))
    assert compared == [b"apple-key-of-a-mill", b"berry-key-of-a-mill"] * 2


def test_a_refusal_is_quick(gate):
    began = time.monotonic()
    for _ in range(20):
        assert gate.ask("POST", body=event(1)).status == 401
    assert time.monotonic() - began < 2
