import base64
import logging
from datetime import timedelta

import pytest
from tests.aws.aws_sinks import KEY, Town, boto, delivery, opened, raw, several
from tests.servers.aws import fresh
from tests.servers.meddler import failing, hang, meddling, saying, swallow, vanish
from tests.servers.process import free_port

from oncebridge import Closed, ConfigError, Never, No, Throttled, Unknown, Yes
from oncebridge.sinks.kinesis import KinesisSink, KinesisSinkOptions

pytestmark = pytest.mark.usefixtures("aws_identity")
MIB = 1 << 20


class Stream:
    def __init__(self, server, shards=2):
        self.server = server
        self.name = fresh("stream")
        self.client = boto("kinesis", server)
        self.client.create_stream(StreamName=self.name, ShardCount=shards)
        told = self.client.describe_stream_summary(StreamName=self.name)
        self.arn = told["StreamDescriptionSummary"]["StreamARN"]

    def records(self):
        """Give all records, by shard."""
        found = {}
        for shard in self.client.list_shards(StreamName=self.name)["Shards"]:
            asked = {"StreamName": self.name, "ShardId": shard["ShardId"]}
            told = self.client.get_shard_iterator(**asked, ShardIteratorType="TRIM_HORIZON")
            answer = self.client.get_records(ShardIterator=told["ShardIterator"])
            found[shard["ShardId"]] = answer["Records"]
        return found

    def data(self):
        return sorted(record["Data"] for shard in self.records().values() for record in shard)

    def sink(self, server=None, **options):
        endpoint = (server or self.server).endpoint
        return KinesisSink(
            f"kinesis://{self.name}", KinesisSinkOptions(endpoint=endpoint, **options)
        )


@pytest.fixture
def stream(ministack):
    return Stream(ministack)


def failing_records(code, at):
    """Let the other records of a call through, and fail those."""

    async def rule(asked, pass_on):
        passing = [r for number, r in enumerate(asked["Records"]) if not at(number, r)]
        told = []
        if passing:
            _, answer = await pass_on({**asked, "Records": passing})
            told = answer["Records"]
        error = {"ErrorCode": code, "ErrorMessage": "so it is"}
        left = iter(told)
        given = [error if at(n, r) else next(left) for n, r in enumerate(asked["Records"])]
        return 200, {"FailedRecordCount": given.count(error), "Records": given}

    return rule


# --- what arrives -------------------------------------------------------------------------------


async def test_events_arrive_as_they_were_received(stream):
    texts = [b' {"detail" : {"n": 1.50}}\n', raw(2, {"name": "Zo\u00eb"})]
    async with opened(stream.sink()) as sink:
        assert await sink.deliver(several(*texts)) == [Yes(), Yes()]
    assert stream.data() == sorted(texts)


@pytest.mark.parametrize("by_arn", [False, True])
async def test_a_stream_is_found_by_name_and_by_arn(stream, by_arn):
    url = f"kinesis:{stream.arn}" if by_arn else f"kinesis://{stream.name}?region=us-east-1"
    options = KinesisSinkOptions(endpoint=stream.server.endpoint)
    async with opened(KinesisSink.from_url(url, options)) as sink:
        assert await sink.deliver([delivery()]) == [Yes()]
    assert stream.data() == [raw()]


async def test_the_partition_key_is_the_entity_or_else_the_key(stream):
    deliveries = [
        delivery(raw(1), entity=b"\x01\xff"),
        delivery(raw(2)),
        delivery(raw(3), key=b""),
        delivery(raw(4), key=b""),
        delivery(raw(5), entity=b"x" * 500),
    ]
    async with opened(stream.sink()) as sink:
        assert await sink.deliver(deliveries) == [Yes()] * 5
    keys = {r["Data"]: r["PartitionKey"] for rs in stream.records().values() for r in rs}
    assert keys[raw(1)] == "01ff"
    assert keys[raw(2)] == KEY.hex()
    assert len({keys[raw(3)], keys[raw(4)], ""}) == 3, "not spread"
    assert keys[raw(5)] == "78" * 128


async def test_the_events_of_one_entity_are_in_one_shard_in_order(ministack):
    stream = Stream(ministack, shards=4)
    texts = [raw(n, {"call": f"c{n % 5}", "n": n}) for n in range(40)]
    async with Town(stream.sink(), key="id", entity="detail.call") as town:
        for at in range(0, 40, 5):
            outcomes = await town.process(*texts[at : at + 5])
            assert {str(outcome.verdict) for outcome in outcomes} == {"delivered"}
    homes = {}
    for shard, records in stream.records().items():
        for record in records:
            homes.setdefault(record["PartitionKey"], []).append((shard, record["Data"]))
    assert sorted([data for _, data in found] for found in homes.values()) == sorted(
        texts[call::5] for call in range(5)
    )
    assert all(len({shard for shard, _ in found}) == 1 for found in homes.values())


# --- how much -----------------------------------------------------------------------------------


async def test_hundreds_of_events_are_one_call(stream):
    texts = [raw(at) for at in range(620)]
    deliveries = [delivery(text, at.to_bytes(33)) for at, text in enumerate(texts)]
    async with meddling(stream.server) as between, opened(stream.sink(between)) as sink:
        assert sink.batch == 500
        assert await sink.deliver(deliveries) == [Yes()] * 620
        calls = [asked for operation, asked in between.calls if operation == "PutRecords"]
    assert sorted(len(asked["Records"]) for asked in calls) == [120, 500]
    assert stream.data() == sorted(texts)


async def test_what_is_too_large_for_one_call_goes_in_several(stream):
    async def take(asked, pass_on):
        sizes = [
            len(base64.b64decode(r["Data"])) + len(r["PartitionKey"]) for r in asked["Records"]
        ]
        assert sum(sizes) <= 2 * MIB
        return 200, {"Records": [{"SequenceNumber": "1", "ShardId": "s"} for _ in sizes]}

    texts = [raw(at, {"fill": "x" * 900_000}) for at in range(14)]
    async with meddling(stream.server) as between, opened(stream.sink(between)) as sink:
        between.always("PutRecords", take)
        assert await sink.deliver(several(*texts)) == [Yes()] * 14
        assert between.count("PutRecords") == 7


async def test_a_record_that_is_too_large_is_never_sent(stream):
    room = MIB - len(raw(1, {"fill": ""})) - 2 * len(KEY + b"\0")
    texts = [raw(1, {"fill": "x" * room}), raw(2, {"fill": "x" * (room + 1)}), raw(3)]
    async with opened(stream.sink()) as sink:
        fits, answer, last = await sink.deliver(several(*texts))
    assert (fits, last) == (Yes(), Yes())
    assert answer == Never(f"too large: {MIB + 1} bytes; at most {MIB} are accepted")
    assert stream.data() == sorted([texts[0], texts[2]])


async def test_a_stream_may_take_larger_records(stream):
    async def tell(asked, pass_on):
        status, told = await pass_on(asked)
        told["StreamDescriptionSummary"]["MaxRecordSizeInKiB"] = 2048
        return status, told

    taking = saying(200, {"Records": [{"SequenceNumber": "1", "ShardId": "s"}]})
    async with meddling(stream.server) as between:
        between.always("DescribeStreamSummary", tell)
        between.always("PutRecords", taking)
        async with opened(stream.sink(between)) as sink:
            large = delivery(raw(1, {"fill": "x" * 1_500_000}))
            assert await sink.deliver([large]) == [Yes()]


async def test_a_call_refused_for_one_record_goes_without_it(stream):
    """A limit that we do not know of: only AWS knows what it is."""
    bad = base64.b64encode(raw(3)).decode()

    async def refuse(asked, pass_on):
        if any(record["Data"] == bad for record in asked["Records"]):
            return await failing("InvalidArgumentException")(asked, pass_on)
        return await pass_on(asked)

    async with meddling(stream.server) as between, opened(stream.sink(between)) as sink:
        between.always("PutRecords", refuse)
        answers = await sink.deliver(several(*[raw(at) for at in range(10)]))
    expected = [Never("InvalidArgumentException") if at == 3 else Yes() for at in range(10)]
    assert answers == expected
    assert stream.data() == sorted(raw(at) for at in range(10) if at != 3)


# --- what is answered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [("ProvisionedThroughputExceededException", Throttled), ("InternalFailure", Unknown)],
)
async def test_only_the_records_that_failed_are_answered_so(stream, code, kind):
    async with meddling(stream.server) as between, opened(stream.sink(between)) as sink:
        between.next("PutRecords", failing_records(code, lambda number, _: number in (1, 3)))
        answers = await sink.deliver(several(*[raw(at) for at in range(5)]))
    assert [type(answer) for answer in answers] == [Yes, kind, Yes, kind, Yes]
    assert stream.data() == sorted(raw(at) for at in (0, 2, 4))


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (failing("ProvisionedThroughputExceededException"), Throttled),
        (failing("KMSThrottlingException"), Throttled),
        (failing("InternalFailureException", 500), Unknown),
        (failing("AccessDeniedException"), Closed),
        (failing("ResourceNotFoundException"), Closed),
        (failing("KMSDisabledException"), Closed),
        (swallow, Unknown),
        (vanish, Unknown),
        (hang, Unknown),
        (saying(200, {"Records": []}), Unknown),
        (saying(200, {"Records": [{"SequenceNumber": None}]}), Unknown),
        (saying(200, "what"), Unknown),
    ],
)
async def test_a_call_that_fails_fails_for_all_and_is_not_repeated(stream, rule, kind):
    timeout = timedelta(seconds=1)
    async with (
        meddling(stream.server) as between,
        opened(stream.sink(between, timeout=timeout)) as sink,
    ):
        between.always("PutRecords", rule)
        (answer,) = await sink.deliver([delivery()])
        assert between.count("PutRecords") == 1
    assert type(answer) is kind


async def test_nobody_there_is_a_no():
    options = KinesisSinkOptions(endpoint=f"http://127.0.0.1:{free_port()}")
    async with opened(KinesisSink("kinesis://stream", options)) as sink:
        (answer,) = await sink.deliver([delivery()])
    assert isinstance(answer, No)


async def test_a_failed_record_comes_again_and_its_neighbours_do_not(stream):
    texts = [raw(at) for at in range(6)]
    unlucky = {base64.b64encode(texts[at]).decode() for at in (2, 4)}

    def is_unlucky(_, record):
        return record["Data"] in unlucky

    async with meddling(stream.server) as between, Town(stream.sink(between)) as town:
        between.next(
            "PutRecords",
            failing_records("InternalFailure", is_unlucky),
            failing_records("ProvisionedThroughputExceededException", is_unlucky),
        )
        told = await town.until_acknowledged(*texts)
        assert await town.dead.list() == []
        assert between.count("PutRecords") in (3, 4), "once throttled, perhaps one by one"
    again = ["failed", "failed", "delivered"]
    assert told == [again if at in (2, 4) else ["delivered"] for at in range(6)]
    assert stream.data() == sorted(texts)


async def test_an_event_that_is_never_taken_ends_in_the_dead_letters(stream, caplog):
    caplog.set_level(logging.DEBUG)
    texts = [raw(1), raw(2, {"fill": "s3cret" * 200_000}), raw(3)]
    async with Town(stream.sink()) as town:
        told = await town.until_acknowledged(*texts)
        (letter,) = await town.dead.list()
    assert told == [["delivered"], ["dead"], ["delivered"]]
    assert letter.raw == texts[1]
    assert "too large" in letter.message
    assert stream.data() == sorted([texts[0], texts[2]])
    assert "s3cret" not in caplog.text


# --- whether there is a stream ------------------------------------------------------------------


async def test_a_stream_that_is_not_there_is_told_at_the_start(ministack):
    sink = KinesisSink("kinesis://nowhere", KinesisSinkOptions(endpoint=ministack.endpoint))
    with pytest.raises(ConfigError, match="there is no Kinesis stream nowhere; create it"):
        await sink.open()
    await sink.aclose()


@pytest.mark.parametrize(
    "rule",
    [
        failing("AccessDeniedException"),
        failing("LimitExceededException"),
        failing("InternalFailureException", 500),
        saying(200, []),
        vanish,
    ],
)
async def test_who_may_send_need_not_be_allowed_to_ask(stream, rule, caplog):
    caplog.set_level(logging.INFO, "oncebridge")
    async with meddling(stream.server) as between:
        between.always("DescribeStreamSummary", rule)
        async with opened(stream.sink(between)) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]
    (record,) = [r for r in caplog.records if r.message == "oncebridge.sink_not_checked"]
    assert record.levelno == logging.INFO


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "kinesis:",
        "kinesis://",
        "kinesis://a/b",
        "kinesis://a?x=1",
        f"kinesis://{'a' * 129}",
        "kinesis:arn:aws:kinesis:us-east-1:123456789012:stream/",
        "kinesis:arn:aws:kinesis:us-east-1:123456789012:stream/a/consumer/b:1",
        "kinesis:arn:aws:firehose:us-east-1:123456789012:stream/a",
        "events://a",
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="Kinesis stream"):
        KinesisSink.from_url(url)


def test_the_region_is_said_once():
    arn = "kinesis:arn:aws:kinesis:eu-west-1:123456789012:stream/a"
    with pytest.raises(ConfigError) as caught:
        KinesisSink(arn, KinesisSinkOptions(region="us-east-1"))
    assert caught.value.where == "region"
