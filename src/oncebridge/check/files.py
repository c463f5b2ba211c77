"""
Check the files of store, dead letters, spool and sinks on this host.

Nothing is created, not even the files that SQLite keeps next to a database. A missing file is
created when the service starts, if its directory allows it.
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

from oncebridge.base.line_files import file_path
from oncebridge.check.finding import Checkup, Severity, shell_path
from oncebridge.service.addresses import scheme_of
from oncebridge.service.config import Setup
from oncebridge.sources.spool import Spool
from oncebridge.stores.sqlite.database import SQLiteFile, network_file_system, open_unchanged

_LOW: Final = 1024**3
_VERY_LOW: Final = 100 * 1024**2
_CHECK_S: Final = 2.5  # there may be three of them, and ten seconds for all
_OTHERS_MAY_READ: Final = stat.S_IROTH


class KeptFile(Struct, frozen=True):
    """One file of the configuration, and its use."""

    what: str
    path: Path
    holds_events: bool
    file: SQLiteFile | None = None

    @property
    def subject(self) -> str:
        return f"{self.what} {self.path}"

    @property
    def paths(self) -> list[Path]:
        """The file, and its write-ahead log if it is a SQLite file."""
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
        yield KeptFile("dead letters", Path(file_path(config.dead.url)), holds_events=True)
    if config.spool is not None:
        yield KeptFile(
            "spool", Path(config.spool), holds_events=True, file=Spool(config.spool).file
        )
    for route in setup.routes:
        if scheme_of(route.sink.url) == "file":
            yield KeptFile("sink", Path(file_path(route.sink.url)), holds_events=True)


def check_files(
    setup: Setup, checkup: Checkup, *, free: Callable[[Path], int] | None = None
) -> None:
    """Check every file, or the directory it would be created in; *free* returns free disk space."""
    tight: set[int] = set()
    for one in kept_files(setup):
        before = len(checkup.findings)
        directory = one.path.absolute().parent
        if not directory.is_dir():
            checkup.report(
                "directory-missing",
                Severity.ERROR,
                one.subject,
                seen=f"the directory {directory} does not exist",
                why="The service does not start.",
                fix=f"Create it as the user that runs the service:\nmkdir -p {shell_path(directory)}",
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
            there = "exists" if one.path.exists() else "does not exist yet; can be created"
            checkup.report_passed(one.subject, f"the file, {there}")


def _check_access(one: KeptFile, directory: Path, checkup: Checkup) -> None:
    # A database keeps files next to it, and a file of lines is rewritten when one is dropped.
    wanted = [directory, *([one.path] if one.path.exists() else [])]
    closed = [path for path in wanted if not _may_write(path)]
    if closed:
        checkup.report(
            "not-writable",
            Severity.ERROR,
            one.subject,
            seen=f"the user that runs this check cannot write to {closed[0]}",
            why="The service does not start, if it runs as the same user.",
            fix="Run the check as the user of the service, or change the owner to that user:\n"
            f"chown USER {shell_path(closed[0])}",
        )
    readable = [path for path in one.paths if _others_may_read(path)]
    if one.holds_events and readable:
        checkup.report(
            "file-readable",
            Severity.NOTE,
            one.subject,
            seen=f"every user of this host can read {readable[0].name} (mode {_mode(readable[0])})",
            why="It contains whole events, which may contain personal data.",
            fix="Allow only its owner to read it; oncebridge keeps the mode of an existing file:\n"
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
        seen=f"{left // 1024**2} MiB are free on its disk",
        why="On a full disk nothing can be written: events are returned to the source, and are lost "
        "when their sender gives up.",
        fix="Free disk space, or move the file to another disk. The largest directories:\n"
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
            seen=f"the file is on a network file system ({kind})",
            why="SQLite's locks do not work there, and two workers would both deliver. The service "
            "does not start.",
            fix="Move it to a local disk, or use a store for several hosts: redis, "
            "postgresql, dynamodb.",
        )
        return  # reading from it may block forever
    if not one.path.is_file() or not one.path.stat().st_size:
        return
    try:
        with open_unchanged(one.path) as db:
            _look_inside(one, db, checkup)
    except sqlite3.Error as error:
        _report_unreadable(one, error, checkup)


def _look_inside(one: KeptFile, db: sqlite3.Connection, checkup: Checkup) -> None:
    if not has_write_ahead_log(one.path) and db.execute(_IS_OURS).fetchone():
        checkup.report(
            "sqlite-journal",
            Severity.NOTE,
            one.subject,
            seen="its write-ahead log is off",
            why="oncebridge sets it; another program has changed it, or restored the file. The service "
            "turns it on when it starts, which fails while another program has the file open.",
            fix=f"Optional: turn it on now:\nsqlite3 {shell_path(one.path)} 'PRAGMA journal_mode = WAL'",
        )
    refusal = one.file.refusal(db) if one.file is not None else ""
    if refusal:
        checkup.report(
            "sqlite-layout",
            Severity.ERROR,
            one.subject,
            seen=refusal,
            why="The service does not start.",
            fix=_NEW_FILES[one.what],
        )
    _check_integrity(one, db, checkup)


_NEW_FILES: Final = {
    "store": "Use the version of oncebridge that wrote it. Or start with an empty file; events that "
    "were delivered before are then delivered again if they are redelivered.\n"
    'store = "sqlite:oncebridge-new.db"',
    "dead letters": "Use the version of oncebridge that wrote it, and replay or drop its dead "
    "letters. Or start with an empty file, and keep this one for that version to read.\n"
    'dead = "sqlite:oncebridge-dead-new.db"',
    "spool": "Run the version of oncebridge that wrote it until the spool is empty; only then use "
    "another file. Its events are acknowledged, and their sender does not send them again.",
}
_IS_OURS = "SELECT 1 FROM sqlite_master WHERE name = 'oncebridge_schema'"


def has_write_ahead_log(path: Path) -> bool:
    """Return whether it is on, by the file's header: a read-only connection does not report it."""
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _check_integrity(one: KeptFile, db: sqlite3.Connection, checkup: Checkup) -> None:
    timer = threading.Timer(_CHECK_S, db.interrupt)
    timer.start()
    try:
        result = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        checkup.report_not_checked(
            one.subject,
            "the integrity of the file",
            f"more than {_CHECK_S:g} seconds: sqlite3 {shell_path(one.path)} 'PRAGMA quick_check'",
        )
        return
    finally:
        timer.cancel()
    if result != "ok":
        _report_damage(one, "SQLite reports that the file is damaged", checkup)


def _report_unreadable(one: KeptFile, error: sqlite3.Error, checkup: Checkup) -> None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_NOTADB:
        fix = f"Inspect it, and use another file:\nfile {shell_path(one.path)}"
        _report_damage(one, "it is not a SQLite file", checkup, fix)
    elif code == sqlite3.SQLITE_CORRUPT:
        _report_damage(one, "SQLite reports that the file is damaged", checkup)
    else:
        checkup.report_not_checked(
            one.subject, "the content of the file", f"a readable file: {type(error).__name__}"
        )


def _report_damage(one: KeptFile, seen: str, checkup: Checkup, fix: str = "") -> None:
    saved = shell_path(f"{one.path}.new")
    checkup.report(
        "sqlite-damaged",
        Severity.ERROR,
        one.subject,
        seen=seen,
        why="Its records cannot be trusted, and the service may not start.",
        fix=fix
        or "Stop the service, copy the readable part to a new file, and use that file:\n"
        # Not by .recover, which the sqlite3 of some distributions lacks.
        f"sqlite3 {shell_path(one.path)} .dump | sed 's/^ROLLBACK.*/COMMIT;/' | sqlite3 {saved}",
    )
