"""The sink that is an SQS queue: what is sent, and what its answers are understood as."""

import asyncio
import hashlib
import logging
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from tests.aws.queues import TestQueue, events, told
from tests.faults.doubles import event, rule
from tests.servers.meddler import failing, hang, meddling, saying, swallow, vanish

from oncebridge import ConfigError, Delivery, Gateway, Settings, Verdict, parse
from oncebridge.aws.queue import MOST_BYTES, Failure
from oncebridge.sinks.api import Closed, Never, No, Throttled, Unknown, Yes
from oncebridge.sinks.sqs import SqsSink, SqsSinkOptions, answer_to_failure
from oncebridge.stores.memory import MemoryStore

KEY, GENERATION = bytes(range(33)), bytes(range(16))


def delivery(raw=None, key=KEY, generation=GENERATION, **more):
    return Delivery(parse(raw or event(), bare=True), key, generation, **{"route": "crm", **more})


def several(number, **more):
    return [delivery(raw, KEY + bytes([at]), **more) for at, raw in enumerate(events(number), 1)]


@asynccontextmanager
async def opened(queue, endpoint="", **options):
    chosen = SqsSinkOptions(endpoint=endpoint or queue.endpoint, **options)
    sink = SqsSink.from_url(queue.address, chosen)
    try:
        async with asyncio.timeout(30):
            await sink.open()
            yield sink
    finally:
        await sink.aclose()


def attributes(message):
    found = message.get("MessageAttributes", {})
    return {name: value["StringValue"] for name, value in found.items()}


def kinds(answers):
    return [type(answer) for answer in answers]


# --- what is sent ------------------------------------------------------------------------------


class TestSending:
    async def test_the_bytes_go_as_they_came_with_key_and_route(self, ministack):
        queue = TestQueue(ministack.endpoint)
        raw = ' {"id":"1", "source":"s","detail-type":"Ä\\u0000","detail":{"n":1.0,"e":"😀"}}\n'
        async with opened(queue) as sink:
            assert await sink.deliver([delivery(raw.encode())]) == [Yes()]
        (message,) = queue.receive()
        assert message["Body"] == raw
        assert attributes(message) == {"Idempotency-Key": KEY.hex(), "oncebridge-route": "crm"}

    async def test_a_full_batch_is_one_call(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as sink:
            assert sink.batch == 10
            assert await sink.deliver(several(10)) == [Yes()] * 10
            assert meddler.count("SendMessageBatch") == 1
        assert {m["Body"].encode() for m in queue.receive()} == set(events(10))

    async def test_version_and_unprotected_are_told(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with opened(queue) as sink:
            await sink.deliver([delivery(version=7, unprotected=True)])
            await sink.deliver([delivery(key=b"", generation=b"", route="")])
        found = [attributes(message) for message in queue.receive()]
        assert found[0]["oncebridge-version"] == "7"
        assert found[0]["oncebridge-unprotected"] == "true"
        assert found[1] == {}

    async def test_large_events_are_split_over_calls(self, ministack):
        queue = TestQueue(ministack.endpoint)
        large = [event({"n": n, "text": "x" * 400_000}, id=f"e{n}") for n in range(4)]
        sent = [delivery(raw, KEY + bytes([n])) for n, raw in enumerate(large)]
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as sink:
            assert await sink.deliver(sent) == [Yes()] * 4
            assert meddler.count("SendMessageBatch") == 2
        assert {m["Body"].encode() for m in queue.receive()} == set(large)

    async def test_what_is_too_large_is_never_taken_and_spoils_no_other(self, ministack):
        queue = TestQueue(ministack.endpoint, MaximumMessageSize=10_000)
        huge = delivery(event({"text": "x" * MOST_BYTES}))
        beyond = delivery(event({"text": "x" * 10_000}))
        async with opened(queue) as sink:
            answers = await sink.deliver([huge, *several(1), beyond])
            assert kinds(answers) == [Never, Yes, Never]
            assert "too large" in answers[0].reason
        assert len(queue.receive()) == 1

    async def test_a_character_that_sqs_does_not_take_is_named(self, ministack):
        queue = TestQueue(ministack.endpoint)
        bad = event({"text": "?"}).replace(b"?", "\uffff".encode())
        async with opened(queue) as sink:
            answers = await sink.deliver([*several(1), delivery(bad)])
            assert kinds(answers) == [Yes, Never]
            assert "U+FFFF" in answers[1].reason

    async def test_a_route_is_named_whatever_it_is_called(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with opened(queue) as sink:
            assert await sink.deliver([delivery(route="a\x01b")]) == [Yes()]
        (message,) = queue.receive()
        assert attributes(message)["oncebridge-route"] == "a�b"

    @pytest.mark.parametrize("form", ["name", "url", "arn"])
    async def test_addresses(self, ministack, form):
        queue = TestQueue(ministack.endpoint)
        address = {"name": queue.address, "url": f"sqs:{queue.url}", "arn": f"sqs:{queue.arn}"}
        sink = SqsSink.from_url(address[form], SqsSinkOptions(endpoint=queue.endpoint))
        assert await sink.deliver([delivery()]) == [Yes()]
        await sink.aclose()
        assert len(queue.receive()) == 1


# --- FIFO ----------------------------------------------------------------------------------------


def ids(message):
    found = message["Attributes"]
    return found["MessageGroupId"], found["MessageDeduplicationId"]


class TestFifo:
    async def test_a_repeat_of_one_delivery_is_swallowed_and_the_next_life_is_not(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        async with opened(queue) as sink:
            again = delivery(attempt=2)
            later = delivery(generation=b"another life....")
            assert await sink.deliver([delivery()]) == [Yes()]
            assert await sink.deliver([again]) == [Yes()]
            assert await sink.deliver([later]) == [Yes()]
        messages = queue.receive()
        assert len(messages) == 2
        assert ids(messages[0]) == (KEY.hex(), (KEY + GENERATION).hex())

    async def test_the_group_is_the_entity_else_the_option_else_the_key(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        async with opened(queue, group="all") as sink:
            await sink.deliver([delivery(entity=b"\x01\x02"), delivery(key=b"k")])
        assert [ids(message)[0] for message in queue.receive()] == ["0102", "all"]
        async with opened(queue) as sink:
            await sink.deliver([delivery(key=b"kk")])
        (message,) = queue.receive()
        assert ids(message)[0] == b"kk".hex()

    async def test_long_names_are_shortened(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        long = b"\x07" * 65
        async with opened(queue) as sink:
            assert await sink.deliver([delivery(key=long, entity=long)]) == [Yes()]
        ((group, unique),) = [ids(message) for message in queue.receive()]
        assert group == hashlib.sha256(long).hexdigest()
        assert unique == hashlib.sha256(long + GENERATION).hexdigest()

    async def test_what_a_rule_lets_pass_passes_as_often_as_it_comes(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        raws = [event(), event(), event(id="e2"), event(id=None), event(id=None)]
        async with opened(queue, group="all") as sink:
            for raw in raws:
                sent = delivery(raw, key=b"", generation=b"")
                assert await sink.deliver([sent]) == [Yes()]
        assert [message["Body"].encode() for message in queue.receive()] == raws

    async def test_what_nobody_claimed_passes_unless_the_store_was_down(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        async with opened(queue, group="all") as sink:
            for _ in range(2):
                assert await sink.deliver([delivery(generation=b"")]) == [Yes()]  # shadow mode
            for _ in range(2):
                sent = delivery(key=b"u", generation=b"", unprotected=True)
                assert await sink.deliver([sent]) == [Yes()]
        assert len(queue.receive()) == 3

    async def test_what_is_split_stays_in_order(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        large = [event({"n": n, "text": "x" * 400_000}, id=f"e{n}") for n in range(5)]
        sent = [delivery(raw, KEY + bytes([n])) for n, raw in enumerate(large)]
        async with opened(queue, group="all") as sink:
            assert await sink.deliver(sent) == [Yes()] * 5
        assert [message["Body"].encode() for message in queue.receive()] == large

    @pytest.mark.parametrize("group", ["", "a b", "x" * 129, "ä"])
    def test_groups_that_sqs_would_refuse(self, group):
        with pytest.raises(ConfigError) as caught:
            SqsSink.from_url("sqs://q.fifo", SqsSinkOptions(group=group))
        assert caught.value.where == "group"

    def test_a_group_is_for_fifo_queues(self):
        with pytest.raises(ConfigError, match="FIFO") as caught:
            SqsSink.from_url("sqs://q", SqsSinkOptions(group="g"))
        assert caught.value.where == "group"


# --- what the answers mean -------------------------------------------------------------------------


class TestAnswers:
    @pytest.mark.parametrize(
        ("code", "sender_fault", "kind"),
        [
            ("InvalidMessageContents", True, Never),
            ("InvalidParameterValue", True, Never),
            ("InternalError", False, Unknown),
            ("ServiceUnavailable", False, Unknown),
            ("RequestThrottled", True, Throttled),
            ("ThrottlingException", False, Throttled),
            ("KmsThrottled", True, Throttled),
            ("AccessDenied", True, Closed),
            ("AWS.SimpleQueueService.NonExistentQueue", True, Closed),
            ("KmsDisabled", True, Closed),
            ("SomethingNew", True, Unknown),
            ("NoAnswer", False, Unknown),
        ],
    )
    def test_of_an_entry(self, code, sender_fault, kind):
        answer = answer_to_failure(Failure("0", code, "so it is", sender_fault))
        assert type(answer) is kind
        assert code in answer.reason

    async def test_entries_are_answered_for_one_by_one(self, ministack):
        queue = TestQueue(ministack.endpoint)
        answer = {
            "Successful": [{"Id": "2"}],
            "Failed": [
                {"Id": "0", "Code": "InternalError", "SenderFault": False},
                {"Id": "1", "Code": "InvalidMessageContents", "SenderFault": True},
            ],
        }
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as sink:
            meddler.next("SendMessageBatch", saying(200, answer))
            answers = await sink.deliver(several(4))
            assert kinds(answers) == [Unknown, Never, Yes, Unknown]

    @pytest.mark.parametrize(
        ("broken", "kind"),
        [
            (failing("RequestThrottled"), Throttled),
            (failing("InternalError", 500), Unknown),
            (failing("AccessDeniedException", 403), Closed),
            (failing("QueueDoesNotExist"), Closed),
            (vanish, Unknown),
            (swallow, Unknown),
            (saying(200, {"Successful": "yes"}), Unknown),
        ],
    )
    async def test_of_a_whole_call(self, ministack, broken, kind):
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as sink:
            meddler.next("SendMessageBatch", broken)
            assert kinds(await sink.deliver(several(2))) == [kind, kind]
            assert meddler.count("SendMessageBatch") == 1  # never a second time by itself

    async def test_one_that_spoils_the_call_is_found(self, ministack):
        queue = TestQueue(ministack.endpoint)

        async def picky(asked, pass_on):
            if any('"n": 2' in entry["MessageBody"] for entry in asked["Entries"]):
                return 400, {"__type": "com.amazonaws.sqs#InvalidMessageContents"}
            return await pass_on(asked)

        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as sink:
            meddler.always("SendMessageBatch", picky)
            answers = await sink.deliver(several(5))
            assert kinds(answers) == [Yes, Yes, Never, Yes, Yes]
        assert len(queue.receive()) == 4

    async def test_nothing_was_sent_where_nobody_listens(self, ministack):
        queue = TestQueue(ministack.endpoint)
        sink = SqsSink.from_url(f"sqs:{queue.url}", SqsSinkOptions(endpoint="http://127.0.0.1:9"))
        assert kinds(await sink.deliver(several(2))) == [No, No]
        await sink.aclose()

    async def test_an_answer_that_does_not_come(self, ministack):
        queue = TestQueue(ministack.endpoint)
        short = timedelta(milliseconds=300)
        async with (
            meddling(ministack) as meddler,
            opened(queue, meddler.endpoint, timeout=short) as sink,
        ):
            meddler.next("SendMessageBatch", hang)
            assert kinds(await sink.deliver([delivery()])) == [Unknown]


# --- the start -----------------------------------------------------------------------------------


class TestOpening:
    async def test_a_queue_that_is_not_there(self, ministack):
        for address in ("sqs://nobody-made-it", "sqs:http://localhost/123456789012/nobody"):
            sink = SqsSink.from_url(address, SqsSinkOptions(endpoint=ministack.endpoint))
            with pytest.raises(ConfigError, match="there is no SQS queue nobody"):
                await sink.open()
            assert kinds(await sink.deliver([delivery()])) == [Closed]
            await sink.aclose()

    async def test_one_that_cannot_be_asked_now_may_be_there_later(self, ministack, caplog):
        caplog.set_level(logging.INFO, "oncebridge")
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler:
            meddler.next("GetQueueUrl", failing("ServiceUnavailable", 503))
            async with opened(queue, meddler.endpoint) as sink:
                assert told(caplog, "oncebridge.sink_not_checked")
                assert await sink.deliver([delivery()]) == [Yes()]

    async def test_settings_that_may_not_be_read_are_no_reason_to_stop(self, ministack):
        queue = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler:
            meddler.always("GetQueueAttributes", failing("AccessDeniedException", 403))
            async with opened(queue, meddler.endpoint) as sink:
                assert await sink.deliver([delivery()]) == [Yes()]


# --- behind a gateway ------------------------------------------------------------------------------


class TestGateway:
    async def test_each_event_once_and_a_lost_answer_repeats_only_what_it_was_for(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        async with meddling(ministack) as meddler:
            options = SqsSinkOptions(endpoint=meddler.endpoint, group="all")
            settings = Settings(backoff=timedelta(milliseconds=1))
            gateway = Gateway(
                store=MemoryStore(),
                sink=SqsSink.from_url(queue.address, options),
                rules=[rule(key="id")],
                settings=settings,
            )
            async with gateway:
                meddler.next("SendMessageBatch", swallow)
                first = await gateway.process(events(3))
                assert {outcome.verdict for outcome in first} == {Verdict.FAILED}
                await asyncio.sleep(max(outcome.retry_after_ms for outcome in first) / 1000 + 0.05)
                second = await gateway.process(events(3))
                assert {outcome.verdict for outcome in second} == {Verdict.DELIVERED}
                third = await gateway.process(events(3))
                assert {outcome.verdict for outcome in third} == {Verdict.DUPLICATE}
        # The queue has recognised what was sent twice.
        assert len(queue.receive()) == 3

    async def test_events_of_an_entity_are_a_group(self, ministack):
        queue = TestQueue(ministack.endpoint, fifo=True)
        sink = SqsSink.from_url(queue.address, SqsSinkOptions(endpoint=queue.endpoint))
        gateway = Gateway(
            store=MemoryStore(), sink=sink, rules=[rule(key="id", entity="detail.call")]
        )
        raws = [event({"call": call, "n": n}, id=f"{call}{n}") for n in range(3) for call in "ab"]
        async with gateway:
            await gateway.process(raws)
        messages = queue.receive()
        groups = {}
        for message in messages:
            groups.setdefault(ids(message)[0], []).append(parse(message["Body"].encode()))
        assert len(groups) == 2
        for members in groups.values():
            assert len({member.detail["call"] for member in members}) == 1
            assert len(members) == 3
