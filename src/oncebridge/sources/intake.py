"""
Makes batches of single arrivals.

Records that are put within one turn of the event loop go to the router together. At low load
there is no wait; at high load batches grow, and a batch costs little more than one event.

The records of a large request are parsed first, in turns (see `oncebridge.engine.cpu_turns`), so
that they do not delay other requests. They may take up three quarters of the capacity; the rest
is for single records.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from oncebridge.engine.batch import Arrival
from oncebridge.engine.cpu_turns import SMALL
from oncebridge.engine.router import Router, RouterAnswer
from oncebridge.engine.verdict import Verdict
from oncebridge.sources.api import Done

_log = logging.getLogger("oncebridge")

_FULL = RouterAnswer(
    acknowledge=False,
    verdict=Verdict.FAILED,
    retry_after_ms=1000,
    reason="too many events in progress",
)
_RATE_LIMITED = RouterAnswer(
    acknowledge=False, verdict=Verdict.FAILED, reason="too many events are waiting for the sink"
)
_UNEXPECTED_ERROR = RouterAnswer(
    acknowledge=False, verdict=Verdict.FAILED, retry_after_ms=1000, reason="an unexpected error"
)


def report_answer(done: Done, answer: RouterAnswer) -> None:
    """Call *done* with *answer*; an error in it must not affect the others."""
    try:
        done(answer)
    except Exception as error:  # noqa: BLE001 - a source may raise anything
        # Its type only: the text of an exception may quote the event.
        _log.error("oncebridge.answer_failed", extra={"error": type(error).__name__})


class Intake:
    """
    Pass single records to *router*.

    They are refused while *at_most* of them, or *at_most_bytes*, are in progress. *is_open*
    returns True once the store is open.
    """

    def __init__(
        self,
        router: Router,
        *,
        batch: int = 500,
        at_most: int = 20_000,
        at_most_bytes: int = 256 * 1024 * 1024,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self._router = router
        self._is_open = is_open
        self._batch = batch
        self._at_most = at_most
        self._at_most_bytes = at_most_bytes
        self._under_way = 0
        self._bytes = 0
        self._raws: list[bytes] = []
        self._dones: list[Done | None] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, raw: bytes, done: Done) -> None:
        if self._under_way >= self._at_most or self._bytes >= self._at_most_bytes:
            done(_FULL)
            return
        self._under_way += 1
        self._bytes += len(raw)
        self._raws.append(raw)
        self._dones.append(done)
        if len(self._raws) >= self._batch:
            self._flush()
        elif len(self._raws) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def put_all(self, raws: Sequence[bytes], dones: Sequence[Done]) -> None:
        size = sum(map(len, raws))
        if size <= SMALL:
            for raw, done in zip(raws, dones, strict=True):
                self.put(raw, done)
            return
        if (
            self._under_way + len(raws) > self._at_most * 3 // 4
            or self._bytes + size > self._at_most_bytes * 3 // 4
        ):
            for done in dones:
                done(_FULL)
            return
        self._under_way += len(raws)
        self._bytes += size
        unread: list[bytes] = [*raws]
        waiting: list[Done | None] = [*dones]
        self._start(self._read(unread, waiting), unread, waiting)

    def not_ready(self, *, named: bool = True) -> list[str]:
        """Return why records are not accepted right now; *named*: with the routes' names."""
        reasons = [] if self._is_open() else ["the store is not available yet"]
        found = [
            f"{gateway.route}: {why}" if named else why
            for gateway in self._router.gateways
            for why in gateway.not_ready()
        ]
        return [*reasons, *(found if named else sorted(set(found)))]

    def _flush(self) -> None:
        if not self._raws:
            return
        raws, dones = self._raws, self._dones
        self._raws, self._dones = [], []
        self._start(self._run(raws, dones), raws, dones)

    def _start(
        self, work: Coroutine[Any, Any, None], raws: list[bytes], dones: list[Done | None]
    ) -> None:
        """Start *work* on records; those left in *raws* and *dones* are answered when it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(task, raws, dones))

    async def _read(self, raws: list[bytes], dones: list[Done | None]) -> None:
        """Parse the records of a large request, and start each part when it is parsed."""
        while raws:
            arrivals = await self._router.read_all(raws[: self._batch])
            part, waiting = raws[: self._batch], dones[: self._batch]
            del raws[: self._batch], dones[: self._batch]
            self._start(self._run(arrivals, waiting), part, waiting)

    async def _run(self, arrivals: Sequence[Arrival], dones: list[Done | None]) -> None:
        if rate_limited_s := self._router.rate_limited_s():
            # The sender gets an answer now, not when its timeout is over.
            answer = replace(_RATE_LIMITED, retry_after_ms=int(rate_limited_s * 1000) + 1)
            for at in range(len(dones)):
                self._answer(dones, at, answer)
            return
        await self._router.process(
            arrivals, answered=lambda at, answer: self._answer(dones, at, answer)
        )

    def _answer(self, dones: list[Done | None], at: int, answer: RouterAnswer) -> None:
        done, dones[at] = dones[at], None
        if done is None:
            return
        self._under_way -= 1
        report_answer(done, answer)

    def _end(self, task: asyncio.Task[None], raws: list[bytes], dones: list[Done | None]) -> None:
        """Answer the records that a cancelled or failed batch left unanswered."""
        self._tasks.discard(task)
        self._bytes -= sum(map(len, raws))
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("oncebridge.batch_failed", extra={"error": type(error).__name__})
        for at in range(len(dones)):
            self._answer(dones, at, _UNEXPECTED_ERROR)

    async def aclose(self, within_s: float | None = None) -> None:
        """Wait for records in progress, and cancel those that are not done *within_s*."""
        self._flush()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
