"""The worker processes: started, killed, frozen, asked to leave, and always cleaned up."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from time import monotonic

import msgspec

from .oracle import History
from .worker import Job

_ROOT = Path(__file__).parents[2]
_LEAVE_S = 60  # more than any drain takes; a worker that is still there then is stuck


def python_path() -> str:
    """Say where a child finds the tests, and whatever we find by ourselves."""
    return os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Worker:
    def __init__(self, incarnation: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.incarnation = incarnation
        self.process = process
        self.log = log
        self.ready = False
        """It has asked for messages."""
        self.expected = True
        """It should be running: nobody has stopped it in any way."""

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, signum: signal.Signals) -> None:
        # Popen looks whether the process is still ours to signal, so no stranger gets it.
        self.process.send_signal(signum)

    async def wait(self, most_s: float | None = None) -> int:
        return await asyncio.to_thread(self.process.wait, most_s)


class Fleet:
    """*size* workers, replaced when they go."""

    def __init__(
        self,
        *,
        size: int,
        kind: str,
        job_for: Callable[[int], Job],
        folder: Path,
        environment: Mapping[str, str],
        history: History,
        dice: Random,
    ) -> None:
        self._size = size
        self._kind = kind
        self._job_for = job_for
        self._folder = folder
        self._environment = {**os.environ, "PYTHONPATH": python_path(), **environment}
        self._history = history
        self._dice = dice
        self._workers: dict[int, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = 0

    def start(self) -> None:
        for _ in range(self._size):
            self._spawn()

    def mark_ready(self, incarnation: int) -> None:
        self._workers[incarnation].ready = True

    # --- what befalls a worker ---------------------------------------------------------

    async def kill(self) -> None:
        """SIGKILL; now and then one that is only just starting."""
        worker = await self._pick(ready=self._dice.random() < 0.9)
        worker.expected = False
        worker.send(signal.SIGKILL)
        self._history.killed.add(worker.incarnation)
        await worker.wait()
        self._spawn()

    async def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after *seconds*; the others go on meanwhile."""
        worker = await self._pick()
        worker.expected = False
        worker.send(signal.SIGSTOP)
        self._in_background(self._go_on(worker, monotonic(), seconds))

    async def _go_on(self, worker: Worker, stopped_at: float, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._history.stops[worker.incarnation].append((stopped_at, monotonic()))
        worker.send(signal.SIGCONT)
        worker.expected = True

    async def term(self) -> None:
        """SIGTERM; its successor starts at once."""
        worker = await self._pick()
        self._history.terms += 1
        self._in_background(self._leave(worker))
        self._spawn()

    async def finish(self) -> None:
        """Let everybody leave in good order, frozen ones after they have woken up."""
        await self._settle_background()
        for worker in self._alive():
            self._in_background(self._leave(worker))
        await self._settle_background()

    async def _leave(self, worker: Worker) -> None:
        worker.expected = False
        worker.send(signal.SIGTERM)
        try:
            code = await worker.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._history.faults.append(f"worker {worker.incarnation} did not leave on SIGTERM")
            return
        # One that had not got as far as its signal handler had nothing in hand either.
        untrained = not worker.ready or self._kind != "worker"
        if code and not (untrained and code == -signal.SIGTERM):
            self._complain(worker, code)

    # --- keeping the fleet -------------------------------------------------------------

    async def watch(self) -> None:
        """Notice workers that end by themselves. None should."""
        died = 0
        while True:
            for worker in list(self._workers.values()):
                if worker.expected and not worker.is_alive():
                    worker.expected = False
                    self._complain(worker, worker.process.returncode)
                    died += 1
                    if died > 2 * self._size:
                        raise RuntimeError(f"workers keep dying: {self._history.faults[-1]}")
                    self._spawn()
            await asyncio.sleep(0.05)

    async def aclose(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            if worker.is_alive():
                worker.send(signal.SIGKILL)  # takes frozen ones too
        for worker in self._workers.values():
            worker.process.wait()

    async def _pick(self, *, ready: bool = True) -> Worker:
        while True:
            found = [w for w in self._alive() if w.expected and (w.ready or not ready)]
            if found:
                return self._dice.choice(found)
            await asyncio.sleep(0.01)

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.is_alive()]

    def _spawn(self) -> None:
        self._started += 1
        incarnation = self._started
        log = self._folder / f"{incarnation}.log"
        module, _, control = self._kind.partition(":")
        job = msgspec.json.encode(self._job_for(incarnation)).decode()
        command = [sys.executable, "-m", f"{__package__}.{module}", job]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [*command, control] if control else command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        self._workers[incarnation] = Worker(incarnation, process, log)

    def _complain(self, worker: Worker, code: int) -> None:
        said = worker.log.read_text(errors="replace")[-2000:]
        self._history.faults.append(f"worker {worker.incarnation} ended with {code}: {said}")

    def _in_background(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

    async def _settle_background(self) -> None:
        while self._tasks:
            tasks = list(self._tasks)
            await asyncio.gather(*tasks)
            self._tasks.difference_update(tasks)
