import asyncio
import base64
import contextlib
import socket
import ssl
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.http.targets import (
    OK,
    TLS,
    Seen,
    answering,
    closing_after,
    on_both_loops,
    read_request,
    refusing_port,
    reset,
    server_tls,
    serving,
)

from oncebridge.http.client import (
    Client,
    ClientResponse,
    NotSent,
    Unclear,
    _ClientConnection,
    _Pool,
)
from oncebridge.http.target import HttpTarget

LONG = timedelta(hours=1)


@contextlib.asynccontextmanager
async def client_of(target, **settings):
    """A client, closed at the end; nothing in a test may take longer than this allows."""
    url = target.url if isinstance(target, Seen) else target
    client = Client(url, **settings)
    try:
        async with asyncio.timeout(10):
            yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def met(script, **settings):
    """A target with *script*, and a client for it."""
    async with serving(script) as seen, client_of(seen, **settings) as client:
        yield seen, client


# --- requests ---------------------------------------------------------------------------------


@on_both_loops
async def test_a_request_is_written_just_so():
    async with serving(answering()) as seen:
        url = f"http://us%40er:p%C3%A4ss%3A@localhost:{seen.port}/a/b;c?d=e&f=%20"
        async with client_of(url, headers=[("Content-Type", "text/x")]) as client:
            answer = await client.post(b"body", [("X-One", "1"), ("X-Two", "ä\t2")], method="PUT")
    assert answer == ClientResponse(200, {b"content-length": b"2"}, b"ok")
    credentials = base64.b64encode("us@er:päss:".encode()).decode()
    (request,) = seen.requests
    assert request.head.decode("latin-1") == (
        "PUT /a/b;c?d=e&f=%20 HTTP/1.1\r\n"
        f"Host: localhost:{seen.port}\r\n"
        "Content-Type: text/x\r\n"
        f"Authorization: Basic {credentials}\r\n"
        "X-One: 1\r\n"
        "X-Two: ä\t2\r\n"
        "Content-Length: 4\r\n"
        "\r\n"
    )
    assert request.body == b"body"


@pytest.mark.parametrize("body", [b"", b"\0\r\n\r\n", b"x" * 5_000_000], ids=["no", "odd", "large"])
@on_both_loops
async def test_a_body_arrives_byte_for_byte(body):
    async with met(answering()) as (seen, client):
        assert (await client.post(body)).status == 200
        assert (await client.post(body)).status == 200
    assert [request.body for request in seen.requests] == [body, body]
    assert seen.connections == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-A", "a\r\nX-B: b"),
        ("X-A", "a\nb"),
        ("X-A", "a\rb"),
        ("X-A", "a\0b"),
        ("X-A", "a\x7f"),
        ("X-A", "\x1b[31m"),
        ("X-A", "zażółć"),
        ("X-A", "\ud800"),
        ("X A", "a"),
        ("X-A:", "a"),
        ("X-A\r\nX-B", "b"),
        ("", "a"),
        ("Ä", "a"),
        ("Host", "elsewhere.example"),
        ("content-length", "0"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
    ],
)
async def test_a_header_that_would_change_the_request_is_refused_before_anything_is_sent(
    name, value
):
    async with met(answering()) as (seen, client):
        for _ in range(2):  # the client remembers good names, never bad ones
            with pytest.raises(ValueError, match="header") as caught:
                await client.post(b"", [("X-Good", "1"), (name, value)])
            assert not value or len(value) == 1 or value not in str(caught.value)
        with pytest.raises(ValueError, match="header"):
            Client(seen.url, headers=[(name, value)])
        await client.post(b"", [("X-A", "fine")])
        with pytest.raises(ValueError, match="header"):
            await client.post(b"", [("X-A", "a"), (name, value)])
    assert len(seen.requests) == 1


async def test_a_method_that_is_none_is_refused():
    async with met(answering()) as (seen, client):
        with pytest.raises(ValueError, match="method"):
            await client.post(b"", method="GET / HTTP/1.1\r\nX: ")
    assert seen.connections == 0


# --- other methods and paths ------------------------------------------------------------------


def answering_heads(*answers):
    """Answer requests without a body, one after the other."""
    left = list(answers)

    async def script(seen, reader, writer):
        while left and (head := await reader.readuntil(b"\r\n\r\n")):
            seen.requests.append(head)
            writer.write(left.pop(0))
            await writer.drain()
        await reader.read()

    return script


@on_both_loops
async def test_a_request_goes_to_the_path_it_names():
    async with met(answering(), headers=[("X-Fixed", "f")]) as (seen, client):
        answer = await client.request("DELETE", "/other%20place?a=b", b"body", [("X-One", "1")])
        await client.post(b"")
    assert answer == ClientResponse(200, {b"content-length": b"2"}, b"ok")
    assert seen.connections == 1
    one, two = seen.requests
    assert one.head.decode() == (
        "DELETE /other%20place?a=b HTTP/1.1\r\n"
        f"Host: localhost:{seen.port}\r\n"
        "X-Fixed: f\r\n"
        "X-One: 1\r\n"
        "Content-Length: 4\r\n"
        "\r\n"
    )
    assert one.body == b"body"
    assert two.line == "POST /hook HTTP/1.1"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_request_without_a_body_says_nothing_of_one(method):
    empty = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    async with met(answering_heads(empty)) as (seen, client):
        assert (await client.request(method, "/a")).status == 200
    head = f"{method} /a HTTP/1.1\r\nHost: localhost:{seen.port}\r\n\r\n"
    assert seen.requests == [head.encode()]


@on_both_loops
async def test_no_body_is_waited_for_after_head_and_the_connection_stays():
    head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nETag: abc\r\n\r\n"
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    script = answering_heads(head % (200, 5_000), early + head % (404, 300), head % (204, 0), OK)
    async with met(script) as (seen, client):
        first = await client.request("HEAD", "/a")
        assert (first.status, first.body, first.headers[b"etag"]) == (200, b"", b"abc")
        assert first.headers[b"content-length"] == b"5000"
        assert (await client.request("HEAD", "/b")).status == 404
        assert (await client.request("HEAD", "/b")).status == 204
        assert (await client.request("GET", "/b")).body == b"ok"
        assert seen.connections == 1


@on_both_loops
async def test_a_body_after_head_is_no_answer_to_the_next_request():
    script = answering_heads(OK, OK)
    async with met(script) as (seen, client):
        assert (await client.request("HEAD", "/a")).body == b""
        assert (await client.request("GET", "/a")).body == b"ok"
    assert seen.connections == 2


@pytest.mark.parametrize("path", ["", "a", "/a b", "/ä", "/a\r\nX: y", "//\\"])
async def test_a_path_that_would_change_the_request_is_refused_before_anything_is_sent(path):
    async with met(answering()) as (seen, client):
        with pytest.raises(ValueError, match="percent-encoded"):
            await client.request("GET", path)
    assert seen.connections == 0


# --- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "parts", "header"),
    [
        ("http://a.example", ("a.example", 80, False, "/"), "a.example"),
        ("https://a.example", ("a.example", 443, True, "/"), "a.example"),
        ("HTTPS://A.Example:443/", ("a.example", 443, True, "/"), "a.example"),
        ("https://a.example:80/x", ("a.example", 80, True, "/x"), "a.example:80"),
        ("http://a.example?q=1/2", ("a.example", 80, False, "/?q=1/2"), "a.example"),
        ("http://a.example/x//y?z=//b@c", ("a.example", 80, False, "/x//y?z=//b@c"), "a.example"),
        ("http://[::1]:8080/x", ("::1", 8080, False, "/x"), "[::1]:8080"),
        ("https://[2600::5]/", ("2600::5", 443, True, "/"), "[2600::5]"),
        ("http://127.0.0.1:8080", ("127.0.0.1", 8080, False, "/"), "127.0.0.1:8080"),
    ],
)
def test_a_url_is_taken_apart(url, parts, header):
    target = HttpTarget.parse(url)
    assert target == HttpTarget(*parts, "")
    assert target.host_header == header


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://u:s3cret@/path", "no host"),
        ("https:///s3cret", "no host"),
        ("https://", "no host"),
        ("https:hooks.example/s3cret", "https://"),
        ("hooks.example/s3cret", "https://"),
        ("ftp://hooks.example/s3cret", "https://"),
        ("https://hooks.example/s3cret#part", "fragment"),
        ("https://u:s3cret@hooks.example:port/", "port"),
        ("https://u:s3cret/with/slashes@hooks.example/", "port"),
        ("https://u:s3cret@hooks.example:0/", "1 to 65535"),
        ("https://u:s3cret@hooks.example:65536/", "port"),
        ("https://u:s3cret@hooks.example/ path", "space"),
        ("https://u:s3cret@hooks.example/\r\nX-A: b", "space"),
        ("https://u:s3cret@hooks.example/\tpath", "space"),
        (" https://u:s3cret@hooks.example/", "space"),
        ("https://u:s3cret@bücher.example/", "ASCII"),
        ("https://u:s3cret@hooks.example\\@evil.example/", "backslash"),
        ("https://u:s3cret@hooks..example/", "host name"),
        ("https://u:s3cret@-x/", "host name"),
        ("https://u:s3cret@hooks%2eexample/", "host name"),
        ("https://u:s3cret@[::1%25lo]/", "host"),
        ("https://u:s3cret@[::g]/", "host"),
        ("https://u:s3cret@[::1/", "host"),
        ("https://u%3As3cret:x@hooks.example/", "colon"),
        ("", "space"),
    ],
)
def test_a_url_that_cannot_work_is_refused_and_its_secrets_are_not_quoted(url, says):
    for attempt in (HttpTarget.parse, Client):
        with pytest.raises(ValueError, match=says) as caught:
            attempt(url)
        assert "s3cret" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_target_is_printed_without_its_secrets():
    target = HttpTarget.parse("https://u:s3cret@hooks.example/s3cret?t=s3cret")
    assert repr(target) == "<HttpTarget hooks.example>"


def test_one_of_user_and_authorization_is_enough():
    with pytest.raises(ValueError, match="remove one"):
        Client("http://u:p@localhost/", headers=[("authorization", "Bearer x")])
    assert HttpTarget.parse("http://@localhost/").authorization == ""
    assert HttpTarget.parse("http://u@localhost/").authorization == "Basic dTo="
    assert HttpTarget.parse("http://:p@localhost/").authorization == "Basic OnA="
    latin = base64.b64encode(b"\xe4:\xff").decode()
    assert HttpTarget.parse("http://%E4:%FF@localhost/").authorization == f"Basic {latin}"


# --- answers ----------------------------------------------------------------------------------


def head(status, *headers):
    return "\r\n".join([f"HTTP/1.1 {status} So", *headers, "", ""]).encode()


CHUNKED = head(200, "Transfer-Encoding: chunked", "Retry-After: 1") + (
    b"3;why=so\r\nabc\r\n2\r\nde\r\n0\r\nRetry-After: 2\r\n\r\n"
)
WHOLE = {
    "length": (OK, 200, b"ok"),
    "empty": (head(201, "Content-Length: 0"), 201, b""),
    "chunked": (CHUNKED, 200, b"abcde"),
    "no-content": (head(204), 204, b""),
    "no-content-though-it-says-so": (head(204, "Content-Length: 5"), 204, b""),
    "not-modified": (head(304, "Content-Length: 5"), 304, b""),
    "continue": (head(100) + OK, 200, b"ok"),
    "hints": (head(103, "Link: </x>") + head(102) + OK, 200, b"ok"),
    "blank-lines": (b"\r\n\r\n" + OK, 200, b"ok"),
    "error": (head(503, "Content-Length: 1", "Retry-After: 5") + b"x", 503, b"x"),
    "odd-number": (head(799, "Content-Length: 0"), 799, b""),
}


@pytest.mark.parametrize("name", WHOLE)
@on_both_loops
async def test_a_whole_answer_is_understood_and_the_connection_used_again(name):
    raw, status, body = WHOLE[name]
    async with met(answering(raw)) as (seen, client):
        for _ in range(3):
            answer = await client.post(b"{}")
            assert (answer.status, answer.body) == (status, body)
            assert b"link" not in answer.headers
    assert (seen.connections, len(seen.requests)) == (1, 3)


@pytest.mark.parametrize("name", WHOLE)
@on_both_loops
async def test_an_answer_that_trickles_in_is_the_same_answer(name):
    raw, status, body = WHOLE[name]

    async def script(seen, reader, writer):
        while await read_request(reader):
            for at in range(len(raw)):
                writer.write(raw[at : at + 1])
                await writer.drain()
                await asyncio.sleep(0)

    async with met(script) as (seen, client):
        for _ in range(2):
            answer = await client.post(b"{}")
            assert (answer.status, answer.body) == (status, body)
    assert seen.connections == 1


LAST = {
    "close": (head(200, "Connection: close", "Content-Length: 2") + b"ok", 200, b"ok"),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
    "until-the-end": (head(200) + b"until the end", 200, b"until the end"),
    "until-the-end-after-continue": (head(100) + head(500) + b"until", 500, b"until"),
    "1.0-until-the-end": (b"HTTP/1.0 404 No\r\n\r\n", 404, b""),
    "gzip-until-the-end": (head(200, "Transfer-Encoding: gzip") + b"zz", 200, b"zz"),
    "switching": (head(101, "Upgrade: x", "Connection: upgrade") + b"\0\1", 101, b""),
    "garbage-behind": (OK + b"garbage", 200, b"ok"),
    "second-answer-behind": (OK + head(500, "Content-Length: 0"), 200, b"ok"),
    "keep-alive-is-over": (head(200, "Keep-Alive: timeout=1", "Content-Length: 0"), 200, b""),
}


@pytest.mark.parametrize("name", LAST)
@on_both_loops
async def test_after_a_last_answer_the_connection_is_not_used_again(name):
    raw, status, body = LAST[name]
    async with met(closing_after(raw)) as (seen, client):
        for _ in range(2):
            answer = await client.post(b"{}")
            assert (answer.status, answer.body) == (status, body)
    assert (seen.connections, len(seen.requests)) == (2, 2)


@on_both_loops
async def test_a_trailer_changes_no_header():
    async with met(answering(CHUNKED)) as (_, client):
        assert (await client.post(b"")).headers[b"retry-after"] == b"1"


@on_both_loops
async def test_of_several_headers_the_last_counts():
    raw = head(429, "RETRY-AFTER: 1", "Retry-After: 2", "Content-Length: 0")
    async with met(answering(raw)) as (_, client):
        answer = await client.post(b"")
    assert answer.headers == {b"retry-after": b"2", b"content-length": b"0"}


@pytest.mark.parametrize("status", [401, 413])
@on_both_loops
async def test_an_answer_before_the_request_was_read_counts_and_ends_the_connection(status):
    async def script(seen, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head(status, "Content-Length: 0"))
        await seen.until(lambda: seen.connections == 2)  # reads no further

    async with met(script) as (seen, client):
        assert (await client.post(b"x" * 20_000_000)).status == status
        assert (await client.post(b"x" * 20_000_000)).status == status
        assert seen.connections == 2


@pytest.mark.parametrize("chunked", [False, True])
@on_both_loops
async def test_a_long_body_is_cut_and_the_connection_closed(chunked):
    headers = ["Transfer-Encoding: chunked"] if chunked else ["Content-Length: 1000000"]
    body = b"186a0\r\n" + b"x" * 100_000 + b"\r\n" if chunked else b"x" * 100_000

    async def script(seen, reader, writer):
        await read_request(reader)
        writer.write(head(500, *headers) + body)
        await reader.read()  # until the client has gone

    async with met(script, max_answer=1000) as (seen, client):
        answer = await client.post(b"")
        assert (answer.status, answer.body) == (500, b"x" * 1000)
        await seen.until(lambda: seen.closed == 1)


@on_both_loops
async def test_a_body_of_just_the_limit_is_whole():
    raw = head(200, "Content-Length: 1000") + b"x" * 1000
    async with met(answering(raw), max_answer=1000) as (seen, client):
        for _ in range(2):
            assert (await client.post(b"")).body == b"x" * 1000
    assert seen.connections == 1


def flooding(first, more):
    async def script(seen, reader, writer):
        await read_request(reader)
        writer.write(first)
        while not writer.transport.is_closing():
            writer.write(more)
            await writer.drain()

    return script


@pytest.mark.parametrize(
    "script",
    [
        flooding(b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"a" * 1000 + b"\r\n"),
        flooding(b"HTTP/1.1 200 OK\r\nX-A: ", b"a" * 1000),
        flooding(b"", head(100) * 50),
        flooding(b"HTTP/1.1 200 ", b"a" * 1000),
    ],
    ids=["headers", "one-header", "informational", "phrase"],
)
@on_both_loops
async def test_an_endless_head_is_no_answer(script):
    async with met(script) as (_, client):
        with pytest.raises(Unclear, match="too large"):
            await client.post(b"")


@pytest.mark.parametrize("more", [b"1;" + b"a" * 1000 + b"\r\nx\r\n", b"0\r\nX-A: " + b"a" * 1000])
@on_both_loops
async def test_an_endless_body_that_is_all_wrapping_is_cut(more):
    first = head(200, "Transfer-Encoding: chunked")
    if more.startswith(b"0"):
        first, more = first + more, b"a" * 1000
    async with met(flooding(first, more)) as (_, client):
        answer = await client.post(b"")
    assert answer.status == 200
    assert len(answer.body) <= 65536


# --- no whole answer --------------------------------------------------------------------------


async def reset_after_reading(seen, reader, writer):
    seen.requests.append(await read_request(reader))
    reset(writer)


async def reset_inside_the_answer(seen, reader, writer):
    seen.requests.append(await read_request(reader))
    writer.write(OK[:-1])
    await writer.drain()
    await asyncio.sleep(0.01)
    reset(writer)


UNCLEAR = {
    "reset": (reset_after_reading, "connection reset"),
    "reset-inside": (reset_inside_the_answer, "connection reset"),
    "end": (closing_after(), "closed without an answer"),
    "half-a-line": (closing_after(OK[:7]), "middle of the answer"),
    "half-a-head": (closing_after(OK[:20]), "middle of the answer"),
    "half-a-body": (closing_after(OK[:-1]), "middle of the answer"),
    "half-a-chunk": (closing_after(CHUNKED[:-12]), "middle of the answer"),
    "only-continue": (closing_after(head(100)), "middle of the answer"),
    "garbage": (closing_after(b"SSH-2.0-invented\r\n"), "not HTTP"),
    "binary": (closing_after(b"\x15\x03\x01\x00\x02\x02\x46"), "not HTTP"),
    "http2": (closing_after(b"\0\0\x12\4\0\0\0\0\0"), "not HTTP"),
    "two-lengths": (
        closing_after(head(200, "Content-Length: 1", "Content-Length: 2") + b"a"),
        "not HTTP",
    ),
    "length-and-chunks": (
        closing_after(head(200, "Content-Length: 1", "Transfer-Encoding: chunked") + b"a"),
        "not HTTP",
    ),
    "bad-chunk": (closing_after(head(200, "Transfer-Encoding: chunked") + b"zz\r\n"), "not HTTP"),
}


@pytest.mark.parametrize("name", UNCLEAR)
@on_both_loops
async def test_without_a_whole_answer_nobody_knows_and_nothing_is_sent_again(name):
    script, says = UNCLEAR[name]
    async with met(script) as (seen, client):
        with pytest.raises(Unclear, match=says):
            await client.post(b"{}")
        await seen.until(lambda: seen.closed == 1)
    assert (seen.connections, len(seen.requests)) == (1, 1)


@on_both_loops
async def test_a_reset_at_once_is_never_an_answer():
    async def script(seen, reader, writer):
        reset(writer)

    async with met(script) as (seen, client):
        for _ in range(5):
            with pytest.raises((Unclear, NotSent)):
                await client.post(b"x" * 100_000)
    assert seen.connections == 5


@on_both_loops
async def test_a_request_that_meets_a_closing_connection_is_not_repeated():
    async def script(seen, reader, writer):
        for answer in (OK, b""):
            seen.requests.append(await read_request(reader))
            writer.write(answer)

    async with met(script) as (seen, client):
        await client.post(b"1")
        with pytest.raises(Unclear, match="without an answer"):
            await client.post(b"2")
    assert [request.body for request in seen.requests] == [b"1", b"2"]


# --- nothing sent -----------------------------------------------------------------------------


@on_both_loops
async def test_a_refused_connection_sends_nothing():
    with refusing_port() as port:
        async with client_of(f"http://127.0.0.1:{port}/") as client:
            with pytest.raises(NotSent, match="connection refused"):
                await client.post(b"{}")


@on_both_loops
async def test_an_address_that_is_not_allowed_is_not_connected_to():
    async with serving(answering()) as seen:
        for host in ("127.1", "0", "2130706433", "0x7f000001", "[::ffff:127.0.0.1]"):
            url = f"http://{host}:{seen.port}/"
            async with client_of(url) as client:
                with pytest.raises(NotSent, match="allow_private = true"):
                    await client.post(b"{}")
            assert seen.connections == 0
        async with client_of(f"http://127.1:{seen.port}/", allow_private=True) as client:
            assert (await client.post(b"{}")).status == 200


def resolving(monkeypatch, *ports):
    """Give every name this host's address, once for each of *ports*."""
    asked = []

    async def getaddrinfo(host, port, **_):
        asked.append(host)
        await asyncio.sleep(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", p)) for p in ports]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_is_looked_up_once_per_connection_and_that_address_is_used(monkeypatch):
    async with serving(
        answering(OK, *[head(200, "Connection: close", "Content-Length: 0")] * 2)
    ) as seen:
        asked = resolving(monkeypatch, seen.port)
        async with client_of("http://hooks.example/", allow_private=True) as client:
            for _ in range(3):
                await client.post(b"{}")
    assert asked == ["hooks.example"] * 2
    assert seen.connections == 2
    assert {request["host"] for request in seen.requests} == {"hooks.example"}


async def test_a_name_that_changes_its_address_is_checked_again(monkeypatch):
    public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 80))
    inward = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80))
    answers = [[public], [inward]]
    tried = []

    async def getaddrinfo(*_, **__):
        return answers.pop(0)

    async def sock_connect(sock, address):
        tried.append(address)
        raise ConnectionRefusedError

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    async with client_of("http://hooks.example/") as client:
        with pytest.raises(NotSent, match="refused"):
            await client.post(b"{}")
        with pytest.raises(NotSent, match="allow_private"):
            await client.post(b"{}")
    assert tried == [("8.8.8.8", 80)]


async def test_the_next_address_is_tried_after_a_refusal(monkeypatch):
    with refusing_port() as one, refusing_port() as two:
        async with serving(answering()) as seen:
            resolving(monkeypatch, one, two, seen.port)
            async with client_of("http://hooks.example/", allow_private=True) as client:
                assert (await client.post(b"{}")).status == 200


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (socket.gaierror(socket.EAI_NONAME, "x"), "no such host name"),
        (socket.gaierror(socket.EAI_AGAIN, "x"), "cannot be looked up now"),
        (OSError(24, "x"), "too many open files"),
    ],
)
async def test_a_name_that_is_not_found_sends_nothing(monkeypatch, error, says):
    async def getaddrinfo(*_, **__):
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with client_of("http://hooks.example/") as client:
        with pytest.raises(NotSent, match=says):
            await client.post(b"{}")


async def test_a_lookup_that_hangs_ends_with_the_time_to_connect(monkeypatch):
    async def getaddrinfo(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with client_of(
        "http://hooks.example/", connect_timeout=timedelta(milliseconds=20)
    ) as client:
        with pytest.raises(NotSent, match=r"no connection within 0\.02 s"):
            await client.post(b"{}")


async def test_an_address_that_hangs_leaves_time_for_the_next(monkeypatch):
    async with serving(answering()) as seen:
        resolving(monkeypatch, 1, seen.port)
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def sock_connect(sock, address):
            if address[1] == 1:
                await asyncio.Event().wait()
            await connect(sock, address)

        monkeypatch.setattr(loop, "sock_connect", sock_connect)
        settings = {"allow_private": True, "connect_timeout": timedelta(milliseconds=200)}
        async with client_of("http://hooks.example/", **settings) as client:
            assert (await client.post(b"{}")).status == 200


# --- connections ------------------------------------------------------------------------------


@on_both_loops
async def test_requests_at_once_have_a_connection_each_and_the_latest_is_used_again():
    everybody = asyncio.Event()

    async def script(seen, reader, writer):
        number = seen.connections
        while request := await read_request(reader):
            seen.requests.append(request)
            if len(seen.requests) == 5:
                everybody.set()
            await everybody.wait()
            writer.write(head(200, f"X-Connection: {number}", "Content-Length: 0"))

    async with met(script) as (seen, client):
        await asyncio.gather(*[client.post(b"{}") for _ in range(5)])
        assert seen.connections == 5
        used = {(await client.post(b"{}")).headers[b"x-connection"] for _ in range(10)}
        assert len(used) == 1
        await asyncio.gather(*[client.post(b"{}") for _ in range(5)])
        assert seen.connections == 5


@on_both_loops
async def test_a_connection_that_the_target_closes_while_it_rests_is_not_used():
    close = asyncio.Event()

    async def script(seen, reader, writer):
        seen.requests.append(await read_request(reader))
        writer.write(OK)
        await close.wait()
        close.clear()

    async with met(script) as (seen, client):
        for n in range(1, 4):
            assert (await client.post(b"{}")).status == 200
            close.set()
            await seen.until(lambda n=n: seen.closed == n)
            await asyncio.sleep(0.01)
            assert not client._pool._open
    assert seen.connections == 3


@on_both_loops
async def test_a_connection_on_which_something_arrives_unasked_is_not_used():
    async def script(seen, reader, writer):
        seen.requests.append(await read_request(reader))
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(head(408, "Content-Length: 0"))
        await reader.read()

    async with met(script) as (seen, client):
        for n in range(1, 3):
            assert (await client.post(b"{}")).status == 200
            await seen.until(lambda n=n: seen.closed == n)
    assert seen.connections == 2


@on_both_loops
async def test_a_connection_that_was_closed_while_the_loop_was_busy_is_not_used():
    closed = threading.Event()
    served = []

    def serve(listener):
        for _ in range(2):
            sock, _ = listener.accept()
            with sock:
                served.append(sock.recv(65536))
                sock.sendall(OK)
            closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        async with client_of(f"http://localhost:{listener.getsockname()[1]}/") as client:
            assert (await client.post(b"1")).status == 200
            # The loop must not see the end of the connection: it stands still here, until
            # the connection has rested for long enough to be looked at.
            assert closed.wait(5)
            threading.Event().wait(0.1)
            if client._pool._idle:
                for connection in client._pool._idle:
                    connection.idle_since -= 0.1  # uvloop's time stands still as well
            assert (await client.post(b"2")).status == 200
        thread.join(5)
    assert [request[-1:] for request in served] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("header", "rests"),
    [
        (b"", 30),
        (b"timeout=5", 4),
        (b"timeout=5, max=100", 4),
        (b"max=100, Timeout = 5", 4),
        (b'timeout="5"', 4),
        (b"timeout=1", 0),
        (b"timeout=0", -1),
        (b"timeout=3600", 30),
        (b"timeout=99999999999999", 30),
        (b"timeout=-5", 30),
        (b"max=5", 30),
        (b"mytimeout=5", 30),
    ],
)
def test_a_target_says_how_long_a_connection_may_rest(header, rests):
    assert _Pool(idle_s=30, max_answer=1).idle_time_of(header) == rests


@on_both_loops
async def test_a_connection_that_rested_too_long_is_not_used_and_in_the_end_closed():
    async with met(answering(), idle_time=timedelta(milliseconds=30)) as (seen, client):
        await client.post(b"{}")
        await client.post(b"{}")
        assert seen.connections == 1
        for connection in client._pool._idle:
            connection.idle_since -= 0.031
        await client.post(b"{}")
        assert seen.connections == 2
        await seen.until(lambda: seen.closed == 2)  # by the sweeper
        await client.post(b"{}")
        assert seen.connections == 3


@on_both_loops
async def test_a_target_that_wants_a_shorter_rest_gets_it():
    raw = head(200, "Keep-Alive: timeout=3", "Content-Length: 0")
    async with met(answering(raw, OK), idle_time=LONG) as (seen, client):
        await client.post(b"{}")
        (connection,) = client._pool._idle
        assert connection.idle_s == 2
        connection.idle_since -= 2
        await client.post(b"{}")
        assert seen.connections == 2
        (connection,) = client._pool._idle
        assert connection.idle_s == 3600


# --- cancelling and closing -------------------------------------------------------------------


async def silent(seen, reader, writer):
    seen.requests.append(await read_request(reader))
    await seen.note()
    await reader.read()  # until the client goes


@on_both_loops
async def test_cancelling_a_request_closes_its_connection_and_no_other():
    async def script(seen, reader, writer):
        while request := await read_request(reader):
            seen.requests.append(request)
            await seen.note()
            if request.body == b"quick":
                writer.write(OK)

    async with met(script) as (seen, client):
        slow = asyncio.ensure_future(client.post(b"slow"))
        await client.post(b"quick")
        await seen.until(lambda: len(seen.requests) == 2)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        await seen.until(lambda: seen.closed == 1)
        await client.post(b"quick")
    assert seen.connections == 2


@on_both_loops
async def test_a_time_limit_of_the_callers_ends_a_request():
    limit = asyncio.timeout(None)

    async def script(seen, reader, writer):
        await read_request(reader)
        limit.reschedule(0)  # the time is over now that the request is under way
        await reader.read()

    async with met(script) as (seen, client):
        with pytest.raises(TimeoutError):
            async with limit:
                await client.post(b"{}")
        await seen.until(lambda: seen.closed == 1)


@on_both_loops
async def test_a_request_cancelled_just_as_its_answer_arrives_hurts_nobody_else():
    # The answer is there, the connection rests; only then the first request is cancelled.
    async with met(answering()) as (seen, client):
        first = asyncio.ensure_future(client.post(b"1"))
        await seen.until(lambda: seen.requests)
        while not client._pool._idle:
            await asyncio.sleep(0)
            if first.done():
                break
        first.cancel()
        second = asyncio.ensure_future(client.post(b"2"))
        await asyncio.wait([first, second])
        assert second.result().status == 200


async def test_an_answer_for_a_request_just_cancelled_does_not_free_its_connection():
    async with met(silent) as (seen, client):
        task = asyncio.ensure_future(client.post(b"1"))
        await seen.until(lambda: seen.requests)
        (connection,) = client._pool._open
        task.cancel()
        connection.data_received(OK)  # before the task hears of its cancellation
        assert not client._pool._idle
        with pytest.raises(asyncio.CancelledError):
            await task
        await seen.until(lambda: seen.closed == 1)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@on_both_loops
async def test_cancelling_at_any_moment_keeps_no_client_from_closing():
    """At one of these moments uvloop has made the connection, and closes it without a word."""
    async with serving(answering()) as seen:
        for turns in 3 * list(range(30)):
            client = Client(seen.url)
            task = asyncio.create_task(client.post(b""))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Unclear, NotSent):
                await task
            async with asyncio.timeout(20):
                await client.aclose()
            assert not client._pool._open


@on_both_loops
async def test_cancelling_while_connecting_leaves_nothing_open():
    async with serving(silent) as seen:
        before = open_files()
        async with client_of(f"https://localhost:{seen.port}/") as client:  # it never shakes hands
            task = asyncio.ensure_future(client.post(b"{}"))
            await seen.until(lambda: seen.connections == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await seen.until(lambda: seen.closed == 1)
            assert not client._pool._open
        assert open_files() == before


@on_both_loops
async def test_closing_ends_everything_and_may_be_repeated():
    async with met(silent) as (seen, client):
        posts = [asyncio.ensure_future(client.post(b"{}")) for _ in range(3)]
        await seen.until(lambda: len(seen.requests) == 3)
        await asyncio.gather(client.aclose(), client.aclose())
        assert not client._pool._open
        for post in posts:
            with pytest.raises(Unclear, match="closed"):
                await post
        await seen.until(lambda: seen.closed == 3)
        await client.aclose()
        with pytest.raises(NotSent, match="the client is closed"):
            await client.post(b"{}")
    assert seen.connections == 3


@on_both_loops
async def test_closing_lets_go_of_resting_connections():
    async with met(answering()) as (seen, client):
        await asyncio.gather(*[client.post(b"{}") for _ in range(3)])
        await client.aclose()
        assert not client._pool._open
        assert not client._pool._idle
        await seen.until(lambda: seen.closed == seen.connections)


async def test_a_connection_made_while_closing_is_closed_too(monkeypatch):
    async with met(silent) as (seen, client):
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def create_connection(*args, **kwargs):
            made = await connect(*args, **kwargs)
            client._pool.is_closed = True
            return made

        monkeypatch.setattr(loop, "create_connection", create_connection)
        with pytest.raises(NotSent, match="closed"):
            await client.post(b"{}")
        await seen.until(lambda: seen.closed == 1)
    assert seen.requests == [None]


async def test_a_connection_lost_before_the_request_is_written_sends_nothing(monkeypatch):
    async with met(silent) as (seen, client):
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def create_connection(*args, **kwargs):
            made = await connect(*args, **kwargs)
            made[0].abort()
            return made

        monkeypatch.setattr(loop, "create_connection", create_connection)
        with pytest.raises(NotSent, match="connection closed"):
            await client.post(b"{}")
        await seen.until(lambda: seen.closed == 1)
    assert seen.requests == [None]


# --- TLS --------------------------------------------------------------------------------------


def trusting():
    return ssl.create_default_context(cafile=TLS / "ca.pem")


@on_both_loops
async def test_a_trusted_target_is_spoken_to_and_its_connection_used_again():
    async with (
        serving(answering(), tls=server_tls()) as seen,
        client_of(seen, tls=trusting()) as client,
    ):
        for _ in range(3):
            assert (await client.post(b"x" * 300_000)).status == 200
    assert (seen.connections, len(seen.requests)) == (1, 3)


@on_both_loops
async def test_an_answer_may_end_with_an_encrypted_connection_too():
    async with (
        serving(closing_after(head(200) + b"until"), tls=server_tls()) as seen,
        client_of(seen, tls=trusting()) as client,
    ):
        for _ in range(2):
            assert (await client.post(b"{}")).body == b"until"
    assert seen.connections == 2


@on_both_loops
async def test_half_an_encrypted_answer_is_none():
    async with (
        serving(closing_after(OK[:-1]), tls=server_tls()) as seen,
        client_of(seen, tls=trusting()) as client,
    ):
        with pytest.raises(Unclear, match="closed"):
            await client.post(b"{}")


@on_both_loops
async def test_a_target_that_cannot_prove_who_it_is_gets_nothing():
    async with serving(answering(), tls=server_tls()) as seen, client_of(seen) as client:
        with pytest.raises(NotSent, match="certificate verify failed"):
            await client.post(b"{}")
        assert not client._pool._open
    async with (
        serving(answering(), tls=server_tls("elsewhere")) as seen,
        client_of(seen, tls=trusting()) as client,
    ):
        with pytest.raises(NotSent, match="certificate verify failed: Hostname mismatch"):
            await client.post(b"{}")
    assert not seen.requests


@on_both_loops
async def test_a_target_without_tls_gets_nothing():
    async def script(seen, reader, writer):
        await reader.read(1)
        writer.write(head(400, "Content-Length: 0"))

    async with (
        serving(script) as seen,
        client_of(f"https://localhost:{seen.port}/", tls=trusting()) as client,
    ):
        with pytest.raises(NotSent, match="TLS failed"):
            await client.post(b"{}")


@on_both_loops
async def test_a_target_that_never_shakes_hands_is_left_in_time():
    async with serving(silent) as seen:
        settings = {"connect_timeout": timedelta(milliseconds=30)}
        async with client_of(f"https://localhost:{seen.port}/", **settings) as client:
            with pytest.raises(NotSent, match="no connection within"):
                await client.post(b"{}")


# --- any bytes --------------------------------------------------------------------------------


class Wire:
    """The least of a transport: it takes what is written, and can be closed."""

    def __init__(self):
        self.is_closed = False

    def write(self, data):
        pass

    def abort(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_closed

    def get_write_buffer_size(self):
        return 0


def ends_of(pieces):
    """Feed *pieces* to a connection with one request under way, and then its end."""

    async def feed():
        pool = _Pool(idle_s=30, max_answer=50)
        connection = _ClientConnection(pool)
        connection.connection_made(Wire())
        waiter = connection.send(b"", asyncio.get_running_loop())
        for piece in pieces:
            connection.data_received(piece)
        if not connection.transport.is_closing():
            connection.eof_received()
        connection.connection_lost(None)
        await pool.aclose()
        assert not pool._idle
        return waiter.exception() or waiter.result()

    return asyncio.run(feed())


@given(st.data())
def test_where_an_answer_is_cut_into_pieces_does_not_matter(data):
    name = data.draw(st.sampled_from([*WHOLE, "until-the-end", "close", "1.0"]))
    raw, status, body = (WHOLE | LAST)[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    answer = ends_of(pieces)
    assert (answer.status, answer.body) == (status, body)


@given(
    st.lists(
        st.binary(max_size=40)
        | st.sampled_from([b"HTTP/1.1 ", b"200 OK\r\n", b"\r\n", b"Content-Length: 3\r\n", OK])
        | st.sampled_from([b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n"]),
        max_size=8,
    )
)
def test_whatever_comes_back_it_is_an_answer_or_unclear(pieces):
    end = ends_of(pieces)
    assert isinstance(end, ClientResponse | Unclear)
    if isinstance(end, ClientResponse):
        assert b"HTTP/1." in b"".join(pieces)
        assert len(end.body) <= 50
