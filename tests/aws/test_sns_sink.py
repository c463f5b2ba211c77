import asyncio
import json
import logging
from contextlib import asynccontextmanager
from datetime import timedelta
from html import escape
from urllib.parse import parse_qsl

import pytest
from tests.aws.aws_sinks import GENERATION, KEY, Town, boto, delivery, opened, raw, several
from tests.servers.aws import fresh
from tests.servers.process import free_port

from oncebridge import Closed, ConfigError, Never, No, Throttled, Unknown, Unwell, Yes
from oncebridge.http.server import Response, Server
from oncebridge.sinks.sns import SnsSink, SnsSinkOptions, _Message

pytestmark = pytest.mark.usefixtures("aws_identity")
INVENTED = "arn:aws:sns:us-east-1:123456789012:invented"
LIMIT = 256 << 10
PROXY_PAGE = (
    "<html><body>Log in first: <Successful><member><MessageId>m</MessageId><Id>0</Id></member>"
    "</Successful></body></html>"
)


class Topic:
    """A topic with a queue that is subscribed to it."""

    def __init__(self, server, *, fifo=False, as_is=True):
        self.server = server
        suffix = ".fifo" if fifo else ""
        more = {"FifoQueue": "true"} if fifo else {}
        topic, self.queue = boto("sns", server), boto("sqs", server)
        name = fresh("topic") + suffix
        attributes = {"FifoTopic": "true"} if fifo else {}
        self.arn = topic.create_topic(Name=name, Attributes=attributes)["TopicArn"]
        self.queue_url = self.queue.create_queue(QueueName=name, Attributes=more)["QueueUrl"]
        asked = {"QueueUrl": self.queue_url, "AttributeNames": ["QueueArn"]}
        queue_arn = self.queue.get_queue_attributes(**asked)["Attributes"]["QueueArn"]
        topic.subscribe(
            TopicArn=self.arn,
            Protocol="sqs",
            Endpoint=queue_arn,
            Attributes={"RawMessageDelivery": "true"} if as_is else {},
        )

    def messages(self):
        """Take what has arrived."""
        found = []
        asked = {
            "QueueUrl": self.queue_url,
            "MaxNumberOfMessages": 10,
            "MessageAttributeNames": ["All"],
            "AttributeNames": ["All"],
        }
        while told := self.queue.receive_message(**asked).get("Messages"):
            found += told
            for message in told:
                self.queue.delete_message(
                    QueueUrl=self.queue_url, ReceiptHandle=message["ReceiptHandle"]
                )
        return found

    def bodies(self):
        return sorted(message["Body"].encode() for message in self.messages())

    def sink(self, **options):
        return SnsSink(f"sns:{self.arn}", SnsSinkOptions(endpoint=self.server.endpoint, **options))


@pytest.fixture
def topic(ministack):
    return Topic(ministack)


# --- a server that says what it is told to ------------------------------------------------------


class Script:
    """Takes messages like SNS, but for what *refuses* (entry -> code, or None) says."""

    def __init__(self):
        self.calls = []
        self.taken = []
        self.attributes = "<Attributes/>"
        self.instead = {}
        """By operation: a status and a code (or None for silence) for the whole call."""
        self.refuses = lambda entry: None
        self.endpoint = ""
        self.under_way = self.most_under_way = 0

    def handle(self, request, answer):
        asked = dict(parse_qsl(request.body.decode(), strict_parsing=True))
        assert request.header(b"content-type").startswith(b"application/x-www-form-urlencoded")
        assert b"/sns/aws4_request" in request.header(b"authorization")
        assert asked["Version"] == "2010-03-31"
        operation = asked["Action"]
        self.calls.append(operation)
        if operation in self.instead:
            instead = self.instead[operation](asked)
            if instead is not None:
                status, text = instead
                answer(Response(status, text.encode(), "text/xml"))
            return
        made = self.describe() if operation == "GetTopicAttributes" else self.publish(asked)
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)

        def end():
            self.under_way -= 1
            answer(Response(200, made.encode(), "text/xml"))

        asyncio.get_running_loop().call_later(0.02, end)

    def describe(self):
        return (
            '<GetTopicAttributesResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/">'
            f"<GetTopicAttributesResult>{self.attributes}</GetTopicAttributesResult>"
            "</GetTopicAttributesResponse>"
        )

    def publish(self, asked):
        taken = refused = ""
        for at in range(1, 11):
            prefix = f"PublishBatchRequestEntries.member.{at}."
            entry = {k.removeprefix(prefix): v for k, v in asked.items() if k.startswith(prefix)}
            if not entry:
                break
            code = self.refuses(entry)
            if code is None:
                self.taken.append(entry["Message"].encode())
                taken += f"<member><MessageId>m{at}</MessageId><Id>{entry['Id']}</Id></member>"
            else:
                told = escape("Value <s3cret> & more is so")
                refused += (
                    f"<member><Message>{told}</Message><Id>{entry['Id']}</Id>"
                    f"<Code>{code}</Code><SenderFault>false</SenderFault></member>"
                )
        return (
            '<PublishBatchResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/">\n'
            f"<PublishBatchResult><Failed>{refused}</Failed>\n<Successful>{taken}</Successful>"
            "</PublishBatchResult></PublishBatchResponse>"
        )

    def sink(self, arn=INVENTED, **options):
        return SnsSink(f"sns:{arn}", SnsSinkOptions(endpoint=self.endpoint, **options))


def error(status, code):
    text = (
        '<ErrorResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><Error><Type>Sender</Type>'
        f"<Code>{code}</Code><Message>so it is</Message></Error></ErrorResponse>"
    )
    return lambda asked: (status, text)


@asynccontextmanager
async def scripted():
    script = Script()
    server = Server(script.handle, host="127.0.0.1", port=0)
    await server.open()
    script.endpoint = f"http://127.0.0.1:{server.port}"
    try:
        yield script
    finally:
        await server.aclose(timedelta(seconds=0))


# --- what arrives -------------------------------------------------------------------------------


async def test_events_arrive_as_they_were_received(topic):
    texts = [b' {"detail" : {"n": 1.50, "s": "a&b=c+d%20;\xe2\x82\xac <x>"}}\n', raw(2)]
    async with opened(topic.sink()) as sink:
        assert await sink.deliver(several(*texts)) == [Yes(), Yes()]
    assert topic.bodies() == sorted(texts)


async def test_the_key_and_the_route_go_along(topic):
    deliveries = [
        delivery(raw(1)),
        delivery(raw(2), route="", unprotected=True),
        delivery(raw(3), key=b""),
    ]
    async with opened(topic.sink()) as sink:
        assert await sink.deliver(deliveries) == [Yes()] * 3
    told = {
        json.loads(message["Body"])["detail"]["n"]: {
            name: value["StringValue"]
            for name, value in message.get("MessageAttributes", {}).items()
        }
        for message in topic.messages()
    }
    assert told == {
        1: {"Idempotency-Key": KEY.hex(), "oncebridge-route": "main"},
        2: {"Idempotency-Key": KEY.hex(), "oncebridge-unprotected": "true"},
        3: {"oncebridge-route": "main"},
    }


async def test_subscribers_without_raw_delivery_get_it_wrapped(ministack):
    topic = Topic(ministack, as_is=False)
    async with opened(topic.sink()) as sink:
        assert await sink.deliver([delivery()]) == [Yes()]
    (message,) = topic.messages()
    assert json.loads(message["Body"])["Message"].encode() == raw()


# --- FIFO topics --------------------------------------------------------------------------------


async def test_a_fifo_topic_gets_the_key_with_its_generation(ministack):
    topic = Topic(ministack, fifo=True)
    again = delivery(raw(1), generation=b"\1" * 16)  # the same key, after its window
    repeat = delivery(raw(1))
    async with opened(topic.sink()) as sink:
        assert await sink.deliver([delivery(raw(1))]) == [Yes()]
        assert await sink.deliver([repeat]) == [Yes()]
        assert await sink.deliver([again]) == [Yes()]
    ids = [message["Attributes"]["MessageDeduplicationId"] for message in topic.messages()]
    assert ids == [KEY.hex() + GENERATION.hex(), KEY.hex() + "01" * 16]


async def test_what_nobody_claimed_is_not_swallowed(ministack):
    topic = Topic(ministack, fifo=True)
    without_key = delivery(raw(1), key=b"", generation=b"")
    in_shadow = delivery(raw(2), generation=b"")
    async with opened(topic.sink()) as sink:
        for _ in range(2):
            assert await sink.deliver([without_key, in_shadow]) == [Yes(), Yes()]
    assert topic.bodies() == [raw(1), raw(1), raw(2), raw(2)]


async def test_a_repeat_while_the_store_is_down_is_swallowed(ministack):
    topic = Topic(ministack, fifo=True)
    unprotected = delivery(raw(1), generation=b"", unprotected=True)
    async with opened(topic.sink()) as sink:
        for _ in range(2):
            assert await sink.deliver([unprotected]) == [Yes()]
    assert topic.bodies() == [raw(1)]


@pytest.mark.parametrize(
    ("entity", "group", "key", "sent"),
    [
        (b"\x01\xff", "calls", KEY, "01ff"),
        (b"", "calls", KEY, "calls"),
        (b"", None, KEY, KEY.hex()),
        (b"x" * 65, None, KEY, "sha256"),
    ],
)
async def test_the_group_is_the_entity_or_what_is_set_or_the_key(
    ministack, entity, group, key, sent
):
    topic = Topic(ministack, fifo=True)
    async with opened(topic.sink(group=group)) as sink:
        assert await sink.deliver([delivery(raw(1), key, entity=entity)]) == [Yes()]
    (message,) = topic.messages()
    found = message["Attributes"]["MessageGroupId"]
    assert found == sent or (sent == "sha256" and len(found) == 64)


async def test_a_fifo_topic_keeps_the_order_of_an_entity(ministack):
    topic = Topic(ministack, fifo=True)
    texts = [raw(n, {"call": "c", "n": n}) for n in range(8)]
    async with Town(topic.sink(), key="id", entity="detail.call") as town:
        for text in texts:
            assert await town.until_acknowledged(text) == [["delivered"]]
        assert await town.until_acknowledged(texts[3]) == [["duplicate"]]
    messages = topic.messages()
    assert [message["Body"].encode() for message in messages] == texts
    assert len({message["Attributes"]["MessageGroupId"] for message in messages}) == 1


async def test_the_calls_for_a_fifo_topic_go_one_after_the_other():
    texts = [raw(at, {"n": at, "fill": "x" * 100_000}) for at in range(6)]
    async with scripted() as script, opened(script.sink(f"{INVENTED}.fifo")) as sink:
        assert await sink.deliver(several(*texts)) == [Yes()] * 6
        assert script.calls.count("PublishBatch") == 3
        assert script.most_under_way == 1
        assert script.taken == texts


# --- how much -----------------------------------------------------------------------------------


def test_a_message_is_counted_with_its_attributes():
    message = _Message("é".encode(), [("Name", "ü"), ("b", "c")])
    assert message.size == 2 + (4 + 6 + 2) + (1 + 6 + 1)


async def test_what_is_too_large_is_never_sent(topic):
    room = LIMIT - delivery_size(raw(1, {"fill": ""}))
    texts = [raw(1, {"fill": "x" * room}), raw(2, {"fill": "x" * (room + 1)}), raw(3)]
    async with opened(topic.sink()) as sink:
        fits, answer, last = await sink.deliver(several(*texts))
    assert (fits, last) == (Yes(), Yes())
    assert answer == Never(f"too large: {LIMIT + 1} bytes; at most {LIMIT} are accepted")
    assert topic.bodies() == sorted([texts[0], texts[2]])


def delivery_size(text):
    attributes = len("Idempotency-Key" + "String") + 2 * len(KEY + b"\0")
    return len(text) + attributes + len("oncebridge-route" + "String" + "main")


async def test_a_topic_may_take_larger_messages():
    async with scripted() as script:
        script.attributes = (
            "<Attributes><entry><key>Owner</key><value>123456789012</value></entry>\n"
            "<entry>\n<key>MaximumMessageSize</key>\n<value>1048576</value></entry></Attributes>"
        )
        async with opened(script.sink()) as sink:
            assert await sink.deliver([delivery(raw(1, {"fill": "x" * 900_000}))]) == [Yes()]


# --- what is answered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InternalError", Unknown),
        ("Throttled", Throttled),
        ("KMSThrottling", Throttled),
        ("InvalidParameter", Never),
        ("AuthorizationError", Closed),
        ("KMSDisabled", Closed),
        ("", Unknown),
    ],
)
async def test_only_the_entries_that_failed_are_answered_so(code, kind):
    texts = [raw(at) for at in range(5)]
    async with scripted() as script, opened(script.sink()) as sink:
        script.refuses = lambda entry: code if entry["Id"] in "13" else None
        answers = await sink.deliver(several(*texts))
        assert script.taken == [texts[0], texts[2], texts[4]]
    assert [type(answer) for answer in answers] == [Yes, kind, Yes, kind, Yes]
    if kind in (Never, Unknown):
        assert answers[1].reason == code
    else:
        assert answers[1].reason == f"{code}: Value <s3cret> & more is so"


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (error(400, "Throttling"), Throttled),
        (error(500, "InternalError"), Unknown),
        (error(503, "ServiceUnavailable"), Unwell),
        (error(403, "AuthorizationError"), Closed),
        (error(404, "NotFound"), Closed),
        (error(400, "KMSDisabled"), Closed),
        (error(403, "ExpiredToken"), Closed),
        (lambda asked: (200, "<PublishBatchResponse/>"), Unknown),
        (lambda asked: (200, "what"), Unknown),
        (lambda asked: (200, PROXY_PAGE), Unknown),
        (lambda asked: None, Unknown),
    ],
)
async def test_a_call_that_fails_fails_for_all_and_is_not_repeated(rule, kind):
    async with scripted() as script, opened(script.sink(timeout=timedelta(seconds=1))) as sink:
        script.instead["PublishBatch"] = rule
        (answer,) = await sink.deliver([delivery()])
        assert script.calls == ["GetTopicAttributes", "PublishBatch"]
    assert type(answer) is kind


@pytest.mark.parametrize(
    ("member", "answer"),
    [
        ("<MessageId>m</MessageId><Id><![CDATA[0]]></Id>", Yes()),
        ("<MessageId>m</MessageId><Id>\n 0 \n</Id>", Yes()),
        ("<MessageId>m</MessageId><Id>&#48;</Id>", Yes()),
        ("<MessageId>m</MessageId><Id>1</Id>", Unknown("SNS returned no result for the message")),
        ("<MessageId/><Id>0</Id>", Unknown("SNS returned no result for the message")),
    ],
)
async def test_an_answer_is_understood_in_every_way_xml_can_write_it(member, answer):
    """A yes that is not understood is delivered again."""
    told = (
        '<a:PublishBatchResponse xmlns:a="http://sns.amazonaws.com/doc/2010-03-31/">'
        f"<PublishBatchResult><Successful><member>{member}</member></Successful>"
        "<Failed/></PublishBatchResult></a:PublishBatchResponse>"
    )
    async with scripted() as script, opened(script.sink()) as sink:
        script.instead["PublishBatch"] = lambda asked: (200, told)
        assert await sink.deliver([delivery()]) == [answer]


async def test_a_call_refused_for_one_entry_goes_without_it():
    texts = [raw(at) for at in range(10)]
    refused = error(400, "InvalidParameter")
    async with scripted() as script, opened(script.sink()) as sink:

        def refuse(asked):
            if texts[3].decode() in asked.values():
                return refused(asked)
            return 200, script.publish(asked)

        script.instead["PublishBatch"] = refuse
        answers = await sink.deliver(several(*texts))
        assert sorted(script.taken) == sorted([*texts[:3], *texts[4:]])
    assert answers == [Never("InvalidParameter") if at == 3 else Yes() for at in range(10)]


async def test_nobody_there_is_a_no():
    options = SnsSinkOptions(endpoint=f"http://127.0.0.1:{free_port()}")
    async with opened(SnsSink(f"sns:{INVENTED}", options)) as sink:
        (answer,) = await sink.deliver([delivery()])
    assert isinstance(answer, No)


async def test_a_failed_entry_comes_again_and_its_neighbours_do_not():
    texts = [raw(at) for at in range(6)]
    codes = {texts[2]: ["InternalError", "Throttled"], texts[4]: ["Throttled", "InternalError"]}

    def refuse(entry):
        left = codes.get(entry["Message"].encode())
        return left.pop() if left else None

    async with scripted() as script, Town(script.sink()) as town:
        script.refuses = refuse
        told = await town.until_acknowledged(*texts)
        assert await town.dead.list() == []
        assert sorted(script.taken) == texts
    again = ["failed", "failed", "delivered"]
    assert told == [again if at in (2, 4) else ["delivered"] for at in range(6)]


async def test_an_event_that_is_never_taken_ends_in_the_dead_letters(caplog):
    caplog.set_level(logging.DEBUG)
    texts = [raw(1), raw(2, {"n": 2, "name": "s3cret"}), raw(3)]
    async with scripted() as script, Town(script.sink()) as town:
        script.refuses = lambda entry: "InvalidParameter" if "s3cret" in entry["Message"] else None
        told = await town.until_acknowledged(*texts)
        (letter,) = await town.dead.list()
        assert script.taken == [texts[0], texts[2]]
    assert told == [["delivered"], ["dead"], ["delivered"]]
    assert (letter.raw, letter.message) == (texts[1], "InvalidParameter")
    assert "s3cret" not in caplog.text


# --- whether there is a topic -------------------------------------------------------------------


async def test_a_topic_that_is_not_there_is_told_at_the_start(ministack):
    arn = "arn:aws:sns:us-east-1:000000000000:nowhere"
    sink = SnsSink(f"sns:{arn}", SnsSinkOptions(endpoint=ministack.endpoint))
    with pytest.raises(ConfigError, match=f"there is no SNS topic {arn}; create it"):
        await sink.open()
    await sink.aclose()


@pytest.mark.parametrize("code", ["InvalidParameter", "InvalidClientTokenId"])
async def test_what_a_human_must_put_right_is_told_at_the_start(code):
    async with scripted() as script:
        script.instead["GetTopicAttributes"] = error(400, code)
        sink = script.sink()
        with pytest.raises(ConfigError, match=f"cannot be used: {code}: so it is"):
            await sink.open()
        await sink.aclose()


@pytest.mark.parametrize("rule", [error(403, "AuthorizationError"), error(500, "InternalError")])
async def test_who_may_send_need_not_be_allowed_to_ask(rule, caplog):
    caplog.set_level(logging.INFO, "oncebridge")
    async with scripted() as script:
        script.instead["GetTopicAttributes"] = rule
        async with opened(script.sink()) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]
    (record,) = [r for r in caplog.records if r.message == "oncebridge.sink_not_checked"]
    assert record.levelno == logging.INFO


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "sns:",
        "sns://topic",
        "sns:topic",
        "sns:arn:aws:sqs:us-east-1:123456789012:a",
        "sns:arn:aws:sns:us-east-1:123456789012:a:0b1c2d3e-0000-4000-8000-000000000000",
        "sns:arn:aws:sns:us-east-1:123456789012:",
        "sns:arn:aws:sns::123456789012:a",
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="SNS topic"):
        SnsSink.from_url(url)


@pytest.mark.parametrize(
    ("arn", "options", "where"),
    [
        (INVENTED, {"region": "eu-west-1"}, "region"),
        (INVENTED, {"group": "calls"}, "group"),
        (f"{INVENTED}.fifo", {"group": ""}, "group"),
        (f"{INVENTED}.fifo", {"group": "two words"}, "group"),
        (f"{INVENTED}.fifo", {"group": "x" * 129}, "group"),
    ],
)
def test_settings_that_cannot_work_are_refused(arn, options, where):
    with pytest.raises(ConfigError) as caught:
        SnsSink(f"sns:{arn}", SnsSinkOptions(**options))
    assert caught.value.where == where
