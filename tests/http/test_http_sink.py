import asyncio
import base64
import hashlib
import hmac
import json
import socket
import ssl
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.http.targets import (
    OK,
    TLS,
    answering,
    closing_after,
    on_both_loops,
    read_request,
    refusing_port,
    reset,
    server_tls,
    serving,
)

from oncebridge import (
    Closed,
    ConfigError,
    Delivery,
    Gateway,
    Never,
    No,
    Settings,
    Throttled,
    Unknown,
    Unwell,
    Verdict,
    Yes,
    parse,
)
from oncebridge.base.secrets import Secret
from oncebridge.sinks.http import HttpSink, HttpSinkOptions, _encoded, _signature
from oncebridge.stores.memory import MemoryStore

NOW_MS = 1_700_000_000_123
KEY = bytes(range(32))
RAW = json.dumps(
    {
        "version": "0",
        "id": "6f1c2c1e-0000-4000-8000-00000000000a",
        "detail-type": "v2.detail.events.conversation.{id}.user.end",
        "source": "aws.partner/genesys.com/cloud/invented/bus",
        "account": "123456789012",
        "time": "2025-12-12T15:15:07Z",
        "region": "us-east-1",
        "resources": [],
        "detail": {"topicName": "v2.detail.events.conversation.c1.user.end", "n": 1.50},
    },
    indent=1,
).encode()


def secret_of(size, fill=b"k"):
    return Secret("whsec_" + base64.b64encode(fill * size).decode())


def delivery(raw=RAW, key=KEY, *, bare=False, **others):
    return Delivery(parse(raw, bare=bare), key, **others)


@asynccontextmanager
async def sink_of(url, **options):
    sink = HttpSink(url, HttpSinkOptions(**options), clock=lambda: NOW_MS)
    await sink.open()
    try:
        async with asyncio.timeout(10):
            yield sink
    finally:
        await sink.aclose()


async def sent(one=None, **options):
    """Deliver to a target that takes everything, and give the request as it arrived."""
    async with serving(answering()) as seen, sink_of(seen.url, **options) as sink:
        assert await sink.deliver([one or delivery()]) == [Yes()]
    (request,) = seen.requests
    return request


async def answer_to(raw, **options):
    """Deliver to a target that answers with *raw*."""
    async with serving(answering(raw)) as seen, sink_of(seen.url, **options) as sink:
        (answer,) = await sink.deliver([delivery()])
    assert len(seen.requests) == 1
    return answer


def status(number, *headers):
    lines = [f"HTTP/1.1 {number} Invented reason s3cret", *headers, "Content-Length: 6", "", ""]
    return "\r\n".join(lines).encode() + b"s3cret"


# --- what is sent -----------------------------------------------------------------------------


@on_both_loops
async def test_an_event_goes_out_as_it_came_in():
    async with serving(answering()) as seen, sink_of(seen.url) as sink:
        assert await sink.deliver([delivery()]) == [Yes()]
    (request,) = seen.requests
    assert request.body == RAW
    assert request.head.decode() == (
        "POST /hook HTTP/1.1\r\n"
        f"Host: localhost:{seen.port}\r\n"
        "Content-Type: application/json\r\n"
        "User-Agent: oncebridge\r\n"
        f'Idempotency-Key: "{KEY.hex()}"\r\n'
        f"Content-Length: {len(RAW)}\r\n"
        "\r\n"
    )


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
async def test_the_method_is_the_users_choice(method):
    request = await sent(method=method)
    assert request.line == f"{method} /hook HTTP/1.1"


async def test_the_key_is_quoted_bare_or_left_out():
    assert (await sent())["idempotency-key"] == f'"{KEY.hex()}"'
    assert (await sent(idempotency_key="quoted"))["idempotency-key"] == f'"{KEY.hex()}"'
    assert (await sent(idempotency_key="bare"))["idempotency-key"] == KEY.hex()
    assert "idempotency-key" not in await sent(idempotency_key="off")
    assert "idempotency-key" not in await sent(delivery(key=b""))


async def test_a_first_attempt_says_nothing_of_itself():
    request = await sent()
    assert not [name for name, _ in request.headers if name.lower().startswith("x-")]


async def test_what_is_special_about_a_delivery_is_said():
    request = await sent(delivery(attempt=3, version=17, unprotected=True))
    assert request["x-oncebridge-attempt"] == "3"
    assert request["x-oncebridge-version"] == "17"
    assert request["x-oncebridge"] == "unprotected"
    assert (await sent(delivery(version=0)))["x-oncebridge-version"] == "0"
    assert (await sent(delivery(version=1.5)))["x-oncebridge-version"] == "1.5"


async def test_headers_of_the_users_go_along_and_may_replace_what_is_usual():
    request = await sent(
        headers={
            "content-type": Secret("application/vnd.invented+json"),
            "USER-AGENT": Secret("invented/1"),
            "Authorization": Secret("Bearer s3cret"),
        }
    )
    assert request["content-type"] == "application/vnd.invented+json"
    assert request["user-agent"] == "invented/1"
    assert request["authorization"] == "Bearer s3cret"


async def test_user_and_password_of_the_url_go_along():
    async with serving(answering()) as seen:
        url = f"http://user:p%40ss@localhost:{seen.port}/hook?token=abc"
        async with sink_of(url) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]
    (request,) = seen.requests
    assert request["authorization"] == "Basic " + base64.b64encode(b"user:p@ss").decode()
    assert request.line == "POST /hook?token=abc HTTP/1.1"


async def test_a_batch_gets_one_answer_for_each_in_order():
    script = answering(OK, status(503), status(422), OK)
    async with serving(script) as seen, sink_of(seen.url) as sink:
        answers = await sink.deliver([delivery() for _ in range(4)])
    assert answers == [Yes(), Unwell("HTTP 503"), Never("HTTP 422"), Yes()]
    assert (seen.connections, len(seen.requests)) == (1, 4)


# --- signatures -------------------------------------------------------------------------------


def test_a_signature_is_that_of_standard_webhooks():
    # The example that implementations of Standard Webhooks are tested with.
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    assert _signature("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, [key]) == [
        ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
        ("webhook-timestamp", "1614265330"),
        ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
    ]


@pytest.mark.parametrize("sizes", [(24,), (64,), (32, 48)])
async def test_a_receiver_can_verify_the_signature(sizes):
    request = await sent(sign=tuple(secret_of(size) for size in sizes))
    assert request["webhook-id"] == KEY.hex()
    assert request["webhook-timestamp"] == str(NOW_MS // 1000)
    signatures = request["webhook-signature"].split(" ")
    assert len(signatures) == len(sizes)
    signed = f"{request['webhook-id']}.{request['webhook-timestamp']}.".encode() + request.body
    for size, signature in zip(sizes, signatures, strict=True):
        version, _, digest = signature.partition(",")
        assert version == "v1"
        expected = hmac.new(b"k" * size, signed, hashlib.sha256).digest()
        assert hmac.compare_digest(base64.b64decode(digest), expected)


async def test_every_attempt_is_signed_anew_under_the_same_id():
    now = [NOW_MS]
    options = HttpSinkOptions(sign=(secret_of(32),))
    async with serving(answering()) as seen:
        sink = HttpSink(seen.url, options, clock=lambda: now[0])
        await sink.deliver([delivery()])
        now[0] += 60_000
        await sink.deliver([delivery(attempt=2)])
        await sink.aclose()
    first, second = seen.requests
    assert first["webhook-id"] == second["webhook-id"]
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == 60
    assert first["webhook-signature"] != second["webhook-signature"]


async def test_an_event_without_a_key_is_named_by_its_bytes():
    options = {"sign": (secret_of(32),), "cloudevents": True}
    name = hashlib.sha256(RAW).hexdigest()
    for attempt in (1, 2):
        request = await sent(delivery(key=b"", attempt=attempt), **options)
        assert request["webhook-id"] == request["ce-id"] == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whsec_",
        "s3cret",
        base64.b64encode(b"s3cret" * 6).decode(),
        "whsec_" + base64.b64encode(b"s" * 23).decode(),
        "whsec_" + base64.b64encode(b"s" * 65).decode(),
        "whsec_" + base64.b64encode(b"s" * 32).decode().rstrip("="),
        "whsec_" + base64.b64encode(b"s" * 32).decode() + "\n",
        "whsec_" + "ä" * 40,
        "whpk_" + base64.b64encode(b"s" * 32).decode(),
    ],
)
def test_a_secret_that_cannot_sign_is_refused_and_not_quoted(text):
    options = HttpSinkOptions(sign=(secret_of(32), Secret(text)))
    with pytest.raises(ConfigError, match="whsec_ followed by") as caught:
        HttpSink.from_url("https://hooks.example/", options)
    assert caught.value.where == "sign[1]"
    assert len(text) < 7 or text[6:] not in str(caught.value)


# --- CloudEvents ------------------------------------------------------------------------------


def attributes(request):
    return {name: value for name, value in request.headers if name.startswith("ce-")}


async def test_a_cloud_event_has_its_attributes_in_headers_and_the_bytes_as_data():
    request = await sent(cloudevents=True)
    assert attributes(request) == {
        "ce-specversion": "1.0",
        "ce-id": KEY.hex(),
        "ce-source": "aws.partner/genesys.com/cloud/invented/bus",
        "ce-type": "v2.detail.events.conversation.{id}.user.end",
        "ce-subject": "v2.detail.events.conversation.c1.user.end",
        "ce-time": "2025-12-12T15:15:07Z",
    }
    assert request["content-type"] == "application/json"
    assert request.body == RAW


def enveloped(**fields):
    envelope = {"source": "s", "detail-type": "t", "detail": {"n": 1}} | fields
    return json.dumps(envelope).encode()


async def test_an_event_without_an_envelope_is_a_cloud_event_all_the_same():
    request = await sent(delivery(b'{"n": 1}', bare=True), cloudevents=True)
    assert attributes(request) == {
        "ce-specversion": "1.0",
        "ce-id": KEY.hex(),
        "ce-source": "oncebridge",
        "ce-type": "event",
    }


@pytest.mark.parametrize(
    ("time", "is_sent"),
    [
        ("2025-12-12T15:15:07Z", True),
        ("2025-12-12T15:15:07.919Z", True),
        ("2025-12-12T15:15:07.123456789+05:30", True),
        ("2025-12-12", False),
        ("2025-12-12T15:15:07", False),
        ("2025-12-12 15:15:07Z", False),
        ("2025-13-12T15:15:07Z", False),
        ("2025-12-12T25:15:07Z", False),
        ("2025-12-12T15:15:07Z\r\nX-A: b", False),
        ("٢025-12-12T15:15:07Z", False),
        ("yesterday", False),
        ("", False),
        (7, False),
        (None, False),
    ],
)
async def test_a_time_is_sent_when_it_is_one(time, is_sent):
    request = await sent(delivery(enveloped(time=time)), cloudevents=True)
    assert attributes(request).get("ce-time") == (time if is_sent else None)


@pytest.mark.parametrize("topic", [None, 7, "", ["x"], {"x": 1}])
async def test_a_topic_that_is_no_text_is_no_subject(topic):
    one = delivery(enveloped(detail={"topicName": topic}))
    assert "ce-subject" not in await sent(one, cloudevents=True)


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("plain-{id}/~!#$&'()*+,:;=?@[]^_`|", "plain-{id}/~!#$&'()*+,:;=?@[]^_`|"),
        ("two words", "two%20words"),
        ('a "quote"', "a%20%22quote%22"),
        ("100%", "100%25"),
        ("%20", "%2520"),
        ("Euro € 😀", "Euro%20%E2%82%AC%20%F0%9F%98%80"),
        ("a\r\nX-Injected: b", "a%0D%0AX-Injected:%20b"),
        ("\0\t\x7f\x85", "%00%09%7F%C2%85"),
    ],
)
async def test_attributes_are_percent_encoded_as_the_binding_says(text, encoded):
    one = delivery(enveloped(source=text, detail={"topicName": text}, **{"detail-type": text}))
    request = await sent(one, cloudevents=True)
    assert [request[f"ce-{name}"] for name in ("source", "type", "subject")] == [encoded] * 3


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_can_be_read_back_from_a_header(text):
    from urllib.parse import unquote

    encoded = _encoded(text)
    assert unquote(encoded, errors="strict") == text
    assert all("!" <= character <= "~" and character != '"' for character in encoded)


@pytest.mark.parametrize("options", [{}, {"cloudevents": True}, {"sign": (secret_of(32),)}])
async def test_nothing_of_an_event_gets_into_a_header_as_it_is(options):
    nasty = 'x"\r\nX-Injected: yes\r\n\r\nPOST /other HTTP/1.1\r\n'
    one = delivery(
        enveloped(
            id=nasty,
            source=nasty,
            time=nasty,
            detail={"topicName": nasty},
            **{"detail-type": nasty},
        )
    )
    request = await sent(one, **options)
    assert "x-injected" not in request
    assert request.body == one.event.raw
    assert b"\r\nX-Injected" not in request.head


# --- what comes back --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [200, 201, 202, 204, 299])
async def test_any_2xx_is_a_yes(number):
    assert await answer_to(status(number)) == Yes()


@pytest.mark.parametrize("number", [408, 409, 425, 500, 501, 505, 599, 600, 999])
async def test_what_may_have_worked_is_unknown(number):
    answer = await answer_to(status(number, "Retry-After: 7"))
    assert answer == Unknown(f"HTTP {number}", 7000)


@pytest.mark.parametrize("number", [502, 504])
async def test_a_sink_in_trouble_says_so(number):
    assert await answer_to(status(number)) == Unwell(f"HTTP {number}")
    assert await answer_to(status(number, "Retry-After: 7")) == Unwell(f"HTTP {number}", 7000)


async def test_throttling_is_told_from_failure():
    assert await answer_to(status(429)) == Throttled("HTTP 429")
    assert await answer_to(status(429, "Retry-After: 7")) == Throttled("HTTP 429", 7000)
    assert await answer_to(status(503, "Retry-After: 7")) == Throttled("HTTP 503", 7000, maybe=True)
    assert await answer_to(status(503)) == Unwell("HTTP 503")


@pytest.mark.parametrize("number", [401, 403, 404, 407, 410])
async def test_a_shut_door_is_no_fault_of_the_events(number):
    assert await answer_to(status(number)) == Closed(f"HTTP {number}")
    answer = await answer_to(status(number, "Retry-After: 7"))
    assert answer == Closed(f"HTTP {number}", 7000)


@pytest.mark.parametrize("number", [400, 402, 405, 406, 411, 413, 415, 422, 431, 451, 499])
async def test_any_other_4xx_is_final(number):
    assert await answer_to(status(number, "Retry-After: 7")) == Never(f"HTTP {number}")


@pytest.mark.parametrize("number", [300, 301, 302, 303, 304, 307, 308])
async def test_a_redirect_is_final_and_not_followed(number):
    async with serving(answering()) as other:
        answer = await answer_to(status(number, f"Location: {other.url}?s3cret"))
        assert answer == Never(f"HTTP {number}: redirects are not followed")
        assert other.connections == 0


async def test_a_switch_of_protocols_nobody_asked_for_is_unknown():
    raw = b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
    assert await answer_to(raw) == Unknown("HTTP 101")


@pytest.mark.parametrize(
    ("value", "asked_ms"),
    [
        ("0", 0),
        ("1", 1000),
        (" 120 ", 120_000),
        ("86400", 86_400_000),
        ("86401", 86_400_000),
        ("9" * 5000, 86_400_000),
        ("-1", 0),
        ("-9999999999", 0),
        ("1.5", 0),
        ("1e3", 0),
        ("+5", 0),
        ("٣", 0),
        ("5, 6", 0),
        ("soon", 0),
        ("\udcb2", 0),  # a raised 2 in Latin-1, a digit but no number
        ("", 0),
        # now is Tue, 14 Nov 2023 22:13:20.123 GMT
        ("Tue, 14 Nov 2023 22:14:20 GMT", 59_877),
        ("Tuesday, 14-Nov-23 22:14:20 GMT", 59_877),
        ("Tue Nov 14 22:14:20 2023", 59_877),
        ("Tue, 14 Nov 2023 23:14:20 +0100", 59_877),
        ("Tue, 14 Nov 2023 22:13:20 GMT", 0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400_000),
        ("Tue, 99 Nov 2023 22:14:20 GMT", 0),
        ("Tue, 14 Nov 2023 22:14:20 -9999", 0),
        ("Tue, 14 Nov 99999 22:14:20 GMT", 0),
        ("Mon, 01 Jan 0000 00:00:00 GMT", 0),
        (",", 0),
    ],
)
async def test_retry_after_is_read_and_bounded(value, asked_ms):
    raw = status(503).replace(
        b"\r\n", b"\r\nRetry-After: " + value.encode(errors="surrogateescape") + b"\r\n", 1
    )
    assert await answer_to(raw) == Throttled("HTTP 503", asked_ms, maybe=True)


async def reset_after_reading(seen, reader, writer):
    await read_request(reader)
    reset(writer)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (reset_after_reading, "connection reset"),
        (closing_after(), "connection closed without an answer"),
        (closing_after(OK[:-1]), "connection closed in the middle of the answer"),
        (closing_after(b"s3cret\r\n"), "the answer is not HTTP"),
    ],
    ids=["reset", "end", "half", "garbage"],
)
@on_both_loops
async def test_a_request_without_a_whole_answer_is_unknown(script, reason):
    async with serving(script) as seen, sink_of(seen.url) as sink:
        assert await sink.deliver([delivery()]) == [Unknown(reason)]


@on_both_loops
async def test_a_target_that_is_not_there_is_a_no_and_does_not_stop_the_start():
    with refusing_port() as port:
        async with sink_of(f"http://localhost:{port}/") as sink:
            assert await sink.deliver([delivery()]) == [No("connection refused")]


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "0", "[::ffff:127.0.0.1]"])
async def test_a_hidden_way_inwards_is_a_no(host):
    async with serving(answering()) as seen:
        url = f"http://{host}:{seen.port}/"
        async with sink_of(url, allow_http=True) as sink:
            (answer,) = await sink.deliver([delivery()])
        assert isinstance(answer, No)
        assert "allow_private = true" in answer.reason
        assert seen.connections == 0
        if ":" not in host:
            async with sink_of(url, allow_http=True, allow_private=True) as sink:
                assert await sink.deliver([delivery()]) == [Yes()]


@pytest.mark.parametrize("host", ["10.1.2.3", "169.254.169.254", "[fd00:ec2::254]", "[fe80::1]"])
async def test_a_private_target_is_a_no(host):
    async with sink_of(f"https://{host}/") as sink:
        (answer,) = await sink.deliver([delivery()])
    assert isinstance(answer, No)
    assert "allow_private = true" in answer.reason


# --- TLS --------------------------------------------------------------------------------------

CA = str(TLS / "ca.pem")


@on_both_loops
async def test_a_trusted_target_is_a_yes():
    async with serving(answering(), tls=server_tls()) as seen:
        async with sink_of(seen.url, ca_file=CA) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]
        assert seen.requests[0].body == RAW


@on_both_loops
async def test_an_untrusted_target_is_a_no():
    async with serving(answering(), tls=server_tls()) as seen, sink_of(seen.url) as sink:
        (answer,) = await sink.deliver([delivery()])
    assert isinstance(answer, No)
    assert answer.reason.startswith("certificate verify failed: ")
    assert not seen.requests


@on_both_loops
async def test_a_target_with_another_name_is_a_no():
    tls = server_tls("elsewhere")
    async with serving(answering(), tls=tls) as seen, sink_of(seen.url, ca_file=CA) as sink:
        (answer,) = await sink.deliver([delivery()])
    assert isinstance(answer, No)
    assert "Hostname mismatch" in answer.reason
    assert not seen.requests


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@on_both_loops
async def test_a_target_that_asks_for_a_certificate_gets_it(version):
    tls = server_tls(asks_for_certificate=True)
    tls.minimum_version = tls.maximum_version = version
    options = {"ca_file": CA, "cert_file": str(TLS / "client.pem")}
    async with serving(answering(), tls=tls) as seen, sink_of(seen.url, **options) as sink:
        assert await sink.deliver([delivery()]) == [Yes()]
    assert len(seen.requests) == 1


def refusing(listener, version):
    """Refuse the client's certificate, and say so before the connection ends."""
    tls = server_tls(asks_for_certificate=True)
    tls.minimum_version = tls.maximum_version = version
    plain, _ = listener.accept()
    with plain:
        with pytest.raises(ssl.SSLError):
            # On a copy, so that the end of TLS is not the end of the connection.
            tls.wrap_socket(plain.dup(), server_side=True)
        while plain.recv(65536):
            pass


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("name", [None, "stranger"])
@on_both_loops
async def test_a_target_that_refuses_our_certificate_has_got_nothing(version, name):
    cert_file = name and str(TLS / f"{name}.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        target = asyncio.ensure_future(asyncio.to_thread(refusing, listener, version))
        url = f"https://localhost:{listener.getsockname()[1]}/"
        async with sink_of(url, ca_file=CA, cert_file=cert_file) as sink:
            (answer,) = await sink.deliver([delivery()])
        await target
    assert isinstance(answer, No), answer
    assert "alert" in answer.reason


@pytest.mark.parametrize(
    ("options", "where", "says"),
    [
        ({"ca_file": "/no/such/file.pem"}, "ca_file", "No such file"),
        ({"ca_file": __file__}, "ca_file", "cannot be used"),
        ({"ca_file": "a\0b"}, "ca_file", "cannot be used"),
        ({"cert_file": "/no/such/file.pem"}, "cert_file", "No such file"),
        ({"cert_file": CA}, "cert_file", "cannot be used"),
        ({"cert_file": str(TLS / "locked.pem")}, "cert_file", "cannot be used"),
        (
            {"cert_file": str(TLS / "client.pem"), "key_file": str(TLS / "stranger.pem")},
            "cert_file",
            "KEY_VALUES_MISMATCH",
        ),
    ],
)
async def test_a_file_that_cannot_be_used_is_named_at_the_start(options, where, says):
    sink = HttpSink.from_url("https://hooks.example/", HttpSinkOptions(**options))
    with pytest.raises(ConfigError, match=says) as caught:
        await sink.open()
    assert caught.value.where == where
    await sink.aclose()


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("Idempotency-Key", "s3cret", "is set for each event"),
        ("idempotency-key", "s3cret", "is set for each event"),
        ("X-Oncebridge", "s3cret", "is set for each event"),
        ("x-oncebridge-attempt", "s3cret", "is set for each event"),
        ("Host", "s3cret", "client itself"),
        ("content-length", "s3cret", "client itself"),
        ("Transfer-Encoding", "s3cret", "client itself"),
        ("X-A", "s3cret\r\nX-B: b", "line break"),
        ("X-A", "s3cret\n", "line break"),
        ("X-A", "s3cret\0", "line break"),
        ("X-A", "s3cret ż", "Latin-1"),
        ("X A", "s3cret", "not the name"),
        ("", "s3cret", "not the name"),
        ("X-A\r\nX-B", "s3cret", "not the name"),
        ("webhook-signature", "s3cret", "set by sign"),
        ("CE-Anything", "s3cret", "set by cloudevents"),
    ],
)
def test_a_header_that_cannot_be_is_refused_and_not_quoted(name, value, says):
    options = HttpSinkOptions(
        headers={name: Secret(value)}, sign=(secret_of(32),), cloudevents=True
    )
    with pytest.raises(ConfigError, match=says) as caught:
        HttpSink.from_url("https://hooks.example/", options)
    assert caught.value.where == f"headers.{name}"
    assert "s3cret" not in str(caught.value)


async def test_headers_that_are_not_ours_at_the_moment_are_the_users():
    request = await sent(headers={"ce-id": Secret("1"), "webhook-id": Secret("2")})
    assert (request["ce-id"], request["webhook-id"]) == ("1", "2")


@pytest.mark.parametrize(
    ("url", "options", "where", "says"),
    [
        ("http://hooks.example/s3cret", {}, "", "allow_http = true"),
        ("http://10.0.0.1/s3cret", {"allow_private": True}, "", "allow_http = true"),
        ("http://127.1/s3cret", {}, "", "allow_http = true"),
        ("http://localhost.example/s3cret", {}, "", "allow_http = true"),
        ("https:///s3cret", {}, "", "no host"),
        ("https://hooks.example/s3cret#a", {}, "", "fragment"),
        ("ftp://hooks.example/s3cret", {}, "", "https://"),
        ("https://hooks.example/s3cret\r\nX-A: b", {}, "", "space"),
        ("https://hööks.example/s3cret", {}, "", "ASCII"),
        ("https://u:s3cret@hooks.example:x/", {}, "", "port"),
        ("https://h.example", {"concurrency": 0}, "concurrency", "at least 1"),
        ("https://h.example", {"key_file": "x"}, "key_file", "cert_file"),
        ("http://localhost", {"ca_file": "x"}, "ca_file", "https://"),
        ("https://h.example", {"ca_file": ""}, "ca_file", "empty"),
        ("http://localhost", {"cert_file": "x"}, "cert_file", "https://"),
        (
            "https://h.example",
            {"headers": {"A": Secret("1"), "a": Secret("2")}},
            "headers",
            "twice",
        ),
        (
            "https://u:s3cret@h.example",
            {"headers": {"authorization": Secret("s3cret")}},
            "headers.Authorization",
            "already has a user",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(url, options, where, says):
    with pytest.raises(ConfigError, match=says) as caught:
        HttpSink.from_url(url, HttpSinkOptions(**options))
    assert caught.value.where == where
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("https://hooks.example/x?y=z", {}),
        ("http://hooks.example/", {"allow_http": True}),
        ("http://localhost:8080", {}),
        ("http://127.0.0.1:8080", {}),
        ("http://[::1]:8080", {}),
    ],
)
async def test_settings_that_can_work_are_taken(url, options):
    sink = HttpSink.from_url(url, HttpSinkOptions(**options))
    await sink.open()
    await sink.open()
    await sink.aclose()


async def test_defaults_are_as_documented():
    sink = HttpSink.from_url("https://hooks.example/")
    assert (sink.batch, sink.concurrency) == (1, 64)
    assert HttpSink.Options is HttpSinkOptions
    assert HttpSink.from_url("https://h.example", HttpSinkOptions(concurrency=3)).concurrency == 3
    await sink.aclose()


def test_every_option_says_what_it_does():
    from typing import get_args, get_type_hints

    from oncebridge.base.options import Doc

    for name, hint in get_type_hints(HttpSinkOptions, include_extras=True).items():
        docs = [extra for extra in get_args(hint)[1:] if isinstance(extra, Doc)]
        assert len(docs) == 1, name
        assert docs[0].text.endswith("."), name


def test_a_sink_shows_no_secret():
    secrets = {"headers": {"Authorization": Secret("s3cret")}, "sign": (secret_of(32, b"s"),)}
    options = HttpSinkOptions(**secrets)
    sink = HttpSink.from_url("https://hooks.example/s3cret", options)
    shown = f"{options!r} {sink!r} {sink._target!r}"
    assert "s3cret" not in shown
    assert secret_of(32, b"s").reveal()[6:] not in shown


async def test_closing_twice_and_using_again_is_harmless():
    async with serving(answering()) as seen:
        sink = HttpSink.from_url(seen.url)
        for _ in range(2):
            assert await sink.deliver([delivery()]) == [Yes()]
            await sink.aclose()
            await sink.aclose()
        await seen.until(lambda: seen.closed == 2)
    assert seen.connections == 2


# --- behind the gateway -----------------------------------------------------------------------


@on_both_loops
async def test_behind_a_gateway_an_event_arrives_once_and_under_one_key():
    script = answering(status(500), status(429, "Retry-After: 0"), OK)
    settings = Settings(backoff=timedelta(milliseconds=1), max_backoff=timedelta(milliseconds=1))
    async with serving(script) as seen:
        gateway = Gateway(store=MemoryStore(), sink=HttpSink(seen.url), settings=settings)
        try:
            verdicts = []
            async with asyncio.timeout(10):
                while not verdicts or verdicts[-1] != Verdict.DUPLICATE:
                    (outcome,) = await gateway.process([RAW])
                    verdicts.append(outcome.verdict)
                    await asyncio.sleep(outcome.retry_after_ms / 1000)
        finally:
            await gateway.aclose()
    assert [v for v in verdicts if v != Verdict.BUSY] == [
        *(Verdict.FAILED, Verdict.FAILED, Verdict.DELIVERED, Verdict.DUPLICATE)
    ]
    assert len({request["idempotency-key"] for request in seen.requests}) == 1
    attempts = [dict(r.headers).get("X-Oncebridge-Attempt") for r in seen.requests]
    assert attempts == [None, "2", "2"], "what is throttled is no attempt"


@on_both_loops
async def test_a_target_that_is_too_slow_is_left_and_its_connection_closed():
    async def script(seen, reader, writer):
        await read_request(reader)
        await reader.read()

    settings = Settings(sink_timeout=timedelta(milliseconds=30))
    async with serving(script) as seen:
        gateway = Gateway(store=MemoryStore(), sink=HttpSink(seen.url), settings=settings)
        try:
            (outcome,) = await gateway.process([RAW])
            await seen.until(lambda: seen.closed == 1)
        finally:
            await gateway.aclose()
    assert outcome.verdict == Verdict.FAILED
    assert outcome.reason == "no answer within 0.03 s"


def test_the_keys_in_this_folder_are_for_tests_only():
    names = sorted(path.name for path in Path(TLS).iterdir())
    assert names == sorted(
        f"{name}.pem" for name in ("ca", "client", "elsewhere", "localhost", "locked", "stranger")
    )
