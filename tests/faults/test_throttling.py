"""A sink that throttles gets what it allows: nothing dies, and little of its limit is unused."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import pytest
from tests.faults.doubles import Bench, ScriptedSink, event, now, virtual
from tests.size import full

from oncebridge import Delivery, Never, No, Settings, Throttled, Verdict, Yes
from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
from oncebridge.sources.pump import Pump, Retry, SourceRecord

# --- limiters -------------------------------------------------------------------------------

Limit = Callable[[], float]
"""How many events a second are allowed now."""


class TokenBucket:
    """So many a second, and *burst* at once after a pause."""

    def __init__(self, limit: Limit, burst: float | None = None) -> None:
        self._limit = limit
        self._burst = burst or limit()
        self._tokens = self._burst
        self._at = now()

    def admits(self) -> bool:
        self._tokens = min(self._burst, self._tokens + (now() - self._at) * self._limit())
        self._at = now()
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class FixedWindow:
    """So many in each second of the clock."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._window = 0
        self._count = 0

    def admits(self) -> bool:
        if int(now()) != self._window:
            self._window, self._count = int(now()), 0
        if self._count >= self._limit():
            return False
        self._count += 1
        return True


class SlidingWindow:
    """So many in any second."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._taken: deque[float] = deque()

    def admits(self) -> bool:
        while self._taken and self._taken[0] <= now() - 1:
            self._taken.popleft()
        if len(self._taken) >= self._limit():
            return False
        self._taken.append(now())
        return True


class LimitedSink(ScriptedSink):
    """Take what *limiter* admits, each event for itself, and throttle the rest."""

    def __init__(self, limiter, *, batch: int = 1, retry_after_ms: int = 1000) -> None:
        super().__init__(batch=batch, concurrency=64)
        self._limiter = limiter
        self._refusal = Throttled("HTTP 429", retry_after_ms)

    async def deliver(self, deliveries: Sequence[Delivery]):
        await asyncio.sleep(0.02)
        self.seen += deliveries
        answers = [Yes() if self._limiter.admits() else self._refusal for _ in deliveries]
        await asyncio.sleep(0.03)
        self.taken += [d for d, a in zip(deliveries, answers, strict=True) if type(a) is Yes]
        return answers


def events(count: int) -> list[bytes]:
    return [event({"n": n}, id=f"e{n}") for n in range(count)]


async def pump(bench: Bench, raws: Sequence[bytes]) -> list[int]:
    """Bring *raws* as a queue's worker does, ten at a time; return what goes back to the queue."""
    chunks = iter([raws[at : at + 10] for at in range(0, len(raws), 10)])
    places = iter(range(len(raws)))
    back: list[int] = []

    async def take() -> list[SourceRecord[int]] | None:
        await asyncio.sleep(0.01)
        return [SourceRecord(next(places), raw) for raw in next(chunks, ())] or None

    def answered(place: int, answer: RouterAnswer) -> None:
        if not answer.acknowledge:
            back.append(place)

    router = Router([RouteEntry(bench.gateway, None)])
    made = Pump(router, answered, retry=Retry.WHAT_IS_NOT_RETURNED, ahead=500)
    await made.run(take, takers=4)
    return back


async def delivered_in(bench: Bench, count: int) -> float:
    """Bring *count* events as a queue's worker does, and return how long that took."""
    began = now()
    assert await pump(bench, events(count)) == [], "none went back to the queue"
    assert await bench.letters() == []
    assert bench.gateway.sink_breaker.opened == 0
    assert len(bench.sink.taken) == len({d.key for d in bench.sink.taken}) == count
    assert bench.books.verdicts[Verdict.DELIVERED] == count
    return now() - began


LIMITERS = [TokenBucket, FixedWindow, SlidingWindow]


@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("limiter", LIMITERS)
@virtual
async def test_a_sink_gets_nine_tenths_of_what_it_allows(limiter, batch):
    async with Bench(sink=LimitedSink(limiter(lambda: 20.0), batch=batch)) as bench:
        took = await delivered_in(bench, 600)
        assert took <= 30 / 0.9
        assert bench.books.throttled == len(bench.sink.seen) - 600 < 200
        assert bench.books.ambiguous == 0


@pytest.mark.parametrize("phase", [0.37, *full(0.2, 0.6)])
@virtual
async def test_windows_of_the_clock_that_began_at_any_moment_are_used(phase):
    await asyncio.sleep(phase)
    async with Bench(sink=LimitedSink(FixedWindow(lambda: 20.0))) as bench:
        assert await delivered_in(bench, 2400) <= 120 / 0.9


@pytest.mark.parametrize("limiter", LIMITERS)
@pytest.mark.parametrize(("first", "then"), [(60.0, 20.0), *full((20.0, 60.0), (20.0, 5.0))])
@virtual
async def test_a_limit_that_changes_is_found_again(limiter, first, then):
    began = now()
    limit = limiter(lambda: first if now() < began + 60 else then)
    async with Bench(sink=LimitedSink(limit)) as bench:
        after = int(then * 120)
        took = await delivered_in(bench, int(first * 60) + after)
        assert took <= 180 / 0.8, "it takes a while to find"


@virtual
@pytest.mark.full
async def test_a_limit_without_bursts_is_found_from_below():
    """A burst at the start gets little through, and says little about the limit."""
    sink = LimitedSink(TokenBucket(lambda: 100.0, burst=5), retry_after_ms=0)
    async with Bench(sink=sink) as bench:
        assert await delivered_in(bench, 8000) <= 80 / 0.9


@virtual
async def test_what_is_throttled_counts_as_no_attempt_and_no_failure():
    sink = ScriptedSink(*[Throttled("HTTP 429")] * 50)
    async with Bench(sink=sink, settings=Settings(max_attempts=2, breaker=3)) as bench:
        outcome = await bench.one(event())
        assert (outcome.verdict, outcome.blamed) == (Verdict.FAILED, False)
        assert outcome.reason == "HTTP 429"
        assert (await bench.until_acknowledged(event())).verdict is Verdict.DELIVERED
        assert {delivery.attempt for delivery in sink.seen} == {1}
        assert bench.gateway.sink_breaker.opened == 0
        assert bench.gateway.down() == bench.gateway.not_ready() == []


@pytest.mark.parametrize("maybe", [False, True])
@virtual
async def test_what_may_have_been_taken_is_remembered_as_such(maybe):
    sink = ScriptedSink(Throttled("HTTP 503", 1000, maybe=maybe), otherwise=Never("no"))
    async with Bench(sink=sink) as bench:
        outcome = await bench.until_acknowledged(event())
        assert outcome.verdict is Verdict.DEAD
        (letter,) = await bench.letters()
        assert letter.maybe_delivered is maybe
        assert bench.books.unwell == maybe


@virtual
async def test_retry_after_holds_for_the_whole_sink():
    sink = ScriptedSink(Throttled("HTTP 429", 7000), concurrency=1)
    async with Bench(sink=sink) as bench:
        began = now()
        first, *others = await bench.process(*events(5))
        assert first.retry_after_ms >= 7000
        assert {outcome.verdict for outcome in others} == {Verdict.DELIVERED}
        assert now() - began >= 7


@virtual
async def test_a_sink_that_throttles_while_it_is_tried_is_not_down():
    sink = ScriptedSink(No("refused"), Throttled("HTTP 429", 1000))
    async with Bench(sink=sink, settings=Settings(breaker=1)) as bench:
        await bench.one(event())
        assert bench.gateway.down() == ["the sink"]
        await asyncio.sleep(2)
        await bench.one(event())
        assert bench.gateway.down() == []


@virtual
async def test_a_sink_that_takes_nothing_and_names_no_time_is_asked_less_and_less():
    sink = ScriptedSink(otherwise=Throttled("SlowDown"))
    async with Bench(sink=sink) as bench:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await bench.until_acknowledged(event(), rounds=10_000)
        assert len(sink.seen) < 60


@virtual
async def test_nothing_more_is_brought_while_enough_wait_for_their_turn():
    sink = LimitedSink(TokenBucket(lambda: 20.0))
    async with Bench(sink=sink) as bench:
        assert bench.gateway.unavailable_s() == 0
        waiting = asyncio.create_task(bench.gateway.process(events(500)))
        await asyncio.sleep(3)
        assert 10 < bench.gateway.unavailable_s() < 30
        assert bench.gateway.not_ready() == bench.gateway.down() == []
        await waiting
        assert bench.gateway.unavailable_s() == 0


@virtual
async def test_a_limit_that_is_not_met_for_long_is_forgotten():
    sink = ScriptedSink(Throttled("HTTP 429", 1000))
    async with Bench(sink=sink) as bench:
        await bench.until_acknowledged(event())
        await asyncio.sleep(400)
        began = now()
        await bench.process(*events(200))
        await bench.process(*[event({"n": n}, id=f"f{n}") for n in range(200)])
        assert now() == began
