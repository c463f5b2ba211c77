"""
The records of one shard, page by page, whatever happens on the way.

A page is waited for as long as it takes: a throttled call, an iterator that expired, an
outage are dealt with here, each with a pause that grows. Only what lasts is told.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.base.clock import Dice
from oncebridge.errors import ConfigError
from oncebridge.sources.kinesis.stream import KinesisStream, Position, RecordPage

_log = logging.getLogger("oncebridge")

_APART_S: Final = 0.25
"""A shard answers five times a second, for all its readers together."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_TELL_AT: Final = 3
_LIMIT: Final = 2000


class ShardFeed(Protocol):
    """Where the records of a shard come from."""

    async def page(self) -> RecordPage:
        """Wait for the next page; one that nothing follows is the end of the shard."""
        ...

    def close(self) -> None:
        """Wait for nothing any more; safe to repeat."""
        ...


class FailureBackoff:
    """
    How long to wait after failures in a row, and when to tell somebody.

    *gone* is called where Kinesis says that the shard, or all of the stream, is not there.
    """

    def __init__(self, stream: str, shard: str, dice: Dice, gone: Callable[[], None]) -> None:
        self._fields = {"stream": stream, "shard": shard}
        self._dice = dice
        self._gone = gone
        self._times = 0

    def failed(self, what: str) -> float:
        """Note a failure, and tell for how many seconds to pause."""
        self._times += 1
        if self._times == _TELL_AT:
            _log.warning("oncebridge.shard_not_read", extra={**self._fields, "error": what})
        if what.startswith("ResourceNotFound"):
            self._gone()
        longest: float = min(_SHORTEST_PAUSE_S * 2 ** min(self._times - 1, 10), _LONGEST_PAUSE_S)
        return longest * (0.5 + self._dice.fraction() / 2)

    def succeeded(self) -> None:
        if self._times >= _TELL_AT:
            _log.warning("oncebridge.shard_read_again", extra=self._fields)
        self._times = 0

    def position_refused(self, position: Position) -> None:
        """Tell that Kinesis does not know a place any more."""
        fields = {**self._fields, "sequence_number": position.after}
        _log.error("oncebridge.place_is_unknown_records_may_be_lost", extra=fields)


class PolledFeed:
    """Ask for the records of *shard*, from *position* on, every *poll_s* at least."""

    def __init__(
        self,
        stream: KinesisStream,
        shard: str,
        position: Position,
        *,
        poll_s: float,
        pauses: FailureBackoff,
    ) -> None:
        self._stream = stream
        self._shard = shard
        self._position = position
        self._poll_s = poll_s
        self._pauses = pauses
        self._iterator = ""
        self._limit = _LIMIT
        self._due_s = 0.0

    async def page(self) -> RecordPage:
        while True:
            await asyncio.sleep(max(self._due_s - self._now(), 0))
            began = self._now()
            try:
                page = await self._ask()
            except (
                AwsError,
                ConfigError,
                NotSent,
                Unclear,
            ) as error:  # ConfigError: no credentials
                self._due_s = began + max(self._pause_s(error), _APART_S)
                continue
            self._pauses.succeeded()
            self._due_s = began + (_APART_S if page.behind_ms else self._poll_s)
            return page

    def close(self) -> None:
        """Nothing is open in between."""

    async def _ask(self) -> RecordPage:
        if not self._iterator:
            self._iterator = await self._iterator_from(self._position)
        page = await self._stream.read(self._iterator, self._limit)
        self._limit = min(self._limit * 2, _LIMIT)
        self._iterator = page.next or ""
        if page.records:
            self._position = Position(after=page.records[-1].sequence_number)
        return page

    async def _iterator_from(self, position: Position) -> str:
        try:
            return await self._stream.iterator(self._shard, position)
        except AwsError as error:
            if not position.after or error.code != "InvalidArgumentException":
                raise
            # It is too old, as far as Kinesis is concerned: go on with the oldest there is.
            self._pauses.position_refused(position)
            self._position = Position()
            return await self._stream.iterator(self._shard, self._position)

    def _pause_s(self, error: AwsError | ConfigError | NotSent | Unclear) -> float:
        if isinstance(error, Unclear):
            self._limit = max(self._limit // 2, 1)  # it may be too much for this line
        if isinstance(error, AwsError) and not error.retryable:
            self._iterator = ""  # it may have expired: they last five minutes
        return self._pauses.failed(str(error))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
