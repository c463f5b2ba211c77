"""
Which server is asked: the only one, the one that Sentinel names, or the one that has the slot.

A request is a list of `RedisRequest`s, each about names of one slot. It is answered by a list as long,
in order; what could not be answered is a `StoreError` in its place.
"""

import asyncio
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

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
    UnusableServer,
    address_text,
    error_of,
    wait_for_shared,
)
from oncebridge.stores.redis.scripts import Script

_REDIRECTIONS: Final = 5
"""How often to follow a slot that moves."""
_LEARN_EVERY_S: Final = 0.25
"""While a server of the cluster is away, how often to ask who has its slots now."""


class RedisRequest(Struct, frozen=True, gc=False):
    """One command, and the slot that its names are in."""

    command: Command
    slot: int = 0
    names: int = 1
    script: Script | None = None
    """What the command runs, if the server has to be told."""


class ReplicaWait(Struct, frozen=True):
    """How many replicas must have what was written, and how long to wait for them."""

    count: int
    within_ms: int


class TooFewReplicas(StoreUnavailable):
    """It is written, but not on as many servers as it should be."""


class SlotMoving(StoreUnavailable):
    """The slot is on its way to another server, and its keys have to be asked for one by one."""


class Servers(Protocol):
    """All servers that keep our records."""

    def slot_of(self, name: bytes) -> int:
        """Return which names can be asked for together: those of one slot."""
        ...

    async def open(self, scripts: Iterable[Script]) -> None:
        """Connect to every server, which checks it, and load_scripts it the scripts."""
        ...

    async def ask(
        self, requests: Sequence[RedisRequest], replicas: ReplicaWait | None = None
    ) -> list[Any]:
        """RedisRequest, all at once; what was written counts only if *replicas* of it are made."""
        ...

    def drop_connections(self) -> None:
        """Close all connections, as an answer made no sense."""
        ...

    async def places(self) -> list[bytes]:
        """Name the servers in a fixed order, for those who look at all there is."""
        ...

    async def ask_server(self, place: bytes, command: Command) -> Any:
        """RedisRequest one of them."""
        ...

    async def aclose(self) -> None: ...


class OneServer:
    """The server that *locate* tells, asked anew for each connection."""

    def __init__(
        self, dialer: Dialer, locate: Callable[[], Awaitable[ServerAddress]], connections: int
    ) -> None:
        self._dialer = dialer
        self._locate = locate
        self._node = Node(self._dial, connections)

    async def _dial(self) -> Connection:
        return await self._dialer.connect(await self._locate())

    def slot_of(self, name: bytes) -> int:  # noqa: ARG002 - there is only one place
        return 0

    async def open(self, scripts: Iterable[Script]) -> None:
        await load_scripts(self._node, scripts)

    async def ask(
        self, requests: Sequence[RedisRequest], replicas: ReplicaWait | None = None
    ) -> list[Any]:
        answers = await send_requests(self._node, requests, replicas)
        for at, answer in enumerate(answers):
            if isinstance(answer, ReplyError):
                answers[at] = problem = error_of(answer)
                if isinstance(problem, NotPrimary):
                    self._node.drop()
        return answers

    def drop_connections(self) -> None:
        self._node.drop()

    async def places(self) -> list[bytes]:
        return [b"0"]

    async def ask_server(self, place: bytes, command: Command) -> Any:  # noqa: ARG002 - there is only one
        return (await self.ask([RedisRequest(command)]))[0]

    async def aclose(self) -> None:
        await self._node.aclose()


async def send_requests(
    node: Node,
    requests: Sequence[RedisRequest],
    replicas: ReplicaWait | None,
    *,
    asking: bool = False,
) -> list[Any]:
    """RedisRequest one server, and load_scripts it the scripts that it does not know."""
    answers = await _send(node, requests, replicas, asking=asking)
    if any(_begins(answer, "NOAUTH") for answer in answers):
        node.drop()  # the next connection logs in anew
    unknown = [at for at, answer in enumerate(answers) if _begins(answer, "NOSCRIPT")]
    if unknown:
        await load_scripts(
            node, {script for at in unknown if (script := requests[at].script) is not None}
        )
        again = await _send(node, [requests[at] for at in unknown], replicas, asking=asking)
        for at, answer in zip(unknown, again, strict=True):
            answers[at] = answer
    return answers


async def load_scripts(node: Node, scripts: Iterable[Script]) -> None:
    """Tell a server scripts, so that it knows them by their names."""
    told = list(scripts)
    answers = await node.ask([(b"SCRIPT", b"LOAD", script.source) for script in told])
    for script, answer in zip(told, answers, strict=True):
        if isinstance(answer, ReplyError):
            raise error_of(answer)
        if answer != script.sha:
            node.drop()
            raise InvalidReply


def _send(
    node: Node, requests: Sequence[RedisRequest], replicas: ReplicaWait | None, *, asking: bool
) -> Awaitable[list[Any]]:
    if replicas is None and not asking:
        return node.ask([ask.command for ask in requests])
    return _send_with_more(node, requests, replicas, asking=asking)


async def _send_with_more(
    node: Node, requests: Sequence[RedisRequest], replicas: ReplicaWait | None, *, asking: bool
) -> list[Any]:
    """Put before each what lets it through, and after all what waits for replicas."""
    commands = [ask.command for ask in requests]
    if asking:  # it is for the next command only
        commands = [command for ask in requests for command in ((b"ASKING",), ask.command)]
    if replicas is None:
        answers = await node.ask(commands)
        return answers[1::2] if asking else answers
    *answers, made = await node.ask([*commands, (b"WAIT", replicas.count, replicas.within_ms)])
    problem: StoreError | None = None
    if isinstance(made, ReplyError):
        problem = error_of(made)
    elif not isinstance(made, int):
        problem = InvalidReply()
    elif made < replicas.count:
        problem = TooFewReplicas(f"Redis: only {made} of {replicas.count} replicas have it yet")
    if problem is not None:
        answers = [a if isinstance(a, ReplyError) else problem for a in answers]
    return answers[1::2] if asking else answers


def _begins(answer: Any, *codes: str) -> bool:
    return isinstance(answer, ReplyError) and str(answer).startswith(codes)


# --- Sentinel ---------------------------------------------------------------------------


class Sentinels:
    """Those who know which server is the primary of *service*."""

    def __init__(self, dialer: Dialer, addresses: Sequence[ServerAddress], service: str) -> None:
        self._dialer = dialer
        self._addresses = list(addresses)
        self._service = service

    async def primary(self) -> ServerAddress:
        """RedisRequest one after the other; the first that knows decides."""
        try:
            async with asyncio.timeout(self._dialer.timeout_s):
                return await self._first_told()
        except TimeoutError:
            raise StoreUnavailable("Redis Sentinel: nobody has told the primary in time") from None

    async def _first_told(self) -> ServerAddress:
        problems = []
        for address in list(self._addresses):
            try:
                found = await self._ask(address)
            except StoreError as error:
                problems.append(str(error))
                continue
            if found is not None:
                self._addresses.remove(address)  # it is asked first from now on
                self._addresses.insert(0, address)
                return found
            problems.append(f"{address_text(address)} knows of no {self._service!r}")
        raise StoreUnavailable(f"Redis Sentinel names no primary: {'; '.join(problems)}")

    async def refusals(self) -> dict[str, StoreError]:
        """RedisRequest each whether a failover could be agreed on; load_scripts who does not say yes, and why."""
        command = (b"SENTINEL", b"CKQUORUM", self._service.encode())
        asked = [self._ask_one(address, command) for address in self._addresses]
        told = await asyncio.gather(*asked, return_exceptions=True)
        found = {}
        for address, answer in zip(self._addresses, told, strict=True):
            if isinstance(answer, StoreError):
                found[address_text(address)] = answer
            elif isinstance(answer, BaseException):
                raise answer
        return found

    async def _ask_one(self, address: ServerAddress, command: Command) -> Any:
        connection = await self._dialer.connect(address)
        try:
            (answer,) = await connection.ask([command])
        finally:
            connection.abort()
        if isinstance(answer, ReplyError):
            raise error_of(answer)
        return answer

    async def _ask(self, address: ServerAddress) -> ServerAddress | None:
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        answer = await self._ask_one(address, command)
        try:
            return (answer[0].decode(), int(answer[1])) if answer is not None else None
        except (AttributeError, IndexError, TypeError, ValueError):
            raise InvalidReply from None


# --- Cluster ----------------------------------------------------------------------------


def slot_of(name: bytes) -> int:
    """Tell the slot of a name: of what stands in its first braces, if anything does."""
    start = name.find(b"{")
    if start >= 0:
        end = name.find(b"}", start + 1)
        if end > start + 1:
            name = name[start + 1 : end]
    return crc_hqx(name, 0) % 16384


_Host = tuple[str, int]
_Target = tuple[_Host | None, bool]
"""Where a request goes, and whether only this once, while its slot is moving there."""


class Cluster:
    """The primaries of a cluster that one of the *seeds* belongs to."""

    def __init__(self, dialer: Dialer, seeds: Sequence[_Host], connections: int) -> None:
        self._dialer = dialer
        self._seeds = seeds
        self._connections = connections
        self._nodes: dict[_Host, Node] = {}
        self._owners: dict[int, _Host] = {}
        self._primaries: list[_Host] = []
        self._teller: _Host | None = None
        """Who told us last; asked first."""
        self._is_outdated = True
        self._learn_from = 0.0
        self._learning: asyncio.Task[None] | None = None

    def slot_of(self, name: bytes) -> int:
        return slot_of(name)

    async def open(self, scripts: Iterable[Script]) -> None:
        await self._learn()
        nodes = [self._node(address) for address in self._primaries]
        await asyncio.gather(*[load_scripts(node, scripts) for node in nodes])

    async def ask(
        self, requests: Sequence[RedisRequest], replicas: ReplicaWait | None = None
    ) -> list[Any]:
        await self._learn_if_outdated()
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
            told = [await asking[0]] if len(asking) == 1 else await asyncio.gather(*asking)
            targets = {}
            for target, said in zip(plan, told, strict=True):
                for at, answer in zip(plan[target], said, strict=True):
                    answers[at] = answer
                    if _begins(answer, "MOVED ", "ASK ", "TRYAGAIN "):
                        further = self._redirection(answer, requests[at], target)
                        if isinstance(further, StoreError):
                            answers[at] = further
                        else:
                            targets[at] = further
            if not targets:
                break
        return [self._failure(a) if isinstance(a, ReplyError) else a for a in answers]

    async def _ask_there(
        self, target: _Target, requests: Sequence[RedisRequest], replicas: ReplicaWait | None
    ) -> list[Any]:
        """RedisRequest one server; it may not answer, but that is an answer too."""
        host, is_once = target
        try:
            if host is None:
                raise StoreUnavailable("Redis: no server of the cluster has the slot")
            return await send_requests(self._node(host), requests, replicas, asking=is_once)
        except StoreError as error:
            self._is_outdated = True
            return [error] * len(requests)

    def _redirection(
        self, said: ReplyError, ask: RedisRequest, asked: _Target
    ) -> _Target | StoreError:
        """Return where to ask next, if that helps."""
        kind, *rest = str(said).split()
        if kind != "MOVED" and ask.names > 1:
            # Some keys are here and some there, or will be in a moment.
            return SlotMoving("Redis: the slot is moving to another server")
        if kind == "TRYAGAIN":
            return error_of(said)
        # `MOVED 3999 127.0.0.1:6381`; without a host, it is the one that says so.
        host, _, port = rest[-1].rpartition(":")
        if not port.isdecimal():
            return InvalidReply()
        there = (host or (asked[0] or ("", 0))[0], int(port))
        if kind == "MOVED":
            self._is_outdated = True
            self._owners[ask.slot] = there
        return there, kind == "ASK"

    def _failure(self, error: ReplyError) -> StoreError:
        problem = error_of(error)
        if isinstance(problem, StoreUnavailable):
            self._is_outdated = True
        return problem

    def drop_connections(self) -> None:
        for node in self._nodes.values():
            node.drop()

    async def places(self) -> list[bytes]:
        await self._learn_if_outdated()
        return sorted(address_text(address).encode() for address in self._primaries)

    async def ask_server(self, place: bytes, command: Command) -> Any:
        await self._learn_if_outdated()
        for address in self._primaries:
            if address_text(address).encode() == place:
                (answer,) = await send_requests(self._node(address), [RedisRequest(command)], None)
                return self._failure(answer) if isinstance(answer, ReplyError) else answer
        return StoreError(f"Redis: {place.decode()} is no primary any more; scan from the start")

    async def aclose(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.wait([self._learning])
        await asyncio.gather(*[node.aclose() for node in self._nodes.values()])

    # --- who has what -------------------------------------------------------------------

    def _node(self, address: _Host) -> Node:
        node = self._nodes.get(address)
        if node is None:
            dial = partial(self._dialer.connect, address)
            node = self._nodes[address] = Node(dial, self._connections)
        return node

    async def _learn_if_outdated(self) -> None:
        is_early = asyncio.get_running_loop().time() < self._learn_from
        if self._is_outdated and not (is_early and self._owners):
            await self._learn()

    async def _learn(self) -> None:
        """RedisRequest who has which slots; all who need to know share one attempt."""
        if self._learning is None:
            self._learning = asyncio.get_running_loop().create_task(self._fetch_topology())
            self._learning.add_done_callback(self._learned)
        try:
            async with asyncio.timeout(self._dialer.timeout_s):  # not all may answer; it goes on
                await wait_for_shared(self._learning)
        except TimeoutError:
            raise StoreUnavailable("Redis: nobody has told yet which server has what") from None

    def _learned(self, task: asyncio.Task[None]) -> None:
        self._learning = None
        if not task.cancelled():
            task.exception()  # whoever waits has heard it; perhaps nobody does

    async def _fetch_topology(self) -> None:
        first = [self._teller] if self._teller else []
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
        # Replicas may be asked too, so this is a connection of its own, without the checks.
        connection = await replace(self._dialer, check=None).connect(address)
        try:
            (answer,) = await connection.ask([(b"CLUSTER", b"SLOTS")])
        finally:
            connection.abort()
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
            # A node that does not know its own name means the one it was reached by.
            named = host.decode() if host and host != b"?" else asked[0]
            owners.update(dict.fromkeys(range(first, last + 1), (named, port)))
        self._owners = owners
        self._primaries = sorted(set(owners.values()))
        self._teller = asked
        self._is_outdated = len(owners) < 16384
        self._learn_from = asyncio.get_running_loop().time() + _LEARN_EVERY_S
        for gone in self._nodes.keys() - owners.values():
            self._nodes.pop(gone).close()
