"""Targets behind a proxy: a real one, and for what real ones do not do, a script."""

import asyncio
import logging
import ssl
from datetime import timedelta

import pytest
from tests.http.targets import (
    OK,
    TLS,
    answering,
    on_both_loops,
    read_request,
    refusing_port,
    server_tls,
    serving,
)
from tests.servers.forward_proxy import PASSWORD, USER

from oncebridge import Closed, ConfigError, Delivery, No, Unknown, Unwell, Yes, parse
from oncebridge.base.secrets import Secret
from oncebridge.genesys.verification import Verifier
from oncebridge.http.client import Client, NotSent
from oncebridge.http.proxy import proxy_for
from oncebridge.http.target import HttpTarget
from oncebridge.service.genesys_options import GenesysOptions
from oncebridge.sinks.http import HttpSink, HttpSinkOptions

CA = str(TLS / "ca.pem")
RAW = b'{"source":"com.example.post","detail-type":"Parcel Sent","detail":{"parcel":1}}'
DELIVERY = Delivery(parse(RAW), bytes(range(32)))


def url_of(seen):
    """Name a target as only the proxy can find it; its certificate has that name."""
    return f"{seen.scheme}://elsewhere.example:{seen.port}/hook"


def sink_of(url, **options):
    if url.startswith("https"):
        options.setdefault("ca_file", CA)
    return HttpSink(url, HttpSinkOptions(allow_http=True, **options))


async def sent(url, **options):
    """Send one event, and give the sink's answer."""
    sink = sink_of(url, **options)
    try:
        async with asyncio.timeout(30):
            (answer,) = await sink.deliver([DELIVERY])
    finally:
        await sink.aclose()
    return answer


def tls_of(scheme, name="elsewhere"):
    return server_tls(name) if scheme == "https" else None


# --- which proxy --------------------------------------------------------------------------------

HERE = "http://proxy.example:3128"
GENESYS = GenesysOptions(
    region="eu-central-1", client_id=Secret("invented"), client_secret=Secret("invented")
)


@pytest.mark.parametrize(
    ("url", "proxies", "expected"),
    [
        ("https://crm.example", {}, None),
        ("https://crm.example", {"HTTPS_PROXY": HERE}, "proxy.example:3128"),
        ("https://crm.example", {"https_proxy": HERE}, "proxy.example:3128"),
        (
            "https://crm.example",
            {"https_proxy": HERE, "HTTPS_PROXY": "http://b"},
            "proxy.example:3128",
        ),
        ("https://crm.example", {"HTTPS_PROXY": "proxy.example:3128"}, "proxy.example:3128"),
        ("https://crm.example", {"HTTPS_PROXY": "//proxy.example:3128"}, "proxy.example:3128"),
        ("https://crm.example", {"HTTPS_PROXY": "http://[2001:db8::1]/"}, "[2001:db8::1]:80"),
        ("https://crm.example", {"HTTPS_PROXY": ""}, None),
        ("https://crm.example", {"HTTP_PROXY": HERE}, None),
        ("http://crm.example", {"HTTPS_PROXY": HERE}, None),
        ("http://crm.example", {"HTTP_PROXY": HERE}, "proxy.example:3128"),
        ("http://crm.example", {"HTTP_PROXY": HERE, "REQUEST_METHOD": "GET"}, None),
        ("http://crm.example", {"ALL_PROXY": HERE}, "proxy.example:3128"),
        ("https://crm.example", {"ALL_PROXY": HERE, "HTTPS_PROXY": "http://b:1"}, "b:1"),
    ],
)
def test_the_environment_names_the_proxy(proxies_of, url, proxies, expected):
    proxies_of(**proxies)
    proxy = proxy_for(HttpTarget.parse(url))
    assert (proxy and proxy.authority) == expected


@pytest.mark.parametrize(
    ("host", "no_proxy", "is_direct"),
    [
        ("crm.example", "crm.example", True),
        ("crm.example", "other.example, CRM.example", True),
        ("crm.example", "example", True),
        ("crm.example", ".example", True),
        ("crm.example", "*", True),
        ("crm.example:8443", "crm.example:8443", True),
        ("crm.example:8443", "crm.example:443", False),
        ("mycrm.example", "crm.example", False),
        ("crm.example", "10.0.0.0/8", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "192.168.0.0/16,10.0.0.0/8", True),
        ("11.1.2.3", "192.168.0.0/16,10.0.0.0/8", False),
        ("[2001:db8::1]", "2001:db8::/32", True),
        ("[2001:db8::1]", "2001:db8::1", True),
        ("[2001:db8::1]", "[2001:db8::1]", True),
        ("[2001:db8::1]", "2001:db8::2", False),
        # whatever is set, never through the proxy: this host, and what gives credentials to it
        *((host, "", True) for host in ("localhost", "127.0.0.1", "127.1", "[::1]", "0.0.0.0")),
        *((host, "", True) for host in ("169.254.169.254", "169.254.170.2", "2852039166")),
        *((host, "", True) for host in ("[fd00:ec2::254]", "[fe80::1]", "[::ffff:a9fe:a9fe]")),
    ],
)
def test_some_targets_are_reached_directly(proxies_of, host, no_proxy, is_direct):
    proxies_of(HTTPS_PROXY=HERE, NO_PROXY=no_proxy)
    assert (proxy_for(HttpTarget.parse(f"https://{host}/")) is None) == is_direct


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("socks5://worker:hush@proxy.example:1080", "is a SOCKS proxy"),
        ("SOCKS5H://worker:hush@proxy.example:1080", "is a SOCKS proxy"),
        ("https://worker:hush@proxy.example:3129", "is not an http:// URL"),
        ("http://worker:hush@proxy.example:port", "the host or port of the URL cannot be read"),
        ("http://worker:hush#tag@proxy.example:3128", "fragment"),
        ("http://worker:hush@", "has no host"),
    ],
)
async def test_a_proxy_that_cannot_be_used_ends_the_start(proxies_of, url, why):
    proxies_of(HTTPS_PROXY=url)
    # What does not send, such as a command that lists dead letters, is not kept from its work.
    sink = HttpSink("https://crm.example/hook")
    verifier = Verifier(GENESYS)
    for start in (sink.open, verifier.open):
        with pytest.raises(ConfigError, match="HTTPS_PROXY in the environment") as caught:
            await start()
        assert why in str(caught.value)
        assert "hush" not in str(caught.value)
    proxies_of(NO_PROXY="crm.example")
    await sink.open()
    for opened in (sink, verifier):
        await opened.aclose()


# --- through it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("is_guarded", [False, True], ids=["open", "guarded"])
@on_both_loops
async def test_events_go_through_the_proxy(start_proxy, proxies_of, caplog, scheme, is_guarded):
    caplog.set_level(logging.INFO, "oncebridge")
    proxy = start_proxy(is_guarded=is_guarded)
    proxies_of(HTTP_PROXY=proxy.url, HTTPS_PROXY=proxy.url)
    kept = OK.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
    async with serving(answering(kept), tls=tls_of(scheme)) as seen:
        sink = sink_of(url_of(seen), headers={"Authorization": Secret("Bearer of-the-target")})
        for _ in range(3):
            assert await sink.deliver([DELIVERY]) == [Yes()]
        await sink.aclose()
        assert seen.connections == 1  # through the same connection of the proxy
        for request in seen.requests:
            assert request.line == "POST /hook HTTP/1.1"
            assert request["Host"] == f"elsewhere.example:{seen.port}"
            assert request["Authorization"] == "Bearer of-the-target"
            assert request.body == RAW
        # It is the proxy's to take out, which proxy.py does for the first of a connection only.
        checked = seen.requests if scheme == "https" else seen.requests[:1]
        assert not any("Proxy-Authorization" in request for request in checked)
    for asked in proxy.asked:
        assert asked["host"] == f"elsewhere.example:{seen.port}"
        assert ("Proxy-Authorization" in asked["headers"]) == is_guarded
    if scheme == "https":  # the proxy learns where to, and nothing else
        (asked,) = proxy.asked
        assert asked["method"] == "CONNECT"
        assert set(asked["headers"]) <= {"Host", "Proxy-Authorization"}
    else:
        assert [asked["method"] for asked in proxy.asked] == ["POST"] * 3
    (line,) = [record for record in caplog.records if record.message == "oncebridge.proxy"]
    assert (line.target, line.proxy) == (
        f"elsewhere.example:{seen.port}",
        f"127.0.0.1:{proxy.port}",
    )
    assert not any(USER in str(record.__dict__) for record in caplog.records)


@on_both_loops
async def test_a_proxy_may_close_a_connection_without_a_word(proxies_of):
    """As tinyproxy does after each request: nothing may be sent on what it is about to close."""

    async def script(seen, reader, writer):
        seen.requests.append(await read_request(reader))
        writer.write(OK)

    async with serving(script) as proxy:
        proxies_of(HTTP_PROXY=f"http://127.0.0.1:{proxy.port}")
        sink = sink_of("http://elsewhere.example/hook")
        assert [await sink.deliver([DELIVERY]) for _ in range(20)] == [[Yes()]] * 20
        await sink.aclose()
    assert {request.line for request in proxy.requests} == {
        "POST http://elsewhere.example/hook HTTP/1.1"
    }
    assert proxy.connections == 20


async def test_the_certificate_is_the_targets(start_proxy, proxies_of):
    proxies_of(HTTPS_PROXY=start_proxy().url)
    async with serving(answering(), tls=server_tls("localhost")) as seen:
        answer = await sent(url_of(seen))
        assert isinstance(answer, No)
        assert "certificate verify failed: Hostname mismatch" in answer.reason
        assert seen.requests == []


async def test_no_proxy_goes_around_it(start_proxy, proxies_of):
    proxy = start_proxy()
    proxies_of(HTTPS_PROXY=proxy.url, HTTP_PROXY=proxy.url, NO_PROXY=".example")
    for scheme in ("http", "https"):
        async with serving(answering(), tls=tls_of(scheme)) as seen:
            answer = await sent(url_of(seen))  # a name that the proxy alone can find
            assert isinstance(answer, No)
            assert "host name" in answer.reason
            assert "proxy" not in answer.reason
    async with serving(answering()) as seen:
        assert await sent(seen.url) == Yes()  # this host
    assert proxy.asked == []


@pytest.mark.parametrize("host", ["10.0.0.1", "0x0a000001", "[fc00::1]", "192.168.1.1"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_proxy_does_not_lead_to_private_addresses(start_proxy, proxies_of, scheme, host):
    proxy = start_proxy()
    proxies_of(HTTPS_PROXY=proxy.url, HTTP_PROXY=proxy.url)
    answer = await sent(f"{scheme}://{host}/hook")
    assert isinstance(answer, No)
    assert "allow_private" in answer.reason
    assert proxy.asked == []


# --- when it fails ------------------------------------------------------------------------------


async def test_wrong_credentials_send_nothing(start_proxy, proxies_of):
    proxy = start_proxy(is_guarded=True)
    for url in (proxy.url_for("wrong"), f"http://127.0.0.1:{proxy.port}"):
        proxies_of(HTTPS_PROXY=url, HTTP_PROXY=url)
        async with serving(answering(), tls=tls_of("https")) as seen:
            answer = await sent(url_of(seen))
            assert isinstance(answer, No)
            assert f"proxy 127.0.0.1:{proxy.port}: HTTP 407" in answer.reason
            assert not {"wrong", USER, PASSWORD} & set(answer.reason.replace(":", " ").split())
            assert seen.connections == 0
        async with serving(answering()) as seen:
            assert await sent(url_of(seen)) == Closed("HTTP 407")
            assert seen.connections == 0
    assert proxy.asked == []


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_is_down_has_sent_nothing(proxies_of, scheme):
    with refusing_port() as port:
        url = f"http://127.0.0.1:{port}"
        proxies_of(HTTPS_PROXY=url, HTTP_PROXY=url)
        answer = await sent(f"{scheme}://elsewhere.example/hook")
    assert answer == No(f"proxy 127.0.0.1:{port}: connection refused")


@on_both_loops
async def test_a_proxy_that_hangs_has_opened_no_tunnel(start_proxy, proxies_of):
    proxy = start_proxy()
    proxies_of(HTTPS_PROXY=proxy.url)
    proxy.process.freeze()
    async with serving(answering(), tls=tls_of("https")) as seen:
        answer = await sent(url_of(seen), connect_timeout=timedelta(seconds=0.3))
        assert answer == No(f"proxy 127.0.0.1:{proxy.port}: no connection within 0.3 s")
        assert seen.connections == 0


async def test_a_target_that_the_proxy_cannot_reach(start_proxy, proxies_of):
    proxy = start_proxy()
    proxies_of(HTTPS_PROXY=proxy.url, HTTP_PROXY=proxy.url)
    with refusing_port() as port:
        answer = await sent(f"https://elsewhere.example:{port}/hook")
        assert answer == No(f"proxy 127.0.0.1:{proxy.port}: HTTP 502 to CONNECT")
        # Of a whole request nobody knows whether a 502 came before or after it was passed on.
        assert await sent(f"http://elsewhere.example:{port}/hook") == Unwell("HTTP 502")


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_dies_with_a_request_under_way(start_proxy, proxies_of, scheme):
    proxy = start_proxy()
    proxies_of(HTTPS_PROXY=proxy.url, HTTP_PROXY=proxy.url)

    async def take_and_wait(seen, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.to_thread(proxy.process.kill)

    async with serving(take_and_wait, tls=tls_of(scheme)) as seen:
        assert isinstance(await sent(url_of(seen)), Unknown)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno", "HTTP 403 to CONNECT"),
        (b"HTTP/1.0 503 Busy\r\n\r\n", "HTTP 503 to CONNECT"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://login.example\r\n\r\n", "HTTP 302 to CONNECT"),
        (b"HTTP/1.1 200 OK\r\n", "no complete response to CONNECT"),
        (b"", "no complete response to CONNECT"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "no complete response to CONNECT"),
        (
            b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
            "it sent data after its response to CONNECT",
        ),
        (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", "it does not speak HTTP"),
    ],
)
@on_both_loops
async def test_without_a_tunnel_nothing_is_sent(proxies_of, said, why):
    heard = bytearray()

    async def script(seen, reader, writer):
        heard.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(said)
        if len(said) < 18:  # else it would go on, if it were let
            writer.write_eof()
        heard.extend(await reader.read())

    async with serving(script) as proxy:
        proxies_of(HTTPS_PROXY=f"http://127.0.0.1:{proxy.port}")
        answer = await sent("https://elsewhere.example/hook?token=hush")
        await proxy.until(lambda: proxy.closed)
    assert answer == No(f"proxy 127.0.0.1:{proxy.port}: {why}")
    assert heard == b"CONNECT elsewhere.example:443 HTTP/1.1\r\nHost: elsewhere.example:443\r\n\r\n"


@on_both_loops
async def test_a_cancelled_request_leaves_no_half_open_tunnel(proxies_of):
    async def script(seen, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await reader.read()

    async with serving(script) as proxy:
        proxies_of(HTTPS_PROXY=f"http://127.0.0.1:{proxy.port}")
        client = Client("https://elsewhere.example/hook", tls=ssl.create_default_context())
        request = asyncio.create_task(client.post(b"{}"))
        await proxy.until(lambda: proxy.connections)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await proxy.until(lambda: proxy.closed)
        await client.aclose()
        with pytest.raises(NotSent, match="the client is closed"):
            await client.post(b"{}")
