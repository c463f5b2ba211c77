"""
The records of one shard, page by page.

Errors are retried without end, with growing pauses: a throttled call, an expired iterator, an
outage. Only errors that last are logged.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.base.clock import Dice
from oncebridge.errors import ConfigError
from oncebridge.sources.kinesis.stream import KinesisStream, Position, RecordPage

_log = logging.getLogger("oncebridge")

_APART_S: Final = 0.25  # a shard answers five calls a second, of all its readers together
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LOG_AT: Final = 3
_LIMIT: Final = 2000
_FAILURES: Final = (AwsError, NotSent, Unclear, ConfigError)  # the last: there are no credentials


class ShardFeed(Struct, eq=False, kw_only=True):
    """
    Returns the records of *shard*, from *position* on.

    *gone* is called if Kinesis does not find the shard or the stream.
    """

    stream: KinesisStream
    shard: str
    position: Position
    dice: Dice
    gone: Callable[[], None]
    _failures: int = 0
    """Failures in a row."""
    _due_s: float = 0.0

    async def page(self) -> RecordPage:
        """Wait for the next page; after the last one, `next` is None."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop waiting; safe to repeat."""

    def _failed(self, what: str) -> float:
        """Record a failure; return for how many seconds to pause."""
        self._failures += 1
        if self._failures == _LOG_AT:
            _log.warning("oncebridge.shard_not_read", extra={**self._fields(), "error": what})
        if what.startswith("ResourceNotFound"):
            self.gone()
        longest: float = min(_SHORTEST_PAUSE_S * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE_S)
        return longest * (0.5 + self.dice.fraction() / 2)

    def _succeeded(self) -> None:
        if self._failures >= _LOG_AT:
            _log.warning("oncebridge.shard_read_again", extra=self._fields())
        self._failures = 0

    def _start_with_oldest(self) -> None:
        """Kinesis does not have the last record any more: continue with the oldest there is."""
        fields = {**self._fields(), "sequence_number": self.position.after}
        _log.error("oncebridge.place_is_unknown_records_may_be_lost", extra=fields)
        self.position = Position()

    def _fields(self) -> dict[str, str]:
        return {"stream": self.stream.name, "shard": self.shard}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class PolledFeed(ShardFeed, eq=False, kw_only=True):
    """Polls the stream for the records of a shard, at least every *poll_s*."""

    poll_s: float
    _iterator: str = ""
    _limit: int = _LIMIT

    async def page(self) -> RecordPage:
        while True:
            await asyncio.sleep(max(self._due_s - self._now(), 0))
            began = self._now()
            try:
                page = await self._ask()
            except _FAILURES as error:
                self._due_s = began + max(self._pause_s(error), _APART_S)
                continue
            self._succeeded()
            self._due_s = began + (_APART_S if page.behind_ms else self.poll_s)
            return page

    async def _ask(self) -> RecordPage:
        if not self._iterator:
            try:
                self._iterator = await self.stream.iterator(self.shard, self.position)
            except AwsError as error:
                if not self.position.after or error.code != "InvalidArgumentException":
                    raise
                self._start_with_oldest()
                self._iterator = await self.stream.iterator(self.shard, self.position)
        page = await self.stream.read(self._iterator, self._limit)
        self._limit = min(self._limit * 2, _LIMIT)
        self._iterator = page.next or ""
        if page.records:
            self.position = Position(after=page.records[-1].sequence_number)
        return page

    def _pause_s(self, error: Exception) -> float:
        if isinstance(error, Unclear):
            self._limit = max(self._limit // 2, 1)  # the page may be too large for the connection
        if isinstance(error, AwsError) and not error.retryable:
            self._iterator = ""  # it may have expired: iterators last five minutes
        return self._failed(str(error))
