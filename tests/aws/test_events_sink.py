import asyncio
import json
import logging
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.aws.aws_sinks import KEY, Town, boto, delivery, opened, raw, several
from tests.servers.aws import fresh
from tests.servers.meddler import failing, hang, meddling, saying, swallow, vanish
from tests.servers.process import free_port

from oncebridge import (
    Closed,
    ConfigError,
    Never,
    No,
    Throttled,
    Unknown,
    Unwell,
    Verdict,
    Yes,
    parse,
)
from oncebridge.sinks import events
from oncebridge.sinks.events import EventsSink, EventsSinkOptions, detail_with_origin

pytestmark = pytest.mark.usefixtures("aws_identity")
GENESYS = "aws.partner/genesys.com/cloud/invented/bus"
ACCOUNT = "000000000000"
EVERYTHING = {"source": [{"prefix": ""}]}


class Bus:
    """A bus with a rule that shows in a queue what was put on it."""

    def __init__(self, server, pattern=EVERYTHING):
        self.server = server
        self.name = fresh("bus")
        self.events = boto("events", server)
        self.queue = boto("sqs", server)
        self.arn = self.events.create_event_bus(Name=self.name)["EventBusArn"]
        self.queue_url = self.queue.create_queue(QueueName=self.name)["QueueUrl"]
        wanted = {"QueueUrl": self.queue_url, "AttributeNames": ["QueueArn"]}
        self.queue_arn = self.queue.get_queue_attributes(**wanted)["Attributes"]["QueueArn"]
        self.show(pattern)

    def show(self, pattern):
        self.events.put_rule(Name="shown", EventBusName=self.name, EventPattern=json.dumps(pattern))
        self.events.put_targets(
            Rule="shown",
            EventBusName=self.name,
            Targets=[{"Id": "queue", "Arn": self.queue_arn}],
        )

    def bodies(self):
        """Take what has arrived, as text."""
        found = []
        wanted = {"QueueUrl": self.queue_url, "MaxNumberOfMessages": 10}
        while told := self.queue.receive_message(**wanted).get("Messages"):
            found += [message["Body"] for message in told]
            for message in told:
                self.queue.delete_message(
                    QueueUrl=self.queue_url, ReceiptHandle=message["ReceiptHandle"]
                )
        return found

    def shown(self):
        return [json.loads(body) for body in self.bodies()]

    def sink(self, server=None, **options):
        endpoint = (server or self.server).endpoint
        return EventsSink(f"events://{self.name}", EventsSinkOptions(endpoint=endpoint, **options))


@pytest.fixture
def bus(ministack):
    return Bus(ministack)


async def passed(bus, *deliveries, **options):
    """Put events on a bus, and give what came out at the other end."""
    async with opened(bus.sink(**options)) as sink:
        assert await sink.deliver(deliveries) == [Yes()] * len(deliveries)
    return bus.shown()


async def entries(bus, *deliveries, **options):
    """Put events on a bus, and give the entries as they were sent."""
    async with meddling(bus.server) as between, opened(bus.sink(between, **options)) as sink:
        await sink.deliver(deliveries)
        return [
            entry
            for operation, asked in between.calls
            if operation == "PutEvents"
            for entry in asked["Entries"]
        ]


def failing_entries(code, at, message="so it is"):
    """Let the other entries of a call through, and fail those."""

    async def rule(asked, pass_on):
        passing = [e for number, e in enumerate(asked["Entries"]) if not at(number, e)]
        told = []
        if passing:
            _, answer = await pass_on({"Entries": passing})
            told = answer["Entries"]
        error = {"ErrorCode": code, "ErrorMessage": message}
        left = iter(told)
        given_ = [error if at(n, e) else next(left) for n, e in enumerate(asked["Entries"])]
        return 200, {"FailedEntryCount": given_.count(error), "Entries": given_}

    return rule


# --- what arrives -------------------------------------------------------------------------------


async def test_an_event_arrives_with_what_it_was(bus):
    text = raw(7, {"n": 7, "o": {"deep": [1, None]}}, resources=["arn:aws:s3:::box"])
    (event,) = await passed(bus, delivery(text))
    assert event["source"] == "shop"
    assert event["detail-type"] == "Order"
    assert event["resources"] == ["arn:aws:s3:::box"]
    passage = event["detail"].pop("oncebridge")
    assert event["detail"] == {"n": 7, "o": {"deep": [1, None]}}
    assert passage == {
        "id": "6f1c2c1e-0000-4000-8000-000000000007",
        "source": "shop",
        "time": "2025-12-12T15:15:07Z",
        "account": "123456789012",
        "region": "us-east-1",
        "key": KEY.hex(),
        "via": [f"{bus.arn}#main"],
    }


async def test_a_source_that_aws_refuses_is_rewritten(bus):
    answered = bus.events.put_events(
        Entries=[{"Source": GENESYS, "DetailType": "t", "Detail": "{}", "EventBusName": bus.name}]
    )
    assert answered["FailedEntryCount"] == 1, "the emulator takes what AWS does not"
    (event,) = await passed(bus, delivery(raw(source=GENESYS)))
    assert event["source"] == "oncebridge"
    assert event["detail"]["oncebridge"]["source"] == GENESYS


@pytest.mark.parametrize(
    ("source", "option", "sent"),
    [
        ("shop", None, "shop"),
        ("aws.partner/x", None, "oncebridge"),
        ("AWS.x", None, "oncebridge"),
        ("awsome.shop", None, "awsome.shop"),
        (None, None, "oncebridge"),
        ("shop", "crm", "crm"),
        ("aws.x", "crm", "crm"),
        (None, "crm", "crm"),
    ],
)
async def test_other_sources_are_kept_unless_one_is_set(bus, source, option, sent):
    (entry,) = await entries(bus, delivery(raw(source=source)), source=option)
    assert entry["Source"] == sent


@pytest.mark.parametrize(
    ("time", "sent"),
    [
        ("2025-12-12T15:15:07Z", 1765552507),
        ("2025-12-12T15:15:07.999Z", 1765552507),
        ("2025-12-12T16:15:07+01:00", 1765552507),
        ("2025-12-12", None),
        ("2025-13-12T15:15:07Z", None),
        ("1903-01-01T00:00:00Z", None),
        ("yesterday", None),
        (None, None),
    ],
)
async def test_the_time_stays_where_it_is_one(bus, time, sent):
    (entry,) = await entries(bus, delivery(raw(time=time)))
    assert entry.get("Time") == sent
    assert json.loads(entry["Detail"])["oncebridge"].get("time") == time


async def test_a_bare_event_gets_what_it_lacks(bus):
    (event,) = await passed(bus, delivery(b' {"n": 1}\n', bare=True))
    assert (event["source"], event["detail-type"]) == ("oncebridge", "event")
    assert event["detail"] == {
        "oncebridge": {"key": KEY.hex(), "via": [f"{bus.arn}#main"]},
        "n": 1,
    }


async def test_a_detail_type_can_be_given_to_those_without(bus):
    texts = [raw(1, detail_type=None), raw(2)]
    sent = await entries(bus, *several(*texts), detail_type="Call")
    assert [entry["DetailType"] for entry in sent] == ["Call", "Order"]


async def test_a_replay_and_an_unprotected_event_say_so(bus):
    text = raw(replay_name="again")
    (entry,) = await entries(bus, delivery(text, key=b"", unprotected=True))
    passage = json.loads(entry["Detail"])["oncebridge"]
    assert passage["replay-name"] == "again"
    assert passage["unprotected"] is True
    assert "key" not in passage


async def test_a_bus_is_found_by_its_arn(bus):
    url = f"events:{bus.arn}"
    async with meddling(bus.server) as between:
        # The emulator knows no ARN here; AWS does.
        between.always("DescribeEventBus", saying(200, {"Name": bus.name, "Arn": bus.arn}))
        options = EventsSinkOptions(endpoint=between.endpoint)
        async with opened(EventsSink.from_url(url, options)) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]
        assert between.calls[0] == ("DescribeEventBus", {"Name": bus.arn})
    (event,) = bus.shown()
    assert event["detail"]["oncebridge"]["via"] == [f"{bus.arn}#main"]


async def test_the_default_bus_is_one_like_any_other(ministack):
    options = EventsSinkOptions(endpoint=ministack.endpoint)
    async with opened(EventsSink("events://default", options)) as sink:
        assert await sink.deliver([delivery()]) == [Yes()]


# --- the detail ---------------------------------------------------------------------------------


def inserted(text, **others):
    return detail_with_origin(delivery(text, **others), "hop")


@pytest.mark.parametrize(
    ("detail", "rest"),
    [
        ('{ "a" : 1.50 ,\n "b":[ 1e2 ] }', ', "a" : 1.50 ,\n "b":[ 1e2 ] }'),
        ('{"n":12345678901234567890123}', ',"n":12345678901234567890123}'),
        ('{"a":"\\u00e9\\/\\"}{"}', ',"a":"\\u00e9\\/\\"}{"}'),
        ("{ }", "}"),
        ("{}", "}"),
    ],
)
def test_the_bytes_of_the_detail_stay(detail, rest):
    start = '{"oncebridge":{"key":"' + KEY.hex() + '","via":["hop"]}'
    assert inserted(f'{{"x": [2] , "detail" : {detail} }}'.encode()).decode() == start + rest


def test_a_detail_in_a_string_becomes_an_object():
    text = json.dumps({"source": "shop", "detail": ' {"n": 1.50, "s": "\\"}"} '}).encode()
    made = inserted(text)
    assert made.endswith(b',"n": 1.50, "s": "\\"}"}')
    assert json.loads(made)["oncebridge"]["source"] == "shop"


def test_a_name_may_be_spelt_with_escapes():
    assert inserted(rb'{"det\u0061il":{"n":1}}').endswith(b',"n":1}')
    made = inserted(rb'{"detail":{"n":1,"once\u0062ridge":"theirs"}}')
    assert list(json.loads(made, object_pairs_hook=names_once)) == ["n", "oncebridge"]


@pytest.mark.parametrize("theirs", ["7", '"x"', "null", "[]", '{"via":"me"}', '{"via":[]}'])
def test_a_member_that_is_not_ours_moves_into_ours(theirs):
    made = inserted(f'{{"detail":{{"a":1.50,"oncebridge": {theirs} ,"b":2}}}}'.encode())
    assert b'"a":1.50,"oncebridge":{' in made
    detail = json.loads(made, object_pairs_hook=names_once)
    assert detail["oncebridge"]["was"] == json.loads(theirs)
    assert detail["oncebridge"]["via"] == ["hop"]


def test_after_several_hops_the_first_event_is_still_known():
    first = json.loads(detail_with_origin(delivery(raw(1, source=GENESYS)), "one"))
    second_text = raw(2, first, source="oncebridge", account="999999999999")
    made = detail_with_origin(delivery(second_text, b"\7" * 33, unprotected=True), "two")
    passage = json.loads(made, object_pairs_hook=names_once)["oncebridge"]
    assert passage == {
        **first["oncebridge"],
        "key": "07" * 33,
        "unprotected": True,
        "via": ["one", "two"],
    }
    assert (passage["id"][-1], passage["source"], passage["account"]) == (
        "1",
        GENESYS,
        "123456789012",
    )


def test_what_a_later_version_wrote_is_carried_along():
    text = b'{"detail":{"oncebridge":{"via":["one"],"new":{"x": 1.50}}}}'
    made = inserted(text)
    assert b'"new":{"x": 1.50}' in made
    assert json.loads(made)["oncebridge"]["via"] == ["one", "hop"]


def names_once(pairs):
    assert len({name for name, _ in pairs}) == len(pairs), "a name stands there twice"
    return dict(pairs)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\{}[],: oncebridge')),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(["oncebridge", "via"]), inner)
    ),
    max_leaves=12,
)
details = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["oncebridge", "detail"]),
    values,
    max_size=5,
)


@given(
    detail=details,
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    form=st.sampled_from(["whole", "string", "bare"]),
)
@example(detail={}, indent=None, ascii_only=True, form="bare")
@example(detail={"oncebridge": {"via": ["x"]}}, indent=2, ascii_only=False, form="string")
def test_the_detail_is_what_it_was_and_our_member(detail, indent, ascii_only, form):
    if form == "bare":
        detail.pop("detail", None)
    text = json.dumps(detail, indent=indent, ensure_ascii=ascii_only)
    written = {"whole": f'{{"detail" : {text}}}', "string": json.dumps({"detail": text})}
    one = delivery(written.get(form, text).encode(), bare=form == "bare")
    found = json.loads(detail_with_origin(one, "hop"), object_pairs_hook=names_once)
    passage = found.pop("oncebridge")
    assert passage["via"][-1] == "hop"
    if "oncebridge" in detail:
        theirs = detail.pop("oncebridge")
        if "was" in passage:
            assert passage["was"] == theirs
        else:
            assert passage["via"][:-1] == theirs["via"]
    assert found == detail


# --- loops --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "cure"),
    [
        (GENESYS, {}, {"source": [{"anything-but": "oncebridge"}]}),
        ("shop", {"source": "crm"}, {"source": [{"anything-but": "crm"}]}),
        ("shop", {}, {"detail": {"oncebridge": {"via": [{"exists": False}]}}}),
    ],
)
async def test_an_event_that_a_rule_brings_back_goes_no_further(bus, source, options, cure):
    """Bus, rule, queue, gateway, and the same bus again."""
    async with Town(bus.sink(**options), key="content") as town:
        assert await town.until_acknowledged(raw(1, source=source)) == [["delivered"]]
        (back,) = bus.bodies()
        (outcome,) = await town.process(back.encode())
        assert outcome.verdict is Verdict.DEAD
        assert bus.bodies() == []
        (letter,) = await town.dead.list()
        assert letter.raw == back.encode()
        assert "a loop" in letter.message
        advised = json.loads(letter.message.partition("back: ")[2])
        assert advised == cure
        # With the pattern as advised, what we put there is not brought back any more.
        bus.show({**EVERYTHING, **cure})
        assert await town.until_acknowledged(raw(2, source=source)) == [["delivered"]]
        assert bus.bodies() == []
        if source == "shop":  # and what others put there is
            entry = {"Source": source, "DetailType": "t", "Detail": "{}", "EventBusName": bus.name}
            assert bus.events.put_events(Entries=[entry])["FailedEntryCount"] == 0
            assert len(bus.bodies()) == 1


async def test_another_route_or_bus_is_no_loop(ministack, bus):
    other = Bus(ministack)
    async with opened(bus.sink()) as sink, opened(other.sink()) as beyond:
        assert await sink.deliver([delivery(route="one")]) == [Yes()]
        (back,) = bus.bodies()
        assert await sink.deliver([delivery(back.encode(), route="two")]) == [Yes()]
        assert await beyond.deliver([delivery(back.encode(), route="one")]) == [Yes()]
    (event,) = other.shown()
    assert event["detail"]["oncebridge"]["via"] == [f"{bus.arn}#one", f"{other.arn}#one"]


async def test_a_loop_is_seen_also_by_who_may_not_ask_for_the_bus(bus):
    async with meddling(bus.server) as between:
        between.always("DescribeEventBus", failing("AccessDeniedException"))
        async with opened(bus.sink(between)) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]
            (back,) = bus.bodies()
            (answer,) = await sink.deliver([delivery(back.encode())])
    assert isinstance(answer, Never)
    hop = f"events://{bus.name}?region=us-east-1#main"
    assert json.loads(back)["detail"]["oncebridge"]["via"] == [hop]


# --- how much -----------------------------------------------------------------------------------


async def test_what_is_too_large_for_one_call_goes_in_several(bus):
    large = [raw(at, {"n": at, "fill": "x" * 400_000}) for at in range(5)]
    async with meddling(bus.server) as between, opened(bus.sink(between)) as sink:
        assert await sink.deliver(several(*large)) == [Yes()] * 5
        calls = [asked for operation, asked in between.calls if operation == "PutEvents"]
    assert sorted(len(asked["Entries"]) for asked in calls) == [1, 2, 2]


async def test_what_is_too_large_alone_is_never_sent(bus):
    texts = [raw(1), raw(2, {"fill": "é" * 530_000}), raw(3)]
    async with opened(bus.sink()) as sink:
        first, answer, last = await sink.deliver(several(*texts))
    assert (first, last) == (Yes(), Yes())
    assert isinstance(answer, Never)
    assert "too large" in answer.reason
    assert sorted(event["detail"]["n"] for event in bus.shown()) == [1, 3]


def test_an_entry_is_counted_as_aws_does():
    put = events._Put("é", "type", '{"n":1}', "bus", 1, ["arn", "ü"])
    assert put.size == 14 + 2 + 4 + 7 + 3 + 2
    assert events._Put("é", "type", '{"n":1}', "bus").size == 2 + 4 + 7


async def test_a_detail_type_that_aws_would_drop_in_silence_is_never_sent(bus):
    texts = [raw(1, detail_type="x" * 128), raw(2, detail_type="x" * 129)]
    async with opened(bus.sink()) as sink:
        answers = await sink.deliver(several(*texts))
    assert answers == [Yes(), Never("the detail-type is longer than 128 characters")]


# --- what is answered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InternalFailure", Unknown),
        ("ThrottlingException", Throttled),
        ("MalformedDetail", Never),
        ("InvalidArgument", Never),
        ("AccessDeniedException", Closed),
        ("NotAuthorizedForSourceException", Closed),
        ("NotAuthorizedForDetailTypeException", Closed),
    ],
)
async def test_only_the_entries_that_failed_are_answered_so(bus, code, kind):
    async with meddling(bus.server) as between, opened(bus.sink(between)) as sink:
        between.next("PutEvents", failing_entries(code, lambda number, _: number in (1, 3)))
        answers = await sink.deliver(several(*[raw(at) for at in range(5)]))
    assert [type(answer) for answer in answers] == [Yes, kind, Yes, kind, Yes]
    assert sorted(event["detail"]["n"] for event in bus.shown()) == [0, 2, 4]


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (failing("ThrottlingException"), Throttled),
        (failing("InternalException", 500), Unknown),
        (failing("ServiceUnavailable", 503), Unwell),
        (failing("AccessDeniedException"), Closed),
        (failing("ExpiredTokenException"), Closed),
        (swallow, Unknown),
        (vanish, Unknown),
        (hang, Unknown),
        (saying(200, {"Entries": []}), Unknown),
        (saying(200, {"Entries": [{}]}), Unknown),
        (saying(200, []), Unknown),
    ],
)
async def test_a_call_that_fails_fails_for_all_and_is_not_repeated(bus, rule, kind):
    timeout = timedelta(seconds=1)
    async with (
        meddling(bus.server) as between,
        opened(bus.sink(between, timeout=timeout)) as sink,
    ):
        between.always("PutEvents", rule)
        (answer,) = await sink.deliver([delivery()])
        assert between.count("PutEvents") == 1
    assert type(answer) is kind


async def test_a_call_refused_for_one_entry_goes_without_it(bus):
    async def refuse(asked, pass_on):
        if any('"n": 3' in entry["Detail"] for entry in asked["Entries"]):
            return await failing("ValidationException")(asked, pass_on)
        return await pass_on(asked)

    async with meddling(bus.server) as between, opened(bus.sink(between)) as sink:
        between.always("PutEvents", refuse)
        answers = await sink.deliver(several(*[raw(at) for at in range(10)]))
    assert answers == [Never("ValidationException") if at == 3 else Yes() for at in range(10)]
    assert sorted(event["detail"]["n"] for event in bus.shown()) == [*range(3), *range(4, 10)]


async def test_nobody_there_is_a_no():
    options = EventsSinkOptions(endpoint=f"http://127.0.0.1:{free_port()}")
    async with opened(EventsSink("events://bus", options)) as sink:
        (answer,) = await sink.deliver([delivery()])
    assert isinstance(answer, No)


async def test_a_failed_entry_comes_again_and_its_neighbours_do_not(bus):
    texts = [raw(at) for at in range(6)]

    def is_unlucky(_, entry):
        return json.loads(entry["Detail"])["n"] in (2, 4)

    async with meddling(bus.server) as between, Town(bus.sink(between)) as town:
        between.next(
            "PutEvents",
            failing_entries("InternalFailure", is_unlucky),
            failing_entries("ThrottlingException", is_unlucky),
        )
        told = await town.until_acknowledged(*texts)
        assert await town.dead.list() == []
    unlucky = ["failed", "failed", "delivered"]
    assert told == [unlucky if at in (2, 4) else ["delivered"] for at in range(6)]
    assert sorted(event["detail"]["n"] for event in bus.shown()) == [0, 1, 2, 3, 4, 5]


async def test_an_event_that_is_never_taken_ends_in_the_dead_letters(bus, caplog):
    caplog.set_level(logging.DEBUG)
    texts = [raw(1), raw(2, {"n": 2, "name": "s3cret"}), raw(3)]
    is_bad = lambda _, entry: "s3cret" in entry["Detail"]  # noqa: E731
    async with meddling(bus.server) as between, Town(bus.sink(between)) as town:
        rule = failing_entries("MalformedDetail", is_bad, "Value s3cret is malformed")
        between.always("PutEvents", rule)
        told = await town.until_acknowledged(*texts)
        (letter,) = await town.dead.list()
    assert told == [["delivered"], ["dead"], ["delivered"]]
    assert (letter.raw, letter.message) == (texts[1], "MalformedDetail")
    assert "s3cret" not in caplog.text


# --- whether there is a bus ---------------------------------------------------------------------


async def test_a_bus_that_is_not_there_is_told_at_the_start(ministack):
    sink = EventsSink("events://nowhere", EventsSinkOptions(endpoint=ministack.endpoint))
    with pytest.raises(ConfigError, match="there is no event bus nowhere; create it"):
        await sink.open()
    await sink.aclose()


@pytest.mark.parametrize("code", ["UnrecognizedClientException", "ValidationException"])
async def test_what_a_human_must_put_right_is_told_at_the_start(bus, code):
    async with meddling(bus.server) as between:
        between.always("DescribeEventBus", failing(code))
        sink = bus.sink(between)
        with pytest.raises(ConfigError, match=f"cannot be used: {code}: so it is"):
            await sink.open()
        await sink.aclose()


async def test_who_may_send_need_not_be_allowed_to_ask(bus, caplog, monkeypatch):
    monkeypatch.setattr(events, "_CHECK_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "oncebridge")
    async with meddling(bus.server) as between:
        between.always("DescribeEventBus", failing("AccessDeniedException"))
        async with opened(bus.sink(between)) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]
            assert await sink.deliver([delivery()]) == [Yes()]
        assert between.count("DescribeEventBus") == 1
    (record,) = [r for r in caplog.records if r.message == "oncebridge.sink_not_checked"]
    assert record.levelno == logging.INFO
    assert record.target == f"event bus {bus.name}"


async def test_a_bus_that_does_not_answer_at_the_start_may_later(bus):
    async with meddling(bus.server) as between:
        between.next("DescribeEventBus", failing("InternalException", 500))
        async with opened(bus.sink(between)) as sink:
            assert await sink.deliver([delivery()]) == [Yes()]


async def test_a_bus_that_goes_away_is_noticed(bus, monkeypatch):
    """AWS would go on taking events for it, and drop them."""
    monkeypatch.setattr(events, "_CHECK_EVERY_S", 0.0)
    async with meddling(bus.server) as between, opened(bus.sink(between)) as sink:
        assert await sink.deliver([delivery()]) == [Yes()]
        between.next("DescribeEventBus", failing("ResourceNotFoundException"))
        assert await sink.deliver([delivery()]) == [Closed(f"there is no event bus {bus.name}")]
        assert between.count("PutEvents") == 1
        between.next("DescribeEventBus", failing("ThrottlingException"))
        assert isinstance((await sink.deliver([delivery()]))[0], Closed), (
            "nobody has said it is back"
        )
        assert await sink.deliver([delivery()]) == [Yes()]


async def test_credentials_that_are_gone_are_told(bus, monkeypatch):
    monkeypatch.setattr(events, "_CHECK_EVERY_S", 0.0)

    async def nobody():
        raise ConfigError("", "no AWS credentials were found")

    async with opened(bus.sink()) as sink:
        monkeypatch.setattr(sink._client._account, "credentials", nobody)
        assert await sink.deliver([delivery()]) == [Closed("no AWS credentials were found")]


async def test_a_bus_is_looked_for_now_and_then_only(bus):
    async with meddling(bus.server) as between, opened(bus.sink(between)) as sink:
        for _ in range(5):
            assert await sink.deliver([delivery()]) == [Yes()]
        assert between.count("DescribeEventBus") == 1


async def test_opening_twice_and_closing_twice_is_safe(bus):
    sink = bus.sink()
    await sink.open()
    await sink.open()
    assert await sink.deliver([delivery()]) == [Yes()]
    await sink.aclose()
    await sink.aclose()


async def test_many_calls_at_once_all_arrive(bus):
    async with opened(bus.sink()) as sink:
        calls = [sink.deliver(several(*[raw(10 * c + n) for n in range(10)])) for c in range(4)]
        answers = await asyncio.gather(*calls)
    assert answers == [[Yes()] * 10] * 4
    assert sorted(event["detail"]["n"] for event in bus.shown()) == list(range(40))


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "events:",
        "events://",
        "events://a/b",
        "events://a?x=1",
        "events://a#b",
        "events://user@a",
        "events://b\u00fcs",
        "events:arn:aws:sqs:us-east-1:123456789012:event-bus/a",
        "events:arn:aws:events:us-east-1:123456789012:rule/a",
        "events:arn:aws:events:us-east-1:12:event-bus/a",
        "events:arn:aws:events:us-east-1:123456789012:event-bus/a/b",
        "sqs://a",
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="event bus"):
        EventsSink.from_url(url)


@pytest.mark.parametrize(
    ("url", "options", "where"),
    [
        ("events://a?region=eu-west-1", {"region": "us-east-1"}, "region"),
        (
            "events:arn:aws:events:eu-west-1:123456789012:event-bus/a",
            {"region": "us-east-1"},
            "region",
        ),
        ("events://a", {"source": "aws.mine"}, "source"),
        ("events://a", {"source": ""}, "source"),
        ("events://a", {"detail_type": ""}, "detail_type"),
        ("events://a", {"detail_type": "x" * 129}, "detail_type"),
    ],
)
def test_settings_that_cannot_work_are_refused(url, options, where):
    with pytest.raises(ConfigError) as caught:
        EventsSink(url, EventsSinkOptions(**options))
    assert caught.value.where == where


async def test_the_region_may_stand_in_the_address(bus):
    options = EventsSinkOptions(endpoint=bus.server.endpoint)
    url = f"events://{bus.name}?region=us-east-1"
    async with opened(EventsSink.from_url(url, options)) as sink:
        assert await sink.deliver([delivery()]) == [Yes()]


def test_an_event_that_claims_to_have_passed_here_is_believed():
    text = raw(1, {"oncebridge": {"via": ["a#b", "c#d"]}})
    assert events.hops_of(parse(text)) == ["a#b", "c#d"]
