"""
The Postgres store: records in a PostgreSQL database.

**Durability:** everything committed survives a crash (an unlogged table and
`synchronous_commit = off` are refused). After a failover to an asynchronous standby, the last
moments may be missing: those events may be delivered twice, none is lost.
**Clock:** the server's. Whether a lease or window is over is decided after the rows are locked; a
window starts when the server starts the commit.
**Outages:** `StoreUnavailable` within *timeout*. No event is lost: events are returned to their
source. The store reconnects by itself.
**Cost:** one round trip and one transaction per batch of claims, and one per batch of commits.

Any number of workers on any number of hosts may share a table, also through PgBouncer. The
operations are functions in the database (`records.sql`). A duplicate is found by reading, and
writes nothing.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

import asyncpg
from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import Clock
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    Commit,
    CommitAnswer,
    Commits,
    Duplicate,
    ExtendAnswer,
    Extensions,
    Fate,
    Held,
    Memories,
    Mismatch,
    NoAnswer,
    Portable,
    Record,
    Release,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Wants,
)
from oncebridge.stores.conditional import Records, mapped
from oncebridge.stores.postgres.address import read_address
from oncebridge.stores.postgres.arrays import arrays, claim_arrays, stored_keys
from oncebridge.stores.postgres.checks import check_server, check_table, migrate
from oncebridge.stores.postgres.pool import (
    AccessRefused,
    NoReply,
    NotConnected,
    Pool,
    error_text,
    sqlstate,
)
from oncebridge.stores.postgres.schema import Layout, chosen_names
from oncebridge.stores.postgres.writers import Settling

_T = TypeVar("_T")
_Batch = TypeVar("_Batch", Wants, Commits, Releases, Extensions, Records)

_VERSION: Final = 2
_RIGHTS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
_CHUNK: Final = 500  # items per statement, so that rows are not locked for long

_STEP, _LEAST, _MOST = 128, 256, 4096  # pages of 8 kB: per statement, and per purge
_ROUND: Final = 50
"""In how many purges the whole table is read, unless that takes too many pages each."""
_SPREAD: Final = 2654435761  # spreads the pages where workers start to purge

_FATES: Final = (None, *Fate)
# What the functions answer, by the number in their rows; the first one needs no row.
_COMMITTED: Final[tuple[CommitAnswer, ...]] = (Reply.COMMITTED, Reply.ALREADY, Reply.FENCED)
_RELEASED: Final[tuple[ReleaseAnswer, ...]] = (Reply.RELEASED, Reply.FENCED)
_EXTENDED: Final[tuple[ExtendAnswer, ...]] = (Reply.EXTENDED, Reply.FENCED)
_REMEMBERED: Final[tuple[RememberAnswer, ...]] = (Reply.REMEMBERED, Reply.KNOWN)
_COLUMNS = """key, token, generation, until_ms, attempts, hash, fate, memo, hard_until_ms,
    keep_until_ms, whole_key"""
_SIZE = """
SELECT
    CASE
        WHEN pg_relation_size(oid) = 0 THEN 0
        WHEN relpages > 0 AND reltuples >= 0 THEN
            (reltuples::float8 / relpages * pg_relation_size(oid)
                / current_setting('block_size')::integer)::bigint
    END,
    pg_total_relation_size(oid)
FROM pg_class WHERE oid = $1::text::regclass
"""
_PASSING = ("08", "25", "40", "53", "55", "57", "58")
"""Classes of errors that may pass: no more connections, disk space or locks."""


class PostgresOptions(Struct, frozen=True, kw_only=True):
    """Options of the Postgres store."""

    table: Annotated[
        str | None, Doc("The table for records, if not oncebridge_records.", "crm_records")
    ] = None
    schema: Annotated[str | None, Doc("The schema of the table, if not public.", "oncebridge")] = (
        None
    )
    connections: Annotated[int, Doc("How many connections to open at most.", "4", at_least=1)] = 4
    timeout: Annotated[
        timedelta, Doc("How long a call may take, including waiting and connecting.", "5s")
    ] = timedelta(seconds=5)
    connect_timeout: Annotated[
        timedelta, Doc("How long connecting to one host may take.", "2s")
    ] = timedelta(seconds=3)
    auto_migrate: Annotated[bool, Doc("Create or update the table when the service starts.")] = (
        False
    )


class PostgresStore(Portable):
    """
    Keep records in the database at *url*.

    *clock* is for tests: it replaces the server's.
    """

    Options: ClassVar = PostgresOptions

    def __init__(
        self, url: str, options: PostgresOptions | None = None, *, clock: Clock | None = None
    ) -> None:
        options = options or PostgresOptions()
        address, given = read_address(url, ("table", "schema"))
        schema, table = chosen_names(options, given, "oncebridge_records")
        self.layout = Layout("records.sql", _VERSION, _RIGHTS, schema, table)
        self.pool = Pool(
            address,
            size=options.connections,
            timeout=options.timeout,
            connect_timeout=options.connect_timeout,
        )
        self._auto_migrate = options.auto_migrate
        self._clock = clock
        self._calls: dict[str, str] = {}
        """Statements by the names of our functions."""
        self._select = f"SELECT {_COLUMNS} FROM {self.layout.named()}"  # noqa: S608 - our own names, quoted
        self._hand: int | None = None

    @classmethod
    def from_url(cls, url: str, options: PostgresOptions | None = None) -> Self:
        """Use the database of `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`."""
        return cls(url, options)

    # --- setting up --------------------------------------------------------------------

    async def open(self) -> None:
        await _answered(self._check(), is_start=True)

    async def _check(self) -> None:
        await self.pool.run(lambda link: check_server(link, self.pool))
        await check_table(self.pool, self.layout, may_migrate=self._auto_migrate)

    async def migrate(self) -> list[str]:
        """Create or update the table; safe to repeat, and for several processes at once."""
        return await _answered(migrate(self.pool, self.layout), is_start=True)

    def migration_sql(self) -> str:
        """Return the SQL that `migrate` runs."""
        return self.layout.sql

    async def aclose(self) -> None:
        await self.pool.aclose()

    # --- the operations ----------------------------------------------------------------

    async def claim(self, wants: Wants) -> ClaimAnswers:
        latest = 0

        async def ask(some: Wants) -> list[ClaimAnswer | int]:
            nonlocal latest
            each, latest = await self._claim(some)
            return each

        return ClaimAnswers(wants, await _in_chunks(ask, wants), latest)

    async def _claim(
        self, wants: Wants, *, is_retry: bool = False
    ) -> tuple[list[ClaimAnswer | int], int]:
        careful = is_retry or wants.sizes is not None or wants.slide_ms != 0
        rows = await self._call("claim", careful, *claim_arrays(wants))
        now_ms = rows.pop()["now_ms"]
        each: list[ClaimAnswer | int] = [HELD] * len(wants)
        if rows:
            _note_exceptions(each, wants, rows, now_ms)
        again = rows and [at for at, answer in enumerate(each) if type(answer) is NoAnswer]
        if again and not is_retry:
            retried, now_ms = await self._claim(wants.select(again), is_retry=True)
            for at, answer in zip(again, retried, strict=True):
                each[at] = answer
        return each, now_ms

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        return await self._change("commit", arrays, commits, _COMMITTED)

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._change("release", arrays, releases, _RELEASED)

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await self._change("extend", arrays, extensions, _EXTENDED)

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        asked, ends = memories, memories.window_ms
        fate: Any = asked.fate
        records = Records(
            asked.keys, b"", asked.generation, ends, 0, asked.hash, fate, asked.memo, 0, ends
        )
        return await self._put(records, remembered=True)

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        return await self._put(Records.of(records), remembered=False)

    async def _put(self, records: Records, *, remembered: bool) -> list[RememberAnswer]:
        def arguments(some: Records) -> tuple[Any, ...]:
            some = replace(some, fate=mapped(lambda fate: fate or 0, some.fate))
            return remembered, *arrays(some), stored_keys(some.keys)[1]

        return await self._change("put", arguments, records, _REMEMBERED)

    async def _change(
        self,
        function: str,
        as_arguments: Callable[[_Batch], tuple[Any, ...]],
        batch: _Batch,
        replies: tuple[_T, ...],
    ) -> list[_T | NoAnswer]:
        """Call a function that returns only the items which do not have the first of *replies*."""

        async def ask(some: _Batch) -> list[_T]:
            rows = await self._call(function, *as_arguments(some))
            answers = [replies[0]] * len(some)
            for part, verdict in rows:
                answers[part - 1] = replies[verdict]
            return answers

        return await _in_chunks(ask, batch)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        rows, _ = await self._ask_by_key(f"{self._select} WHERE key = ANY ($1)", keys)
        found = {record.key: record for record in map(_record, rows)}
        return [found.get(key) for key in keys]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        query = f"SELECT unnest({self.layout.named('forget')}($1, $2))"
        rows, stored = await self._ask_by_key(query, keys, self._test_time())
        gone = {key for (key,) in rows}
        return [key in gone for key in stored]

    async def purge(self, limit: int = 1000) -> int:
        """
        Remove about *limit* expired records; read a limited number of pages.

        Each call continues where the last one stopped, page by page. Records that were written
        together are on the same page and expire together. An index of dates would have to be
        updated by every write.
        """
        ((pages,),) = await self._ask(
            f"SELECT pg_relation_size('{self.layout.named()}') "
            "/ current_setting('block_size')::integer"
        )
        if not pages:
            return 0
        hand = self._hand
        if hand is None:  # otherwise workers that live briefly would all read the same pages
            hand = await self.now_ms() * _SPREAD % pages
        step = max(min(limit // 16, _STEP), 1)
        left = min(max(pages // _ROUND, _LEAST), _MOST, pages)
        removed = 0
        while left > 0 and removed < limit:
            first = hand if hand < pages else 0
            hand = min(first + min(step, left), pages)
            ((gone,),) = await self._call("purge", first, hand)
            left -= hand - first
            removed += gone
        self._hand = hand
        return removed

    async def now_ms(self) -> int:
        ((now_ms,),) = await self._call("now")
        return int(now_ms)

    async def health(self) -> Mapping[str, int | None]:
        """Return the table's size with its index, and its rows as of the last vacuum or analyze."""
        ((records, size),) = await self._ask(_SIZE, self.layout.named())
        return {"records": records, "bytes": size}

    # --- copying records ---------------------------------------------------------------

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        # A key may be empty, so a place is a key with a prefix.
        query = f"{self._select} WHERE key {'>' if place else '>='} $1 ORDER BY key LIMIT $2"
        rows = await self._ask(query, place[1:], limit)
        return [_record(row) for row in rows], b">" + rows[-1]["key"] if len(rows) == limit else b""

    # --- together with a sink in the same database ---------------------------------------

    def settling(self, items: Sequence[tuple[Sequence[Commit], Sequence[Release]]]) -> Settling:
        """
        Return the call that commits and releases *items* within another transaction.

        Each item is done completely or not at all.
        """
        commits = Commits.of([asked for several, _ in items for asked in several])
        releases = Releases.of([asked for _, several in items for asked in several])
        given = *arrays(commits), self._test_time()
        if not releases.keys and all(len(several) == 1 for several, _ in items):
            return Settling(self.layout.named("commit"), given)
        owners = [[at for at, item in enumerate(items, 1) for _ in item[which]] for which in (0, 1)]
        return Settling(self.layout.named("settle"), (*owners, *arrays(releases), *given))

    # --- to the server and back --------------------------------------------------------

    def _test_time(self) -> int | None:
        return None if self._clock is None else self._clock()

    def _call(self, name: str, *args: Any) -> Awaitable[list[Any]]:
        """Call one of our functions; its last argument is the time, if a test sets it."""
        query = self._calls.get(name)
        if query is None:
            numbers = ", ".join(f"${number}" for number in range(1, len(args) + 2))
            query = f"SELECT * FROM {self.layout.named(name)}({numbers})"  # noqa: S608 - our own names, quoted
            self._calls[name] = query
        return self._ask(query, *args, self._test_time())

    async def _ask_by_key(
        self, query: str, keys: Sequence[bytes], *more: Any
    ) -> tuple[list[Any], list[bytes]]:
        """Return the rows for *keys*, and the keys as they are stored."""
        stored, _ = stored_keys([*keys])
        rows: list[Any] = []
        for at in range(0, len(stored), _CHUNK):
            rows += await self._ask(query, stored[at : at + _CHUNK], *more)
        return rows, stored

    def _ask(self, query: str, *args: Any) -> Awaitable[list[Any]]:
        return _answered(self.pool.fetch(query, *args))


async def _in_chunks(
    ask: Callable[[_Batch], Awaitable[list[_T]]], batch: _Batch
) -> list[_T | NoAnswer]:
    count = len(batch)
    if count <= _CHUNK:
        return [*await ask(batch)] if count else []
    answers: list[_T | NoAnswer] = []
    for at in range(0, count, _CHUNK):
        try:
            answers += await ask(batch.select(range(at, min(at + _CHUNK, count))))
        except StoreUnavailable as error:
            if not at:
                raise
            return answers + [NoAnswer(str(error))] * (count - at)
    return answers


# --- rows to answers ---------------------------------------------------------------------


def _note_exceptions(
    each: list[ClaimAnswer | int], wants: Wants, rows: Sequence[Any], now_ms: int
) -> None:
    """Put the answers in *rows*, which are about parts, in the places of their wants in *each*."""
    owners: Any = wants.by_key([*range(len(wants))])
    held: dict[int, dict[int, Held]] = {}
    for _, part, verdict, number, generation, memo in rows:
        place = part - 1
        key, at = wants.keys[place], owners[place]
        match verdict:
            case 1:
                held.setdefault(at, {})[place] = Held(key, generation, number, memo)
            case 2:
                each[at] = Duplicate(key, Fate(number), memo)
            case 3:
                each[at] = Busy(key, number)
            case 4:
                each[at] = Mismatch(key, memo)
            case _:
                each[at] = NoAnswer("other workers keep changing this key")
    for at, known in held.items():
        want = wants[at]
        as_asked = [Held(part.key, want.generation, 1, want.memo) for part in want.parts]
        parts = zip(wants.places(at), as_asked, strict=True)
        each[at] = Claim(want.token, tuple(known.get(*one) for one in parts), now_ms)


def _record(row: Any) -> Record:
    *values, whole = row
    values[0] = whole or values[0]
    values[6] = _FATES[values[6]]
    return Record(*values)


# --- errors --------------------------------------------------------------------------------


async def _answered(work: Awaitable[_T], *, is_start: bool = False) -> _T:
    """
    Return the result of *work*; raise `StoreUnavailable` if a retry may help, else `StoreError`.

    A login that is refused at the start is a `ConfigError`.
    """
    try:
        return await work
    except AccessRefused as error:
        raise (ConfigError("", str(error)) if is_start else StoreError(str(error))) from error
    except (NotConnected, NoReply) as error:
        raise StoreUnavailable(str(error)) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if sqlstate(error)[:2] in _PASSING:
            raise StoreUnavailable(error_text(error)) from error
        is_outdated = sqlstate(error) in ("42P01", "42883")  # a table or function is missing
        advice = "; run `oncebridge migrate`" if is_outdated else ""
        raise StoreError(error_text(error) + advice) from error
