"""Dead letters in the memory of this process: for tests and demos."""

from collections.abc import Sequence
from typing import Self

from msgspec.structs import replace

from oncebridge.dead_letters.api import DeadLetter
from oncebridge.errors import ConfigError, DeadLetterError


class MemoryDeadLetters:
    """Keep at most *max_letters*; refuse more, so that their events are not acknowledged."""

    def __init__(self, *, max_letters: int = 10_000) -> None:
        self._max_letters = max_letters
        self._letters: dict[int, DeadLetter] = {}
        self._last = 0

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open `memory:`."""
        if url != "memory:":
            raise ConfigError("", f"{url!r}: the address of dead letters in memory is 'memory:'")
        return cls()

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        if len(self._letters) + len(letters) > self._max_letters:
            raise DeadLetterError(
                f"dead letters in memory are full ({self._max_letters}); replay or drop some, or "
                "keep them in a file or queue"
            )
        for letter in letters:
            self._last += 1
            self._letters[self._last] = replace(letter, number=self._last)

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        return [letter for number, letter in self._letters.items() if number > after][:limit]

    async def drop(self, numbers: Sequence[int]) -> int:
        return sum(self._letters.pop(number, None) is not None for number in numbers)

    async def aclose(self) -> None:
        """Do nothing: the memory is freed with the object."""
