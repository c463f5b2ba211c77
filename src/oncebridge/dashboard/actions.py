"""
Replays and drops dead letters.

Both use the functions of `oncebridge dead`, and write to the same operator log with the user's
name. One request processes some dead letters, within some seconds, and returns which remain.
Simultaneous requests run one after the other: the second finds the dead letters gone.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final, Literal
from weakref import WeakKeyDictionary

from msgspec import Struct

from oncebridge.dashboard.data import DashboardData
from oncebridge.dashboard.dead_letters import find, fingerprint
from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.errors import OncebridgeError, StoreUnavailable
from oncebridge.operate.identity import Identities
from oncebridge.operate.operator_log import AuditFile, OperatorLog
from oncebridge.operate.replay import LetterToDrop, Replayed, Replayer, drop, write_replay
from oncebridge.service.addresses import refuse_memory

Verb = Literal["replay", "drop"]

MOST_AT_A_TIME: Final = 1_000
"""The most dead letters of one action."""
_MOST_IN_A_REQUEST: Final = 250
_BATCH: Final = 25
_TIME_S: Final = 8.0
"""No further batch begins after this time."""
_ANSWER_S: Final = 5.0
_TURN_S: Final = 30.0

_GONE_BEFORE: Final = "already gone"
_GONE: Final = "it was already replayed or dropped"


class ActionResult(Struct, frozen=True):
    """The result for one dead letter."""

    number: int
    kind: Literal["good", "warn", "bad", "off"]
    result: str
    """A word or two; results are counted by it."""
    reason: str = ""
    verdict: str = ""
    gone: bool = True


class ActionOutcome(Struct, frozen=True):
    """The results of an action."""

    lines: list[ActionResult]
    left: list[int]
    """The numbers that remain."""
    trouble: str = ""
    """Why the action was stopped, in words."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of dead letters by result."""
        counts: dict[str, int] = {}
        for line in self.lines:
            counts[line.result] = counts.get(line.result, 0) + 1
        return counts

    @property
    def is_any(self) -> bool:
        """True if any dead letter was changed."""
        return any(line.gone and line.result != _GONE_BEFORE for line in self.lines)


class _Stopped(OncebridgeError):
    """The action cannot continue."""


class ActionRequest(Struct, frozen=True):
    """An action, and the user who requested it."""

    verb: Verb
    letters: Mapping[int, str]
    """Fingerprints by number."""
    because: str
    user: str


async def run_action(data: DashboardData, dead: DeadLetters, order: ActionRequest) -> ActionOutcome:
    """Do as much of *order* as there is time for, the oldest first; raise no oncebridge error."""
    numbers = sorted(order.letters)[:MOST_AT_A_TIME]
    doing = _Action(data, dead, order)
    trouble = ""
    try:
        async with _exclusive(data):
            await _check_store(data)
            await doing.run(numbers[:_MOST_IN_A_REQUEST])
    except OncebridgeError as error:
        trouble = str(error)
    done = {line.number for line in doing.lines}
    lines = sorted(doing.lines, key=lambda line: line.number)
    return ActionOutcome(lines, [number for number in numbers if number not in done], trouble)


_locks: WeakKeyDictionary[DashboardData, asyncio.Lock] = WeakKeyDictionary()


@asynccontextmanager
async def _exclusive(data: DashboardData) -> AsyncIterator[None]:
    """Wait until no other action runs in this process."""
    lock = _locks.setdefault(data, asyncio.Lock())
    try:
        async with asyncio.timeout(_TURN_S):
            await lock.acquire()
    except TimeoutError:
        message = "another user is replaying or dropping dead letters; try again in a moment"
        raise _Stopped(message) from None
    try:
        yield
    finally:
        lock.release()


async def _check_store(data: DashboardData) -> None:
    """Raise `StoreUnavailable` if the store does not answer, before anything is begun."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await data.store.now_ms()
    except TimeoutError:
        raise StoreUnavailable("the store does not answer; nothing was done") from None


class _Action:
    """One action while it runs."""

    def __init__(self, data: DashboardData, dead: DeadLetters, order: ActionRequest) -> None:
        config = data.setup.config
        self._data = data
        self._dead = dead
        self._order = order
        self._operator_log = OperatorLog(
            AuditFile(config.audit), data.store, reason=order.because, user=order.user
        )
        self.lines: list[ActionResult] = []

    async def run(self, numbers: Sequence[int]) -> None:
        """Process *numbers* batch by batch; raise if the action cannot continue."""
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
            done = await redrive.replay(letters, within=_time_for(self._data))
            self.lines += [_line(one) for one in done]
            if len(done) == _BATCH and not any(one.gone for one in done):
                raise _Stopped(f"none of the last {_BATCH} could be replayed ({done[-1].reason})")

    async def _found(self, numbers: Sequence[int]) -> list[DeadLetter]:
        """Return the dead letters, and record a result for those that are gone."""
        found = []
        for number in numbers:
            letter = await find(self._dead, number)
            if letter is None or fingerprint(letter) != self._order.letters[number]:
                self.lines.append(ActionResult(number, "off", _GONE_BEFORE, _GONE))
            else:
                found.append(letter)
        return found

    async def _redrive(self) -> Replayer:
        data = self._data
        if data.monitor is None:
            refuse_memory(data.setup.config.store, "store")
        # Safe to repeat; if the workers run elsewhere, the sinks are not open yet.
        await data.router.open()
        return Replayer(
            data.setup,
            data.router,
            before=lambda letters: write_replay(data.setup, self._operator_log, letters),
        )

    async def _drop(self, letters: Sequence[DeadLetter]) -> None:
        identities = Identities(self._data.setup)
        # They may be large, and are parsed for their keys.
        doomed = await asyncio.to_thread(
            lambda: [LetterToDrop.of(one, identities) for one in letters]
        )
        await drop(doomed, self._dead, self._data.store, self._operator_log)
        self.lines += [ActionResult(letter.number, "good", "dropped") for letter in letters]


def _time_for(data: DashboardData) -> timedelta:
    """
    Return the time limit of a batch.

    It is at least the longest send: the sink may have accepted an event whose send was cancelled.
    """
    settings = [route.settings for route in data.setup.routes]
    longest = max([one.sink_timeout + one.commit_budget + one.margin for one in settings])
    return max(longest, timedelta(seconds=_TIME_S))


def _line(one: Replayed) -> ActionResult:
    kind: Literal["good", "warn", "bad"] = (
        "good" if one.is_resolved else "bad" if one.gone else "warn"
    )
    verdict = one.verdict.value if one.verdict else ""
    return ActionResult(one.number, kind, one.result, one.reason, verdict, one.gone)
