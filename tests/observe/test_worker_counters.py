"""What is counted while events pass: all of it, once, and within bounds."""

import asyncio
import random
from collections import Counter

import msgspec
import pytest
from tests.faults.doubles import Bench, ScriptedSink, now_ms, virtual
from tests.observe.arrivals import TOPIC, event, together

from oncebridge import Gateway, StoreUnavailable
from oncebridge.engine.causes import Cause
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import Decision, RoundTrip
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.events.event import Event, Unreadable, parse
from oncebridge.genesys.preset import genesys_rules
from oncebridge.genesys.simulator import simulate
from oncebridge.observe.counts import ITEMS, LAGS, MINUTES, NOISIEST, SECONDS, Counts
from oncebridge.observe.duplicate_causes import DuplicateCauses
from oncebridge.observe.worker_counters import TopCounts, WorkerCounters
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing.clock import ManualClock

AT_MS = 1_767_323_045_000
"""The time that the events of `arrivals` bear: 2026-01-02T03:04:05Z."""
MINUTE_MS = 60_000


class Counted:
    """Meters on a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock(AT_MS)
        self.meters = WorkerCounters(self.clock)

    def decide(
        self,
        verdict: Verdict = Verdict.DELIVERED,
        *,
        cause: Cause | None = None,
        route: str = "crm",
        rule: str = "orders",
        took_s: float = 0.003,
        of: Event | Unreadable | None = None,
    ) -> None:
        outcome = Outcome(verdict, True, rule)
        one = Decision(route, of or event(), outcome, self.clock(), took_s)
        self.meters.decided(together(one), [cause])

    def counts(self, **books: Books) -> Counts:
        return self.meters.counts(books)


@pytest.fixture
def counted() -> Counted:
    return Counted()


# --- decisions --------------------------------------------------------------------------------


def test_nothing_is_counted_before_anything_happens(counted):
    assert counted.counts() == Counts()


def test_verdicts_are_counted_by_route_and_rule(counted):
    counted.decide()
    counted.decide()
    counted.decide(Verdict.DUPLICATE)
    counted.decide(rule="default")
    counted.decide(route="audit", rule="")
    routes = counted.counts().routes
    assert routes["crm"].rules == {
        "orders": {"delivered": 2, "duplicate": 1},
        "default": {"delivered": 1},
    }
    assert routes["audit"].rules == {"": {"delivered": 1}}


def test_causes_are_counted_by_route(counted):
    counted.decide(Verdict.DUPLICATE, cause=Cause.REDELIVERY)
    counted.decide(Verdict.DUPLICATE, cause=Cause.REDELIVERY, rule="default")
    counted.decide(Verdict.STALE, cause=Cause.OUT_OF_ORDER)
    counted.decide(Verdict.CONFLICT, cause=Cause.ID_REUSED)
    counted.decide(Verdict.CONFLICT)
    counted.decide(Verdict.DUPLICATE, cause=Cause.REPLAY, route="audit")
    routes = counted.counts().routes
    assert routes["crm"].causes == {"redelivery": 2, "out-of-order": 1, "id-reused": 1}
    assert routes["audit"].causes == {"replay": 1}


def test_how_long_it_took_is_counted_for_all(counted):
    for took_s in (0.0005, 0.003, 0.004, 70.0):
        counted.decide(took_s=took_s)
    counted.decide(Verdict.DUPLICATE, took_s=0.003)
    took = counted.counts().routes["crm"].took
    expected = [0] * (len(SECONDS) + 1)
    expected[0], expected[3], expected[-1] = 1, 3, 1
    assert took.counts == expected
    assert took.sum == pytest.approx(70.0105)


def test_lag_is_counted_from_the_events_own_time_to_its_delivery(counted):
    counted.clock.advance(2000)
    counted.decide(took_s=0.25)
    counted.clock.advance(3600_000)
    counted.decide(took_s=0.0)
    counted.decide(Verdict.DUPLICATE)
    lag = counted.counts().routes["crm"].lag
    assert lag.count == 2
    assert lag.counts[LAGS.index(2.5)] == 1
    assert lag.counts[LAGS.index(21600.0)] == 1
    assert lag.sum == pytest.approx(2.25 + 3602)


@pytest.mark.parametrize("time", [None, "", "soon", "2026-13-45T99:99:99Z", "2" * 100_000])
def test_an_event_that_bears_no_time_has_no_lag(counted, time):
    for _ in range(2):
        counted.decide(of=event(time=time))
    route = counted.counts().routes["crm"]
    assert route.lag.count == 0
    assert route.took.count == 2


def test_an_event_from_the_future_has_no_lag_to_speak_of(counted):
    counted.decide(of=event(time="2030-01-01T00:00:00Z"))
    lag = counted.counts().routes["crm"].lag
    assert (lag.counts[0], lag.sum) == (1, 0.0)


def test_what_is_no_event_is_counted_too(counted):
    counted.decide(Verdict.DEAD, of=Unreadable(b"x", "not-json", "no"))
    counts = counted.counts()
    assert counts.routes["crm"].rules == {"orders": {"dead": 1}}
    assert counts.topics == {}


# --- minutes ----------------------------------------------------------------------------------


def test_verdicts_are_counted_by_the_minute_for_an_hour(counted):
    first = AT_MS // MINUTE_MS
    for minute in range(90):
        for _ in range(minute + 1):
            counted.decide(route=f"route {minute % 2}")
        counted.decide(Verdict.DUPLICATE)
        counted.clock.advance(MINUTE_MS)
    minutes = counted.counts().minutes
    now = first + 90
    assert minutes == {
        first + n: {"delivered": n + 1, "duplicate": 1, "forwarded": n + 1}
        for n in range(90)
        if first + n > now - MINUTES
    }


def test_what_was_asked_in_between_is_counted_once(counted):
    for _ in range(3):
        counted.decide()
        counted.counts()
    counted.clock.advance(MINUTE_MS)
    counted.decide()
    minute = AT_MS // MINUTE_MS
    assert counted.counts().minutes == {
        minute: {"delivered": 3, "forwarded": 3},
        minute + 1: {"delivered": 1, "forwarded": 1},
    }


def test_what_a_sink_took_is_counted_whatever_the_verdict(counted):
    """In shadow mode it takes duplicates as well."""
    outcome = Outcome(Verdict.DUPLICATE, True, "orders", forwarded=True)
    two = [Decision("crm", event(), outcome, AT_MS)] * 2
    counted.meters.decided(together(*two), [Cause.REPLAY] * 2)
    counted.decide(Verdict.DUPLICATE)
    minutes = counted.counts().minutes
    assert minutes == {AT_MS // MINUTE_MS: {"duplicate": 3, "forwarded": 2}}


def test_a_clock_that_is_set_back_loses_no_minute_for_good(counted):
    counted.decide()
    counted.clock.now_ms -= 30 * MINUTE_MS
    counted.counts()
    counted.decide()
    counted.decide()
    minutes = counted.counts().minutes
    assert minutes == {AT_MS // MINUTE_MS - 30: {"delivered": 2, "forwarded": 2}}
    assert counted.counts().routes["crm"].rules == {"orders": {"delivered": 3}}


# --- topics and entities ----------------------------------------------------------------------


def test_topics_tell_how_many_arrived_and_how_many_of_these_again(counted):
    counted.decide()
    counted.decide(Verdict.DUPLICATE)
    counted.decide(Verdict.STALE)
    counted.decide(Verdict.UNCHANGED)
    counted.decide(Verdict.FAILED)
    counted.decide(of=event(**{"detail-type": "Order"}))
    assert counted.counts().topics == {
        TOPIC: {"arrived": 5, "repeats": 3},
        "Order": {"arrived": 1, "repeats": 0},
    }


def test_entities_tell_what_came_again_most_often(counted):
    counted.decide(of=event(1))
    for number in (2, 3, 3, 3):
        counted.decide(Verdict.DUPLICATE, of=event(number))
    assert counted.counts().entities == {"conversation-3": 3, "conversation-2": 1}


def test_a_bare_detail_has_the_topic_that_it_names(counted):
    name = "v2.users.0b1c9c3a-1111-4222-8333-444455556666.presence"
    bare = parse(b'{"topicName":"%s","eventBody":{"id":"u1"}}' % name.encode(), bare=True)
    for _ in range(3):
        counted.decide(Verdict.DUPLICATE, of=bare)
    counts = counted.counts()
    assert counts.topics == {"v2.users.{id}.presence": {"arrived": 3, "repeats": 3}}
    assert counts.entities == {"u1": 3}


def test_a_bare_detail_without_a_topic_hides_no_other(counted):
    counted.decide(of=parse(b'{"n":1}', bare=True))
    counted.decide(of=parse(b'{"topicName":"v2.users"}', bare=True))
    topics = counted.counts().topics
    assert topics == {"": {"arrived": 1, "repeats": 0}, "v2.users": {"arrived": 1, "repeats": 0}}


def test_a_batch_is_counted_as_its_events_one_by_one():
    dice = random.Random(9)
    told = [
        Decision(
            "crm",
            event(dice.randrange(4), time=f"2026-01-02T03:0{dice.randrange(4)}:05Z")
            if dice.randrange(9)
            else Unreadable(b"x", "not-json", "no"),
            Outcome(verdict, True, dice.choice(["orders", "calls"]), forwarded=dice.random() < 0.5),
            AT_MS,
            0.25,
        )
        for verdict in Verdict
        for _ in range(20)
    ]
    causes = [dice.choice([None, Cause.REPLAY, Cause.ID_REUSED]) for _ in told]
    counts = []
    for size in (1, 20):
        meters = WorkerCounters(ManualClock(AT_MS))
        for at in range(0, len(told), size):
            meters.decided(together(*told[at : at + size]), causes[at : at + size])
        counts.append(meters.counts({}))
    one_by_one, in_batches = counts
    assert in_batches == one_by_one
    assert sum(sum(each.values()) for each in in_batches.routes["crm"].rules.values()) == len(told)


def test_names_that_are_hidden_are_not_told():
    meters = WorkerCounters(ManualClock(AT_MS), names_topics=False, names_entities=False)
    one = Decision("crm", event(), Outcome(Verdict.DUPLICATE, True), AT_MS)
    meters.decided(together(one), [None])
    counts = meters.counts({})
    assert (counts.topics, counts.entities) == ({}, {})
    assert counts.routes["crm"].rules == {"": {"duplicate": 1}}


def test_a_flood_of_names_neither_grows_memory_nor_hides_what_is_noisy(counted):
    dice = random.Random(3)
    for number in range(20_000):
        noisy = number % 10
        topic = f"noisy {noisy}" if noisy < 2 else dice.randbytes(8).hex()
        detail = {"id": topic * (1 if noisy else 50)}
        counted.decide(Verdict.DUPLICATE, of=event(1, detail, **{"detail-type": topic}))
    counts = counted.counts()
    assert len(counts.topics) == len(counts.entities) == NOISIEST
    assert len(counted.meters._topics.found) <= 400
    assert len(counted.meters._entities.found) <= 400
    assert (
        counts.topics["noisy 0"] == counts.topics["noisy 1"] == {"arrived": 2000, "repeats": 2000}
    )
    assert all(len(name) <= 200 for name in (*counts.topics, *counts.entities))
    assert len(msgspec.msgpack.encode(counts)) < 10_000


def test_what_becomes_noisy_late_is_noticed():
    noise = TopCounts(50)

    def count(name: str) -> None:
        (noise.found.get(name) or noise.add(name))[0] += 1

    for number in range(100):
        for _ in range(300):
            count(f"old {number}")
    dice, late = random.Random(5), Counter[str]()
    for _ in range(60_000):
        name = dice.choice(["late 1", "late 2", *[dice.randbytes(6).hex() for _ in range(8)]])
        late[name] += 1
        count(name)
        assert len(noise.found) <= 100
    top = noise.top(20)
    for name in ("late 1", "late 2"):
        assert 0.9 * late[name] <= top[name][0] <= late[name]
    assert all(counts[0] <= max(300, late[name]) for name, counts in noise.found.items())


# --- round trips ------------------------------------------------------------------------------


def test_calls_of_the_store_are_counted_by_name_and_those_of_sinks_by_route(counted):
    for trip in (
        RoundTrip("crm", "store", "claim", 50, 0.002, True),
        RoundTrip("audit", "store", "claim", 1, 0.002, False),
        RoundTrip("crm", "store", "commit", 2000, 0.3, True),
        RoundTrip("crm", "sink", "deliver", 3, 0.04, True),
        RoundTrip("crm", "sink", "deliver", 1, 100.0, False),
    ):
        counted.meters.travelled(trip)
    counts = counted.counts()
    assert set(counts.store) == {"claim", "commit"}
    claim = counts.store["claim"]
    assert (claim.took.count, claim.failed, claim.together.sum) == (2, 1, 51)
    assert claim.together.counts[ITEMS.index(50.0)] == 1
    assert counts.store["commit"].together.counts[-1] == 1
    assert set(counts.routes) == {"crm"}
    crm = counts.routes["crm"]
    assert (crm.sends.count, crm.sent_together.sum, crm.failed_sends) == (2, 4, 1)
    assert crm.sends.counts[-1] == 1


# --- together ---------------------------------------------------------------------------------


def test_the_books_are_told_without_what_is_in_flight(counted):
    books = Books()
    books.arrive(5)
    books.settle(Verdict.DELIVERED, 3)
    counts = counted.counts(crm=books, audit=Books())
    told = counts.routes["crm"].books
    assert (told["arrived"], told["delivered"]) == (5, 3)
    assert "in_flight" not in told
    assert set(counts.routes) == {"crm", "audit"}


def test_what_was_told_does_not_change_later(counted):
    books = Books()
    counted.decide(Verdict.DUPLICATE, cause=Cause.REPLAY)
    counted.meters.travelled(RoundTrip("crm", "store", "claim", 50, 0.002, True))
    counts = counted.counts(crm=books)
    before = msgspec.msgpack.encode(counts)
    books.arrive(3)
    counted.decide(Verdict.DUPLICATE, cause=Cause.REPLAY)
    counted.meters.travelled(RoundTrip("crm", "store", "claim", 50, 0.002, True))
    assert msgspec.msgpack.encode(counts) == before
    assert msgspec.msgpack.encode(counted.counts(crm=books)) != before


@virtual
async def test_all_that_a_gateway_does_on_a_simulated_day_is_counted():
    meters, known = WorkerCounters(now_ms), DuplicateCauses()
    store = MemoryStore(clock=now_ms)
    gateway = Gateway(
        store=store,
        sink=ScriptedSink(batch=20),
        rules=genesys_rules(),
        route="crm",
        hooks=[lambda decisions: meters.decided(decisions, known.causes_of(decisions))],
        trip_hooks=[meters.travelled],
        clock=now_ms,
    )
    day = [arrival.raw for arrival in simulate(11, 1000)]
    outcomes = []
    for at in range(0, 1000, 50):
        outcomes += await gateway.process(day[at : at + 50])
        await asyncio.sleep(20)
    counts = meters.counts({"crm": gateway.books})
    await gateway.aclose()
    crm = counts.routes["crm"]
    by_verdict: Counter[str] = Counter()
    for verdicts in crm.rules.values():
        by_verdict.update(verdicts)
    assert by_verdict == Counter(outcome.verdict.value for outcome in outcomes)
    assert crm.rules == {
        rule: dict(Counter(o.verdict.value for o in outcomes if o.rule == rule))
        for rule in {outcome.rule for outcome in outcomes}
    }
    assert crm.took.count == crm.books["arrived"] == 1000
    assert crm.lag.count == by_verdict["delivered"] == crm.sent_together.sum
    assert sum(crm.causes.values()) == by_verdict["duplicate"]
    in_minutes: Counter[str] = Counter()
    for each in counts.minutes.values():
        in_minutes.update(each)
    assert in_minutes == by_verdict + Counter(forwarded=crm.books["forwarded"])
    assert len(counts.minutes) > 3
    assert counts.store["claim"].together.sum >= by_verdict["delivered"]
    assert counts.store["commit"].failed == 0


@virtual
async def test_calls_that_fail_are_counted_as_such():
    meters = WorkerCounters(now_ms)
    sink = ScriptedSink(ConnectionError("away"))
    async with Bench(sink=sink, trip_hooks=[meters.travelled]) as bench:
        bench.store.arm("claim.before", error=StoreUnavailable("away"))
        await bench.until_acknowledged(event().raw)
        counts = meters.counts({})
    (route,) = counts.routes.values()
    assert (route.failed_sends, route.sends.count) == (1, 2)
    assert counts.store["claim"].failed == 1


def test_to_count_an_event_takes_no_more_than_a_few_microseconds(counted):
    """A bound that a busy machine keeps too; it is about one microsecond otherwise."""
    import timeit

    known, events = DuplicateCauses(), [event(number) for number in range(50)]
    batches = [
        together(
            *[
                Decision("crm", each, Outcome(verdict, True, "orders", b"%d" % at), AT_MS, 0.003)
                for at, each in enumerate(events)
            ]
        )
        for verdict in (Verdict.DELIVERED, Verdict.DELIVERED, Verdict.DUPLICATE)
    ]

    def count() -> None:
        for each in batches:
            counted.meters.decided(each, known.causes_of(each))

    assert min(timeit.repeat(count, number=10, repeat=20)) / 10 / 3 / len(events) < 15e-6
