"""The handler as Lambda calls it: without a loop, in real time, one call after the other."""

import asyncio
import json
import logging
import socket
import socketserver
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.data_classes import SQSEvent, event_source
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.aws.functions import OK, QUICK, Context, back, books, failing, function, numbers
from tests.aws.payloads import (
    TRANSPORTS,
    destination,
    event,
    fifo,
    kinesis,
    pipes_fifo,
    pipes_kinesis,
    pipes_sqs,
    sample,
    sns,
    sqs,
    with_metadata,
)
from tests.faults.doubles import After, Deaf, FailingDeadLetters, Raw, ScriptedSink
from tests.size import examples

from oncebridge import (
    BlockingGateway,
    Closed,
    ConfigError,
    Gateway,
    Never,
    No,
    Rule,
    Settings,
    StoreError,
    StoreUnavailable,
    Unknown,
    Yes,
)
from oncebridge.aws import HandedBack, NotRecognised, lambda_handler
from oncebridge.aws.invocation import Trigger
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.events.pattern import Pattern
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore

# --- how each trigger is answered -----------------------------------------------------------


def in_groups(made):
    """Put each event into a group of its own."""
    return lambda *events, **more: made(*[(f"g{e['id']}", e) for e in events], **more)


NAMED = {
    "sqs": (sqs, ["m0", "m1", "m2"]),
    "sqs fifo": (in_groups(fifo), ["m0", "m1", "m2"]),
    "kinesis": (in_groups(kinesis), ["8", "9", "10"]),
    "pipes, sqs": (pipes_sqs, ["m0", "m1", "m2"]),
    "pipes, sqs fifo": (in_groups(pipes_fifo), ["m0", "m1", "m2"]),
    "pipes, kinesis": (
        in_groups(pipes_kinesis),
        [f"shardId-000000000006:{number}" for number in (8, 9, 10)],
    ),
}
"""Triggers that take a list of failures: how a batch is made, and what its records are called."""
WHOLE = {
    "direct": lambda *events: events[-1],
    "destination": lambda *events: destination(events[-1]),
    "destination of a batch": lambda *events: destination(list(events)),
    "destination of sns": lambda *events: destination(sns(*events)),
    "sns": sns,
    "sns of an array": lambda *events: sns(list(events)),
    "bus": lambda *events: list(events),
    "bus, with metadata": lambda *events: [with_metadata(one) for one in events],
    "bus, one with metadata": lambda *events: with_metadata(events[-1]),
}
"""Triggers that know only all or nothing."""
named = pytest.mark.parametrize(("made", "names"), NAMED.values(), ids=NAMED)
whole = pytest.mark.parametrize("made", WHOLE.values(), ids=WHOLE)
EVENTS = [event(1), event(2), event(3)]


@named
def test_all_is_well_is_an_empty_list(made, names):
    with function() as (handler, sink):
        assert handler(made(*EVENTS), Context()) == OK
        assert sorted(numbers(sink)) == [1, 2, 3]
        assert handler(made(*EVENTS), Context()) == OK
        assert len(sink.taken) == 3
        assert books(handler).counts()["duplicate"] == 3


@whole
def test_all_is_well_is_nothing(made):
    with function() as (handler, sink):
        assert handler(made(*EVENTS), Context()) is None
        assert 3 in numbers(sink)
        before = len(sink.taken)
        assert handler(made(*EVENTS), Context()) is None
        assert len(sink.taken) == before


@named
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_one_that_fails_is_named_alone(made, names, bad):
    with function(failing(bad)) as (handler, sink):
        assert handler(made(*EVENTS), Context()) == back(names[bad - 1])
        assert sorted(numbers(sink)) == sorted({1, 2, 3} - {bad})


@whole
def test_one_that_fails_fails_the_call(made):
    with function(failing(3)) as (handler, sink):
        with pytest.raises(HandedBack, match=r"1 of \d records have to be retried"):
            handler(made(*EVENTS), Context())
        sink.otherwise = Yes()
        # The back-off is in the store: it is waited for in place.
        assert handler(made(*EVENTS), Context()) is None
        assert numbers(sink).count(3) == 1


@pytest.mark.parametrize("name", NAMED)
def test_several_that_fail_are_all_named_but_on_kinesis(name):
    made, names = NAMED[name]
    with function(failing(2, 3)) as (handler, _):
        answer = handler(made(*EVENTS), Context())
    # "9" is less than "10" as a number, and not as a text.
    assert answer == (back("9") if name == "kinesis" else back(*names[1:]))


def test_the_lowest_number_is_found_among_long_ones():
    first = 49590338271490256608559692538361571095921575989136588898
    with function(failing(1, 3)) as (handler, _):
        batch = kinesis(("a", event(3)), ("b", event(2)), ("c", event(1)), first=first)
        assert handler(batch, Context()) == back(str(first))


def test_the_lowest_number_is_found_wherever_it_stands():
    batch = kinesis(*[(f"p{n}", event(n)) for n in range(4)])
    for record, number in zip(batch["Records"], ("101", "100", "99", "1000"), strict=True):
        record["kinesis"]["sequenceNumber"] = number
    with function(failing(0, 1, 2)) as (handler, sink):
        assert handler(batch, Context()) == back("99")
        assert numbers(sink) == [3]


@pytest.mark.parametrize("bad", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("made", [sqs, pipes_sqs])
def test_a_message_that_came_twice_is_named_once_if_one_of_it_failed(made, bad):
    batch = made(*EVENTS)
    records = batch["Records"] if isinstance(batch, dict) else batch
    records[1]["messageId"] = "m0"
    with function(failing(*bad)) as (handler, sink):
        assert handler(batch, Context()) == back("m0")
        assert set(numbers(sink)) == {1, 2, 3} - set(bad)
        sink.otherwise = Yes()
        _again(lambda: handler(batch, Context()))
        assert sorted(numbers(sink)) == [1, 2, 3]


HANDED_BACK = "oncebridge.handed_back"


@named
def test_what_goes_back_is_said_once_a_call_and_without_a_payload(made, names, caplog):
    caplog.set_level(logging.WARNING, logger="oncebridge")
    events = [event(n, secret="4111-1111") for n in (1, 2, 3)]
    with function(failing(2, 3)) as (handler, _):
        assert handler(made(events[0]), Context()) == OK
        assert caplog.records == []
        assert handler(made(*events), Context()) != OK
    (said,) = [record for record in caplog.records if record.message == HANDED_BACK]
    assert (said.levelno, said.back, said.records) == (logging.WARNING, 2, 3)
    assert said.reasons == "2 x failed: a fuse has blown"
    assert said.trigger in list(Trigger)
    assert "4111-1111" not in str(vars(said))


def test_it_is_said_too_where_the_whole_call_fails(caplog):
    settings = Settings(margin=QUICK.margin, breaker=1)
    with (
        function(ScriptedSink(otherwise=Closed("401")), settings=settings) as (handler, _),
        pytest.raises(HandedBack),
    ):
        handler(sqs(event(1)), Context())
    assert [r.message for r in caplog.records].count(HANDED_BACK) == 1


@whole
def test_where_the_call_fails_anyway_the_error_says_it(made, caplog):
    with function(failing(3)) as (handler, _), pytest.raises(HandedBack, match="fuse"):
        handler(made(*EVENTS), Context())
    assert HANDED_BACK not in [record.message for record in caplog.records]


def test_a_window_gets_its_state_back_whatever_happens():
    with function(failing(2)) as (handler, _):
        window = {"window": {"start": "a", "end": "b"}, "state": {"1": 282}}
        batch = kinesis(("a", event(1)), **window)
        assert handler(batch, Context()) == {**OK, "state": {"1": 282}}
        batch = kinesis(("a", event(2)), **window)
        assert handler(batch, Context()) == {**back("8"), "state": {"1": 282}}
        assert handler({"Records": [], "window": {}}, Context()) == {**OK, "state": {}}


ANSWERS = {
    "yes": (Yes(), True),
    "no": (No("refused"), False),
    "unknown": (Unknown("reset"), False),
    "closed": (Closed("401"), False),
    "never": (Never("400"), True),
    "an error": (RuntimeError("a bug"), False),
    "nonsense": (Raw(["yes"]), False),
    "too few": (Raw([]), False),
    "nothing": (Raw(None), False),
}
answers = pytest.mark.parametrize(("step", "well"), ANSWERS.values(), ids=ANSWERS)


@answers
def test_whatever_the_sink_says_a_queue_hears_what_follows(step, well):
    sink = ScriptedSink(otherwise=lambda d: step if d.event.detail["n"] == 2 else Yes())
    with function(sink) as (handler, _):
        assert handler(sqs(*EVENTS), Context()) == (OK if well else back("m1"))


@answers
def test_whatever_the_sink_says_a_direct_call_hears_what_follows(step, well):
    with function(ScriptedSink(otherwise=step)) as (handler, _):
        if well:
            assert handler(event(), Context()) is None
        else:
            with pytest.raises(HandedBack):
                handler(event(), Context())


def test_a_record_is_done_when_all_its_events_are():
    with function(failing(2)) as (handler, sink):
        batch = sqs([event(1), event(2)], [event(3), event(4)], event(5))
        assert handler(batch, Context()) == back("m0")
        sink.otherwise = Yes()
        _again(lambda: handler(batch, Context()))
        assert sorted(numbers(sink)) == [1, 2, 3, 4, 5]


def test_repeats_in_one_batch_are_one_event():
    with function() as (handler, sink):
        assert handler(sqs(event(1), event(1), event(1)), Context()) == OK
        assert handler(kinesis(("a", event(2)), ("a", event(2)), ("b", event(2))), Context()) == OK
        assert numbers(sink) == [1, 2]


# --- poison ---------------------------------------------------------------------------------

POISON = ["hello", "{}", '{"detail":7}', "[1]", '{"Records":[{}]}', '{"detail":{"a":1,"a":2}}']


@pytest.mark.parametrize("poison", POISON)
def test_what_is_no_event_is_kept_and_done_with(poison):
    dead = MemoryDeadLetters()
    with function(dead=dead) as (handler, sink):
        assert handler(sqs(poison, event(1)), Context()) == OK
        assert handler(kinesis(("p", poison), ("p", event(2))), Context()) == OK
        assert numbers(sink) == [1, 2]
    assert len(asyncio.run(dead.list())) == 1, "equal bytes are one letter"


@pytest.mark.parametrize("odd", [{"x": 1}, 7, {"Records": [{}]}])
def test_what_is_no_event_on_a_bus_is_kept_and_stops_no_other(odd):
    dead = MemoryDeadLetters()
    with function(dead=dead) as (handler, sink):
        assert handler([event(1), odd, with_metadata(event(2))], Context()) is None
        assert numbers(sink) == [1, 2]
    (letter,) = asyncio.run(dead.list())
    assert json.loads(letter.raw) == odd


def test_poison_comes_back_where_there_are_no_dead_letters_and_that_is_said_once(caplog):
    caplog.set_level(logging.WARNING, logger="oncebridge")
    with function(dead=None) as (handler, sink):
        for _ in range(2):
            assert handler(sqs("hello", event(1)), Context()) == back("m0")
        assert numbers(sink) == [1]
    said = [r for r in caplog.records if r.message == "oncebridge.no_dead_letters"]
    assert len(said) == 1
    assert "shard" not in said[0].what


def test_on_kinesis_it_is_said_what_poison_costs(caplog):
    with function(dead=None) as (handler, _):
        assert handler(kinesis(("p", "hello"), ("q", event(1))), Context()) == back("8")
    (said,) = [r for r in caplog.records if r.message == "oncebridge.no_dead_letters"]
    assert "shard is blocked" in said.what
    assert "hello" not in said.what


def test_dead_letters_that_cannot_be_written_keep_nothing():
    dead = FailingDeadLetters(broken=True)
    with function(dead=dead) as (handler, _):
        assert handler(sqs("hello", event(1)), Context()) == back("m0")
        dead.broken = False
        _again(lambda: handler(sqs("hello", event(1)), Context()))


# --- busy -----------------------------------------------------------------------------------


@contextmanager
def another_worker(store, one, *, takes_s):
    """Let somebody else be at an event for a while, but not longer than anybody looks."""
    holding, leave = threading.Event(), threading.Event()

    def slow(_):
        holding.set()
        leave.wait(takes_s)

    with BlockingGateway(Gateway(store=store, sink=slow, settings=QUICK)) as other:
        raw = json.dumps(one, separators=(",", ":")).encode()
        thread = threading.Thread(target=other.process, args=([raw],))
        thread.start()
        holding.wait(10)
        try:
            yield
        finally:
            leave.set()
            thread.join()


@pytest.mark.parametrize("name", ["sqs", "sqs fifo", "pipes, sqs", "pipes, sqs fifo"])
def test_a_queue_hears_of_a_busy_event_at_once(name):
    made, names = NAMED[name]
    store = MemoryStore()
    with function(store=store) as (handler, sink), another_worker(store, event(2), takes_s=9):
        began = time.monotonic()
        assert handler(made(*EVENTS), Context()) == back(names[1])
        assert time.monotonic() - began < 5
        assert sorted(numbers(sink)) == [1, 3]


@pytest.mark.parametrize("name", ["kinesis", "pipes, kinesis", *WHOLE])
def test_others_wait_for_a_busy_event(name):
    made = WHOLE.get(name) or NAMED[name][0]
    store = MemoryStore()
    with function(store=store) as (handler, sink), another_worker(store, event(3), takes_s=0.3):
        assert handler(made(*EVENTS), Context()) in (None, OK)
        assert 3 not in numbers(sink)
        assert books(handler).counts()["duplicate"] == 1


def test_they_wait_no_longer_than_there_is_time():
    store = MemoryStore()
    with function(store=store) as (handler, sink), another_worker(store, event(1), takes_s=9):
        with pytest.raises(HandedBack, match="busy"):
            handler(event(1), Context(1.4))
        batch = kinesis(("p", event(1)), ("p", event(2)), ("q", event(3)))
        assert handler(batch, Context(1.2)) == back("8")
        assert numbers(sink) == [3]


# --- order ----------------------------------------------------------------------------------

batches = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=10
)  # groups, and whether the event fails


def ordered(made, drawn):
    """Make a batch of numbered events in groups; give it with the numbers that fail."""
    pairs = [(group, event(n)) for n, (group, _) in enumerate(drawn)]
    return made(*pairs), {n for n, (_, fails) in enumerate(drawn) if fails}


def expected(drawn):
    """Say what each group's sink sees, and what is handed back."""
    seen, left, stuck = defaultdict(list), [], set()
    for n, (group, fails) in enumerate(drawn):
        if group in stuck:
            left.append(n)
            continue
        seen[group].append(n)
        if fails:
            left.append(n)
            stuck.add(group)
    return seen, left


def sent_by_group(sink, drawn):
    seen = defaultdict(list)
    for delivery in sink.seen:
        n = delivery.event.detail["n"]
        seen[drawn[n][0]].append(n)
    return seen


@settings(max_examples=examples(60))
@given(batches, st.sampled_from(["fifo", "pipes fifo", "kinesis", "pipes kinesis"]))
def test_a_group_goes_in_order_and_ends_with_its_first_failure(drawn, trigger):
    made, name = {
        "fifo": (fifo, "m{}"),
        "pipes fifo": (pipes_fifo, "m{}"),
        "kinesis": (lambda *pairs: kinesis(*pairs, first=0), "{}"),
        "pipes kinesis": (lambda *pairs: pipes_kinesis(*pairs, first=0), "shardId-000000000006:{}"),
    }[trigger]
    batch, bad = ordered(made, drawn)
    seen, left = expected(drawn)
    # A sink that is slower with the first ones would be overtaken by those behind.
    sink = ScriptedSink(
        otherwise=lambda d: After(
            0.003 if d.event.detail["n"] < 3 else 0,
            Unknown("no") if d.event.detail["n"] in bad else Yes(),
        )
    )
    breaker = Settings(margin=QUICK.margin, breaker=100)  # a sink that is down is another story
    with function(sink, settings=breaker) as (handler, _):
        answer = handler(batch, Context())
        assert sent_by_group(sink, drawn) == seen
        names = [name.format(n) for n in left]
        assert answer == (back(*names[:1]) if trigger == "kinesis" else back(*names))
        assert books(handler).in_flight == 0


def test_the_next_of_a_group_starts_when_the_one_before_is_final():
    store = MemoryStore()
    taken = []

    class Watching(ScriptedSink):
        async def deliver(self, deliveries):
            if len(deliveries) and deliveries[0].event.detail["n"] == 2:
                (record,) = await store.peek([taken[0].key])
                taken.append(record.fate)
            else:
                taken.append(deliveries[0])
            return await super().deliver(deliveries)

    with function(Watching(), store=store) as (handler, _):
        assert handler(fifo(("g", event(1)), ("g", event(2))), Context()) == OK
    assert taken[1] is not None  # committed, and not only sent


def test_a_group_does_not_wait_for_another():
    order = []

    def step(delivery):
        n = delivery.event.detail["n"]
        order.append(n)
        return After(0.4, Yes()) if n == 1 else Yes()

    with function(ScriptedSink(otherwise=step)) as (handler, _):
        batch = fifo(("a", event(1)), ("a", event(2)), *[("b", event(n)) for n in (3, 4, 5)])
        assert handler(batch, Context()) == OK
    assert order.index(5) < order.index(2)


def test_a_busy_event_ends_its_group_and_no_other():
    store = MemoryStore()
    with function(store=store) as (handler, sink), another_worker(store, event(2), takes_s=9):
        batch = fifo(*[("a", event(n)) for n in (1, 2, 3)], ("b", event(4)))
        assert handler(batch, Context()) == back("m1", "m2")
        assert sorted(numbers(sink)) == [1, 4]


def test_what_can_start_together_shares_a_call_of_the_sink():
    sink = ScriptedSink(batch=10)
    calls = []
    deliver = sink.deliver

    async def counted(deliveries):
        calls.append(len(deliveries))
        return await deliver(deliveries)

    sink.deliver = counted
    with function(sink) as (handler, _):
        groups = [(f"g{n % 5}", event(n)) for n in range(20)]
        assert handler(kinesis(*groups), Context()) == OK
    assert calls == [5, 5, 5, 5]


# --- time -----------------------------------------------------------------------------------


@named
@pytest.mark.parametrize("left_s", [0, 0.3, 0.5])
def test_without_time_nothing_is_sent_and_all_is_named(made, names, left_s):
    with function(settings=Settings()) as (handler, sink):
        expected = back("8") if names[0] == "8" else back(*names)
        assert handler(made(*EVENTS), Context(left_s)) == expected
        assert sink.seen == []
        assert handler(made(*EVENTS), Context()) == OK


@whole
def test_without_time_a_direct_call_fails_and_nothing_is_sent(made):
    with function(settings=Settings()) as (handler, sink):
        with pytest.raises(HandedBack, match="no time left"):
            handler(made(*EVENTS), Context(0.4))
        assert sink.seen == []


@pytest.mark.parametrize("hangs", [After, Deaf])
@pytest.mark.full
def test_what_gets_no_answer_in_time_is_named_and_nothing_else(hangs):
    sink = ScriptedSink(
        otherwise=lambda d: hangs(2.5, Yes()) if d.event.detail["n"] == 2 else Yes()
    )
    with function(sink) as (handler, _):
        began = time.monotonic()
        assert handler(sqs(*EVENTS), Context(1.2)) == back("m1")
        assert time.monotonic() - began < 2.2
        assert numbers(sink) == [1, 3]


def test_an_order_ends_with_the_time():
    with function(ScriptedSink(otherwise=After(0.15, Yes()))) as (handler, sink):
        batch = kinesis(*[("p", event(n)) for n in range(50)])
        began = time.monotonic()
        (failed,) = handler(batch, Context(1.5))["batchItemFailures"]
        assert time.monotonic() - began < 5
        done = int(failed["itemIdentifier"]) - 8
        assert numbers(sink) == list(range(done))
        assert 1 <= done < 50


class Stuck(MemoryStore):
    """A store that takes its time over one operation; *deaf*: and is not to be hurried."""

    def __init__(self, operation, seconds, *, deaf=False):
        super().__init__()
        self.operation, self.seconds, self.deaf = operation, seconds, deaf
        self.asked = 0

    async def open(self):
        await self._wait("open")
        await super().open()

    async def claim(self, wants):
        await self._wait("claim")
        return await super().claim(wants)

    async def commit(self, commits):
        await self._wait("commit")
        return await super().commit(commits)

    async def _wait(self, operation):
        if operation != self.operation:
            return
        self.asked += 1
        ends = time.monotonic() + self.seconds
        while (left_s := ends - time.monotonic()) > 0:
            try:
                await asyncio.sleep(left_s)
            except asyncio.CancelledError:
                if not self.deaf:
                    raise


deaf = pytest.mark.parametrize("deaf", [False, True])


@deaf
def test_a_store_that_hangs_does_not_take_the_answer_with_it(deaf):
    with function(store=Stuck("claim", 3, deaf=deaf)) as (handler, sink):
        began = time.monotonic()
        assert handler(sqs(*EVENTS), Context(1.0)) == back("m0", "m1", "m2")
        assert time.monotonic() - began < 2.5
        assert sink.seen == []


@deaf
def test_nor_does_one_that_hangs_when_it_is_opened(deaf):
    with function(store=Stuck("open", 3, deaf=deaf)) as (handler, sink):
        began = time.monotonic()
        with pytest.raises(HandedBack, match="could not be opened"):
            handler(sqs(*EVENTS), Context(1.0))
        assert time.monotonic() - began < 2.5
        assert sink.seen == []


def test_an_opening_that_cannot_be_broken_off_is_waited_for_and_not_begun_again():
    store = Stuck("open", 1.5, deaf=True)
    with function(store=store) as (handler, sink):
        with pytest.raises(HandedBack, match="could not be opened"):
            handler(sqs(*EVENTS), Context(1.0))
        assert handler(sqs(*EVENTS), Context()) == OK
        assert sorted(numbers(sink)) == [1, 2, 3]
        assert store.asked == 1


def test_what_was_broken_off_for_want_of_time_says_so():
    with (
        function(store=Stuck("claim", 5)) as (handler, _),
        pytest.raises(HandedBack, match=r"1 of 1 records .* 1 x no time left"),
    ):
        handler(event(1), Context(1.0))


def test_what_the_sink_took_is_acknowledged_though_the_commit_hangs():
    with function(store=Stuck("commit", 5)) as (handler, sink):
        began = time.monotonic()
        assert handler(sqs(event(1)), Context(1.0)) == OK
        assert time.monotonic() - began < 4
        assert numbers(sink) == [1]


def test_it_comes_again_and_is_known_where_the_commit_cannot_even_be_broken_off():
    with function(store=Stuck("commit", 2, deaf=True)) as (handler, sink):
        assert handler(sqs(event(1)), Context(1.0)) == back("m0")
        _again(lambda: handler(sqs(event(1)), Context(20)))
        assert numbers(sink) == [1]


def test_the_lease_ends_with_the_call():
    leases = []

    class Watched(MemoryStore):
        async def claim(self, wants):
            leases.extend(want.lease_ms for want in wants)
            return await super().claim(wants)

    with function(store=Watched()) as (handler, _):
        assert handler(event(1), Context(3)) is None
        assert handler(event(2), Context(900)) is None
    assert leases[0] <= 5000
    assert leases[1] == 30_000


# --- a function of one's own ----------------------------------------------------------------


def test_a_plain_function_takes_the_place_of_the_sink():
    got = []
    with function(deliver=lambda one: got.append(one.detail["n"])) as (handler, sink):
        assert handler(sqs(*EVENTS), Context()) == OK
        assert got == [1, 2, 3]
        assert sink.seen == []


def test_so_does_an_async_one_and_it_has_one_loop_all_the_time():
    loops = []

    async def deliver(one):
        loops.append(asyncio.get_running_loop())

    with function(deliver=deliver) as (handler, _):
        for n in range(3):
            assert handler(event(n), Context()) is None
    assert len(loops) == 3
    assert len(set(loops)) == 1


def test_what_a_function_raises_is_told_by_its_type_only():
    def deliver(one):
        raise LookupError(f"no such customer: {one.detail}")

    with function(deliver=deliver) as (handler, _):
        with pytest.raises(HandedBack) as caught:
            handler(event(4711), Context())
        assert "LookupError" in str(caught.value)
        assert "4711" not in str(caught.value)
        assert "customer" not in str(caught.value)
        assert caught.value.retry_after_s > 0


def test_a_function_that_outlives_its_time_is_not_called_again_until_it_is_back():
    running, calls = threading.Event(), []

    def deliver(one):
        calls.append(one.detail["n"])
        if len(calls) == 1:
            running.wait(10)

    with function(deliver=deliver) as (handler, _):
        assert handler(sqs(event(1)), Context(0.9)) == back("m0")
        assert handler(sqs(event(2)), Context(5)) == back("m0")
        assert calls == [1]
        running.set()
        _again(lambda: handler(sqs(event(2)), Context(5)))
        assert calls[:2] == [1, 2]


def test_a_router_takes_no_function():
    router = Router([RouteEntry(Gateway(store=MemoryStore(), sink=print))])
    with pytest.raises(ConfigError, match="cannot be used with a router"):
        lambda_handler(router, print)


# --- several routes -------------------------------------------------------------------------


@contextmanager
def two_routes(*, stores=None, settings=(QUICK, QUICK), **more):
    crm, wall = ScriptedSink(), ScriptedSink()
    stores = stores or [MemoryStore()] * 2
    gateways = [
        Gateway(store=store, sink=sink, route=route, settings=own, dead=MemoryDeadLetters())
        for store, sink, route, own in zip(
            stores, (crm, wall), ("crm", "wall"), settings, strict=True
        )
    ]
    match = Pattern.compile({"detail": {"n": [1, 2]}})
    router = Router(
        [RouteEntry(gateways[0], match), RouteEntry(gateways[1], match)], settings=QUICK, **more
    )
    handler = lambda_handler(router, metrics=None)
    try:
        yield handler, crm, wall
    finally:
        handler.close(timedelta(milliseconds=50))


def test_a_record_is_done_when_every_route_has_it():
    with two_routes(discard_unrouted=True) as (handler, crm, wall):
        wall.script = [Unknown("away")]
        (failed,) = handler(sqs(event(1), event(2)), Context())["batchItemFailures"]
        assert failed["itemIdentifier"] in ("m0", "m1")
        _again(lambda: handler(sqs(event(1), event(2)), Context()))
        assert sorted(numbers(crm)) == sorted(numbers(wall)) == [1, 2]
        assert handler(event(3), Context()) is None


def test_what_no_route_is_for_is_kept_or_comes_again():
    dead = MemoryDeadLetters()
    with two_routes(dead=dead) as (handler, *_):
        assert handler(sqs(event(3)), Context()) == OK
    assert len(asyncio.run(dead.list())) == 1
    with two_routes() as (handler, *_), pytest.raises(HandedBack):
        handler(event(3), Context())


@pytest.mark.parametrize("down", [0, 1])
def test_one_route_that_is_down_is_enough_to_fetch_less(down):
    settings = [Settings(margin=QUICK.margin, breaker=1)] * 2
    with two_routes(settings=settings) as (handler, *sinks):
        sinks[down].otherwise = Closed("401")
        with pytest.raises(HandedBack, match="401"):
            handler(sqs(event(1)), Context())
        assert numbers(sinks[1 - down]) == [1]


@pytest.mark.parametrize("delivers", [0, 1])
def test_a_route_that_delivers_without_a_store_does_though_another_holds_back(delivers):
    deliver = Settings(margin=QUICK.margin, on_store_outage="deliver")
    settings = [QUICK, QUICK]
    settings[delivers] = deliver
    store = Failing("open", StoreUnavailable("away"))
    with two_routes(stores=[store, store], settings=settings) as (handler, *sinks):
        with pytest.raises(HandedBack, match="store"):  # the other one's
            handler(sqs(event(1)), Context())
        assert numbers(sinks[delivers]) == [1]
        assert sinks[1 - delivers].seen == []


@pytest.mark.parametrize("late", [0, 1])
def test_commits_of_every_route_are_waited_for(late):
    settings = [Settings(margin=QUICK.margin, commit_budget=timedelta(milliseconds=10))] * 2
    stores = [MemoryStore(), MemoryStore()]
    stores[late] = Failing("commit", StoreUnavailable("not now"), times=5)
    with two_routes(stores=stores, settings=settings) as (handler, *_):
        assert handler(sqs(event(1)), Context()) == OK
        assert stores[late].times == 0


# --- when something is down -----------------------------------------------------------------


class Failing(MemoryStore):
    """A store whose named operation raises *error*, as often as *times* says."""

    def __init__(self, operation, error, times=1_000_000):
        super().__init__()
        self.operation, self.error, self.times = operation, error, times
        self.opened = 0

    async def open(self):
        self.opened += 1
        self._fail("open")
        await super().open()

    async def claim(self, wants):
        self._fail("claim")
        return await super().claim(wants)

    async def commit(self, commits):
        self._fail("commit")
        return await super().commit(commits)

    async def release(self, releases):
        self._fail("release")
        return await super().release(releases)

    def _fail(self, operation):
        if operation == self.operation and self.times > 0:
            self.times -= 1
            raise self.error


ERRORS = [StoreUnavailable("away"), StoreError("broken"), RuntimeError("a bug in a driver")]


BACK = {"sqs": back("m1"), "kinesis": back("9"), "direct": HandedBack}
ALL_BACK = {"sqs": back("m0", "m1"), "kinesis": back("8"), "direct": HandedBack}
ALL_WELL = {"sqs": OK, "kinesis": OK, "direct": None}
SHORT = Settings(
    margin=QUICK.margin,
    commit_budget=timedelta(milliseconds=50),
    sink_timeout=timedelta(milliseconds=400),
    lease=timedelta(milliseconds=500),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("operation", ["open", "claim", "commit", "release"])
@pytest.mark.parametrize("name", ["sqs", "kinesis", "direct"])
def test_whatever_the_store_does_only_what_was_taken_is_acknowledged(error, operation, name):
    made = (NAMED.get(name) or [WHOLE[name]])[0]
    batch = made(event(3), event(2))  # of which a direct call brings the last
    others = set() if name == "direct" else {3}
    expected, taken = {
        "open": (type(error), set()),
        "claim": (ALL_BACK[name], set()),
        "commit": (ALL_WELL[name], {2} | others),
        "release": (BACK[name], others),
    }[operation]
    sink = failing(2) if operation == "release" else ScriptedSink()
    with function(sink, store=Failing(operation, error), settings=SHORT) as (handler, _):
        if isinstance(expected, type):
            with pytest.raises(expected):
                handler(batch, Context(5))
        else:
            assert handler(batch, Context(5)) == expected
        assert set(numbers(sink)) == taken


def test_a_store_that_is_away_at_first_fails_the_call_and_may_come_later():
    store = Failing("open", StoreUnavailable("no route to host"), times=2)
    with function(store=store) as (handler, sink):
        for given in (sqs(event(1)), event(1)):
            with pytest.raises(StoreUnavailable, match="no route to host"):
                handler(given, Context())
        assert sink.seen == []
        assert handler(sqs(event(1)), Context()) == OK
        assert handler(event(1), Context()) is None
        assert store.opened == 3


def test_a_store_that_is_not_fit_says_why():
    store = Failing("open", ConfigError("store", "the table is gone"))
    with function(store=store) as (handler, _), pytest.raises(ConfigError, match="table is gone"):
        handler(sqs(event(1)), Context())


unprotected = pytest.mark.parametrize(
    "settings", [{"on_store_outage": "deliver"}, {"mode": "shadow"}]
)


@unprotected
def test_where_that_was_asked_for_events_pass_without_a_store(settings):
    settings = Settings(margin=QUICK.margin, **settings)
    store = Failing("open", StoreUnavailable("away"), times=2)
    with function(store=store, settings=settings) as (handler, sink):
        assert handler(sqs(event(1)), Context()) == OK
        assert numbers(sink) == [1]
        assert books(handler).unprotected == 1


@pytest.mark.parametrize(
    ("settings", "deaf"),
    [
        ({"on_store_outage": "deliver"}, False),
        ({"on_store_outage": "deliver"}, True),
        ({"mode": "shadow"}, False),
    ],
)
@pytest.mark.full
def test_so_they_do_when_the_store_hangs(settings, deaf):
    settings = Settings(margin=QUICK.margin, **settings)
    with function(store=Stuck("open", 3.5, deaf=deaf), settings=settings) as (handler, sink):
        assert handler(sqs(*EVENTS), Context(2.4)) == OK
        assert sorted(numbers(sink)) == [1, 2, 3]
        assert books(handler).unprotected == 3
        assert books(handler).store_errors >= 1


def test_a_store_that_hangs_is_not_waited_for_longer_than_two_seconds():
    settings = Settings(margin=QUICK.margin, on_store_outage="deliver")
    with function(store=Stuck("open", 30), settings=settings) as (handler, sink):
        began = time.monotonic()
        assert handler(event(1), Context(60)) is None
        assert 1.9 < time.monotonic() - began < 6
        assert numbers(sink) == [1]


@pytest.mark.full
def test_one_that_hangs_again_stops_no_group_half_way():
    settings = Settings(margin=QUICK.margin, on_store_outage="deliver")
    # Slow enough for the breaker to let the store be tried once more on the way.
    sink = ScriptedSink(otherwise=After(0.3, Yes()))
    store = Stuck("open", 20)
    with function(sink, store=store, settings=settings) as (handler, _):
        assert handler(fifo(*[("g", event(n)) for n in range(4)]), Context(6)) == OK
        assert numbers(sink) == [0, 1, 2, 3]
        assert store.asked > 1


def test_a_store_that_is_away_is_not_tried_at_every_call():
    settings = Settings(margin=QUICK.margin, on_store_outage="deliver")
    store = Failing("open", StoreUnavailable("away"))
    with function(store=store, settings=settings) as (handler, sink):
        began = time.monotonic()
        for n in range(20):
            assert handler(sqs(event(n)), Context()) == OK
        assert store.opened <= 1 + (time.monotonic() - began) / 0.5
        assert numbers(sink) == list(range(20))
        store.times = 0
        while store.opened == 1:
            time.sleep(0.1)
            assert handler(sqs(event(20)), Context()) == OK
        before = len(sink.taken)
        for _ in range(2):
            assert handler(sqs(event(21)), Context()) == OK
        assert numbers(sink)[before:] == [21]


def test_a_try_that_says_nothing_about_the_store_keeps_nobody_from_the_next():
    settings = Settings(margin=QUICK.margin, on_store_outage="deliver")
    store = Failing("open", StoreUnavailable("away"), times=1)
    with function(store=store, settings=settings) as (handler, sink):
        assert handler(event(1), Context()) is None
        store.error, store.times = RuntimeError("a bug in a driver"), 1
        time.sleep(1.1)  # until it is tried again
        with pytest.raises(RuntimeError, match="driver"):
            handler(event(2), Context())
        for _ in range(2):
            assert handler(event(2), Context()) is None
        assert numbers(sink) == [1, 2]
        assert store.opened == 3


def test_with_the_sink_down_the_whole_call_fails_so_that_less_is_fetched():
    settings = Settings(margin=QUICK.margin, breaker=2)
    with function(ScriptedSink(otherwise=No("refused")), settings=settings) as (handler, sink):
        with pytest.raises(HandedBack, match=r"3 of 3 .*refused"):
            handler(sqs(*EVENTS), Context())
        sink.otherwise = Yes()
        _again(lambda: handler(sqs(*EVENTS), Context()))
        assert sorted(numbers(sink)) == [1, 2, 3]


def test_where_some_went_well_it_is_told_which_did_not():
    sink = failing(2, answer=Closed("401"))
    settings = Settings(margin=QUICK.margin, breaker=1)
    with function(sink, settings=settings) as (handler, _):
        batch = fifo(("a", event(1)), ("a", event(2)), ("a", event(3)))
        assert handler(batch, Context()) == back("m1", "m2")
        assert handler.router.gateways[0].down() == ["the sink"]


def _again(call):
    """Be Lambda: call until all is well."""
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        with suppress(HandedBack):
            if call() == OK:
                return
        time.sleep(0.1)
    raise AssertionError("it never was")


def test_a_commit_that_comes_late_is_waited_for():
    settings = Settings(margin=QUICK.margin, commit_budget=timedelta(milliseconds=10))
    store = Failing("commit", StoreUnavailable("not now"), times=5)
    with function(store=store, settings=settings) as (handler, sink):
        assert handler(sqs(event(1)), Context()) == OK
        assert books(handler).acked_uncommitted == 1
        assert store.times == 0
        assert handler(sqs(event(1)), Context()) == OK
        assert numbers(sink) == [1]


def test_but_not_for_longer_than_a_lease():
    with function(store=Failing("commit", StoreUnavailable("away")), settings=SHORT) as (
        handler,
        _,
    ):
        began = time.monotonic()
        assert handler(sqs(event(1)), Context(30)) == OK
        assert SHORT.lease.total_seconds() < time.monotonic() - began < 10


def breaking(settings, store, *, after):
    """Make a function whose router breaks, when it has done nothing or all."""

    class Breaking(Router):
        async def process_each(self, *args, **more):
            if after:
                await super().process_each(*args, **more)
            raise LookupError("a bug")

    sink = ScriptedSink()
    gateway = Gateway(store=store, sink=sink, settings=settings)
    return lambda_handler(Breaking([RouteEntry(gateway)]), metrics=None), sink


@pytest.mark.parametrize(
    ("given", "expected"),
    [(event(1), None), (sqs(event(1)), back("m0")), (kinesis(("p", event(1))), back("8"))],
)
def test_what_is_unforeseen_acknowledges_nothing_and_is_logged(given, expected, caplog):
    handler, sink = breaking(QUICK, MemoryStore(), after=False)
    if expected is None:
        with pytest.raises(HandedBack, match="an unexpected error"):
            handler(given, Context())
    else:
        assert handler(given, Context()) == expected
    assert sink.seen == []
    (failed,) = [one for one in caplog.records if one.message == "oncebridge.batch_failed"]
    assert failed.error == "LookupError"
    handler.close()


def test_a_late_commit_is_waited_for_whatever_else_breaks():
    settings = Settings(margin=QUICK.margin, commit_budget=timedelta(milliseconds=10))
    store = Failing("commit", StoreUnavailable("not now"), times=5)
    handler, sink = breaking(settings, store, after=True)
    for _ in range(2):
        assert handler(sqs(event(1)), Context()) == OK
        assert numbers(sink) == [1]
        assert store.times == 0
    handler.close()


def test_the_next_call_is_not_the_worse_for_one_that_broke():
    store = Failing("claim", RuntimeError("a bug in a driver"), times=1)
    with function(store=store) as (handler, sink):
        assert handler(sqs(event(1)), Context()) == back("m0")
        assert handler(sqs(event(1)), Context()) == OK
        assert numbers(sink) == [1]


@pytest.mark.parametrize("given", [None, {}, {"Records": []}, {"httpMethod": "GET"}])
def test_what_is_not_known_is_raised(given):
    with function() as (handler, sink):
        with pytest.raises(NotRecognised):
            handler(given, Context())
        assert sink.seen == []


# --- one container --------------------------------------------------------------------------


def test_everything_is_opened_once_and_kept(tmp_path):
    opened = []

    class Counted(SQLiteStore):
        async def open(self):
            opened.append(asyncio.get_running_loop())
            await super().open()

    with function(store=Counted(tmp_path / "seen.db")) as (handler, sink):
        assert opened == []  # not before the first call
        for n in (1, 2, 1):
            assert handler(event(n), Context()) is None
        assert (len(opened), sink.opened) == (1, 1)
        assert numbers(sink) == [1, 2]


def test_threads_take_turns():
    answers = []
    with function(ScriptedSink(otherwise=After(0.01, Yes()))) as (handler, sink):

        def work(n):
            answers.append(handler(sqs(event(n % 4)), Context()))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [OK] * 12
        assert sorted(numbers(sink)) == [0, 1, 2, 3]
        assert sink.most_under_way == 1


async def test_inside_a_loop_it_says_so():
    handler = lambda_handler(Gateway(store=MemoryStore(), sink=print))
    with pytest.raises(RuntimeError, match="event loop"):
        handler(event(), Context())


def test_connections_that_were_closed_while_frozen_are_noticed_before_anything_is_sent():
    class Hello(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"hello")
            leave.wait(10)

    class Connected(ScriptedSink):
        reader = None

        def __init__(self):
            super().__init__()
            self.found = []

        async def deliver(self, deliveries):
            if self.reader is None:
                self.reader, self.writer = await asyncio.open_connection(*server.server_address)
                await self.reader.readexactly(5)
            self.found.append(self.reader.at_eof())
            return await super().deliver(deliveries)

        async def aclose(self):
            self.writer.close()

    leave = threading.Event()
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Hello) as server,
        function(Connected()) as (handler, sink),
    ):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            assert handler(event(1), Context()) is None
            leave.set()
            client = sink.writer.get_extra_info("socket")
            while client.family == socket.AF_INET and not _has_ended(client.fileno()):
                time.sleep(0.01)
            assert handler(event(2), Context()) is None
            assert sink.found == [False, True]
        finally:
            server.shutdown()


def _has_ended(number):
    """Tell whether the other side has closed, and leave that to be read."""
    with socket.socket(fileno=number) as looked_at:
        try:
            return looked_at.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        finally:
            looked_at.detach()


# --- the samples, and Powertools ------------------------------------------------------------

REFUSED = {
    *("api_destination_http_request", "firehose_transform_records"),
    *("eventbridge_rule_dlq_sqs_message", "eventsv2_custom_bus_dead_letter_record"),
    "sns_notification",
}
DEAD = {"lambda_kinesis_on_failure_destination"}
SAMPLES = sorted(path.stem for path in TRANSPORTS.glob("*.json"))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_are_taken_through(name):
    dead = MemoryDeadLetters()
    rules = [Rule.parse({"name": "all", "key": ["detail.eventBody"]})]
    with function(dead=dead, rules=rules) as (handler, sink):
        if name in REFUSED:
            with pytest.raises(NotRecognised):
                handler(sample(name), Context())
            assert sink.seen == []
            return
        for _ in range(2):
            assert not (handler(sample(name), Context()) or OK)["batchItemFailures"]
        letters = asyncio.run(dead.list())
        assert len(letters) == (1 if name in DEAD else 0)
        assert len(sink.taken) == (0 if name in DEAD else 1)


def test_one_event_is_one_whichever_way_it_comes():
    rules = [Rule.parse({"name": "all", "key": ["detail.eventBody"]})]
    with function(rules=rules) as (handler, sink):
        for name in SAMPLES:
            if name not in REFUSED | DEAD | {"eventbridge_input_path_detail"}:
                handler(sample(name), Context())
        # Without its envelope nobody knows whose it is.
        assert len(sink.taken) == 1


def test_it_fits_into_the_handlers_of_powertools(capsys):
    logger, metrics = Logger(service="crm"), Metrics(namespace="crm", service="crm")
    with function() as (handler, sink):
        decorated = logger.inject_lambda_context(handler)
        assert decorated(sqs(event(1)), Context()) == OK

        @event_source(data_class=SQSEvent)
        @metrics.log_metrics
        def own(event: SQSEvent, context):
            metrics.add_metric("batches", MetricUnit.Count, 1)
            return handler(event, context)

        assert own(sqs(event(1), event(2)), Context()) == OK
        assert numbers(sink) == [1, 2]
        assert handler.__name__ == "lambda_handler"
    assert "batches" in capsys.readouterr().out
