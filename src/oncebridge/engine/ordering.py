"""
What has to happen in order, and what may happen at the same time.

Two mechanisms, because order is lost in two places:

- `waves`: events of one batch that share a key or an entity are processed one after another.
- `EntityQueues`: batches run at the same time; with `order = "entity"` the events of one entity
  go through in the order in which their batches arrived.

The order that a source has, of its FIFO groups and partition keys, is kept in
`oncebridge.sources.pump`: there a record keeps its place while it waits for a retry.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from oncebridge.engine.batch import Batch, BatchEntry
from oncebridge.events.key import Part

# --- within a batch ------------------------------------------------------------------------


def waves(batch: Batch, rows: Sequence[int]) -> Iterable[Sequence[int]]:
    """
    Split rows of a batch into waves that are processed one after another.

    Duplicates are attached to the first event. Events that share a key with other content, or an
    entity, are a group: its first is in the first wave, its second in the second. Most batches
    are one wave: no key occurs twice.
    """
    if len(rows) == 1:
        return [rows]
    names = _names(batch, rows)
    known = set(names)
    return [rows] if len(known) == len(names) else _by_groups(batch, rows, Counter(names))


def _names(batch: Batch, rows: Sequence[int]) -> list[bytes]:
    keys = batch.keys
    if not batch.entries:
        return keys if len(rows) == len(keys) else [keys[row] for row in rows]
    return [name for row in rows for name in batch.names_of(row)]


def _by_groups(
    batch: Batch, rows: Sequence[int], counts: Mapping[bytes, int]
) -> Iterator[list[int]]:
    """Group the events that share a key or an entity, and take one of each group at a time."""
    groups: dict[bytes, _Group] = {}
    alone: list[int] = []
    for row in rows:
        names = batch.names_of(row)
        if all(counts[name] == 1 for name in names):
            alone.append(row)
            continue
        entry = batch.entry(row)
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
    queues = [group.in_order() for group in dict.fromkeys(groups.values())]
    yield sorted([*alone, *(queue[0].row for queue in queues)])
    for turn in range(1, max(map(len, queues), default=0)):
        yield [queue[turn].row for queue in queues if len(queue) > turn]


class _Group:
    """Events that are processed one after another, each with its duplicates."""

    __slots__ = ("_leaders", "entries")

    def __init__(self, entry: BatchEntry) -> None:
        self.entries = [entry]
        self._leaders: dict[Part, BatchEntry] | None = None

    def add(self, entry: BatchEntry) -> None:
        """Attach *entry* to the one it is a duplicate of, or add it at the end."""
        if self._leaders is None:
            self._leaders = {_identity(part): e for e in self.entries for part in e.parts}
        for part in entry.parts:
            leader = self._leaders.get(_identity(part))
            if leader is not None:
                leader.duplicates = [*leader.duplicates, entry.row]
                return
        self.entries.append(entry)
        for part in entry.parts:
            self._leaders[_identity(part)] = entry

    def join(self, other: "_Group", groups: "dict[bytes, _Group]") -> "_Group":
        """Add the events of *other*, in the order of arrival."""
        for entry in other.entries:
            for row in (entry.row, *entry.duplicates):
                groups.update(dict.fromkeys(entry.batch.names_of(row), self))
        self.entries = sorted(self.entries + other.entries, key=lambda entry: entry.row)
        self._leaders = None
        return self

    def in_order(self) -> list[BatchEntry]:
        """Return the events, those of one entity by version, so that none is stale."""
        versions = [e.plan.version for e in self.entries if e.plan.version]
        one_entity = len({entry.entity for entry in self.entries}) == 1
        if len(versions) < len(self.entries) or not one_entity or len({k for k, _ in versions}) > 1:
            return self.entries
        order = sorted(zip(versions, self.entries, strict=True), key=lambda pair: pair[0])
        return [entry for _, entry in order]


def _identity(part: Part) -> Part:
    """Return what two duplicates have in common: the key, with the same content."""
    return Part(part.key, part.hash)


# --- between batches -----------------------------------------------------------------------


class EntityTurn:
    """One batch's place in the queue of one entity."""

    __slots__ = ("_queues", "ahead", "behind", "done", "entity", "failed", "left")

    def __init__(self, entity: bytes, ahead: "EntityTurn | None", queues: "EntityQueues") -> None:
        self.entity = entity
        self._queues = queues
        self.ahead = ahead
        self.behind: EntityTurn | None = None
        self.done = asyncio.Event()
        """This batch is done, and so are those ahead of it."""
        self.left = 0
        """Events of this batch that are not settled."""
        self.failed = False
        """One of them was returned to the source, and later ones must not overtake it."""

    def settled(self, *, acknowledged: bool) -> None:
        self.left -= 1
        self.failed = self.failed or not acknowledged
        if not self.left:
            self._queues.advance(self)

    async def wait_for_previous(self, until_s: float | None = None) -> None:
        """
        Wait until the batch ahead is done; if it failed, so has this one.

        After *until_s* the batch ahead counts as failed.
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
    """
    One queue for each entity with events in progress.

    A batch takes its place in all of its queues at once, when it arrives: of two batches, the
    earlier is ahead in every queue, so there is no deadlock.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, EntityTurn] = {}

    def enqueue(self, entities: Iterable[bytes]) -> dict[bytes, EntityTurn]:
        """Take a place in each entity's queue; an entity listed twice has two events."""
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
        Remove a batch that is done from its queue, and those after it that are done, too.

        A batch that was cancelled while it waited keeps its place until those ahead are done:
        those after it have to wait for them, too.
        """
        while turn is not None and not turn.left:
            if turn.ahead is not None and not turn.ahead.done.is_set():
                return
            turn.ahead = None
            turn.done.set()
            if self._last.get(turn.entity) is turn:
                del self._last[turn.entity]
            turn = turn.behind
