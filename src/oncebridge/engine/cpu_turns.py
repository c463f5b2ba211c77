"""
Turns for CPU-heavy work on the event loop, so that everything else still runs in between.

A few kilobytes can take a hundred milliseconds to decompress, split or parse, and a thread would
not help: Python runs one at a time, and a call into C is not interrupted. So CPU-heavy work is
done in turns, one at a time in the order of asking, and after a long turn the loop is free for at
least as long as the turn took. Work that is known to be small needs no turn, and waits for one
turn of others at most.
"""

import asyncio
from typing import Final

SMALL: Final = 16 * 1024
"""This many bytes need no turn: 7 ms at worst, 0.1 ms as a rule."""
TURN_S: Final = 0.01
"""A longer turn counts as long, and ends if the work can be divided."""


class CpuTurns:
    """Take a turn with `async with`; nothing inside may await."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._began_s = 0.0

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._began_s = asyncio.get_running_loop().time()

    async def __aexit__(self, *exc: object) -> None:
        used_s = self.used_s
        try:
            await asyncio.sleep(used_s if used_s >= TURN_S else 0)
        finally:
            self._lock.release()

    @property
    def used_s(self) -> float:
        """How many seconds the current turn has taken."""
        return asyncio.get_running_loop().time() - self._began_s
