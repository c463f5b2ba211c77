import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, TypeVar

import pytest
import pytest_asyncio
from msgspec.structs import replace

from oncebridge.base.clock import SystemDice
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    HELD,
    Claim,
    ClaimAnswer,
    Column,
    Commit,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extension,
    Extensions,
    Fate,
    Memories,
    Memory,
    Record,
    Release,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Reply,
    Store,
    Want,
    Wants,
    spread,
)
from oncebridge.testing.clock import ManualClock

_Case = TypeVar("_Case", bound=Callable[..., Awaitable[None]])
_Batch = TypeVar("_Batch", Wants, Commits, Releases, Extensions, Memories)

_NEEDS: dict[str, str] = {}

CONTENT = b"1" * 32
OTHER = b"2" * 32
TASKS = 16


def needs(capability: str) -> Callable[[_Case], _Case]:
    """
    Leave a case out of classes that do not have *capability*.

    It is one of `shared`, `purges`, `portable` and `manual_time`.
    """

    def mark(case: _Case) -> _Case:
        _NEEDS[case.__name__] = capability
        return case

    return mark


class Harness:
    """The settings, the fixture and the helpers of all cases."""

    real_time: ClassVar[bool] = False
    """True if the backend has its own clock; `wait` then really waits."""
    shared: ClassVar[bool] = False
    """True if two handles can be opened on one backend; then write `open_second` too."""
    purges: ClassVar[bool] = True
    """True if `purge` or the backend removes records `purge_slack_ms` after `keep_until_ms`."""
    portable: ClassVar[bool] = False
    """True if it has `scan` and `load`, so that records can be copied to another store."""
    unit_ms: ClassVar[int] = 150
    """The shortest lease. With `real_time`, a call must be much faster than this."""
    tolerance_ms: ClassVar[int] = 100
    """With `real_time`: how much a stored time may differ from the expected one."""
    wait_slack_ms: ClassVar[int] = 20
    """With `real_time`: how much longer to wait, for rounding and the margin of a skewed clock."""
    purge_slack_ms: ClassVar[int] = 60_000
    """How long a record may stay after `keep_until_ms`. Use a small value with `real_time`."""
    left_out: ClassVar[tuple[str, ...]] = ()
    """The cases that this class does not run."""

    clock: ManualClock
    store: Store

    # --- to be written or overridden ---------------------------------------------

    def open(self, clock: ManualClock) -> AbstractAsyncContextManager[Store]:
        """Open a store that is empty, or in which no other test uses our keys."""
        raise NotImplementedError

    def open_second(self, clock: ManualClock) -> AbstractAsyncContextManager[Store]:
        """Open another handle on the backend that `open` has just opened."""
        raise NotImplementedError

    async def wait(self, ms: int) -> None:
        """Wait until *ms* have passed by the store's clock."""
        if self.real_time:
            await asyncio.sleep((ms + self.wait_slack_ms) / 1000)
        else:
            self.clock.advance(ms)

    def token(self, worker: str = "") -> bytes:  # noqa: ARG002 - used by a faulty harness
        """Return a new token for a claim of *worker*."""
        return _fresh()

    def generation(self, worker: str = "") -> bytes:  # noqa: ARG002 - used by a faulty harness
        """Return a new generation for a claim of *worker*."""
        return _fresh()

    # --- running cases -----------------------------------------------------------

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Open the store of one case."""
        self.clock = ManualClock()
        async with self.open(self.clock) as self.store:
            yield

    @pytest_asyncio.fixture(autouse=True)
    async def _started(self, request: pytest.FixtureRequest) -> AsyncIterator[None]:
        if request.function.__name__ == "test_what_is_left_out_is_said":
            request.node.user_properties.extend(("left_out", name) for name in self.left_out)
        async with self.started():
            yield

    @classmethod
    def cases(cls) -> list[str]:
        """Return the names of the cases that this class runs."""
        return [name for name in dir(cls) if name.startswith("test_") and getattr(cls, name)]

    async def run(self, case: str) -> None:
        """Run one case without pytest."""
        async with self.started():
            await getattr(self, case)()

    # --- helpers for cases -------------------------------------------------------

    @property
    def short(self) -> int:
        """A lease or window that cases wait for."""
        return self.unit_ms

    @property
    def long(self) -> int:
        """A lease or window that no case ever waits for."""
        return 400 * self.unit_ms

    def key(self, name: bytes = b"") -> bytes:
        return _fresh().hex().encode() + b"/" + name

    def keys(self, count: int) -> list[bytes]:
        start = self.key()
        return [start + b"%d" % number for number in range(count)]

    def want(
        self,
        *parts: bytes | Part,
        worker: str = "",
        content: bytes = b"",
        lease_ms: int | None = None,
        keep_ms: int | None = None,
        memo: bytes = b"",
    ) -> Want:
        return Want(
            tuple(Part(part, content) if isinstance(part, bytes) else part for part in parts),
            self.token(worker),
            self.generation(worker),
            self.long if lease_ms is None else lease_ms,
            self.long if keep_ms is None else keep_ms,
            memo,
        )

    def one_call(
        self,
        keys: Sequence[bytes],
        *,
        content: Column[bytes] = b"",
        lease_ms: Column[int] | None = None,
        memo: Column[bytes] = b"",
        sizes: list[int] | None = None,
    ) -> Wants:
        """Return a claim of all *keys* with one token and one generation, as workers send it."""
        return Wants(
            [*keys],
            self.token(),
            self.generation(),
            self.long if lease_ms is None else lease_ms,
            self.long,
            memo,
            content,
            sizes=sizes,
        )

    def done(
        self,
        claim: Claim,
        fate: Fate = Fate.DELIVERED,
        *,
        part: int = 0,
        window_ms: int | None = None,
        hard_ms: int = 0,
        memo: bytes | None = None,
    ) -> Commit:
        held = claim.held[part]
        window = self.long if window_ms is None else window_ms
        return Commit(held.key, held.generation, fate, window, hard_ms, memo)

    def back(
        self,
        claim: Claim,
        delay_ms: int = 0,
        *,
        part: int = 0,
        keep_ms: int | None = None,
        memo: bytes | None = None,
        unsent: bool = False,
    ) -> Release:
        keep = self.long if keep_ms is None else keep_ms
        return Release(claim.held[part].key, claim.token, delay_ms, keep, memo, unsent)

    def more(self, claim: Claim, lease_ms: int | None = None, *, part: int = 0) -> Extension:
        return Extension(
            claim.held[part].key, claim.token, self.long if lease_ms is None else lease_ms
        )

    def memory(
        self,
        key: bytes,
        fate: Fate = Fate.DELIVERED,
        *,
        window_ms: int | None = None,
        content: bytes = b"",
        memo: bytes = b"",
    ) -> Memory:
        window = self.long if window_ms is None else window_ms
        return Memory(key, _fresh(), fate, window, content, memo)

    def near(self, actual_ms: int, expected_ms: int) -> bool:
        """Return True if the times are equal; with `real_time`, if they differ by little."""
        return abs(actual_ms - expected_ms) <= (self.tolerance_ms if self.real_time else 0)

    async def lapsed(self, *parts: bytes | Part, content: bytes = b"", memo: bytes = b"") -> Claim:
        """Claim and let the lease run out."""
        want = self.want(*parts, lease_ms=self.short, content=content, memo=memo)
        claim = await self.hold(want)
        await self.wait(self.short)
        return claim

    async def committed(
        self,
        key: bytes,
        *,
        fate: Fate = Fate.DELIVERED,
        window_ms: int | None = None,
        hard_ms: int = 0,
        content: bytes = b"",
        memo: bytes = b"",
    ) -> Claim:
        """Claim and commit."""
        claim = await self.hold(self.want(key, content=content, memo=memo))
        asked = self.done(claim, fate, window_ms=window_ms, hard_ms=hard_ms)
        assert await self.commit(asked) is Reply.COMMITTED
        return claim

    async def purge(self) -> None:
        """Purge several times, so that all expired records are removed."""
        for _ in range(5):
            await self.store.purge(10_000)

    async def _claims(self, count: int) -> list[Claim]:
        answers = await self.ask_all([self.want(key) for key in self.keys(count)])
        return [claimed(answer) for answer in answers]

    # --- calls, at `store` or at another handle -----------------------------------

    async def ask_all(self, wants: Iterable[Want], at: Store | None = None) -> list[ClaimAnswer]:
        return await ask_all(at or self.store, wants)

    async def ask(self, want: Want, at: Store | None = None) -> ClaimAnswer:
        (answer,) = await self.ask_all([want], at)
        return answer

    async def hold(self, want: Want, at: Store | None = None) -> Claim:
        """Claim, and return the claim, which must be granted."""
        return claimed(await self.ask(want, at))

    async def commit(self, asked: Commit, at: Store | None = None) -> CommitAnswer:
        (answer,) = await (at or self.store).commit(Commits.of([asked]))
        return answer

    async def release(self, asked: Release) -> ReleaseAnswer:
        (answer,) = await self.store.release(Releases.of([asked]))
        return answer

    async def extend(self, asked: Extension) -> ExtendAnswer:
        (answer,) = await self.store.extend(Extensions.of([asked]))
        return answer

    async def remember(self, asked: Memory) -> RememberAnswer:
        (answer,) = await self.store.remember(Memories.of([asked]))
        return answer

    async def look(self, key: bytes) -> Record | None:
        """Return the record of one key."""
        return (await self.store.peek([key]))[0]

    async def see(self, key: bytes) -> Record:
        """Return the record of one key, which must exist."""
        return (await self.see_all([key]))[0]

    async def see_all(self, keys: Sequence[bytes]) -> list[Record]:
        """Return the records of *keys*, which must all exist."""
        records = [record for record in await self.store.peek(keys) if record is not None]
        assert [record.key for record in records] == [*keys]
        return records


def claimed(answer: ClaimAnswer) -> Claim:
    """Return the answer, which must be a claim."""
    assert isinstance(answer, Claim), answer
    return answer


async def ask_all(store: Store, wants: Iterable[Want]) -> list[ClaimAnswer]:
    """Claim, and return the answers: one per want, each in the form that `ClaimAnswers` asks for."""
    asked = wants if isinstance(wants, Wants) else Wants.of(wants)
    answers = await store.claim(asked)
    assert len(answers.each) == len(asked), "there is one answer per want"
    for want, answer in zip(asked, answers.each, strict=True):
        if isinstance(answer, int):
            assert answer == HELD
        elif isinstance(answer, Claim):
            assert not answer.is_as_asked(want), "what is granted as asked is HELD"
    return [*answers]


def listed(batch: _Batch) -> _Batch:
    """Return *batch* with a list for every column."""
    columns: dict[str, Any] = {}
    for name in batch.__struct_fields__[1:]:
        count = len(batch.keys) if name in {"hash", "slide_ms"} else len(batch)
        columns[name] = spread(getattr(batch, name), count)
    if isinstance(batch, Wants):
        columns["sizes"] = batch.sizes or [1] * len(batch)
    return replace(batch, **columns)


def _fresh() -> bytes:
    return SystemDice().tokens(1)[0]
