"""A queue by its name, URL or ARN, and what its calls come to."""

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from tests.aws.queues import TestQueue
from tests.servers.meddler import failing, hang, meddling, saying, swallow

from oncebridge import ConfigError
from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.aws.queue import (
    MOST_BYTES,
    Failure,
    Outgoing,
    QueueAddress,
    SqsQueue,
    TextAttribute,
    refused_character,
    size_of,
)

ACCOUNT = "123456789012"


@asynccontextmanager
async def opened(address, endpoint, **options):
    chosen = AwsOptions(endpoint=endpoint, **options)
    queue = SqsQueue(QueueAddress.parse(address), chosen)
    try:
        async with asyncio.timeout(30):
            yield queue
    finally:
        await queue.aclose()


async def received(queue, **more):
    return await queue.receive(wait_s=0, visibility_s=30, **more)


class TestAddresses:
    def test_a_name(self):
        found = QueueAddress.parse("sqs://orders")
        assert found == QueueAddress("orders")
        assert not found.is_fifo

    def test_a_name_with_its_region(self):
        found = QueueAddress.parse("sqs://orders.fifo?region=eu-west-1")
        assert found == QueueAddress("orders.fifo", region="eu-west-1")
        assert found.is_fifo

    def test_an_arn_has_the_region_and_the_account(self):
        found = QueueAddress.parse(f"sqs:arn:aws-cn:sqs:cn-north-1:{ACCOUNT}:orders")
        assert found == QueueAddress("orders", "", ACCOUNT, "cn-north-1")

    @pytest.mark.parametrize(
        ("host", "region"),
        [
            ("https://sqs.eu-west-1.amazonaws.com", "eu-west-1"),
            ("https://sqs.cn-north-1.amazonaws.com.cn", "cn-north-1"),
            ("https://sqs-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
            ("https://sqs.eu-west-1.api.aws", "eu-west-1"),
            ("https://eu-west-1.queue.amazonaws.com", "eu-west-1"),
            ("https://vpce-0a1b-2c3d.sqs.eu-west-1.vpce.amazonaws.com", "eu-west-1"),
            ("http://localhost:4566", None),
        ],
    )
    def test_a_url_has_the_region_where_its_host_is_aws(self, host, region):
        url = f"{host}/{ACCOUNT}/orders"
        assert QueueAddress.parse(f"sqs:{url}") == QueueAddress("orders", url, ACCOUNT, region)

    @pytest.mark.parametrize(
        "address",
        [
            *("sqs:", "sqs://", "sqs:orders", "sqs://a/b", "sqs://a?x=1", "sqs://a#b", "orders"),
            *("sqs://a.b", "sqs://" + "a" * 81, "sqs://a.fifo.fifo", "sqs://me@a", "sqs://a b"),
            *("sqs:https://sqs.eu-west-1.amazonaws.com/orders", "sqs://[::1"),
            *("sqs:ftp://h/123456789012/orders", "sqs:https://h/123456789012/orders?x=1"),
            *("sqs:arn:aws:sns:eu-west-1:123456789012:orders", "sqs:arn:aws:sqs:::orders"),
        ],
    )
    def test_anything_else_is_refused_and_told_how_to_write_it(self, address):
        with pytest.raises(ConfigError, match="write sqs://NAME"):
            QueueAddress.parse(address)

    def test_two_regions_are_one_too_many(self):
        address = QueueAddress.parse(f"sqs:arn:aws:sqs:eu-west-1:{ACCOUNT}:orders")
        with pytest.raises(ConfigError, match="eu-west-1") as caught:
            SqsQueue(address, AwsOptions(region="us-east-1"))
        assert caught.value.where == "region"
        SqsQueue(address, AwsOptions(region="eu-west-1"))


class TestFinding:
    async def test_by_name_url_and_arn(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        theirs.send("hello")
        for address in (theirs.address, f"sqs:{theirs.url}", f"sqs:{theirs.arn}"):
            async with opened(address, ministack.endpoint) as queue:
                await queue.open()
                (message,) = await queue.receive(wait_s=0, visibility_s=0)
                assert message.body == "hello"

    async def test_calls_go_to_the_endpoint_whatever_the_host_of_the_url(
        self, ministack, monkeypatch
    ):
        theirs = TestQueue(ministack.endpoint)
        theirs.send("hello")
        monkeypatch.setenv("AWS_ENDPOINT_URL", ministack.endpoint)
        url = f"https://sqs.us-east-1.amazonaws.com/000000000000/{theirs.name}"
        async with opened(f"sqs:{url}", None) as queue:
            assert [m.body for m in await received(queue)] == ["hello"]

    async def test_it_is_asked_for_once(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            opened(theirs.address, meddler.endpoint) as queue,
        ):
            await queue.open()
            await queue.open()
            await received(queue)
            await received(queue)
            assert meddler.count("GetQueueUrl") == 1

    async def test_an_arn_names_the_owner(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        async with meddling(ministack) as meddler:
            arn = f"arn:aws:sqs:us-east-1:{ACCOUNT}:{theirs.name}"
            async with opened(f"sqs:{arn}", meddler.endpoint) as queue:
                with pytest.raises(ConfigError, match="there is no SQS queue"):
                    await queue.open()
            (asked,) = [asked for name, asked in meddler.calls if name == "GetQueueUrl"]
            assert asked == {"QueueName": theirs.name, "QueueOwnerAWSAccountId": ACCOUNT}

    async def test_one_that_is_not_there(self, ministack):
        async with opened("sqs://nobody-made-this", ministack.endpoint) as queue:
            with pytest.raises(ConfigError, match="no SQS queue nobody-made-this") as caught:
                await queue.open()
            assert "create it" in str(caught.value)
            with pytest.raises(AwsError):
                await received(queue)

    async def test_the_right_that_is_missing_is_named(self, ministack):
        async with meddling(ministack) as meddler:
            meddler.always("GetQueueUrl", failing("AccessDeniedException", 403))
            async with opened("sqs://orders", meddler.endpoint) as queue:
                with pytest.raises(ConfigError, match="denies sqs:GetQueueUrl"):
                    await queue.open()

    async def test_what_may_pass_is_no_mistake_of_the_configuration(self, ministack):
        async with meddling(ministack) as meddler:
            meddler.next("GetQueueUrl", failing("ServiceUnavailable", 503))
            async with opened("sqs://orders", meddler.endpoint) as queue:
                with pytest.raises(AwsError) as caught:
                    await queue.open()
                assert caught.value.retryable
        async with opened("sqs://orders", "http://127.0.0.1:9") as queue:
            with pytest.raises(NotSent):
                await queue.open()


class TestReceiving:
    async def test_an_empty_queue_gives_nothing(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        async with opened(theirs.address, ministack.endpoint) as queue:
            assert await received(queue) == []

    async def test_attributes_are_told_where_asked_for(self, ministack):
        theirs = TestQueue(ministack.endpoint, fifo=True)
        theirs.send("a", "b", group="g1")
        async with opened(theirs.address, ministack.endpoint) as queue:
            messages = await received(queue, system=("MessageGroupId", "SentTimestamp"))
            assert [message.body for message in messages] == ["a", "b"]
            assert {message.attributes["MessageGroupId"] for message in messages} == {"g1"}
            assert all(message.attributes["SentTimestamp"].isdigit() for message in messages)

    async def test_a_long_poll_outlasts_the_timeout(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        short = timedelta(milliseconds=800)
        async with opened(theirs.address, ministack.endpoint, timeout=short) as queue:
            await queue.open()
            assert await queue.receive(wait_s=1, visibility_s=30) == []

    async def test_other_calls_do_not_wait_behind_polls(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        address = QueueAddress.parse(theirs.address)
        queue = SqsQueue(address, AwsOptions(endpoint=ministack.endpoint), polls=50)
        await queue.open()
        polls = [asyncio.create_task(queue.receive(wait_s=20, visibility_s=30)) for _ in range(50)]
        try:
            await asyncio.sleep(0.1)
            async with asyncio.timeout(4):
                await asyncio.gather(*[queue.delete(["nothing"]) for _ in range(32)])
            assert not any(poll.done() for poll in polls)
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)
            await queue.aclose()

    async def test_an_answer_that_makes_no_sense_is_none(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            opened(theirs.address, meddler.endpoint) as queue,
        ):
            meddler.next("ReceiveMessage", saying(200, {"Messages": "many"}))
            with pytest.raises(Unclear):
                await received(queue)


class TestBatches:
    async def test_each_entry_has_its_own_answer(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        theirs.send("a", "b")
        async with opened(theirs.address, ministack.endpoint) as queue:
            one, two = await received(queue)
            answers = await queue.change_visibility([(one.receipt_handle, 100), ("no handle", 1)])
            assert answers[0] is None
            assert answers[1].code == "ReceiptHandleIsInvalid"
            assert not answers[1].is_transient
            answers = await queue.delete(["no handle", two.receipt_handle])
            assert answers[0] is not None
            assert answers[1] is None
            assert theirs.counts() == (0, 1)

    async def test_what_is_not_answered_for_has_failed_and_may_pass(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            opened(theirs.address, meddler.endpoint) as queue,
        ):
            meddler.next("DeleteMessageBatch", saying(200, {"Successful": [{"Id": "1"}]}))
            first, second = await queue.delete(["a", "b"])
            assert first.is_transient
            assert second is None

    async def test_failures_that_pass(self):
        assert Failure("0", "InternalError").is_transient
        assert Failure("0", "RequestThrottled", sender_fault=True).is_transient
        assert not Failure("0", "InvalidMessageContents", sender_fault=True).is_transient

    async def test_sending(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        async with opened(theirs.address, ministack.endpoint) as queue:
            attributes = {"colour": TextAttribute.of("blue")}
            answers = await queue.send([Outgoing("0", "ä\n\U0001f600", attributes)])
            assert answers == [None]
            (message,) = await received(queue, attributes=("All",))
            assert message.body == "ä\n\U0001f600"
            assert message.message_attributes["colour"].string_value == "blue"

    async def test_an_answer_that_does_not_come_is_unclear(self, ministack):
        theirs = TestQueue(ministack.endpoint)
        short = timedelta(milliseconds=300)
        async with (
            meddling(ministack) as meddler,
            opened(theirs.address, meddler.endpoint, timeout=short) as queue,
        ):
            await queue.open()
            meddler.next("SendMessageBatch", hang, swallow)
            for _ in range(2):
                with pytest.raises(Unclear):
                    await queue.send([Outgoing("0", "x")])
            assert theirs.counts() == (1, 0)


class TestSettings:
    async def test_what_is_set(self, ministack):
        theirs = TestQueue(ministack.endpoint, MessageRetentionPeriod=600, MaximumMessageSize=2048)
        async with opened(theirs.address, ministack.endpoint) as queue:
            settings = await queue.settings()
            assert settings.retention == timedelta(minutes=10)
            assert settings.max_receives is None
            assert settings.max_bytes == 2048
            theirs.redrive(TestQueue(ministack.endpoint), 7)
            assert (await queue.settings()).max_receives == 7

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [('{"maxReceiveCount":"12"}', 12), ("{}", None), ("no JSON", None), ("", None)],
    )
    async def test_redrive_policies_as_they_come(self, ministack, policy, expected):
        theirs = TestQueue(ministack.endpoint)
        async with (
            meddling(ministack) as meddler,
            opened(theirs.address, meddler.endpoint) as queue,
        ):
            answer = {"Attributes": {"RedrivePolicy": policy}}
            meddler.next("GetQueueAttributes", saying(200, answer))
            assert (await queue.settings()).max_receives == expected


class TestContent:
    @pytest.mark.parametrize("text", ["\t\n\r ~", "\x7f\x85", "퟿�", "\U0010ffff"])
    def test_what_a_message_can_hold(self, text):
        assert refused_character(text) == ""

    @pytest.mark.parametrize(
        ("text", "name"),
        [("a\0", "U+0000"), ("\x1f", "U+001F"), ("\ufffe", "U+FFFE"), ("\ud800", "U+D800")],
    )
    def test_what_it_cannot_hold_is_named(self, text, name):
        assert refused_character(text) == name

    def test_attributes_are_made_fit(self):
        assert TextAttribute.of("a\0b").string_value == "a�b"

    def test_a_size_counts_bytes_and_attributes(self):
        assert size_of("ä".encode(), {}) == 2
        assert size_of(b"x", {"name": TextAttribute.of("ä")}) == 1 + 4 + 6 + 2
        assert MOST_BYTES == 1024 * 1024
