"""
Which server gets a request: the only one, the one that Sentinel names, or the owner of the slot.

A request is a list of `RedisRequest`s, each about names of one slot. It is answered by a list as long,
in order; what could not be answered is a `StoreError` in its place.
"""

import asyncio
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from hiredis import ReplyError
from msgspec import Struct
from msgspec.structs import replace

from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.stores.redis.connection import (
    Command,
    Connection,
    Dialer,
    InvalidReply,
    Node,
    NotPrimary,
    ServerAddress,
    SharedTask,
    UnusableServer,
    address_text,
    error_of,
    parse_info,
)
from oncebridge.stores.redis.scripts import Script

_REDIRECTIONS: Final = 5
"""How often to follow a slot that moves."""
_LEARN_EVERY_S: Final = 0.25
"""While a server of the cluster is unavailable, how often to ask which one has its slots."""


class RedisRequest(Struct, frozen=True, gc=False):
    """One command, and the slot of its keys."""

    command: Command
    slot: int = 0
    names: int = 1
    script: Script | None = None
    """The script that the command runs, if any."""


class ReplicaWait(Struct, frozen=True):
    """How many replicas must confirm a write, and how long to wait for them."""

    count: int
    within_ms: int


class TooFewReplicas(StoreUnavailable):
    """The primary has written it, but too few replicas have confirmed it."""


class SlotMoving(StoreUnavailable):
    """The slot is moving to another server; requests must have one key each meanwhile."""


class Servers(ABC):
    """The servers that keep our records."""

    _nodes: dict[Any, Node]

    async def open(self, scripts: Iterable[Script]) -> None:
        """Connect to every server, check it, and load the scripts."""
        nodes = await self.nodes()
        await asyncio.gather(*[load_scripts(node, scripts) for node in nodes.values()])

    @abstractmethod
    async def nodes(self) -> dict[bytes, Node]:
        """Return the servers by name, in the order of the names."""

    @abstractmethod
    async def ask(
        self, requests: Sequence[RedisRequest], replicas: ReplicaWait | None = None
    ) -> list[Any]:
        """Send all requests at once; a write counts only if *replicas* confirm it."""

    @abstractmethod
    def _failed(self, problem: StoreError) -> StoreError:
        """Note why a request failed, and return it."""

    def _checked(self, answer: Any) -> Any:
        return self._failed(error_of(answer)) if isinstance(answer, ReplyError) else answer

    async def ask_server(self, name: bytes, command: Command) -> Any:
        """Send a command to one server."""
        node = (await self.nodes()).get(name)
        if node is None:
            raise StoreError(
                f"Redis: {name.decode()} is not a primary any more; start the scan again"
            )
        try:
            (answer,) = await send_requests(node, [RedisRequest(command)])
        except StoreError as error:
            self._failed(error)
            raise
        if isinstance(answer, ReplyError):
            raise self._failed(error_of(answer))
        return answer

    async def info(self, name: bytes) -> dict[str, str]:
        """Return the INFO of one server."""
        answer = await self.ask_server(name, (b"INFO",))
        if not isinstance(answer, bytes):
            raise self.invalid_reply()
        return parse_info(answer)

    async def time_ms(self, name: bytes) -> int:
        """Return the time of one server."""
        match await self.ask_server(name, (b"TIME",)):
            case [bytes(seconds), bytes(micros)] if seconds.isdigit() and micros.isdigit():
                return int(seconds) * 1000 + int(micros) // 1000
        raise self.invalid_reply()

    def invalid_reply(self) -> StoreError:
        """Close all connections, as none may be in step with its replies; return the error."""
        self.drop_connections()
        return InvalidReply()

    def drop_connections(self) -> None:
        for node in self._nodes.values():
            node.drop()

    def _close(self) -> list[asyncio.Future[None]]:
        return [ending for node in self._nodes.values() for ending in node.close()]

    async def aclose(self) -> None:
        """Close all connections, and wait until they are closed."""
        if ending := self._close():
            await asyncio.wait(ending, timeout=1)


class OneServer(Servers):
    """The server that *locate* returns; it is called for each connection."""

    def __init__(
        self, dialer: Dialer, locate: Callable[[], Awaitable[ServerAddress]], connections: int
    ) -> None:
        async def dial() -> Connection:
            return await dialer.connect(await locate())

        self._node = Node(dial, connections)
        self._nodes = {b"0": self._node}

    async def nodes(self) -> dict[bytes, Node]:
        return self._nodes

    async def ask(
        self, requests: Sequence[RedisRequest], replicas: ReplicaWait | None = None
    ) -> list[Any]:
        return [*map(self._checked, await send_requests(self._node, requests, replicas))]

    def _failed(self, problem: StoreError) -> StoreError:
        if isinstance(problem, NotPrimary):
            self._node.drop()
        return problem


async def send_requests(
    node: Node,
    requests: Sequence[RedisRequest],
    replicas: ReplicaWait | None = None,
    *,
    asking: bool = False,
    may_load: bool = True,
) -> list[Any]:
    """
    Send requests to one server, with ASKING before each if *asking*, and WAIT after all of them.

    Scripts that the server does not have are loaded once.
    """
    commands = [ask.command for ask in requests]
    if asking:  # applies to the next command only
        commands = [command for ask in requests for command in ((b"ASKING",), ask.command)]
    if replicas is not None:
        commands.append((b"WAIT", replicas.count, replicas.within_ms))
    answers = await node.ask(commands)
    problem = None if replicas is None else _shortage(answers.pop(), replicas)
    if problem is not None:
        answers = [a if isinstance(a, ReplyError) else problem for a in answers]
    answers = answers[1::2] if asking else answers
    refused = [answer for answer in answers if isinstance(answer, ReplyError)]
    if not refused:
        return answers
    if any(_begins(answer, "NOAUTH") for answer in refused):
        node.drop()  # the next connection logs in again
    unknown = [at for at, answer in enumerate(answers) if _begins(answer, "NOSCRIPT")]
    if unknown and may_load:
        left = [requests[at] for at in unknown]
        await load_scripts(node, {ask.script for ask in left if ask.script is not None})
        again = await send_requests(node, left, replicas, asking=asking, may_load=False)
        for at, answer in zip(unknown, again, strict=True):
            answers[at] = answer
    return answers


async def load_scripts(node: Node, scripts: Iterable[Script]) -> None:
    """Load scripts into a server, so that EVALSHA finds them."""
    loaded = list(scripts)
    answers = await node.ask([(b"SCRIPT", b"LOAD", script.source) for script in loaded])
    for script, answer in zip(loaded, answers, strict=True):
        if isinstance(answer, ReplyError):
            raise error_of(answer)
        if answer != script.sha:
            node.drop()
            raise InvalidReply


def _shortage(made: Any, replicas: ReplicaWait) -> StoreError | None:
    """Return the error if WAIT was not answered with enough replicas."""
    if isinstance(made, ReplyError):
        return error_of(made)
    if not isinstance(made, int):
        return InvalidReply()
    if made < replicas.count:
        return TooFewReplicas(f"Redis: only {made} of {replicas.count} replicas have it yet")
    return None


def _begins(answer: Any, *codes: str) -> bool:
    return isinstance(answer, ReplyError) and str(answer).startswith(codes)


# --- Sentinel ---------------------------------------------------------------------------


class Sentinels:
    """The Sentinels, which know the primary of *service*."""

    def __init__(self, dialer: Dialer, addresses: Sequence[ServerAddress], service: str) -> None:
        self._dialer = dialer
        self._addresses = list(addresses)
        self._service = service

    async def primary(self) -> ServerAddress:
        """Return the primary, by the first Sentinel that knows it."""
        try:
            async with asyncio.timeout(self._dialer.timeout_s):
                return await self._ask_sentinels()
        except TimeoutError:
            raise StoreUnavailable(
                "Redis Sentinel: no Sentinel has named the primary in time"
            ) from None

    async def _ask_sentinels(self) -> ServerAddress:
        problems = []
        for address in list(self._addresses):
            try:
                answer = await self._ask(address, b"GET-MASTER-ADDR-BY-NAME")
                if answer is not None:
                    found = answer[0].decode(), int(answer[1])
                    self._addresses.sort(key=address.__ne__)  # it is asked first from now on
                    return found
                problem = f"{address_text(address)} does not know the service {self._service!r}"
            except StoreError as error:
                problem = str(error)
            except (AttributeError, IndexError, TypeError, ValueError):
                problem = str(InvalidReply())
            problems.append(problem)
        raise StoreUnavailable(f"Redis Sentinel names no primary: {'; '.join(problems)}")

    async def refusals(self) -> dict[str, StoreError]:
        """Return the Sentinels that could not agree on a failover now, and why."""
        why = await asyncio.gather(*map(self._refusal, self._addresses))
        refused = zip(map(address_text, self._addresses), why, strict=True)
        return {address: error for address, error in refused if error is not None}

    async def _refusal(self, address: ServerAddress) -> StoreError | None:
        try:
            await self._ask(address, b"CKQUORUM")
        except StoreError as error:
            return error
        return None

    async def _ask(self, address: ServerAddress, what: bytes) -> Any:
        command = (b"SENTINEL", what, self._service.encode())
        answer = await self._dialer.ask_once(address, command)
        if isinstance(answer, ReplyError):
            raise error_of(answer)
        return answer


# --- Cluster ----------------------------------------------------------------------------


def slot_of(name: bytes) -> int:
    """Return the slot of a key: by the text in its first braces, if there is any."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return crc_hqx(name, 0) % 16384


_Host = tuple[str, int]
_Target = tuple[_Host | None, bool]
"""The server for a request, and whether only for this request, as its slot is moving there."""


class Cluster(Servers):
    """The primaries of a cluster that one of the *seeds* belongs to."""

    def __init__(self, dialer: Dialer, seeds: Sequence[_Host], connections: int) -> None:
        self._dialer = dialer
        self._seeds = seeds
        self._connections = connections
        self._nodes: dict[_Host, Node] = {}
        self._owners: dict[int, _Host] = {}
        self._primaries: list[_Host] = []
        self._last_described_by: _Host | None = None
        """The server that described the cluster last; asked first."""
        self._is_outdated = True
        self._learn_from = 0.0
        self._learning = SharedTask(self._fetch_topology)

    async def nodes(self) -> dict[bytes, Node]:
        await self._learn()
        return {address_text(one).encode(): self._node(one) for one in self._primaries}

    async def ask(
        self, requests: Sequence[RedisRequest], replicas: ReplicaWait | None = None
    ) -> list[Any]:
        await self._learn()
        answers: list[Any] = [None] * len(requests)
        targets: dict[int, _Target] = {
            at: (self._owners.get(ask.slot), False) for at, ask in enumerate(requests)
        }
        for _ in range(_REDIRECTIONS):
            plan: dict[_Target, list[int]] = {}
            for at, target in targets.items():
                plan.setdefault(target, []).append(at)
            asking = [
                self._ask_there(target, [requests[at] for at in places], replicas)
                for target, places in plan.items()
            ]
            replies = [await asking[0]] if len(asking) == 1 else await asyncio.gather(*asking)
            targets = {}
            for target, answered in zip(plan, replies, strict=True):
                for at, answer in zip(plan[target], answered, strict=True):
                    answers[at] = answer
                    if _begins(answer, "MOVED ", "ASK ", "TRYAGAIN "):
                        further = self._redirection(answer, requests[at], target)
                        if isinstance(further, StoreError):
                            answers[at] = further
                        else:
                            targets[at] = further
            if not targets:
                break
        return [*map(self._checked, answers)]

    async def _ask_there(
        self, target: _Target, requests: Sequence[RedisRequest], replicas: ReplicaWait | None
    ) -> list[Any]:
        """Send requests to one server; return the error for each if it does not answer."""
        host, is_once = target
        try:
            if host is None:
                raise StoreUnavailable("Redis: no server of the cluster has the slot")
            return await send_requests(self._node(host), requests, replicas, asking=is_once)
        except StoreError as error:
            return [self._failed(error)] * len(requests)

    def _redirection(
        self, said: ReplyError, ask: RedisRequest, asked: _Target
    ) -> _Target | StoreError:
        """Return the server to ask next, or the error if there is none."""
        kind, *rest = str(said).split()
        if kind != "MOVED" and ask.names > 1:
            # Some keys are on this server and some on the other, or will be soon.
            return SlotMoving("Redis: the slot is moving to another server")
        if kind == "TRYAGAIN":
            return error_of(said)
        # `MOVED 3999 127.0.0.1:6381`; without a host, it is the one that replied.
        host, _, port = rest[-1].rpartition(":")
        if not port.isdecimal():
            return InvalidReply()
        there = (host or (asked[0] or ("", 0))[0], int(port))
        if kind == "MOVED":
            self._is_outdated = True
            self._owners[ask.slot] = there
        return there, kind == "ASK"

    def _failed(self, problem: StoreError) -> StoreError:
        if isinstance(problem, StoreUnavailable | UnusableServer):
            self._is_outdated = True
        return problem

    def _close(self) -> list[asyncio.Future[None]]:
        return [*self._learning.close(), *super()._close()]

    # --- which server has which slots ---------------------------------------------------

    def _node(self, address: _Host) -> Node:
        node = self._nodes.get(address)
        if node is None:
            dial = partial(self._dialer.connect, address)
            node = self._nodes[address] = Node(dial, self._connections)
        return node

    async def _learn(self) -> None:
        """Find out which server has which slots, if need be; all callers share one attempt."""
        is_early = asyncio.get_running_loop().time() < self._learn_from
        if not self._is_outdated or (is_early and self._owners):
            return
        try:
            async with asyncio.timeout(self._dialer.timeout_s):  # the task goes on
                await self._learning.wait()
        except TimeoutError:
            raise StoreUnavailable("Redis: no server has described the cluster in time") from None

    async def _fetch_topology(self) -> None:
        first = [self._last_described_by] if self._last_described_by else []
        problems: list[StoreError] = []
        for address in dict.fromkeys([*first, *self._primaries, *self._seeds]):
            try:
                self._note(await self._fetch_slots(address), address)
            except StoreError as error:
                problems.append(error)
            except (AttributeError, TypeError, ValueError):
                problems.append(InvalidReply())
            else:
                return
        lasting = [p for p in problems if not isinstance(p, StoreUnavailable)]
        raise (lasting or problems)[0]

    async def _fetch_slots(self, address: _Host) -> list[Any]:
        # A replica may be asked too, so this connection is not checked.
        answer = await replace(self._dialer, check=None).ask_once(address, (b"CLUSTER", b"SLOTS"))
        if isinstance(answer, ReplyError):
            raise UnusableServer(
                f"Redis at {address_text(address)} is not a cluster that can be used: {answer}; "
                "for a single server write redis:// or rediss://"
            )
        if not answer:
            raise StoreUnavailable(f"Redis at {address_text(address)}: no server has any slots yet")
        if not isinstance(answer, list):
            raise InvalidReply
        return answer

    def _note(self, ranges: list[Any], asked: _Host) -> None:
        owners: dict[int, _Host] = {}
        for first, last, (host, port, *_), *_ in ranges:
            # A node that does not know its own name is known by the one we used.
            named = host.decode() if host and host != b"?" else asked[0]
            owners.update(dict.fromkeys(range(first, last + 1), (named, port)))
        self._owners = owners
        self._primaries = sorted(set(owners.values()), key=address_text)
        self._last_described_by = asked
        self._is_outdated = len(owners) < 16384
        self._learn_from = asyncio.get_running_loop().time() + _LEARN_EVERY_S
        for gone in self._nodes.keys() - owners.values():
            self._nodes.pop(gone).close()
