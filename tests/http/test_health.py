import asyncio
import http.client
import json

import pytest

from oncebridge.errors import ConfigError
from oncebridge.observe.health import Health
from oncebridge.service.config import load
from oncebridge.service.service import Service


async def ask(port, path, method="GET"):
    def asked():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null"), answer.headers
        finally:
            connection.close()

    return await asyncio.to_thread(asked)


@pytest.fixture
async def asked():
    reasons = []
    health = Health("http://127.0.0.1:0", lambda: list(reasons))
    await health.open()
    yield health.port, reasons
    await health.aclose()


async def test_it_lives_and_says_whether_events_can_pass(asked):
    port, reasons = asked
    assert (await ask(port, "/healthz"))[:2] == (200, {"alive": True})
    assert (await ask(port, "/readyz"))[:2] == (200, {"ready": True})
    reasons.append("crm: the store is down")
    status, body, headers = await ask(port, "/readyz")
    assert (status, body) == (503, {"ready": False, "reasons": ["crm: the store is down"]})
    assert headers["Retry-After"] == "1"
    assert (await ask(port, "/healthz"))[0] == 200


async def test_it_has_nothing_else(asked):
    port, _ = asked
    assert (await ask(port, "/events"))[0] == 404
    assert (await ask(port, "/readyz", "POST"))[0] == 405
    assert (await ask(port, "/readyz", "HEAD"))[:2] == (200, None)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:1",
        "http://127.0.0.1",
        "127.0.0.1:1",
        "http://u:p@127.0.0.1:1",
        "http://:x",
    ],
)
def test_an_address_that_cannot_be_listened_at_is_refused(url):
    with pytest.raises(ConfigError, match="http://HOST:PORT") as error:
        Health(url, list)
    assert "u:p" not in str(error.value)


def test_it_has_no_path():
    with pytest.raises(ConfigError, match="/healthz and /readyz"):
        Health("http://127.0.0.1:1/health", list)


async def test_a_service_without_an_http_source_can_be_asked(tmp_path):
    events = tmp_path / "in.ndjson"
    events.write_text("")
    flags = {
        "source": f"file:{events}",
        "store": "memory:",
        "sink": f"file:{tmp_path / 'out'}",
        "dead": "memory:",
        "health": "http://127.0.0.1:0",
        "route": "desk",
    }
    service = Service(load(environment={}, flags=flags))
    await service.open()
    port = service.health_port
    try:
        assert (await ask(port, "/readyz"))[:2] == (200, {"ready": True})
        service.router.pause()
        status, body, _ = await ask(port, "/readyz")
        assert (status, body["reasons"]) == (503, ["paused"])
        service.router.gateways[0].resume()
        service.stop()
        status, body, _ = await ask(port, "/readyz")
        assert (status, body["reasons"]) == (503, ["shutting down"])
    finally:
        await service.close()
    with pytest.raises(OSError, match="refused"):
        await ask(port, "/healthz")


async def test_connections_that_ask_nothing_keep_nobody_out(asked):
    port, _ = asked
    lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(400)]
    assert (await ask(port, "/healthz"))[:2] == (200, {"alive": True})
    assert (await ask(port, "/readyz"))[:2] == (200, {"ready": True})
    for _, writer in lines:
        writer.close()


async def test_half_requests_keep_nobody_out(asked):
    port, _ = asked
    lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(400)]
    for _, writer in lines:
        writer.write(b"GET /healthz HT")
    assert (await ask(port, "/healthz"))[:2] == (200, {"alive": True})
    for _, writer in lines:
        writer.close()
