"""A queue with visibility timeouts: what is not deleted comes again."""

import asyncio
import heapq
from collections.abc import Sequence
from random import Random
from time import monotonic


class Queue:
    """
    Messages by number; all are visible at first, in order.

    As the real one may, it hands out a message again before its time now and then
    (*early*): two workers then have it in hand at once.
    """

    def __init__(self, size: int, *, visibility_s: float, early: float, dice: Random) -> None:
        self.left = size
        self.receives = 0
        self._deleted = 0
        self._aim = 0
        self._reached = asyncio.Event()
        self._visibility_s = visibility_s
        self._early = early
        self._dice = dice
        self._gone = bytearray(size)
        self._visible_at = [0.0] * size
        self._heap = [(0.0, number) for number in range(size)]

    def receive(self, most: int) -> list[int]:
        now = monotonic()
        taken: list[int] = []
        while len(taken) < most and self._heap and self._heap[0][0] <= now:
            visible_at, number = heapq.heappop(self._heap)
            # An entry that was overtaken by another change of visibility says nothing.
            if not self._gone[number] and visible_at == self._visible_at[number]:
                taken.append(number)
        for number in taken:
            is_early = self._dice.random() < self._early
            self._hide(number, self._dice.uniform(0, 0.02) if is_early else self._visibility_s)
        self.receives += len(taken)
        return taken

    def delete(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if not self._gone[number]:
                self._gone[number] = 1
                self.left -= 1
                self._deleted += 1
        if self._deleted >= self._aim:
            self._reached.set()

    async def until_deleted(self, count: int) -> None:
        """Wait until *count* messages are gone; one may wait at a time."""
        self._aim = count
        self._reached.clear()
        if self._deleted < count:
            await self._reached.wait()

    def change_visibility(self, number: int, delay_s: float) -> None:
        if not self._gone[number]:
            self._hide(number, delay_s)

    def _hide(self, number: int, delay_s: float) -> None:
        self._visible_at[number] = monotonic() + delay_s
        heapq.heappush(self._heap, (self._visible_at[number], number))
