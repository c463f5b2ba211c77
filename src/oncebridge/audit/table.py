"""
All arrivals in one DuckDB table, on disk if they do not fit into memory.

Each arrival has a number (`ord`): the milliseconds since the first arrival, and its place in the
order of reading. So numbers sort by arrival, and two arrivals of one millisecond keep the order in
which they were read. Arrivals are identified by this number everywhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

from oncebridge.audit.rows import (
    CANDIDATE_COLUMNS,
    COLUMNS,
    KIND_COLUMNS,
    LINK_COLUMNS,
    NAME_COLUMNS,
    ChunkSummary,
)
from oncebridge.audit.workers import AuditFailed
from oncebridge.errors import ConfigError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_T = TypeVar("_T")

_MEMORY: Final = "400MB"
_THREADS: Final = 2
_BITS: Final = 62


class Chunk(Struct, frozen=True):
    """A chunk of rows, and its file."""

    number: int
    file: int
    summary: ChunkSummary


class Numbering(Struct, frozen=True):
    """How the numbers of arrivals are formed."""

    first_ms: int
    last_ms: int
    step: int
    """The number of arrivals that fit into one millisecond."""
    kind: str
    """The SQL type of numbers."""
    known: bool
    """Whether there is any time at all."""


class Table:
    """The arrivals of one audit, and the tables made from them."""

    def __init__(self, connection: "DuckDBPyConnection", folder: Path) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1)
        self.folder = folder
        self.times = Numbering(0, 0, 1, "BIGINT", known=False)

    def close(self) -> None:
        """Close the thread and the file."""
        self._thread.shutdown()
        self._connection.close()

    def run(self, sql: str) -> None:
        """Run statements without a result."""
        self._ask(self._connection, lambda: self._connection.execute(sql))

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return all rows of a small result."""
        return self._ask(self._connection, lambda: self._connection.execute(sql).fetchall())

    def row(self, sql: str) -> tuple[Any, ...]:
        """Return the only row of a result."""
        (row,) = self.rows(sql)
        return row

    def stream(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a result of any size."""
        # Its own cursor: other queries may run before the end of the result.
        with self._connection.cursor() as cursor:
            self._ask(cursor, lambda: cursor.execute(sql))
            while several := self._ask(cursor, lambda: cursor.fetchmany(10_000)):
                yield from several

    def count(self, name: str) -> int:
        """Count the rows of a table."""
        (count,) = self.row(f"SELECT count(*) FROM {name}")  # noqa: S608
        return int(count)

    def _ask(self, connection: "DuckDBPyConnection", ask: Callable[[], _T]) -> _T:
        """Run a query in a thread: while DuckDB waits for its own threads, Ctrl-C has no effect."""
        import duckdb  # noqa: PLC0415 - an extra

        answer = self._thread.submit(ask)
        try:
            while not answer.done():
                wait([answer], timeout=1)
            return answer.result()
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            raise AuditFailed(_no_room(str(error))) from None
        except KeyboardInterrupt:
            connection.interrupt()
            raise

    def load(self, name: str, files: str, columns: Mapping[str, str]) -> None:
        """Create a table from the lines of *files*, a pattern below the folder."""
        self.run(f"CREATE TABLE {name} AS SELECT * FROM {self.lines(files, columns)}")  # noqa: S608

    def lines(self, files: str, columns: Mapping[str, str]) -> str:
        """Return SQL for the lines of *files* as a table."""
        listed = ", ".join(f"'{name}': '{kind}'" for name, kind in columns.items())
        # The folder itself is not a pattern.
        where = f"{escape(str(self.folder))}/{files}".replace("'", "''")
        return (
            f"read_csv('{where}', auto_detect=false, header=false, delim='\t', quote='', "
            f"escape='', comment='', nullstr='', columns={{{listed}}})"
        )

    # --- loading ------------------------------------------------------------------------

    def load_arrivals(self, chunks: Sequence[Chunk], *, candidate: bool) -> None:
        """Load the rows of the workers, and number the arrivals."""
        self.times = _times(chunks)
        self._load_chunks(chunks)
        self.load("kinds", "kinds-*", KIND_COLUMNS)
        names = self.lines("names-*", NAME_COLUMNS)
        self.run(
            f"CREATE TABLE names AS SELECT name, min(text) AS text FROM {names} GROUP BY name"  # noqa: S608
        )
        self.run(
            "CREATE TABLE topics AS "
            "SELECT kind, rule, dense_rank() OVER (ORDER BY topic) AS topic FROM kinds"
        )
        self.load("links", "links-*", LINK_COLUMNS)
        self.load("links2", "links2-*", LINK_COLUMNS)
        columns = COLUMNS | CANDIDATE_COLUMNS if candidate else COLUMNS
        times = self.times
        arrived = f"coalesce(recorded, greatest(running, before_ms), {times.first_ms})"
        beside = list(columns)[list(columns).index("key") :]
        self.run(
            f"""
            CREATE TABLE arrivals AS
            SELECT
                ({arrived} - {times.first_ms})::{times.kind} * {times.step} + base + idx AS ord,
                kind, (base_line + line)::INTEGER AS line, {", ".join(beside)}
            FROM {self.lines("rows-*", columns)} JOIN chunks USING (chunk)
            """  # noqa: S608
        )
        for path in self.folder.glob("rows-*"):
            path.unlink()

    def _load_chunks(self, chunks: Sequence[Chunk]) -> None:
        path = self.folder / "chunks"
        path.write_text("".join(_placed(chunks, self.times.first_ms)))
        columns = {"chunk": "INTEGER", "file": "INTEGER", "base": "BIGINT"}
        columns |= {"base_line": "BIGINT", "before_ms": "BIGINT"}
        self.load("chunks", "chunks", columns)

    # --- numbers ---------------------------------------------------------------

    def at_ms(self, number: int) -> int:
        """Return the time of an arrival."""
        return int(number // self.times.step + self.times.first_ms)

    @property
    def ms(self) -> str:
        """The milliseconds since the first arrival, in SQL."""
        return f"(ord // {self.times.step})"


def check_engine() -> None:
    """Raise `ConfigError` if DuckDB is not installed."""
    if find_spec("duckdb") is None:
        raise ConfigError(
            "audit", "needs DuckDB, which is not installed: pip install 'oncebridge[audit]'"
        )


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if DuckDB cannot keep files in *folder*, by its path."""
    text = str(folder)
    if "?" in text or "\\" in text or not _is_text(text):
        raise ConfigError(
            "TMPDIR",
            "DuckDB cannot use a directory with ?, \\ or bytes that are not UTF-8 in its path; set another",
        )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def opened(folder: Path) -> Iterator[Table]:
    """Open an empty table that uses *folder* for data beyond memory."""
    import duckdb  # noqa: PLC0415 - an extra

    (folder / "spilled").mkdir()
    connection = duckdb.connect(
        str(folder / "table.duckdb"),
        config={
            "memory_limit": _MEMORY,
            "threads": _THREADS,
            "temp_directory": str(folder / "spilled"),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    table = Table(connection, folder)
    try:
        yield table
    finally:
        table.close()


def _times(chunks: Sequence[Chunk]) -> Numbering:
    ends = list(_ends(chunks))
    first, last = (min(ends), max(ends)) if ends else (0, 0)
    step = 1 << sum(chunk.summary.events for chunk in chunks).bit_length()
    fits = (last - first + 1).bit_length() + step.bit_length() <= _BITS
    return Numbering(first, last, step, "BIGINT" if fits else "HUGEINT", known=bool(ends))


def _ends(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Yield times that include the first and last of all arrivals."""
    begun: set[int] = set()
    for chunk in chunks:
        one = chunk.summary
        found = [one.earliest_recorded_ms, one.latest_recorded_ms]
        if one.recorded < one.events:
            found.append(one.end_ms)
            if chunk.file not in begun:
                found.append(one.first_ms)
        if one.first_ms is not None:
            begun.add(chunk.file)
        yield from (each for each in found if each is not None)


def _placed(chunks: Sequence[Chunk], first_ms: int) -> Iterator[str]:
    """
    Yield for each chunk the arrivals, lines and latest time before it.

    Arrivals before the first time of a file came at that time.
    """
    firsts: dict[int, int] = {}
    for chunk in chunks:
        if chunk.summary.first_ms is not None:
            firsts.setdefault(chunk.file, chunk.summary.first_ms)
    base = line = 0
    file, before = -1, first_ms
    for chunk in chunks:
        summary = chunk.summary
        if chunk.file != file:
            file, line, before = chunk.file, 0, firsts.get(chunk.file, first_ms)
        if summary.events:  # so that every number belongs to one chunk
            yield f"{chunk.number}\t{file}\t{base}\t{line}\t{before}\n"
        base += summary.events
        line += summary.lines
        if summary.latest_ms is not None:
            before = max(before, summary.latest_ms)


def _no_room(message: str) -> str:
    lowered = message.lower()
    if "no space" in lowered or "max_temp_directory_size" in lowered or "offload" in lowered:
        return "there is no space for temporary files; set TMPDIR to a directory with more space"
    return f"DuckDB: {message.splitlines()[0]}"
