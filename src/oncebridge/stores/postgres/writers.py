"""
How the Postgres sink writes events: to a table of ours, or with a statement of the user.

Both write a whole batch or nothing, on a given connection. Both can do so together with the
store's commits, in one transaction.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Self

import asyncpg
from msgspec import Struct

from oncebridge.base.options import did_you_mean
from oncebridge.errors import ConfigError
from oncebridge.events.event import Event
from oncebridge.sinks.api import Delivery
from oncebridge.stores.api import folded
from oncebridge.stores.postgres.arrays import as_array, stored_keys
from oncebridge.stores.postgres.checks import check_table
from oncebridge.stores.postgres.pool import Link, Pool
from oncebridge.stores.postgres.schema import Layout

_TYPES: Final = {
    "key": "bytea",
    "generation": "bytea",
    "route": "text",
    "attempt": "integer",
    "unprotected": "boolean",
    "event_id": "text",
    "source": "text",
    "detail_type": "text",
    "topic": "text",
    "event_time": "timestamptz",
    "version": "text",
    "raw": "bytea",
    "body": "boolean",
}
"""The columns in order. `body` is only a flag here: its value is made from `raw`."""
_NAMES: Final = tuple(_TYPES)
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_YEARS: Final = range(1000, 9000)  # well within the limits of timestamptz, in every time zone


class Settling(Struct, frozen=True):
    """The commits and releases of the store, as a call of one of its functions."""

    function: str
    arguments: Sequence[Any]

    def call(self, first: int = 1) -> str:
        """Return the call as SQL, with parameters numbered from *first*."""
        numbers = range(first, first + len(self.arguments))
        return f"{self.function}({', '.join(f'${number}' for number in numbers)})"


Refusals = Sequence[tuple[int, int]]
"""The items that were not settled, counted from 1, and why: 1 already, 2 fenced."""


class TableWriter:
    """Write to a table as `events.sql` makes it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._alone = self._insert("")
        self._together: dict[str, str] = {}

    async def check(self, pool: Pool, *, may_migrate: bool) -> None:
        """Raise `ConfigError` if it cannot work; with *may_migrate*, create the table first."""
        await check_table(pool, self.layout, may_migrate=may_migrate)

    def is_repeatable(self, deliveries: Sequence[Delivery]) -> bool:
        """Return True if writing *deliveries* a second time changes nothing."""
        return all(delivery.generation for delivery in deliveries)

    async def write(self, link: Link, deliveries: Sequence[Delivery], *, body: bool) -> None:
        """Write all *deliveries*."""
        await link.fetch(self._alone, *_columns(deliveries, body=body))

    async def write_jointly(
        self, link: Link, settling: Settling, deliveries: Sequence[Delivery], *, body: bool
    ) -> Refusals:
        """Commit, write the deliveries that were committed, and return the others."""
        query = self._together.get(settling.function)
        if query is None:
            call = settling.call(len(_NAMES) + 1)
            insert = self._insert(
                "WHERE NOT EXISTS (SELECT FROM settled WHERE settled.part = a.at)"
            )
            query = self._together[settling.function] = (
                f"WITH settled AS MATERIALIZED (SELECT part, verdict FROM {call}), "  # noqa: S608 - our own names, quoted
                f"written AS ({insert}) SELECT part, verdict FROM settled"
            )
        return await link.fetch(query, *_columns(deliveries, body=body), *settling.arguments)

    def _insert(self, where: str) -> str:
        arrays = [f"${number}::{kind}[]" for number, kind in enumerate(_TYPES.values(), 1)]
        values = {
            # An array of one element has the value of all rows.
            name: f"CASE WHEN cardinality({array}) = 1 THEN ({array})[1] ELSE a.{name} END"
            for name, array in zip(_NAMES, arrays, strict=True)
        }
        values["version"] = f"({values['version']})::numeric"
        values["body"] = f"CASE WHEN {values['body']} THEN convert_from(a.raw, 'UTF8')::jsonb END"
        values["raw"] = "a.raw"
        return (
            f"INSERT INTO {self.layout.named()} ({', '.join(_NAMES)}) "  # noqa: S608 - our own names, quoted
            f"SELECT {', '.join(values.values())} "
            f"FROM unnest({', '.join(arrays)}) WITH ORDINALITY AS a({', '.join(_NAMES)}, at) "
            f"{where} ORDER BY a.at "
            "ON CONFLICT (key, generation) WHERE generation <> '' DO NOTHING"
        )


class StatementWriter(Struct, frozen=True):
    """
    Run *sql*, once per event.

    *uses* are the columns that it takes, in the order of its parameters.
    """

    sql: str
    uses: tuple[int, ...]
    layout: ClassVar[None] = None

    @classmethod
    def read(cls, text: str) -> Self:
        """
        Parse a statement with parameters such as `:event_id`, or `$6`, which is the same.

        Each parameter has the type of the column in our own table.
        """
        numbers: dict[str, int] = {}

        def number(name: str) -> int:
            return numbers.setdefault(name, len(numbers) + 1)

        def parameter(found: re.Match[str]) -> str:
            name = found["name"]
            if found["number"]:
                at = int(found["number"])
                if not 0 < at <= len(_NAMES):
                    raise ConfigError("statement", f"${at}: use $1 to ${len(_NAMES)}")
                name = _NAMES[at - 1]
            if not name:
                return found[0]
            if name not in _NAMES:
                raise ConfigError(
                    "statement", f":{name} is not a parameter; {did_you_mean(name, _NAMES)}"
                )
            if name == "body":
                raw, flag = number("raw"), number("body")
                return (
                    f"(CASE WHEN ${flag}::boolean "
                    f"THEN convert_from(${raw}::bytea, 'UTF8')::jsonb END)"
                )
            written = f"${number(name)}::{_TYPES[name]}"
            return f"({written}::numeric)" if name == "version" else f"({written})"

        sql = _SQL.sub(parameter, text)
        if not numbers:
            raise ConfigError("statement", "uses no part of the event; add :raw, :body, …")
        return cls(sql, tuple(map(_NAMES.index, numbers)))

    async def check(self, pool: Pool, *, may_migrate: bool) -> None:  # noqa: ARG002 - nothing to create
        try:
            await pool.run(lambda link: link.prepared(self.sql))
        except asyncpg.PostgresError as error:
            raise ConfigError("statement", f"{error} ({error.sqlstate})") from error

    def is_repeatable(self, deliveries: Sequence[Delivery]) -> bool:  # noqa: ARG002 - we do not know what it does
        return False

    async def write(self, link: Link, deliveries: Sequence[Delivery], *, body: bool) -> None:
        statement = await link.prepared(self.sql)
        rows = [_row(delivery, body=body) for delivery in deliveries]
        await statement.executemany([[row[at] for at in self.uses] for row in rows])

    async def write_jointly(
        self, link: Link, settling: Settling, deliveries: Sequence[Delivery], *, body: bool
    ) -> Refusals:
        query = f"SELECT part, verdict FROM {settling.call()}"  # noqa: S608 - our own names, quoted
        await link.prepared(self.sql)
        async with link.connection.transaction():
            refused: Refusals = await link.fetch(query, *settling.arguments)
            beaten = {part for part, _ in refused}
            rest = [one for at, one in enumerate(deliveries, 1) if at not in beaten]
            if rest:
                await self.write(link, rest, body=body)
        return refused


Writer = TableWriter | StatementWriter

# Quoted text and comments are left alone, and so are casts (::) and slices ([1:n]).
_SQL: Final = re.compile(
    r"""
    [eE]'(?:[^'\\]|''|\\.)*' | '(?:[^']|'')*' | "(?:[^"]|"")*"
    | \$(?P<tag>(?:[A-Za-z_]\w*)?)\$.*?\$(?P=tag)\$
    | --[^\n]* | /\*.*?\*/ | ::
    | (?<![\w\])]):(?P<name>[A-Za-z_]\w*)
    | \$(?P<number>\d{1,9})
    """,
    re.VERBOSE | re.DOTALL,
)


# --- one event -------------------------------------------------------------------------------


def _columns(deliveries: Sequence[Delivery], *, body: bool) -> list[list[Any]]:
    rows = [_row(delivery, body=body) for delivery in deliveries]
    columns = [list(column) for column in zip(*rows, strict=True)]
    columns[0], _ = stored_keys(columns[0])
    return [
        as_array(folded(column)) if name != "raw" else column
        for name, column in zip(_NAMES, columns, strict=True)
    ]


def _row(delivery: Delivery, *, body: bool) -> tuple[Any, ...]:
    event = delivery.event
    topic = event.detail.get("topicName")
    return (
        delivery.key,
        delivery.generation,
        _text(delivery.route),
        delivery.attempt,
        delivery.unprotected,
        _text(event.id),
        _text(event.source),
        _text(event.detail_type),
        _text(topic) if isinstance(topic, str) else None,
        _time(event),
        None if delivery.version is None else repr(delivery.version),
        event.raw,
        body and not (b"\\u0000" in event.raw and _NUL.search(event.raw)),
    )


def _text(text: str | None) -> str | None:
    # PostgreSQL text cannot contain NUL; the raw bytes still have it.
    return text.replace("\0", "\ufffd") if text and "\0" in text else text


def _time(event: Event) -> datetime | None:
    try:
        found = datetime.fromisoformat(event.time or "")
    except ValueError:
        return None
    if found.year not in _YEARS:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
