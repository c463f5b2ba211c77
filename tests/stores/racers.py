"""
Processes that go for the same keys at the same moment.

`python -m tests.stores.racers JOB` is one of them. It opens a handle of its own, and then runs
the heats it is told to, each with many tasks. `race` is the parent: it prepares the keys,
starts all heats by one word to everybody, and gives back what was won, for `faults` to judge.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from tests.chaos.worker import die_with_parent

from oncebridge.base.clock import SystemDice
from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    Commit,
    Commits,
    Fate,
    NoAnswer,
    Record,
    Reply,
    Store,
    Want,
    Wants,
)

PROCESSES: Final = 4
TASKS: Final = 16
HEATS: Final = ("claims", "take-overs", "pairs", "ring", "commits")
_BATCH = 25
_LONG_MS = 600_000
_SHORT_MS = 100
_TRIES = 20
_ROOT = Path(__file__).parents[2]


class Job(Struct, frozen=True, kw_only=True):
    """What a racer is told on its command line."""

    number: int
    url: str
    options: dict[str, Any]
    prefix: str
    keys: int
    rivals: int


class Win(Struct, frozen=True):
    """What somebody got: item *at* of the heat, under *token*."""

    at: int
    token: bytes = b""
    attempts: list[int] = []


class Result(Struct):
    """What one racer saw in one heat."""

    wins: list[Win]
    others: dict[str, int]
    """The other answers, by kind."""
    again: int = 0
    """How often there was no answer, so that it asked again."""


# --- what is raced for -----------------------------------------------------------------------


def keys_of(prefix: str, heat: str, count: int) -> list[bytes]:
    return [f"{prefix}/{heat}/{at}".encode() for at in range(count)]


def items_of(heat: str, keys: Sequence[bytes]) -> list[tuple[bytes, ...]]:
    """List what can be won in *heat*: single keys, pairs, or pairs that overlap."""
    match heat:
        case "pairs":
            return list(zip(keys[::2], keys[1::2], strict=True))
        case "ring":
            return list(zip(keys, [*keys[1:], keys[0]], strict=True))
    return [(key,) for key in keys]


def _generation(key: bytes) -> bytes:
    """Name the life of a key that was claimed for everybody."""
    return blake2b(key, digest_size=16).digest()


def _wants(items: Sequence[Sequence[bytes]], lease_ms: int = _LONG_MS) -> Wants:
    """Ask for *items* with one token and one generation, as workers do."""
    token, generation = SystemDice().tokens(2)
    parts = [tuple(map(Part, keys)) for keys in items]
    return Wants.of([Want(part, token, generation, lease_ms, _LONG_MS) for part in parts])


def _commit(key: bytes) -> Commit:
    return Commit(key, _generation(key), Fate.DELIVERED, _LONG_MS)


# --- one racer -------------------------------------------------------------------------------


class Racer:
    def __init__(self, job: Job, store: Store) -> None:
        self._job = job
        self._store = store

    async def run(self, heat: str) -> Result:
        items = items_of(heat, keys_of(self._job.prefix, heat, self._job.keys))
        result = Result([], {})
        await asyncio.gather(*(self._compete(heat, task, items, result) for task in range(TASKS)))
        return result

    async def _compete(
        self, heat: str, task: int, items: Sequence[tuple[bytes, ...]], result: Result
    ) -> None:
        """
        Go for one's share of the items, from one's own start.

        The same task of every process starts at the same place, so that all processes ask
        for the same things at the same moment.
        """
        own = self._job.rivals // PROCESSES
        start = task * len(items) // TASKS
        places = [*range(start, len(items)), *range(start)]
        places = [at for at in places if (at + task) % TASKS < own]
        # Neighbours in a ring share a key, and the keys of one call are distinct.
        for batch in _batches(places[::2], _BATCH) + _batches(places[1::2], _BATCH):
            asked = [items[at] for at in batch]
            answers = await self._ask(heat, asked, result, reverse=bool(task % 2))
            for at, answer in zip(batch, answers, strict=True):
                _note(result, at, answer)
            await asyncio.sleep(0)

    async def _ask(
        self, heat: str, asked: Sequence[tuple[bytes, ...]], result: Result, *, reverse: bool
    ) -> Sequence[Any]:
        if heat == "commits":
            commits = Commits.of([_commit(key) for (key,) in asked])
            return await _insist(self._store.commit, commits, result)
        # Half of them ask in the other order: who locks part by part is stuck here.
        wants = _wants([keys[::-1] if reverse else keys for keys in asked])
        return await _insist(self._store.claim, wants, result)


def _note(result: Result, at: int, answer: Any) -> None:
    if isinstance(answer, Claim):
        result.wins.append(Win(at, answer.token, [held.attempts for held in answer.held]))
    elif answer is Reply.COMMITTED:
        result.wins.append(Win(at))
    else:
        name = answer.value if isinstance(answer, Reply) else type(answer).__name__
        result.others[name] = result.others.get(name, 0) + 1


async def _insist(
    call: Callable[[Any], Awaitable[Sequence[Any]]], batch: Wants | Commits, result: Result
) -> list[Any]:
    """Ask again, with the same tokens, where there is no answer; as the ledger does."""
    answers: list[Any] = [NoAnswer("")] * len(batch)
    pending: Sequence[int] = range(len(batch))
    for _ in range(_TRIES):
        try:
            heard = await call(batch.select(pending))
        except StoreUnavailable as error:
            heard = [NoAnswer(str(error))] * len(pending)
        for at, answer in zip(pending, heard, strict=True):
            answers[at] = answer
        pending = [at for at in pending if isinstance(answers[at], NoAnswer)]
        if not pending:
            break
        result.again += 1
        await asyncio.sleep(0.05)
    return answers


def _batches(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


async def _serve(job: Job) -> None:
    from .kinds import open_store

    async with open_store(job.url, job.options) as store:
        racer = Racer(job, store)
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        while heat := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            result = await racer.run(heat)
            print(msgspec.json.encode(result).decode(), flush=True)


# --- the parent ------------------------------------------------------------------------------


class Outcome(Struct):
    """What came of one heat."""

    items: list[tuple[bytes, ...]]
    rivals: int
    wins: list[Win]
    others: Counter[str]
    again: int
    records: dict[bytes, Record | None]
    """What stands there afterwards."""


async def race(
    store: Store, place: dict[str, Any], *, keys: int = 500, rivals: int = 64, slack_s: float = 0.0
) -> dict[str, Outcome]:
    """Run all heats over *place*; *store* is another handle on it."""
    prefix = SystemDice().tokens(1)[0].hex()
    raced = {heat: keys_of(prefix, heat, keys) for heat in HEATS}
    await _prepare(store, raced)
    lapsed_ms = await store.now_ms() + _SHORT_MS + int(slack_s * 1000) + 50
    racers = [
        await _spawn(Job(number=number, prefix=prefix, keys=keys, rivals=rivals, **place))
        for number in range(PROCESSES)
    ]
    outcomes = {}
    try:
        for racer in racers:
            assert await racer.stdout.readline() == b"ready\n"
        for heat in HEATS:
            if heat == "take-overs":
                await asyncio.sleep(max(lapsed_ms - await store.now_ms(), 0) / 1000)
            outcomes[heat] = await _heat(store, racers, heat, raced[heat], rivals)
        for racer in racers:
            racer.stdin.close()
            assert await racer.wait() == 0
    finally:
        for racer in racers:
            if racer.returncode is None:
                racer.kill()
                await racer.wait()
    return outcomes


async def _prepare(store: Store, raced: dict[str, list[bytes]]) -> None:
    """Claim what is to be taken over, and what is to be committed."""
    lapsing = _wants([[key] for key in raced["take-overs"]], _SHORT_MS)
    known = _wants([[key] for key in raced["commits"]])
    known = replace(known, generation=[*map(_generation, raced["commits"])])
    for wants in (lapsing, known):
        answers = await _insist(store.claim, wants, Result([], {}))
        assert all(isinstance(answer, Claim) for answer in answers)


async def _spawn(job: Job) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        msgspec.json.encode(job).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
    )


async def _heat(
    store: Store,
    racers: Sequence[asyncio.subprocess.Process],
    heat: str,
    keys: Sequence[bytes],
    rivals: int,
) -> Outcome:
    for racer in racers:
        racer.stdin.write(f"{heat}\n".encode())
    lines = await asyncio.gather(*(racer.stdout.readline() for racer in racers))
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    records: list[Record | None] = []
    for at in range(0, len(keys), 100):
        records += await store.peek(keys[at : at + 100])
    return Outcome(
        items_of(heat, keys),
        rivals,
        [win for result in results for win in result.wins],
        sum((Counter(result.others) for result in results), Counter()),
        sum(result.again for result in results),
        dict(zip(keys, records, strict=True)),
    )


# --- the judge -------------------------------------------------------------------------------


def faults(heat: str, outcome: Outcome) -> list[str]:
    """Tell what is wrong with *outcome*; nothing, if the store is right."""
    wins = Counter(win.at for win in outcome.wins)
    found = [f"item {at} was won {times} times" for at, times in wins.items() if times > 1]
    if heat == "ring":
        found += [] if wins else ["nobody won anything"]
    else:
        lost = [at for at in range(len(outcome.items)) if at not in wins]
        found += [f"item {at} was won by nobody" for at in lost]
    refusal = Reply.ALREADY.value if heat == "commits" else Busy.__name__
    expected = len(outcome.items) * outcome.rivals - len(outcome.wins)
    if outcome.others != Counter({refusal: expected}):
        found.append(f"{expected} should have heard {refusal}, but: {dict(outcome.others)}")
    attempts = 2 if heat == "take-overs" else 1
    found += [
        f"item {win.at}: attempt {win.attempts}"
        for win in outcome.wins
        if set(win.attempts) - {attempts}
    ]
    found += _untrue(outcome) if heat == "commits" else _half_taken(outcome)
    return found


def _half_taken(outcome: Outcome) -> list[str]:
    """Compare what stands there with what was won: each key has its winner's token, or none."""
    winners = {key: win.token for win in outcome.wins for key in outcome.items[win.at]}
    held = {key: r.token for key, r in outcome.records.items() if r is not None and r.token}
    return [
        f"{key!r} is held by {held.get(key)!r}, but was won by {winners.get(key)!r}"
        for key in outcome.records
        if held.get(key) != winners.get(key)
    ]


def _untrue(outcome: Outcome) -> list[str]:
    return [
        f"{key!r} is not done: {record}"
        for key, record in outcome.records.items()
        if record is None or record.fate is not Fate.DELIVERED
    ]


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_serve(msgspec.json.decode(sys.argv[1], type=Job)))
