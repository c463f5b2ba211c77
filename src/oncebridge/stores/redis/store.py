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
from itertools import accumulate, islice
from typing import Any, ClassVar, Final, Self, TypeVar

from msgspec.structs import replace

from oncebridge.base.clock import Clock, ms
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.stores.api import (
    HELD,
    ClaimAnswer,
    ClaimAnswers,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extensions,
    Memories,
    NoAnswer,
    Portable,
    Record,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
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
    Login,
    NotPrimary,
    ServerAddress,
    UnusableServer,
    address_text,
    fixed_login,
    login_with,
)
from oncebridge.stores.redis.options import RedisOptions, check, tls_context
from oncebridge.stores.redis.scripts import Batch, KeyBatch, claim_answer, encode
from oncebridge.stores.redis.servers import (
    Cluster,
    OneServer,
    RedisRequest,
    ReplicaWait,
    Sentinels,
    Servers,
    SlotMoving,
    TooFewReplicas,
    slot_of,
)

_log = logging.getLogger("oncebridge")

_Answer = TypeVar("_Answer")
_Piece = tuple[int, Sequence[int]]
"""A slot, and the positions of its items that go into one script."""
_Unusual = dict[int, Any]
"""Outcomes of a script that are not the usual one, by position; a `StoreError` if it did not run."""

_CHUNK: Final = 200
"""Records per script. One takes about 3 µs, so other clients wait for 0.6 ms at most."""
_CONFIRMED: Final = ("commit", "remember", "load")
"""The scripts whose writes count only when enough replicas have them."""
_FAULTS: Final[Mapping[str, type[StoreError]]] = {
    "loading": StoreUnavailable,
    "replica": NotPrimary,
}
"""Faults that pass by themselves; an operator has to fix all others."""

_FENCED: Final[Mapping[int, Any]] = {0: Reply.FENCED}
_COMMITS: Final[Mapping[int, CommitAnswer]] = {0: Reply.FENCED, 2: Reply.ALREADY}
_KNOWN: Final[Mapping[int, RememberAnswer]] = {0: Reply.KNOWN}


class RedisStore(Portable):
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
        self.address: Final = RedisAddress.parse(url)
        self.options: Final = options
        check(options, self.address)
        self._clock = clock
        self._close_login: Callable[[], None] = lambda: None
        if login_every is not None and login_every <= timedelta(0):
            raise ConfigError("", "login_every must be more than 0")
        self._login_every = login_every
        self._login = self._login_of(credentials)
        self._prefix = options.prefix.encode() + b":"
        self._scripts = scripts.read_scripts()
        self._copies: ReplicaWait | None = None
        if options.wait_replicas:
            self._copies = ReplicaWait(options.wait_replicas, ms(options.wait_timeout))
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

    async def open(self) -> None:
        self._check_open()
        if self.address.is_tls:
            self._tls = tls_context(self.options)
        try:
            await self._servers.open(self._scripts.values())
            await self._check_form()  # finds missing permissions as well
        except NotPrimary as error:
            if self.address.kind in ("sentinel", "cluster"):
                raise  # a failover is under way
            raise ConfigError("", f"{error}; use the address of the primary") from error
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise ConfigError("", str(error)) from error

    async def _check_form(self) -> None:
        """Check that this version can read the records; a new store notes their form."""
        form = KeyBatch([scripts.FORM_KEY], terms=b"%d" % scripts.FORM)
        kept = (await self._run_for_all("form", form)).get(0, b"%d" % scripts.FORM)
        if not isinstance(kept, bytes):
            raise self._servers.invalid_reply()
        if not kept.isdigit() or int(kept) > scripts.FORM:
            raise StoreError(
                f"the records with prefix {self.options.prefix!r} were written by a newer version of "
                f"oncebridge (form {kept[:20].decode(errors='replace')}, this version knows "
                f"{scripts.FORM}); upgrade this worker, or give it another prefix"
            )

    async def claim(self, wants: Wants) -> ClaimAnswers:
        across = self._across_slots(wants)
        if not across:
            return await self._claim(wants)
        together = sorted(set(range(len(wants))).difference(across))
        several, single = wants.select(across), wants.select(together)
        found = await asyncio.gather(
            _or_no_answer(self._claim_across_slots(several), several),
            _or_no_answer(self._claim(single), single),
        )
        each: list[ClaimAnswer | int] = [HELD] * len(wants)
        for places, answers in zip((across, together), found, strict=True):
            for at, answer in zip(places, answers.each, strict=True):
                each[at] = answer
        return ClaimAnswers(wants, each, max(answers.now_ms for answers in found))

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        return await self._each("commit", commits, Reply.COMMITTED, _COMMITS)

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return await self._each("release", releases, Reply.RELEASED, _FENCED)

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return await self._each("extend", extensions, Reply.EXTENDED, _FENCED)

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return await self._each("remember", memories, Reply.REMEMBERED, _KNOWN)

    async def load(self, records: Sequence[Record]) -> list[RememberAnswer]:
        named = KeyBatch([one.key for one in records], [*map(scripts.encode_load, records)])
        return await self._each("load", named, Reply.REMEMBERED, _KNOWN)

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        unusual = await self._run_for_all("look", KeyBatch([*keys]))
        return [
            scripts.decode_record(key, unusual[at]) if at in unusual else None
            for at, key in enumerate(keys)
        ]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        unusual = await self._run_for_all("forget", KeyBatch([*keys]))
        return [at not in unusual for at in range(len(keys))]

    async def purge(self, limit: int = 1000) -> int:  # noqa: ARG002 - Redis does it by itself
        """Do nothing: Redis removes expired records."""
        return 0

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        cursor, _, server = place.partition(b" ")
        self._check_open()
        servers = [*await self._servers.nodes()]
        server = server or servers[0]
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        command = (b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", limit)
        match await self._servers.ask_server(server, command):
            case [bytes(after), list(names)]:
                keys = [name[len(self._prefix) :] for name in dict.fromkeys(names)]
                keys = [key for key in keys if key != scripts.FORM_KEY]
            case _:
                raise self._servers.invalid_reply()
        records = [record for record in await self.peek(keys) if record is not None]
        if after != b"0":
            return records, after + b" " + server
        further = [other for other in servers if other > server]
        return records, b"0 " + further[0] if further else b""

    async def now_ms(self) -> int:
        if self._clock is not None:
            return self._clock()
        self._check_open()
        first, *_ = await self._servers.nodes()
        now = await self._servers.time_ms(first)
        self._note_time(now)
        return now

    async def health(self) -> Mapping[str, int | None]:
        """
        Return how much memory the servers use, and how many keys they have evicted, in total.

        Both include other users of the servers. The number of our records is not known without
        reading every key.
        """
        self._check_open()
        infos = await asyncio.gather(*map(self._servers.info, await self._servers.nodes()))
        return {"bytes": _sum("used_memory", infos), "evicted": _sum("evicted_keys", infos)}

    async def aclose(self) -> None:
        self._is_closed = True
        self._close_login()
        await self._servers.aclose()

    # --- claims -------------------------------------------------------------------------

    async def _claim(self, wants: Wants) -> ClaimAnswers:
        unusual, times = await self._run("claim", wants)
        now_ms = max(times, default=0)
        each = self._answers(
            [HELD] * len(wants), unusual, lambda at, one: claim_answer(wants, at, one, now_ms)
        )
        return ClaimAnswers(wants, each, now_ms)

    def _across_slots(self, wants: Wants) -> list[int]:
        """Return the positions of wants whose parts are in different slots."""
        if self.address.kind != "cluster" or wants.sizes is None:
            return []
        slots = iter([slot_of(self._prefix + key) for key in wants.keys])
        return [at for at, size in enumerate(wants.sizes) if len({*islice(slots, size)}) > 1]

    async def _claim_across_slots(self, wants: Wants) -> ClaimAnswers:
        if self._clock is None and self._ahead_ms is None:
            await self.now_ms()
        time_s, ahead = asyncio.get_running_loop().time, self._ahead_ms or 0
        clock = self._clock or (lambda: int(time_s() * 1000) + ahead)
        return await ConditionalStore(ClusterBackend(self._run, clock)).claim(wants)

    # --- running scripts ----------------------------------------------------------------

    async def _each(
        self, script: str, batch: Batch, usual: _Answer, meanings: Mapping[int, _Answer]
    ) -> list[_Answer | NoAnswer]:
        """Run a script, and return *usual* for each item, or what another outcome means."""
        unusual, _ = await self._run(script, batch)
        answers: list[_Answer | NoAnswer] = [usual] * len(batch)
        return self._answers(answers, unusual, lambda _, one: meanings[one])

    def _answers(
        self, answers: list[Any], unusual: _Unusual, meaning: Callable[[int, Any], Any]
    ) -> list[Any]:
        """Return *answers* with the meanings of unusual outcomes; raise if no item has any."""
        _require_some(unusual, len(answers))
        for at, one in unusual.items():
            try:
                answers[at] = meaning(at, _or_raise(one))
            except StoreError as error:
                answers[at] = NoAnswer(str(error))
            except (IndexError, KeyError, TypeError, ValueError):
                raise self._servers.invalid_reply() from None
        return answers

    async def _run_for_all(self, script: str, batch: Batch) -> _Unusual:
        """Run a script; raise if it did not run for each item."""
        unusual, _ = await self._run(script, batch)
        return {at: _or_raise(one) for at, one in unusual.items()}

    async def _run(self, script: str, batch: Batch) -> tuple[_Unusual, list[int]]:
        """
        Run a script over *batch*, in as few pieces as possible.

        Return the outcomes that are not usual, and the time of the server of each item: 0 where it
        did not run.
        """
        self._check_open()
        unusual: _Unusual = {}
        times = [0] * len(batch)
        pieces = self._pieces(batch)
        replicas = self._copies if script in _CONFIRMED else None
        while pieces:
            requests = [self._request(script, slot, batch, piece) for slot, piece in pieces]
            replies: list[Any]
            try:
                replies = await self._servers.ask(requests, replicas)
            except StoreError as error:
                replies = [error] * len(requests)
            moving: list[_Piece] = []
            for (slot, piece), request, reply in zip(pieces, requests, replies, strict=True):
                if _fits(reply, request, piece):
                    for at in piece:
                        times[at] = reply[0]
                    for at, outcome in zip(reply[2::2], reply[3::2], strict=True):
                        unusual[piece[at - 1]] = outcome
                elif isinstance(reply, SlotMoving) and len(piece) > 1:
                    moving += [(slot, [at]) for at in piece]
                else:
                    problem = (
                        reply if isinstance(reply, StoreError) else self._servers.invalid_reply()
                    )
                    unusual.update(dict.fromkeys(piece, problem))
            pieces = moving
        if self.address.kind == "cluster" and any(times):
            self._note_time(max(times))
        return unusual, times

    def _pieces(self, batch: Batch) -> list[_Piece]:
        """Group items by slot, in pieces that do not block a server for long."""
        is_cluster = self.address.kind == "cluster"
        if len(batch.keys) <= _CHUNK and not is_cluster:
            return [(0, range(len(batch)))] if batch.keys else []
        sizes = batch.sizes if isinstance(batch, Wants) else None
        sizes = sizes or [1] * len(batch)
        pieces: list[_Piece] = []
        latest: dict[int, list[int]] = {}
        room: dict[int, int] = {}
        for at, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True)):
            slot = slot_of(self._prefix + batch.keys[end - size]) if is_cluster else 0
            if room.get(slot, 0) < size:
                latest[slot], room[slot] = [], _CHUNK
                pieces.append((slot, latest[slot]))
            latest[slot].append(at)
            room[slot] -= size
        return pieces

    def _request(self, name: str, slot: int, batch: Batch, piece: Sequence[int]) -> RedisRequest:
        script, prefix = self._scripts[name], self._prefix
        batch = batch if len(piece) == len(batch) else batch.select(piece)
        names = [prefix + key for key in batch.keys]
        terms, own = encode(batch)
        now = b"" if self._clock is None else b"%d" % self._clock()
        command: Command = (b"EVALSHA", script.sha, len(names), *names, now, terms, *own)
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
        address, options = self.address, self.options
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
        address, options = self.address, self.options
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
        address, options, every = self.address, self.options, self._login_every
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
        address, options = self.address, self.options
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
                self._tls = tls_context(self.options)
            except ConfigError as error:
                raise UnusableServer(str(error)) from error
        return self._tls

    def _check(self, info: dict[str, str], address: ServerAddress) -> None:
        """Check the INFO of a server, for every connection."""
        for fault in faults(info, is_cluster=self.address.kind == "cluster"):
            raise _FAULTS.get(fault.code, UnusableServer)(
                f"Redis at {address_text(address)} {fault.text}"
            )
        for doubt in doubts(info, replicas=self.options.wait_replicas):
            what = f"oncebridge.redis_{doubt}"
            if (what, address) not in self._warned:  # once for each server
                self._warned.add((what, address))
                _log.warning(what, extra={"server": address_text(address)})


def _fits(reply: Any, request: RedisRequest, items: Sequence[int]) -> bool:
    """Return True if it is the reply of a script: a time, the number of names, and outcomes."""
    return (
        isinstance(reply, list)
        and len(reply) % 2 == 0
        and reply[1:2] == [request.names]
        and isinstance(reply[0], int)
        and all(isinstance(at, int) and 0 < at <= len(items) for at in reply[2::2])
    )


def _require_some(unusual: _Unusual, count: int) -> None:
    """Raise if a script ran for none of *count* items. `TooFewReplicas` counts as run."""
    if 0 < count == len(unusual) and all(
        isinstance(one, StoreError) and type(one) is not TooFewReplicas for one in unusual.values()
    ):
        errors = list(unusual.values())
        raise next((one for one in errors if not isinstance(one, StoreUnavailable)), errors[0])


def _or_raise(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer


def _sum(name: str, infos: Sequence[Mapping[str, str]]) -> int | None:
    """Return the sum of a number; None if a server does not report it."""
    numbers = [info.get(name, "") for info in infos]
    return sum(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


async def _or_no_answer(claims: Coroutine[Any, Any, ClaimAnswers], wants: Wants) -> ClaimAnswers:
    try:
        return await claims
    except StoreError as error:
        return ClaimAnswers(wants, [NoAnswer(str(error))] * len(wants), 0)
