"""
Stand-ins that misbehave on request, and time that costs nothing.

`virtual` runs a test on a loop whose clock jumps to the next timer instead of waiting for
it, so leases, heartbeats and back-offs keep their real lengths and a test takes
milliseconds. `Bench` is a gateway between a `FaultyStore`, a `ScriptedSink` and
`FailingDeadLetters`, all on that time; when it is left, the books must balance.
"""

import asyncio
import functools
import gc
import json
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from tests.size import is_full

from oncebridge import Delivery, Gateway, Outcome, Rule, Settings, StoreUnavailable, Yes, parse
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.errors import DeadLetterError
from oncebridge.stores.api import ClaimAnswers, NoAnswer, Record
from oncebridge.stores.memory import MemoryStore

START_MS = 1_700_000_000_000


# --- time ---------------------------------------------------------------------------------


class _Selector(selectors.SelectSelector):
    """Never waits: where there is nothing to do, the loop's time goes on to the next timer."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and no timer is set: a deadlock")
            self.skipped += max(timeout, 0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time is the sum of all waits."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return 1000 + self._virtual.skipped


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on virtual time; errors that nobody hears of fail it too."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        unheard: list[dict[str, Any]] = []
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: unheard.append(context))
            runner.run(test(*args, **kwargs))
            if is_full():
                gc.collect()
        assert unheard == [], unheard

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


def now_ms() -> int:
    """Tell the time that stores on the bench live by."""
    return START_MS + round(now() * 1000)


async def eventually(holds: Callable[[], Any], within_s: float = 60) -> None:
    """Wait until *holds*."""
    ends = now() + within_s
    while not holds():
        assert now() < ends, "it never happened"
        await asyncio.sleep(0.01)


# --- chance -------------------------------------------------------------------------------


class CountingDice:
    """Tokens that are counted and fractions that are always the same."""

    drawn = 0

    def __init__(self, fraction: float = 0.5) -> None:
        self._fraction = fraction

    def tokens(self, count: int) -> list[bytes]:
        first = CountingDice.drawn + 1
        CountingDice.drawn += count
        return [number.to_bytes(16) for number in range(first, first + count)]

    def fraction(self) -> float:
        return self._fraction


# --- events -------------------------------------------------------------------------------


def event(detail: Any = None, **envelope: Any) -> bytes:
    """Write an event; `_` in a name of the envelope stands for `-`."""
    whole = {"id": "e1", "detail-type": "Order", "source": "shop"}
    whole |= {name.replace("_", "-"): value for name, value in envelope.items()}
    whole = {name: value for name, value in whole.items() if value is not None}
    return json.dumps(whole | {"detail": {"n": 1} if detail is None else detail}).encode()


def rule(**spec: Any) -> Rule:
    return Rule.parse({"name": "the rule"} | spec)


# --- sink ---------------------------------------------------------------------------------

Step = Any
"""What the sink does with one call: see `ScriptedSink`."""


@dataclass(frozen=True)
class After:
    """Take *seconds*, then do *step*."""

    seconds: float
    step: Step


@dataclass(frozen=True)
class Deaf:
    """Take *seconds* whatever happens, cancellation included, then do *step*."""

    seconds: float
    step: Step


@dataclass(frozen=True)
class Raw:
    """Answer *value* as it is, for the whole call."""

    value: Any


class ScriptedSink:
    """
    Record what comes, and answer by *script*, one step a call; then *otherwise*.

    A step is an answer (given for every delivery of the call), a list of answers, an
    exception to raise, `After`, `Deaf` or `Raw`, or a function from a delivery to a step.
    """

    def __init__(
        self,
        *script: Step,
        otherwise: Step = Yes(),  # noqa: B008 - frozen
        batch: int = 1,
        concurrency: int = 10,
    ) -> None:
        self.script = list(script)
        self.otherwise = otherwise
        self.batch = batch
        self.concurrency = concurrency
        self.seen: list[Delivery] = []
        """Every delivery that was sent, in order."""
        self.taken: list[Delivery] = []
        """Those that were answered with a yes."""
        self.cancelled = 0
        self.under_way = 0
        self.most_under_way = 0
        self.opened = 0
        self.closed = 0

    async def open(self) -> None:
        self.opened += 1

    async def aclose(self) -> None:
        self.closed += 1

    async def deliver(self, deliveries: Sequence[Delivery]) -> Any:
        self.seen += deliveries
        step = self.script.pop(0) if self.script else self.otherwise
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._do(step, deliveries)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1

    async def _do(self, step: Step, deliveries: Sequence[Delivery]) -> Any:
        match step:
            case After():
                await asyncio.sleep(step.seconds)
                return await self._do(step.step, deliveries)
            case Deaf():
                ends = now() + step.seconds
                while now() < ends:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(ends - now())
                return await self._do(step.step, deliveries)
            case BaseException():
                raise step
            case Raw():
                return step.value
            case list():
                answers = step
            case _ if callable(step):
                return await self._do(step(deliveries[0]), deliveries)
            case _:
                answers = [step] * len(deliveries)
        self.taken += [
            delivery
            for delivery, answer in zip(deliveries, answers, strict=False)
            if isinstance(answer, Yes)
        ]
        return answers

    @property
    def raws(self) -> list[bytes]:
        """The bytes that were taken."""
        return [delivery.event.raw for delivery in self.taken]


# --- store --------------------------------------------------------------------------------


@dataclass
class _Fault:
    times: float
    ends: float
    error: Exception


@dataclass
class _Silence:
    chosen: Callable[[Any], bool]
    times: float
    applied: bool


OPERATIONS = ("claim", "commit", "release", "extend", "remember")
SEAMS = [f"{operation}.{side}" for operation in OPERATIONS for side in ("before", "after")]


class FaultyStore:
    """
    A store with a switch at every seam.

    `arm("commit.after")` lets the next commit be applied and its answer be lost;
    `commit.before` loses the request. `silence` gives single items a `NoAnswer`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.asked: dict[str, list[Any]] = {operation: [] for operation in OPERATIONS}
        """Every item ever asked, by operation."""
        self.takes_s = 0.0
        """How long every call is on its way."""
        self._faults: dict[str, _Fault] = {}
        self._silences: dict[str, _Silence] = {}
        self._meanwhile: dict[str, Callable[[], Awaitable[Any]]] = {}

    def arm(
        self,
        seam: str,
        *,
        times: float = 1,
        for_s: float = 1e9,
        error: Exception | None = None,
    ) -> None:
        """Fail at *seam* the next *times*, but not longer than *for_s*."""
        self._faults[seam] = _Fault(times, now() + for_s, error or StoreUnavailable("no answer"))

    def disarm(self, *seams: str) -> None:
        for seam in seams or list(self._faults):
            self._faults.pop(seam, None)

    def silence(
        self,
        operation: str,
        chosen: Callable[[Any], bool] = lambda _: True,
        *,
        times: float = 1,
        applied: bool = False,
    ) -> None:
        """Answer nothing for the *chosen* items of the next *times* calls."""
        self._silences[operation] = _Silence(chosen, times, applied)

    def meanwhile(self, seam: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Do *work* the next time this seam is passed."""
        self._meanwhile[seam] = work

    async def open(self) -> None:
        await self._pass("open.before")
        await self.inner.open()

    async def claim(self, wants: Any) -> Any:
        return await self._ask("claim", wants)

    async def commit(self, commits: Any) -> Any:
        return await self._ask("commit", commits)

    async def release(self, releases: Any) -> Any:
        return await self._ask("release", releases)

    async def extend(self, extensions: Any) -> Any:
        return await self._ask("extend", extensions)

    async def remember(self, memories: Any) -> Any:
        return await self._ask("remember", memories)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def _ask(self, operation: str, items: Any) -> Any:
        self.calls[operation] += 1
        self.asked[operation] += items
        keys = [key for item in items for key in _keys(item)]
        assert len(keys) == len(set(keys)), "the keys of one call must be distinct"
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        await self._pass(f"{operation}.before")
        answers = await self._apply(operation, items)
        await self._pass(f"{operation}.after")
        return answers

    async def _apply(self, operation: str, items: Any) -> Any:
        call = getattr(self.inner, operation)
        silence = self._silences.get(operation)
        if silence is None or silence.times <= 0 or not any(map(silence.chosen, items)):
            return await call(items)
        silence.times -= 1
        silent = NoAnswer("no answer for this one")
        chosen = [silence.chosen(item) for item in items]
        asked = items
        if not silence.applied:
            asked = items.select([at for at, is_silent in enumerate(chosen) if not is_silent])
        heard = await call(asked)
        each = iter(heard.each if operation == "claim" else heard)
        answers = []
        for is_silent in chosen:
            answer = next(each) if silence.applied or not is_silent else None
            answers.append(silent if is_silent else answer)
        return ClaimAnswers(items, answers, heard.now_ms) if operation == "claim" else answers

    async def _pass(self, seam: str) -> None:
        if seam in self._meanwhile:
            await self._meanwhile.pop(seam)()
        fault = self._faults.get(seam)
        if fault is not None and fault.times > 0 and now() < fault.ends:
            fault.times -= 1
            raise fault.error


def _keys(item: Any) -> list[bytes]:
    return [part.key for part in item.parts] if hasattr(item, "parts") else [item.key]


# --- dead letters -------------------------------------------------------------------------


class FailingDeadLetters(MemoryDeadLetters):
    """Dead letters that cannot be written while *broken*."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken

    async def put(self, letters: Sequence[Any]) -> None:
        if self.broken:
            raise DeadLetterError("the disk is full")
        await super().put(letters)


# --- all together -------------------------------------------------------------------------


class Bench:
    """
    One gateway with a double at every seam, on virtual time.

    A second worker on the same store: `Bench(store=first.store)`. `skew_ms` moves the
    store's clock on, which is what a worker that was frozen for so long would find.
    """

    def __init__(
        self,
        *rules: Rule,
        sink: Any = None,
        store: FaultyStore | None = None,
        dead: Any = ...,
        settings: Settings = Settings(),  # noqa: B008 - frozen
        fraction: float = 0.5,
        **more: Any,
    ) -> None:
        self.skew_ms = 0
        self.sink = ScriptedSink() if sink is None else sink
        self.store = store or FaultyStore(MemoryStore(clock=self.clock))
        self.dead = FailingDeadLetters() if dead is ... else dead
        self.gateway = Gateway(
            store=self.store,
            sink=self.sink,
            rules=rules,
            dead=self.dead,
            settings=settings,
            clock=self.clock,
            dice=CountingDice(fraction),
            **more,
        )

    def clock(self) -> int:
        return now_ms() + self.skew_ms

    @property
    def books(self) -> Any:
        return self.gateway.books

    async def process(self, *arrivals: Any, **more: Any) -> list[Outcome]:
        outcomes = await self.gateway.process(arrivals, **more)
        assert len(outcomes) == len(arrivals)
        assert self.books.balance
        return outcomes

    async def one(self, arrival: Any, **more: Any) -> Outcome:
        (outcome,) = await self.process(arrival, **more)
        return outcome

    async def until_acknowledged(self, arrival: Any, *, rounds: int = 60) -> Outcome:
        """Be a source: bring *arrival* again, as asked, until it is acknowledged."""
        for _ in range(rounds):
            outcome = await self.one(arrival)
            if outcome.acknowledge:
                return outcome
            await asyncio.sleep(max(outcome.retry_after_ms, 100) / 1000)
        raise AssertionError(f"never acknowledged: {outcome}")

    def key(self, arrival: bytes) -> bytes:
        """Give the identifying key of *arrival*."""
        return self.keys(arrival)[-1]

    def keys(self, arrival: bytes) -> list[bytes]:
        plan = self.gateway.rules.plan(parse(arrival))
        return [part.key for part in plan.parts]

    async def record(self, key: bytes) -> Record | None:
        (record,) = await self.store.inner.peek([key])
        return record

    async def letters(self) -> list[Any]:
        return await self.dead.list()

    def check(self) -> None:
        """Look whether the books balance and nothing is left behind."""
        assert self.books.balance
        assert self.books.in_flight == 0
        assert not self.gateway._leases._leases

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if exc[1] is None:
            self.check()
        await self.gateway.aclose()
        assert self.gateway._leases._timer.loop is None
        assert self.gateway._sender.timer.loop is None


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)
