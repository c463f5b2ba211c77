"""
Whose turn it is: events of one entity, one batch behind the other.

Batches run side by side. Where events of one entity are to stay in order, each batch takes
its place in a line per entity when it arrives, all its places at once: so of two batches
the earlier is ahead in every line, and nobody waits in a circle.
"""

import asyncio
from collections.abc import Iterable


class Turn:
    """One batch's place in the line of one entity."""

    __slots__ = ("_lines", "ahead", "behind", "done", "entity", "failed", "left")

    def __init__(self, entity: bytes, ahead: "Turn | None", lines: "Turns") -> None:
        self.entity = entity
        self._lines = lines
        self.ahead = ahead
        self.behind: Turn | None = None
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
            self._lines.leave(self)

    async def come(self, until_s: float | None = None) -> None:
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


class Turns:
    """The lines of all entities that are here now."""

    def __init__(self) -> None:
        self._last: dict[bytes, Turn] = {}

    def stand(self, entities: Iterable[bytes]) -> dict[bytes, Turn]:
        """Take a place in each line; an entity that stands there twice has two events."""
        own: dict[bytes, Turn] = {}
        for entity in entities:
            turn = own.get(entity)
            if turn is None:
                ahead = self._last.get(entity)
                turn = own[entity] = self._last[entity] = Turn(entity, ahead, self)
                if ahead is not None:
                    ahead.behind = turn
            turn.left += 1
        return own

    def leave(self, turn: Turn | None) -> None:
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
