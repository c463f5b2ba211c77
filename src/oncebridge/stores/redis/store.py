"""
The store in Redis or Valkey, 6.2 or later: one server, Sentinel, or a cluster.

**What survives a crash:** what Redis has on disk. With `appendonly yes`, all but about the last
two seconds (`appendfsync everysec`) or everything (`always`); without, nothing. At a failover,
what no replica had yet is gone, unless *wait_replicas* waits for one. What is lost lets
duplicates through; it never loses an event.
**Whose clock:** the server's, read inside the script that decides.
**What an outage does:** every call raises `StoreUnavailable` within *timeout*; nothing is lost,
events are handed back. In a cluster, only the share of the server that is away is unanswered.
**What it costs:** one round trip per batch of claims, one per batch of commits; about 190 bytes
of Redis memory per key, or 230 where contents are compared.

Decisions are made by scripts (`records.lua`) of at most 200 records, so that the server is never
blocked for longer than about a millisecond. Redis removes records by itself; it must never evict
them (`maxmemory-policy noeviction`), as an evicted record is a duplicate let through.

In a cluster, the parts of one claim may live on different servers. Such claims are made in
turn, and undone where one part fails (`redis_tiers.py`).
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
    Commit,
    CommitAnswer,
    ExtendAnswer,
    Extension,
    Memory,
    NoAnswer,
    Record,
    Release,
    ReleaseAnswer,
    RememberAnswer,
    Reply,
    Want,
)
from oncebridge.stores.conditional import CompareStore
from oncebridge.stores.redis import scripts
from oncebridge.stores.redis.address import RedisAddress
from oncebridge.stores.redis.checks import doubts, faults
from oncebridge.stores.redis.connection import (
    Address,
    Dialer,
    Login,
    Nonsense,
    NotThePrimary,
    Unfit,
    Words,
    info_of,
    shown,
)
from oncebridge.stores.redis.login import Credentials, asked, fixed
from oncebridge.stores.redis.options import RedisOptions, check, tls_context
from oncebridge.stores.redis.servers import (
    Ask,
    Cluster,
    Copies,
    Moving,
    OneServer,
    Sentinels,
    Servers,
    TooFewCopies,
)
from oncebridge.stores.redis.tiers import RedisCells

_log = logging.getLogger("oncebridge")

_Keyed = TypeVar("_Keyed", Commit, Release, Extension, Memory, Record)
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")
_Piece = tuple[int, Sequence[int]]
"""A slot, and which items about it go into one script."""

_CHUNK: Final = 200
"""Records per script: one takes the server about 3 µs, so others wait for 0.6 ms at most."""
_FAULTS: Final[Mapping[str, type[StoreError]]] = {
    "loading": StoreUnavailable,
    "replica": NotThePrimary,
}
"""What passes by itself; whatever else is wrong, somebody has to put right."""

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

    *credentials* returns a user and a password, in place of those in *url*. It is asked for each
    new connection, once more where a password was wrong, and every *login_every* on connections
    that stay open. *clock* is for tests: decisions then go by it, and nothing expires on the server.
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
        self._scripts = scripts.scripts()
        self._copies = (
            Copies(options.wait_replicas, ms(options.wait_timeout))
            if options.wait_replicas
            else None
        )
        self._tls: ssl.SSLContext | None = None
        self._told: set[tuple[str, Address]] = set()
        self._servers = self._found(self._dialer())
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
            await self.peek([b""])  # so that missing permissions show now
        except NotThePrimary as error:
            if self._address.kind in ("sentinel", "cluster"):
                raise  # a failover is under way
            raise ConfigError("", f"{error}; name the primary") from error
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise ConfigError("", str(error)) from error

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        apart = self._apart(wants)
        if not apart:
            return await self._claim(wants)
        together = sorted(set(range(len(wants))).difference(apart))
        answers: list[ClaimAnswer] = [NoAnswer("")] * len(wants)
        several, single = await asyncio.gather(
            _or_no_answer(self._claim_in_turn([wants[at] for at in apart]), len(apart)),
            _or_no_answer(self._claim([wants[at] for at in together]), len(together)),
        )
        for at, answer in zip((*apart, *together), (*several, *single), strict=True):
            answers[at] = answer
        return answers

    async def commit(self, commits: Sequence[Commit]) -> list[CommitAnswer]:
        return await self._each("commit", commits, scripts.asked_commits, _COMMITS, self._copies)

    async def release(self, releases: Sequence[Release]) -> list[ReleaseAnswer]:
        return await self._each("release", releases, _one_by_one(scripts.asked_release), _RELEASES)

    async def extend(self, extensions: Sequence[Extension]) -> list[ExtendAnswer]:
        write = _one_by_one(scripts.asked_extension)
        return await self._each("extend", extensions, write, _EXTENSIONS)

    async def remember(self, memories: Sequence[Memory]) -> list[RememberAnswer]:
        write = _one_by_one(scripts.asked_memory)
        return await self._each("remember", memories, write, _MEMORIES, self._copies)

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        write = _one_by_one(scripts.asked_load)
        return await self._each("load", records, write, _MEMORIES, self._copies)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        values = _all(await self._ask_about("look", keys))
        return [
            None if value is None else scripts.record_of(key, value)
            for key, value in zip(keys, values, strict=True)
        ]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        said = _all(await self._ask_about("forget", keys))
        try:
            return [_FORGOTTEN[answer] for answer in said]
        except (KeyError, TypeError):
            raise self._nonsense() from None

    async def purge(self, limit: int = 1000) -> int:  # noqa: ARG002 - Redis does it by itself
        """Do nothing: Redis removes what is past keeping."""
        return 0

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        cursor, _, server = place.partition(b" ")
        self._check_open()
        servers = await self._servers.places()
        server = server or servers[0]
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        words = (b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", limit)
        match _answered(await self._servers.ask_at(server, words)):
            case [bytes(after), list(names)]:
                keys = [name[len(self._prefix) :] for name in dict.fromkeys(names)]
            case _:
                raise self._nonsense()
        records = [record for record in await self.peek(keys) if record is not None]
        if after != b"0":
            return records, after + b" " + server
        further = [other for other in servers if other > server]
        return records, b"0 " + further[0] if further else b""

    async def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        self._check_open()
        (answer,) = await self._servers.ask([Ask((b"TIME",))])
        match _answered(answer):
            case [bytes(seconds), bytes(micros)] if seconds.isdigit() and micros.isdigit():
                now = int(seconds) * 1000 + int(micros) // 1000
            case _:
                raise self._nonsense()
        self._note_time(now)
        return now

    async def health(self) -> Mapping[str, int | None]:
        """
        Return how much memory the servers use, and how many keys they have evicted, in sum.

        Both are a server's, whoever else uses it. How many records are ours it cannot tell
        without looking at every key.
        """
        self._check_open()
        places = await self._servers.places()
        infos = await asyncio.gather(*map(self._info, places))
        return {
            "bytes": _sum("used_memory", infos),
            "evicted": _sum("evicted_keys", infos),
        }

    async def _info(self, place: bytes) -> dict[str, str]:
        answer = _answered(await self._servers.ask_at(place, (b"INFO",)))
        if not isinstance(answer, bytes):
            raise self._nonsense()
        return info_of(answer)

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
        said, times = await self._decide("claim", wants, names, scripts.asked_wants, sizes=sizes)
        try:
            return [
                _claim_answer(want, answer, now)
                for want, answer, now in zip(wants, _some(said), times, strict=True)
            ]
        except (IndexError, KeyError, TypeError, ValueError):
            raise self._nonsense() from None

    def _apart(self, wants: Sequence[Want]) -> list[int]:
        """Find the wants whose parts no single script can see."""
        if self._address.kind != "cluster":
            return []
        return [
            at
            for at, want in enumerate(wants)
            if len(want.parts) > 1
            and len({self._servers.slot_of(self._prefix + part.key) for part in want.parts}) > 1
        ]

    async def _claim_in_turn(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        if self._clock is None and self._ahead_ms is None:
            await self.now_ms()
        time_s, ahead = asyncio.get_running_loop().time, self._ahead_ms or 0
        cells = RedisCells(
            self._ask_about,
            self._clock or (lambda: int(time_s() * 1000) + ahead),
            is_shared_clock=self._clock is not None,
        )
        return await CompareStore(cells).claim(wants)

    # --- to the servers and back --------------------------------------------------------

    async def _each(
        self,
        script: str,
        items: Sequence[_Keyed],
        write: Callable[[Sequence[_Keyed]], list[bytes]],
        meanings: Mapping[int, _Answer],
        copies: Copies | None = None,
    ) -> list[_Answer | NoAnswer]:
        """Run a script over one record each, and read its short answers."""
        prefix = self._prefix
        names = [prefix + item.key for item in items]
        said, _ = await self._decide(script, items, names, write, copies=copies)
        if said.count(1) == len(said):  # the common case by far
            return [meanings[1]] * len(said)
        try:
            return [
                NoAnswer(str(answer)) if isinstance(answer, StoreError) else meanings[answer]
                for answer in _some(said)
            ]
        except (KeyError, TypeError):
            raise self._nonsense() from None

    async def _ask_about(
        self,
        script: str,
        keys: Sequence[bytes],
        asked: Sequence[bytes] | None = None,
    ) -> tuple[list[Any], list[int]]:
        prefix = self._prefix
        names = [prefix + key for key in keys]
        return await self._decide(
            script, [b""] * len(keys) if asked is None else asked, names, list
        )

    async def _decide(
        self,
        script: str,
        items: Sequence[_Item],
        names: Sequence[bytes],
        write: Callable[[Sequence[_Item]], list[bytes]],
        *,
        sizes: Sequence[int] | None = None,
        copies: Copies | None = None,
    ) -> tuple[list[Any], list[int]]:
        """
        Run a script over all *items*, in as few pieces as may be.

        *sizes* tell how many of the *names* an item has, where that is not one each; *write*
        says what is asked. For each item, tell what the script says (a `StoreError` where it
        does not) and what time it was.
        """
        self._check_open()
        if len(names) <= _CHUNK and self._address.kind != "cluster" and items:
            ask = self._ask(script, 0, names, write(items))
            (answer,) = await self._answers([ask], copies)
            now, *said = self._checked(answer, len(items))
            return said, [now] * len(said)
        return await self._decide_in_pieces(script, items, _split(names, sizes), write, copies)

    async def _decide_in_pieces(
        self,
        script: str,
        items: Sequence[_Item],
        names: Sequence[Sequence[bytes]],
        write: Callable[[Sequence[_Item]], list[bytes]],
        copies: Copies | None,
    ) -> tuple[list[Any], list[int]]:
        said: list[Any] = [None] * len(items)
        times = [0] * len(items)
        pieces = self._pieces(names)
        while pieces:
            asks = []
            for slot, piece in pieces:
                theirs = [name for at in piece for name in names[at]]
                asks.append(self._ask(script, slot, theirs, write([items[at] for at in piece])))
            answers = await self._answers(asks, copies)
            moving: list[_Piece] = []
            for (slot, piece), answer in zip(pieces, answers, strict=True):
                if isinstance(answer, Moving) and len(piece) > 1:
                    moving += [(slot, [at]) for at in piece]
                    continue
                now, *each = self._checked(answer, len(piece))
                for at, one in zip(piece, each, strict=True):
                    said[at] = one
                    times[at] = now
            pieces = moving
        return said, times

    async def _answers(self, asks: Sequence[Ask], copies: Copies | None) -> list[Any]:
        try:
            return await self._servers.ask(asks, copies)
        except StoreError as error:
            return [error] * len(asks)

    def _checked(self, answer: Any, count: int) -> list[Any]:
        """Make sure that an answer is the time, and one for each question."""
        if isinstance(answer, StoreError):
            return [0, *[answer] * count]
        if (
            not isinstance(answer, list)
            or len(answer) != count + 1
            or not isinstance(answer[0], int)
        ):
            return [0, *[self._nonsense()] * count]
        if self._address.kind == "cluster":
            self._note_time(answer[0])
        return answer

    def _nonsense(self) -> StoreError:
        self._servers.distrust()
        return Nonsense()

    def _pieces(self, names: Sequence[Sequence[bytes]]) -> list[_Piece]:
        """Group what can be asked together, in pieces that do not block a server for long."""
        slots: dict[int, list[int]] = {}
        if self._address.kind == "cluster":
            for at, theirs in enumerate(names):
                slots.setdefault(self._servers.slot_of(theirs[0]), []).append(at)
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

    def _ask(self, name: str, slot: int, names: Sequence[bytes], asked: Sequence[bytes]) -> Ask:
        script = self._scripts[name]
        now = b"" if self._clock is None else b"%d" % self._clock()
        words: Words = (b"EVALSHA", script.sha, len(names), *names, now, *asked)
        return Ask(words, slot, len(names), script)

    def _note_time(self, now_ms: int) -> None:
        self._ahead_ms = now_ms - int(asyncio.get_running_loop().time() * 1000)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreError("the Redis store has been closed")

    # --- who is asked -------------------------------------------------------------------

    def unchecked(self) -> Servers:
        """Return the servers to somebody who looks at them as they are; he closes them."""
        return self._found(replace(self._dialer(), check=None))

    def sentinels(self) -> Sentinels | None:
        """Return those who know which server is the primary, where the address names them."""
        address, options = self._address, self._options
        if address.kind != "sentinel":
            return None
        watcher = replace(
            self._dialer(),
            login=fixed(options.sentinel_user or "", options.sentinel_password),
            login_every_s=None,
            db=0,
            check=None,
        )
        return Sentinels(watcher, address.hosts, address.service)

    def _login_of(self, credentials: Credentials | None) -> Login | None:
        address, options = self._address, self._options
        if credentials is None and options.iam_user is None:
            return fixed(address.user, address.password)
        if credentials is not None:
            if address.password is not None or options.iam_user is not None:
                raise ConfigError("", "credentials stand in place of a password and of iam_user")
            return asked(credentials)
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
        return asked(iam.login, iam.login_again)

    def _dialer(self) -> Dialer:
        address, options, every = self._address, self._options, self._login_every
        return Dialer(
            timeout_s=options.timeout.total_seconds(),
            connect_timeout_s=options.connect_timeout.total_seconds(),
            login=self._login,
            login_every_s=every.total_seconds() if every is not None else None,
            db=address.db,
            tls=self._context if address.is_tls else None,
            tls_name=options.tls_name,
            check=self._check,
        )

    def _found(self, dialer: Dialer) -> Servers:
        address, options = self._address, self._options
        if address.kind == "cluster":
            return Cluster(dialer, address.hosts, options.connections)
        if (sentinels := self.sentinels()) is not None:
            return OneServer(dialer, sentinels.primary, options.connections)
        where: Address = address.path or address.hosts[0]

        async def there() -> Address:
            return where

        return OneServer(dialer, there, options.connections)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                self._tls = tls_context(self._options)
            except ConfigError as error:
                raise Unfit(str(error)) from error
        return self._tls

    def _check(self, info: dict[str, str], address: Address) -> None:
        """Look at what a server says about itself, at every connection."""
        for fault in faults(info, is_cluster=self._address.kind == "cluster"):
            raise _FAULTS.get(fault.code, Unfit)(f"Redis at {shown(address)} {fault.text}")
        for doubt in doubts(info, replicas=self._options.wait_replicas):
            self._warn(f"oncebridge.redis_{doubt}", address)

    def _warn(self, what: str, address: Address) -> None:
        """Say it once for each server."""
        if (what, address) not in self._told:
            self._told.add((what, address))
            _log.warning(what, extra={"server": shown(address)})


def _one_by_one(write: Callable[[_Item], bytes]) -> Callable[[Sequence[_Item]], list[bytes]]:
    return lambda items: [write(item) for item in items]


def _split(names: Sequence[bytes], sizes: Sequence[int] | None) -> list[Sequence[bytes]]:
    """Return which names belong together."""
    if sizes is None:
        return [[name] for name in names]
    ends = list(accumulate(sizes))
    return [names[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _all(decided: tuple[list[Any], list[int]]) -> list[Any]:
    """Insist on an answer to everything."""
    said, _ = decided
    for answer in said:
        _answered(answer)
    return said


def _some(said: list[Any]) -> list[Any]:
    """Insist on an answer to something; that it is not safe yet is an answer too."""
    if said and all(isinstance(a, StoreError) and type(a) is not TooFewCopies for a in said):
        raise next((a for a in said if not isinstance(a, StoreUnavailable)), said[0])
    return said


def _answered(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer


def _sum(name: str, infos: Sequence[Mapping[str, str]]) -> int | None:
    """Add a number up; None where one of the servers does not tell it."""
    numbers = [info.get(name, "") for info in infos]
    return sum(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def _claim_answer(want: Want, said: Any, now_ms: int) -> ClaimAnswer:
    try:
        return scripts.claim_answer(want, _answered(said), now_ms)
    except StoreError as error:
        return NoAnswer(str(error))


async def _or_no_answer(
    claims: Coroutine[Any, Any, list[ClaimAnswer]], count: int
) -> list[ClaimAnswer]:
    try:
        return await claims
    except StoreError as error:
        return [NoAnswer(str(error))] * count
