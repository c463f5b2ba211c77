"""
A pool of connections to a database: few, reused, with a time limit for each call.

No session state is used: no settings, no LISTEN, no lock beyond its transaction. So a pooler such
as PgBouncer may run each transaction on another connection. Behind a pooler every statement is
sent with its text, which is short. Statements are prepared once, with a name, only if the
connection goes to the server itself: behind a pooler, the name could later mean another statement.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from asyncpg.prepared_stmt import PreparedStatement

from oncebridge.errors import ConfigError, OncebridgeError
from oncebridge.stores.postgres.address import Host, PostgresAddress
from oncebridge.stores.postgres.arrays import encode_bytes, encode_numbers

_T = TypeVar("_T")

_IDLE_S = 120.0  # firewalls drop an idle connection after a few minutes
_LIFE_S = 1800.0  # the memory of a server process grows, and host names get new addresses
_CLOSE_S = 2.0
_RETRIES: Final = 3  # after deadlocks and serialization failures
_RETRYABLE = frozenset({"40001", "40P01"})
_OUTDATED = frozenset({"26000", "42P05"})
_LOST = frozenset({"57P01", "57P02", "57P03", "57P05", "40003"})
"""The connection was lost, so that the result of the statement is not known."""
_READ_ONLY = "25006"
_BROKEN = (asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)

_ARRAYS: Final = [
    {"oid": oid, "name": name, "elemtype": element, "ns": "pg_catalog", "elemdelim": ","}
    | dict.fromkeys(("kind", "basetype", "range_subtype", "attrtypoids"))
    for oid, name, element in (
        (1000, "_bool", 16),
        (1001, "_bytea", 17),
        (1005, "_int2", 21),
        (1007, "_int4", 23),
        (1009, "_text", 25),
        (1016, "_int8", 20),
        (1185, "_timestamptz", 1184),
    )
]
"""Types that the driver would otherwise query on every connection. It sets `jit` for that, which a
pooler may apply to another client's session. These numbers never change."""
_CODECS: Final = ((1001, "_bytea", encode_bytes), (1016, "_int8", encode_numbers))
"""Types that we encode ourselves; they are scalars for the driver. No statement returns them."""


class NotConnected(OncebridgeError):
    """There is no connection; nothing was sent."""


class AccessRefused(NotConnected):
    """The server refuses the login; an operator has to fix that."""


class NoReply(OncebridgeError):
    """A statement was sent, and then the connection was lost or the time was over."""


class Link:
    """One connection."""

    def __init__(self, connection: "asyncpg.Connection[Any]") -> None:
        self.connection = connection
        self.born_s = self.used_s = asyncio.get_running_loop().time()
        self._is_direct: bool | None = None
        self.statements: dict[str, PreparedStatement[Any]] = {}

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """Run a statement; one round trip, except for the first time."""
        return await (await self.prepared(query)).fetch(*args)

    async def prepared(self, query: str) -> "PreparedStatement[Any]":
        if query not in self.statements:
            name = f"oncebridge_{len(self.statements)}" if await self.is_direct() else ""
            self.statements[query] = await self.connection.prepare(query, name=name)
        return self.statements[query]

    async def is_direct(self) -> bool:
        """Return True if the server itself answers; a pooler reports its own process numbers."""
        if self._is_direct is None:
            pid = await self.connection.fetchval("SELECT pg_backend_pid()")
            self._is_direct = pid == self.connection.get_server_pid()
        return self._is_direct

    def is_good(self, now_s: float) -> bool:
        return (
            not self.connection.is_closed()
            and now_s - self.used_s < _IDLE_S
            and now_s - self.born_s < _LIFE_S
        )


class Pool:
    """At most *size* connections to *address*; nothing takes longer than *timeout*."""

    def __init__(
        self, address: PostgresAddress, *, size: int, timeout: timedelta, connect_timeout: timedelta
    ) -> None:
        if size < 1:
            raise ConfigError("", f"{address.shown!r}: needs at least one connection")
        for name, given in (("timeout", timeout), ("connect_timeout", connect_timeout)):
            if given <= timedelta(0):
                raise ConfigError(name, "must be more than 0")
        self.address = address
        self._hosts: list[Host | None] = [*address.hosts] or [None]
        self._size = size
        self._timeout_s = timeout.total_seconds()
        self._connect_s = connect_timeout.total_seconds()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Link] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self.is_closed = False

    def grow(self, more: int) -> None:
        """Allow *more* connections, because a sink uses the pool too."""
        self._size += more
        for _ in range(more):
            self._slots.release()

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """Run one statement that is safe to run twice."""
        # Usually a connection is idle and has prepared it; then the driver alone limits the time.
        left, seconds, loop = None, self._timeout_s, asyncio.get_running_loop()
        link = None if self._loop is not loop or self._slots.locked() else self._idle_link()
        if link is not None and (statement := link.statements.get(query)) is None:
            self._idle.append(link)
        elif link is not None and statement is not None:
            ends_s = loop.time() + seconds
            await self._slots.acquire()  # at once, as one is free
            try:
                return await self._run_on(link, statement.fetch(*args, timeout=seconds))
            except TimeoutError:
                raise NoReply(f"{self.address.shown!r}: no answer within {seconds:g}s") from None
            except NoReply:  # it was lost since it was last used
                pass
            except asyncpg.PostgresError as error:
                if error.sqlstate not in _RETRYABLE:
                    raise
            finally:
                self._slots.release()
            left = timedelta(seconds=max(ends_s - loop.time(), 0))
        return await self.run(lambda link: link.fetch(query, *args), within=left)

    async def run(
        self,
        work: Callable[[Link], Awaitable[_T]],
        *,
        repeatable: bool = True,
        within: timedelta | None = None,
    ) -> _T:
        """
        Do *work* on a connection, and leave no transaction open.

        It is retried after a deadlock or serialization failure, which have no effect. Work that is
        *repeatable* is also retried if the connection was lost since it was last used. Other
        errors of the server are raised as they are.
        """
        self._use_running_loop()
        seconds = self._timeout_s if within is None else within.total_seconds()
        missing, is_sent = "all connections were in use, and none came free", False
        try:
            async with asyncio.timeout(seconds), self._slots:
                link = self._idle_link()
                for left in range(_RETRIES, -1, -1):
                    was_idle = link is not None
                    if link is None:
                        missing = "no connection"
                        link = await self._connect()
                    missing, is_sent = "no answer", True
                    try:
                        return await self._run_on(link, work(link))
                    except NoReply:
                        if not (was_idle and repeatable and left):
                            raise
                        link = None
                    except asyncpg.PostgresError as error:
                        if error.sqlstate not in _RETRYABLE or not left:
                            raise
                        link = self._idle_link()
                    is_sent = False
        except TimeoutError:
            what = f"{self.address.shown!r}: {missing} within {seconds:g}s"
            raise (NoReply if is_sent else NotConnected)(what) from None
        raise AssertionError  # the last time returns or raises

    async def _run_on(self, link: Link, work: Awaitable[_T]) -> _T:
        try:
            done = await work
        except asyncpg.PostgresError as error:
            state = sqlstate(error)
            if state == _READ_ONLY:  # it has become a standby, and so have the others
                self._drop_idle()
            # The prepared statement does not exist any more, or was replaced.
            is_outdated = state in _OUTDATED or isinstance(
                error, asyncpg.InvalidCachedStatementError
            )
            self._settle(link, is_outdated or state == _READ_ONLY)
            if is_outdated or state.startswith("08") or state in _LOST:
                raise NoReply(f"{self.address.shown!r}: {error_text(error)}") from error
            raise
        except _BROKEN as error:
            self._settle(link, True)
            if isinstance(error, ValueError | TimeoutError):  # cannot be written, or is too slow
                raise
            raise NoReply(f"{self.address.shown!r}: {error_text(error)}") from error
        except BaseException:
            self._settle(link, True)
            raise
        self._settle(link, False)
        return done

    def _settle(self, link: Link, is_spent: bool) -> None:  # noqa: FBT001 - of one use
        """Return a connection to the pool, or close it."""
        connection = link.connection
        if connection.is_closed():
            connection.terminate()
        elif is_spent or self.is_closed or connection.is_in_transaction():
            self._close_later(link)
        else:
            link.used_s = asyncio.get_running_loop().time()
            self._idle.append(link)

    def _idle_link(self) -> Link | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            link = self._idle.pop()
            if link.is_good(now_s):
                return link
            self._close_later(link)
        return None

    def _drop_idle(self) -> None:
        while self._idle:
            self._close_later(self._idle.pop())

    def _close_later(self, link: Link) -> None:
        """Close a connection in the background; the driver first cancels what runs on it."""
        task = asyncio.get_running_loop().create_task(_close(link.connection))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _use_running_loop(self) -> None:
        """Drop all connections if the loop has changed: a connection belongs to one loop."""
        if self.is_closed:
            raise NotConnected(f"{self.address.shown!r}: has been closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            for link in self._idle:
                with suppress(RuntimeError):
                    link.connection.terminate()
            self._idle.clear()
            self._leaving.clear()
            self._slots = asyncio.Semaphore(self._size)
            self._loop = loop

    # --- connecting --------------------------------------------------------------------

    async def _connect(self) -> Link:
        """Try the hosts; one that fails is tried last the next time, as time is limited."""
        why: NotConnected | None = None
        for host in [*self._hosts]:
            try:
                return await self._connect_to(host)
            except BaseException as error:
                self._hosts.remove(host)
                self._hosts.append(host)
                if not isinstance(error, NotConnected):
                    raise
                why = error if why is None or isinstance(error, AccessRefused) else why
        assert why is not None  # noqa: S101 - there is always a host to try
        raise why

    async def _connect_to(self, host: Host | None) -> Link:
        is_named = "application_name=" in self.address.dsn
        what = f"{self.address.shown!r}: " + (f"{host[0]}:{host[1]}: " if host else "")
        try:
            connection = await asyncpg.connect(
                self.address.dsn,
                host=host and host[0],
                port=host and host[1],
                timeout=self._connect_s,
                statement_cache_size=0,
                server_settings={} if is_named else {"application_name": "oncebridge"},
                target_session_attrs=SessionAttribute(self.address.session),
            )
        except asyncpg.TargetServerAttributeNotMatched:
            raise NotConnected(f"{what}is not {self.address.session}") from None
        except asyncpg.ClientConfigurationError as error:
            raise ConfigError("", f"{what}{error}") from None
        except ssl.SSLCertVerificationError as error:
            raise AccessRefused(f"{what}its certificate: {error.verify_message}") from error
        except TimeoutError:
            raise NotConnected(f"{what}no connection within {self._connect_s:g}s") from None
        except UnicodeError:
            raise AccessRefused(f"{what}not a valid host name") from None
        except (asyncpg.PostgresError, *_BROKEN) as error:
            is_refused = sqlstate(error)[:2] in ("28", "3D", "42")
            failure = AccessRefused if is_refused else NotConnected
            raise failure(f"{what}{error_text(error)}") from error
        settings: Any = connection.get_settings()
        with suppress(AttributeError, TypeError):  # then the driver encodes them, which is slower
            for oid, name, encode in _CODECS:
                settings.add_python_codec(
                    oid, name, "pg_catalog", (), "scalar", encode, bytes, "binary"
                )
        with suppress(AttributeError, KeyError, TypeError):  # then the driver queries them
            settings.register_data_types(_ARRAYS)  # last, as the codec above discards them
        return Link(connection)

    async def aclose(self) -> None:
        """Close all connections; those in use are closed after their call."""
        self.is_closed = True
        if self._loop is asyncio.get_running_loop():
            self._drop_idle()
            if self._leaving:
                await asyncio.wait(self._leaving)


async def _close(connection: "asyncpg.Connection[Any]") -> None:
    try:
        async with asyncio.timeout(_CLOSE_S):
            await connection.close()
    except Exception:  # noqa: BLE001 - it is closed in any case
        connection.terminate()


def sqlstate(error: Exception) -> str:
    return getattr(error, "sqlstate", None) or ""


def error_text(error: Exception) -> str:
    """Return the text of an error, with its SQLSTATE."""
    text = str(error) or type(error).__name__
    return f"{text} ({sqlstate(error)})" if sqlstate(error) else text
