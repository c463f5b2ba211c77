"""The command line as a person runs it: in a process of its own, or, where that adds nothing, here."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from oncebridge.cli.app import app


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    def objects(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """Run `oncebridge` in an empty directory; it must end with *code*, and never by surprise."""

    def run(*args: str, code: int = 0, given: bytes = b"", **environment: str) -> Ran:
        inherited = {n: v for n, v in os.environ.items() if not n.startswith("ONCEBRIDGE_")}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "oncebridge", *args],
            cwd=tmp_path,
            env=inherited | environment,
            input=given,
            capture_output=True,
            timeout=60,
            check=False,
        )
        ran = Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert ran.code == code, ran
        for surprise in ("Traceback", "Warning", "please report these lines"):
            assert surprise not in ran.err, ran.err
        return ran

    return run


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ran]]:
    """Do the same in this process, which is quicker."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONCEBRIDGE_")]:
        monkeypatch.delenv(name)

    def call(*args: str, code: int = 0, given: bytes = b"", **environment: str) -> Ran:
        done = CliRunner().invoke(app, args, input=given, env=environment)
        ran = Ran(done.exit_code, done.stdout, done.stderr)
        assert ran.code == code, ran
        assert "please report these lines" not in ran.err, ran.err
        return ran

    yield call
    gc.unfreeze()  # `run_loop` freezes what is there, DuckDB's types too, which it misses at the end


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Put a file into that directory: text, or one event on each line."""

    def write(name: str, *content: str | dict) -> Path:
        lines = [line if isinstance(line, str) else json.dumps(line) for line in content]
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
