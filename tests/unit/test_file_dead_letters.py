import asyncio
import base64
import errno
import fcntl
import json
import os
import resource
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.faults.doubles import event
from tests.size import examples
from tests.unit.test_dead_letters import DeadLettersContract, letter, without_number

from oncebridge import ConfigError, DeadLetterError, StoreError, StoreUnavailable, parse
from oncebridge.base import line_files as file_module
from oncebridge.dead_letters.file import FileDeadLetters, FileDeadLettersOptions


@pytest.fixture
def path(tmp_path):
    return tmp_path / "dead.ndjson"


@asynccontextmanager
async def opened(path):
    dead = FileDeadLetters(path)
    await dead.open()
    try:
        yield dead
    finally:
        await dead.aclose()


def lines_in(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def numbers(dead):
    return [one.number for one in await dead.list(limit=10_000)]


class TestFile(DeadLettersContract):
    @asynccontextmanager
    async def opened(self, tmp_path):
        async with opened(tmp_path / "dead.ndjson") as dead:
            yield dead

    async def test_letters_outlive_the_process(self, tmp_path):
        async with self.opened(tmp_path) as dead:
            await dead.put([letter(1)])
        async with self.opened(tmp_path) as dead:
            (one,) = await dead.list()
            assert without_number(one) == without_number(letter(1))

    async def test_half_a_batch_is_never_kept(self, tmp_path):
        async with self.opened(tmp_path) as dead:
            with pytest.raises(Exception):  # noqa: B017, PT011 - any error will do
                await dead.put([letter(1), letter(2, raw=None)])
            assert await dead.list() == []

    @pytest.mark.parametrize("field", ["message", "route", "reason"])
    async def test_a_text_that_is_no_utf8_is_kept_or_refused_cleanly(self, tmp_path, field):
        async with self.opened(tmp_path) as dead:
            try:
                await dead.put([letter(1, **{field: "no such file: \udcff"})])
            except DeadLetterError:
                assert await dead.list() == []
            else:
                (one,) = await dead.list()
                assert one.raw == letter(1).raw


# --- what stands in the file ----------------------------------------------------------------


async def test_a_line_has_all_of_a_letter_in_plain_words(path):
    raw = event({"name": "Zo\u00eb"})
    async with opened(path) as dead:
        await dead.put([letter(1, raw=raw), letter(2, raw=b"\xff\x00")])
    first, second = lines_in(path)
    assert first == {
        "number": 1,
        "reason": "rejected",
        "message": "it said 'no'; drop table",
        "route": "crm",
        "rule": "the rule",
        "key": b"\x01\x00key".hex(),
        "attempts": 3,
        "maybe_delivered": True,
        "buried_ms": 1_700_000_000_001,
        "raw": raw.decode(),
    }
    assert base64.b64decode(second["raw_base64"]) == b"\xff\x00"
    assert "raw" not in second


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raws=st.lists(st.binary(max_size=50) | st.text(max_size=50).map(str.encode), max_size=4))
async def test_any_bytes_come_back_as_they_were(path, raws):
    path.unlink(missing_ok=True)
    async with opened(path) as dead:
        await dead.put([letter(n, raw=raw) for n, raw in enumerate(raws)])
        assert [one.raw for one in await dead.list()] == raws
    assert len(lines_in(path)) == len(raws)


async def test_a_letter_can_be_read_as_the_event_it_was(path):
    async with opened(path) as dead:
        await dead.put([letter(raw=event())])
        (one,) = await dead.list()
    assert parse(one.raw).raw == event()


async def test_the_file_is_for_its_owner_only_and_stays_as_it_was_made(path):
    umask = os.umask(0)
    try:
        async with opened(path) as dead:
            await dead.put([letter(1), letter(2), letter(3)])
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            await dead.drop([1])
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            path.chmod(0o640)
            await dead.drop([2])
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(umask)


async def test_letters_are_on_the_disk_before_it_answers(path, monkeypatch):
    synced = []
    sync = os.fsync

    def counting(fd):
        sync(fd)
        synced.append((os.fstat(fd).st_ino, os.fstat(fd).st_size))

    async with opened(path) as dead:
        monkeypatch.setattr(os, "fsync", counting)
        await dead.put([letter(1), letter(2)])
        assert synced == [(path.stat().st_ino, path.stat().st_size)]
        synced.clear()
        await dead.drop([1])
        # the new file first, then the directory that names it
        assert [inode for inode, _ in synced] == [path.stat().st_ino, path.parent.stat().st_ino]
        assert synced[0][1] == path.stat().st_size


# --- numbers --------------------------------------------------------------------------------


async def test_no_number_is_given_twice_whatever_is_dropped_and_whoever_asks(path):
    async with opened(path) as dead:
        await dead.put([letter(n) for n in range(3)])
        assert await dead.drop([3, 3, 3]) == 1
    async with opened(path) as dead:
        await dead.put([letter(4)])
        assert await numbers(dead) == [1, 2, 4]
        assert await dead.drop([1, 2, 4]) == 3
        assert await dead.list() == []
    async with opened(path) as dead:
        assert await dead.drop([1, 2, 3, 4]) == 0
        await dead.put([letter(5), letter(6)])
        assert await numbers(dead) == [5, 6]
        assert await dead.drop([5]) == 1
    assert [line["number"] for line in lines_in(path)] == [6]
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
async def test_a_page_begins_where_it_should_in_a_large_file(path, data):
    sizes = st.sampled_from([0, 10, 1000, 70_000, 200_000])
    raws = data.draw(st.lists(sizes, min_size=1, max_size=30))
    path.unlink(missing_ok=True)
    async with opened(path) as dead:
        await dead.put([letter(n, raw=b"x" * size) for n, size in enumerate(raws)])
        dropped = data.draw(st.sets(st.integers(1, len(raws) + 1)))
        await dead.drop(sorted(dropped))
        await dead.put([letter(99)])
        kept = [n for n in range(1, len(raws) + 2) if n not in dropped or n > len(raws)]
        after = data.draw(st.integers(0, len(raws) + 2))
        limit = data.draw(st.integers(0, 40))
        page = [one.number for one in await dead.list(after=after, limit=limit)]
        assert page == [n for n in kept if n > after][:limit]


async def test_a_page_far_behind_is_found_without_reading_all(path, monkeypatch):
    async with opened(path) as dead:
        await dead.put([letter(n, raw=b"x" * 1000) for n in range(3000)])
        read = []
        from oncebridge.dead_letters import file as module

        heading = module._read_header
        monkeypatch.setattr(module, "_read_header", lambda text: read.append(1) or heading(text))
        (last,) = await dead.list(after=2999)
        assert last.number == 3000
        assert len(read) < 100


# --- crashes and faults ---------------------------------------------------------------------


async def test_a_line_that_was_cut_off_is_not_listed_and_goes_with_the_next_put(path):
    async with opened(path) as dead:
        await dead.put([letter(1)])
        with path.open("ab") as file:
            file.write(b'{"number":2,"reason":"rej')
        assert await numbers(dead) == [1]
        await dead.put([letter(2)])
        assert await numbers(dead) == [1, 2]
    assert len(lines_in(path)) == 2


@contextmanager
def no_file_larger_than(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_batch_that_does_not_fit_is_refused_whole(path):
    async with opened(path) as dead:
        await dead.put([letter(1)])
        size = path.stat().st_size
        with no_file_larger_than(size + 300), pytest.raises(DeadLetterError, match=path.name):
            await dead.put([letter(n, raw=b"x" * 100) for n in range(5)])
        assert path.stat().st_size == size
        await dead.put([letter(2)])
        assert await numbers(dead) == [1, 2]


async def test_what_cannot_be_rewritten_stays_as_it_was(path):
    async with opened(path) as dead:
        await dead.put([letter(n) for n in range(10)])
        with no_file_larger_than(500), pytest.raises(StoreError, match=os.strerror(errno.EFBIG)):
            await dead.drop([1])
        assert await numbers(dead) == list(range(1, 11))
        assert os.listdir(path.parent) == [path.name]  # noqa: PTH208
        assert await dead.drop([1]) == 1


async def test_what_an_interrupted_drop_left_does_no_harm(path):
    path.with_name(path.name + ".new").write_bytes(b"half a line of more than will be written" * 90)
    async with opened(path) as dead:
        await dead.put([letter(1), letter(2)])
        assert await dead.drop([1]) == 1
        assert await numbers(dead) == [2]
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208


async def test_a_missing_directory_is_said_so(tmp_path):
    dead = FileDeadLetters(tmp_path / "missing" / "dead.ndjson")
    with pytest.raises(StoreError, match="directory does not exist"):
        await dead.open()
    with pytest.raises(DeadLetterError, match="directory does not exist"):
        await dead.put([letter(1)])
    await dead.aclose()


@pytest.mark.parametrize(
    "content", [event() + b"\n", b"some text\n", b'{"number":"1"}\n', b"\n", b"some text", b"[1]\n"]
)
async def test_a_file_of_others_is_refused_and_not_changed(path, content):
    path.write_bytes(content)
    dead = FileDeadLetters(path)
    with pytest.raises(StoreError, match="another path"):
        await dead.open()
    with pytest.raises(DeadLetterError, match="another path"):
        await dead.put([letter(1)])
    await dead.aclose()
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"secret 4111", b'{"number":1}', b'{"number":1,"raw":"4111"}'])
async def test_a_line_in_the_middle_that_is_no_letter_is_an_error_and_not_quoted(path, line):
    async with opened(path) as dead:
        await dead.put([letter(1)])
        path.write_bytes(line + b"\n" + path.read_bytes())
        with pytest.raises(StoreError, match="not a dead letter") as caught:
            await dead.list()
        assert "4111" not in str(caught.value)
        assert caught.value.__cause__ is None


async def test_after_closing_it_refuses(path):
    dead = FileDeadLetters(path)
    await dead.open()
    await dead.aclose()
    with pytest.raises(DeadLetterError, match="closed"):
        await dead.put([letter(1)])
    for call in (dead.open, dead.list, lambda: dead.drop([1])):
        with pytest.raises(StoreError, match="closed"):
            await call()


# --- several processes ----------------------------------------------------------------------


async def test_while_another_keeps_it_locked_it_refuses_after_a_while(path, monkeypatch):
    monkeypatch.setattr(file_module, "_PAUSES", 3)
    async with opened(path) as dead:
        with path.open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(DeadLetterError, match="locked"):
                await dead.put([letter(1)])
            with pytest.raises(StoreUnavailable, match="locked"):
                await dead.drop([1])
            assert await dead.list() == []
        await dead.put([letter(1)])
        assert await numbers(dead) == [1]


async def test_two_that_share_a_file_see_each_other(path):
    async with opened(path) as one, opened(path) as other:
        await one.put([letter(1)])
        await other.put([letter(2)])
        assert await one.drop([1]) == 1
        await other.put([letter(3)])  # in the file that took the old one's place
        assert await numbers(one) == await numbers(other) == [2, 3]


PUTTER = """
import asyncio, sys
from oncebridge import DeadLetter
from oncebridge.dead_letters.file import FileDeadLetters

async def main(path, who):
    dead = FileDeadLetters(path)
    for n in range(40):
        await dead.put([DeadLetter(b"%d %d" % (who, n), "r", "m", "", "", b"", 1, False, 0)])
        if n % 10 == 9:
            mine = [one.number for one in await dead.list(limit=1000) if one.raw == b"%d 0" % who]
            await dead.drop(mine)
    await dead.aclose()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def test_several_processes_put_and_drop_and_nothing_is_lost(path):
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", PUTTER, str(path), str(who))
        for who in range(3)
    ]
    assert [await asyncio.wait_for(one.wait(), 60) for one in processes] == [0, 0, 0]
    async with opened(path) as dead:
        letters = await dead.list(limit=1000)
    wanted = {b"%d %d" % (who, n) for who in range(3) for n in range(1, 40)}
    assert len(letters) == len(wanted)
    assert {one.raw for one in letters} == wanted
    given = [one.number for one in letters]
    assert given == sorted(set(given))
    assert max(given) <= 120


def test_a_killed_process_leaves_letters_that_can_be_read(path):
    script = (
        "import asyncio, os, sys\n"
        "from oncebridge import DeadLetter\n"
        "from oncebridge.dead_letters.file import FileDeadLetters\n"
        "async def main():\n"
        "    dead = FileDeadLetters(sys.argv[1])\n"
        "    await dead.put([DeadLetter(b'x', 'r', 'm', '', '', b'', 1, False, 0)])\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    assert done.returncode == -9

    async def check():
        async with opened(path) as dead:
            assert [one.raw for one in await dead.list()] == [b"x"]

    asyncio.run(check())


# --- addresses ------------------------------------------------------------------------------


def test_addresses(tmp_path):
    assert FileDeadLetters.Options is FileDeadLettersOptions
    for url in (f"file:{tmp_path}/d.ndjson", f"file://{tmp_path}/d.ndjson"):
        assert (
            FileDeadLetters.from_url(url, FileDeadLettersOptions())._path == tmp_path / "d.ndjson"
        )
    for url in ("file:", "d.ndjson", "", "file://host/d"):
        with pytest.raises(ConfigError) as caught:
            FileDeadLetters.from_url(url)
        assert caught.value.where == ""
