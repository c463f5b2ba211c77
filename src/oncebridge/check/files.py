"""
The files of store, dead letters, spool and sinks, as they lie on this host's disks.

They are looked at as they are: nothing is made, not even what SQLite keeps beside a file. One
that is not there yet is made when the service starts, if its directory allows it.
"""

import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from oncebridge.base.line_files import path_of
from oncebridge.check.finding import Checkup, Severity, shell_path
from oncebridge.service.addresses import scheme_of
from oncebridge.service.config import Setup
from oncebridge.sources.spool import Spool
from oncebridge.stores.sqlite.database import SQLiteFile, looking_at, network_file_system

_LOW: Final = 1024**3
_VERY_LOW: Final = 100 * 1024**2
_CHECK_S: Final = 2.5  # there may be three of them, and ten seconds for all
_OTHERS_MAY_READ: Final = stat.S_IROTH


class KeptFile(Struct, frozen=True):
    """One file that something is kept in."""

    what: str
    path: Path
    holds_events: bool
    file: SQLiteFile | None = None

    @property
    def subject(self) -> str:
        return f"{self.what} {self.path}"

    @property
    def paths(self) -> list[Path]:
        """Return the file, and the log that SQLite keeps beside it."""
        return [self.path, *([self.path.with_name(f"{self.path.name}-wal")] if self.file else [])]


def kept_files(setup: Setup) -> Iterator[KeptFile]:
    """List the files that the configuration names, each once for each use."""
    config = setup.config
    if scheme_of(config.store.url) == "sqlite":
        file = config.store.opened.file
        yield KeptFile("store", file.path, holds_events=False, file=file)
    if scheme_of(config.dead.url) == "sqlite":
        file = config.dead.opened.file
        yield KeptFile("dead letters", file.path, holds_events=True, file=file)
    elif scheme_of(config.dead.url) == "file":
        yield KeptFile("dead letters", Path(path_of(config.dead.url)), holds_events=True)
    if config.spool is not None:
        yield KeptFile(
            "spool", Path(config.spool), holds_events=True, file=Spool(config.spool).file
        )
    for route in setup.routes:
        if scheme_of(route.sink.url) == "file":
            yield KeptFile("sink", Path(path_of(route.sink.url)), holds_events=True)


def check_files(
    setup: Setup, checkup: Checkup, *, free: Callable[[Path], int] | None = None
) -> None:
    """Look at every file there is, or at where it would be made; *free* tells the room left."""
    tight: set[int] = set()
    for one in kept_files(setup):
        before = len(checkup.findings)
        directory = one.path.absolute().parent
        if not directory.is_dir():
            checkup.report(
                "directory-missing",
                Severity.ERROR,
                one.subject,
                seen=f"there is no directory {directory}",
                why="The service does not start.",
                fix=f"Make it, for whoever runs the service:\nmkdir -p {shell_path(directory)}",
            )
            continue
        _check_access(one, directory, checkup)
        device = directory.stat().st_dev
        if device not in tight and _check_disk_space(
            one, directory, (free or _free)(directory), checkup
        ):
            tight.add(device)
        if one.file is not None:
            _check_sqlite(one, checkup)
        if len(checkup.findings) == before:
            there = "as it is" if one.path.exists() else "not there yet; can be made"
            checkup.report_passed(one.subject, f"the file, {there}")


def _check_access(one: KeptFile, directory: Path, checkup: Checkup) -> None:
    # A database keeps files beside it, and a file of lines is written anew when one is dropped.
    wanted = [directory, *([one.path] if one.path.exists() else [])]
    closed = [path for path in wanted if not _may_write(path)]
    if closed:
        checkup.report(
            "not-writable",
            Severity.ERROR,
            one.subject,
            seen=f"{closed[0]} cannot be written to by whoever runs this check",
            why="The service does not start, if it runs as the same user.",
            fix="Check again as the user of the service, if that is another; or give it to that user:\n"
            f"chown USER {shell_path(closed[0])}",
        )
    readable = [path for path in one.paths if _others_may_read(path)]
    if one.holds_events and readable:
        checkup.report(
            "file-readable",
            Severity.NOTE,
            one.subject,
            seen=f"every user of this host may read {readable[0].name} (mode {_mode(readable[0])})",
            why="It holds whole events, and with them what they say about people.",
            fix="Let only its owner read it; oncebridge keeps the mode of a file that exists:\n"
            f"chmod 600 {' '.join(map(shell_path, readable))}",
        )


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _others_may_read(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_mode & _OTHERS_MAY_READ:
        return False
    above = path.absolute().resolve().parents
    return all(directory.stat().st_mode & stat.S_IXOTH for directory in above)


def _mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _check_disk_space(one: KeptFile, directory: Path, left: int, checkup: Checkup) -> bool:
    if left >= _LOW:
        return False
    checkup.report(
        "disk-space",
        Severity.ERROR if left < _VERY_LOW else Severity.WARNING,
        one.subject,
        seen=f"{left // 1024**2} MiB are left on its disk",
        why="On a full disk nothing can be remembered or given up: events are handed back, and "
        "expire at their sender if that lasts.",
        fix="Make room, or put the file on another disk. What takes it:\n"
        f"du -xh --max-depth=1 {shell_path(directory)} | sort -h | tail",
    )
    return True


# --- SQLite -------------------------------------------------------------------------------------


def _check_sqlite(one: KeptFile, checkup: Checkup) -> None:
    kind = network_file_system(one.path)
    if kind:
        checkup.report(
            "sqlite-network",
            Severity.ERROR,
            one.subject,
            seen=f"it lies on a network file system ({kind})",
            why="SQLite's locks do not hold there: two workers would both deliver. The service "
            "does not start.",
            fix="Put it on a local disk, or use a store made for several hosts: redis, "
            "postgresql, dynamodb.",
        )
        return  # to read from it may take for ever
    if not one.path.is_file() or not one.path.stat().st_size:
        return
    try:
        with looking_at(one.path) as db:
            _look_inside(one, db, checkup)
    except sqlite3.Error as error:
        _report_unreadable(one, error, checkup)


def _look_inside(one: KeptFile, db: sqlite3.Connection, checkup: Checkup) -> None:
    if not has_write_ahead_log(one.path) and db.execute(_IS_OURS).fetchone():
        checkup.report(
            "sqlite-journal",
            Severity.NOTE,
            one.subject,
            seen="it has no write-ahead log, which oncebridge sets",
            why="Somebody has changed it, or restored the file with a tool that does. It is "
            "switched back at the start, which fails while another program has the file open.",
            fix=f"Nothing, or switch it now:\nsqlite3 {shell_path(one.path)} 'PRAGMA journal_mode = WAL'",
        )
    refusal = one.file.refusal(db) if one.file is not None else ""
    if refusal:
        checkup.report(
            "sqlite-layout",
            Severity.ERROR,
            one.subject,
            seen=refusal.removesuffix("; start a new file"),  # not for a spool
            why="The service does not start.",
            fix=_NEW_FILES[one.what],
        )
    _check_integrity(one, db, checkup)


_NEW_FILES: Final = {
    "store": "Go back to the version of oncebridge that wrote it. Or start with an empty file; it "
    "remembers nothing, so what has been delivered and comes again is delivered again.\n"
    'store = "sqlite:oncebridge-new.db"',
    "dead letters": "Go back to the version of oncebridge that wrote it; with that, replay or drop "
    "what is in there. Or start with an empty file and keep this one, for that version to read.\n"
    'dead = "sqlite:oncebridge-dead-new.db"',
    "spool": "Go back to the version of oncebridge that wrote it, and let it run until the spool "
    "is empty; only then name another file. Its events have been acknowledged, and nobody "
    "sends them again.",
}
_IS_OURS = "SELECT 1 FROM sqlite_master WHERE name = 'oncebridge_schema'"


def has_write_ahead_log(path: Path) -> bool:
    """Read it in the file's head: a connection that only looks does not tell."""
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _check_integrity(one: KeptFile, db: sqlite3.Connection, checkup: Checkup) -> None:
    timer = threading.Timer(_CHECK_S, db.interrupt)
    timer.start()
    try:
        told = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        checkup.report_not_checked(
            one.subject,
            "whether the file is whole",
            f"more than {_CHECK_S:g} seconds: sqlite3 {shell_path(one.path)} 'PRAGMA quick_check'",
        )
        return
    finally:
        timer.cancel()
    if told != "ok":
        _report_damage(one, "SQLite finds it damaged", checkup)


def _report_unreadable(one: KeptFile, error: sqlite3.Error, checkup: Checkup) -> None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_NOTADB:
        fix = f"See what it is, and name another file:\nfile {shell_path(one.path)}"
        _report_damage(one, "it is no SQLite file", checkup, fix)
    elif code == sqlite3.SQLITE_CORRUPT:
        _report_damage(one, "SQLite finds it damaged", checkup)
    else:
        checkup.report_not_checked(
            one.subject, "what is in the file", f"to be read: {type(error).__name__}"
        )


def _report_damage(one: KeptFile, seen: str, checkup: Checkup, fix: str = "") -> None:
    saved = shell_path(f"{one.path}.new")
    checkup.report(
        "sqlite-damaged",
        Severity.ERROR,
        one.subject,
        seen=seen,
        why="What is kept there cannot be relied on, and the service may not start.",
        fix=fix
        or "Stop the service, save what can still be read, and name the new file instead:\n"
        # Not by .recover, which the sqlite3 of some distributions lacks.
        f"sqlite3 {shell_path(one.path)} .dump | sed 's/^ROLLBACK.*/COMMIT;/' | sqlite3 {saved}",
    )
