import asyncio
import functools
import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
from tests.servers.small_disk import KINDS, small_disk

from oncebridge import ConfigError, StoreError, StoreUnavailable
from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    Commit,
    Commits,
    Duplicate,
    Fate,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.sqlite import database as sqlite_file
from oncebridge.stores.sqlite.database import (
    Disk,
    SQLiteFile,
    file_system,
    transaction,
    wal_limit,
)
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock

LEASE_MS, WINDOW_MS = 30_000, 600_000
tokens = (number.to_bytes(16) for number in count(1))


def key(n):
    return n.to_bytes(33)


def want(n):
    return Want((Part(key(n)),), next(tokens), next(tokens), LEASE_MS, WINDOW_MS)


async def deliver(store, *numbers):
    answers = await store.claim(Wants.of([want(n) for n in numbers]))
    held = [answer.held[0] for answer in answers if isinstance(answer, Claim)]
    await store.commit(
        Commits.of([Commit(h.key, h.generation, Fate.DELIVERED, WINDOW_MS) for h in held])
    )
    return len(held)


async def refusal(path):
    """Tell how a store refuses to open *path*."""
    store = SQLiteStore(path)
    try:
        with pytest.raises(StoreError) as caught:
            await store.open()
    finally:
        await store.aclose()
    assert str(path) in str(caught.value)
    return caught.value


# --- where the file lies --------------------------------------------------------------------

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /data rw,relatime shared:2 - nfs4 server:/data rw,vers=4.2
31 30 8:2 / /data/local rw,relatime - xfs /dev/sdb1 rw
32 22 0:27 / /mnt/with\040blank\134and\011tab rw,relatime - cifs //server/share rw
33 22 0:28 / /twice rw,relatime - ext4 /dev/sdc1 rw
34 22 0:29 / /twice rw,relatime - fuse.sshfs me@host: rw
35 22 0:30 / /database rw,relatime - ext4 /dev/sdd1 rw
broken line
36 22 0:31 / /halved rw
"""


@pytest.fixture
def mounts(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/seen.db", "ext4"),
        ("/data/seen.db", "nfs4"),
        ("/data", "nfs4"),
        ("/data/local/deep/down/seen.db", "xfs"),
        ("/database/seen.db", "ext4"),
        ("/data/../seen.db", "ext4"),
        ("/mnt/with blank\\and\ttab/seen.db", "cifs"),
        ("/twice/seen.db", "fuse.sshfs"),
        ("/halved/seen.db", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_deepest_and_latest_mount(path, kind, mounts):
    assert file_system(Path(path), mounts) == kind


def test_where_the_system_does_not_tell_nothing_is_said(tmp_path):
    assert file_system(tmp_path, tmp_path / "no such file") == ""
    (tmp_path / "empty").write_text("")
    assert file_system(tmp_path, tmp_path / "empty") == ""


def test_a_link_is_followed(tmp_path, mounts):
    (tmp_path / "link").symlink_to("/data")
    assert file_system(tmp_path / "link" / "seen.db", mounts) == "nfs4"


def test_this_machine_tells_something():
    assert file_system(Path("/proc/self")) == "proc"


# Was a bug: the mount point is decoded as latin-1 (encode → unicode_escape), so one that is not ASCII is never
# recognised, and a network file system under such a name is not refused.
def test_a_mount_point_may_have_any_name(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS + "40 22 0:40 / /mnt/f\u00fcr\\040alle rw - nfs4 server:/x rw\n")
    assert file_system(Path("/mnt/f\u00fcr alle/seen.db"), path) == "nfs4"


# Was a bug: a mount point that is not UTF-8 anywhere on the host raises UnicodeEncodeError from open().
def test_a_mount_point_that_is_no_text_does_no_harm(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_bytes(MOUNTS.encode() + b"40 22 0:40 / /mnt/\xff rw - nfs4 server:/x rw\n")
    assert file_system(Path("/seen.db"), path) == "ext4"
    assert file_system(Path(os.fsdecode(b"/mnt/\xff/seen.db")), path) == "nfs4"


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "fuse.s3fs"])
async def test_a_network_file_system_is_refused(tmp_path, monkeypatch, kind):
    fake = tmp_path / "mountinfo"
    fake.write_text(f"22 1 8:1 / / rw,relatime - {kind} /dev/sda1 rw\n")
    monkeypatch.setattr(sqlite_file, "file_system", functools.partial(file_system, mounts=fake))
    error = await refusal(tmp_path / "seen.db")
    assert not isinstance(error, StoreUnavailable)
    assert kind in str(error)
    assert "local disk" in str(error)
    assert not (tmp_path / "seen.db").exists()


# --- files that cannot be used --------------------------------------------------------------


async def test_a_missing_directory(tmp_path):
    error = await refusal(tmp_path / "missing" / "seen.db")
    assert "the directory does not exist" in str(error)
    assert not (tmp_path / "missing").exists()


async def test_a_place_where_nothing_can_be_written():
    assert "cannot be opened or created" in str(await refusal(Path("/proc/seen.db")))


async def test_a_directory_is_no_file(tmp_path):
    assert "cannot be opened" in str(await refusal(tmp_path))


async def test_something_that_is_no_database(tmp_path):
    path = tmp_path / "seen.db"
    path.write_bytes(b"once upon a time" * 1000)
    assert "is not a SQLite file" in str(await refusal(path))
    assert path.read_bytes() == b"once upon a time" * 1000


async def test_a_damaged_database(tmp_path):
    path = tmp_path / "seen.db"
    async with SQLiteStore(path) as store:
        await deliver(store, *range(2000))
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    store = SQLiteStore(path)
    with pytest.raises(StoreError, match=r"seen\.db"):
        await store.claim(Wants.of([want(n) for n in range(2000)]))
    await store.aclose()


def as_nobody(code, directory):
    """Run *code* as a user who may not write, also where this test runs as root."""
    drop = "os.setgroups([]); os.setgid(65534); os.setuid(65534)" if os.geteuid() == 0 else "pass"
    script = "\n".join(
        [
            "import asyncio, os, sys",
            "from oncebridge import StoreError",
            "from oncebridge.stores.sqlite.database import file_system",
            "from oncebridge.stores.sqlite.store import SQLiteStore",
            # what is imported late may not be readable for nobody
            "import encodings.unicode_escape, pathlib, traceback",
            "file_system(pathlib.Path('/'))",
            "pathlib.Path('/').as_uri()",
            "asyncio.run(asyncio.to_thread(int))",
            drop,
            textwrap.dedent(code),
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = """
async def main():
    store = SQLiteStore(sys.argv[1] + "/seen.db")
    try:
        await store.open()
        await store.purge()
        print("it opened")
    except StoreError as error:
        print(type(error).__name__, error)
    finally:
        await store.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_a_directory_that_is_read_only(exists):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if exists:
            asyncio.run(_make(directory / "seen.db"))
        directory.chmod(0o555)
        try:
            said = as_nobody(OPEN, directory)
        finally:
            directory.chmod(0o755)
    assert said.startswith("StoreError ")
    assert "seen.db" in said
    assert "read-only" in said or "writable" in said


def test_a_file_that_is_read_only():
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        asyncio.run(_make(directory / "seen.db"))
        (directory / "seen.db").chmod(0o444)
        directory.chmod(0o777)
        said = as_nobody(OPEN, directory)
    assert said.startswith("StoreError ")
    assert "read-only" in said or "writable" in said


async def _make(path):
    async with SQLiteStore(path) as store:
        await deliver(store, 1)


@pytest.mark.parametrize(("kind", "reads"), [(SQLiteStore, 2), (SQLiteDeadLetters, 1)])
@pytest.mark.parametrize(("layout", "by"), [(99, "a newer"), (0, "an older")])
async def test_another_layout_is_refused(tmp_path, kind, reads, layout, by):
    path = tmp_path / "seen.db"
    first = kind(path)
    await first.open()
    await first.aclose()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE oncebridge_schema SET version = ?", (layout,))
    db.close()
    second = kind(path)
    with pytest.raises(StoreError) as caught:
        await second.open()
    why = f"by {by} version of oncebridge (layout {layout}, this one reads {reads})"
    assert str(caught.value).endswith(f"{why}; use that version, or start a new file")
    await second.aclose()
    with sqlite3.connect(path) as db:  # nothing was changed
        assert db.execute("SELECT version FROM oncebridge_schema").fetchall() == [(layout,)]
    db.close()


async def test_another_programs_tables_are_left_alone(tmp_path):
    path = tmp_path / "shared.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
        db.execute("INSERT INTO theirs VALUES (5)")
    db.close()
    async with SQLiteStore(path) as store:
        assert await deliver(store, 1) == 1
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT x FROM theirs").fetchall() == [(5,)]
    db.close()


# --- how it is used -------------------------------------------------------------------------


async def test_everything_committed_is_durable(tmp_path):
    file = SQLiteFile(
        tmp_path / "a.db", name="x", version=1, schema="CREATE TABLE IF NOT EXISTS x(a)"
    )
    modes = await file.run(
        lambda db: [
            db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "busy_timeout")
        ]
    )
    assert modes == ["wal", 2, 10_000]
    await file.aclose()


async def test_a_block_that_fails_leaves_nothing(tmp_path):
    file = SQLiteFile(
        tmp_path / "a.db", name="x", version=1, schema="CREATE TABLE IF NOT EXISTS x(a)"
    )

    def fails(db):
        with transaction(db):
            db.execute("INSERT INTO x VALUES (1)")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await file.run(fails)
    assert await file.run(lambda db: db.execute("SELECT count(*) FROM x").fetchone()) == (0,)
    await file.aclose()


async def test_closing_is_safe_to_repeat_and_final(tmp_path):
    store = SQLiteStore(tmp_path / "seen.db")
    await store.aclose()
    await store.aclose()
    with pytest.raises(StoreError, match="has been closed"):
        await store.claim(Wants.of([want(1)]))
    assert not (tmp_path / "seen.db").exists()


async def test_a_file_that_is_locked_is_worth_trying_again(tmp_path):
    path = tmp_path / "seen.db"
    async with SQLiteStore(path, busy_timeout=timedelta(milliseconds=20)) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            await store.claim(Wants.of([want(1)]))
        other.execute("ROLLBACK")
        other.close()
        assert await deliver(store, 1) == 1


async def test_a_full_disk_is_worth_trying_again_and_loses_nothing(tmp_path):
    async with SQLiteStore(tmp_path / "seen.db") as store:
        assert await deliver(store, *range(10)) == 10
        await store.file.run(lambda db: db.execute("PRAGMA max_page_count = 1").fetchall())
        with pytest.raises(StoreUnavailable, match="full"):
            await store.claim(Wants.of([want(n) for n in range(10, 1000)]))
        await store.file.run(lambda db: db.execute("PRAGMA max_page_count = 100000").fetchall())
        answers = await store.claim(Wants.of([want(n) for n in range(10)]))
        assert all(isinstance(answer, Duplicate) for answer in answers)
        assert await deliver(store, *range(10, 1000)) == 990


async def test_many_may_open_a_new_file_at_the_same_moment(tmp_path):
    stores = [SQLiteStore(tmp_path / "seen.db") for _ in range(16)]
    try:
        await asyncio.gather(*[store.open() for store in stores])
        won = await asyncio.gather(*[deliver(store, *range(20)) for store in stores])
        assert sum(won) == 20
    finally:
        for store in stores:
            await store.aclose()


async def test_it_stays_flat_over_many_windows(tmp_path):
    clock = ManualClock()
    path = tmp_path / "seen.db"
    sizes, rows = [], []
    async with SQLiteStore(path, clock=clock) as store:
        await store.file.run(lambda db: db.execute("PRAGMA synchronous = OFF"))  # only for speed
        for window in range(10):
            for batch in range(10):
                start = (window * 10 + batch) * 200
                assert await deliver(store, *range(start, start + 200)) == 200
                clock.advance(WINDOW_MS // 10)
            await store.file.run(
                lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            )
            sizes.append(path.stat().st_size)
            rows.append(
                await store.file.run(
                    lambda db: db.execute("SELECT count(*) FROM oncebridge_records").fetchone()[0]
                )
            )
    assert max(rows) <= 2 * 2000 * 1.5
    assert sizes[-1] <= 1.25 * sizes[2]


async def test_purging_removes_what_is_past_keeping_and_nothing_else(tmp_path):
    clock = ManualClock()
    async with SQLiteStore(tmp_path / "seen.db", clock=clock) as store:
        await deliver(store, *range(50))
        clock.advance(WINDOW_MS // 2)
        await deliver(store, *range(50, 60))
        clock.advance(WINDOW_MS // 2)
        removed = sum([await store.purge(20) for _ in range(5)])
        assert removed == 50
        assert [record is None for record in await store.peek([key(1), key(55)])] == [True, False]


async def test_processes_that_claim_one_key_each_remove_what_expired(tmp_path):
    clock = ManualClock()
    path = tmp_path / "seen.db"
    async with SQLiteStore(path, clock=clock) as store:
        await deliver(store, *range(50))
    clock.advance(WINDOW_MS)
    for number in range(50, 52):
        async with SQLiteStore(path, clock=clock) as store:
            await deliver(store, number)
    async with SQLiteStore(path, clock=clock) as store:
        assert await store.peek([key(n) for n in range(50)]) == [None] * 50


async def test_claims_of_one_key_remove_what_expired_too(tmp_path):
    clock = ManualClock()
    async with SQLiteStore(tmp_path / "seen.db", clock=clock) as store:
        await deliver(store, *range(200))
        clock.advance(WINDOW_MS)
        for number in range(200, 400):
            await deliver(store, number)
        assert await store.peek([key(n) for n in range(200)]) == [None] * 200


# --- records --------------------------------------------------------------------------------


async def test_keys_with_the_same_checksum_are_kept_apart(tmp_path):
    one, other, third = b"plumless", b"buckeroo", b"another"
    assert crc32(one) == crc32(other)
    async with SQLiteStore(tmp_path / "seen.db", clock=ManualClock()) as store:
        asked = Wants([one], b"t" * 16, b"g" * 16, LEASE_MS, WINDOW_MS, b"of one")
        assert (await store.claim(asked)).each == [HELD]
        asked = Wants([other, one, third], b"u" * 16, b"h" * 16, LEASE_MS, WINDOW_MS, b"of other")
        held, busy, also_held = (await store.claim(asked)).each
        assert (held, busy, also_held) == (HELD, Busy(one, LEASE_MS), HELD)
        answers = await store.commit(Commits([one], b"h" * 16, window_ms=WINDOW_MS))
        assert answers == [Reply.FENCED]
        answers = await store.commit(Commits([other], b"h" * 16, window_ms=WINDOW_MS))
        assert answers == [Reply.COMMITTED]
        claimed, done = await store.peek([one, other])
        assert (claimed.key, claimed.fate, claimed.memo) == (one, None, b"of one")
        assert (done.key, done.fate, done.memo) == (other, Fate.DELIVERED, b"of other")
        assert await store.release(Releases([one], b"t" * 16, keep_ms=WINDOW_MS)) == [
            Reply.RELEASED
        ]
        assert await store.forget([one]) == [True]
        assert [record is None for record in await store.peek([one, other])] == [True, False]


async def test_commits_of_a_batch_count_although_others_are_refused(tmp_path):
    async with SQLiteStore(tmp_path / "seen.db", clock=ManualClock()) as store:
        keys = [key(n) for n in range(40)]
        await store.claim(Wants(keys, b"t" * 16, b"g" * 16, LEASE_MS, WINDOW_MS))
        await store.commit(Commits([keys[7]], b"g" * 16, Fate.DEAD, WINDOW_MS))
        generations = [b"h" * 16 if n == 20 else b"g" * 16 for n in range(41)]
        answers = await store.commit(Commits([*keys, key(99)], generations, window_ms=WINDOW_MS))
        expected = [Reply.COMMITTED] * 41
        expected[7], expected[20], expected[40] = Reply.ALREADY, Reply.FENCED, Reply.FENCED
        assert answers == expected
        fates = [record.fate for record in await store.peek(keys)]
        assert fates == [
            Fate.DEAD if n == 7 else None if n == 20 else Fate.DELIVERED for n in range(40)
        ]


WORKER = """
import asyncio, json, sys
from oncebridge.events.key import Part
from oncebridge.stores.api import Claim, Commit, Commits, Fate, Want, Wants
from oncebridge.stores.sqlite import SQLiteStore
import os

async def main(path):
    won = []
    async with SQLiteStore(path) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for start in range(0, 300, 10):
            wants = [
                Want((Part(n.to_bytes(33)),), os.urandom(16), os.urandom(16), 30_000, 600_000)
                for n in range(start, start + 10)
            ]
            held = [a.held[0] for a in await store.claim(Wants.of(wants)) if isinstance(a, Claim)]
            done = [Commit(h.key, h.generation, Fate.DELIVERED, 600_000) for h in held]
            await store.commit(Commits.of(done))
            won += [int.from_bytes(h.key) for h in held]
    print(json.dumps(won))

asyncio.run(main(sys.argv[1]))
"""


def test_two_processes_share_a_file_and_every_key_has_one_winner(tmp_path):
    path = tmp_path / "seen.db"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    won = []
    for worker in workers:
        said, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0
        won += eval(said)
    assert sorted(won) == list(range(300))


def test_addresses(tmp_path):
    assert SQLiteStore.from_url(f"sqlite:{tmp_path}/a.db").file.path == tmp_path / "a.db"
    for url in ("sqlite:", "a.db", "", "sqlite3:a.db"):
        with pytest.raises(ConfigError, match="sqlite:PATH") as caught:
            SQLiteStore.from_url(url)
        assert caught.value.where == ""


# --- the write-ahead log ---------------------------------------------------------------------------

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("size", "limit"),
    [(MIB, 64 * 1024), (8 * MIB, 256 * 1024), (512 * MIB, 16 * MIB), (2**40, 16 * MIB)],
)
def test_the_write_ahead_log_is_in_proportion_to_the_disk(tmp_path, monkeypatch, size, limit):
    told = SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    assert wal_limit(tmp_path / "x.db") == limit
    assert wal_limit(tmp_path / "x.db", 4 * limit) == min(max(size // 32, 64 * 1024), 4 * limit)


def test_where_the_disk_is_not_known_the_log_is_as_large_as_it_may_be(tmp_path):
    assert Disk.of(tmp_path / "none" / "x.db") == Disk()
    assert wal_limit(tmp_path / "none" / "x.db") == 16 * MIB


@pytest.mark.parametrize("kind", KINDS)
async def test_a_small_disk_is_written_many_times_over(kind, tmp_path, monkeypatch):
    with small_disk(kind, tmp_path / "small", 8 * MIB, monkeypatch) as disk:
        path = disk.folder / "store.db"
        file = SQLiteFile(path, name="x", version=1, schema="CREATE TABLE IF NOT EXISTS x (a)")

        def replace(db):
            with transaction(db):
                db.execute("DELETE FROM x")
                db.execute("INSERT INTO x VALUES (zeroblob(100000))")

        for _ in range(200):  # 20 MB in all
            await file.run(replace)
        log = path.with_name("store.db-wal")
        assert log.stat().st_size <= 2 * wal_limit(path)
        await file.aclose()
