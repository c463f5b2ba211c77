"""Dead letters in an SQS queue, as a worker puts them and as an operator looks at them."""

import asyncio
import json
import logging
import os
import random
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from tests.aws.queues import TestQueue, events, told, until_empty, working
from tests.faults.doubles import ScriptedSink, event
from tests.servers.aws import AWS
from tests.servers.meddler import failing, meddling, swallow, vanish
from tests.unit.test_dead_letters import DeadLettersContract, letter, without_number

from oncebridge import ConfigError, DeadLetterError, Gateway, StoreError
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.dead_letters.sqs import SqsDeadLetters, SqsDeadLettersOptions
from oncebridge.errors import DeadLetterRefused, StoreUnavailable
from oncebridge.operate.replay import DeadLetterFilter, select
from oncebridge.sinks.api import Never
from oncebridge.stores.memory import MemoryStore

FIT = {"MessageRetentionPeriod": 14 * 86400}


@pytest.fixture(autouse=True)
def _looks_quickly(monkeypatch):
    """Take an empty answer for an empty queue: this one is on a single host."""
    monkeypatch.setattr("oncebridge.dead_letters.sqs._WAIT_S", 0)


@asynccontextmanager
async def opened(queue, endpoint=""):
    options = SqsDeadLettersOptions(endpoint=endpoint or queue.endpoint)
    dead = SqsDeadLetters.from_url(queue.address, options)
    try:
        async with asyncio.timeout(30):
            await dead.open()
            yield dead
    finally:
        await dead.aclose()


class TestSqs(DeadLettersContract):
    @pytest.fixture(autouse=True)
    def _queue(self, ministack):
        self.queue = TestQueue(ministack.endpoint, **FIT)

    @asynccontextmanager
    async def opened(self, tmp_path):
        async with opened(self.queue) as dead:
            yield dead

    async def test_letters_outlive_the_process_and_keep_their_numbers(self):
        async with opened(self.queue) as dead:
            await dead.put([letter(n) for n in range(15)])
        async with opened(self.queue) as dead:
            first = await dead.list()
        async with opened(self.queue) as dead:
            assert await dead.list() == first
        assert [without_number(one) for one in first] == [
            without_number(letter(n)) for n in range(15)
        ]

    async def test_numbers_are_exact_in_any_reader_of_json(self):
        async with opened(self.queue) as dead:
            await dead.put([letter()])
            (one,) = await dead.list()
        assert float(one.number) == one.number < 2**53

    async def test_looking_lets_go_at_the_end(self):
        async with opened(self.queue) as dead:
            await dead.put([letter(n) for n in range(12)])
            assert len(await dead.list()) == 12
            assert self.queue.counts() == (0, 12)
        assert self.queue.counts() == (12, 0)

    async def test_a_letter_that_others_have_dropped_is_not_dropped_twice(self):
        async with opened(self.queue) as mine:
            await mine.put([letter()])
            (one,) = await mine.list()
            self.queue.sqs.purge_queue(QueueUrl=self.queue.url)
            assert await mine.drop([one.number]) == 0

    async def test_by_number_as_the_operator_does(self):
        async with opened(self.queue) as dead:
            await dead.put([letter(n) for n in range(30)])
            letters = [one async for one in select(dead, DeadLetterFilter())]
            assert len(letters) == 30
            chosen = tuple(one.number for one in letters[3:5])
            found = [one async for one in select(dead, DeadLetterFilter(chosen))]
            assert found == letters[3:5]
            assert await dead.drop(chosen) == 2
            left = [one.number async for one in select(dead, DeadLetterFilter())]
            assert left == [one.number for one in letters[:3] + letters[5:]]


# --- what a letter looks like ------------------------------------------------------------------


class TestMessages:
    async def test_anybody_can_read_them(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with opened(queue) as dead:
            await dead.put([letter(raw=event())])
        (message,) = queue.receive()
        assert message["Body"].encode() == event()
        found = {name: one["StringValue"] for name, one in message["MessageAttributes"].items()}
        assert int(found.pop("oncebridge-number")) > 0
        assert found == {
            "oncebridge-reason": "rejected",
            "oncebridge-message": "it said 'no'; drop table",
            "oncebridge-route": "crm",
            "oncebridge-rule": "the rule",
            "oncebridge-key": letter().key.hex(),
            "oncebridge-attempts": "3",
            "oncebridge-maybe-delivered": "true",
            "oncebridge-buried-ms": "1700000000001",
        }

    @pytest.mark.parametrize(
        ("raw", "encoding"),
        [
            (b"", "empty"),
            (b"\xff\xfe", "base64"),
            ("\uffff".encode(), "base64"),
            (b"\0", "base64"),
            (b"(empty)", None),
            (event({"text": "x" * 1_048_400}), "gzip"),
            (b"\xff" * 1_000_000, "gzip"),
        ],
    )
    async def test_whatever_the_bytes_they_come_back(self, ministack, raw, encoding):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with opened(queue) as dead:
            await dead.put([letter(raw=raw)])
            (one,) = await dead.list()
            assert one.raw == raw
        (message,) = queue.receive()
        found = message["MessageAttributes"].get("oncebridge-encoding", {})
        assert found.get("StringValue") == encoding

    async def test_what_is_too_large_even_when_packed_is_refused(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        noise = random.Random(1).randbytes(1_000_000)
        async with opened(queue) as dead:
            with pytest.raises(DeadLetterError, match="1048576 bytes; the dead letter has"):
                await dead.put([letter(1), letter(raw=noise)])
            assert await dead.list() == []

    async def test_messages_are_made_fit(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with opened(queue) as dead:
            await dead.put([letter(message="no\0 file \udcff" + "x" * 5000)])
            (one,) = await dead.list()
            assert one.message.startswith("no� file ?x")
            assert len(one.message) == 2000

    async def test_what_others_put_there_is_shown(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        queue.send(event(), "no event")
        async with opened(queue) as dead:
            first = await dead.list()
        assert {(one.raw, one.reason, one.route, one.rule) for one in first} == {
            (event(), "foreign", "", ""),
            (b"no event", "foreign", "", ""),
        }
        assert all(one.number > 0 and one.buried_ms > 1_700_000_000_000 for one in first)
        async with opened(queue) as dead:
            assert await dead.list() == first
            assert await dead.drop([one.number for one in first]) == 2

    async def test_what_was_changed_on_the_way_is_shown_as_it_is(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        wrong = {
            "oncebridge-encoding": "gzip",
            "oncebridge-key": "no hex",
            "oncebridge-number": "-1",
            "oncebridge-attempts": "many",
        }
        queue.sqs.send_message(
            QueueUrl=queue.url,
            MessageBody="no base64",
            MessageAttributes={
                name: {"DataType": "String", "StringValue": text} for name, text in wrong.items()
            },
        )
        async with opened(queue) as dead:
            (one,) = await dead.list()
        assert (one.raw, one.key, one.attempts) == (b"no base64", b"", 0)


# --- failures ------------------------------------------------------------------------------------


class TestFailures:
    async def test_some_failures_are_tried_again(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as dead:

            async def half(asked, pass_on):
                entries = asked["Entries"]
                _, answer = await pass_on({**asked, "Entries": entries[::2]})
                answer["Failed"] = [
                    {"Id": entry["Id"], "Code": "InternalError", "SenderFault": False}
                    for entry in entries[1::2]
                ]
                return 200, answer

            meddler.next("SendMessageBatch", half, failing("RequestThrottled"), vanish)
            await dead.put([letter(n) for n in range(8)])
            assert [one.raw for one in await dead.list()] == [letter(n).raw for n in range(8)]

    async def test_a_lost_answer_makes_no_second_letter(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as dead:
            meddler.next("SendMessageBatch", swallow)
            await dead.put([letter(1), letter(2)])
            assert queue.counts() == (4, 0)
            first, second = await dead.list()
            assert await dead.drop([first.number]) == 1
            assert await dead.list() == [second]
            assert await dead.drop([second.number]) == 1
        assert queue.counts() == (0, 0)

    @pytest.mark.parametrize(
        "broken",
        [failing("AccessDeniedException", 403), failing("InvalidMessageContents")],
    )
    async def test_what_does_not_pass_is_raised_at_once(self, ministack, broken):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as dead:
            meddler.always("SendMessageBatch", broken)
            with pytest.raises(DeadLetterError, match=queue.name):
                await dead.put([letter(1)])
            assert meddler.count("SendMessageBatch") == 1

    async def test_what_does_not_pass_in_time_is_raised(self, ministack, monkeypatch):
        monkeypatch.setattr("oncebridge.dead_letters.sqs._PAUSES_S", (0.01, 0.01, 0.01))
        queue = TestQueue(ministack.endpoint, **FIT)
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as dead:
            meddler.always("SendMessageBatch", failing("ServiceUnavailable", 503))
            with pytest.raises(DeadLetterError, match="ServiceUnavailable"):
                await dead.put([letter(1)])
            assert meddler.count("SendMessageBatch") == 4

    async def test_an_operator_is_told_the_right_that_is_missing(self, ministack):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with meddling(ministack) as meddler, opened(queue, meddler.endpoint) as dead:
            await dead.put([letter(1)])
            denied = failing("AccessDeniedException", 403)
            meddler.next("ReceiveMessage", denied, denied, denied, denied)
            with pytest.raises(StoreError, match="sqs:ReceiveMessage"):
                await dead.list()
            (one,) = await dead.list()
            meddler.next("DeleteMessageBatch", denied, vanish)
            with pytest.raises(StoreError, match="sqs:DeleteMessage"):
                await dead.drop([one.number])
            with pytest.raises(StoreUnavailable, match=queue.name):
                await dead.drop([one.number])
            assert await dead.drop([one.number]) == 1

    async def test_after_closing_it_refuses(self, ministack, monkeypatch):
        monkeypatch.setattr("oncebridge.dead_letters.sqs._PAUSES_S", ())
        queue = TestQueue(ministack.endpoint, **FIT)
        async with opened(queue) as dead:
            pass
        with pytest.raises(DeadLetterError):
            await dead.put([letter(1)])


# --- the start -----------------------------------------------------------------------------------


class TestOpening:
    async def test_a_queue_that_is_not_there(self, ministack):
        for address in ("sqs://nobody-made-it", "sqs:http://localhost/123456789012/nobody"):
            options = SqsDeadLettersOptions(endpoint=ministack.endpoint)
            dead = SqsDeadLetters.from_url(address, options)
            with pytest.raises(ConfigError, match="there is no SQS queue nobody"):
                await dead.open()
            await dead.aclose()

    async def test_a_fifo_queue_is_refused(self):
        with pytest.raises(ConfigError, match="standard queue"):
            SqsDeadLetters.from_url("sqs://dead.fifo")

    async def test_a_queue_that_would_lose_letters_is_told(self, ministack, caplog):
        queue = TestQueue(ministack.endpoint)
        queue.redrive(TestQueue(ministack.endpoint), 10)
        async with opened(queue):
            pass
        assert told(caplog, "oncebridge.dead_letters_move_on")
        (record,) = told(caplog, "oncebridge.dead_letters_end_early")
        assert record.after == "4d"

    async def test_a_queue_that_is_fit_is_not_spoken_of(self, ministack, caplog):
        async with opened(TestQueue(ministack.endpoint, **FIT)):
            pass
        assert not [record for record in caplog.records if record.name == "oncebridge"]

    async def test_one_that_is_away_may_come_later(self, ministack, caplog):
        queue = TestQueue(ministack.endpoint, **FIT)
        async with meddling(ministack) as meddler:
            meddler.next("GetQueueUrl", failing("ServiceUnavailable", 503))
            async with opened(queue, meddler.endpoint) as dead:
                (record,) = told(caplog, "oncebridge.dead_letters_not_checked")
                assert record.levelno == logging.WARNING
                await dead.put([letter(1)])
                assert len(await dead.list()) == 1

    async def test_a_queue_of_many_is_not_all_held_in_memory(self, ministack, caplog, monkeypatch):
        monkeypatch.setattr("oncebridge.dead_letters.sqs._MOST_SEEN", 10)
        queue = TestQueue(ministack.endpoint, **FIT)
        async with opened(queue) as dead:
            await dead.put([letter(n) for n in range(60)])
            assert 10 <= len(await dead.list()) <= 50
        assert told(caplog, "oncebridge.dead_letters_not_all_seen")
        assert queue.counts() == (60, 0)


# --- with all the rest -----------------------------------------------------------------------------


async def test_a_message_that_dies_is_in_the_other_queue_before_it_is_deleted(ministack):
    queue, graves = TestQueue(ministack.endpoint), TestQueue(ministack.endpoint, **FIT)
    options = SqsDeadLettersOptions(endpoint=ministack.endpoint)
    dead = SqsDeadLetters.from_url(graves.address, options)
    queue.send(*events(3), "no event")
    sink = ScriptedSink(otherwise=Never("no"))
    async with working(queue, sink=sink, dead=dead):
        await until_empty(queue)
    bodies = {message["Body"].encode() for message in graves.receive()}
    assert bodies == {*events(3), b"no event"}


@pytest.mark.full
def test_the_command_line_lists_shows_replays_and_drops(ministack, tmp_path):
    graves = TestQueue(ministack.endpoint, **FIT)
    config = tmp_path / "oncebridge.toml"
    out = tmp_path / "out.ndjson"
    config.write_text(
        f'source = "http://127.0.0.1:8080/events"\nstore = "sqlite:{tmp_path}/store.db"\n'
        f'sink = "file:{out}"\n[dead]\nurl = "{graves.address}"\n'
    )

    def run(*args, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "oncebridge", "dead", *args, "-c", str(config)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **AWS, "AWS_ENDPOINT_URL": ministack.endpoint},
        )
        assert done.returncode == code, done
        return done.stdout

    async def put(*letters):
        async with opened(graves) as dead:
            await dead.put(letters)

    route = "default"
    asyncio.run(put(letter(raw=event(), route=route, rule="default", key=b""), letter(2)))
    listed = [json.loads(line) for line in run("list", "--json").splitlines()]
    assert [one["bytes"] for one in listed] == [len(event()), len(letter(2).raw)]
    numbers = [str(one["number"]) for one in listed]
    assert run("show", numbers[0], "--raw").encode() == event()
    (replayed,) = [json.loads(line) for line in run("replay", numbers[0], "--json").splitlines()]
    assert replayed["result"] == "delivered", replayed
    assert out.read_bytes() == event() + b"\n"
    assert json.loads(run("drop", numbers[1], "--yes", "--json"))["dropped"] == 1
    assert run("list", "--json") == ""
    assert graves.counts() == (0, 0)


async def test_what_is_no_event_and_fits_in_no_way_is_cut_and_an_event_is_refused(ministack):
    noise = random.Random(7).randbytes(3 << 20)
    async with opened(TestQueue(ministack.endpoint, **FIT)) as dead:
        await dead.put([replace(letter(), raw=noise, key=b"")])
        (kept,) = await dead.list()
        assert noise.startswith(kept.raw)
        assert len(kept.raw) > 300_000
        assert kept.message.startswith(f"only its first {len(kept.raw)} bytes are kept")
        with pytest.raises(DeadLetterRefused, match="even when compressed"):
            await dead.put([replace(letter(), raw=noise)])


async def test_one_letter_that_is_refused_does_not_keep_others_from_the_grave():
    class Small(MemoryDeadLetters):
        async def put(self, letters):
            if any(len(one.raw) > 500 for one in letters):
                raise DeadLetterRefused("too large")
            await super().put(letters)

    dead = Small()
    sink = ScriptedSink(otherwise=Never("refused"))
    raws = [event({"n": 1}), event({"n": 2, "fill": "x" * 600}), event({"n": 3})]
    async with Gateway(store=MemoryStore(), sink=sink, dead=dead) as gateway:
        outcomes = await gateway.process(raws)
    assert [one.acknowledge for one in outcomes] == [True, False, True]
    assert outcomes[1].blamed
    assert [one.raw for one in await dead.list()] == [raws[0], raws[2]]
