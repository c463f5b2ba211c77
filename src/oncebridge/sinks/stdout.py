"""
The standard output sink: NDJSON, one line per event, for the next program in a pipe.

An event counts as delivered when the pipe has accepted it; what the reader does with it is not
known. Only as much is written as the pipe accepts at once, so a reader that is slow or stopped
blocks neither the loop nor the end of the program.
"""

import errno
import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from io import UnsupportedOperation
from itertools import accumulate, pairwise
from typing import BinaryIO, ClassVar, Final, Self

from msgspec import Struct

from oncebridge.base.line_files import WriterThread
from oncebridge.errors import ConfigError, SinkError
from oncebridge.events.framing import as_line
from oncebridge.sinks.api import Closed, Delivery, No, SinkAnswer, Unknown, Yes

_PAUSE_MS: Final = 50
_PIECE: Final = select.PIPE_BUF  # a pipe that is writable accepts this much at once
_GONE: Final = frozenset({errno.EPIPE, errno.EBADF, errno.ENXIO})


class StdoutSinkOptions(Struct, frozen=True, kw_only=True):
    """The standard output has no options."""


class StdoutSink:
    """
    Write events to *stream*, by default the standard output.

    A line that was begun is finished before the next one, even if its batch was cancelled
    meanwhile, so that the reader gets complete lines only.
    """

    Options: ClassVar[type[StdoutSinkOptions]] = StdoutSinkOptions
    batch = 100
    concurrency = 1

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream
        self._pipe: _Pipe | None = None
        self.is_gone = False
        """True if the reader has closed the pipe; a pipe never gets another reader."""
        self._rest = b""  # of a line that was begun
        self._thread = WriterThread()

    @classmethod
    def from_url(cls, url: str, options: StdoutSinkOptions | None = None) -> Self:  # noqa: ARG003 - there are none
        """Write to the standard output, whose address is `-`."""
        if url != "-":
            raise ConfigError("", f"{url!r}: the address of the standard output is '-'")
        return cls()

    async def open(self) -> None:
        self._opened()

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        if self._thread.is_busy:
            reason = "the reader of the standard output has not read an earlier batch yet"
            return [No(reason)] * len(deliveries)
        pipe = self._opened()
        lines = [as_line(delivery.event.raw) for delivery in deliveries]
        return await self._thread.run(lambda stop: self._write(pipe, lines, stop))

    async def aclose(self) -> None:
        await self._thread.aclose(lambda: None)

    def _opened(self) -> "_Pipe":
        if self._pipe is None:
            stream = self._stream or getattr(sys.stdout, "buffer", None)
            if stream is None:
                raise SinkError("there is no standard output to write to")
            try:
                self._pipe = _Pipe(stream)
            except (OSError, ValueError) as error:
                raise SinkError(f"the standard output is closed ({error})") from error
        return self._pipe

    def _write(
        self, pipe: "_Pipe", lines: Sequence[bytes], stop: threading.Event
    ) -> list[SinkAnswer]:
        text = memoryview(b"".join([self._rest, *lines]))
        sent = 0
        trouble: No | Closed = No("the reader of the standard output reads too slowly")
        try:
            while sent < len(text) and not stop.is_set():
                sent += pipe.write(text[sent : sent + _PIECE])
        except (OSError, ValueError) as error:
            trouble = _answer(error)
            self.is_gone = isinstance(trouble, Closed)
        ends = list(accumulate(map(len, lines), initial=len(self._rest)))
        is_whole = sent in ends
        self._rest = (
            b"" if is_whole else bytes(text[sent : next(end for end in ends if end > sent)])
        )
        return list(_answers(ends, sent, trouble))


def _answers(ends: Sequence[int], sent: int, trouble: No | Closed) -> Iterator[SinkAnswer]:
    """Yield the answer for each line, by how much of it was sent."""
    for begin, end in pairwise(ends):
        if end <= sent:
            yield Yes()
        elif begin < sent and not isinstance(trouble, Closed):
            yield Unknown(trouble.reason)
        else:
            yield trouble


def _answer(error: OSError | ValueError) -> No | Closed:
    if isinstance(error, OSError) and error.errno not in _GONE:
        return No(f"the standard output: {error.strerror}")
    return Closed("the reader of the standard output has closed it")


class _Pipe:
    """Write as much as *stream* takes without blocking for long."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        stream.flush()  # buffered output comes first
        try:
            self._fd = stream.fileno()
        except UnsupportedOperation:  # a stream in memory
            self._fd = -1
        self._poll = select.poll()
        if self._fd >= 0:
            self._poll.register(self._fd, select.POLLOUT)

    def write(self, piece: memoryview) -> int:
        """Write at most *piece*; return how many bytes were written."""
        if self._fd < 0:
            count = self._stream.write(piece)
            self._stream.flush()
            return count
        if not self._poll.poll(_PAUSE_MS):
            return 0
        try:
            return os.write(self._fd, piece)
        except BlockingIOError:
            return 0
