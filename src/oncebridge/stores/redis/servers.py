"""
Which server is asked: the only one, the one that Sentinel names, or the one that has the slot.

A request is a list of `Ask`s, each about names of one slot. It is answered by a list as long,
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
    Address,
    Connection,
    Dialer,
    Node,
    Nonsense,
    NotThePrimary,
    Unfit,
    Words,
    failure,
    joined,
    shown,
)
from oncebridge.stores.redis.scripts import Script

_REDIRECTIONS: Final = 5
"""How often to follow a slot that moves."""
_LEARN_EVERY_S: Final = 0.25
"""While a server of the cluster is away, how often to ask who has its slots now."""


class Ask(Struct, frozen=True, gc=False):
    """One command, and the slot that its names are in."""

    words: Words
    slot: int = 0
    names: int = 1
    script: Script | None = None
    """What the command runs, if the server has to be told."""


class Copies(Struct, frozen=True):
    """How many replicas must have what was written, and how long to wait for them."""

    count: int
    within_ms: int


class TooFewCopies(StoreUnavailable):
    """It is written, but not on as many servers as it should be."""


class Moving(StoreUnavailable):
    """The slot is on its way to another server, and its keys have to be asked for one by one."""


class Servers(Protocol):
    """All servers that keep our records."""

    def slot_of(self, name: bytes) -> int:
        """Return which names can be asked for together: those of one slot."""
        ...

    async def open(self, scripts: Iterable[Script]) -> None:
        """Connect to every server, which checks it, and tell it the scripts."""
        ...

    async def ask(self, asks: Sequence[Ask], copies: Copies | None = None) -> list[Any]:
        """Ask, all at once; what was written counts only if *copies* of it are made."""
        ...

    def distrust(self) -> None:
        """Close all connections, as an answer made no sense."""
        ...

    async def places(self) -> list[bytes]:
        """Name the servers in a fixed order, for those who look at all there is."""
        ...

    async def ask_at(self, place: bytes, words: Words) -> Any:
        """Ask one of them."""
        ...

    async def aclose(self) -> None: ...


class OneServer:
    """The server that *locate* tells, asked anew for each connection."""

    def __init__(
        self, dialer: Dialer, locate: Callable[[], Awaitable[Address]], connections: int
    ) -> None:
        self._dialer = dialer
        self._locate = locate
        self._node = Node(self._dial, connections)

    async def _dial(self) -> Connection:
        return await self._dialer.connect(await self._locate())

    def slot_of(self, name: bytes) -> int:  # noqa: ARG002 - there is only one place
        return 0

    async def open(self, scripts: Iterable[Script]) -> None:
        await tell(self._node, scripts)

    async def ask(self, asks: Sequence[Ask], copies: Copies | None = None) -> list[Any]:
        answers = await exchange(self._node, asks, copies)
        for at, answer in enumerate(answers):
            if isinstance(answer, ReplyError):
                answers[at] = problem = failure(answer)
                if isinstance(problem, NotThePrimary):
                    self._node.drop()
        return answers

    def distrust(self) -> None:
        self._node.drop()

    async def places(self) -> list[bytes]:
        return [b"0"]

    async def ask_at(self, place: bytes, words: Words) -> Any:  # noqa: ARG002 - there is only one
        return (await self.ask([Ask(words)]))[0]

    async def aclose(self) -> None:
        await self._node.aclose()


async def exchange(
    node: Node, asks: Sequence[Ask], copies: Copies | None, *, asking: bool = False
) -> list[Any]:
    """Ask one server, and tell it the scripts that it does not know."""
    answers = await _send(node, asks, copies, asking=asking)
    if any(_begins(answer, "NOAUTH") for answer in answers):
        node.drop()  # the next connection logs in anew
    unknown = [at for at, answer in enumerate(answers) if _begins(answer, "NOSCRIPT")]
    if unknown:
        await tell(node, {script for at in unknown if (script := asks[at].script) is not None})
        again = await _send(node, [asks[at] for at in unknown], copies, asking=asking)
        for at, answer in zip(unknown, again, strict=True):
            answers[at] = answer
    return answers


async def tell(node: Node, scripts: Iterable[Script]) -> None:
    """Tell a server scripts, so that it knows them by their names."""
    told = list(scripts)
    answers = await node.ask([(b"SCRIPT", b"LOAD", script.source) for script in told])
    for script, answer in zip(told, answers, strict=True):
        if isinstance(answer, ReplyError):
            raise failure(answer)
        if answer != script.sha:
            node.drop()
            raise Nonsense


def _send(
    node: Node, asks: Sequence[Ask], copies: Copies | None, *, asking: bool
) -> Awaitable[list[Any]]:
    if copies is None and not asking:
        return node.ask([ask.words for ask in asks])
    return _send_with_more(node, asks, copies, asking=asking)


async def _send_with_more(
    node: Node, asks: Sequence[Ask], copies: Copies | None, *, asking: bool
) -> list[Any]:
    """Put before each what lets it through, and after all what waits for copies."""
    commands = [ask.words for ask in asks]
    if asking:  # it is for the next command only
        commands = [words for ask in asks for words in ((b"ASKING",), ask.words)]
    if copies is None:
        answers = await node.ask(commands)
        return answers[1::2] if asking else answers
    *answers, made = await node.ask([*commands, (b"WAIT", copies.count, copies.within_ms)])
    problem: StoreError | None = None
    if isinstance(made, ReplyError):
        problem = failure(made)
    elif not isinstance(made, int):
        problem = Nonsense()
    elif made < copies.count:
        problem = TooFewCopies(f"Redis: only {made} of {copies.count} replicas have it yet")
    if problem is not None:
        answers = [a if isinstance(a, ReplyError) else problem for a in answers]
    return answers[1::2] if asking else answers


def _begins(answer: Any, *codes: str) -> bool:
    return isinstance(answer, ReplyError) and str(answer).startswith(codes)


# --- Sentinel ---------------------------------------------------------------------------


class Sentinels:
    """Those who know which server is the primary of *service*."""

    def __init__(self, dialer: Dialer, addresses: Sequence[Address], service: str) -> None:
        self._dialer = dialer
        self._addresses = list(addresses)
        self._service = service

    async def primary(self) -> Address:
        """Ask one after the other; the first that knows decides."""
        try:
            async with asyncio.timeout(self._dialer.timeout_s):
                return await self._first_told()
        except TimeoutError:
            raise StoreUnavailable("Redis Sentinel: nobody has told the primary in time") from None

    async def _first_told(self) -> Address:
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
            problems.append(f"{shown(address)} knows of no {self._service!r}")
        raise StoreUnavailable(f"Redis Sentinel names no primary: {'; '.join(problems)}")

    async def refusals(self) -> dict[str, StoreError]:
        """Ask each whether a failover could be agreed on; tell who does not say yes, and why."""
        words = (b"SENTINEL", b"CKQUORUM", self._service.encode())
        asked = [self._ask_one(address, words) for address in self._addresses]
        told = await asyncio.gather(*asked, return_exceptions=True)
        found = {}
        for address, answer in zip(self._addresses, told, strict=True):
            if isinstance(answer, StoreError):
                found[shown(address)] = answer
            elif isinstance(answer, BaseException):
                raise answer
        return found

    async def _ask_one(self, address: Address, words: Words) -> Any:
        connection = await self._dialer.connect(address)
        try:
            (answer,) = await connection.ask([words])
        finally:
            connection.abort()
        if isinstance(answer, ReplyError):
            raise failure(answer)
        return answer

    async def _ask(self, address: Address) -> Address | None:
        words = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        answer = await self._ask_one(address, words)
        try:
            return (answer[0].decode(), int(answer[1])) if answer is not None else None
        except (AttributeError, IndexError, TypeError, ValueError):
            raise Nonsense from None


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
        await asyncio.gather(*[tell(node, scripts) for node in nodes])

    async def ask(self, asks: Sequence[Ask], copies: Copies | None = None) -> list[Any]:
        await self._learn_if_outdated()
        answers: list[Any] = [None] * len(asks)
        targets: dict[int, _Target] = {
            at: (self._owners.get(ask.slot), False) for at, ask in enumerate(asks)
        }
        for _ in range(_REDIRECTIONS):
            plan: dict[_Target, list[int]] = {}
            for at, target in targets.items():
                plan.setdefault(target, []).append(at)
            asking = [
                self._ask_there(target, [asks[at] for at in places], copies)
                for target, places in plan.items()
            ]
            told = [await asking[0]] if len(asking) == 1 else await asyncio.gather(*asking)
            targets = {}
            for target, said in zip(plan, told, strict=True):
                for at, answer in zip(plan[target], said, strict=True):
                    answers[at] = answer
                    if _begins(answer, "MOVED ", "ASK ", "TRYAGAIN "):
                        further = self._further(answer, asks[at], target)
                        if isinstance(further, StoreError):
                            answers[at] = further
                        else:
                            targets[at] = further
            if not targets:
                break
        return [self._failure(a) if isinstance(a, ReplyError) else a for a in answers]

    async def _ask_there(
        self, target: _Target, asks: Sequence[Ask], copies: Copies | None
    ) -> list[Any]:
        """Ask one server; it may not answer, but that is an answer too."""
        host, is_once = target
        try:
            if host is None:
                raise StoreUnavailable("Redis: no server of the cluster has the slot")
            return await exchange(self._node(host), asks, copies, asking=is_once)
        except StoreError as error:
            self._is_outdated = True
            return [error] * len(asks)

    def _further(self, said: ReplyError, ask: Ask, asked: _Target) -> _Target | StoreError:
        """Return where to ask next, if that helps."""
        kind, *rest = str(said).split()
        if kind != "MOVED" and ask.names > 1:
            # Some keys are here and some there, or will be in a moment.
            return Moving("Redis: the slot is moving to another server")
        if kind == "TRYAGAIN":
            return failure(said)
        # `MOVED 3999 127.0.0.1:6381`; without a host, it is the one that says so.
        host, _, port = rest[-1].rpartition(":")
        if not port.isdecimal():
            return Nonsense()
        there = (host or (asked[0] or ("", 0))[0], int(port))
        if kind == "MOVED":
            self._is_outdated = True
            self._owners[ask.slot] = there
        return there, kind == "ASK"

    def _failure(self, error: ReplyError) -> StoreError:
        problem = failure(error)
        if isinstance(problem, StoreUnavailable):
            self._is_outdated = True
        return problem

    def distrust(self) -> None:
        for node in self._nodes.values():
            node.drop()

    async def places(self) -> list[bytes]:
        await self._learn_if_outdated()
        return sorted(shown(address).encode() for address in self._primaries)

    async def ask_at(self, place: bytes, words: Words) -> Any:
        await self._learn_if_outdated()
        for address in self._primaries:
            if shown(address).encode() == place:
                (answer,) = await exchange(self._node(address), [Ask(words)], None)
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
        """Ask who has which slots; all who need to know share one attempt."""
        if self._learning is None:
            self._learning = asyncio.get_running_loop().create_task(self._ask_around())
            self._learning.add_done_callback(self._learned)
        try:
            async with asyncio.timeout(self._dialer.timeout_s):  # not all may answer; it goes on
                await joined(self._learning)
        except TimeoutError:
            raise StoreUnavailable("Redis: nobody has told yet which server has what") from None

    def _learned(self, task: asyncio.Task[None]) -> None:
        self._learning = None
        if not task.cancelled():
            task.exception()  # whoever waits has heard it; perhaps nobody does

    async def _ask_around(self) -> None:
        first = [self._teller] if self._teller else []
        problems: list[StoreError] = []
        for address in dict.fromkeys([*first, *self._primaries, *self._seeds]):
            try:
                self._note(await self._ask_for_slots(address), address)
            except StoreError as error:
                problems.append(error)
            except (AttributeError, TypeError, ValueError):
                problems.append(Nonsense())
            else:
                return
        lasting = [p for p in problems if not isinstance(p, StoreUnavailable)]
        raise (lasting or problems)[0]

    async def _ask_for_slots(self, address: _Host) -> list[Any]:
        # Replicas may be asked too, so this is a connection of its own, without the checks.
        connection = await replace(self._dialer, check=None).connect(address)
        try:
            (answer,) = await connection.ask([(b"CLUSTER", b"SLOTS")])
        finally:
            connection.abort()
        if isinstance(answer, ReplyError):
            raise Unfit(
                f"Redis at {shown(address)} is not a cluster that can be used: {answer}; "
                "for a single server write redis:// or rediss://"
            )
        if not answer:
            raise StoreUnavailable(f"Redis at {shown(address)}: no server has any slots yet")
        if not isinstance(answer, list):
            raise Nonsense
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
