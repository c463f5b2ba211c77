"""Files that can hold events are for their owner only, and not created through a link."""

import errno
import os
import signal
import stat
import threading
from contextlib import contextmanager

import pytest
from tests.e2e.towns import Command, event, receiving, send
from tests.unit.test_dead_letters import letter

from oncebridge.base.private_files import create_private, open_private
from oncebridge.dead_letters.file import FileDeadLetters
from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.errors import ConfigError, StoreError
from oncebridge.operate.operator_log import AuditFile
from oncebridge.sinks.file import FileSink
from oncebridge.sources.spool import Spool
from oncebridge.stores.sqlite.store import SQLiteStore


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def dangling(folder, name):
    """A link to a file that does not exist."""
    link, target = folder / name, folder / "elsewhere"
    link.symlink_to(target)
    return link, target


# --- what the service creates -----------------------------------------------------------------


@pytest.mark.parametrize("dead", ["sqlite:dead.db", "file:dead.ndjson"])
def test_whatever_the_umask_no_other_user_can_read_what_the_service_creates(tmp_path, dead):
    with receiving() as receiver:
        receiver.status = 503  # so that everything is still there to be looked at
        with umask(0):
            command = Command(
                tmp_path,
                *("run", "--source", "http://127.0.0.1:0/events", "--store", "sqlite:seen.db"),
                *("--dead", dead, "--spool", "spool.db", "--sink", receiver.url),
                *("--set", "sink.allow_private=true", "--backoff", "50ms"),
            )
        with command:
            url = command.ready()
            assert send(url, event(1))[0] == 202
            found = modes(tmp_path)
            command.signal(signal.SIGTERM)
            assert command.ended() == 0
    assert {"seen.db", "seen.db-wal", "spool.db", "spool.db-wal", "spool.db.lock"} < set(found)
    assert dead.partition(":")[2] in found
    assert set(found.values()) == {0o600}, found


@pytest.mark.parametrize("kind", [SQLiteStore, SQLiteDeadLetters])
async def test_a_file_that_exists_keeps_its_mode_and_its_log_has_the_same(tmp_path, kind):
    path = tmp_path / "kept.db"
    path.touch()
    path.chmod(0o660)
    file = kind(path)
    with umask(0):
        await file.open()
    assert modes(tmp_path) == {"kept.db": 0o660, "kept.db-wal": 0o660, "kept.db-shm": 0o660}
    await file.aclose()


async def test_a_link_to_a_file_that_exists_is_followed(tmp_path):
    target = tmp_path / "there"
    target.touch(mode=0o600)
    link = tmp_path / "seen.db"
    link.symlink_to(target)
    store = SQLiteStore(link)
    await store.open()
    await store.aclose()
    assert link.is_symlink()
    assert target.stat().st_size


@pytest.mark.parametrize("name", ["a?mode=memory", "b#c", "d%41", "e f", "\udcff"])
async def test_a_name_is_only_a_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    store = SQLiteStore(name)
    await store.open()
    await store.aclose()
    assert list(modes(tmp_path)) == [name]


async def test_a_store_in_memory_is_another_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SQLiteStore(":memory:")
    with pytest.raises(StoreError, match="use memory: instead"):
        await store.open()
    await store.aclose()
    assert list(tmp_path.iterdir()) == []


async def test_no_sqlite_file_is_created_through_a_link(tmp_path):
    link, target = dangling(tmp_path, "seen.db")
    store = SQLiteStore(link)
    with pytest.raises(StoreError, match="a symbolic link must point to a file"):
        await store.open()
    await store.aclose()
    assert not target.exists()


@pytest.mark.parametrize("kind", [FileDeadLetters, FileSink])
async def test_no_file_of_lines_is_created_through_a_link(tmp_path, kind):
    link, target = dangling(tmp_path, "lines")
    file = kind(link)
    with pytest.raises(Exception, match="a symbolic link to a file that does not exist"):
        await file.open()
    await file.aclose()
    assert not target.exists()


def test_no_audit_file_is_created_through_a_link(tmp_path):
    link, target = dangling(tmp_path, "audit")
    with pytest.raises(ConfigError, match="a symbolic link to a file that does not exist"):
        AuditFile(str(link)).write("pause")
    assert not target.exists()


async def test_no_lock_of_a_spool_is_taken_through_a_link(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.touch()
    (tmp_path / "spool.db.lock").symlink_to(theirs)
    spool = Spool(tmp_path / "spool.db")
    with pytest.raises(ConfigError, match=r"spool\.db\.lock: "):
        await spool.open(None)
    await spool.aclose()


# --- dead letters that are dropped ------------------------------------------------------------


@contextmanager
def no_change(path):
    before = (path.read_bytes(), path.stat().st_mode)
    yield
    assert (path.read_bytes(), path.stat().st_mode) == before


async def test_to_drop_dead_letters_writes_to_no_file_that_a_link_leads_to(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("keep this")
    theirs.chmod(0o644)
    path = tmp_path / "dead.ndjson"
    dead = FileDeadLetters(path)
    await dead.open()
    await dead.put([letter(1), letter(2)])
    (tmp_path / "dead.ndjson.new").symlink_to(theirs)
    with no_change(theirs):
        assert await dead.drop([1]) == 1
    assert [one.number for one in await dead.list()] == [2]
    assert not path.is_symlink()
    await dead.aclose()
    assert set(modes(tmp_path)) == {"theirs", "dead.ndjson"}


async def test_what_a_killed_drop_left_with_a_wider_mode_is_not_used(tmp_path):
    path, left = tmp_path / "dead.ndjson", tmp_path / "dead.ndjson.new"
    dead = FileDeadLetters(path)
    await dead.open()
    await dead.put([letter(1), letter(2)])
    left.write_bytes(b"half of a line")
    left.chmod(0o666)
    with left.open("rb") as held:  # another user who had opened it sees none of the new content
        assert await dead.drop([1]) == 1
        assert held.read() == b"half of a line"
    assert modes(tmp_path) == {"dead.ndjson": 0o600}
    await dead.aclose()


async def test_dead_letters_behind_a_link_stay_where_they_are(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    target, link = disk / "letters", tmp_path / "dead.ndjson"
    target.touch()
    link.symlink_to(target)
    dead = FileDeadLetters(link)
    await dead.open()
    await dead.put([letter(1), letter(2)])
    assert await dead.drop([1]) == 1
    assert [one.number for one in await dead.list()] == [2]
    await dead.aclose()
    assert link.is_symlink()
    assert b'"number":2' in target.read_bytes()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
async def test_the_owner_stays_the_owner_when_root_drops_a_letter(tmp_path):
    path = tmp_path / "dead.ndjson"
    dead = FileDeadLetters(path)
    await dead.open()
    await dead.put([letter(1), letter(2)])
    os.chown(path, 12345, 23456)
    await dead.drop([1])
    await dead.aclose()
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 23456, 0o600)


# --- the functions themselves -----------------------------------------------------------------


def test_a_file_that_exists_is_not_created_again(tmp_path):
    path = tmp_path / "there"
    path.write_text("old")
    with pytest.raises(FileExistsError):
        create_private(path)
    fd, is_new = open_private(path, os.O_RDWR)
    os.close(fd)
    assert not is_new
    assert path.read_text() == "old"


def test_a_link_without_a_target_is_named_as_such(tmp_path):
    link, _ = dangling(tmp_path, "link")
    for create in (create_private, lambda path: open_private(path, os.O_RDWR)):
        with pytest.raises(OSError, match="symbolic link") as caught:
            create(link)
        assert caught.value.errno == errno.ELOOP


def test_of_many_that_create_it_at_once_one_does(tmp_path):
    path, barrier, made = tmp_path / "new", threading.Barrier(8), []

    def create():
        barrier.wait()
        fd, is_new = open_private(path, os.O_RDWR)
        made.append(is_new)
        os.close(fd)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 7 + [True]
