"""Start a real server, know when it is ready, kill it, start it again; it dies with us."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path


class Process:
    """
    A server as a process of ours.

    *ready* is asked until it says yes; what the server printed is told if it never does.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        log: Path,
        ready: Callable[[], bool],
        env: Mapping[str, str] | None = None,
        user: int | None = None,
        within_s: float = 30,
    ) -> None:
        self._argv = [str(word) for word in argv]
        self._log = log
        self._ready = ready
        self._env = {**os.environ, **(env or {})}
        self._user = user
        self._within_s = within_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                user=self._user,
                group=self._user,
                extra_groups=[] if self._user is not None else None,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - it calls nothing that locks
            )
        ends = time.monotonic() + self._within_s
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > ends:
                self.kill()
                told = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self._argv[0]} did not get ready:\n{told}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill it and all its children, as if the machine had gone."""
        # Children may lead groups of their own, as those of Postgres do.
        children = _children(self._process.pid) if self._process is not None else []
        self._end(signal.SIGKILL)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        ends = time.monotonic() + 10
        while not all(map(_is_stopped, children)) and time.monotonic() < ends:
            time.sleep(0.001)  # until then they hold its sockets

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop it and all its children, as a machine does that swaps; they stand still then."""
        self._signal_all(signal.SIGSTOP)
        ends = time.monotonic() + 10
        while not all(_is_stopped(pid) for pid in (self.pid, *_children(self.pid))):
            assert time.monotonic() < ends, "it does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, what: signal.Signals) -> None:
        os.killpg(self.pid, what)
        for child in _children(self.pid):
            with suppress(ProcessLookupError):
                os.kill(child, what)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _children(pid: int) -> list[int]:
    """List all descendants of a process."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [child, *_children(child)]
    return found


def _is_stopped(pid: int) -> bool:
    """Tell whether a process stands still, with all its threads, or is gone."""
    states = []
    for status in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.append(status.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


def free_port() -> int:
    """Find a port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    """Tell whether somebody takes connections on *port*."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
