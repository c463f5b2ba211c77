"""
The Redis store: Redis or Valkey, 6.2 or later, as one server, with Sentinel, or as a cluster.

**Durability:** what Redis has on disk survives a crash. With `appendonly yes` that is all but
about the last two seconds (`appendfsync everysec`), or everything (`always`); without it, nothing.
A failover loses what no replica had yet, unless *wait_replicas* waits for one. A lost record may
let a duplicate through; no event is lost.
**Clock:** the server's, read inside the script that decides.
**Outages:** every call raises `StoreUnavailable` within *timeout*. No event is lost: events are
returned to their source. In a cluster, this affects only the keys of the server that is
unavailable.
**Cost:** one round trip per batch of claims, and one per batch of commits; about 190 bytes of
Redis memory per key, or 230 if content is compared.

Scripts (`records.lua`) decide, for at most 200 records each, so that the server is never blocked
for longer than about a millisecond. Redis removes expired records by itself. It must never evict
records (`maxmemory-policy noeviction`): an evicted record lets a duplicate through.

In a cluster, the parts of a claim may be on different servers. Such parts are claimed one after
the other, and released if one fails (`cluster_claims.py`).
"""

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, ClassVar, Final, Self, TypeVar

from msgspec.structs import replace

from oncebridge.base.clock import Clock, ms
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.stores.api import (
    ClaimAnswer,
    ClaimAnswers,
    Commit,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extension,
    Extensions,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.conditional import ConditionalStore
from oncebridge.stores.redis import scripts
from oncebridge.stores.redis.address import RedisAddress
from oncebridge.stores.redis.checks import doubts, faults
from oncebridge.stores.redis.cluster_claims import ClusterBackend
from oncebridge.stores.redis.connection import (
    Command,
    Credentials,
    Dialer,
    InvalidReply,
    Login,
    NotPrimary,
    ServerAddress,
    UnusableServer,
    address_text,
    fixed_login,
    login_with,
    parse_info,
)
from oncebridge.stores.redis.options import RedisOptions, check, tls_context
from oncebridge.stores.redis.servers import (
    Cluster,
    OneServer,
    RedisRequest,
    ReplicaWait,
    Sentinels,
    Servers,
    SlotMoving,
    TooFewReplicas,
)

_log = logging.getLogger("oncebridge")

_Keyed = TypeVar("_Keyed", Commit, Release, Extension, Memory, Record)
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")
_Piece = tuple[int, Sequence[int]]
"""A slot, and the positions of its items that go into one script."""

_CHUNK: Final = 200
"""Records per script. One takes about 3 µs, so other clients wait for 0.6 ms at most."""
_FAULTS: Final[Mapping[str, type[StoreError]]] = {
    "loading": StoreUnavailable,
    "replica": NotPrimary,
}
"""Faults that pass by themselves; an operator has to fix all others."""

_COMMITS: Final[dict[int, CommitAnswer]] = {
    0: Reply.FENCED,
    1: Reply.COMMITTED,
    2: Reply.ALREADY,
}
_RELEASES: Final[dict[int, ReleaseAnswer]] = {0: Reply.FENCED, 1: Reply.RELEASED}
_EXTENSIONS: Final[dict[int, ExtendAnswer]] = {0: Reply.FENCED, 1: Reply.EXTENDED}
_MEMORIES: Final[dict[int, RememberAnswer]] = {0: Reply.KNOWN, 1: Reply.REMEMBERED}
_FORGOTTEN: Final = {0: False, 1: True}


class RedisStore:
    """
    Keep records in the Redis at *url*; see `oncebridge.stores.redis.address` for its forms.

    *credentials* returns a user and a password, in place of those in *url*. It is called for each
    new connection, again if the password was wrong, and every *login_every* for connections that
    stay open. *clock* is for tests: it replaces the server's, and nothing expires on the server.
    """

    Options: ClassVar = RedisOptions

    def __init__(
        self,
        url: str,
        options: RedisOptions | None = None,
        *,
        credentials: Credentials | None = None,
        login_every: timedelta | None = None,
        clock: Clock | None = None,
    ) -> None:
        options = options or RedisOptions()
        self._address = RedisAddress.parse(url)
        check(options, self._address)
        self._options = options
        self._clock = clock
        self._close_login: Callable[[], None] = lambda: None
        if login_every is not None and login_every <= timedelta(0):
            raise ConfigError("", "login_every must be more than 0")
        self._login_every = login_every
        self._login = self._login_of(credentials)
        self._prefix = options.prefix.encode() + b":"
        self._scripts = scripts.read_scripts()
        self._copies = (
            ReplicaWait(options.wait_replicas, ms(options.wait_timeout))
            if options.wait_replicas
            else None
        )
        self._tls: ssl.SSLContext | None = None
        self._warned: set[tuple[str, ServerAddress]] = set()
        self._servers = self._connect_to(self._dialer())
        self._ahead_ms: int | None = None
        """How far the server's clock is ahead of this loop's."""
        self._is_closed = False

    @classmethod
    def from_url(cls, url: str, options: RedisOptions | None = None) -> Self:
        """Open `redis://HOST`, and the forms for TLS, sockets, Sentinel and clusters."""
        return cls(url, options)

    @property
    def address(self) -> RedisAddress:
        return self._address

    @property
    def options(self) -> RedisOptions:
        return self._options

    async def open(self) -> None:
        self._check_open()
        if self._address.is_tls:
            self._tls = tls_context(self._options)
        try:
            await self._servers.open(self._scripts.values())
            await self.peek([b""])  # so that missing permissions are found now
        except NotPrimary as error:
            if self._address.kind in ("sentinel", "cluster"):
                raise  # a failover is under way
            raise ConfigError("", f"{error}; use the address of the primary") from error
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise ConfigError("", str(error)) from error

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return ClaimAnswers.of(wants, await self._claim_rows([*wants]))

    async def _claim_rows(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        split = self._across_slots(wants)
        if not split:
            return await self._claim(wants)
        together = sorted(set(range(len(wants))).difference(split))
        answers: list[ClaimAnswer] = [NoAnswer("")] * len(wants)
        several, single = await asyncio.gather(
            _or_no_answer(self._claim_across_slots([wants[at] for at in split]), len(split)),
            _or_no_answer(self._claim([wants[at] for at in together]), len(together)),
        )
        for at, answer in zip((*split, *together), (*several, *single), strict=True):
            answers[at] = answer
        return answers

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        return await self._each(
            "commit", [*commits], scripts.encode_commits, _COMMITS, self._copies
        )

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._each(
            "release", [*releases], _one_by_one(scripts.encode_release), _RELEASES
        )

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        write = _one_by_one(scripts.encode_extension)
        return await self._each("extend", [*extensions], write, _EXTENSIONS)

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        write = _one_by_one(scripts.encode_memory)
        return await self._each("remember", [*memories], write, _MEMORIES, self._copies)

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        write = _one_by_one(scripts.encode_load)
        return await self._each("load", records, write, _MEMORIES, self._copies)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        values = _require_all(await self._ask_about("look", keys))
        return [
            None if value is None else scripts.decode_record(key, value)
            for key, value in zip(keys, values, strict=True)
        ]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        results = _require_all(await self._ask_about("forget", keys))
        try:
            return [_FORGOTTEN[answer] for answer in results]
        except (KeyError, TypeError):
            raise self._invalid_reply() from None

    async def purge(self, limit: int = 1000) -> int:  # noqa: ARG002 - Redis does it by itself
        """Do nothing: Redis removes expired records."""
        return 0

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        cursor, _, server = place.partition(b" ")
        self._check_open()
        servers = await self._servers.server_names()
        server = server or servers[0]
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        command = (b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", limit)
        match _or_raise(await self._servers.ask_server(server, command)):
            case [bytes(after), list(names)]:
                keys = [name[len(self._prefix) :] for name in dict.fromkeys(names)]
            case _:
                raise self._invalid_reply()
        records = [record for record in await self.peek(keys) if record is not None]
        if after != b"0":
            return records, after + b" " + server
        further = [other for other in servers if other > server]
        return records, b"0 " + further[0] if further else b""

    async def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        self._check_open()
        (answer,) = await self._servers.ask([RedisRequest((b"TIME",))])
        match _or_raise(answer):
            case [bytes(seconds), bytes(micros)] if seconds.isdigit() and micros.isdigit():
                now = int(seconds) * 1000 + int(micros) // 1000
            case _:
                raise self._invalid_reply()
        self._note_time(now)
        return now

    async def health(self) -> Mapping[str, int | None]:
        """
        Return how much memory the servers use, and how many keys they have evicted, in total.

        Both include other users of the servers. The number of our records is not known without
        reading every key.
        """
        self._check_open()
        places = await self._servers.server_names()
        infos = await asyncio.gather(*map(self._info, places))
        return {
            "bytes": _sum("used_memory", infos),
            "evicted": _sum("evicted_keys", infos),
        }

    async def _info(self, place: bytes) -> dict[str, str]:
        answer = _or_raise(await self._servers.ask_server(place, (b"INFO",)))
        if not isinstance(answer, bytes):
            raise self._invalid_reply()
        return parse_info(answer)

    async def aclose(self) -> None:
        self._is_closed = True
        self._close_login()
        await self._servers.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # --- claims -------------------------------------------------------------------------

    async def _claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        prefix = self._prefix
        names = [prefix + part.key for want in wants for part in want.parts]
        sizes = None
        if len(names) > len(wants):
            sizes = [len(want.parts) for want in wants]
        results, times = await self._run_script(
            "claim", wants, names, scripts.encode_wants, sizes=sizes
        )
        try:
            return [
                _claim_answer(want, answer, now)
                for want, answer, now in zip(wants, _require_some(results), times, strict=True)
            ]
        except (IndexError, KeyError, TypeError, ValueError):
            raise self._invalid_reply() from None

    def _across_slots(self, wants: Sequence[Want]) -> list[int]:
        """Return the positions of wants whose parts are in different slots."""
        if self._address.kind != "cluster":
            return []
        return [
            at
            for at, want in enumerate(wants)
            if len(want.parts) > 1
            and len({self._servers.slot_of(self._prefix + part.key) for part in want.parts}) > 1
        ]

    async def _claim_across_slots(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        if self._clock is None and self._ahead_ms is None:
            await self.now_ms()
        time_s, ahead = asyncio.get_running_loop().time, self._ahead_ms or 0
        backend = ClusterBackend(
            self._ask_about,
            self._clock or (lambda: int(time_s() * 1000) + ahead),
            is_shared_clock=self._clock is not None,
        )
        return [*await ConditionalStore(backend).claim(Wants.of(wants))]

    # --- running scripts ----------------------------------------------------------------

    async def _each(
        self,
        script: str,
        items: Sequence[_Keyed],
        write: Callable[[Sequence[_Keyed]], list[bytes]],
        meanings: Mapping[int, _Answer],
        replicas: ReplicaWait | None = None,
    ) -> list[_Answer | NoAnswer]:
        """Run a script for each item, and return the answers that its numbers mean."""
        prefix = self._prefix
        names = [prefix + item.key for item in items]
        results, _ = await self._run_script(script, items, names, write, replicas=replicas)
        if results.count(1) == len(results):  # the common case by far
            return [meanings[1]] * len(results)
        try:
            return [
                NoAnswer(str(answer)) if isinstance(answer, StoreError) else meanings[answer]
                for answer in _require_some(results)
            ]
        except (KeyError, TypeError):
            raise self._invalid_reply() from None

    async def _ask_about(
        self,
        script: str,
        keys: Sequence[bytes],
        asked: Sequence[bytes] | None = None,
    ) -> tuple[list[Any], list[int]]:
        prefix = self._prefix
        names = [prefix + key for key in keys]
        return await self._run_script(
            script, [b""] * len(keys) if asked is None else asked, names, list
        )

    async def _run_script(
        self,
        script: str,
        items: Sequence[_Item],
        names: Sequence[bytes],
        write: Callable[[Sequence[_Item]], list[bytes]],
        *,
        sizes: Sequence[int] | None = None,
        replicas: ReplicaWait | None = None,
    ) -> tuple[list[Any], list[int]]:
        """
        Run a script for all *items*, in as few pieces as possible.

        *sizes* has the number of *names* of each item, if that is not one each. *write* encodes
        the arguments. Return for each item the result of the script (a `StoreError` if there is
        none) and the server's time.
        """
        self._check_open()
        if len(names) <= _CHUNK and self._address.kind != "cluster" and items:
            ask = self._ask(script, 0, names, write(items))
            (answer,) = await self._answers([ask], replicas)
            now, *results = self._checked(answer, len(items))
            return results, [now] * len(results)
        return await self._run_in_pieces(script, items, _split(names, sizes), write, replicas)

    async def _run_in_pieces(
        self,
        script: str,
        items: Sequence[_Item],
        names: Sequence[Sequence[bytes]],
        write: Callable[[Sequence[_Item]], list[bytes]],
        replicas: ReplicaWait | None,
    ) -> tuple[list[Any], list[int]]:
        results: list[Any] = [None] * len(items)
        times = [0] * len(items)
        pieces = self._pieces(names)
        while pieces:
            requests = []
            for slot, piece in pieces:
                item_names = [name for at in piece for name in names[at]]
                requests.append(
                    self._ask(script, slot, item_names, write([items[at] for at in piece]))
                )
            answers = await self._answers(requests, replicas)
            moving: list[_Piece] = []
            for (slot, piece), answer in zip(pieces, answers, strict=True):
                if isinstance(answer, SlotMoving) and len(piece) > 1:
                    moving += [(slot, [at]) for at in piece]
                    continue
                now, *each = self._checked(answer, len(piece))
                for at, one in zip(piece, each, strict=True):
                    results[at] = one
                    times[at] = now
            pieces = moving
        return results, times

    async def _answers(
        self, requests: Sequence[RedisRequest], replicas: ReplicaWait | None
    ) -> list[Any]:
        try:
            return await self._servers.ask(requests, replicas)
        except StoreError as error:
            return [error] * len(requests)

    def _checked(self, answer: Any, count: int) -> list[Any]:
        """Return the reply if it is the time and one result per item, otherwise errors."""
        if isinstance(answer, StoreError):
            return [0, *[answer] * count]
        if (
            not isinstance(answer, list)
            or len(answer) != count + 1
            or not isinstance(answer[0], int)
        ):
            return [0, *[self._invalid_reply()] * count]
        if self._address.kind == "cluster":
            self._note_time(answer[0])
        return answer

    def _invalid_reply(self) -> StoreError:
        self._servers.drop_connections()
        return InvalidReply()

    def _pieces(self, names: Sequence[Sequence[bytes]]) -> list[_Piece]:
        """Group items by slot, in pieces that do not block a server for long."""
        slots: dict[int, list[int]] = {}
        if self._address.kind == "cluster":
            for at, item_names in enumerate(names):
                slots.setdefault(self._servers.slot_of(item_names[0]), []).append(at)
        elif names:
            slots[0] = list(range(len(names)))
        pieces: list[_Piece] = []
        for slot, places in slots.items():
            start = size = 0
            for number, at in enumerate(places):
                count = len(names[at])
                if size and size + count > _CHUNK:
                    pieces.append((slot, places[start:number]))
                    start, size = number, 0
                size += count
            pieces.append((slot, places[start:]))
        return pieces

    def _ask(
        self, name: str, slot: int, names: Sequence[bytes], asked: Sequence[bytes]
    ) -> RedisRequest:
        script = self._scripts[name]
        now = b"" if self._clock is None else b"%d" % self._clock()
        command: Command = (b"EVALSHA", script.sha, len(names), *names, now, *asked)
        return RedisRequest(command, slot, len(names), script)

    def _note_time(self, now_ms: int) -> None:
        self._ahead_ms = now_ms - int(asyncio.get_running_loop().time() * 1000)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError("the Redis store has been closed")

    # --- connecting ---------------------------------------------------------------------

    def unchecked_servers(self) -> Servers:
        """Return the servers, without checking them; the caller closes them."""
        return self._connect_to(replace(self._dialer(), check=None))

    def sentinels(self) -> Sentinels | None:
        """Return the Sentinels; None if the address has none."""
        address, options = self._address, self._options
        if address.kind != "sentinel":
            return None
        watcher = replace(
            self._dialer(),
            login=fixed_login(options.sentinel_user or "", options.sentinel_password),
            login_every_s=None,
            db=0,
            check=None,
        )
        return Sentinels(watcher, address.hosts, address.service)

    def _login_of(self, credentials: Credentials | None) -> Login | None:
        address, options = self._address, self._options
        if credentials is None and options.iam_user is None:
            return fixed_login(address.user, address.password)
        if credentials is not None:
            if address.password is not None or options.iam_user is not None:
                raise ConfigError(
                    "", "credentials replace a password and iam_user; use one of them only"
                )
            return login_with(credentials)
        assert options.iam_user is not None and options.iam_cache is not None  # noqa: S101,PT018
        try:
            from oncebridge.aws.elasticache import (  # noqa: PLC0415 - few need AWS here
                LOGIN_EVERY,
                IamCredentials,
            )
        except ImportError as error:
            raise ConfigError(
                "iam_user",
                f"needs a package that is not installed ({error.name or error}); "
                "pip install 'oncebridge[aws]'",
            ) from error
        iam = IamCredentials(
            options.iam_user,
            options.iam_cache,
            region=options.iam_region,
            serverless=options.iam_serverless,
        )
        self._close_login = iam.close
        self._login_every = LOGIN_EVERY
        return login_with(iam.login, iam.login_again)

    def _dialer(self) -> Dialer:
        address, options, every = self._address, self._options, self._login_every
        return Dialer(
            timeout_s=options.timeout.total_seconds(),
            connect_timeout_s=options.connect_timeout.total_seconds(),
            login=self._login,
            login_every_s=every.total_seconds() if every is not None else None,
            db=address.db,
            tls=self._tls_context if address.is_tls else None,
            tls_name=options.tls_name,
            check=self._check,
        )

    def _connect_to(self, dialer: Dialer) -> Servers:
        address, options = self._address, self._options
        if address.kind == "cluster":
            return Cluster(dialer, address.hosts, options.connections)
        if (sentinels := self.sentinels()) is not None:
            return OneServer(dialer, sentinels.primary, options.connections)
        where: ServerAddress = address.path or address.hosts[0]

        async def there() -> ServerAddress:
            return where

        return OneServer(dialer, there, options.connections)

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                self._tls = tls_context(self._options)
            except ConfigError as error:
                raise UnusableServer(str(error)) from error
        return self._tls

    def _check(self, info: dict[str, str], address: ServerAddress) -> None:
        """Check the INFO of a server, for every connection."""
        for fault in faults(info, is_cluster=self._address.kind == "cluster"):
            raise _FAULTS.get(fault.code, UnusableServer)(
                f"Redis at {address_text(address)} {fault.text}"
            )
        for doubt in doubts(info, replicas=self._options.wait_replicas):
            self._warn(f"oncebridge.redis_{doubt}", address)

    def _warn(self, what: str, address: ServerAddress) -> None:
        """Log a warning once for each server."""
        if (what, address) not in self._warned:
            self._warned.add((what, address))
            _log.warning(what, extra={"server": address_text(address)})


def _one_by_one(write: Callable[[_Item], bytes]) -> Callable[[Sequence[_Item]], list[bytes]]:
    return lambda items: [write(item) for item in items]


def _split(names: Sequence[bytes], sizes: Sequence[int] | None) -> list[Sequence[bytes]]:
    """Return the names of each item."""
    if sizes is None:
        return [[name] for name in names]
    ends = list(accumulate(sizes))
    return [names[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _require_all(decided: tuple[list[Any], list[int]]) -> list[Any]:
    """Return the results; raise if one is missing."""
    results, _ = decided
    for answer in results:
        _or_raise(answer)
    return results


def _require_some(results: list[Any]) -> list[Any]:
    """Return the results; raise if all are missing. `TooFewReplicas` counts as a result."""
    if results and all(
        isinstance(a, StoreError) and type(a) is not TooFewReplicas for a in results
    ):
        raise next((a for a in results if not isinstance(a, StoreUnavailable)), results[0])
    return results


def _or_raise(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer


def _sum(name: str, infos: Sequence[Mapping[str, str]]) -> int | None:
    """Return the sum of a number; None if a server does not report it."""
    numbers = [info.get(name, "") for info in infos]
    return sum(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def _claim_answer(want: Want, results: Any, now_ms: int) -> ClaimAnswer:
    try:
        return scripts.claim_answer(want, _or_raise(results), now_ms)
    except StoreError as error:
        return NoAnswer(str(error))


async def _or_no_answer(
    claims: Coroutine[Any, Any, list[ClaimAnswer]], count: int
) -> list[ClaimAnswer]:
    try:
        return await claims
    except StoreError as error:
        return [NoAnswer(str(error))] * count
