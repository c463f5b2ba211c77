"""
What has to happen in order, and what may happen at the same time.

Three mechanisms, because order is lost in three places:

- `waves`: events of one batch that share a key or an entity are processed one after another.
- `EntityQueues`: batches run at the same time; with `order = "entity"` the events of one entity
  go through in the order in which their batches arrived.
- `LaneRunner`: a Lambda invocation may hold several groups of a FIFO queue or partition keys of a
  shard; within each, the next record starts only when the one before it is done.

(`oncebridge.sources.relay` keeps lanes of its own: it takes records without end, and retries.)
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from oncebridge.engine.batch import BatchEntry
from oncebridge.events.key import Part

_T = TypeVar("_T")


# --- within a batch ------------------------------------------------------------------------


def waves(entries: Sequence[BatchEntry]) -> Iterable[Sequence[BatchEntry]]:
    """
    Fold repeats together, and order what must not run side by side.

    Events that share a key with other content, or an entity, go one after another: the
    first of each such group in the first wave, the second in the second. Most batches are
    one wave: no name stands there twice.
    """
    names = [part.key for entry in entries for part in entry.parts]
    names += [entry.entity for entry in entries if entry.entity]
    return [entries] if len(names) == len(set(names)) else _by_groups(entries)


def _by_groups(entries: Sequence[BatchEntry]) -> Iterator[list[BatchEntry]]:
    """Sort out which have to do with each other, and let the first of each group go first."""
    groups: dict[bytes, _Group] = {}
    for entry in entries:
        names = entry.names()
        group: _Group | None = None
        for name in names:
            met = groups.get(name)
            if met is not None and met is not group:
                group = met if group is None else group.join(met, groups)
        if group is None:
            group = _Group(entry)
        else:
            group.add(entry)
        for name in names:
            groups[name] = group
    unkeyed = [entry for entry in entries if not entry.names()]
    queues = [group.in_order() for group in dict.fromkeys(groups.values())]
    turn = 0
    while queues:
        yield [*(queue[turn] for queue in queues), *unkeyed]
        unkeyed = []
        turn += 1
        queues = [queue for queue in queues if len(queue) > turn]


class _Group:
    """Events that go one after another, each with its repeats."""

    __slots__ = ("_leaders", "entries")

    def __init__(self, entry: BatchEntry) -> None:
        self.entries = [entry]
        self._leaders: dict[Part, BatchEntry] | None = None

    def add(self, entry: BatchEntry) -> None:
        """Put *entry* behind the one it repeats, or at the end."""
        if self._leaders is None:
            self._leaders = {_identity(part): e for e in self.entries for part in e.parts}
        for part in entry.parts:
            leader = self._leaders.get(_identity(part))
            if leader is not None:
                leader.repeats = leader.repeats or []
                leader.repeats.append(entry)
                return
        self.entries.append(entry)
        for part in entry.parts:
            self._leaders[_identity(part)] = entry

    def join(self, other: "_Group", groups: "dict[bytes, _Group]") -> "_Group":
        """Take the entries of *other* in, in the order of arrival."""
        for entry in other.entries:
            for one in (entry, *entry.repeats):
                groups.update(dict.fromkeys(one.names(), self))
        self.entries = sorted(self.entries + other.entries, key=lambda entry: entry.index)
        self._leaders = None
        return self

    def in_order(self) -> list[BatchEntry]:
        """Let the versions of one entity go in their order, so that none is stale."""
        versions = [e.plan.version for e in self.entries if e.plan.version]
        one_entity = len({entry.entity for entry in self.entries}) == 1
        if len(versions) < len(self.entries) or not one_entity or len({k for k, _ in versions}) > 1:
            return self.entries
        order = sorted(zip(versions, self.entries, strict=True), key=lambda pair: pair[0])
        return [entry for _, entry in order]


def _identity(part: Part) -> Part:
    """Name what makes two events the same here: the key, with the same content."""
    return Part(part.key, part.hash)


# --- between batches -----------------------------------------------------------------------


class EntityTurn:
    """One batch's place in the line of one entity."""

    __slots__ = ("_lines", "ahead", "behind", "done", "entity", "failed", "left")

    def __init__(self, entity: bytes, ahead: "EntityTurn | None", lines: "EntityQueues") -> None:
        self.entity = entity
        self._lines = lines
        self.ahead = ahead
        self.behind: EntityTurn | None = None
        self.done = asyncio.Event()
        """This batch is through, and so are those ahead of it."""
        self.left = 0
        """Events of this batch that are not settled."""
        self.failed = False
        """One of them was handed back, so what is behind it must not overtake it."""

    def settled(self, *, acknowledged: bool) -> None:
        self.left -= 1
        self.failed = self.failed or not acknowledged
        if not self.left:
            self._lines.advance(self)

    async def wait_for_previous(self, until_s: float | None = None) -> None:
        """
        Wait until the batch ahead is through; take over what it failed at.

        Not longer than *until_s*: then it is as if it had failed.
        """
        if self.ahead is None:
            return
        try:
            async with asyncio.timeout_at(until_s):
                await self.ahead.done.wait()
        except TimeoutError:
            self.failed = True
        else:
            self.failed = self.failed or self.ahead.failed
            self.ahead = None


class EntityQueues:
    """The lines of all entities that are here now."""

    def __init__(self) -> None:
        self._last: dict[bytes, EntityTurn] = {}

    def enqueue(self, entities: Iterable[bytes]) -> dict[bytes, EntityTurn]:
        """Take a place in each line; an entity that stands there twice has two events."""
        own: dict[bytes, EntityTurn] = {}
        for entity in entities:
            turn = own.get(entity)
            if turn is None:
                ahead = self._last.get(entity)
                turn = own[entity] = self._last[entity] = EntityTurn(entity, ahead, self)
                if ahead is not None:
                    ahead.behind = turn
            turn.left += 1
        return own

    def advance(self, turn: EntityTurn | None) -> None:
        """
        Let a batch go that is through, and those behind it that were waiting to go.

        One that was broken off while it waited keeps its place until those ahead are
        through: whoever comes behind it has to wait for them too.
        """
        while turn is not None and not turn.left:
            if turn.ahead is not None and not turn.ahead.done.is_set():
                return
            turn.ahead = None
            turn.done.set()
            if self._last.get(turn.entity) is turn:
                del self._last[turn.entity]
            turn = turn.behind


# --- within an invocation ------------------------------------------------------------------

ReportDone = Callable[[int, bool], None]
"""Told of each item of a batch, by its place in it, whether it is done."""
StartItems = Callable[[list[_T], ReportDone], Coroutine[Any, Any, None]]


class LaneRunner(Generic[_T]):
    """Take *lanes* through *bring*, which is given what may start now."""

    def __init__(self, lanes: Sequence[Sequence[_T]], bring: StartItems[_T]) -> None:
        self._bring = bring
        self._rests = [iter(lane) for lane in lanes]
        self._ready: list[tuple[int, _T]] = []
        self._running: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        for lane in range(len(lanes)):
            self._advance(lane)

    async def run(self) -> None:
        """Run until every lane is at its end, or stuck; an error ends all of them."""
        try:
            while self._ready or self._running:
                if self._ready:
                    self._start()
                self._woken.clear()
                await self._woken.wait()
                for task in [task for task in self._running if task.done()]:
                    self._running.remove(task)
                    task.result()
        finally:
            for task in self._running:
                task.cancel()
            # Not before they are back: each still tells what was done.
            await asyncio.gather(*self._running, return_exceptions=True)

    def _start(self) -> None:
        items, self._ready = self._ready, []

        def tell(at: int, is_done: bool) -> None:  # noqa: FBT001 - as `ReportDone` has it
            if is_done:
                self._advance(items[at][0])

        task = asyncio.get_running_loop().create_task(
            self._bring([item for _, item in items], tell)
        )
        task.add_done_callback(lambda _: self._woken.set())
        self._running.add(task)

    def _advance(self, lane: int) -> None:
        for item in self._rests[lane]:
            self._ready.append((lane, item))
            self._woken.set()
            break
