"""
Two workers as they are often written, to be convicted by the same harness.

*mark-before* puts the key, then delivers: a worker that dies in between has lost the
event, because its next copy looks like a repeat. *mark-after* looks the key up,
delivers, then puts it: two copies in two hands at once both pass. Neither is made worse
than it has to be: a refusal takes the mark back, and every write is atomic.
"""

import asyncio
import hashlib
import json
import sqlite3
import sys
from time import monotonic

import msgspec

from .wire import GONE, Connection
from .worker import Job, die_with_parent


def key_of(body: bytes) -> str:
    detail = json.loads(body)["detail"]
    del detail["timestamp"], detail["metadata"]
    return hashlib.sha256(json.dumps(detail, sort_keys=True).encode()).hexdigest()


class Marks:
    """The keys seen so far, in the file that all workers share."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a kill is no power failure
        self._db.execute("CREATE TABLE IF NOT EXISTS marks (key TEXT PRIMARY KEY)")

    def has(self, key: str) -> bool:
        found = self._db.execute("SELECT 1 FROM marks WHERE key = ?", (key,)).fetchone()
        return found is not None

    def put(self, key: str) -> bool:
        """Put *key*, and tell whether it was new."""
        return self._db.execute("INSERT OR IGNORE INTO marks VALUES (?)", (key,)).rowcount == 1

    def take_back(self, key: str) -> None:
        self._db.execute("DELETE FROM marks WHERE key = ?", (key,))


class NaiveWorker:
    def __init__(self, job: Job, queue: Connection, marks: Marks) -> None:
        self._job = job
        self._queue = queue
        self._marks = marks

    async def run(self) -> None:
        while True:
            messages = await self._queue.ask("receive", self._job.receive)
            handled = [self._handle(body) for _, body in messages]
            done = await asyncio.gather(*handled)
            gone = [number for (number, _), is_done in zip(messages, done, strict=True) if is_done]
            if gone:
                await self._queue.ask("delete", gone)
            again = [(number, 0.1) for number, _ in messages if number not in gone]
            if again:
                await self._queue.ask("later", again)

    async def _handle(self, body: bytes) -> bool:
        """Tell whether the message may be deleted."""
        raise NotImplementedError

    async def _deliver(self, key: str, body: bytes) -> bool:
        sink = await Connection.open(self._job.socket, self._job.incarnation)
        began = monotonic()
        await asyncio.sleep(self._job.latency_s)
        try:
            (answer,) = await sink.ask("deliver", [(key, 1, began, body, False)])
        except GONE:
            return False
        finally:
            sink.close()
        return answer == "yes"


class MarkBefore(NaiveWorker):
    async def _handle(self, body: bytes) -> bool:
        key = key_of(body)
        if not self._marks.put(key):
            return True
        taken = await self._deliver(key, body)
        if not taken:
            self._marks.take_back(key)
        return taken


class MarkAfter(NaiveWorker):
    async def _handle(self, body: bytes) -> bool:
        key = key_of(body)
        if self._marks.has(key):
            return True
        taken = await self._deliver(key, body)
        if taken:
            self._marks.put(key)
        return taken


CONTROLS = {"mark-before": MarkBefore, "mark-after": MarkAfter}


async def work(kind: str, job: Job) -> None:
    queue = await Connection.open(job.socket, job.incarnation)
    await CONTROLS[kind](job, queue, Marks(job.store.removeprefix("sqlite:"))).run()


def main() -> None:
    die_with_parent()
    asyncio.run(work(sys.argv[2], msgspec.json.decode(sys.argv[1], type=Job)))


if __name__ == "__main__":
    main()
