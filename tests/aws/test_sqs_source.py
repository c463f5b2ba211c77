"""What happens to the messages of a queue, whatever happens to their events."""

import asyncio
import json
import logging
from datetime import timedelta

import pytest
from msgspec.structs import replace
from tests.aws.queues import (
    QUICK,
    TestQueue,
    Worker,
    events,
    sent,
    told,
    until,
    until_empty,
    working,
)
from tests.faults.doubles import (
    After,
    CountingDice,
    FailingDeadLetters,
    FaultyStore,
    ScriptedSink,
    event,
    virtual,
)
from tests.servers.meddler import failing, meddling, saying, swallow, vanish

from oncebridge import ConfigError, Gateway, Settings, StoreUnavailable, parse
from oncebridge.aws.queue import Failure, Message, QueueAddress, SqsQueue
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.errors import OncebridgeError
from oncebridge.events.pattern import Pattern
from oncebridge.sinks.api import Closed, Never, Unknown, Yes
from oncebridge.sources.sqs.receiver import FailureLog, ReceivedMessages
from oncebridge.sources.sqs.source import SqsSource, SqsSourceOptions
from oncebridge.stores.api import Want, Wants
from oncebridge.stores.memory import MemoryStore

SHORT = timedelta(seconds=3)
YES = Yes()


@pytest.fixture(autouse=True)
def _leaves_soon(request, monkeypatch):
    """Do not wait for polls at the end, but where that is what is tested."""
    if request.cls is not TestStopping:
        monkeypatch.setattr("oncebridge.sources.sqs.source._LEAVE_S", 0.02)


def asked(meddler, operation):
    return [body for name, body in meddler.calls if name == operation]


def hidden_for(meddler):
    """Tell for how long messages were hidden, one after the other."""
    calls = asked(meddler, "ChangeMessageVisibilityBatch")
    entries = [entry for call in calls for entry in call["Entries"]]
    return [e["VisibilityTimeout"] for e in entries if "tries" not in e["ReceiptHandle"]]


class Receives:
    """Counts how often each message was handed out, on its way."""

    def __init__(self, meddler):
        self.bodies = []
        meddler.always("ReceiveMessage", self._rule)

    async def _rule(self, body, pass_on):
        status, answer = await pass_on(body)
        self.bodies += [message["Body"].encode() for message in answer.get("Messages", [])]
        return status, answer


# --- what is deleted -------------------------------------------------------------------------


class TestAcknowledging:
    async def test_what_is_delivered_is_deleted(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(25))
        async with working(queue) as worker:
            await until_empty(queue)
            assert sorted(sent(worker.sink.raws)) == list(range(25))
            assert worker.counts["delivered"] == 25

    async def test_the_bytes_go_on_as_they_came(self, ministack):
        queue = TestQueue(ministack.endpoint)
        raw = ' { "detail-type":"Ä", "source":"s" ,"id":"1","detail":{"n":1.00,"e":"\\u00e4😀"}}\n'
        queue.send(raw)
        async with working(queue) as worker:
            await until_empty(queue)
            assert worker.sink.raws == [raw.encode()]

    async def test_duplicates_are_deleted_and_not_sent(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(5), *events(5), *events(5))
        async with working(queue, settings=QUICK, visibility=SHORT) as worker:
            await until_empty(queue)
            assert sorted(sent(worker.sink.raws)) == list(range(5))
            assert worker.counts["duplicate"] == 10

    async def test_poison_goes_to_the_dead_letters_and_is_deleted(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send("no event", *events(2))
        async with working(queue) as worker:
            await until_empty(queue)
            (letter,) = await worker.dead.list()
            assert letter.raw == b"no event"
            assert letter.reason == "not-json"
            assert len(worker.sink.raws) == 2

    async def test_what_the_sink_refuses_goes_to_the_dead_letters_and_is_deleted(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(1))
        async with working(queue, sink=ScriptedSink(otherwise=Never("no"))) as worker:
            await until_empty(queue)
            (letter,) = await worker.dead.list()
            assert letter.reason == "rejected"

    async def test_what_a_topic_has_wrapped_is_unwrapped(self, ministack):
        queue = TestQueue(ministack.endpoint)
        (inner,) = events(1)
        notification = {
            "Type": "Notification",
            "MessageId": "11111111-2222-4333-8444-555555555555",
            "TopicArn": "arn:aws:sns:us-east-1:123456789012:events",
            "Message": inner.decode(),
            "Timestamp": "2025-12-12T15:15:07.919Z",
        }
        queue.send(json.dumps(notification))
        async with working(queue) as worker:
            await until_empty(queue)
            assert worker.sink.raws == [inner]

    async def test_a_message_of_several_events_is_deleted_when_all_are_final(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(b"[%b]" % b",".join(events(3)))
        # One of them is sent without a clear answer at first.
        sink = ScriptedSink(YES, Unknown("?"))
        async with working(queue, sink=sink, settings=QUICK, visibility=SHORT) as worker:
            await until_empty(queue)
            assert sorted(sent(worker.sink.raws)) == [0, 1, 2]
            assert len(worker.sink.seen) == 4

    async def test_books_and_queue_agree_for_many(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(60), *events(60))
        quick = {"settings": QUICK, "visibility": SHORT}
        async with working(queue, receivers=4, **quick) as worker:
            await until_empty(queue)
            assert worker.counts["delivered"] == worker.counts["duplicate"] == 60
            assert worker.counts["arrived"] == 120 + worker.counts.get("busy", 0)
            assert worker.gateway.books.balance


# --- what goes back --------------------------------------------------------------------------


class TestHandingBack:
    async def test_one_that_another_worker_holds_comes_after_the_rest_of_its_lease(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(1))
        async with meddling(ministack) as meddler:
            worker = Worker(queue.address, meddler.endpoint)
            plan = worker.gateway.rules.plan(parse(*events(1)))
            claim = Want(plan.parts, b"t" * 16, b"g" * 16, 20_000, 60_000, b"")
            await worker.store.claim(Wants.of([claim]))
            await worker.start()
            try:
                await until(lambda: hidden_for(meddler))
                (seconds,) = hidden_for(meddler)
                assert 14 <= seconds <= 22
                assert queue.counts() == (0, 1)
                assert worker.sink.seen == []
                assert worker.counts["busy"] >= 1
            finally:
                await worker.aclose()

    async def test_one_that_was_held_is_a_duplicate_when_it_comes_again(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(1))
        store = MemoryStore()
        slow = ScriptedSink(After(0.5, YES))
        other = Gateway(store=store, sink=slow, settings=QUICK)
        holding = asyncio.create_task(other.process(events(1)))
        await until(lambda: slow.seen)
        async with working(queue, store=store, settings=QUICK, visibility=SHORT) as worker:
            await until_empty(queue)
            assert worker.sink.seen == []
            assert worker.counts["duplicate"] == 1
        await holding
        await other.drain()
        await other.aclose()

    async def test_an_unclear_answer_goes_back_for_a_second_at_least_and_comes_again(
        self, ministack
    ):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(1))
        async with meddling(ministack) as meddler:
            receives = Receives(meddler)
            sink = ScriptedSink(Unknown("no answer"))
            async with working(queue, meddler.endpoint, sink=sink) as worker:
                await until_empty(queue)
                assert len(worker.sink.seen) == 2
                assert [d.attempt for d in worker.sink.seen] == [1, 2]
                (seconds,) = hidden_for(meddler)
                assert 1 <= seconds <= 3
                assert len(receives.bodies) == 2

    async def test_attempts_are_bounded_and_end_in_the_dead_letters(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(1))
        settings = Settings(max_attempts=2, backoff=timedelta(milliseconds=1))
        sink = ScriptedSink(otherwise=Unknown("no answer"))
        async with working(queue, sink=sink, settings=settings) as worker:
            await until_empty(queue)
            (letter,) = await worker.dead.list()
            assert (letter.reason, letter.attempts, letter.maybe_delivered) == ("attempts", 2, True)

    async def test_a_call_that_fails_is_tried_again(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(1))
        async with meddling(ministack) as meddler:
            sink = ScriptedSink(Unknown("no answer"))
            async with working(queue, meddler.endpoint, sink=sink):
                fail = failing("InternalError", 500)
                meddler.next("ChangeMessageVisibilityBatch", fail, vanish)
                await until_empty(queue)
                assert len(hidden_for(meddler)) == 3


# --- outages ---------------------------------------------------------------------------------


class TestOutages:
    async def test_while_the_store_is_down_nothing_is_received_and_nothing_counted(self, ministack):
        queue = TestQueue(ministack.endpoint)
        store = FaultyStore(MemoryStore())
        async with meddling(ministack) as meddler:
            receives = Receives(meddler)
            worker = Worker(
                queue.address, meddler.endpoint, store=store, settings=QUICK, visibility=SHORT
            )
            await worker.start()
            try:
                store.arm("claim.before", times=1e9, for_s=1e9)
                queue.send(*events(3))
                # They are received at most once, by a poll that was under way.
                await until(worker.gateway.down)
                await asyncio.sleep(1.2)
                queue.send(*events(3, start=3))
                before = meddler.count("ReceiveMessage")
                await asyncio.sleep(2.5)
                assert meddler.count("ReceiveMessage") == before
                assert queue.counts() == (3, 3)
                store.disarm()
                await until_empty(queue)
                assert sorted(sent(worker.sink.raws)) == list(range(6))
                assert sorted(sent(receives.bodies)) == list(range(6))  # once each
            finally:
                store.disarm()
                await worker.aclose()

    async def test_while_the_sink_is_down_messages_stay_in_hand_and_are_received_once(
        self, ministack
    ):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(5))
        sink = ScriptedSink(otherwise=Closed("401"))
        async with meddling(ministack) as meddler:
            receives = Receives(meddler)
            async with working(queue, meddler.endpoint, sink=sink) as worker:
                await until(lambda: worker.sink.seen)
                await asyncio.sleep(1.5)
                assert worker.sink.taken == []
                worker.sink.otherwise = YES
                await until_empty(queue)
                assert sorted(sent(receives.bodies)) == list(range(5))
                assert sorted(sent(worker.sink.raws)) == list(range(5))

    async def test_a_route_that_is_down_does_not_keep_messages_from_another(self, ministack):
        queue = TestQueue(ministack.endpoint)
        shut, other = ScriptedSink(otherwise=Closed("401")), ScriptedSink(Unknown("reset"))
        once = Settings(breaker=1, backoff=timedelta(milliseconds=10))
        worker = Worker(queue.address, queue.endpoint, sink=shut, settings=once)
        store = FaultyStore(MemoryStore())
        second = Gateway(store=store, sink=other, route="other", settings=once)
        calls = Pattern.compile({"detail-type": ["Call"]}, "match")
        orders = Pattern.compile({"detail-type": ["Order"]}, "match")
        worker.router = Router([RouteEntry(worker.gateway, orders), RouteEntry(second, calls)])
        worker.host = replace(worker.host, router=worker.router)
        await worker.start()
        try:
            # Both are down now, and only what is for the first is in hand.
            queue.send(*events(3), event({"n": 3}, id="call", detail_type="Call"))
            await until(lambda: shut.seen and other.seen)
            await until(lambda: other.taken)
            assert shut.taken == []
            shut.otherwise = YES
            await until_empty(queue)
            assert (sorted(sent(shut.raws)), sent(other.raws)) == ([0, 1, 2], [3])
        finally:
            await worker.aclose()

    async def test_nothing_is_received_before_the_store_is_there(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(2))
        async with (
            meddling(ministack) as meddler,
            working(queue, meddler.endpoint, is_open=False) as worker,
        ):
            await asyncio.sleep(0.5)
            assert meddler.count("ReceiveMessage") == 0
            worker.is_open = True
            await until_empty(queue)

    async def test_nothing_is_received_while_paused(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler:
            worker = Worker(queue.address, meddler.endpoint)
            worker.router.pause()
            await worker.start()
            try:
                queue.send(*events(2))
                await asyncio.sleep(0.5)
                assert meddler.count("ReceiveMessage") == 0
                worker.gateway.resume()
                await until_empty(queue)
            finally:
                await worker.aclose()

    async def test_a_message_stays_hidden_for_as_long_as_its_event_takes(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(10))
        async with meddling(ministack) as meddler:
            receives = Receives(meddler)
            worker = Worker(queue.address, meddler.endpoint, settings=QUICK, visibility=SHORT)
            worker.store.arm("claim.before", times=1e9, for_s=1e9)
            await worker.start()
            try:
                loop = asyncio.get_running_loop()
                ends = loop.time() + 1.5 * SHORT.total_seconds()
                while loop.time() < ends:
                    assert queue.counts() == (0, 10)
                    await asyncio.sleep(0.1)
                worker.store.disarm()
                await until_empty(queue)
                assert len(receives.bodies) == 10
                assert len(worker.sink.taken) == 10
            finally:
                worker.store.disarm()
                await worker.aclose()

    async def test_what_the_dead_letters_cannot_take_is_not_deleted(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send("no event", *events(1))
        dead = FailingDeadLetters(broken=True)
        async with meddling(ministack) as meddler:
            receives = Receives(meddler)
            async with working(queue, meddler.endpoint, dead=dead) as worker:
                await until(lambda: worker.sink.taken)
                await until(lambda: queue.counts() == (0, 1))
                await asyncio.sleep(0.3)
                assert queue.counts() == (0, 1)
                dead.broken = False
                await until_empty(queue)
                assert len(await dead.list()) == 1
                assert len(receives.bodies) == 2  # it has waited here

    async def test_a_queue_that_is_away_at_the_start_may_come_later(self, ministack, caplog):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(2))
        async with meddling(ministack) as meddler:
            meddler.next("GetQueueUrl", failing("ServiceUnavailable", 503), vanish)
            async with working(queue, meddler.endpoint):
                assert told(caplog, "oncebridge.source_is_away")
                await until_empty(queue)


# --- deleting --------------------------------------------------------------------------------


def failing_entries(code, at, *, sender_fault=False):
    """Let the other entries of a batch through, and fail those."""

    async def rule(body, pass_on):
        entries = body["Entries"]
        chosen = [entry for place, entry in enumerate(entries) if place in at]
        others = [entry for entry in entries if entry not in chosen]
        answer = {"Successful": [], "Failed": []}
        if others:
            _, answer = await pass_on({**body, "Entries": others})
        answer["Failed"] += [
            {"Id": entry["Id"], "Code": code, "SenderFault": sender_fault} for entry in chosen
        ]
        return 200, answer

    return rule


class TestDeleting:
    async def test_what_a_batch_could_not_delete_is_deleted_later(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            working(queue, meddler.endpoint) as worker,
        ):
            fail = failing_entries("InternalError", {0, 2})
            meddler.next("DeleteMessageBatch", fail, fail)
            queue.send(*events(5))
            await until_empty(queue)
            assert worker.counts["arrived"] == 5

    async def test_a_call_without_an_answer_is_repeated(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            working(queue, meddler.endpoint) as worker,
        ):
            meddler.next("DeleteMessageBatch", vanish, failing("ThrottlingException"))
            queue.send(*events(5))
            await until_empty(queue)
            assert worker.counts["arrived"] == 5

    async def test_a_call_whose_answer_was_lost_has_done_its_work(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            working(queue, meddler.endpoint) as worker,
        ):
            meddler.next("DeleteMessageBatch", swallow)
            queue.send(*events(1))
            await until_empty(queue)
            await until(lambda: not len(worker.source._received))
            assert worker.counts["arrived"] == 1

    async def test_what_can_never_be_deleted_comes_again_and_is_a_duplicate(
        self, ministack, caplog
    ):
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler:
            settings = {"settings": QUICK, "visibility": SHORT}
            async with working(queue, meddler.endpoint, **settings) as worker:
                fail = failing_entries("ReceiptHandleIsInvalid", {0}, sender_fault=True)
                meddler.next("DeleteMessageBatch", fail)
                queue.send(*events(1))
                await until_empty(queue)
                assert worker.counts["delivered"] == worker.counts["duplicate"] == 1
            (record,) = told(caplog, "oncebridge.messages_not_deleted")
            assert record.messages == 1

    async def test_one_that_comes_again_while_in_hand_is_deleted_by_its_latest_handle(
        self, ministack
    ):
        theirs = TestQueue(ministack.endpoint)
        theirs.send("a")
        address = QueueAddress.parse(theirs.address)
        queue = SqsQueue(address, SqsSourceOptions(endpoint=ministack.endpoint))
        hand = ReceivedMessages(queue, 1, CountingDice())
        now = asyncio.get_running_loop().time
        try:
            (first,) = await queue.receive(wait_s=0, visibility_s=1)
            place = hand.take(first, now())
            (again,) = await queue.receive(wait_s=5, visibility_s=30)
            assert again.receipt_handle != first.receipt_handle
            assert hand.take(again, now()) is None
            assert len(hand) == 1
            hand.delete(place)
            await hand.settle()
            assert theirs.counts() == (0, 0)
            assert len(hand) == 0
        finally:
            await hand.aclose()
            await queue.aclose()

    async def test_ten_go_in_a_call(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(40))
        async with (
            meddling(ministack) as meddler,
            working(queue, meddler.endpoint, receivers=4),
        ):
            await until_empty(queue)
            assert meddler.count("DeleteMessageBatch") <= 10  # and one to try


# --- order -----------------------------------------------------------------------------------


class TestFifo:
    async def test_a_group_goes_in_order_and_others_pass_it(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        for n in range(6):
            queue.send(*events(1, start=n), group="a")
            queue.send(*events(1, start=100 + n), group="b")
        # Number 0 fails twice without a clear answer.
        failures = [Unknown("?"), Unknown("?")]

        def step(delivery):
            if delivery.event.detail["n"] == 0 and failures:
                return failures.pop()
            return YES

        sink = ScriptedSink(otherwise=step)
        async with working(queue, sink=sink) as worker:
            await until_empty(queue)
            numbers = sent(worker.sink.raws)
            assert [n for n in numbers if n < 100] == list(range(6))
            assert [n for n in numbers if n >= 100] == list(range(100, 106))
            seen = sent([delivery.event.raw for delivery in worker.sink.seen])
            assert seen.count(0) == 3
            # Nothing of the group was tried before its first message was through.
            assert [n for n in seen if n < 100] == [0, 0, 0, 1, 2, 3, 4, 5]
            assert numbers.index(105) < numbers.index(0)

    async def test_poison_in_a_group_does_not_hold_it_up(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        queue.send(*events(1), "no event", *events(1, start=1), group="a")
        async with working(queue) as worker:
            await until_empty(queue)
            assert sent(worker.sink.raws) == [0, 1]
            assert len(await worker.dead.list()) == 1

    async def test_in_an_outage_a_group_waits_in_order(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        async with working(queue, settings=QUICK, visibility=SHORT) as worker:
            worker.store.arm("claim.before", times=6)
            queue.send(*events(8), group="a")
            await until_empty(queue)
            assert sent(worker.sink.raws) == list(range(8))


# --- stopping --------------------------------------------------------------------------------


class TestStopping:
    async def test_what_is_in_hand_is_given_back_at_once(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with working(queue) as worker:
            worker.store.arm("claim.before", times=1e9, for_s=1e9)
            queue.send(*events(15))
            await until(lambda: queue.counts()[1] > 0)
            await asyncio.sleep(0.3)
            await worker.stop()
            assert queue.counts() == (15, 0)
            assert worker.sink.seen == []

    async def test_what_is_under_way_is_finished_and_deleted(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(5))
        sink = ScriptedSink(otherwise=After(0.7, YES))
        async with working(queue, sink=sink) as worker:
            await until(lambda: len(sink.seen) == 5)
            await worker.stop()
            assert queue.counts() == (0, 0)
            assert len(sink.taken) == 5

    async def test_what_was_received_at_the_start_and_never_brought_is_given_back(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(2))
        worker = Worker(queue.address, queue.endpoint)
        await worker.router.open()
        await worker.source.open(worker.host)
        assert queue.counts() == (0, 2)
        await worker.aclose()
        assert queue.counts() == (2, 0)

    async def test_a_group_is_given_back_in_order(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        async with working(queue) as worker:
            worker.store.arm("claim.before", times=1e9, for_s=1e9)
            queue.send(*events(5), group="a")
            await until(lambda: queue.counts()[1] > 0)
            await worker.stop()
        bodies = [message["Body"].encode() for message in queue.receive()]
        assert sent(bodies) == list(range(5))

    async def test_stopping_before_it_runs(self, ministack):
        queue = TestQueue(ministack.endpoint)
        source = SqsSource.from_url(queue.address, SqsSourceOptions(endpoint=queue.endpoint))
        source.stop()
        assert source.progress() is None
        await source.aclose()


# --- the start -------------------------------------------------------------------------------


class TestOpening:
    @pytest.mark.parametrize(
        ("call", "action"),
        [
            ("ReceiveMessage", "ReceiveMessage"),
            ("DeleteMessageBatch", "DeleteMessage"),
            ("ChangeMessageVisibilityBatch", "ChangeMessageVisibility"),
            ("GetQueueUrl", "GetQueueUrl"),
        ],
    )
    async def test_a_right_that_is_missing_is_named(self, ministack, call, action):
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler:
            meddler.always(call, failing("AccessDeniedException", 403))
            with pytest.raises(ConfigError, match=f"denies sqs:{action} on the queue"):
                async with working(queue, meddler.endpoint):
                    pass

    async def test_a_queue_that_is_not_there(self, ministack):
        for address in ("sqs://nobody-made-it", "sqs:http://localhost/123456789012/nobody"):
            worker = Worker(address, ministack.endpoint)
            with pytest.raises(ConfigError, match="there is no SQS queue nobody"):
                await worker.start()
            await worker.aclose()

    async def test_a_visibility_that_is_not_longer_than_the_lease(self, ministack):
        queue = TestQueue(ministack.endpoint)
        with pytest.raises(ConfigError, match="30s is not longer than the lease") as caught:
            async with working(queue, visibility=timedelta(seconds=30)):
                pass
        assert caught.value.where == "source.visibility"

    async def test_settings_of_the_queue_that_do_not_fit_are_told(self, ministack, caplog):
        queue = TestQueue(ministack.endpoint, MessageRetentionPeriod=14 * 86400)
        async with working(queue):
            pass
        (record,) = told(caplog, "oncebridge.queue_without_redrive")
        assert "at least 13" in record.do
        (record,) = told(caplog, "oncebridge.queue_outlasts_window")
        assert (record.retention, record.window) == ("14d", "6d")
        caplog.clear()
        queue.redrive(TestQueue(ministack.endpoint), 12)
        queue.set(MessageRetentionPeriod=6 * 86400)
        async with working(queue):
            pass
        (record,) = told(caplog, "oncebridge.queue_redrives_early")
        assert (record.maxReceiveCount, record.at_least) == (12, 13)
        assert not told(caplog, "oncebridge.queue_outlasts_window")

    async def test_settings_that_fit_are_not_spoken_of(self, ministack, caplog):
        queue = TestQueue(ministack.endpoint)
        queue.redrive(TestQueue(ministack.endpoint), 13)
        async with working(queue):
            pass
        assert not [record for record in caplog.records if record.name == "oncebridge"]

    async def test_settings_that_may_not_be_read_are_no_reason_to_stop(self, ministack, caplog):
        caplog.set_level(logging.INFO, "oncebridge")
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(1))
        async with meddling(ministack) as meddler:
            meddler.always("GetQueueAttributes", failing("AccessDeniedException", 403))
            async with working(queue, meddler.endpoint):
                await until_empty(queue)
        (record,) = told(caplog, "oncebridge.queue_settings_unknown")
        assert record.levelno == logging.INFO
        assert "sqs:GetQueueAttributes" in record.error

    def test_options_have_their_limits(self):
        source = SqsSource.from_url("sqs://orders", SqsSourceOptions(region="eu-west-1"))
        assert source.progress() is None
        with pytest.raises(ConfigError):
            SqsSource.from_url("orders")


# --- errors while receiving --------------------------------------------------------------------


class TestReceiving:
    async def test_errors_that_pass_are_waited_out_and_told_once(self, ministack, caplog):
        queue = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            working(queue, meddler.endpoint, receivers=1),
        ):
            fail = failing("RequestThrottled", 400)
            meddler.next("ReceiveMessage", fail, fail)
            await until(lambda: meddler.count("ReceiveMessage") >= 4)
            queue.send(*events(1))
            await until_empty(queue)
        (record,) = told(caplog, "oncebridge.queue_fails")
        assert record.levelno == logging.WARNING
        assert record.call == "ReceiveMessage"

    async def test_a_right_that_is_taken_away_is_an_error_and_no_end(self, ministack, caplog):
        queue = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            working(queue, meddler.endpoint, receivers=1),
        ):
            denied = failing("AccessDeniedException", 403)
            meddler.next("ReceiveMessage", denied, failing("OverLimit", 403), vanish)
            await until(lambda: told(caplog, "oncebridge.queue_fails"))
            queue.send(*events(1))
            await until_empty(queue)
        records = told(caplog, "oncebridge.queue_fails")
        assert records[0].levelno == logging.ERROR
        assert "sqs:ReceiveMessage" in records[0].error
        assert len(records) == 3  # one for each kind

    async def test_an_answer_that_cannot_be_read_is_asked_for_in_small(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler:
            async with working(queue, meddler.endpoint, receivers=1):
                meddler.next("ReceiveMessage", saying(200, {"Messages": [{}]}))
                await until(lambda: meddler.count("ReceiveMessage") >= 4)
            sizes = [body["MaxNumberOfMessages"] for body in asked(meddler, "ReceiveMessage")]
            assert sizes[:2] == [10, 10]
            assert 1 in sizes[2:4]

    async def test_no_more_is_in_hand_than_allowed(self, ministack):
        queue = TestQueue(ministack.endpoint)
        queue.send(*events(60))
        sink = ScriptedSink(otherwise=After(0.1, YES))
        most = 0
        async with working(queue, sink=sink, receivers=2, in_hand=10) as worker:

            def look():
                nonlocal most
                most = max(most, len(worker.source._received))
                return queue.counts() == (0, 0)

            await until(look)
        assert most <= 10 + 2 * 10  # the receives that are under way


# --- twelve hours ------------------------------------------------------------------------------


class FakeQueue:
    """Keeps what it is asked."""

    name = "orders"

    def __init__(self):
        self.hidden = []
        self.failure = None

    async def change_visibility(self, changes):
        now = asyncio.get_running_loop().time()
        self.hidden += [(now, *change) for change in changes]
        return [self.failure for _ in changes]


@virtual
async def test_no_message_is_hidden_beyond_twelve_hours(caplog):
    loop = asyncio.get_running_loop()
    queue = FakeQueue()
    hand = ReceivedMessages(queue, 120, CountingDice())
    received_at = loop.time()
    hand.take(Message("id", "handle"), received_at)
    keeping = asyncio.create_task(hand.keep())
    await asyncio.sleep(13 * 3600)
    ends = [now + seconds for now, _, seconds in queue.hidden]
    assert max(ends) <= received_at + 43_195
    assert max(ends) > received_at + 43_190
    # Each came before the one before it was over.
    assert all(later < before for (later, *_), before in zip(queue.hidden[1:], ends, strict=False))
    assert len(queue.hidden) < 13 * 3600 / 50
    (record,) = told(caplog, "oncebridge.messages_not_hidden")
    assert record.messages == 1
    keeping.cancel()


@virtual
async def test_a_message_that_is_visible_already_is_not_hidden_again_and_again(caplog):
    queue = FakeQueue()
    queue.failure = Failure("0", "MessageNotInflight", sender_fault=True)
    hand = ReceivedMessages(queue, 120, CountingDice())
    hand.take(Message("id", "handle"), asyncio.get_running_loop().time())
    keeping = asyncio.create_task(hand.keep())
    await asyncio.sleep(600)
    assert len(queue.hidden) == 1
    # Received once more, it is hidden again.
    queue.failure = None
    assert hand.take(Message("id", "another"), asyncio.get_running_loop().time()) is None
    await asyncio.sleep(300)
    assert {handle for _, handle, _ in queue.hidden[1:]} == {"another"}
    keeping.cancel()


@virtual
async def test_trouble_is_told_once_and_once_more_when_it_is_over(caplog):
    trouble = FailureLog("DeleteMessage", "orders")
    for _ in range(5):
        trouble.failed(StoreUnavailable("no answer"))
        trouble.succeeded()  # others get through at the same time
        await asyncio.sleep(1)
    assert len(told(caplog, "oncebridge.queue_fails")) == 1
    assert not told(caplog, "oncebridge.queue_answers_again")
    trouble.failed(OncebridgeError("something else"))
    assert len(told(caplog, "oncebridge.queue_fails")) == 2
    await asyncio.sleep(6)
    trouble.succeeded()
    trouble.succeeded()
    assert len(told(caplog, "oncebridge.queue_answers_again")) == 1


def test_an_event_is_written_as_others_write_it():
    assert sent([event({"n": 3})]) == [3]
