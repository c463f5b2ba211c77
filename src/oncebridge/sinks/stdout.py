"""
The sink that is the standard output: NDJSON, one line per event, for the next program in a pipe.

What the pipe has taken counts as delivered; what its reader makes of it is not known.
Only so much is written as can be taken at once, so a reader that is slow, or stands
still, holds up neither the loop nor the end of the program.
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
_PIECE: Final = select.PIPE_BUF  # as much as a pipe takes whole once it says that it takes any
_GONE: Final = frozenset({errno.EPIPE, errno.EBADF, errno.ENXIO})


class StdoutSinkOptions(Struct, frozen=True, kw_only=True):
    """There is nothing to set about the standard output."""


class StdoutSink:
    """
    Write events to *stream*, by default the standard output.

    A line that was begun is finished before the next one, also when its batch has been
    given up meanwhile, so that the reader finds whole lines only.
    """

    Options: ClassVar[type[StdoutSinkOptions]] = StdoutSinkOptions
    batch = 100
    concurrency = 1

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream
        self._pipe: _Pipe | None = None
        self.is_gone = False
        """Whoever read it has left, and a pipe never gets another reader."""
        self._rest = b""  # of a line that was begun
        self._thread = WriterThread()

    @classmethod
    def from_url(cls, url: str, options: StdoutSinkOptions | None = None) -> Self:  # noqa: ARG003 - there are none
        """Write to the standard output, whose address is `-`."""
        if url != "-":
            raise ConfigError("", f"{url!r}: the standard output is just '-'")
        return cls()

    async def open(self) -> None:
        self._opened()

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        if self._thread.is_busy:
            reason = "the reader of the standard output has not taken an earlier batch yet"
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
        trouble: No | Closed = No("the reader of the standard output does not take more")
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
    """Answer for each line by how much of it was sent."""
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
    return Closed("nobody reads the standard output any more")


class _Pipe:
    """Write as much as *stream* takes without blocking for long."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        stream.flush()  # what stands there already comes first
        try:
            self._fd = stream.fileno()
        except UnsupportedOperation:  # a stream in memory
            self._fd = -1
        self._poll = select.poll()
        if self._fd >= 0:
            self._poll.register(self._fd, select.POLLOUT)

    def write(self, piece: memoryview) -> int:
        """Write at most *piece*, and tell how many bytes were taken."""
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
