"""
The Postgres sink: writes events to a table, or runs a statement for each.

A row has a few columns to search by, the bytes as they were received (`raw`), and the same as
`jsonb` (`body`; NULL if that type refuses the event, as it does U+0000).

**In the store's database**, an event and its commit are one transaction. No crash can separate
them, so each event is written exactly once. **In another database**, a second attempt at an event
is recognised by its key and generation, for which there is a unique index. With a *statement* of
your own you have to do this yourself: `ON CONFLICT DO NOTHING`.

| result                                                       | answer    |
| ------------------------------------------------------------ | --------- |
| it is written, by this attempt or an earlier one             | `Yes`     |
| no connection, or the server rolled it back (out of disk)    | `No`      |
| the connection was lost before the answer                    | `Unknown` |
| no such table, missing privilege, login refused              | `Closed`  |
| the data does not fit, or violates a constraint              | `Never`   |

A batch is one statement. If the server refuses one event of it, the batch is halved until that
event is alone; the others are only delayed.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Annotated, ClassVar, Final, Self, TypeVar

import asyncpg
from msgspec import Struct

from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, SinkError
from oncebridge.sinks.api import (
    Already,
    Closed,
    Delivery,
    Joint,
    JointAnswer,
    Lost,
    Never,
    No,
    SinkAnswer,
    Unknown,
    Yes,
)
from oncebridge.stores.api import Store
from oncebridge.stores.postgres.address import PostgresAddress, read_address
from oncebridge.stores.postgres.checks import check_server, migrate
from oncebridge.stores.postgres.pool import AccessRefused, Link, NoReply, NotConnected, Pool
from oncebridge.stores.postgres.schema import Layout, chosen_names
from oncebridge.stores.postgres.store import PostgresStore
from oncebridge.stores.postgres.writers import StatementWriter, TableWriter, Writer

_T = TypeVar("_T")
_A = TypeVar("_A")

_VERSION: Final = 1
_RIGHTS: Final = ("SELECT", "INSERT")
_MOST_BYTES: Final = 8 * 1024 * 1024  # of events in one statement
_ENCODINGS: Final = ("UTF8", "SQL_ASCII")
_EVENT_ERRORS: Final = frozenset({"09", "21", "22", "23", "27", "38", "39", "44", "54", "P0"})
_ACCESS_ERRORS: Final = frozenset({"0A", "0L", "0P", "28", "2B", "3D", "3F", "42"})
_INTERNAL: Final = "XX"
_TRY_JSONB: Final = "SELECT convert_from($1, 'UTF8')::jsonb IS NULL"
_ERRORS: Final = (NotConnected, NoReply, asyncpg.PostgresError, asyncpg.InterfaceError)

_log = logging.getLogger("oncebridge")


class PostgresSinkOptions(Struct, frozen=True, kw_only=True):
    """Options of the Postgres sink."""

    table: Annotated[
        str | None, Doc("The table for events, if not oncebridge_events.", "calls")
    ] = None
    schema: Annotated[str | None, Doc("The schema of the table, if not public.", "crm")] = None
    statement: Annotated[
        str | None,
        Doc(
            "Your own SQL instead of a table: run once per event, with parameters named like the "
            "columns.",
            "INSERT INTO calls (id, data) VALUES (:event_id, :body) ON CONFLICT DO NOTHING",
        ),
    ] = None
    exactly_once: Annotated[
        bool, Doc("Refuse to start unless the store keeps its records in the same database.")
    ] = False
    batch: Annotated[int, Doc("How many events one statement takes.", "200", at_least=1)] = 200
    concurrency: Annotated[
        int,
        Doc("How many batches may run at the same time, each on its connection.", "2", at_least=1),
    ] = 2
    timeout: Annotated[
        timedelta, Doc("How long a batch may take; keep it below sink_timeout.", "8s")
    ] = timedelta(seconds=8)
    connect_timeout: Annotated[
        timedelta, Doc("How long connecting to one host may take.", "2s")
    ] = timedelta(seconds=3)
    auto_migrate: Annotated[bool, Doc("Create or update the table when the service starts.")] = (
        False
    )


class PostgresSink:
    """Write events to the database at *url*."""

    Options: ClassVar = PostgresSinkOptions

    def __init__(self, url: str, options: PostgresSinkOptions | None = None) -> None:
        self._options = options = options or PostgresSinkOptions()
        address, given = read_address(url, ("table", "schema"))
        self._writer: Writer
        if options.statement is not None:
            if options.table or options.schema or given:
                raise ConfigError("statement", "names its own table; remove table and schema")
            self._writer = StatementWriter.read(options.statement)
        else:
            schema, table = chosen_names(options, given, "oncebridge_events")
            layout = Layout("events.sql", _VERSION, _RIGHTS, schema, table)
            self._writer = TableWriter(layout)
        self._own = self._pool = Pool(
            address,
            size=options.concurrency,
            timeout=options.timeout,
            connect_timeout=options.connect_timeout,
        )
        self._store: PostgresStore | None = None
        self._is_checked = False
        self.batch = options.batch
        self.concurrency = options.concurrency

    @classmethod
    def from_url(cls, url: str, options: PostgresSinkOptions | None = None) -> Self:
        """Use the database of `postgresql://USER:PASSWORD@HOST:PORT/DATABASE?table=NAME`."""
        return cls(url, options)

    @property
    def address(self) -> PostgresAddress:
        return self._own.address

    @property
    def pool(self) -> Pool:
        """The sink's own connections; not used if it shares those of the store."""
        return self._own

    @property
    def layout(self) -> Layout | None:
        """The table that has to be created; None if a statement names its own."""
        return self._writer.layout

    # --- setting up --------------------------------------------------------------------

    def joins(self, store: Store) -> bool:
        """
        Return True if *store* keeps its records in the same database; then use its connections.

        It is the same database if both addresses have the same hosts and database. The store's
        role then needs the privileges for this sink's table.
        """
        if not isinstance(store, PostgresStore):
            return False
        if not store.pool.address.is_same_database(self.address):
            return False
        if self._store is not store:
            self._store = store
            self._pool = store.pool
            self._pool.grow(self.concurrency)
            self._is_checked = False
        return True

    async def open(self) -> None:
        if self._options.exactly_once and self._store is None:
            raise ConfigError(
                "exactly_once",
                "needs a store in the same database: its address must be postgresql:// with the "
                "same hosts and database as the sink",
            )
        try:
            await self._check()
        except AccessRefused as error:
            raise ConfigError("", str(error)) from error
        except (NotConnected, NoReply) as error:
            # A sink may be down at the start; it is checked when it is available.
            _log.warning("oncebridge.sink_is_away", extra={"error": str(error)})
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise SinkError(f"{self.address.shown!r}: {error}") from error

    async def _check(self) -> None:
        if self._is_checked:
            return
        server = await self._pool.run(lambda link: check_server(link, self._pool))
        if server["encoding"] not in _ENCODINGS:
            raise ConfigError(
                "",
                f"{self.address.shown!r}: the encoding of the database is {server['encoding']}, "
                "but events are UTF-8; create a database with ENCODING 'UTF8'",
            )
        await self._writer.check(self._pool, may_migrate=self._options.auto_migrate)
        self._is_checked = True

    async def migrate(self) -> list[str]:
        """Create or update the table; safe to repeat, and for several processes at once."""
        if self._writer.layout is None:
            return []
        try:
            return await migrate(self._own, self._writer.layout)
        except AccessRefused as error:
            raise ConfigError("", str(error)) from error
        except _ERRORS as error:
            raise SinkError(str(error)) from error

    def migration_sql(self) -> str:
        """Return the SQL that `migrate` runs; empty if the user has a statement."""
        return self._writer.layout.sql if self._writer.layout is not None else ""

    async def aclose(self) -> None:
        await self._own.aclose()

    # --- delivering --------------------------------------------------------------------

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        refusal = await self._refusal_of_all() if deliveries else None
        if refusal is not None:
            return [refusal] * len(deliveries)
        answers: list[SinkAnswer] = []
        for some in _portions(deliveries, _itself):
            answers += await self._halving(some, _itself, self._write)
        return answers

    async def _write(self, deliveries: Sequence[Delivery], body: bool) -> list[SinkAnswer]:  # noqa: FBT001 - called by one
        await self._run(
            lambda link: self._writer.write(link, deliveries, body=body),
            repeatable=self._writer.is_repeatable(deliveries),
        )
        return [Yes()] * len(deliveries)

    async def deliver_jointly(self, joints: Sequence[Joint]) -> Sequence[JointAnswer]:
        refusal = await self._refusal_of_all() if joints else None
        if refusal is not None:
            return [refusal] * len(joints)
        answers: list[JointAnswer] = []
        for some in _portions(joints, _delivery, _keys):
            answers += await self._halving(some, _delivery, self._write_jointly)
        return answers

    async def _write_jointly(self, joints: Sequence[Joint], body: bool) -> list[JointAnswer]:  # noqa: FBT001 - called by one
        assert self._store is not None  # noqa: S101 - `joins` was True
        deliveries = [joint.delivery for joint in joints]
        settling = self._store.settling([(joint.commits, joint.releases) for joint in joints])
        refused = await self._run(
            lambda link: self._writer.write_jointly(link, settling, deliveries, body=body),
            # A second run would take our own success for another worker's.
            repeatable=False,
        )
        answers: list[JointAnswer] = [Yes()] * len(joints)
        for part, verdict in refused:
            answers[part - 1] = Already() if verdict == 1 else Lost()
        return answers

    async def _halving(
        self,
        items: Sequence[_T],
        delivery: Callable[[_T], Delivery],
        write: Callable[[Sequence[_T], bool], Awaitable[list[_A]]],
    ) -> "list[_A | SinkAnswer]":
        """Write all items; if that fails, find those that cannot be written and write the rest."""
        try:
            return [*await write(items, True)]
        except _ERRORS as error:
            answer = _answer(error)
        if not isinstance(answer, Never) and not _may_be_one_event(answer):
            return [answer] * len(items)
        if len(items) > 1:
            middle = len(items) // 2
            first = await self._halving(items[:middle], delivery, write)
            return first + await self._halving(items[middle:], delivery, write)
        if not isinstance(answer, Never):
            return [answer]
        try:
            if await self._is_jsonb(delivery(items[0]).event.raw):
                return [answer]
            return [*await write(items, False)]
        except _ERRORS as error:
            return [_answer(error)]

    async def _is_jsonb(self, raw: bytes) -> bool:
        """Return True if the event is valid jsonb, which has other limits for numbers and depth."""
        try:
            await self._run(lambda link: link.fetch(_TRY_JSONB, raw))
        except asyncpg.PostgresError as error:
            if not isinstance(_refusal(error), Never):
                raise
            return False
        return True

    async def _run(self, work: Callable[[Link], Awaitable[_T]], *, repeatable: bool = True) -> _T:
        return await self._pool.run(work, repeatable=repeatable, within=self._options.timeout)

    async def _refusal_of_all(self) -> SinkAnswer | None:
        """Check the database once; return the answer if nothing can be sent."""
        try:
            await self._check()
        except ConfigError as error:
            return Closed(str(error))
        except _ERRORS as error:
            answer = _answer(error)
            return No(answer.reason) if isinstance(answer, Unknown) else answer
        return None


def _portions(
    items: Sequence[_T],
    delivery: Callable[[_T], Delivery],
    keys: Callable[[_T], Sequence[bytes]] = lambda _: (),
) -> Iterator[Sequence[_T]]:
    """Split *items* so that a statement is not too large, and has no key twice."""
    start = held = 0
    used: set[bytes] = set()
    for at, item in enumerate(items):
        own, size = keys(item), len(delivery(item).event.raw)
        held += size
        if at > start and (held > _MOST_BYTES or not used.isdisjoint(own)):
            yield items[start:at]
            start, held = at, size
            used.clear()
        used.update(own)
    if start < len(items):
        yield items[start:]


def _itself(delivery: Delivery) -> Delivery:
    return delivery


def _delivery(joint: Joint) -> Delivery:
    return joint.delivery


def _keys(joint: Joint) -> Sequence[bytes]:
    return [asked.key for several in (joint.commits, joint.releases) for asked in several]


def _answer(error: Exception) -> No | Unknown | Closed | Never:
    match error:
        case AccessRefused():
            return Closed(str(error))
        case NotConnected():
            return No(str(error))
        case NoReply():
            return Unknown(str(error))
        case asyncpg.PostgresError():
            return _refusal(error)
        case _:  # the driver could not encode it
            return Never(type(error).__name__)


def _may_be_one_event(answer: object) -> bool:
    return isinstance(answer, Unknown) and f"({_INTERNAL}" in answer.reason


def _refusal(error: asyncpg.PostgresError) -> No | Unknown | Closed | Never:
    """Return the answer for an error of the server, which has rolled back the transaction."""
    state = error.sqlstate or ""
    if state[:2] in _EVENT_ERRORS:
        # The text may quote the event; the names of columns and constraints do not.
        about = (error.table_name, error.column_name, error.constraint_name)
        return Never(" ".join([state, type(error).__name__, *filter(None, about)]))
    if state[:2] in _ACCESS_ERRORS:
        return Closed(f"{error} ({state})")
    if state.startswith(_INTERNAL):  # of a trigger or extension; may be caused by one event
        return Unknown(f"{type(error).__name__} ({state})")
    return No(f"{error} ({state})")
