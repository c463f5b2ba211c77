"""The server goes away under load, and comes back: what that costs."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.size import some

from oncebridge.base.secrets import Address
from oncebridge.service.addresses import StorePlace
from oncebridge.service.config import load
from oncebridge.service.service import Service

from .kinds import QUICK, REDIS, REDIS_IN_MEMORY, SHARED, Running, running
from .outage_setup import RECEIVE, Town, event


@pytest.fixture
def own(request: pytest.FixtureRequest, aws_identity: None) -> Iterator[Running]:
    """A server that nobody else uses, and that may be killed."""
    with running(request.param) as server:
        yield server


@pytest.mark.parametrize("own", some(SHARED, QUICK), ids=repr, indirect=True)
async def test_an_outage_loses_nothing_and_repeats_nothing_without_an_excuse(own: Running) -> None:
    now = asyncio.get_running_loop().time
    async with Town(lambda: own.store(timeout_s=1.0), own.kind.events) as town:
        await town.queue.until(0.3)
        await asyncio.to_thread(_stop, own)
        await town.until_down()
        down_at = now()
        await asyncio.sleep(1.5)
        received = town.receives_between(down_at, now())
        await asyncio.to_thread(_go_on, own)
        await town.finish()
        print(town.told(), f"; {received} receives while it was known to be down")
        await town.check()
        # Each worker tries once or twice; else the source is left alone.
        assert received <= 2 * 2 * 2 * RECEIVE


@pytest.mark.parametrize("own", some(SHARED, [REDIS]), ids=repr, indirect=True)
async def test_a_service_waits_for_its_store_and_goes_on_by_itself(
    own: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "oncebridge")
    count = own.kind.events
    source, sink = tmp_path / "in.ndjson", tmp_path / "out.ndjson"
    source.write_bytes(b"".join(event(number) + b"\n" for number in range(count)))
    service = _service(own, source, sink)
    await asyncio.to_thread(_stop, own)
    await service.open()
    try:
        assert "oncebridge.store_is_away" in caplog.messages
        run = asyncio.create_task(service.run())
        await asyncio.to_thread(_go_on, own)
        await _until_lines(sink, count // 5)
        caplog.clear()
        await asyncio.to_thread(_stop, own)
        await _until_told(caplog, "oncebridge.down")
        await asyncio.to_thread(_go_on, own)
        async with asyncio.timeout(60):
            await run
        assert [gateway.down() for gateway in service.router.gateways] == [[]]
    finally:
        is_drained = await service.close()
    assert is_drained
    times = Counter(json.loads(line)["detail"]["parcel"] for line in sink.read_text().splitlines())
    assert set(times) == set(range(count))
    counts = service.counts()
    # On a slow disk a write may outlast the time that a send has.
    assert 0 <= times.total() - counts["forwarded"] <= counts["ambiguous"]
    assert times.total() - count <= counts["late_commits"] + counts["ambiguous"]


@pytest.mark.parametrize("own", [REDIS_IN_MEMORY], ids=repr, indirect=True)
@pytest.mark.full
async def test_a_store_that_forgets_everything_may_repeat_and_never_lose(own: Running) -> None:
    async with Town(lambda: own.store(timeout_s=1.0), own.kind.events) as town:
        await town.queue.until(0.5)
        await asyncio.to_thread(own.server.kill)
        await town.until_down()
        await asyncio.to_thread(own.server.start)
        await town.finish()
        print(town.told())
        assert not town.lost
        assert town.unexcused
        # Only what was delivered before the loss can repeat, and it does: those are the copies
        # that came after it.
        assert 0 < len(town.repeated) <= town.events // 2
        assert max(len(deliveries) for deliveries in town.repeated.values()) == 2


def _stop(own: Running) -> None:
    """Take the server away; one that would forget everything only stands still."""
    if own.kind.keeps:
        own.server.kill()
    else:
        own.server.freeze()


def _go_on(own: Running) -> None:
    if own.kind.keeps:
        own.server.start()
    else:
        own.server.thaw()


def _service(own: Running, source: Path, sink: Path) -> Service:
    flags = {
        "source": f"file:{source}",
        "sink": f"file:{sink}",
        "store": "memory:",
        "dead": "memory:",
        "batch": "50",
        "lease": "4s",
        "sink_timeout": "500ms",
        "commit_budget": "2s",
        "margin": "500ms",
    }
    setup = load(environment={}, flags=flags)
    store = StorePlace(Address("test:store"), own.store(timeout_s=1.0))
    return Service(replace(setup, config=replace(setup.config, store=store)))


async def _until_lines(path: Path, count: int) -> None:
    async with asyncio.timeout(30):
        while _lines(path) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def _until_told(caplog: pytest.LogCaptureFixture, message: str) -> None:
    async with asyncio.timeout(30):
        while message not in caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
