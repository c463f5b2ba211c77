"""
A console session of the documentation, run in a real shell.

All commands of a page go to one shell, one after the other, as a reader would type them. What does
not end by itself (a service, a dashboard) runs beside them, as in a terminal of its own, until the
next such command or the end of the page; then it is told to stop, and has to end well.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROMPT = re.compile(r"^([$#]) ", re.MULTILINE)
_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
_READY = ("oncebridge.ready", "dashboard: http")
_WITHIN_S = 60


@dataclass(frozen=True)
class Command:
    """One command of a session, and what the page shows of its output."""

    text: str
    shown: str = ""
    by_root: bool = False

    @property
    def words(self) -> list[str]:
        """The words of it, without quotes and comments; good enough to look for options."""
        text = re.sub(r"(^|\s)#.*", "", self.text.replace("\\\n", " "))
        return re.findall(r"[^\s'\"$();|&<>]+", text)


def commands(session: str) -> list[Command]:
    """Take a session apart: what stands behind a prompt, and what was printed."""
    made: list[Command] = []
    for part in re.split(r"^(?=[$#] )", session, flags=re.MULTILINE):
        if prompt := _PROMPT.match(part):
            text, shown = _typed(part[prompt.end() :])
            made.append(Command(text, shown, by_root=prompt[1] == "#"))
        else:
            assert not part.strip(), f"a session begins with a prompt, not with {part!r}"
    return made


def _typed(text: str) -> tuple[str, str]:
    """Tell what was typed from what was printed: lines that go on, and a text up to its mark."""
    lines = text.splitlines(keepends=True)
    taken = 1
    while lines[taken - 1].endswith("\\\n"):
        taken += 1
    if mark := _HEREDOC.search("".join(lines[:taken])):
        taken = lines.index(f"{mark[1]}\n", taken) + 1
    elif re.match(r"(while|for) ", text):
        taken = next(at for at, line in enumerate(lines) if line.strip().startswith("done")) + 1
    return "".join(lines[:taken]), "".join(lines[taken:])


@dataclass
class Shell:
    """A bash with a folder and an environment of its own."""

    folder: Path
    environment: Mapping[str, str]
    _service: tuple[int, str] | None = None

    def __enter__(self) -> Self:
        self._papers = self.folder / ".session"
        self._papers.mkdir()
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self.folder,
            env=dict(self.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._bash.pid, signal.SIGKILL)
            self._bash.communicate()

    def run(self, command: str) -> tuple[int, str]:
        """Run a command to its end, and give its exit code and what it printed."""
        script, printed = self._papers / "command", self._papers / "printed"
        script.write_text(command)
        code = self._ask(f". {script} </dev/null >{printed} 2>&1; echo $?")
        return int(code), printed.read_text()

    def start(self, command: str) -> str:
        """Start a service in place of the one before it, and give what it says when it is ready."""
        self.stop()
        log = self._papers / "service"
        log.write_text("")
        pid = int(self._ask(f"{{ exec {command}\n}} </dev/null >>{log} 2>&1 & echo $!"))
        self._service = (pid, command)
        ends = time.monotonic() + _WITHIN_S
        while not any(word in log.read_text() for word in _READY):
            assert _lives(pid), f"{command}\n{log.read_text()}"
            assert time.monotonic() < ends, f"{command}\nis not ready: {log.read_text()}"
            time.sleep(0.02)
        return log.read_text()

    def stop(self) -> None:
        """Stop the service that runs, if there is one."""
        if self._service is None:
            return
        pid, command = self._service
        self._service = None
        code = self._ask(f"kill -TERM {pid}; wait {pid}; echo $?")
        assert code == "0", (
            f"{command}\nended with {code}: {(self._papers / 'service').read_text()}"
        )

    def _ask(self, line: str) -> str:
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{line}\n")
        self._bash.stdin.flush()
        watch = threading.Timer(_WITHIN_S, os.killpg, (self._bash.pid, signal.SIGKILL))
        watch.start()
        try:
            answer = self._bash.stdout.readline().strip()
        finally:
            watch.cancel()
        assert answer, f"no end within {_WITHIN_S} s: {line}"
        return answer


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return " Z" not in Path(f"/proc/{pid}/stat").read_text().partition(")")[2][:3]
    return False
