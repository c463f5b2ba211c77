"""
The records of one shard, page by page.

Errors are retried without end, with growing pauses: a throttled call, an expired iterator, an
outage. Only errors that last are logged.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

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


class FailureBackoff:
    """
    How long to wait after failures in a row, and when to log them.

    *gone* is called if Kinesis does not find the shard or the stream.
    """

    def __init__(self, stream: str, shard: str, dice: Dice, gone: Callable[[], None]) -> None:
        self._fields = {"stream": stream, "shard": shard}
        self._dice = dice
        self._gone = gone
        self._times = 0

    def failed(self, what: str) -> float:
        """Record a failure; return for how many seconds to pause."""
        self._times += 1
        if self._times == _LOG_AT:
            _log.warning("oncebridge.shard_not_read", extra={**self._fields, "error": what})
        if what.startswith("ResourceNotFound"):
            self._gone()
        longest: float = min(_SHORTEST_PAUSE_S * 2 ** min(self._times - 1, 10), _LONGEST_PAUSE_S)
        return longest * (0.5 + self._dice.fraction() / 2)

    def succeeded(self) -> None:
        if self._times >= _LOG_AT:
            _log.warning("oncebridge.shard_read_again", extra=self._fields)
        self._times = 0

    def position_refused(self, position: Position) -> None:
        """Log that Kinesis does not know a sequence number any more."""
        fields = {**self._fields, "sequence_number": position.after}
        _log.error("oncebridge.place_is_unknown_records_may_be_lost", extra=fields)


class ShardFeed(ABC):
    """Returns the records of *shard*, from *position* on."""

    def __init__(self, shard: str, position: Position, pauses: FailureBackoff) -> None:
        self._shard = shard
        self._position = position
        self._pauses = pauses
        self._due_s = 0.0
        self._now = asyncio.get_running_loop().time

    @abstractmethod
    async def page(self) -> RecordPage:
        """Wait for the next page; after the last one, `next` is None."""

    def close(self) -> None:  # noqa: B027 - not every feed has something to close
        """Stop waiting; safe to repeat."""


class PolledFeed(ShardFeed):
    """Polls *stream* for the records of a shard, at least every *poll_s*."""

    def __init__(
        self,
        shard: str,
        position: Position,
        pauses: FailureBackoff,
        *,
        stream: KinesisStream,
        poll_s: float,
    ) -> None:
        super().__init__(shard, position, pauses)
        self._stream = stream
        self._poll_s = poll_s
        self._iterator = ""
        self._limit = _LIMIT

    async def page(self) -> RecordPage:
        while True:
            await asyncio.sleep(max(self._due_s - self._now(), 0))
            began = self._now()
            try:
                page = await self._ask()
            except _FAILURES as error:
                self._due_s = began + max(self._pause_s(error), _APART_S)
                continue
            self._pauses.succeeded()
            self._due_s = began + (_APART_S if page.behind_ms else self._poll_s)
            return page

    async def _ask(self) -> RecordPage:
        if not self._iterator:
            try:
                self._iterator = await self._stream.iterator(self._shard, self._position)
            except AwsError as error:
                if not self._position.after or error.code != "InvalidArgumentException":
                    raise
                # Kinesis does not have it any more: continue with the oldest record there is.
                self._pauses.position_refused(self._position)
                self._position = Position()
                self._iterator = await self._stream.iterator(self._shard, self._position)
        page = await self._stream.read(self._iterator, self._limit)
        self._limit = min(self._limit * 2, _LIMIT)
        self._iterator = page.next or ""
        if page.records:
            self._position = Position(after=page.records[-1].sequence_number)
        return page

    def _pause_s(self, error: Exception) -> float:
        if isinstance(error, Unclear):
            self._limit = max(self._limit // 2, 1)  # the page may be too large for the connection
        if isinstance(error, AwsError) and not error.retryable:
            self._iterator = ""  # it may have expired: iterators last five minutes
        return self._pauses.failed(str(error))
