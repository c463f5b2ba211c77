"""Dead letters in this process's memory: for tests and demos."""

from collections.abc import Sequence
from typing import Self

from msgspec.structs import replace

from oncebridge.dead_letters.api import DeadLetter
from oncebridge.errors import ConfigError, DeadLetterError


class MemoryDeadLetters:
    """Keep at most *max_letters*; beyond that, refuse, so that nothing is acknowledged."""

    def __init__(self, *, max_letters: int = 10_000) -> None:
        self._max_letters = max_letters
        self._letters: dict[int, DeadLetter] = {}
        self._last = 0

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open `memory:`."""
        if url != "memory:":
            raise ConfigError("", f"{url!r}: dead letters in memory are just 'memory:'")
        return cls()

    async def open(self) -> None:
        """Do nothing: memory is always there."""

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        if len(self._letters) + len(letters) > self._max_letters:
            raise DeadLetterError(f"the dead letters in memory are full ({self._max_letters})")
        for letter in letters:
            self._last += 1
            self._letters[self._last] = replace(letter, number=self._last)

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        return [letter for number, letter in self._letters.items() if number > after][:limit]

    async def drop(self, numbers: Sequence[int]) -> int:
        return sum(self._letters.pop(number, None) is not None for number in numbers)

    async def aclose(self) -> None:
        """Do nothing: the memory goes with the object."""
