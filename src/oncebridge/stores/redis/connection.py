"""
Connections to Redis: an asyncio protocol, with hiredis to parse the replies.

Many callers share a connection. Their requests do not wait for each other, and are answered in
order. If a caller is cancelled, its reply is still read, and ignored; so no reply is ever half
read. Nothing is sent twice here.

Every request ends. If a reply takes longer than *timeout*, the connection is closed, and all its
callers get `StoreUnavailable`.
"""

import asyncio
import inspect
import logging
import os
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, cast

from hiredis import HiredisError, Reader, ReplyError, pack_command
from msgspec import Struct

from oncebridge.base.secrets import Secret
from oncebridge.errors import ConfigError, OncebridgeError, StoreError, StoreUnavailable

_log = logging.getLogger("oncebridge")

ServerAddress = tuple[str, int] | str
"""A host and a port, or the path of a socket."""

Command = tuple[bytes | int, ...]
"""A command."""

Login = Callable[[bool], Awaitable[Command]]
"""Return the command to log in with; the argument is True if the last one was refused."""

_pack = cast("Callable[[Command], bytes]", pack_command)  # its stub knows of one word only
_NOTHING: Final = object()
_LOOK_AFTER_S: Final = 0.5
"""A connection that was idle for longer is checked before it is used."""
_REST_S: Final = 60.0
"""A connection that was idle for longer is replaced: firewalls drop it without notice."""
_TRY_ANOTHER_AFTER_S: Final = 1.0
"""When to try again to open a further connection, after that failed."""
_LOGIN_AGAIN_AFTER_S: Final = 60.0
"""When to log in again on an open connection, after that failed."""
_PASSING = re.compile(
    r"(?:^|-)(ASK|BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|MOVED|NOREPLICAS|OOM|READONLY"
    r"|TRYAGAIN|UNBLOCKED|ERR max number of clients reached)\b"
)


class UnusableServer(StoreError):
    """The server answers, but an operator has to change something before it can be used."""


class WrongPassword(UnusableServer):
    """The server refuses the user or the password."""


class InvalidReply(StoreUnavailable):
    """The reply does not fit the request: not Redis, or something in between changes replies."""

    def __init__(self) -> None:
        super().__init__("Redis: the reply is not valid; check that this is a Redis server")


class NotPrimary(StoreUnavailable):
    """A replica answered where the primary was expected; it may become one."""


def error_of(error: ReplyError) -> StoreError:
    """Return the exception for an error reply."""
    text = _text(error)
    passing = _PASSING.search(text)
    if passing is None:
        return StoreError(f"Redis refuses: {text}")
    if passing[1] == "READONLY":
        return NotPrimary("Redis refuses: READONLY, the server is a replica now")
    return StoreUnavailable(f"Redis refuses: {text[passing.start() :]}")


def _text(error: ReplyError) -> str:
    # The text after "with args" quotes the request, which may contain the password.
    return str(error).partition(", with args")[0][:300]


def address_text(address: ServerAddress) -> str:
    """Return *address* as text, for messages."""
    if isinstance(address, str):
        return address
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Request(Struct):
    """Commands that were sent: how many replies are due, and the future that gets them."""

    count: int
    waiter: asyncio.Future[list[Any]]
    sent: float
    answers: list[Any] = []


class Connection(asyncio.Protocol):
    """One connection to the server at *address*."""

    def __init__(
        self, address: ServerAddress, timeout_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.address = address
        self.closed: asyncio.Future[None] = loop.create_future()
        self._timeout_s = timeout_s
        self._loop = loop
        self._reader = Reader(notEnoughData=_NOTHING)
        self._under_way: deque[_Request] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._rests_since = loop.time()
        self._transport: asyncio.Transport

    @property
    def load(self) -> int:
        """How many requests wait for their replies."""
        return len(self._under_way)

    def is_usable(self) -> bool:
        """Return False if it is closed, also only just by the server, or was idle for too long."""
        if self._under_way or self._transport.is_closing():
            return not self._transport.is_closing()
        rested_s = self._loop.time() - self._rests_since
        if rested_s < _LOOK_AFTER_S:
            return True
        look = select.poll()
        look.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return rested_s <= _REST_S and not look.poll(0)

    def ask(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Send *commands*; the result is the list of replies, errors among them as values."""
        data = b"".join([_pack(command) for command in commands])  # whole, before anything is noted
        waiter: asyncio.Future[list[Any]] = self._loop.create_future()
        if not commands:
            waiter.set_result([])  # there will be no reply
            return waiter
        if self._transport.is_closing():
            waiter.set_exception(self._unavailable("connection closed"))
            return waiter
        now = self._loop.time()
        self._under_way.append(_Request(len(commands), waiter, now))
        if self._watch is None:
            self._watch = self._loop.call_at(now + self._timeout_s, self._check_timeout)
        self._transport.write(data)
        return waiter

    def abort(self, reason: str = "connection closed") -> None:
        """Close now; callers that wait get `StoreUnavailable` with *reason*."""
        self._fail(reason)
        self._transport.abort()

    # --- from the transport -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        try:
            reader.feed(data)
            while (answer := reader.gets()) is not _NOTHING:
                request = self._under_way[0]
                request.answers.append(answer)
                if len(request.answers) == request.count:
                    self._under_way.popleft()
                    if not request.waiter.done():  # otherwise the caller was cancelled
                        request.waiter.set_result(request.answers)
        except (HiredisError, IndexError):
            self.abort("the reply is not valid; check that this is a Redis server")
        else:
            if not self._under_way:
                self._rests_since = self._loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("connection closed" if exc is None else reason_of(exc))
        if not self.closed.done():
            self.closed.set_result(None)

    # --- the end ------------------------------------------------------------------------

    def _check_timeout(self) -> None:
        self._watch = None
        if not self._under_way:
            return
        due = self._under_way[0].sent + self._timeout_s
        if self._loop.time() < due:
            self._watch = self._loop.call_at(due, self._check_timeout)
        else:
            self.abort(f"no answer within {self._timeout_s:g} s")

    def _fail(self, reason: str) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._under_way:
            waiter = self._under_way.popleft().waiter
            if not waiter.done():
                waiter.set_exception(self._unavailable(reason))

    def _unavailable(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(f"Redis at {address_text(self.address)}: {reason}")


class Dialer(Struct, frozen=True):
    """Opens connections, with login, time limits and TLS."""

    timeout_s: float
    connect_timeout_s: float
    login: Login | None = None
    login_every_s: float | None = None
    """How often to log in again on an open connection; None: never."""
    db: int = 0
    tls: Callable[[], ssl.SSLContext] | None = None
    tls_name: str | None = None
    check: Callable[[dict[str, str], ServerAddress], None] | None = None
    """Checks the server's INFO, and raises if the server cannot be used."""

    async def connect(self, address: ServerAddress) -> Connection:
        """Connect, log in, and check the server."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                connection = await self._reach(address)
                await self._greet(connection)
                if self.login is not None and self.login_every_s is not None:
                    keep = self._log_in_again(connection, self.login, self.login_every_s)
                    keeper = asyncio.get_running_loop().create_task(keep)
                    connection.closed.add_done_callback(lambda _: keeper.cancel())
                return connection
        except BaseException as error:
            if connection is not None:
                connection.abort()
            if not isinstance(error, OSError | UnicodeError):
                raise
            reason = reason_of(error)
            if isinstance(error, TimeoutError):
                reason = f"no connection within {self.connect_timeout_s:g} s"
            is_lasting = isinstance(error, ssl.SSLCertVerificationError | UnicodeError)
        kind = UnusableServer if is_lasting else StoreUnavailable
        raise kind(f"Redis at {address_text(address)}: {reason}")

    async def ask_once(self, address: ServerAddress, command: Command) -> Any:
        """Send one command on a connection of its own."""
        connection = await self.connect(address)
        try:
            return (await connection.ask([command]))[0]
        finally:
            connection.abort()

    async def _reach(self, address: ServerAddress) -> Connection:
        loop = asyncio.get_running_loop()

        def made() -> Connection:
            return Connection(address, self.timeout_s, loop)

        if isinstance(address, str):
            _, connection = await loop.create_unix_connection(made, address)
            return connection
        host, port = address
        tls = self.tls() if self.tls is not None else None
        transport, connection = await loop.create_connection(
            made, host, port, ssl=tls, server_hostname=(self.tls_name or host) if tls else None
        )
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    async def _greet(self, connection: Connection) -> None:
        command = await self.login(False) if self.login is not None else None
        try:
            await self._introduce(connection, command)
        except WrongPassword:
            again = await self.login(True) if self.login is not None else None
            if again == command:
                raise
            await self._introduce(connection, again)  # the password was changed just now

    async def _introduce(self, connection: Connection, login: Command | None) -> None:
        commands = [login] if login is not None else []
        if self.db:
            commands.append((b"SELECT", self.db))
        if self.check is None:
            await _ask_checked(connection, commands)
        else:
            *_, info = await _ask_checked(connection, [*commands, (b"INFO",)])
            self.check(parse_info(info), connection.address)

    async def _log_in_again(self, connection: Connection, login: Login, every_s: float) -> None:
        """Log in every *every_s*, as long as the connection is open."""
        wait_s, is_refused = every_s, False
        while True:
            await asyncio.sleep(wait_s)
            wait_s = every_s
            try:
                async with asyncio.timeout(self.connect_timeout_s):
                    await _ask_checked(connection, [await login(is_refused)])
                is_refused = False
            except (StoreError, TimeoutError) as error:
                # The connection stays authorised until the server closes it.
                wait_s = min(every_s, _LOGIN_AGAIN_AFTER_S)
                is_refused = isinstance(error, WrongPassword)
                server, why = address_text(connection.address), str(error) or type(error).__name__
                _log.warning("oncebridge.redis_login_failed", extra={"server": server, "why": why})


async def _ask_checked(connection: Connection, commands: Sequence[Command]) -> list[bytes]:
    """Send commands that are answered with OK, or INFO; raise if one is not."""
    answers = await connection.ask(commands)
    for command, answer in zip(commands, answers, strict=True):
        if isinstance(answer, ReplyError):
            raise _refused(command, answer, connection.address)
        if not isinstance(answer, bytes) or (command != (b"INFO",) and answer != b"OK"):
            raise InvalidReply
    return answers


def _refused(command: Command, error: ReplyError, address: ServerAddress) -> StoreError:
    problem = error_of(error)
    if isinstance(problem, StoreUnavailable):
        return problem
    what = cast("bytes", command[0]).decode()
    kind = WrongPassword if _text(error).startswith("WRONGPASS") else UnusableServer
    return kind(f"Redis at {address_text(address)} refuses {what}: {_text(error)}")


def parse_info(text: bytes) -> dict[str, str]:
    """Return the fields of an INFO reply: `NAME:VALUE`, one per line."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


class Node:
    """
    A server with up to *most* connections.

    The first is opened when it is needed, each further one when all others are busy.
    """

    def __init__(self, dial: Callable[[], Awaitable[Connection]], most: int) -> None:
        self._dial = dial
        self._most = most
        self._open: list[Connection] = []
        self._opening = SharedTask(self._open_another)
        self._open_from = 0.0

    def ask(self, commands: Sequence[Command]) -> Awaitable[list[Any]]:
        """Send *commands* together; the result is the list of replies, errors as values."""
        connection = self._least_busy()
        if connection is None:
            return self._ask_first(commands)
        may_open = connection.load and len(self._open) < self._most
        if may_open and asyncio.get_running_loop().time() >= self._open_from:
            self._opening.start()
        return connection.ask(commands)

    async def _ask_first(self, commands: Sequence[Command]) -> list[Any]:
        # All callers share one attempt: one after the other, they would wait ever longer.
        await self._opening.wait()
        connection = self._least_busy()
        if connection is None:
            raise StoreUnavailable("Redis: connection closed")
        return await connection.ask(commands)

    def drop(self) -> None:
        """Close all connections; callers that wait get `StoreUnavailable`."""
        while self._open:
            self._open.pop().abort()

    def close(self) -> list[asyncio.Future[None]]:
        """Close all connections, and open no more; return what ends when that is done."""
        ending = [connection.closed for connection in self._open]
        self.drop()
        return [*ending, *self._opening.close()]

    def _least_busy(self) -> Connection | None:
        while True:
            best: Connection | None = None
            for connection in self._open:
                if best is None or connection.load < best.load:
                    best = connection
            if best is None or best.is_usable():
                return best
            self._open.remove(best)
            best.abort()

    async def _open_another(self) -> None:
        try:
            self._open.append(await self._dial())
        except Exception:
            self._open_from = asyncio.get_running_loop().time() + _TRY_ANOTHER_AFTER_S
            raise


class SharedTask:
    """Work that is done once for all callers that want it at the same time."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> asyncio.Task[None]:
        """Start the work, if it is not running."""
        if self._is_closed:
            raise StoreUnavailable("Redis: connection closed")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
            self._task.add_done_callback(self._ended)
        return self._task

    async def wait(self) -> None:
        """Wait for the work; cancelling one caller affects no other."""
        task = self.start()
        await asyncio.wait([task])
        if task.cancelled():
            raise StoreUnavailable("Redis: connection closed")
        task.result()

    def close(self) -> list[asyncio.Future[None]]:
        """Cancel the work, and do it no more; return the task, if it is running."""
        self._is_closed = True
        if self._task is None:
            return []
        self._task.cancel()
        return [self._task]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # retrieved, as there may be no caller that waits


def reason_of(error: Exception) -> str:
    """Return the reason of a connection error as text."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"certificate verify failed: {error.verify_message}"
        case ssl.SSLError():
            return f"TLS failed: {(error.reason or 'no reason given').replace('_', ' ').lower()}"
        case socket.gaierror():
            return "the host name cannot be resolved"
        case UnicodeError():
            return "not a valid host name"
        case OSError(errno=int(number)) if number > 0:
            return os.strerror(number).lower()
        case _:
            return str(error) or type(error).__name__


# --- login --------------------------------------------------------------------------------
#
# No message quotes a password, or the text of an exception of the user's function: it may contain
# one.

Credentials = Callable[[], tuple[str, str] | Awaitable[tuple[str, str]]]
"""
Return a user and a password; an empty user means the default user.

An `async` function is called on the loop, a plain function in a thread, so that it may block.
"""


def fixed_login(user: str, password: Secret | None) -> Login | None:
    """Return a login that never changes; None without a password."""
    if password is None:
        return None
    command = _auth(user, password.reveal())

    async def login(_: bool) -> Command:  # noqa: FBT001 - a `Login`
        return command

    return login


def login_with(credentials: Credentials, again: Credentials | None = None) -> Login:
    """Return a login that calls *credentials* each time, or *again* after a refusal."""

    async def login(is_refused: bool) -> Command:  # noqa: FBT001 - a `Login`
        ask = again if again is not None and is_refused else credentials
        try:
            found = ask() if inspect.iscoroutinefunction(ask) else await asyncio.to_thread(ask)
            match await found if inspect.isawaitable(found) else found:
                case (str(user), str(password)) if password:
                    return _auth(user, password)
        except StoreError:
            raise
        except ConfigError as error:
            raise UnusableServer(f"no credentials for Redis: {error.message}") from error
        except Exception as error:
            is_ours = isinstance(error, OncebridgeError)
            why = str(error) if is_ours else f"{type(error).__name__} was raised"
            raise StoreUnavailable(f"no credentials for Redis: {why}") from error
        raise UnusableServer(
            "no credentials for Redis: the function must return (user, password), both str"
        )

    return login


def _auth(user: str, password: str) -> Command:
    given = [text.encode(errors="surrogateescape") for text in (user, password) if text]
    return (b"AUTH", *given)
