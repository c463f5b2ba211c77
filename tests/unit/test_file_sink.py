import asyncio
import errno
import fcntl
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from tests.faults.doubles import event, eventually

from oncebridge import (
    Closed,
    ConfigError,
    Delivery,
    Gateway,
    No,
    SinkError,
    Unknown,
    Verdict,
    Yes,
    parse,
)
from oncebridge.base import line_files as file_module
from oncebridge.base.options import Size, settings_of
from oncebridge.sinks.file import FileSink, FileSinkOptions
from oncebridge.stores.memory import MemoryStore


def deliveries(*numbers, padding=0):
    return [
        Delivery(parse(event({"n": n, "padding": "x" * padding})), b"key %d" % n) for n in numbers
    ]


def numbers_in(*paths):
    """The numbers of the events in files, in the order of the lines; every line has to be whole."""
    lines = [line for path in paths for line in path.read_bytes().splitlines(keepends=True)]
    assert all(line.endswith(b"\n") for line in lines)
    return [json.loads(line)["detail"]["n"] for line in lines]


@asynccontextmanager
async def opened(path, **options):
    sink = FileSink(path, FileSinkOptions(**options))
    await sink.open()
    try:
        yield sink
    finally:
        await sink.aclose()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.ndjson"


@contextmanager
def locked_by_another(path):
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(file_module, "_PAUSES", 3)


# --- what is written ------------------------------------------------------------------------


async def test_each_event_is_a_line_with_the_bytes_that_were_received(path):
    raw = b' {"id" : "e1","detail":\r\n {"n" :1.0, "text": "a\\nb\xc3\xa9"}\n}\n'
    async with opened(path) as sink:
        answers = await sink.deliver([Delivery(parse(raw), b"k"), *deliveries(2)])
    assert answers == [Yes(), Yes()]
    first, second = path.read_bytes().splitlines(keepends=True)
    assert first == raw.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"
    assert json.loads(first) == json.loads(raw)
    assert second == event({"n": 2, "padding": ""}) + b"\n"


async def test_batches_follow_each_other_also_after_a_restart(path):
    for start in (0, 4):
        async with opened(path) as sink:
            await sink.deliver(deliveries(start, start + 1))
            await sink.deliver(deliveries(start + 2, start + 3))
    assert numbers_in(path) == list(range(8))


async def test_nothing_to_deliver_is_no_trouble(path):
    async with opened(path) as sink:
        assert await sink.deliver([]) == []
    assert path.read_bytes() == b""


async def test_a_batch_is_synced_once_before_the_answer(path, monkeypatch):
    synced = []
    sync = os.fsync

    def counting(fd):
        sync(fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", counting)
    async with opened(path) as sink:
        await sink.deliver(deliveries(1, 2, 3))
        assert synced == [path.stat().st_size]
    synced.clear()
    async with opened(path, fsync=False) as sink:
        assert await sink.deliver(deliveries(4)) == [Yes()]
        assert synced == []


async def test_a_new_file_is_not_for_everybody(path):
    umask = os.umask(0)
    try:
        async with opened(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(umask)


async def test_the_mode_of_a_file_that_is_there_stays(path):
    path.touch()
    path.chmod(0o604)
    async with opened(path) as sink:
        await sink.deliver(deliveries(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


async def test_opening_and_closing_may_be_repeated(path):
    sink = FileSink(path)
    for _ in range(2):
        await sink.open()
        await sink.open()
        assert await sink.deliver(deliveries(1)) == [Yes()]
        await sink.aclose()
        await sink.aclose()
    assert numbers_in(path) == [1, 1]


async def test_it_works_behind_a_gateway(path):
    gateway = Gateway(store=MemoryStore(), sink=FileSink(path))
    events = [event({"n": n}, id=f"e{n}") for n in (1, 2, 1, 3)]
    outcomes = await gateway.process(events)
    await gateway.aclose()
    assert [one.verdict for one in outcomes].count(Verdict.DELIVERED) == 3
    assert sorted(numbers_in(path)) == [1, 2, 3]


# --- what cannot be opened ------------------------------------------------------------------


async def refusal(path):
    sink = FileSink(path)
    with pytest.raises(SinkError) as caught:
        await sink.open()
    assert str(path) in str(caught.value)
    (answer,) = await sink.deliver(deliveries(1))
    assert isinstance(answer, Closed)
    await sink.aclose()
    return str(caught.value)


async def test_a_missing_directory_is_said_so(tmp_path):
    assert "directory does not exist" in await refusal(tmp_path / "missing" / "out.ndjson")
    (tmp_path / "file").touch()
    assert "directory does not exist" in await refusal(tmp_path / "file" / "out.ndjson")


async def test_what_is_no_file_is_refused(tmp_path):
    assert "directory" in await refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in await refusal(tmp_path / "pipe")
    assert "regular file" in await refusal(Path(os.devnull))


@contextmanager
def somebody_else():
    """Act as a user without rights, if we have all of them."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_a_directory_that_may_not_be_written_is_said_so(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with somebody_else():
            assert "may not be written" in await refusal(tmp_path / "out.ndjson")
    finally:
        tmp_path.chmod(0o700)


# --- a last line without end ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("torn", "left"),
    [
        (b'{"detail":{"n":2}}', b'{"detail":{"n":2}}\n'),
        (b'{"detail":{"n":2}', b""),
        (b"{", b""),
        (b'  {"a', b""),
        (b"\0" * 5000, b""),
        (b'{"detail":{"n":2\0\0\0', b""),
        (b'{"detail":"' + b"x" * 200_000, b""),
        (b'{"detail":"' + b"x" * 200_000 + b'"}', b'{"detail":"' + b"x" * 200_000 + b'"}\n'),
        (b'{"a":' * 30_000, b""),
    ],
)
@pytest.mark.parametrize("before", [b"", b'{"detail":{"n":1}}\n'])
async def test_a_line_that_was_cut_off_is_finished_or_removed(path, before, torn, left):
    path.write_bytes(before + torn)
    async with opened(path):
        assert path.read_bytes() == before + left


async def test_a_file_of_others_is_not_damaged(path):
    text = b"Dear diary,\nlast night"
    path.write_bytes(text)
    assert "name another path" in await refusal(path)
    assert path.read_bytes() == text


async def test_a_file_without_any_line_is_not_searched_for_ever(path, monkeypatch):
    monkeypatch.setattr(file_module, "_LONGEST_LINE", 1_000_000)
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(10_000_000)
    assert "name another path" in await refusal(path)


async def test_what_another_writer_left_half_done_is_removed_before_the_next_batch(path):
    async with opened(path) as sink:
        await sink.deliver(deliveries(1))
        with path.open("ab") as file:
            file.write(b'{"detail":{"n":99')
        await sink.deliver(deliveries(2))
    assert numbers_in(path) == [1, 2]


@pytest.mark.usefixtures("_impatient")
async def test_while_another_writes_nothing_is_touched(path):
    half = b'{"detail":{"n":99'
    path.write_bytes(half)
    with locked_by_another(path):
        sink = FileSink(path)
        with pytest.raises(SinkError, match="another process keeps it locked"):
            await sink.open()
        (answer,) = await sink.deliver(deliveries(1))
        assert isinstance(answer, No)
        assert path.read_bytes() == half
    assert await sink.deliver(deliveries(1)) == [Yes()]
    assert numbers_in(path) == [1]
    await sink.aclose()


async def test_a_lock_that_is_let_go_is_taken(path):
    async with opened(path) as sink:
        with locked_by_another(path):
            sending = asyncio.ensure_future(sink.deliver(deliveries(1)))
            await asyncio.sleep(0.03)
            assert not sending.done()
        assert await sending == [Yes()]
    assert numbers_in(path) == [1]


async def test_a_batch_that_was_given_up_while_it_waited_is_not_written(path):
    async with opened(path) as sink:
        with locked_by_another(path):
            sending = asyncio.ensure_future(sink.deliver(deliveries(1)))
            await asyncio.sleep(0.03)
            # a second one would only wait behind it
            (answer,) = await sink.deliver(deliveries(2))
            assert isinstance(answer, No)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await eventually(lambda: not sink._thread.is_busy)
        assert await sink.deliver(deliveries(3)) == [Yes()]
    assert numbers_in(path) == [3]


# --- what fails later -----------------------------------------------------------------------


@contextmanager
def no_file_larger_than(size):
    """The nearest thing to a full disk that needs no disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_of_a_batch_that_does_not_fit_nothing_stays(path):
    async with opened(path) as sink:
        await sink.deliver(deliveries(1))
        before = path.read_bytes()
        with no_file_larger_than(len(before) + 250):
            answers = await sink.deliver(deliveries(2, 3, 4, padding=100))
        assert len(answers) == 3
        assert all(isinstance(answer, No) for answer in answers)
        assert answers[0].reason == f"{path}: {os.strerror(errno.EFBIG)}"
        assert path.read_bytes() == before
        assert await sink.deliver(deliveries(5)) == [Yes()]
    assert numbers_in(path) == [1, 5]


async def test_what_cannot_be_taken_back_is_unknown(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    async with opened(path) as sink:
        await sink.deliver(deliveries(1))
        with monkeypatch.context() as broken, no_file_larger_than(path.stat().st_size + 250):
            broken.setattr(os, "ftruncate", fail)
            answers = await sink.deliver(deliveries(2, 3, 4, padding=100))
        assert [type(answer) for answer in answers] == [Unknown] * 3
        assert await sink.deliver(deliveries(5)) == [Yes()]
    assert numbers_in(path) == [1, 2, 5]  # whole lines, and the half one is gone


async def test_a_sync_that_fails_takes_the_batch_back(path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async with opened(path) as sink:
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            assert await sink.deliver(deliveries(1)) == [No(f"{path}: No space left on device")]
        assert path.read_bytes() == b""
        assert await sink.deliver(deliveries(1)) == [Yes()]
    assert numbers_in(path) == [1]


async def test_a_place_that_is_lost_later_closes_the_door_until_it_is_back(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "out.ndjson"
    async with opened(path) as sink:
        await sink.deliver(deliveries(1))
        folder.rename(tmp_path / "elsewhere")
        (answer,) = await sink.deliver(deliveries(2))
        assert isinstance(answer, Closed)
        assert "directory does not exist" in answer.reason
        path.mkdir(parents=True)
        (answer,) = await sink.deliver(deliveries(2))
        assert isinstance(answer, Closed)
        path.rmdir()
        assert await sink.deliver(deliveries(3)) == [Yes()]
    assert numbers_in(tmp_path / "elsewhere" / "out.ndjson", path) == [1, 3]


async def test_a_right_that_is_lost_later_closes_the_door(tmp_path):
    path = tmp_path / "out.ndjson"
    async with opened(path) as sink:
        await sink.deliver(deliveries(1))
        path.rename(tmp_path / "old")
        tmp_path.chmod(0o500)
        try:
            with somebody_else():
                (answer,) = await sink.deliver(deliveries(2))
        finally:
            tmp_path.chmod(0o700)
        assert isinstance(answer, Closed)
        assert "may not be written" in answer.reason


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
async def test_a_file_that_is_moved_away_is_begun_anew(path, how):
    old = path.with_name("old")
    async with opened(path) as sink:
        await sink.deliver(deliveries(1))
        if how == "removed":
            path.unlink()
        else:
            path.rename(old)
        if how == "replaced":
            path.write_bytes(b"")
        assert await sink.deliver(deliveries(2)) == [Yes()]
    assert numbers_in(path) == [2]
    if how != "removed":
        assert numbers_in(old) == [1]


# --- rotation -------------------------------------------------------------------------------


def numbered(path):
    """The files beside *path*, by their number."""
    return {int(one.suffix[1:]): one for one in path.parent.iterdir() if one.suffix[1:].isdecimal()}


async def test_a_file_that_would_grow_too_large_makes_room(path):
    size = len(event({"n": 1, "padding": ""})) + 1
    async with opened(path, max_size=Size(3 * size), keep=2) as sink:
        for n in range(1, 9):
            assert await sink.deliver(deliveries(n)) == [Yes()]
            assert path.stat().st_size <= 3 * size
        assert numbers_in(path) == [7, 8]
        assert {n: numbers_in(one) for n, one in numbered(path).items()} == {
            1: [4, 5, 6],
            2: [1, 2, 3],
        }
        for n in range(9, 12):
            await sink.deliver(deliveries(n))
    # those that were the oldest are gone
    assert {n: numbers_in(one) for n, one in numbered(path).items()} == {
        1: [7, 8, 9],
        2: [4, 5, 6],
    }


async def test_keeping_all_gives_ever_higher_numbers(path):
    path.with_name("out.ndjson.7").write_bytes(b"of somebody\n")
    path.with_name("out.ndjson.07").write_bytes(b"no number of ours\n")
    path.with_name("out.ndjson.8.gz").write_bytes(b"no number of ours\n")
    async with opened(path, max_size=Size(1), keep=0) as sink:
        for n in range(4):
            await sink.deliver(deliveries(n))
    assert numbers_in(*[path.with_name(f"out.ndjson.{n}") for n in (8, 9, 10)], path) == [
        0,
        1,
        2,
        3,
    ]
    assert path.with_name("out.ndjson.7").read_bytes() == b"of somebody\n"


async def test_rotation_leaves_files_alone_that_are_not_its_own(path):
    dated = path.with_name("out.ndjson.20250101")
    dated.write_bytes(b"of logrotate\n")
    async with opened(path, max_size=Size(1), keep=1) as sink:
        for n in range(3):
            await sink.deliver(deliveries(n))
    assert dated.read_bytes() == b"of logrotate\n"
    assert numbers_in(path.with_name("out.ndjson.1"), path) == [1, 2]


async def test_a_batch_is_never_divided(path):
    async with opened(path, max_size=Size(100), keep=0) as sink:
        await sink.deliver(deliveries(1))
        await sink.deliver(deliveries(*range(2, 20)))
        await sink.deliver(deliveries(20))
    assert numbers_in(path.with_name("out.ndjson.2")) == list(range(2, 20))


async def test_what_cannot_be_rotated_is_not_written(path):
    async with opened(path, max_size=Size(1), keep=1) as sink:
        await sink.deliver(deliveries(1))
        taken = path.with_name("out.ndjson.1")
        taken.mkdir()
        (answer,) = await sink.deliver(deliveries(2))
        assert isinstance(answer, Closed)
        taken.rmdir()
        assert await sink.deliver(deliveries(3)) == [Yes()]
    assert numbers_in(taken, path) == [1, 3]


# --- several writers ------------------------------------------------------------------------

WRITER = """
import asyncio, json, sys
from oncebridge import Delivery, Yes, parse
from oncebridge.base.options import Size
from oncebridge.sinks.file import FileSink, FileSinkOptions

async def main(path, first, count, size):
    sink = FileSink(path, FileSinkOptions(max_size=Size(size) if size else None, keep=0))
    await sink.open()
    print("ready", flush=True)
    for n in range(first, first + count, 5):
        batch = [
            Delivery(parse(json.dumps({"detail": {"n": n + i, "x": "y" * 50}}).encode()), b"k")
            for i in range(5)
        ]
        while True:
            answers = await sink.deliver(batch)
            if answers == [Yes()] * 5:
                break
            assert all(type(one).__name__ == "No" for one in answers), answers
    await sink.aclose()

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


def writer(path, first, count, size):
    arguments = [str(one) for one in (path, first, count, size)]
    return subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE)


def test_several_processes_share_a_file_across_rotations(path):
    processes = [writer(path, 1000 * n, 200, 5000) for n in range(3)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    files = [*numbered(path).values(), path]
    assert len(files) > 5
    assert all(one.stat().st_size <= 5000 for one in files)
    wanted = [1000 * n + i for n in range(3) for i in range(200)]
    assert sorted(numbers_in(*files)) == wanted


async def test_a_writer_that_is_killed_leaves_lines_that_can_be_read(path):
    with writer(path, 0, 1_000_000, 0) as process:
        process.stdout.readline()
        await eventually(lambda: path.stat().st_size > 20_000)
        process.send_signal(signal.SIGKILL)
    async with opened(path) as sink:
        assert await sink.deliver(deliveries(-1)) == [Yes()]
    numbers = numbers_in(path)
    assert numbers == [*range(len(numbers) - 1), -1]


# --- addresses and options ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:out.ndjson", "out.ndjson"),
        ("file:./a b/out", "a b/out"),
        ("file:/tmp/out.ndjson", "/tmp/out.ndjson"),
        ("file:///tmp/out%20.ndjson", "/tmp/out%20.ndjson"),
    ],
)
def test_an_address_names_a_path_as_it_is_written(url, path):
    assert FileSink.from_url(url)._path == Path(path)


@pytest.mark.parametrize(
    "url", ["file:", "file://", "file://host/x", "out.ndjson", "", "files:x", "file:a\0b"]
)
def test_a_wrong_address_is_refused(url):
    with pytest.raises(ConfigError, match="file:PATH") as caught:
        FileSink.from_url(url)
    assert caught.value.where == ""
    assert repr(url) in caught.value.message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("max_size", FileSinkOptions(max_size=Size(0))),
        ("keep", FileSinkOptions(keep=-1)),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(name, options):
    with pytest.raises(ConfigError) as caught:
        FileSink.from_url("file:out.ndjson", options)
    assert caught.value.where == name


def test_every_option_says_what_it_does():
    assert FileSink.Options is FileSinkOptions
    settings = {one.name: one for one in settings_of(FileSinkOptions)}
    assert settings.keys() == {"max_size", "keep", "fsync"}
    assert all(one.doc.text.endswith(".") for one in settings.values())


def test_a_sink_announces_how_it_wants_its_deliveries():
    sink = FileSink("out.ndjson")
    assert (sink.batch, sink.concurrency) == (500, 1)
