"""An audit that cannot be finished says why, and leaves nothing behind."""

import errno
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.audit.recordings import lines, raw

from oncebridge import ConfigError
from oncebridge.audit import rows, workers
from oncebridge.audit.engine import audit
from oncebridge.audit.workers import AuditFailed


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary files go: a folder of its own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "recorded.ndjson"
    path.write_bytes(lines(*(raw(n) for n in range(20_000))))
    return path


@pytest.fixture
def children():
    """What tells the processes that were started since; servers of other tests may be there."""
    before = set(psutil.Process().children())
    return lambda: [one for one in psutil.Process().children() if one not in before]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left_behind(workers, recorded, temporary, children):
    audit([recorded], [], workers=workers)
    assert list(temporary.iterdir()) == []
    assert children() == []


def test_a_worker_that_dies_is_an_error(recorded, temporary, monkeypatch, children):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(rows.RowWriter, "write", die)
    with pytest.raises(AuditFailed, match="ended by signal 9"):
        audit([recorded], [], workers=2)
    assert list(temporary.iterdir()) == []
    assert children() == []


def test_a_worker_that_fails_says_where_and_quotes_nothing(
    recorded, temporary, monkeypatch, children
):
    def fail(*_):
        raise ValueError("payload")

    monkeypatch.setattr(rows.RowWriter, "write", fail)
    with pytest.raises(AuditFailed, match=r"ValueError at fail:\d+$") as caught:
        audit([recorded], [], workers=2)
    assert "payload" not in str(caught.value)
    assert children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_is_told_with_what_helps(workers, recorded, temporary, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rows.RowWriter, "write", full)
    with pytest.raises(AuditFailed, match="no space left on device; set TMPDIR"):
        audit([recorded], [], workers=workers)
    assert list(temporary.iterdir()) == []


def test_no_room_for_what_does_not_fit_into_memory_is_told(recorded, temporary, monkeypatch):
    monkeypatch.setattr("oncebridge.audit.table._MEMORY", "1MB")
    with pytest.raises(AuditFailed, match=r"DuckDB|TMPDIR"):
        audit([recorded], [], workers=0)
    assert list(temporary.iterdir()) == []


def test_a_file_that_shrinks_is_told(recorded, temporary, monkeypatch):
    def shrunk(descriptor, size, offset):
        return b""

    monkeypatch.setattr(os, "pread", shrunk)
    with pytest.raises(AuditFailed, match="became shorter while it was read"):
        audit([recorded], [], workers=2)


def test_a_caller_that_raises_leaves_nothing_behind(recorded, temporary, children):
    def stop(_done, _size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit([recorded], [], workers=2, progress=stop)
    assert list(temporary.iterdir()) == []
    assert children() == []


def test_without_duckdb_it_says_what_to_install(recorded, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match=r"pip install 'oncebridge\[audit\]'"):
        audit([recorded], [])


_RUN = """
import sys
from pathlib import Path
from oncebridge.audit.engine import audit
def progress(done, size):
    print(done, flush=True)
try:
    audit([Path(sys.argv[1])], [], workers=2, progress=progress)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def running(tmp_path, temporary):
    """An audit in a process of its own, which has begun to read, and has far to go."""
    path = tmp_path / "long.ndjson"
    path.write_bytes(lines(*(raw(n) for n in range(10_000))) * 60)
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        process.stdout.readline()
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        yield process, workers
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_ctrl_c_leaves_nothing_behind(running, temporary):
    process, workers = running
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    assert process.wait(30) == 130
    assert list(temporary.iterdir()) == []
    assert not any(worker.is_running() for worker in workers)


_ASK = """
import sys
from pathlib import Path
from oncebridge.audit.table import opened
try:
    with opened(Path(sys.argv[1])) as table:
        print("asking", flush=True)
        table.run("SELECT count(*) FROM range(100000000000) t(i) WHERE i % 7 = 3")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_breaks_a_question_off(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _ASK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "asking\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_workers_go_when_their_parent_is_killed(running):
    process, workers = running
    process.kill()
    process.wait(30)
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert (len(gone), alive) == (2, [])


def test_a_worker_that_has_nothing_to_do_waits(recorded, temporary):
    """The pool comes to its end also where there are more workers than chunks."""
    begun = time.perf_counter()
    report = audit([recorded], [], workers=6)
    assert report.events == 20_000
    assert time.perf_counter() - begun < 60
    assert workers.explain_os_error(OSError("odd")) == "odd"
