"""
Each operation of a store, with what must hold after its answer was lost.

An operation is asked through a wire that is cut, asked again when the wire is whole, and then
the record must be as if it had been asked once.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from oncebridge.base.clock import SystemDice
from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    Commit,
    Commits,
    Duplicate,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    Releases,
    Reply,
    Store,
    Want,
    Wants,
)

LEASE_MS = 60_000
LONGER_MS = 600_000
_KEEP_MS = 600_000


def fresh() -> bytes:
    return SystemDice().tokens(1)[0]


def want(*keys: bytes, lease_ms: int = LEASE_MS) -> Want:
    parts = tuple(Part(key) for key in keys)
    return Want(parts, fresh(), fresh(), lease_ms, _KEEP_MS)


async def only(answers: Any) -> Any:
    (answer,) = await answers
    return answer


class Operation:
    """One request on a key of its own."""

    name: str
    slack_ms = 0
    """How far the clocks of two handles may be apart."""
    is_upkeep = False
    """It changes no record that counts, may take its time, and may need to ask nobody."""

    def __init__(self) -> None:
        self.key = b"wire/" + fresh().hex().encode()

    async def prepare(self, store: Store) -> None:
        """Bring the record into the state in which the request makes sense."""

    async def ask(self, store: Store) -> Any:
        raise NotImplementedError

    def accepts(self, answer: Any) -> bool:
        """Tell whether *answer* may be heard when the request is made again."""
        raise NotImplementedError

    async def is_applied(self, store: Store) -> bool:
        """Tell whether the record shows that the request has arrived."""
        raise NotImplementedError

    async def objection(self, store: Store) -> str:
        """Say what a stranger finds wrong; who gets the key, if it is to be had."""
        raise NotImplementedError

    async def state(self, store: Store) -> Any:
        """Give what a request that arrives late must not change."""
        record = await self.record(store)
        if record is None:
            return None
        return record.token, record.generation, record.attempts, record.fate, record.memo

    async def record(self, store: Store) -> Record | None:
        return await only(store.peek([self.key]))

    async def stranger(self, store: Store) -> Any:
        """Ask for the key as another worker would."""
        return await only(store.claim(Wants.of([want(self.key)])))


class Claiming(Operation):
    name = "claim"

    def __init__(self) -> None:
        super().__init__()
        self.want = want(self.key)

    async def ask(self, store: Store) -> Any:
        return await only(store.claim(Wants.of([self.want])))

    def accepts(self, answer: Any) -> bool:
        return (
            isinstance(answer, Claim)
            and answer.token == self.want.token
            and [(h.attempts, h.generation) for h in answer.held] == [(1, self.want.generation)]
        )

    async def is_applied(self, store: Store) -> bool:
        return await self.record(store) is not None

    async def objection(self, store: Store) -> str:
        answer = await self.stranger(store)
        return "" if isinstance(answer, Busy) else f"a stranger heard {answer}"


class ClaimingParts(Claiming):
    name = "claim of parts"

    def __init__(self) -> None:
        super().__init__()
        self.want = want(self.key + b"/tier", self.key)

    def accepts(self, answer: Any) -> bool:
        return (
            isinstance(answer, Claim)
            and answer.token == self.want.token
            and [(h.attempts, h.generation) for h in answer.held] == [(1, self.want.generation)] * 2
        )

    async def objection(self, store: Store) -> str:
        records = await store.peek([part.key for part in self.want.parts])
        tokens = [record.token if record else None for record in records]
        if tokens != [self.want.token] * 2:
            return f"half taken: {tokens}"
        return await super().objection(store)


class Held(Operation):
    """A request about a claim that stands."""

    def __init__(self) -> None:
        super().__init__()
        self._want = want(self.key)

    async def prepare(self, store: Store) -> None:
        answer = await only(store.claim(Wants.of([self._want])))
        if isinstance(answer, NoAnswer):
            raise StoreUnavailable(answer.reason)
        assert isinstance(answer, Claim), answer
        self.claim = answer


class Committing(Held):
    name = "commit"

    async def ask(self, store: Store) -> Any:
        generation = self.claim.held[0].generation
        commit = Commit(self.key, generation, Fate.DELIVERED, LONGER_MS, memo=b"done")
        return await only(store.commit(Commits.of([commit])))

    def accepts(self, answer: Any) -> bool:
        return answer in (Reply.COMMITTED, Reply.ALREADY)

    async def is_applied(self, store: Store) -> bool:
        record = await self.record(store)
        return record is not None and record.fate is not None

    async def objection(self, store: Store) -> str:
        answer = await self.stranger(store)
        expected = Duplicate(self.key, Fate.DELIVERED, b"done")
        return "" if answer == expected else f"a stranger heard {answer}"


class Releasing(Held):
    name = "release"

    async def ask(self, store: Store) -> Any:
        release = Release(self.key, self.claim.token, keep_ms=_KEEP_MS)
        return await only(store.release(Releases.of([release])))

    def accepts(self, answer: Any) -> bool:
        return answer in (Reply.RELEASED, Reply.FENCED)

    async def is_applied(self, store: Store) -> bool:
        record = await self.record(store)
        return record is not None and not record.token

    async def objection(self, store: Store) -> str:
        answer = await self.stranger(store)
        waited_ms = 0
        while isinstance(answer, Busy) and waited_ms < self.slack_ms:
            await asyncio.sleep(0.2)
            waited_ms += 200
            answer = await self.stranger(store)
        if not isinstance(answer, Claim) or answer.held[0].attempts != 2:
            return f"a stranger heard {answer}"
        return ""


class Extending(Held):
    name = "extend"

    async def ask(self, store: Store) -> Any:
        return await only(
            store.extend(Extensions.of([Extension(self.key, self.claim.token, LONGER_MS)]))
        )

    def accepts(self, answer: Any) -> bool:
        return answer is Reply.EXTENDED

    async def is_applied(self, store: Store) -> bool:
        record = await self.record(store)
        return record is not None and record.until_ms > self.claim.now_ms + 2 * LEASE_MS

    async def objection(self, store: Store) -> str:
        answer = await self.stranger(store)
        if not isinstance(answer, Busy) or answer.left_ms < LONGER_MS - LEASE_MS:
            return f"a stranger heard {answer}"
        return ""


class Remembering(Operation):
    name = "remember"

    async def ask(self, store: Store) -> Any:
        memory = Memory(self.key, fresh(), Fate.DELIVERED, LONGER_MS, memo=b"known")
        return await only(store.remember(Memories.of([memory])))

    def accepts(self, answer: Any) -> bool:
        return answer in (Reply.REMEMBERED, Reply.KNOWN)

    async def is_applied(self, store: Store) -> bool:
        return await self.record(store) is not None

    async def objection(self, store: Store) -> str:
        answer = await self.stranger(store)
        expected = Duplicate(self.key, Fate.DELIVERED, b"known")
        return "" if answer == expected else f"a stranger heard {answer}"


class Forgetting(Operation):
    name = "forget"

    async def prepare(self, store: Store) -> None:
        memory = Memory(self.key, fresh(), Fate.DELIVERED, LONGER_MS)
        assert await only(store.remember(Memories.of([memory]))) in (Reply.REMEMBERED, Reply.KNOWN)

    async def ask(self, store: Store) -> Any:
        return await only(store.forget([self.key]))

    def accepts(self, answer: Any) -> bool:
        return answer in (True, False)

    async def is_applied(self, store: Store) -> bool:
        return await self.record(store) is None

    async def objection(self, store: Store) -> str:
        answer = await self.stranger(store)
        if not isinstance(answer, Claim) or answer.held[0].attempts != 1:
            return f"a stranger heard {answer}"
        return ""


class Peeking(Held):
    name = "peek"

    async def ask(self, store: Store) -> Any:
        return await self.record(store)

    def accepts(self, answer: Any) -> bool:
        return isinstance(answer, Record) and answer.token == self.claim.token

    async def is_applied(self, store: Store) -> bool:
        return False

    async def objection(self, store: Store) -> str:
        answer = await self.stranger(store)
        return "" if isinstance(answer, Busy) else f"a stranger heard {answer}"


class ClaimingMany(Operation):
    """More than goes into one request, with one token: what is lost may be a part of it."""

    name = "claim of many"

    def __init__(self, count: int = 10) -> None:
        super().__init__()
        one = want(self.key)
        parts = [(Part(self.key + b"/%d" % number),) for number in range(count)]
        self.wants = [replace(one, parts=part) for part in parts]

    async def ask(self, store: Store) -> Any:
        return await store.claim(Wants.of(self.wants))

    def accepts(self, answer: Any) -> bool:
        return [(type(a), a.token, a.held[0].attempts) for a in answer if isinstance(a, Claim)] == [
            (Claim, asked.token, 1) for asked in self.wants
        ]

    async def is_applied(self, store: Store) -> bool:
        return any(await store.peek([asked.parts[0].key for asked in self.wants[:100]]))

    async def objection(self, store: Store) -> str:
        every = max(len(self.wants) // 10, 1)
        strangers = [want(asked.parts[0].key) for asked in self.wants[::every]]
        answers: Sequence[Any] = await store.claim(Wants.of(strangers))
        busy = all(isinstance(answer, Busy) for answer in answers)
        return "" if busy else f"strangers heard {answers}"


class Upkeep(Operation):
    """What is asked now and then."""

    is_upkeep = True

    def accepts(self, answer: Any) -> bool:
        return answer is not None

    async def is_applied(self, store: Store) -> bool:
        return False


class Purging(Upkeep):
    name = "purge"

    async def ask(self, store: Store) -> Any:
        return await store.purge(50)


class Scanning(Upkeep):
    name = "scan"

    async def ask(self, store: Any) -> Any:
        records, _ = await store.scan(limit=20)
        return len(records)


class Timing(Upkeep):
    name = "now"

    async def ask(self, store: Store) -> Any:
        return await store.now_ms()


OPERATIONS: tuple[type[Operation], ...] = (
    Claiming,
    ClaimingParts,
    Committing,
    Releasing,
    Extending,
    Remembering,
    Forgetting,
    Peeking,
)
UPKEEP: tuple[type[Operation], ...] = (Purging, Scanning, Timing)
