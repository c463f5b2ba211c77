"""
Single arrivals, in batches.

Whatever is put within one turn of the event loop goes through the router together. At low
load nobody waits for anybody; at high load batches grow by themselves, and a batch costs
little more than one event.
"""

import asyncio
import logging

from msgspec.structs import replace

from oncebridge.router import Answer, Router
from oncebridge.source import Done
from oncebridge.verdict import Verdict

_log = logging.getLogger("oncebridge")

_FULL = Answer(
    acknowledge=False, verdict=Verdict.FAILED, retry_after_ms=1000, reason="too much under way"
)
_CROWDED = Answer(
    acknowledge=False, verdict=Verdict.FAILED, reason="too many events wait for the sink"
)
_BROKEN_OFF = Answer(
    acknowledge=False, verdict=Verdict.FAILED, retry_after_ms=1000, reason="an unforeseen error"
)


def tell(done: Done, answer: Answer) -> None:
    """Answer one; if it fails to listen, that must not cost the others."""
    try:
        done(answer)
    except Exception as error:  # noqa: BLE001 - a source may raise anything
        # Its type only: the text of an exception may quote the event.
        _log.error("oncebridge.answer_failed", extra={"error": type(error).__name__})


class Intake:
    """
    Bring single records to *router*.

    They are refused while *at_most* of them, or *at_most_bytes*, are under way.
    """

    def __init__(
        self,
        router: Router,
        *,
        batch: int = 500,
        at_most: int = 20_000,
        at_most_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        self._router = router
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

    def not_ready(self) -> list[str]:
        gateways = self._router.gateways
        return [f"{gateway.route}: {why}" for gateway in gateways for why in gateway.not_ready()]

    def _flush(self) -> None:
        if not self._raws:
            return
        raws, dones = self._raws, self._dones
        self._raws, self._dones = [], []
        task = asyncio.get_running_loop().create_task(self._run(raws, dones))
        self._tasks.add(task)
        size = sum(map(len, raws))
        task.add_done_callback(lambda task: self._end(task, dones, size))

    async def _run(self, raws: list[bytes], dones: list[Done | None]) -> None:
        if crowded_s := self._router.crowded_s():
            # Whoever waits for an answer is told now, and not when its time is over.
            answer = replace(_CROWDED, retry_after_ms=int(crowded_s * 1000) + 1)
            for at in range(len(dones)):
                self._answer(dones, at, answer)
            return
        await self._router.process(
            raws, answered=lambda at, answer: self._answer(dones, at, answer)
        )

    def _answer(self, dones: list[Done | None], at: int, answer: Answer) -> None:
        done, dones[at] = dones[at], None
        if done is None:
            return
        self._under_way -= 1
        tell(done, answer)

    def _end(self, task: asyncio.Task[None], dones: list[Done | None], size: int) -> None:
        """Hand back what a batch that was broken off has left unanswered."""
        self._tasks.discard(task)
        self._bytes -= size
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("oncebridge.batch_failed", extra={"error": type(error).__name__})
        for at in range(len(dones)):
            self._answer(dones, at, _BROKEN_OFF)

    async def aclose(self, within_s: float | None = None) -> None:
        """Wait for what is under way, and break off what is not through *within_s*."""
        self._flush()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
