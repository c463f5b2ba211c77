"""
Write the rows in this process, or in several worker processes for a large recording.

Workers are forked, so that they share the compiled rules and Python's hashes. Each has a pipe to
its parent and a few queued chunks. They hold nothing that needs cleaning up: when the parent ends,
they see the end of the pipe and exit. A worker that dies or fails ends the audit with an error.
"""

import gc
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec
from msgspec import Struct

from oncebridge.audit.reading import Block, RecordBatch, spelt
from oncebridge.audit.rows import ChunkSummary, Job, RowWriter
from oncebridge.errors import OncebridgeError

_AHEAD = {Block: 2, RecordBatch: 1}
"""
How many chunks are queued for a worker, so that it does not wait for the next.

A batch is larger than the buffer of a pipe: sending it blocks until the worker reads it.
"""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end an audit."""


class AuditFailed(OncebridgeError):
    """An audit could not be finished; the message says why."""


def cpus() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerPool(Protocol):
    """Takes chunks, and returns their summaries in any order."""

    def write(self, chunk: int, work: Block | RecordBatch) -> Iterator[ChunkSummary]:
        """Add a chunk; yield the summaries of chunks that are done."""
        ...

    def finish(self) -> Iterator[ChunkSummary]:
        """Yield the summaries of all other chunks, and close all files."""
        ...

    @property
    def samples(self) -> Sequence[dict[tuple[str, str], list[bytes]]]: ...


@contextmanager
def worker_pool(job: Job, workers: int) -> Iterator[WorkerPool]:
    """Return a pool of *workers* processes for *job*; with 0, this process does the work."""
    pool = _ForkedPool(job, workers) if workers else _InProcess(job)
    try:
        yield pool
    finally:
        pool.stop()


class _InProcess:
    """Writes the rows in this process."""

    def __init__(self, job: Job) -> None:
        self._writer = RowWriter(job, 0, 1)

    def write(self, chunk: int, work: Block | RecordBatch) -> Iterator[ChunkSummary]:
        try:
            yield self._writer.write(chunk, work)
        except OSError as error:
            raise AuditFailed(explain_os_error(error)) from None

    def finish(self) -> Iterator[ChunkSummary]:
        try:
            self._writer.close()
        except OSError as error:
            raise AuditFailed(explain_os_error(error)) from None
        yield from ()

    def stop(self) -> None:
        """Close all files; unwritten rows are not needed any more."""
        with suppress(OSError):
            self._writer.close()

    @property
    def samples(self) -> Sequence[dict[tuple[str, str], list[bytes]]]:
        return [self._writer.samples.kinds]


class _Task(Struct, frozen=True, array_like=True):
    chunk: int
    work: Block | RecordBatch


class _Finished(Struct, frozen=True, array_like=True, tag=True):
    """The last message of a worker."""

    samples: list[tuple[str, str, list[bytes]]]


class _Failed(Struct, frozen=True, array_like=True, tag=True):
    message: str


class _ChunkDone(Struct, frozen=True, array_like=True, tag=True):
    summary: ChunkSummary


_pack = msgspec.msgpack.Encoder().encode
_read_task = msgspec.msgpack.Decoder(_Task | None).decode
_read_answer = msgspec.msgpack.Decoder(_ChunkDone | _Finished | _Failed).decode


class _WorkerProcess(Struct):
    process: ForkProcess
    pipe: Connection
    ahead: int = 0


class _ForkedPool:
    """Writes the rows in forked processes."""

    def __init__(self, job: Job, count: int) -> None:
        self._workers: list[_WorkerProcess] = []
        self.samples: list[dict[tuple[str, str], list[bytes]]] = []
        try:
            for number in range(count):
                self._start(job, number, count)
        except BaseException:
            self.stop()
            raise

    def _start(self, job: Job, number: int, count: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        # Otherwise a worker holds the pipes of the others open, and does not see the parent end.
        inherited = [*(worker.pipe for worker in self._workers), ours]
        process = context.Process(
            target=_work, args=(job, number, count, theirs, inherited), daemon=True
        )
        with _deferring_signals():
            with warnings.catch_warnings():
                # A worker takes no lock that another thread of this process could hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._workers.append(_WorkerProcess(process, ours))

    def write(self, chunk: int, work: Block | RecordBatch) -> Iterator[ChunkSummary]:
        most = _AHEAD[type(work)]
        while not (free := [worker for worker in self._workers if worker.ahead < most]):
            yield from self._answers()
        worker = min(free, key=lambda one: one.ahead)
        self._send(worker, _pack(_Task(chunk, work)))
        worker.ahead += 1

    def finish(self) -> Iterator[ChunkSummary]:
        for worker in self._workers:
            self._send(worker, _pack(None))
            worker.ahead += 1
        while any(worker.ahead for worker in self._workers):
            yield from self._answers()

    def _send(self, worker: _WorkerProcess, message: bytes) -> None:
        try:
            worker.pipe.send_bytes(message)
        except OSError:
            self._raise_lost(worker)

    def _answers(self) -> Iterator[ChunkSummary]:
        """Wait for one or more messages; yield the summaries."""
        busy = {worker.pipe: worker for worker in self._workers if worker.ahead}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            try:
                answer = _read_answer(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                self._raise_lost(worker)
                continue
            worker.ahead -= 1
            match answer:
                case _ChunkDone(summary):
                    yield summary
                case _Finished(samples):
                    self.samples.append({(source, topic): raws for source, topic, raws in samples})
                case _Failed(message):
                    raise AuditFailed(message)

    def _raise_lost(self, worker: _WorkerProcess) -> None:
        """Raise `AuditFailed` for a worker that ended unexpectedly."""
        while worker.pipe.poll():  # it may have sent the reason
            try:
                answer = _read_answer(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                break
            if isinstance(answer, _Failed):
                raise AuditFailed(answer.message)
        worker.process.join(1)
        code = worker.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
        raise AuditFailed(f"a worker process ended {how}; the machine may be out of memory")

    def stop(self) -> None:
        """Terminate all workers."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
        self._workers.clear()


@contextmanager
def _deferring_signals() -> Iterator[None]:
    """
    Call signal handlers written in Python after the block instead of inside it.

    A fork runs hooks (`os.register_at_fork`), and Python drops what a handler raises while one
    of them runs. To block the signals would not do: another thread may receive them, and the
    handler is called in the main thread all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread, and raise there
        return
    found = {int(number): signal.getsignal(number) for number in _ENDS}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    heard: list[int] = []
    is_over = False

    def note(number: int, frame: FrameType | None) -> None:
        if is_over:  # a handler that is back in place has raised before this one was
            handlers[number](number, frame)
        else:
            heard.append(number)

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        is_over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in heard:
            signal.raise_signal(number)


def _work(
    job: Job, number: int, count: int, pipe: Connection, inherited: Sequence[Connection]
) -> None:
    """Run tasks of the pipe, and exit without cleaning up the parent's state."""
    for heard in (signal.SIGINT, signal.SIGHUP):
        signal.signal(heard, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    # There are no reference cycles here; collecting them would take a third of the time.
    gc.disable()
    try:
        _write_all(RowWriter(job, number, count), pipe)
    except EOFError:
        pass  # the parent has ended
    except OSError as error:
        _send_failure(pipe, explain_os_error(error))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        place = traceback.extract_tb(error.__traceback__)[-1]
        _send_failure(
            pipe, f"a worker failed: {type(error).__name__} at {place.name}:{place.lineno}"
        )
    finally:
        # Without Python's exit: a lock that a thread of the parent held stays locked.
        os._exit(0)


def _write_all(writer: RowWriter, pipe: Connection) -> None:
    while (task := _read_task(pipe.recv_bytes())) is not None:
        pipe.send_bytes(_pack(_ChunkDone(writer.write(task.chunk, task.work))))
    writer.close()
    samples = [(*kind, raws) for kind, raws in writer.samples.kinds.items()]
    pipe.send_bytes(_pack(_Finished(samples)))


def _send_failure(pipe: Connection, message: str) -> None:
    with suppress(OSError):
        pipe.send_bytes(_pack(_Failed(message)))


def explain_os_error(error: OSError) -> str:
    """Return the reason of an error of the operating system, and the fix."""
    reason = (error.strerror or str(error)).lower()
    name = error.filename
    place = f"{spelt(Path(os.fsdecode(name)))}: " if isinstance(name, str | bytes) else ""
    if "no space" in reason or "quota" in reason:
        return f"{place}{reason}; set TMPDIR to a directory with more space"
    return f"{place}{reason}"
