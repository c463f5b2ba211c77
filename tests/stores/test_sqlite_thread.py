"""The thread that SQLite lives in, and the hand that goes round its table."""

import asyncio
import gc
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from oncebridge import StoreError
from oncebridge.events.key import Part
from oncebridge.stores.api import Claim, Commit, Commits, Fate, Want, Wants
from oncebridge.stores.sqlite.database import SQLiteFile, _Thread
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock

WINDOW_MS = 600_000
names: Iterator[bytes] = (number.to_bytes(16) for number in count(1))


def opened(path: Path) -> SQLiteFile:
    return SQLiteFile(path, name="x", version=1, schema="CREATE TABLE IF NOT EXISTS x(a)")


def threads() -> set[threading.Thread]:
    """Those of all files; one of an earlier test may still be about to end."""
    return {one for one in threading.enumerate() if one.name == "oncebridge-sqlite"}


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - a thread that ends tells nobody
            await asyncio.sleep(0.01)


async def test_there_is_none_before_the_first_call_and_after_the_last(tmp_path: Path) -> None:
    before = threads()
    file = opened(tmp_path / "a.db")
    assert threads() <= before
    await file.run(lambda _: None)
    (its,) = threads() - before
    await file.aclose()
    await until(lambda: its not in threads())


async def test_a_file_that_nobody_closed_takes_its_thread_along(tmp_path: Path) -> None:
    before = threads()
    file = opened(tmp_path / "a.db")
    await file.run(lambda _: None)
    (its,) = threads() - before
    del file
    gc.collect()
    await until(lambda: its not in threads())


async def test_what_is_raised_there_is_raised_here() -> None:
    thread = _Thread()
    loop = asyncio.get_running_loop()

    def leaves() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await asyncio.shield(thread.do(loop, leaves))
    assert await thread.do(loop, lambda: 5) == 5
    thread.stop()


async def test_nobody_waits_for_a_thread_that_has_been_stopped() -> None:
    thread = _Thread()
    loop = asyncio.get_running_loop()
    late = thread.do(loop, lambda: "what was asked for before")
    thread.stop()
    assert await late == "what was asked for before"
    with pytest.raises(RuntimeError, match="stopped"):
        thread.do(loop, lambda: None)


async def test_a_call_on_another_loop_hears_that_the_file_was_closed(tmp_path: Path) -> None:
    file = opened(tmp_path / "a.db")
    goes_on = threading.Event()
    asked = threading.Event()

    def first(_: object) -> None:
        asked.set()
        goes_on.wait(20)

    def elsewhere() -> list[object]:
        async def two() -> list[object]:
            works = [file.change(first), file.change(lambda _: None)]
            return await asyncio.gather(*works, return_exceptions=True)

        return asyncio.run(two())

    there = asyncio.create_task(asyncio.to_thread(elsewhere))
    await asyncio.to_thread(asked.wait, 20)
    closing = asyncio.create_task(file.aclose())
    await asyncio.sleep(0)  # it waits for its turn in the thread
    goes_on.set()
    async with asyncio.timeout(20):
        await closing
        done, waited = await there
    assert done is None
    assert waited is None or isinstance(waited, StoreError | RuntimeError)


async def test_one_who_is_cancelled_takes_nobody_along(tmp_path: Path) -> None:
    file = opened(tmp_path / "a.db")
    cancelled = asyncio.create_task(file.run(lambda _: time.sleep(0.05)))
    other = asyncio.create_task(file.run(lambda _: "here"))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await other == "here"
    assert cancelled.cancelled()
    await file.aclose()


LEAVES = """
import asyncio, sys, time
from oncebridge.stores.sqlite.database import SQLiteFile

file = SQLiteFile(sys.argv[1], name="x", version=1, schema="CREATE TABLE IF NOT EXISTS x(a)")

def slow(db):
    print("begun", flush=True)
    time.sleep(0.3)
    db.execute("INSERT INTO x VALUES (1)")

async def main():
    task = asyncio.create_task(file.change(slow))
    await asyncio.sleep(0.1)

asyncio.run(main())
"""


async def test_an_interpreter_that_ends_does_not_hang_and_ends_what_has_begun(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.db"
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", LEAVES, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "begun\n"
    file = opened(path)
    assert await file.run(lambda db: db.execute("SELECT count(*) FROM x").fetchone()) == (1,)
    await file.aclose()


# --- the hand -------------------------------------------------------------------------------


async def done(store: SQLiteStore, keys: list[bytes]) -> None:
    wants = [Want((Part(key),), next(names), next(names), 30_000, WINDOW_MS) for key in keys]
    held = [
        answer.held[0] for answer in await store.claim(Wants.of(wants)) if isinstance(answer, Claim)
    ]
    assert len(held) == len(keys)
    await store.commit(
        Commits.of([Commit(h.key, h.generation, Fate.DELIVERED, WINDOW_MS) for h in held])
    )


async def rows(store: SQLiteStore) -> int:
    def counted(db: sqlite3.Connection) -> int:
        return int(db.execute("SELECT count(*) FROM oncebridge_records").fetchone()[0])

    return await store.file.run(counted)


@pytest.mark.parametrize("limit", [1, 7, 100, 101, 1000])
async def test_the_hand_reaches_every_record_and_looks_at_no_more_than_it_was_told(
    tmp_path: Path, limit: int
) -> None:
    clock = ManualClock()
    async with SQLiteStore(tmp_path / "seen.db", clock=clock) as store:
        await done(store, [b"", *[b"%03d" % n for n in range(0, 200, 2)]])
        await store.purge(50)  # it does not begin at the beginning
        clock.advance(WINDOW_MS - 1)
        assert await store.purge(1000) == 0
        clock.advance(1)
        removed = []
        while await rows(store):
            removed.append(await store.purge(limit))
        assert sum(removed) == 101
        assert max(removed) <= limit
        assert len(removed) <= 101 // limit + 2


async def test_the_hand_passes_over_what_is_still_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    async with SQLiteStore(tmp_path / "seen.db", clock=clock) as store:
        await done(store, [b"%03d" % n for n in range(0, 100, 2)])
        clock.advance(WINDOW_MS // 2)
        await done(store, [b"%03d" % n for n in range(1, 100, 2)])
        clock.advance(WINDOW_MS // 2)
        assert sum([await store.purge(9) for _ in range(13)]) == 50
        assert await rows(store) == 50
        left = await store.peek([b"%03d" % n for n in range(100)])
        assert [record is not None for record in left] == [False, True] * 50
