"""
What people do to dead letters on the dashboard: replay and drop.

It is done by the functions that `oncebridge dead` uses, and written into the same trail, with the
name of whoever asked for it. One request does some letters, within some seconds, and says which
are left. Two who ask for the same at once take turns: the second finds the letters gone.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final, Literal
from weakref import WeakKeyDictionary

from msgspec import Struct

from oncebridge.dashboard.data import Desk
from oncebridge.dashboard.dead_letters import find, mark_of
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.errors import OncebridgeError, StoreUnavailable
from oncebridge.operate.identity import Identities
from oncebridge.operate.operator_log import AuditFile, OperatorLog
from oncebridge.operate.replay import LetterToDrop, Replayed, Replayer, drop, write_replay
from oncebridge.service.addresses import refuse_memory

Verb = Literal["replay", "drop"]

MOST_AT_A_TIME: Final = 1_000
"""So many letters can be asked for together."""
_MOST_IN_A_REQUEST: Final = 250
_BATCH: Final = 25
_TIME_S: Final = 8.0
"""After this no further batch begins."""
_ANSWER_S: Final = 5.0
_TURN_S: Final = 30.0

_GONE_BEFORE: Final = "gone before"
_GONE: Final = "it is not there any more: it was replayed or dropped since"


class Line(Struct, frozen=True):
    """What became of one letter."""

    number: int
    kind: Literal["good", "warn", "bad", "off"]
    result: str
    """A word or two, under which it is counted."""
    reason: str = ""
    verdict: str = ""
    gone: bool = True


class Done(Struct, frozen=True):
    """What was done."""

    lines: list[Line]
    left: list[int]
    """The numbers of those that are still to be done."""
    trouble: str = ""
    """Why it was broken off, in words."""

    @property
    def counts(self) -> dict[str, int]:
        """How often each result was had."""
        counts: dict[str, int] = {}
        for line in self.lines:
            counts[line.result] = counts.get(line.result, 0) + 1
        return counts

    @property
    def is_any(self) -> bool:
        """Return whether anything was done to any letter."""
        return any(line.gone and line.result != _GONE_BEFORE for line in self.lines)


class _Stopped(OncebridgeError):
    """There is no point in going on."""


class Order(Struct, frozen=True):
    """What is to be done, and who wants it."""

    verb: Verb
    letters: Mapping[int, str]
    """By number, each with the mark that tells it from another of its number."""
    because: str
    user: str


async def carry_out(desk: Desk, dead: DeadLetters, order: Order) -> Done:
    """Do as much of *order* as there is time for, the oldest letters first; raises nothing ours."""
    numbers = sorted(order.letters)[:MOST_AT_A_TIME]
    doing = _Doing(desk, dead, order)
    trouble = ""
    try:
        async with _turn(desk):
            await _ask(desk)
            await doing.run(numbers[:_MOST_IN_A_REQUEST])
    except OncebridgeError as error:
        trouble = str(error)
    done = {line.number for line in doing.lines}
    lines = sorted(doing.lines, key=lambda line: line.number)
    return Done(lines, [number for number in numbers if number not in done], trouble)


_turns: WeakKeyDictionary[Desk, asyncio.Lock] = WeakKeyDictionary()


@asynccontextmanager
async def _turn(desk: Desk) -> AsyncIterator[None]:
    """Wait until nobody else acts on dead letters here."""
    lock = _turns.setdefault(desk, asyncio.Lock())
    try:
        async with asyncio.timeout(_TURN_S):
            await lock.acquire()
    except TimeoutError:
        message = (
            "somebody else is replaying or dropping dead letters; try again when they are done"
        )
        raise _Stopped(message) from None
    try:
        yield
    finally:
        lock.release()


async def _ask(desk: Desk) -> None:
    """Find out whether the store answers, before anything is begun and waited for."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await desk.store.now_ms()
    except TimeoutError:
        raise StoreUnavailable("the store does not answer, so nothing was done") from None


class _Doing:
    """One order while it is carried out."""

    def __init__(self, desk: Desk, dead: DeadLetters, order: Order) -> None:
        config = desk.setup.config
        self._desk = desk
        self._dead = dead
        self._order = order
        self._operator_log = OperatorLog(
            AuditFile(config.audit), desk.store, reason=order.because, user=order.user
        )
        self.lines: list[Line] = []

    async def run(self, numbers: Sequence[int]) -> None:
        """Do *numbers*, batch by batch; raises what stands in the way."""
        now_s = asyncio.get_running_loop().time
        ends = now_s() + _TIME_S
        redrive = await self._redrive() if self._order.verb == "replay" else None
        for at in range(0, len(numbers), _BATCH):
            if now_s() >= ends:
                return
            letters = await self._found(numbers[at : at + _BATCH])
            if not letters:
                continue
            if redrive is None:
                await self._drop(letters)
                continue
            done = await redrive.replay(letters, within=_time_for(self._desk))
            self.lines += [_line(one) for one in done]
            if len(done) == _BATCH and not any(one.gone for one in done):
                raise _Stopped(f"none of the last {_BATCH} could go ({done[-1].reason})")

    async def _found(self, numbers: Sequence[int]) -> list[DeadLetter]:
        """Read letters, and tell of those that are gone."""
        found = []
        for number in numbers:
            letter = await find(self._dead, number)
            if letter is None or mark_of(letter) != self._order.letters[number]:
                self.lines.append(Line(number, "off", _GONE_BEFORE, _GONE))
            else:
                found.append(letter)
        return found

    async def _redrive(self) -> Replayer:
        desk = self._desk
        if desk.monitor is None:
            refuse_memory(desk.setup.config.store, "store")
        # Safe to repeat; beside workers elsewhere nobody has opened the sinks yet.
        await desk.router.open()
        return Replayer(
            desk.setup,
            desk.router,
            before=lambda letters: write_replay(desk.setup, self._operator_log, letters),
        )

    async def _drop(self, letters: Sequence[DeadLetter]) -> None:
        identities = Identities(self._desk.setup)
        # They may be large, and are read for their keys.
        doomed = await asyncio.to_thread(
            lambda: [LetterToDrop.of(one, identities) for one in letters]
        )
        await drop(doomed, self._dead, self._desk.store, self._operator_log)
        self.lines += [Line(letter.number, "good", "dropped") for letter in letters]


def _time_for(desk: Desk) -> timedelta:
    """
    Return how long a batch may take.

    Not less than one send takes at most: a send that we cut short may be taken all the same.
    """
    settings = [route.settings for route in desk.setup.routes]
    longest = max([one.sink_timeout + one.commit_budget + one.margin for one in settings])
    return max(longest, timedelta(seconds=_TIME_S))


def _line(one: Replayed) -> Line:
    kind: Literal["good", "warn", "bad"] = (
        "good" if one.is_resolved else "bad" if one.gone else "warn"
    )
    verdict = one.verdict.value if one.verdict else ""
    return Line(one.number, kind, one.result, one.reason, verdict, one.gone)
