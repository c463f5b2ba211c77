"""Clients whose clocks are an hour wrong, in either direction, on one store."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.servers.process import Process, free_port, listens

from oncebridge.stores.api import (
    Busy,
    Claim,
    Commit,
    Commits,
    Duplicate,
    Fate,
    Release,
    Releases,
    Reply,
    Wants,
)

from . import wrong_clock
from .kinds import SHARED, Kind, Running
from .operations import fresh, only, want
from .wired import WiredStore

_HOUR_S = 3600
_LEASE_MS, _WINDOW_MS = 1500, 1500
_NEAR_MS = 1000
_ROOT = Path(__file__).parents[2]
_OWN_CLOCK = [kind for kind in SHARED if kind.has_clock]
_HOSTS_CLOCK = [kind for kind in SHARED if not kind.has_clock]


@contextmanager
def living(running: Running, moved_s: float, folder: Path) -> Iterator[WiredStore]:
    """Use a store from a process whose clock is *moved_s* ahead."""
    port = free_port()
    place = msgspec.json.encode(running.place()).decode()
    process = Process(
        [sys.executable, "-m", wrong_clock.__name__, str(moved_s), str(port), place],
        log=folder / f"{port}.log",
        ready=lambda: listens(port),
        env={"PYTHONPATH": str(_ROOT)},
    )
    process.start()
    try:
        yield WiredStore(port)
    finally:
        process.kill()


@pytest.mark.parametrize("kind", _OWN_CLOCK, ids=repr)
async def test_the_clock_of_a_client_changes_nothing(
    kind: Kind, server_of: Callable[[Kind], Running], tmp_path: Path
) -> None:
    running = server_of(kind)
    key = fresh()
    with (
        living(running, +_HOUR_S, tmp_path) as early,
        living(running, -_HOUR_S, tmp_path) as late,
    ):
        async with early, late, running.store() as here:
            times = [await store.now_ms() for store in (early, late, here)]
            assert max(times) - min(times) < _NEAR_MS

            first = await only(late.claim(Wants.of([want(key, lease_ms=_LEASE_MS)])))
            assert isinstance(first, Claim)
            for store in (early, late, here):
                busy = await only(store.claim(Wants.of([want(key)])))
                assert isinstance(busy, Busy)
                assert busy.left_ms <= _LEASE_MS
            await asyncio.sleep(_LEASE_MS / 1000 + 0.1)
            second = await only(early.claim(Wants.of([want(key, lease_ms=_LEASE_MS)])))
            assert isinstance(second, Claim)
            assert second.held[0].attempts == 2
            assert second.held[0].generation == first.held[0].generation
            assert await late.release(Releases.of([Release(key, first.token)])) == [Reply.FENCED]

            done = Commit(key, second.held[0].generation, Fate.DELIVERED, _WINDOW_MS)
            assert await early.commit(Commits.of([done])) == [Reply.COMMITTED]
            assert await late.commit(Commits.of([done])) == [Reply.ALREADY]
            for store in (early, late, here):
                assert isinstance(await only(store.claim(Wants.of([want(key)]))), Duplicate)
            await asyncio.sleep(_WINDOW_MS / 1000 + 0.1)
            assert await late.purge() >= 0
            anew = await only(late.claim(Wants.of([want(key)])))
            assert isinstance(anew, Claim)
            assert anew.held[0].attempts == 1
            assert isinstance(await only(early.claim(Wants.of([want(key)]))), Busy)


@pytest.mark.parametrize("moved_s", [+_HOUR_S, -_HOUR_S])
@pytest.mark.parametrize("kind", _HOSTS_CLOCK, ids=repr)
@pytest.mark.full
async def test_a_client_whose_clock_is_wrong_does_not_start_where_its_clock_would_decide(
    kind: Kind, moved_s: float, server_of: Callable[[Kind], Running], tmp_path: Path
) -> None:
    with (
        pytest.raises(RuntimeError, match="clock"),
        living(server_of(kind), moved_s, tmp_path),
    ):
        pass
