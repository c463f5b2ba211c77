import asyncio
import contextlib
import errno
import logging
import random
import socket
import ssl
import struct
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise

import httptools
import pytest
import uvloop
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from tests.http.targets import TLS, on_both_loops, server_tls
from tests.size import examples

from oncebridge.errors import ConfigError
from oncebridge.http.server import (
    Request,
    Response,
    Server,
    ServerLimits,
    _check_strictness,
    _peer_group,
)

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
HOST = b"Host: gate.example\r\n"
HELLO = b"GET /hello HTTP/1.1\r\n" + HOST + b"\r\n"
SHORT = timedelta(milliseconds=200)


class Answer(Struct):
    status: int
    headers: dict[str, str]
    body: bytes


class Desk:
    """A handler that keeps what it was asked, and answers at once with what it got."""

    def __init__(self):
        self.requests = []

    def __call__(self, request, answer):
        self.requests.append(request)
        answer(echo(request))


class Waiting:
    """A handler that leaves every answer to the test."""

    def __init__(self):
        self.asked = asyncio.Queue()

    def __call__(self, request, answer):
        self.asked.put_nowait((request, answer))

    async def next(self):
        async with asyncio.timeout(5):
            return await self.asked.get()


def echo(request):
    return Response(
        200, request.method.encode() + b" " + request.path.encode() + b" " + request.body
    )


@asynccontextmanager
async def serving(handler=None, **settings):
    bounds = ServerLimits(
        **{name: settings.pop(name) for name in ServerLimits.__struct_fields__ if name in settings}
    )
    server = Server(handler or Desk(), host="127.0.0.1", port=0, bounds=bounds, **settings)
    await server.open()
    try:
        yield server
    finally:
        await server.aclose(timedelta(0))


@asynccontextmanager
async def connected(server, **how):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24, **how)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_answer(reader, *, bodiless=False):
    async with asyncio.timeout(5):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        length = 0 if bodiless else int(headers.get("Content-Length", 0))
        return Answer(int(status), headers, await reader.readexactly(length))


async def read_end(reader):
    async with asyncio.timeout(5):
        return await reader.read()


async def ask(server, data, *, bodiless=False):
    """Send *data* on a connection of its own, and give the first answer."""
    async with connected(server) as (reader, writer):
        writer.write(data)
        return await read_answer(reader, bodiless=bodiless)


async def refused(server, data):
    """Send *data*, and give the status of the answer after which the connection ends."""
    async with connected(server) as (reader, writer):
        writer.write(data)
        answer = await read_answer(reader)
        assert answer.headers["Connection"] == "close"
        assert await read_end(reader) == b""
        return answer.status


async def still_serves(server):
    return (await ask(server, HELLO)).status == 200


async def settled(truth):
    """Wait until *truth* holds."""
    async with asyncio.timeout(5):
        while not truth():  # noqa: ASYNC110 - the server has no event for what only tests ask
            await asyncio.sleep(0.005)


def post(body, *headers, target=b"/events"):
    lines = [
        b"POST " + target + b" HTTP/1.1",
        HOST.strip(),
        *headers,
        b"Content-Length: %d" % len(body),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*pieces, trailers=b"", extension=b""):
    head = b"POST /events HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunks = [b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces]
    return head + b"".join(chunks) + b"0\r\n" + trailers + b"\r\n"


# --- requests and answers ---------------------------------------------------------------


@on_both_loops
async def test_a_request_reaches_the_handler_as_it_was_sent():
    desk = Desk()
    async with serving(desk) as server:
        answer = await ask(
            server,
            post(b'{"a":1}', b"X-One: 1", b"x-two:\t2 ", b"X-ONE: 3", target=b"/a%20b?c=d&e?f"),
        )
    assert answer.status == 200
    assert desk.requests == [
        Request(
            "POST",
            "/a%20b",
            "c=d&e?f",
            (
                (b"host", b"gate.example"),
                (b"x-one", b"1"),
                (b"x-two", b"2"),
                (b"x-one", b"3"),
                (b"content-length", b"7"),
            ),
            b'{"a":1}',
            "127.0.0.1",
        )
    ]
    (request,) = desk.requests
    assert request.header(b"x-one") == b"1"
    assert request.values(b"x-one") == [b"1", b"3"]
    assert request.header(b"x-three") is None
    assert request.values(b"x-three") == []


@on_both_loops
async def test_an_answer_has_what_a_client_needs_and_no_more():
    def handler(request, answer):
        answer(Response(503, b"later", "text/plain", (("Retry-After", "2"), ("X-Route", "crm"))))

    async with serving(handler) as server:
        answer = await ask(server, HELLO)
    assert answer == Answer(
        503,
        {"Content-Type": "text/plain", "Content-Length": "5", "Retry-After": "2", "X-Route": "crm"},
        b"later",
    )


@on_both_loops
async def test_an_answer_without_a_body_has_a_length_and_no_type():
    async with serving(lambda request, answer: answer(Response(202))) as server:
        answer = await ask(server, HELLO)
    assert answer == Answer(202, {"Content-Length": "0"}, b"")


@on_both_loops
@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_never_has_a_body_has_no_length(status):
    async with serving(lambda request, answer: answer(Response(status))) as server:
        assert await ask(server, HELLO) == Answer(status, {}, b"")


@on_both_loops
async def test_head_gets_the_length_but_not_the_body():
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(HELLO.replace(b"GET", b"HEAD") + HELLO)
        answer = await read_answer(reader, bodiless=True)
        assert answer.headers["Content-Length"] == str(len(b"HEAD /hello "))
        assert (await read_answer(reader)).body == b"GET /hello "


@on_both_loops
async def test_a_connection_serves_many_requests():
    async with serving() as server, connected(server) as (reader, writer):
        for number in range(50):
            writer.write(post(b"%d" % number))
            assert (await read_answer(reader)).body == b"POST /events %d" % number
        assert server.connections == 1
    await settled(lambda: server.connections == 0)


@on_both_loops
@pytest.mark.parametrize(
    ("version", "wish", "stays"),
    [
        ("1.1", "", True),
        ("1.1", "keep-alive", True),
        ("1.1", "close", False),
        ("1.1", "X-Hop, Close", False),
        ("1.0", "", False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "close", False),
    ],
)
async def test_the_client_decides_whether_the_connection_stays(version, wish, stays):
    wishes = f"Connection: {wish}\r\n" if wish else ""
    request = f"GET / HTTP/{version}\r\nHost: gate.example\r\n{wishes}\r\n".encode()
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(request)
        answer = await read_answer(reader)
        if stays:
            assert answer.headers.get("Connection") == ("keep-alive" if version == "1.0" else None)
            writer.write(request)
            assert (await read_answer(reader)).status == 200
        else:
            assert answer.headers["Connection"] == "close"
            assert await read_end(reader) == b""


@on_both_loops
async def test_http_1_0_needs_no_host():
    async with serving() as server:
        assert (await ask(server, b"GET / HTTP/1.0\r\n\r\n")).status == 200


@on_both_loops
@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", ""),
        (b"//a/../b", "//a/../b", ""),
        (b"/?", "/", ""),
        (b"/a?b?c", "/a", "b?c"),
        (b"http://gate.example/a?b", "/a", "b"),
        (b"https://gate.example:8443", "/", ""),
    ],
)
async def test_a_target_is_split_into_path_and_query(target, path, query):
    desk = Desk()
    async with serving(desk) as server:
        assert (
            await ask(server, b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        ).status == 200
    assert [(request.path, request.query) for request in desk.requests] == [(path, query)]


@on_both_loops
async def test_options_may_ask_about_the_server_as_a_whole():
    desk = Desk()
    async with serving(desk) as server:
        await ask(server, b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n")
        assert await refused(server, b"GET * HTTP/1.1\r\n" + HOST + b"\r\n") == 400
    assert [request.path for request in desk.requests] == ["*"]


@on_both_loops
async def test_empty_lines_before_a_request_are_read_past():
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"\r\n" + post(b"x") + b"\r\n\r\n" + HELLO)
        assert (await read_answer(reader)).body == b"POST /events x"
        assert (await read_answer(reader)).body == b"GET /hello "


@on_both_loops
@pytest.mark.parametrize(
    "offer",
    [
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    ],
)
async def test_an_offer_to_upgrade_is_declined_by_an_ordinary_answer(offer):
    async with serving() as server, connected(server) as (reader, writer):
        for _ in range(2):
            writer.write(post(b"abc", offer.strip()) + HELLO)
            assert (await read_answer(reader)).body == b"POST /events abc"
            assert (await read_answer(reader)).body == b"GET /hello "


# --- bodies -----------------------------------------------------------------------------


@on_both_loops
@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, 2 * 1024 * 1024])
async def test_a_body_arrives_whole_whichever_way_it_is_sent(size):
    body = random.Random(size).randbytes(size)
    pieces = [body[at : at + 30_000] for at in range(0, size, 30_000)]
    desk = Desk()
    async with serving(desk) as server:
        await ask(server, post(body))
        await ask(server, chunked(*pieces))
    assert [request.body == body for request in desk.requests] == [True, True]


@on_both_loops
async def test_chunk_extensions_and_trailers_are_read_past():
    desk = Desk()
    async with serving(desk) as server, connected(server) as (reader, writer):
        request = chunked(b"ab", b"cd", trailers=b"Digest: abc\r\nX-End:\r\n", extension=b';a="b"')
        writer.write(request * 2)
        assert (await read_answer(reader)).body == b"POST /events abcd"
        assert (await read_answer(reader)).body == b"POST /events abcd"
    assert desk.requests[0].header(b"digest") is None


@on_both_loops
async def test_a_body_one_byte_too_large_is_refused_from_its_length():
    desk = Desk()
    async with serving(desk, max_body=1000) as server:
        assert (await ask(server, post(bytes(1000)))).status == 200
        assert await refused(server, post(bytes(1001))[:-1001]) == 413
        assert len(desk.requests) == 1


@on_both_loops
async def test_a_chunked_body_is_refused_at_the_chunk_that_is_too_much():
    desk = Desk()
    async with serving(desk, max_body=1000) as server:
        assert (await ask(server, chunked(*[bytes(100)] * 10))).status == 200
        whole = chunked(*[bytes(100)] * 10, b"x")
        assert await refused(server, whole[: whole.index(b"\r\n1\r\n") + 5]) == 413
        assert len(desk.requests) == 1


@on_both_loops
async def test_chunks_of_mostly_framing_are_refused():
    async with serving(max_body=10_000) as server:
        request = chunked(*[b"x"] * 1000, extension=b";" + b"e" * 200)
        assert await refused(server, request) == 413


@on_both_loops
async def test_endless_trailers_are_refused():
    async with serving(max_head=2000) as server:
        assert await refused(server, chunked(b"x", trailers=b"X-Filler: abcdefgh\r\n" * 150)) == 431
        assert await refused(server, chunked(b"x", trailers=b"X-Filler: " + b"x" * 3000)) == 431


@on_both_loops
async def test_a_client_that_is_still_sending_sees_the_refusal():
    """A blocking client that looks for an answer only when all is sent, as most do."""

    def send_all_then_read(port):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            body = bytes(8 * 1024 * 1024)
            client.sendall(post(body)[: -len(body)])
            client.sendall(body)
            received = b""
            while piece := client.recv(65536):
                received += piece
            return received

    async with serving() as server:
        received = await asyncio.to_thread(send_all_then_read, server.port)
    assert received.startswith(b"HTTP/1.1 413 ")


@on_both_loops
async def test_a_refused_client_cannot_go_on_sending_for_ever():
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999\r\n\r\n")
        assert (await read_answer(reader)).status == 413
        sent = 0

        async def send_on():
            nonlocal sent
            while True:
                writer.write(bytes(65536))
                await writer.drain()
                sent += 65536

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_on(), 5)
        assert sent < 64 * 1024 * 1024


# --- expectations and the screen --------------------------------------------------------


@on_both_loops
async def test_a_client_that_asks_first_is_told_to_go_on():
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(post(b"abc", b"Expect: 100-Continue")[:-3])
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await read_answer(reader)).body == b"POST /events abc"


@on_both_loops
async def test_a_client_that_asks_and_does_not_wait_is_served():
    async with serving() as server:
        assert (
            await ask(server, post(b"abc", b"Expect: 100-continue"))
        ).body == b"POST /events abc"


@on_both_loops
async def test_other_expectations_cannot_be_met():
    async with serving() as server:
        assert await refused(server, post(b"abc", b"Expect: a-miracle")) == 417
        assert await refused(server, post(b"abc", *[b"Expect: 100-continue"] * 2)) == 417


def closed_to_strangers(request):
    assert request.body == b""
    if request.header(b"x-api-key") != b"let-me-in":
        return Response(401, b"who?", "text/plain", (("WWW-Authenticate", "Basic"),))
    return None


@on_both_loops
async def test_the_screen_refuses_before_the_body_is_read():
    desk = Desk()
    async with serving(desk, screen=closed_to_strangers) as server:
        for start in (
            post(b"abc")[:-3],
            post(b"abc", b"Expect: 100-continue")[:-3],
            chunked()[:-5],
        ):
            async with connected(server) as (reader, writer):
                writer.write(start)
                answer = await read_answer(reader)
                assert (answer.status, answer.body) == (401, b"who?")
                assert answer.headers["WWW-Authenticate"] == "Basic"
                assert await read_end(reader) == b""
        assert desk.requests == []


@on_both_loops
async def test_who_passes_the_screen_is_served_with_the_whole_request():
    desk = Desk()
    async with serving(desk, screen=closed_to_strangers) as server:
        assert (await ask(server, post(b"abc", b"X-Api-Key: let-me-in"))).status == 200
    (request,) = desk.requests
    assert (request.body, request.header(b"x-api-key")) == (b"abc", b"let-me-in")


@on_both_loops
async def test_a_stranger_learns_nothing_about_sizes():
    async with serving(screen=closed_to_strangers, max_body=10) as server:
        assert await refused(server, post(bytes(100))) == 401
        assert await refused(server, post(bytes(100), b"X-Api-Key: let-me-in")) == 413


# --- answers in order -------------------------------------------------------------------


@on_both_loops
async def test_a_hundred_requests_sent_at_once_are_answered_in_order():
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"".join(post(b"%d" % n) if n % 2 else chunked(b"%d" % n) for n in range(100)))
        answers = [(await read_answer(reader)).body for _ in range(100)]
    assert answers == [b"POST /events %d" % n for n in range(100)]


@on_both_loops
async def test_the_next_request_is_not_begun_before_the_answer():
    desk = Waiting()
    async with serving(desk) as server, connected(server) as (reader, writer):
        writer.write(b"".join(post(b"%d" % n) for n in range(100)))
        for number in range(100):
            request, answer = await desk.next()
            assert request.body == b"%d" % number
            assert desk.asked.empty()
            answer(Response(200, b"answer %d" % number))
            assert (await read_answer(reader)).body == b"answer %d" % number


@on_both_loops
async def test_what_is_sent_ahead_is_not_piled_up():
    desk = Waiting()
    async with serving(desk) as server, connected(server) as (reader, writer):
        writer.write(HELLO)
        _, answer = await desk.next()
        while writer.transport.get_write_buffer_size() < 1024 * 1024:  # until nothing is taken
            writer.write(HELLO * 1000)
            await asyncio.sleep(0)
        (connection,) = server._served
        assert len(connection._data) <= 1024 * 1024
        answer(Response(200))
        assert (await read_answer(reader)).status == 200
        await desk.next()
        writer.transport.abort()


@on_both_loops
async def test_a_second_answer_is_ignored():
    desk = Waiting()
    async with serving(desk) as server, connected(server) as (reader, writer):
        writer.write(HELLO * 2)
        _, first = await desk.next()
        first(Response(200, b"first"))
        first(Response(200, b"again"))
        _, second = await desk.next()
        first(Response(200, b"and again"))
        second(Response(200, b"second"))
        assert (await read_answer(reader)).body == b"first"
        assert (await read_answer(reader)).body == b"second"


@on_both_loops
async def test_an_answer_to_who_has_hung_up_is_ignored(caplog):
    desk = Waiting()
    async with serving(desk) as server:
        async with connected(server) as (_, writer):
            writer.write(post(b"abc"))
            _, answer = await desk.next()
            # An end that is a reset, so that the server learns of it without writing.
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        await settled(lambda: server.connections == 0)
        answer(Response(200, b"too late"))
        assert await still_serves_waiting(server, desk)
    assert caplog.records == []


async def still_serves_waiting(server, desk):
    async with connected(server) as (reader, writer):
        writer.write(HELLO)
        _, answer = await desk.next()
        answer(Response(200))
        return (await read_answer(reader)).status == 200


@on_both_loops
async def test_a_client_that_only_stops_sending_still_gets_its_answers():
    desk = Waiting()
    async with serving(desk) as server, connected(server) as (reader, writer):
        writer.write(post(b"1") + post(b"2"))
        _, answer = await desk.next()
        writer.write_eof()
        await settled(lambda: next(iter(server._served))._client_done)
        answer(Response(200, b"one"))
        _, answer = await desk.next()
        answer(Response(200, b"two"))
        assert (await read_answer(reader)).body == b"one"
        assert (await read_answer(reader)).body == b"two"
        assert await read_end(reader) == b""


@on_both_loops
@pytest.mark.parametrize("part", [b"", b"GET / HT", post(b"abc")[:-1], chunked(b"abc")[:-2]])
async def test_a_request_cut_short_is_dropped(part):
    desk = Desk()
    async with serving(desk) as server:
        async with connected(server) as (reader, writer):
            writer.write(part)
            writer.write_eof()
            assert await read_end(reader) == b""
        await settled(lambda: server.connections == 0)
        assert desk.requests == []


# --- handlers that go wrong -------------------------------------------------------------


def raises(request, answer):
    raise KeyError(request.body.decode())


def answers_and_raises(request, answer):
    answer(Response(200, b"fine"))
    raise KeyError(request.body.decode())


@on_both_loops
async def test_a_handler_that_raises_costs_the_client_a_500_and_the_log_no_payload(caplog):
    async with serving(raises) as server:
        assert await refused(server, post(b"my secret")) == 500
    (record,) = caplog.records
    assert (record.name, record.levelno, record.error) == ("oncebridge", logging.ERROR, "KeyError")
    assert "secret" not in caplog.text
    assert not record.exc_info


@on_both_loops
async def test_a_handler_that_raises_after_its_answer_costs_the_connection():
    async with serving(answers_and_raises) as server, connected(server) as (reader, writer):
        writer.write(HELLO * 2)
        assert (await read_answer(reader)).body == b"fine"
        assert await read_end(reader) == b""


@on_both_loops
async def test_a_screen_that_raises_lets_nobody_in(caplog):
    desk = Desk()

    def screen(request):
        raise LookupError("my secret")

    async with serving(desk, screen=screen) as server:
        assert await refused(server, HELLO) == 500
    assert desk.requests == []
    assert [record.error for record in caplog.records] == ["LookupError"]
    assert "secret" not in caplog.text


@on_both_loops
@pytest.mark.parametrize(
    "response",
    [
        Response(200, headers=(("X-Key", "a\r\nSet-Cookie: b"),)),
        Response(200, headers=(("X-Key", "a\nb"),)),
        Response(200, headers=(("X-Key\r\nY", "a"),)),
        Response(200, headers=(("X Key", "a"),)),
        Response(200, headers=(("", "a"),)),
        Response(200, headers=(("X-Key", "snow\u2603man"),)),
        Response(200, headers=(("Content-Length", "3"),)),
        Response(200, headers=(("transfer-encoding", "chunked"),)),
        Response(200, b"x", "text/plain\r\nX: y"),
        Response(204, b"x"),
        Response(100),
        Response(1000),
        "not an answer",
        None,
    ],
)
async def test_an_answer_that_cannot_be_sent_becomes_a_500(response):
    async with serving(lambda request, answer: answer(response)) as server:
        assert await refused(server, HELLO) == 500
        assert await refused(server, HELLO) == 500


# --- requests that cannot be trusted ----------------------------------------------------

LINE = b"GET / HTTP/1.1\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
MALFORMED = {
    "bare line feeds": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "bare line feed after the request line": (b"GET / HTTP/1.1\nHost: a\r\n\r\n", 400),
    "bare line feed after a header": (LINE + b"Host: a\nX: b\r\n\r\n", 400),
    "bare line feed at the end": (LINE + b"Host: a\r\n\n", 400),
    "bare carriage return in a value": (LINE + b"Host: a\r\nX: a\rb\r\n\r\n", 400),
    "two carriage returns": (LINE + b"Host: a\r\r\n\r\n", 400),
    "carriage return in the request line": (b"GET /\r HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "line feed first": (b"\n" + HELLO, 400),
    "carriage return first": (b"\r" + HELLO, 400),
    "blank first": (b" " + HELLO, 400),
    "blank before a colon": (LINE + b"Host : a\r\n\r\n", 400),
    "blank before a header": (LINE + b" Host: a\r\n\r\n", 400),
    "folded line": (LINE + b"Host: a\r\nX: a\r\n b\r\n\r\n", 400),
    "folded line by tab": (LINE + b"Host: a\r\nX: a\r\n\tb\r\n\r\n", 400),
    "no colon": (LINE + b"Host: a\r\nX\r\n\r\n", 400),
    "no name": (LINE + b"Host: a\r\n: b\r\n\r\n", 400),
    "blank in a name": (LINE + b"Host: a\r\nX Y: b\r\n\r\n", 400),
    "bracket in a name": (LINE + b"Host: a\r\nX(: b\r\n\r\n", 400),
    "high byte in a name": (LINE + b"Host: a\r\nX\xff: b\r\n\r\n", 400),
    "nul in a name": (LINE + b"Host: a\r\nX\0: b\r\n\r\n", 400),
    "nul in a value": (LINE + b"Host: a\r\nX: a\0b\r\n\r\n", 400),
    "escape in a value": (LINE + b"Host: a\r\nX: \x1b[31m\r\n\r\n", 400),
    "delete in a value": (LINE + b"Host: a\r\nX: \x7f\r\n\r\n", 400),
    "no host": (LINE + b"\r\n", 400),
    "two hosts": (LINE + b"Host: a\r\nHost: a\r\n\r\n", 400),
    "two empty hosts": (LINE + b"Host:\r\nHost:\r\n\r\n", 400),
    "a host with a path": (LINE + b"Host: a/b\r\n\r\n", 400),
    "a host with a user": (LINE + b"Host: a@b\r\n\r\n", 400),
    "two hosts in 1.0": (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
    "two different lengths": (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxy", 400),
    "a list of lengths": (POST + b"Content-Length: 1, 1\r\n\r\nx", 400),
    "a length with a sign": (POST + b"Content-Length: +1\r\n\r\nx", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\nx", 400),
    "an empty length": (POST + b"Content-Length:\r\n\r\nx", 400),
    "a length in hex": (POST + b"Content-Length: 0x1\r\n\r\nx", 400),
    "a length with a gap": (POST + b"Content-Length: 1 1\r\n\r\nx", 400),
    "a length of 2**64": (POST + b"Content-Length: 18446744073709551616\r\n\r\nx", 400),
    "a length of five thousand zeros": (
        POST + b"Content-Length: " + b"0" * 5000 + b"1\r\n\r\nx",
        400,
    ),
    "length and coding": (
        POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "coding and length": (
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0\r\n\r\n",
        400,
    ),
    "another coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "a coding below chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "a coding above chunked": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "chunked twice": (
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "nearly chunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "quoted chunked": (POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n', 400),
    "empty coding": (POST + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n", 400),
    "vertical tab and chunked": (POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
    "chunked in 1.0": (
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "HTTP/0.9 with a version": (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "HTTP/2 by prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/11": (b"GET / HTTP/11\r\nHost: a\r\n\r\n", 400),
    "http/1.1 in small letters": (b"GET / http/1.1\r\nHost: a\r\n\r\n", 400),
    "RTSP": (b"DESCRIBE / RTSP/1.0\r\nHost: a\r\n\r\n", 400),
    "ICE": (b"SOURCE / ICE/1.0\r\nHost: a\r\n\r\n", 400),
    "two blanks": (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "two blanks before the version": (b"GET /  HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "blank after the version": (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
    "blank in the target": (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "tab instead of a blank": (b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "tab in the target": (b"GET /a\tb HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "only a method": (b"GET\r\n\r\n", 400),
    "no method": (b"/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a method in small letters": (b"get / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a method we do not know": (b"FROBNICATE / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "a tunnel": (b"CONNECT a.example:443 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a tunnel to a path": (b"CONNECT / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a relative target": (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a query alone": (b"GET ?a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a target with a strange scheme": (b"GET ftp://a/b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a target without a host": (b"GET http:///b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "high byte in the target": (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "nul in the target": (b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "delete in the target": (b"GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
    "an SSH hello": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", 400),
    "nuls": (bytes(1000), 400),
    "JSON": (b'{"a": 1}\r\n\r\n', 400),
    "an empty request line": (b" \r\n\r\n", 400),
    "a head that never ends": (LINE + b"X: " + b"x" * 40_000, 431),
    "headers that never end": (LINE + b"X: x\r\n" * 8_000, 431),
    "a request line that never ends": (b"GET /" + b"x" * 40_000, 431),
    "a complete head too large": (LINE + HOST + b"X: " + b"x" * 40_000 + b"\r\n\r\n", 431),
    "a chunk without a size": (CHUNKED + b"\r\nx\r\n0\r\n\r\n", 400),
    "a chunk size with a sign": (CHUNKED + b"+1\r\nx\r\n0\r\n\r\n", 400),
    "a negative chunk size": (CHUNKED + b"-1\r\nx\r\n0\r\n\r\n", 400),
    "a chunk size with a prefix": (CHUNKED + b"0x1\r\nx\r\n0\r\n\r\n", 400),
    "a chunk size with an underscore": (CHUNKED + b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n", 400),
    "a blank before a chunk size": (CHUNKED + b" 1\r\nx\r\n0\r\n\r\n", 400),
    "a blank after a chunk size": (CHUNKED + b"1 \r\nx\r\n0\r\n\r\n", 400),
    "a chunk size of letters": (CHUNKED + b"xyz\r\nx\r\n0\r\n\r\n", 400),
    "a chunk size of seventeen digits": (CHUNKED + b"0" * 16 + b"1\r\nx\r\n0\r\n\r\n", 400),
    "a huge chunk size": (CHUNKED + b"f" * 16 + b"\r\nx\r\n0\r\n\r\n", 413),
    "a chunk size line that never ends": (CHUNKED + b"1;" + b"x" * 300, 400),
    "a long chunk extension": (CHUNKED + b"1;" + b"x" * 300 + b"\r\nx\r\n0\r\n\r\n", 400),
    "an empty chunk extension": (CHUNKED + b"1;\r\nx\r\n0\r\n\r\n", 400),
    "an open quote in a chunk extension": (CHUNKED + b'1;a="b\r\nx\r\n0\r\n\r\n', 400),
    "a line feed in a chunk extension": (CHUNKED + b"1;a\nb\r\nx\r\n0\r\n\r\n", 400),
    "a bare line feed after a chunk size": (CHUNKED + b"1\nx\r\n0\r\n\r\n", 400),
    "a bare line feed after a chunk": (CHUNKED + b"1\r\nx\n0\r\n\r\n", 400),
    "a chunk longer than its size": (CHUNKED + b"1\r\nxyz\r\n0\r\n\r\n", 400),
    "a chunk longer than its size, unfinished": (CHUNKED + b"1\r\nxy", 400),
    "a bare line feed after the last chunk": (CHUNKED + b"0\n\n", 400),
    "a trailer without a colon": (CHUNKED + b"0\r\nabc\r\n\r\n", 400),
    "a folded trailer": (CHUNKED + b"0\r\nA: b\r\n c\r\n\r\n", 400),
    "a blank before a trailer's colon": (CHUNKED + b"0\r\nA : b\r\n\r\n", 400),
}


@on_both_loops
@pytest.mark.parametrize(("data", "status"), MALFORMED.values(), ids=MALFORMED.keys())
async def test_what_cannot_be_read_safely_is_refused(data, status):
    desk = Desk()
    async with serving(desk) as server:
        assert await refused(server, data) == status
        # The same after a good request; and what comes behind it must not be served.
        async with connected(server) as (reader, writer):
            writer.write(HELLO + data + HELLO)
            assert (await read_answer(reader)).status == 200
            assert (await read_answer(reader)).status >= 400
            assert await read_end(reader) == b""
        assert [request.path for request in desk.requests] == ["/hello"]
        assert await still_serves(server)


def soiled(request, dice):
    """Change, drop or double some bytes."""
    soiled = bytearray(request)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(max(len(soiled), 1))
        match dice.randrange(4):
            case 0:
                soiled[at : at + 1] = [dice.choice(b"\r\n\0 :;,\t\xff\x7f0aA")]
            case 1:
                del soiled[at : at + dice.randint(1, 4)]
            case 2:
                soiled[at:at] = soiled[at : at + dice.randint(1, 30)]
            case 3:
                soiled.insert(at, dice.choice(b"\r\n\0 :;,\t\xff\x7f0aA"))
    return bytes(soiled)


@on_both_loops
@pytest.mark.parametrize("seed", range(4))
async def test_soiled_requests_never_hang_or_crash_the_server(seed, caplog):
    dice = random.Random(seed)
    good = [post(b'{"a":1}', b"X-One: 1"), chunked(b"abc", b"defgh", trailers=b"X: y\r\n"), HELLO]
    async with serving() as server:
        for _ in range(150):
            async with connected(server) as (reader, writer):
                writer.write(soiled(dice.choice(good), dice))
                writer.write_eof()
                received = await read_end(reader)
                assert received == b"" or received.startswith(b"HTTP/1.1 ")
        await settled(lambda: server.connections == 0)
        assert await still_serves(server)
    assert caplog.records == []


# --- however the bytes are split --------------------------------------------------------


async def send_in_pieces(port, stream, cuts):
    """Send *stream* cut at *cuts*, so that each piece is read on its own; give all answers."""
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        edges = [0, *sorted(cuts), len(stream)]
        async with asyncio.timeout(10):
            for start, end in pairwise(edges):
                await loop.sock_sendall(client, stream[start:end])
                for _ in range(3):
                    await asyncio.sleep(0)
            client.shutdown(socket.SHUT_WR)
            received = b""
            while piece := await loop.sock_recv(client, 65536):
                received += piece
            return received


REQUESTS = st.one_of(
    st.binary(max_size=200).map(post),
    st.lists(st.binary(min_size=1, max_size=60), max_size=4).map(lambda pieces: chunked(*pieces)),
    st.just(chunked(b"\r\n\r\n0\r\n\r\n", trailers=b"A: b\r\n", extension=b";x=y")),
    st.sampled_from([HELLO, b"\r\n" + HELLO, HELLO.replace(b"GET", b"DELETE")]),
    st.sampled_from([data for data, _ in MALFORMED.values() if len(data) < 200]),
)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
@settings(max_examples=examples(100))
@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), data=st.data())
def test_how_the_bytes_are_split_does_not_matter(loop, requests, data):
    stream = b"".join(requests)
    cuts = data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20))

    async def run():
        seen = []
        for where in (set(), cuts, set(range(1, len(stream)))):
            desk = Desk()
            async with serving(desk) as server:
                answers = await send_in_pieces(server.port, stream, where)
            seen.append((desk.requests, answers))
        return seen

    with asyncio.Runner(loop_factory=loop) as runner:
        whole, split, by_byte = runner.run(run())
    assert split == whole
    assert by_byte == whole


class Reading:
    """What llhttp alone makes of a stream."""

    def __init__(self, stream):
        self.bodies = []
        self._body = b""
        self.error = None
        try:
            httptools.HttpRequestParser(self).feed_data(stream)
        except httptools.HttpParserError as error:
            self.error = error

    def on_body(self, body):
        self._body += body

    def on_message_complete(self):
        self.bodies.append(self._body)
        self._body = b""


CHUNKS = st.lists(st.binary(min_size=1, max_size=20), max_size=3).map(
    lambda pieces: chunked(*pieces)
)


@settings(max_examples=examples(150))
@given(start=CHUNKS, seed=st.integers(0, 2**32))
@example(start=chunked(b"abc"), seed=0)
def test_a_chunked_body_that_we_accept_llhttp_reads_the_same(start, seed):
    """Our own reading of chunks is never more lenient than llhttp's."""
    at = start.index(b"\r\n\r\n") + 4
    stream = start[:at] + soiled(start[at:], random.Random(seed))
    assume(stream != start)

    async def run():
        desk = Desk()
        async with serving(desk) as server:
            await send_in_pieces(server.port, stream, set())
        return desk.requests

    requests = asyncio.run(run())
    if requests:
        assert Reading(stream).bodies[: len(requests)] == [request.body for request in requests]


# --- slow and silent clients ------------------------------------------------------------


@on_both_loops
async def test_a_head_that_trickles_in_is_ended():
    async with serving(head_time=SHORT) as server, connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n")
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = asyncio.create_task(read_answer(reader))
        while not answer.done():  # a slowloris: each line comes well within the time
            writer.write(b"X-Filler: x\r\n")
            await asyncio.sleep(0.02)
        assert (await answer).status == 408
        assert 0.2 <= loop.time() - began < 2
        assert await read_end(reader) == b""


@on_both_loops
@pytest.mark.parametrize("start", [post(bytes(1000))[:-1000], chunked(b"abc")[:-5]])
async def test_a_body_that_trickles_in_is_ended(start):
    async with serving(body_time=SHORT) as server, connected(server) as (reader, writer):
        writer.write(start)
        answer = asyncio.create_task(read_answer(reader))
        number = 0
        while not answer.done():
            writer.write(
                b"x" if start.startswith(b"POST") and b"chunked" not in start else b"1\r\nx\r\n"
            )
            number += 1
            await asyncio.sleep(0.02)
        assert (await answer).status == 408
        assert await read_end(reader) == b""


@on_both_loops
async def test_a_connection_that_says_nothing_is_closed():
    async with serving(head_time=SHORT) as server, connected(server) as (reader, _):
        assert await read_end(reader) == b""
        await settled(lambda: server.connections == 0)


@on_both_loops
async def test_an_idle_connection_is_closed():
    async with serving(idle_time=SHORT) as server, connected(server) as (reader, writer):
        writer.write(HELLO)
        assert (await read_answer(reader)).status == 200
        assert await read_end(reader) == b""


@on_both_loops
async def test_empty_lines_do_not_keep_a_connection_alive():
    async with serving(idle_time=SHORT) as server, connected(server) as (reader, writer):
        writer.write(HELLO)
        assert (await read_answer(reader)).status == 200
        end = asyncio.create_task(read_end(reader))
        while not end.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"\r\n")
            await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionResetError):
            assert await end == b""


@on_both_loops
async def test_a_handler_may_take_longer_than_any_client():
    desk = Waiting()
    bounds = {"head_time": SHORT, "body_time": SHORT, "idle_time": SHORT}
    async with serving(desk, **bounds) as server, connected(server) as (reader, writer):
        writer.write(post(b"abc"))
        _, answer = await desk.next()
        await asyncio.sleep(0.5)
        answer(Response(200, b"at last"))
        assert (await read_answer(reader)).body == b"at last"


@on_both_loops
async def test_a_client_that_never_reads_is_not_served_on_and_ends():
    """It sends requests for ever, and leaves the answers where they are."""
    desk = Desk()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)

        def handler(request, answer):
            desk.requests.append(request)
            answer(Response(200, bytes(64 * 1024)))

        async with serving(handler, body_time=SHORT) as server:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", server.port))

            async def send_on():
                while True:
                    await loop.sock_sendall(client, HELLO * 100)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(send_on(), 5)
            await settled(lambda: server.connections == 0)
            assert len(desk.requests) < 500  # what fits into the sockets' buffers


@on_both_loops
async def test_a_slow_reader_gets_everything():
    def handler(request, answer):
        answer(Response(200, bytes(1024 * 1024)))

    async with serving(handler) as server, connected(server) as (reader, writer):
        writer.write(HELLO * 20)
        await asyncio.sleep(0.05)
        for _ in range(20):
            assert len((await read_answer(reader)).body) == 1024 * 1024
        writer.write(HELLO)
        assert (await read_answer(reader)).status == 200


# --- many connections -------------------------------------------------------------------


async def under_way(server, handler, count, stack, **how):
    """Open *count* connections with a request each that is not answered yet."""
    answers = []
    for _ in range(count):
        reader, writer = await stack.enter_async_context(connected(server, **how))
        writer.write(HELLO)
        answers.append((reader, await handler.next()))
    return answers


async def holds(server, count):
    """Wait until *server* has *count* connections that it serves."""
    await settled(lambda: server.connections == count)


@on_both_loops
async def test_one_connection_too_many_is_told_to_come_back():
    handler = Waiting()
    async with serving(handler, max_connections=2) as server:
        async with contextlib.AsyncExitStack() as stack:
            asked = await under_way(server, handler, 2, stack)
            async with connected(server) as (reader, _):
                answer = await read_answer(reader)  # without a request
                assert answer.status == 503
                assert answer.headers["Retry-After"] == "1"
                assert await read_end(reader) == b""
            assert await refused(server, post(bytes(100_000))) == 503
            assert server.connections == 2
            for reader, (request, answer) in asked:
                answer(echo(request))
                assert (await read_answer(reader)).status == 200
        await holds(server, 0)
        server.handler = Desk()
        assert await still_serves(server)


@pytest.mark.parametrize("sent", [b"", HELLO, HELLO[:10]], ids=["silent", "idle", "half a head"])
@on_both_loops
async def test_a_new_connection_replaces_the_one_that_has_waited_longest(sent):
    async with serving(max_connections=2) as server, contextlib.AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(connected(server)) for _ in range(2)]
        await holds(server, 2)
        for reader, writer in (second, first):
            writer.write(sent)
            if sent == HELLO:
                assert (await read_answer(reader)).status == 200
            await asyncio.sleep(0.005)  # the clock of uvloop counts milliseconds
        oldest, newer = (second, first) if sent == HELLO else (first, second)
        for _ in range(2):  # the second time it is the one that came last and is idle again
            assert await still_serves(server)
        assert await read_end(oldest[0]) == b""
        newer[1].write(HELLO[10:] if sent == HELLO[:10] else HELLO)
        assert (await read_answer(newer[0])).status == 200


@on_both_loops
async def test_an_address_with_too_many_connections_loses_its_own():
    elsewhere = {"local_addr": ("127.0.0.2", 0)}
    async with (
        serving(max_connections_per_peer=2) as server,
        connected(server, **elsewhere) as (other, writer),
    ):
        writer.write(HELLO)
        assert (await read_answer(other)).status == 200
        async with connected(server) as (first, _), connected(server):
            await holds(server, 3)
            assert await still_serves(server)
            assert await read_end(first) == b""
        writer.write(HELLO)
        assert (await read_answer(other)).status == 200


@on_both_loops
async def test_an_address_that_is_busy_on_all_its_connections_keeps_nobody_else_out():
    handler = Waiting()
    elsewhere = {"local_addr": ("127.0.0.2", 0)}
    async with (
        serving(handler, max_connections_per_peer=2) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        await under_way(server, handler, 2, stack)
        assert await refused(server, HELLO) == 503
        ((reader, (request, answer)),) = await under_way(server, handler, 1, stack, **elsewhere)
        answer(echo(request))
        assert (await read_answer(reader)).status == 200


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_connections_are_counted_by_address_and_by_network_in_ipv6(one, other, is_same):
    assert (_peer_group(one) == _peer_group(other)) is is_same


@on_both_loops
async def test_a_spare_path_is_answered_when_every_connection_is_busy():
    handler = Waiting()
    async with (
        serving(handler, max_connections=2, spare=["/hello"]) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        await under_way(server, handler, 2, stack)
        # More than there are spare places, and all of them hold theirs.
        for _ in range(40):
            await stack.enter_async_context(connected(server))
        assert await refused(server, post(b"{}")) == 503
        async with connected(server) as (reader, writer):
            writer.write(HELLO)
            request, answer = await handler.next()
            answer(echo(request))
            answered = await read_answer(reader)
            assert (answered.status, answered.headers["Connection"]) == (200, "close")
            assert await read_end(reader) == b""
        assert server.connections == 2


@on_both_loops
async def test_who_is_rejected_and_stays_is_cut_off():
    async with serving(max_connections=0) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(300):
            reader, _ = await stack.enter_async_context(connected(server))
            assert (await read_some(reader)).startswith(b"HTTP/1.1 503")
            assert len(server._rejected) <= 256
        await settled(lambda: not server._rejected)


async def read_some(reader):
    try:
        async with asyncio.timeout(5):
            return await reader.read(1000)
    except ConnectionResetError:
        return b""


@on_both_loops
async def test_running_out_of_files_is_a_pause_not_an_end(caplog, monkeypatch):
    real = socket.socket.accept
    left = [2]

    def accept(self):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self)

    async with serving(head_time=SHORT) as server:
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert await still_serves(server)
    assert [record.error for record in caplog.records] == ["Too many open files"] * 2


# --- starting and stopping --------------------------------------------------------------


@on_both_loops
async def test_a_parser_that_is_too_lenient_is_not_relied_on(monkeypatch):
    class Lenient:
        def __init__(self, protocol):
            pass

        def feed_data(self, data):
            pass

    monkeypatch.setattr("oncebridge.http.server.HttpRequestParser", Lenient)
    _check_strictness.cache_clear()
    with pytest.raises(ConfigError, match=r"install 0\.6\.4 or later"):
        await Server(Desk(), host="127.0.0.1", port=0).open()


@on_both_loops
async def test_a_port_in_use_is_a_setting_to_change():
    async with serving() as server:
        other = Server(Desk(), host="127.0.0.1", port=server.port)
        with pytest.raises(
            ConfigError, match=f"127.0.0.1:{server.port}: .*choose another port"
        ) as raised:
            await other.open()
    assert raised.value.where == ""


@on_both_loops
@pytest.mark.parametrize(
    ("host", "port", "advice"),
    [
        ("192.0.2.1", 0, "not an address of this machine"),
        ("no-such-host.invalid", 0, "the host name was not found"),
        ("x" * 300, 0, "the host name was not found"),
        ("127.0.0.1", 70_000, "from 0 to 65535"),
        ("127.0.0.1", -1, "from 0 to 65535"),
    ],
)
async def test_an_address_that_cannot_be_used_is_a_setting_to_change(host, port, advice):
    with pytest.raises(ConfigError, match=advice):
        await Server(Desk(), host=host, port=port).open()


@on_both_loops
async def test_a_privileged_port_is_a_setting_to_change(monkeypatch):
    def bind(self, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:80: .*choose 1024 or above"):
        await Server(Desk(), host="127.0.0.1", port=80).open()


@on_both_loops
async def test_a_name_is_listened_on_at_all_its_addresses():
    server = Server(Desk(), host="localhost", port=0)
    await server.open()
    try:
        reader, writer = await asyncio.open_connection("localhost", server.port)
        writer.write(HELLO)
        assert (await read_answer(reader)).status == 200
        writer.close()
        await writer.wait_closed()
    finally:
        await server.aclose()


@on_both_loops
async def test_a_port_is_free_again_at_once():
    async with serving() as first:
        assert await still_serves(first)
    again = Server(Desk(), host="127.0.0.1", port=first.port)
    await again.open()
    assert await still_serves(again)
    await again.aclose()


@on_both_loops
async def test_a_stop_lets_requests_under_way_finish_and_nobody_else_in():
    desk = Waiting()
    async with serving(desk) as server:
        async with (
            connected(server) as (idle, _),
            connected(server) as (busy, busy_writer),
            connected(server) as (sending, sending_writer),
        ):
            busy_writer.write(post(b"1") + post(b"never begun"))
            _, answer = await desk.next()
            sending_writer.write(post(b"22")[:-1])
            await settled(lambda: any(connection._body for connection in server._served))
            server.stop()
            assert await read_end(idle) == b""
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", server.port)
            sending_writer.write(b"2")
            _, second = await desk.next()
            answer(Response(200, b"one"))
            second(Response(200, b"two"))
            for reader, body in ((busy, b"one"), (sending, b"two")):
                last = await read_answer(reader)
                assert (last.body, last.headers["Connection"]) == (body, "close")
                assert await read_end(reader) == b""
        assert desk.asked.empty()
        await server.aclose()
        assert server.connections == 0


@on_both_loops
async def test_a_request_that_has_arrived_but_was_not_read_is_served_at_a_stop():
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(HELLO)
        assert (await read_answer(reader)).status == 200
        writer.write(HELLO)
        server.stop()
        answer = await read_answer(reader)
        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert await read_end(reader) == b""


@on_both_loops
async def test_closing_waits_for_answers_under_way():
    desk = Waiting()
    async with serving(desk) as server, connected(server) as (reader, writer):
        writer.write(post(b"1"))
        _, answer = await desk.next()
        closing = asyncio.create_task(server.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        answer(Response(200, b"one"))
        assert (await read_answer(reader)).body == b"one"
        assert await read_end(reader) == b""
        writer.close()
        await writer.wait_closed()
        await closing
        assert server.connections == 0


@on_both_loops
async def test_closing_does_not_wait_for_ever():
    desk = Waiting()
    async with serving(desk) as server, connected(server) as (reader, writer):
        writer.write(post(b"1"))
        _, answer = await desk.next()
        async with asyncio.timeout(2):
            await server.aclose(timedelta(milliseconds=50))
        assert server.connections == 0
        answer(Response(200, b"too late"))
        with contextlib.suppress(ConnectionResetError):
            assert await read_end(reader) == b""


@on_both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("turns", range(5))
async def test_a_client_that_comes_during_a_close_is_let_go_of(tls, turns):
    """At whatever point of being let in it is."""
    async with serving(tls=server_tls() if tls else None) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(2):
                await server.aclose(timedelta(0))
            assert server.connections == 0
            client.settimeout(2)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


@on_both_loops
async def test_closing_twice_and_without_opening_is_fine():
    server = Server(Desk(), host="127.0.0.1", port=0)
    await server.aclose()
    async with serving() as server:
        await server.aclose()
        await server.aclose()
        assert server.connections == 0


# --- TLS --------------------------------------------------------------------------------


def trusting():
    return {
        "ssl": ssl.create_default_context(cafile=TLS / "ca.pem"),
        "server_hostname": "localhost",
    }


@on_both_loops
async def test_tls_serves_the_same():
    how = trusting()
    async with serving(tls=server_tls()) as server:
        async with connected(server, **how) as (reader, writer):
            for number in range(10):
                writer.write(post(b"%d" % number) + chunked(bytes(100_000)))
                assert (await read_answer(reader)).body == b"POST /events %d" % number
                assert len((await read_answer(reader)).body) > 100_000
            writer.write(HELLO.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert (await read_answer(reader)).status == 200
            assert await read_end(reader) == b""
        async with connected(server, **how) as (reader, writer):
            writer.write(b"nonsense\r\n\r\n")
            assert (await read_answer(reader)).status == 400
        await settled(lambda: server.connections == 0)


@on_both_loops
async def test_a_refusal_is_seen_over_tls_by_who_is_still_sending():
    how = trusting()

    def send_all_then_read(port):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            how["ssl"].wrap_socket(plain, server_hostname="localhost") as client,
        ):
            body = bytes(4 * 1024 * 1024)
            client.sendall(post(body))
            return client.recv(65536)

    async with serving(tls=server_tls()) as server:
        received = await asyncio.to_thread(send_all_then_read, server.port)
    assert received.startswith(b"HTTP/1.1 413 ")


@on_both_loops
async def test_a_stranger_to_tls_is_dropped_and_others_are_served(caplog):
    how = trusting()
    async with serving(tls=server_tls(), head_time=SHORT) as server:
        async with connected(server) as (reader, writer):
            writer.write(HELLO)
            received = await read_some(reader)
            assert not received.startswith(b"HTTP")
        async with connected(server) as (reader, _):
            assert await read_some(reader) == b""  # said nothing
        async with connected(server, **how) as (reader, writer):
            writer.write(HELLO)
            assert (await read_answer(reader)).status == 200
    assert [record for record in caplog.records if record.name == "oncebridge"] == []


@on_both_loops
async def test_connections_without_a_handshake_are_counted_too():
    async with (
        serving(tls=server_tls(), max_connections=1) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        pairs = [await stack.enter_async_context(connected(server)) for _ in range(270)]
        await settled(lambda: sum(reader.at_eof() for reader, _ in pairs) == 13)
        assert len(server._handshakes) == 257


@on_both_loops
async def test_too_many_over_tls_are_told_so():
    how, handler = trusting(), Waiting()
    async with (
        serving(handler, tls=server_tls(), max_connections=1) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        await under_way(server, handler, 1, stack, **how)
        async with connected(server, **how) as (reader, _):
            assert (await read_answer(reader)).status == 503


@on_both_loops
async def test_handshakes_that_are_never_finished_keep_nobody_out():
    async with (
        serving(tls=server_tls(), max_connections=1) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(300):
            await stack.enter_async_context(connected(server))
        async with connected(server, **trusting()) as (reader, writer):
            writer.write(HELLO)
            assert (await read_answer(reader)).status == 200


@on_both_loops
async def test_a_stop_ends_handshakes():
    async with serving(tls=server_tls()) as server, connected(server) as (reader, _):
        await settled(lambda: server._handshakes)
        async with asyncio.timeout(2):
            await server.aclose()
        assert await read_some(reader) == b""
        assert not server._handshakes


# --- what it costs in memory ------------------------------------------------------------


@on_both_loops
async def test_a_body_that_is_never_finished_holds_no_more_than_was_sent():
    async with serving() as server, connected(server) as (_, writer):
        writer.write(post(bytes(2 * 1024 * 1024))[:1000])
        await settled(lambda: any(connection._body for connection in server._served))
        (connection,) = server._served
        assert len(connection._body) + len(connection._data) < 1000


CHUNKED = b"POST /events HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
UNFINISHED = {
    "by length": lambda size: post(bytes(size + 9))[:-9],
    "chunked": lambda size: CHUNKED + b"%x\r\n" % size + bytes(size) + b"\r\n",
}


def has_bodies(server, least):
    return server._body_bytes >= least


@pytest.mark.parametrize("unfinished", UNFINISHED.values(), ids=UNFINISHED)
@on_both_loops
async def test_unfinished_bodies_have_a_limit_together_and_the_first_begun_goes(unfinished):
    size = 100_000
    async with (
        serving(max_bodies=5 * size // 2) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        lines = []
        for number in range(1, 4):
            reader, writer = await stack.enter_async_context(connected(server))
            writer.write(unfinished(size))
            lines.append((reader, writer))
            await settled(partial(has_bodies, server, min(number, 2) * size))
        answer = await read_answer(lines[0][0])
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert await still_serves(server)
        for reader, writer in lines[1:]:
            is_chunked = unfinished is UNFINISHED["chunked"]
            writer.write(b"0\r\n\r\n" if is_chunked else bytes(9))
            assert (await read_answer(reader)).status == 200
        assert server._body_bytes == 0
        assert not server._bodies


@on_both_loops
async def test_the_room_of_a_body_is_free_again_when_its_client_is_gone():
    async with serving() as server:
        async with connected(server) as (_, writer):
            writer.write(post(bytes(1000))[:-500])
            await settled(lambda: server._body_bytes)
        await settled(lambda: not server._body_bytes)
        assert not server._bodies


# --- a body without a length ------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@on_both_loops
async def test_a_body_without_a_length_is_refused(version):
    handler = Desk()
    head = b"POST /events HTTP/" + version + b"\r\n" + HOST
    async with serving(handler) as server:
        assert await refused(server, head + b'\r\n{"detail": {}}') == 411
        assert await refused(server, head + b"\r\n") == 411
        assert not handler.requests
        answer = await ask(server, head + b"Content-Length: 0\r\n\r\n")
        assert (answer.status, answer.body) == (200, b"POST /events ")


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS"])
@on_both_loops
async def test_a_method_that_needs_no_body_needs_no_length(method):
    async with serving() as server:
        asked = method + b" /hello HTTP/1.1\r\n" + HOST + b"\r\n"
        assert (await ask(server, asked, bodiless=method == b"HEAD")).status == 200
