"""
Events from a file or from standard input: NDJSON, a JSON array, one event; gzip too.

A line that is not an event goes to the dead letters with its number, and reading continues.
Events that fail (the sink is down, say) are retried in place, so the end of the file is reached
when every event is final. The position is recorded in the store: a run that was stopped continues
there when it is started again, if the file is still the same up to there.
"""

import asyncio
import logging
import os
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Self

import msgspec
from msgspec import Struct

from oncebridge.base.clock import wait_until_set
from oncebridge.base.line_files import file_path
from oncebridge.base.options import Doc
from oncebridge.base.threads import run_in_thread
from oncebridge.engine.router import RouterAnswer
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.events.event import Unreadable
from oncebridge.events.framing import RawRecord, RecordReader
from oncebridge.sources.api import Host
from oncebridge.sources.checkpoint import Checkpoint, CheckpointTaken
from oncebridge.sources.pump import Pump, SourceRecord

_Place = tuple[int, int]  # the position after a record, and its last line
_log = logging.getLogger("oncebridge")

_SAMPLE = 4096
_GZIP = b"\x1f\x8b"
_BATCH_BYTES = 4 * 1024 * 1024
_LEASE_MS = 20_000
_KEEP_MS = 30 * 24 * 3600 * 1000
_SAVE_EVERY_S, _TRY_AGAIN_S = 1.0, 1.0


class FileSourceOptions(Struct, frozen=True, kw_only=True):
    """Options of the file source."""

    resume: Annotated[
        bool, Doc("Continue where a stopped run ended; otherwise read from the beginning.")
    ] = True


class FileSource:
    """Reads *path*, or standard input if there is none."""

    Options: ClassVar = FileSourceOptions

    def __init__(self, path: Path | None, options: FileSourceOptions | None = None) -> None:
        self._path = path
        self._options = options or FileSourceOptions()
        self._file: BinaryIO | None = None
        self._records: RecordReader
        self._pump: Pump[_Place | None] | None = None
        self._checkpoint: Checkpoint | None = None
        self._host: Host
        self._is_packed = False
        self._place: _Place = (0, 0)
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.resumed_at = 0
        """The line at which a stopped run was resumed; 0: at the beginning."""

    @classmethod
    def from_url(cls, url: str, options: FileSourceOptions | None = None) -> Self:
        """Read `file:PATH`, or standard input for `-`."""
        if url == "-":
            return cls(None, options)
        return cls(Path(file_path(url)), options)

    # --- the life of a source ----------------------------------------------------------

    async def open(self, host: Host) -> None:
        self._host = host
        if self._path is None:
            # Not `sys.stdin`: a thread that waits for input would keep its lock.
            self._file = os.fdopen(0, "rb", buffering=0, closefd=False)
            self._records = RecordReader(self._file)
        else:
            try:
                self._file = self._path.open("rb")
            except OSError as error:
                why = error.strerror or type(error).__name__
                raise ConfigError("source", f"file:{self._path}: {why}") from None
        self._pump = Pump(
            host.router, self._on_answer, in_order=self._path is not None, batch=host.batch
        )

    async def run(self) -> None:
        assert self._pump is not None  # noqa: S101 - open before
        if self._path is not None and not await self._resume():
            return
        if self._checkpoint is None:
            await self._pump.run(self._take)
            return
        keeping = asyncio.create_task(
            self._checkpoint.keep(self._write_place, self._ended, every_s=_SAVE_EVERY_S)
        )
        # If the checkpoint is not kept any more, nothing more is read.
        keeping.add_done_callback(lambda _: self.stop())
        try:
            await self._pump.run(self._take)
        finally:
            self._ended.set()
            (taken,) = await asyncio.gather(keeping, return_exceptions=True)
            if taken is None:
                await self._release_checkpoint(self._checkpoint, at_end=self._pump.is_through)
        if taken is not None:
            raise taken

    def stop(self) -> None:
        self._stopping.set()
        if self._pump is not None:
            self._pump.stop()

    def progress(self) -> tuple[int, int] | None:
        if self._path is None or self._file is None or self._file.closed:
            return None
        return self._file.tell(), os.fstat(self._file.fileno()).st_size

    async def aclose(self) -> None:
        if self._file is not None:
            self._file.close()

    # --- reading -----------------------------------------------------------------------

    async def _take(self) -> list[SourceRecord[_Place | None]] | None:
        read = partial(self._records.read, self._host.batch, _BATCH_BYTES)
        records = await run_in_thread(read, "oncebridge-file")
        # The position is recorded for whole batches: each save releases the claim for a moment.
        return [_record_of(record, is_last=record is records[-1]) for record in records] or None

    def _on_answer(self, place: _Place | None, answer: RouterAnswer) -> None:
        if answer.acknowledge and place is not None:
            self._place = place

    # --- resuming -----------------------------------------------------------------------

    async def _resume(self) -> bool:
        """Claim the checkpoint and find the position; return False if stopped meanwhile."""
        assert self._file is not None  # noqa: S101
        assert self._path is not None  # noqa: S101
        while not self._host.is_open():
            if await wait_until_set(self._stopping, _TRY_AGAIN_S):
                return False
        if self._options.resume and self._file.seekable():
            sample = self._file.read(_SAMPLE)
            self._file.seek(0)
            self._is_packed = sample.startswith(_GZIP)
            self._checkpoint = Checkpoint(
                self._host.store,
                "file",
                str(self._path.resolve()),
                _digest(sample),
                dice=self._host.dice,
                lease_ms=_LEASE_MS,
                keep_ms=_KEEP_MS,
            )
            memo = None
            while memo is None:
                try:
                    memo = await self._checkpoint.take()
                except StoreUnavailable:
                    if await wait_until_set(self._stopping, _TRY_AGAIN_S):
                        return False
            self._place = self._read_place(memo)
        offset, self.resumed_at = self._place
        if self.resumed_at:
            extra = {"source": str(self._path), "line": self.resumed_at}
            _log.info("oncebridge.resumed_at_line", extra=extra)
        self._records = RecordReader(self._file, start=offset, line=self.resumed_at or 1)
        return True

    async def _release_checkpoint(self, checkpoint: Checkpoint, *, at_end: bool) -> None:
        """Release the checkpoint with the position, or delete it at the end of the file."""
        try:
            await (checkpoint.clear() if at_end else checkpoint.release(self._write_place()))
        except (StoreError, CheckpointTaken) as error:
            # The next run reads some events again, and finds duplicates.
            _log.warning("oncebridge.place_not_saved", extra={"error": str(error)})

    def _write_place(self) -> bytes:
        return msgspec.json.encode((*self._place, self._file_mark(self._place[0])))

    def _read_place(self, memo: bytes) -> _Place:
        """Return where a run was stopped; (0, 0) if the file has changed."""
        try:
            offset, line, mark = msgspec.json.decode(memo, type=tuple[int, int, str])
        except msgspec.MsgspecError:
            return 0, 0
        return (offset, line) if mark == self._file_mark(offset) else (0, 0)

    def _file_mark(self, offset: int) -> str:
        """Return a mark of the file: a hash of the bytes before *offset*, or size and date (gzip)."""
        assert self._file is not None  # noqa: S101
        fd = self._file.fileno()
        if self._is_packed:
            stat = os.fstat(fd)
            return f"{stat.st_size} {stat.st_mtime_ns}"
        first = max(offset - _SAMPLE, 0)
        return _digest(os.pread(fd, offset - first, first))


def _record_of(record: RawRecord, *, is_last: bool) -> SourceRecord[_Place | None]:
    raw: bytes | Unreadable = record.raw
    if record.too_long:
        message = "too long to read; only its beginning is kept"
        raw = Unreadable(record.raw, "too-large", message)
    place = (record.end, record.last_line) if is_last else None
    return SourceRecord(place, raw, origin=f"line {record.line}")


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()
