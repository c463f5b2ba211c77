"""
What has to happen in order, and what may happen at the same time.

Two mechanisms, because order is lost in two places:

- `waves`: events of one batch that share a key or an entity are processed one after another.
- `EntityTurn`: batches run at the same time; with `order = "entity"` the events of one entity
  go through in the order in which their batches arrived.

The order that a source has, of its FIFO groups and partition keys, is kept in
`oncebridge.sources.pump`: there a record keeps its place while it waits for a retry.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from oncebridge.engine.batch import Batch, BatchEntry, picked
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
    if batch.entries:
        names = [name for row in rows for name in batch.names_of(row)]
    else:
        names = picked(batch.keys, rows)
    return [rows] if len(set(names)) == len(names) else _by_groups(batch, rows, Counter(names))


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
            group = _Group()
        group.add(entry)
        for name in names:
            groups[name] = group
    queues = [group.in_order() for group in dict.fromkeys(groups.values())]
    yield sorted([*alone, *(queue[0].row for queue in queues)])
    for turn in range(1, max(map(len, queues), default=0)):
        yield [queue[turn].row for queue in queues if len(queue) > turn]


class _Group(Struct, eq=False):
    """Events that are processed one after another, each with its duplicates."""

    entries: list[BatchEntry] = []
    leaders: dict[tuple[bytes, bytes], BatchEntry] = {}

    def add(self, entry: BatchEntry) -> None:
        """Attach *entry* to the one it is a duplicate of, or add it at the end."""
        names = [_identity(part) for part in entry.plan.parts]
        leader = next((self.leaders[name] for name in names if name in self.leaders), None)
        if leader is not None:
            leader.duplicates = [*leader.duplicates, entry.row]
            return
        self.entries.append(entry)
        self.leaders.update(dict.fromkeys(names, entry))

    def join(self, other: "_Group", groups: "dict[bytes, _Group]") -> "_Group":
        """Add the events of *other*, in the order of arrival."""
        for entry in other.entries:
            for row in (entry.row, *entry.duplicates):
                groups.update(dict.fromkeys(entry.batch.names_of(row), self))
        self.entries = sorted(self.entries + other.entries, key=lambda entry: entry.row)
        self.leaders.update(other.leaders)
        return self

    def in_order(self) -> list[BatchEntry]:
        """Return the events, those of one entity by version, so that none is stale."""
        versions = [e.plan.version for e in self.entries if e.plan.version]
        one_entity = len({entry.plan.entity for entry in self.entries}) == 1
        if len(versions) < len(self.entries) or not one_entity or len({k for k, _ in versions}) > 1:
            return self.entries
        order = sorted(zip(versions, self.entries, strict=True), key=lambda pair: pair[0])
        return [entry for _, entry in order]


def _identity(part: Part) -> tuple[bytes, bytes]:
    """Return what two duplicates have in common: the key, with the same content."""
    return part.key, part.hash


# --- between batches -----------------------------------------------------------------------


class EntityTurn:
    """One batch's place in the queue of one entity."""

    def __init__(self, entity: bytes, last: "EntityQueues") -> None:
        self._entity = entity
        self._last = last
        self.ahead = last.get(entity)
        self.done = asyncio.get_running_loop().create_future()
        """This batch is done, and so are those ahead of it."""
        self.left = 0
        """Events of this batch that are not settled."""
        self.failed = False
        """One of them was returned to the source, and later ones must not overtake it."""
        last[entity] = self
        if self.ahead is not None:
            # A batch that is cancelled while it waits keeps its place: those after it have to wait
            # for those ahead, too.
            self.ahead.done.add_done_callback(self._advance)

    def settled(self, *, acknowledged: bool) -> None:
        self.left -= 1
        self.failed = self.failed or not acknowledged
        self._advance()

    def _advance(self, _: object = None) -> None:
        is_first = self.ahead is None or self.ahead.done.done()
        if is_first and not self.left and not self.done.done():
            self.ahead = None
            self.done.set_result(None)
            if self._last.get(self._entity) is self:
                del self._last[self._entity]

    async def wait_for_previous(self, within_s: float | None = None) -> None:
        """
        Wait until the batch ahead is done; if it failed, so has this one.

        After *within_s* the batch ahead counts as failed.
        """
        ahead = self.ahead
        if ahead is None:
            return
        done, _ = await asyncio.wait({ahead.done}, timeout=within_s)
        self.failed = self.failed or ahead.failed or not done
        if done:
            self.ahead = None


EntityQueues = dict[bytes, EntityTurn]
"""The last turn of each entity with events in progress."""


def enqueue(queues: EntityQueues, entities: Sequence[bytes]) -> dict[bytes, EntityTurn]:
    """
    Take a place in each entity's queue; an entity listed twice has two events.

    A batch does so once, when it arrives: of two batches, the earlier is ahead in every queue, so
    there is no deadlock.
    """
    own = {entity: EntityTurn(entity, queues) for entity in dict.fromkeys(entities)}
    for entity in entities:
        own[entity].left += 1
    return own
