"""A sink that gets verified events only: each answer of Genesys, through a real gateway."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.faults.doubles import eventually
from tests.servers.genesys import CLIENT_ID, CLIENT_SECRET, playing_genesys

from oncebridge import Gateway, Settings, Verdict, Yes
from oncebridge.base.options import Rate
from oncebridge.base.secrets import Secret
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.errors import ConfigError, ConfigErrors, SinkRejected
from oncebridge.events.event import parse
from oncebridge.genesys import lookups, verification
from oncebridge.genesys.verification import Verifier, VerifyingSink
from oncebridge.service.genesys_options import GenesysOptions
from oncebridge.sinks.api import Closed, Delivery, Never, No, Unknown
from oncebridge.stores.memory import MemoryStore

CALL = "7d1e2f00-0000-4000-8000-000000000001"
FAKE = "7d1e2f00-0000-4000-8000-0000000000ff"
PUBLISHED = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
PUBLISHED_MS = int(PUBLISHED.timestamp() * 1000)
EVENTS = Path(__file__).parents[1] / "events"
QUICK = Settings(backoff=timedelta(milliseconds=20), max_backoff=timedelta(milliseconds=200))


def raw(conversation=CALL, number=1, *, time=PUBLISHED, **detail):
    body = {"number": number, **({} if conversation is None else {"conversationId": conversation})}
    event = {
        "version": "0",
        "id": f"e-{number}",
        "detail-type": "v2.detail.events.conversation.{id}.acw",
        "source": "aws.partner/genesys.com/cloud/0a1b/invented",
        "detail": {"topicName": "v2.detail.events", "eventBody": body, **detail},
    }
    if time is not None:
        event["time"] = time if isinstance(time, str) else time.isoformat()
    return json.dumps(event).encode()


def delivery(*args, **more):
    return Delivery(parse(raw(*args, **more)), key=b"k")


class Desk:
    """A sink that keeps what it gets, and answers as it is told."""

    def __init__(self, *, batch=1, concurrency=64, takes_s=0.0):
        self.batch, self.concurrency = batch, concurrency
        self.takes_s = takes_s
        self.busy = self.busiest = 0
        self.ends = []
        self.taken = []
        self.attempts = []
        self.calls = 0
        self.answer = Yes()
        self.is_open = False

    async def open(self):
        self.is_open = True

    async def aclose(self):
        self.is_open = False

    async def deliver(self, deliveries):
        self.calls += 1
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        await asyncio.sleep(self.takes_s)
        self.busy -= 1
        self.ends += [each.ends for each in deliveries]
        if isinstance(self.answer, Exception):
            raise self.answer
        self.taken += [each.event.id for each in deliveries]
        self.attempts += [each.attempt for each in deliveries]
        if isinstance(self.answer, list):
            return self.answer
        return [self.answer] * len(deliveries)


@pytest.fixture
def genesys():
    with playing_genesys(CALL) as found:
        yield found


@pytest.fixture
def briefly(monkeypatch):
    """Say how long it is remembered that there is none."""

    def patch(seconds):
        for module in (lookups, verification):
            monkeypatch.setattr(module, "BRIEFLY_S", seconds)

    return patch


def named(count, start=0):
    """Invent conversations."""
    return [f"{CALL[:-4]}1{at:03d}" for at in range(start, start + count)]


def options(genesys, **more):
    given = {
        "region": genesys.url,
        "client_id": Secret(CLIENT_ID),
        "client_secret": Secret(CLIENT_SECRET),
        "lookups": Rate(1000),
        **more,
    }
    return GenesysOptions(**given)


class Bench:
    """A gateway whose sink is verified; its clock stands a minute after the events' time."""

    def __init__(self, genesys, *, sink=None, settings=QUICK, **more):
        self.now_ms = PUBLISHED_MS + 60_000
        self.desk = sink or Desk()
        self.verifier = Verifier(options(genesys, **more))
        self.sink = self.verifier.around(self.desk, settings, self.clock)
        self.dead = MemoryDeadLetters()
        self.gateway = Gateway(
            store=MemoryStore(), sink=self.sink, dead=self.dead, settings=settings
        )

    def clock(self):
        return self.now_ms

    async def one(self, *args, **more):
        (outcome,) = await self.gateway.process([raw(*args, **more)])
        assert self.gateway.books.balance
        return outcome

    async def until_acknowledged(self, *args, within=20.0, **more):
        """Be a source: bring it again until it is acknowledged."""
        async with asyncio.timeout(within):
            while True:
                outcome = await self.one(*args, **more)
                if outcome.acknowledge:
                    return outcome
                await asyncio.sleep(outcome.retry_after_ms / 1000)


@asynccontextmanager
async def bench(genesys, **more):
    made = Bench(genesys, **more)
    async with made.gateway:
        yield made


# --- what Genesys says, and what becomes of the event ---------------------------------------


async def test_what_exists_is_delivered(genesys):
    async with bench(genesys) as made:
        assert made.desk.is_open
        assert (await made.one()).verdict is Verdict.DELIVERED
        assert made.verifier.counts == {"known": 1, "lookups": 1}
    assert made.desk.taken == ["e-1"]
    assert not made.desk.is_open


async def test_a_duplicate_is_not_looked_up(genesys):
    async with bench(genesys, remember=timedelta(0)) as made:
        assert (await made.one()).verdict is Verdict.DELIVERED
        assert (await made.one()).verdict is Verdict.DUPLICATE
    assert len(genesys.asked) == 1


async def test_what_names_no_conversation_is_delivered_unasked(genesys):
    async with bench(genesys) as made:
        assert (await made.one(None)).verdict is Verdict.DELIVERED
        assert made.verifier.counts == {"unnamed": 1}
    assert not genesys.asked


async def test_what_names_no_conversation_is_dead_if_that_is_wanted(genesys):
    async with bench(genesys, on_unnamed="dead") as made:
        assert (await made.one(None)).verdict is Verdict.DEAD
        (letter,) = await made.dead.list()
        assert letter.message == "the event names no conversation"
        assert (await made.one(CALL, 2)).verdict is Verdict.DELIVERED
        assert made.verifier.counts["unnamed"] == 1


@pytest.mark.parametrize(
    ("topic", "body", "found"),
    [
        ("v2.users.0a04.conversations", {"id": FAKE}, FAKE),
        ("v2.users.0a04.conversations.calls", {"id": FAKE}, FAKE),
        ("v2.routing.queues.4f81.conversations", {"id": FAKE}, FAKE),
        ("v2.routing.queues.4f81.conversations.emails", {"id": FAKE}, FAKE),
        ("v2.users.0a04.conversations", {"id": CALL, "conversationId": FAKE}, FAKE),
        ("v2.conversations.4ae4.transcription", {"id": CALL, "conversationId": FAKE}, FAKE),
        ("v2.detail.events.conversation.4ae4.acw", {"id": CALL, "conversationId": None}, None),
        ("v2.users.0a04.conversationsummary", {"id": FAKE}, None),
        ("v2.users.0a04.presence", {"id": FAKE}, None),
        ("v2.conversations.chats.4ae4.messages", {"id": FAKE}, None),
        ("v2.users.0a04.conversations", {}, None),
        ("v2.users.0a04.conversations", [FAKE], None),
        ("v2.users.0a04.conversations", None, None),
        (["v2.users.0a04.conversations"], {"id": FAKE}, None),
        (None, {"conversationId": FAKE}, FAKE),
    ],
)
def test_the_conversation_is_found_where_genesys_puts_it(genesys, topic, body, found):
    event = parse(raw(None, topicName=topic, eventBody=body))
    assert Verifier(options(genesys)).conversation(event) == found


def test_all_that_genesys_says_of_conversations_names_one(genesys):
    find = Verifier(options(genesys)).conversation
    found = {
        file.name: find(parse(file.read_bytes()))
        for file in EVENTS.glob("*.json")
        if "conversation" in file.name
    }
    assert len(found) >= 12
    assert set(found.values()) == {"4ae47b2b-9417-4a5d-bcf5-8c4737244f97"}


async def test_an_invented_snapshot_of_a_conversation_is_dead_too(genesys):
    async with bench(genesys) as made:
        event = json.loads((EVENTS / "v2.users.id.conversations.json").read_bytes())
        (outcome,) = await made.gateway.process([json.dumps(event).encode()])
        assert outcome.verdict is Verdict.DEAD


async def test_what_does_not_exist_goes_to_the_dead_letters_with_the_reason(genesys):
    async with bench(genesys) as made:
        outcome = await made.one(FAKE)
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.DEAD, True)
        (letter,) = await made.dead.list()
        assert letter.reason == "rejected"
        assert letter.message == f"the conversation {FAKE} is not known to Genesys"
        assert letter.raw == raw(FAKE)
        assert not letter.maybe_delivered
        assert made.verifier.counts["unknown"] == 1
    assert not made.desk.taken


async def test_what_does_not_exist_is_delivered_if_that_is_wanted_and_told_now_and_then(
    genesys, caplog
):
    async with bench(genesys, on_unknown="deliver") as made:
        for number in range(5):
            assert (await made.one(FAKE, number)).verdict is Verdict.DELIVERED
        assert made.verifier.counts["unknown"] == 5
    told = [one for one in caplog.records if one.message == "oncebridge.conversation_is_unknown"]
    assert len(told) == 1
    assert FAKE in told[0].what


@pytest.mark.parametrize("name", ["", "../../users", "no id", 7, ["a"], {"a": 1}, "x" * 200])
async def test_what_cannot_be_an_id_is_unknown_without_asking(genesys, name):
    # However young it is: nothing will make it one.
    async with bench(genesys) as made:
        made.now_ms = PUBLISHED_MS
        assert (await made.one(name)).verdict is Verdict.DEAD
        (letter,) = await made.dead.list()
        assert letter.message == "the event has no valid conversation id"
    assert not genesys.asked


async def test_a_young_event_may_be_ahead_of_the_api(genesys, briefly):
    briefly(0.05)
    async with bench(genesys) as made:
        made.now_ms = PUBLISHED_MS + 29_000
        outcome = await made.one(FAKE)
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
        assert "not known to Genesys yet" in outcome.reason
        assert not outcome.blamed
        assert made.verifier.counts["settling"] == 1
        genesys.conversations.add(FAKE)
        assert (await made.until_acknowledged(FAKE)).verdict is Verdict.DELIVERED
        made.now_ms = PUBLISHED_MS + 30_001
        assert (await made.one(FAKE[:-1] + "e", 2)).verdict is Verdict.DEAD


async def test_young_events_that_wait_leave_the_sink_open_to_the_others(genesys):
    async with bench(genesys) as made:
        made.now_ms = PUBLISHED_MS + 1_000
        for number in range(10, 20):  # twice as many as open the breaker
            outcome = await made.one(f"{number}{FAKE[2:]}", number)
            assert outcome.verdict is Verdict.FAILED
        genesys.conversations.add(FAKE)
        assert (await made.one(FAKE)).verdict is Verdict.DELIVERED


@pytest.mark.parametrize(
    ("time", "after_s", "settles"),
    [
        (PUBLISHED, 29, True),
        (PUBLISHED, 31, False),
        (PUBLISHED, -29, True),
        (PUBLISHED, -31, False),
        ("9999-12-31T23:59:59Z", 0, False),
        ("0001-01-01T00:00:00+23:59", 0, False),
        ("2026-03-01T12:00:00", 5, True),
        ("yesterday", 0, False),
        (None, 0, False),
    ],
)
async def test_how_young_is_told_by_the_time_of_the_event(genesys, time, after_s, settles):
    made = Bench(genesys)
    made.now_ms = PUBLISHED_MS + after_s * 1000
    (answer,) = await made.sink.deliver([delivery(FAKE, time=time)])
    assert isinstance(answer, No if settles else Never)
    if settles:
        assert 0 < answer.retry_after_ms <= 5000
    await made.sink.aclose()


async def test_an_event_without_an_envelope_has_its_time_in_the_detail(genesys):
    made = Bench(genesys)
    made.now_ms = PUBLISHED_MS + 1000
    young = delivery(FAKE, time=None, timestamp="2026-03-01T12:00:00.500Z")
    (answer,) = await made.sink.deliver([young])
    assert isinstance(answer, No)
    await made.sink.aclose()


async def test_the_conversation_is_found_where_the_setting_says(genesys):
    where = "detail.eventBody.conversationId || detail.call.id"
    async with bench(genesys, conversation=where) as made:
        (outcome,) = await made.gateway.process([raw(None, call={"id": FAKE})])
        assert outcome.verdict is Verdict.DEAD
    where = "contains(detail.topicName, 'nothing') && detail.call.id"
    async with bench(genesys, conversation=where) as made:
        assert (await made.one()).verdict is Verdict.DELIVERED
        assert made.verifier.counts["unnamed"] == 1, "false is no conversation either"


# --- the API in trouble ---------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["status", "hangs_up", "login_status"])
async def test_while_the_api_is_down_events_are_held_and_none_is_lost(genesys, trouble, caplog):
    setattr(genesys, trouble, True if trouble == "hangs_up" else 503)
    async with bench(genesys, settings=replace(QUICK, max_attempts=2)) as made:
        for _ in range(4):
            outcome = await made.one()
            assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
            assert not outcome.blamed
            await asyncio.sleep(outcome.retry_after_ms / 1000)
        assert not made.desk.taken
        assert not await made.dead.list(), "attempts are not burnt: nothing was sent"
        assert made.verifier.counts["held"] >= 2
        setattr(genesys, trouble, 0)
        assert (await made.until_acknowledged()).verdict is Verdict.DELIVERED
        assert not made.gateway.down()
    assert made.desk.taken == ["e-1"]
    assert made.desk.attempts == [1]
    told = [one for one in caplog.records if one.message == "oncebridge.genesys_is_away"]
    assert 1 <= len(told) <= 2


async def test_while_the_api_is_down_the_gateway_says_so_and_asks_little(genesys):
    genesys.status = 500
    async with bench(genesys) as made:
        await made.gateway.process([raw(CALL, number) for number in range(50)])
        assert made.gateway.down() == ["the sink"]
        assert len(genesys.asked) == 1, "fifty events of one conversation are one question"
        await made.gateway.process([raw(f"{CALL[:-1]}{n}", n) for n in range(9)])
        assert len(genesys.asked) <= 2


async def test_while_the_api_is_down_events_pass_unverified_if_that_is_wanted(genesys, caplog):
    genesys.status = 500
    async with bench(genesys, on_api_outage="deliver") as made:
        events = [raw(name, at) for at, name in enumerate(named(40))]
        outcomes = await made.gateway.process(events[:20])
        for event in events[20:]:
            outcomes += await made.gateway.process([event])
        assert {outcome.verdict for outcome in outcomes} == {Verdict.DELIVERED}
        assert made.verifier.counts["unverified"] == 40
        assert not made.gateway.down()
        assert len(genesys.asked) <= 22, "after five failures nobody is kept waiting for more"
        genesys.status = 0
        await asyncio.sleep(1.1)
        assert (await made.one(FAKE, 98)).verdict is Verdict.DEAD
        assert made.verifier.counts["unknown"] == 1
    told = [one for one in caplog.records if one.message == "oncebridge.sent_unverified"]
    assert len(told) == 1
    assert told[0].error == "the Genesys API answers HTTP 500"


async def test_too_many_is_heard_and_nothing_is_asked_until_then(genesys):
    genesys.status, genesys.headers = 429, {"Retry-After": "1"}
    async with bench(genesys) as made:
        (answer,) = await made.sink.deliver([delivery()])
        assert answer == No("the Genesys API answers HTTP 429", 1000)
        (answer,) = await made.sink.deliver([delivery(FAKE)])
        assert answer.reason == "the Genesys API answers HTTP 429"
        assert 0 < answer.retry_after_ms <= 1001
        assert len(genesys.asked) == 1
        genesys.status = 0
        await asyncio.sleep(answer.retry_after_ms / 1000)
        assert await made.sink.deliver([delivery()]) == [Yes()]


async def test_a_slow_answer_keeps_nobody_longer_than_the_time_out(genesys):
    genesys.delay = 5
    async with bench(genesys, timeout=timedelta(seconds=0.5)) as made:
        began = asyncio.get_running_loop().time()
        (answer,) = await made.sink.deliver([delivery()])
        assert asyncio.get_running_loop().time() - began < 3
        assert answer == No("the Genesys API did not answer within 0.5 s")


async def test_a_missing_permission_shuts_the_door_and_is_named(genesys, caplog):
    genesys.status = 403
    for policy in ("hold", "deliver"):
        async with bench(genesys, on_api_outage=policy) as made:
            (answer,) = await made.sink.deliver([delivery()])
            assert isinstance(answer, Closed)
            assert "conversation:communication:view" in answer.reason
            outcomes = [await made.one(CALL, number) for number in range(5)]
            assert not any(outcome.acknowledge for outcome in outcomes)
            assert made.gateway.down() == ["the sink"]
    assert "oncebridge.genesys_refuses" in [one.message for one in caplog.records]


async def test_what_is_hidden_from_us_keeps_nothing_else_from_passing(genesys):
    real, hidden = named(16), named(4, 16)
    genesys.conversations.update(real)
    genesys.hidden.update(hidden)
    async with bench(genesys) as made:
        assert (await made.one(CALL, 900)).verdict is Verdict.DELIVERED
        # Each fifth is hidden, one after the other and all at once.
        names = [n for at in range(4) for n in (hidden[at], *real[4 * at : 4 * at + 4])]
        for at, name in enumerate(names[:10]):
            wanted = Verdict.DEAD if name in hidden else Verdict.DELIVERED
            assert (await made.one(name, at)).verdict is wanted
        await made.gateway.process([raw(name, 10 + at) for at, name in enumerate(names[10:])])
        assert len(made.desk.taken) == 17
        assert made.gateway.sink_breaker.opened == 0
        assert made.verifier.counts["hidden"] == 4
        letters = await made.dead.list()
        assert {letter.message for letter in letters} == {
            f"Genesys does not show the conversation {name} to this client (403): its role or "
            "divisions do not cover it"
            for name in hidden
        }


async def test_what_is_hidden_from_us_is_delivered_if_what_is_unknown_is(genesys, caplog):
    genesys.hidden.add(FAKE)
    async with bench(genesys, on_unknown="deliver") as made:
        assert (await made.one(CALL, 1)).verdict is Verdict.DELIVERED
        assert (await made.one(FAKE, 2)).verdict is Verdict.DELIVERED
        assert made.verifier.counts["hidden"] == 1
    assert "oncebridge.conversation_is_unknown" in [one.message for one in caplog.records]


async def test_a_client_that_is_refused_sends_nothing_unverified(genesys):
    # The next ones are not let through to the API, and get the same answer.
    async with bench(genesys, on_api_outage="deliver") as made:
        genesys.status = 403
        for name in named(10):
            (answer,) = await made.sink.deliver([delivery(name)])
            assert isinstance(answer, Closed)
        assert len(genesys.asked) == 1
        assert not made.desk.taken


# --- little time ----------------------------------------------------------------------------


async def test_a_hanging_api_costs_no_attempt_however_little_time_the_caller_has(genesys):
    genesys.delay = 5
    settings = replace(QUICK, max_attempts=1)
    async with bench(genesys, settings=settings) as made:
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            event, within = raw(), timedelta(seconds=2)
            (outcome,) = await made.gateway.process([event], within=within)
            assert asyncio.get_running_loop().time() - began < 1.5
            assert not outcome.acknowledge
            assert not outcome.blamed
            assert outcome.reason == "the Genesys API did not answer in the time left"
            await asyncio.sleep(outcome.retry_after_ms / 1000)
        assert made.gateway.books.ambiguous == 0
        assert not await made.dead.list()
    assert not made.desk.taken


async def test_what_hangs_is_an_outage_whatever_the_time(genesys):
    genesys.delay = 5
    async with bench(genesys, on_api_outage="deliver") as made:
        within = timedelta(seconds=2)
        (outcome,) = await made.gateway.process([raw()], within=within)
        assert outcome.verdict is Verdict.DELIVERED
        assert made.verifier.counts["unverified"] == 1


async def test_a_sink_is_told_when_its_call_ends(genesys):
    async with bench(genesys) as made:
        await made.one(CALL, 1)
        await made.gateway.process([raw(CALL, 2)], within=timedelta(seconds=5))
        now = asyncio.get_running_loop().time()
        first, second = made.desk.ends
        assert 8 < first - now <= 10
        assert 2 < second - now <= 4, "five, less the margin"


# --- a sink that is down --------------------------------------------------------------------


async def test_what_is_not_sent_says_nothing_about_a_sink_that_is_down(genesys):
    async with bench(genesys) as made:
        made.desk.answer = No("refused")
        for number in range(40):  # each second one is invented, and dies
            await made.one(CALL if number % 2 else "no id", number)
        assert made.desk.calls == 5
        assert made.gateway.down() == ["the sink"]
        await asyncio.sleep(1.1)
        assert (await made.one(FAKE, 50)).verdict is Verdict.DEAD
        assert made.gateway.down() == ["the sink"], "an invented event is no try"
        assert made.desk.calls == 5
        made.desk.answer = Yes()
        assert (await made.one(CALL, 51)).verdict is Verdict.DELIVERED
        assert not made.gateway.down()


async def test_what_the_sink_itself_will_never_take_shows_that_it_is_there(genesys):
    async with bench(genesys) as made:
        for number, answer in enumerate([No("refused"), Never("bad")] * 6):
            made.desk.answer = answer
            await made.one(CALL, number)
        assert made.desk.calls == 12
        assert not made.gateway.down()


async def test_a_client_that_is_refused_does_not_even_start(genesys):
    made = Bench(genesys, client_secret=Secret("wr0ng"))
    with pytest.raises(ConfigError, match="the OAuth client is refused: HTTP 401 invalid_client"):
        await made.gateway.open()
    await made.gateway.aclose()


async def test_a_client_that_is_refused_later_shuts_the_door(genesys):
    async with bench(genesys) as made:
        assert (await made.one()).verdict is Verdict.DELIVERED
        genesys.revoke()
        genesys.login_status = 401
        for number in range(2, 7):
            outcome = await made.one(FAKE, number)
            assert "the OAuth client is refused: HTTP 401" in outcome.reason
        assert made.gateway.down() == ["the sink"]
        genesys.login_status = 0
        assert (await made.until_acknowledged(FAKE, 2)).verdict is Verdict.DEAD


async def test_an_api_that_is_away_keeps_nobody_from_starting(genesys, caplog):
    genesys.hangs_up = True
    async with bench(genesys) as made:
        assert "oncebridge.genesys_is_away" in [one.message for one in caplog.records]
        genesys.hangs_up = False
        assert (await made.one()).verdict is Verdict.DELIVERED


# --- how little is asked --------------------------------------------------------------------


async def test_many_events_of_one_conversation_at_once_are_one_question(genesys):
    genesys.delay = 0.1
    async with bench(genesys) as made:
        outcomes = await made.gateway.process([raw(CALL, number) for number in range(20)])
        assert {outcome.verdict for outcome in outcomes} == {Verdict.DELIVERED}
        assert len(genesys.asked) == 1
        assert made.verifier.counts == {"known": 20, "lookups": 1}


async def test_what_is_known_is_not_asked_again_for_as_long_as_it_is_remembered(genesys):
    async with bench(genesys, remember=timedelta(seconds=0.7)) as made:
        await made.one(CALL, 1)
        await made.one(CALL, 2)
        assert len(genesys.asked) == 1
        await asyncio.sleep(0.8)
        await made.one(CALL, 3)
        assert len(genesys.asked) == 2


async def test_what_is_unknown_is_remembered_briefly_for_young_events(genesys, briefly):
    briefly(3600)
    async with bench(genesys) as made:
        made.now_ms = PUBLISHED_MS + 1_000
        for number in (1, 2):
            assert (await made.one(FAKE, number)).verdict is Verdict.FAILED
        assert len(genesys.asked) == 1
        genesys.conversations.add(FAKE)
        assert (await made.one(FAKE, 3)).verdict is Verdict.FAILED


@pytest.mark.parametrize("on_unknown", ["dead", "deliver"])
async def test_what_is_remembered_as_unknown_refuses_nothing_for_good(genesys, on_unknown):
    async with bench(genesys, on_unknown=on_unknown) as made:
        made.now_ms = PUBLISHED_MS + 29_000
        assert (await made.one(FAKE, 1)).verdict is Verdict.FAILED
        genesys.conversations.add(FAKE)
        made.now_ms = PUBLISHED_MS + 30_001
        assert (await made.one(FAKE, 2)).verdict is Verdict.DELIVERED
        # Without a refusal at stake, what is remembered will do.
        assert len(genesys.asked) == (2 if on_unknown == "dead" else 1)


async def test_an_event_that_settled_long_ago_is_not_refused_from_memory_either(genesys):
    async with bench(genesys) as made:
        assert (await made.one(FAKE, 1)).verdict is Verdict.DEAD
        genesys.conversations.add(FAKE)
        assert (await made.one(FAKE, 2)).verdict is Verdict.DELIVERED
        assert (await made.one(FAKE, 3, time=None)).verdict is Verdict.DELIVERED


@pytest.mark.parametrize("after_s", [1, 60])
async def test_what_is_remembered_as_hidden_refuses_nothing_for_good(genesys, after_s):
    genesys.hidden.add(FAKE)
    async with bench(genesys) as made:
        made.now_ms = PUBLISHED_MS + after_s * 1000
        assert (await made.one(CALL, 1)).verdict is Verdict.DELIVERED
        assert (await made.one(FAKE, 2)).verdict is Verdict.DEAD
        genesys.hidden.clear()
        genesys.conversations.add(FAKE)
        assert (await made.one(FAKE, 3)).verdict is Verdict.DELIVERED


async def test_events_that_come_together_share_the_question_asked_anew(genesys):
    async with bench(genesys) as made:
        made.now_ms = PUBLISHED_MS + 29_000
        assert (await made.one(FAKE, 0)).verdict is Verdict.FAILED
        genesys.answering.clear()
        made.now_ms = PUBLISHED_MS + 30_001
        # Each is a call of its own, as the sink takes one at a time.
        coming = asyncio.create_task(
            made.gateway.process([raw(FAKE, number) for number in range(1, 21)])
        )
        await eventually(lambda: len(genesys.asked) == 2)
        genesys.conversations.add(FAKE)
        genesys.answering.set()
        assert {outcome.verdict for outcome in await coming} == {Verdict.DELIVERED}
        assert len(genesys.asked) == 2


async def test_a_question_sent_before_an_event_settled_does_not_refuse_it(genesys):
    async with bench(genesys) as made:
        made.now_ms = PUBLISHED_MS + 29_999
        genesys.answering.clear()
        young = asyncio.create_task(made.one(FAKE, 1))
        await eventually(lambda: len(genesys.asked) == 1)
        made.now_ms = PUBLISHED_MS + 30_000  # and the question is still open
        settled = asyncio.create_task(made.sink.deliver([delivery(FAKE, 2)]))
        await asyncio.sleep(0)
        genesys.answering.set()
        outcome = await young
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
        assert isinstance((await settled)[0], Never)
        assert len(genesys.asked) == 2


async def test_an_outage_is_not_remembered_as_an_answer(genesys):
    async with bench(genesys) as made:
        genesys.status = 500
        assert isinstance((await made.sink.deliver([delivery()]))[0], No)
        genesys.status = 0
        assert await made.sink.deliver([delivery()]) == [Yes()]


async def test_only_so_many_are_remembered_the_latest_used(genesys, monkeypatch):
    monkeypatch.setattr(lookups, "_MAX_REMEMBERED", 3)
    names = [f"{CALL[:-1]}{at}" for at in range(4)]
    genesys.conversations.update(names)
    async with bench(genesys) as made:
        for name in (*names[:3], names[0], names[3]):
            await made.sink.deliver([delivery(name)])
        assert list(made.verifier.lookups._known) == [names[2], names[0], names[3]]


async def test_no_more_is_asked_than_the_rate_allows_and_all_get_through(genesys):
    names = named(8)
    genesys.conversations.update(names)
    async with bench(genesys, lookups=Rate(8)) as made:
        outcomes = await made.gateway.process([raw(name, at) for at, name in enumerate(names)])
        assert {outcome.verdict for outcome in outcomes} == {Verdict.DELIVERED}
        assert not made.gateway.books.retried, "they wait in the gateway, and are not handed back"
    assert len(genesys.asked) == 8
    assert genesys.asked_at[-1] - genesys.asked_at[0] > 0.5, "a second, less what load may take"


async def test_what_cannot_be_asked_in_time_is_held_and_holds_up_nobody(genesys):
    # Though what cannot be asked because of an outage would be sent.
    settings = Settings(sink_timeout=timedelta(seconds=4))
    more = {"lookups": Rate(2), "timeout": timedelta(seconds=1), "on_api_outage": "deliver"}
    names = named(20)
    genesys.conversations.update(names)
    genesys.delay = 0.5
    async with bench(genesys, settings=settings, **more) as made:
        assert (await made.one(CALL, 900)).verdict is Verdict.DELIVERED
        began = asyncio.get_running_loop().time()
        events = [raw(name, at) for at, name in enumerate(names)]
        outcomes = await made.gateway.process([*events, raw(CALL, 901)])
        assert asyncio.get_running_loop().time() - began < 3
        assert outcomes.pop().verdict is Verdict.DELIVERED
        late = [one for one in outcomes if one.verdict is Verdict.FAILED]
        assert len(late) >= 15
        assert all("lookups" in one.reason and not one.blamed for one in late)
        # They come again one by one, as there are turns for them.
        waits = [one.retry_after_ms for one in late]
        assert max(waits) > 6000
        assert len({wait // 1000 for wait in waits}) >= 6
        assert made.verifier.counts["held"] == len(late)
        assert not made.verifier.counts["unverified"]
        assert len(genesys.asked) == 21 - len(late), "whoever was asked for had time to be answered"
        assert not made.gateway.sink_breaker.opened, "which is no fault of the sink"


async def test_a_flood_makes_nobody_wait_for_long(genesys):
    async with bench(genesys, lookups=Rate(1), timeout=timedelta(seconds=5)) as made:
        answers = await made.sink.deliver([delivery(name) for name in named(300)])
        late = [answer for answer in answers if isinstance(answer, No)]
        assert len(late) >= 298
        assert 60_000 < max(answer.retry_after_ms for answer in late) < 65_000


async def test_whoever_joins_a_question_that_is_not_asked_yet_is_not_told_of_an_outage(genesys):
    async with bench(genesys, lookups=Rate(1), on_api_outage="deliver") as made:
        await made.sink.deliver([delivery()])
        long, short = timedelta(seconds=10), 0.2
        waiting = asyncio.create_task(made.sink.deliver([delivery(FAKE, 2)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        (answer,) = await made.sink.deliver([replace(delivery(FAKE, 3), ends=now + short)])
        assert isinstance(answer, No)
        assert answer.too_early
        assert 0 < answer.retry_after_ms < long.total_seconds() * 1000
        assert isinstance((await waiting)[0], Never)


async def test_closing_leaves_no_question_behind(genesys):
    made = Bench(genesys)
    sending = asyncio.create_task(made.sink.deliver([delivery()]))
    while not made.verifier.lookups._pending:  # noqa: ASYNC110
        await asyncio.sleep(0)  # until it is asked for, and not begun
    await made.sink.aclose()
    await sending
    assert await made.sink.deliver([delivery()]) == [Yes()]
    await made.sink.aclose()


async def test_whoever_is_broken_off_leaves_the_others_their_answer(genesys):
    genesys.delay = 0.3
    async with bench(genesys) as made:
        impatient = asyncio.create_task(made.sink.deliver([delivery(CALL, 1)]))
        patient = asyncio.create_task(made.sink.deliver([delivery(CALL, 2)]))
        await asyncio.sleep(0.1)
        impatient.cancel()
        assert await patient == [Yes()]
    assert made.desk.taken == ["e-2"]
    assert len(genesys.asked) == 1


async def test_closing_breaks_off_what_is_asked(genesys):
    genesys.delay = 3
    made = Bench(genesys)
    sending = asyncio.create_task(made.sink.deliver([delivery()]))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(2):
        await made.sink.aclose()
        (answer,) = await sending
    assert isinstance(answer, No)
    assert not made.desk.taken


# --- the sink inside ------------------------------------------------------------------------


async def test_answers_stand_where_their_deliveries_stood(genesys):
    async with bench(genesys, sink=Desk(batch=10)) as made:
        made.desk.answer = [Yes(), Unknown("x")]
        answers = await made.sink.deliver(
            [delivery(FAKE), delivery(), delivery(""), delivery(None)]
        )
        assert [type(answer) for answer in answers] == [Never, Yes, Never, Unknown]
        assert made.desk.calls == 1


@pytest.mark.parametrize(
    ("does", "kind"),
    [
        (RuntimeError("payload"), Unknown),
        (SinkRejected("payload"), Never),
        ([Yes()], Unknown),
        ([], Unknown),
    ],
)
async def test_what_the_sink_does_wrong_is_not_on_those_that_were_not_sent(genesys, does, kind):
    async with bench(genesys, sink=Desk(batch=10)) as made:
        made.desk.answer = does
        answers = await made.sink.deliver([delivery(), delivery(FAKE), delivery(None)])
        assert [type(answer) for answer in answers] == [kind, Never, kind]
        assert "payload" not in answers[0].reason


async def test_nothing_to_send_is_no_call(genesys):
    async with bench(genesys) as made:
        await made.sink.deliver([delivery(FAKE)])
        assert made.desk.calls == 0


async def test_what_else_is_asked_of_a_sink_is_asked_of_the_one_inside(genesys):
    desk = Desk()
    desk.by_entity, desk.is_gone = True, False
    sink = Bench(genesys, sink=desk).sink
    assert sink.by_entity
    assert not sink.is_gone
    desk.is_gone = True
    assert sink.is_gone
    assert not hasattr(sink, "migrate")
    assert not sink.joins(MemoryStore())


async def test_what_is_known_goes_as_fast_as_the_sink_takes_it(genesys):
    desk = Desk(concurrency=50, takes_s=0.1)
    async with bench(genesys, sink=desk, lookups=Rate(1)) as made:
        assert (made.sink.batch, made.sink.concurrency) == (1, 50)
        await made.one(CALL, 900)
        began = asyncio.get_running_loop().time()
        await made.gateway.process([raw(CALL, number) for number in range(100)])
        assert asyncio.get_running_loop().time() - began < 2
        assert desk.busiest == 50
        assert len(desk.taken) == 101


async def test_a_function_is_a_sink_and_another_is_verified_alike(genesys):
    taken = []
    made = Bench(genesys)
    gateway = made.gateway.with_sink(lambda event: taken.append(event.id))
    async with gateway:
        outcomes = await gateway.process([raw(CALL, 1), raw(FAKE, 2)])
        assert [outcome.verdict for outcome in outcomes] == [Verdict.DELIVERED, Verdict.DEAD]
    assert taken == ["e-1"]
    assert isinstance(gateway._sink, VerifyingSink)


# --- shadow mode ----------------------------------------------------------------------------

SHADOW = Settings(mode="shadow")


async def counted(made, **wanted):
    """Wait until so many were counted."""
    async with asyncio.timeout(10):
        while any(made.verifier.counts[name] < count for name, count in wanted.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_shadow_mode_forwards_everything_and_counts(genesys):
    async with bench(genesys, settings=SHADOW) as made:
        assert (await made.one(FAKE, 1)).forwarded
        assert (await made.one("no id", 2)).forwarded
        await counted(made, unknown=2)
        genesys.status = 403
        assert (await made.one(CALL, 3)).forwarded
        await counted(made, refused=1)


async def test_shadow_mode_keeps_nobody_waiting(genesys, monkeypatch):
    monkeypatch.setattr(verification, "_SHADOW_GRACE_S", 0.1)
    genesys.delay = 5
    async with bench(genesys, settings=SHADOW, lookups=Rate(4)) as made:
        began = asyncio.get_running_loop().time()
        outcomes = await made.gateway.process([raw(n, at) for at, n in enumerate(named(60))])
        assert asyncio.get_running_loop().time() - began < 1
        assert all(outcome.forwarded for outcome in outcomes)
        await counted(made, held=50)


@pytest.mark.parametrize(
    ("trouble", "told", "most"),
    [
        ({"status": 401}, "refused", 4),
        ({"login_status": 401}, "refused", 1),
        ({"status": 500}, "held", 7),
    ],
)
async def test_shadow_mode_does_not_hammer_an_api_in_trouble(genesys, trouble, told, most):
    async with bench(genesys, settings=SHADOW) as made:
        before = genesys.logins
        for name, value in trouble.items():
            setattr(genesys, name, value)
        genesys.revoke()
        for at, name in enumerate(named(40)):
            assert (await made.one(name, at)).forwarded
            await counted(made, **{told: at + 1})
        assert len(genesys.asked) <= most, "one at a time, now and then"
        assert genesys.logins - before <= 3


async def test_shadow_mode_looks_at_so_many_at_once_and_lets_the_rest_go(genesys, monkeypatch):
    monkeypatch.setattr(verification, "_MAX_SHADOW_LOOKUPS", 5)
    genesys.delay = 0.5
    async with bench(genesys, settings=SHADOW) as made:
        outcomes = await made.gateway.process([raw(CALL, at) for at in range(20)])
        assert all(outcome.forwarded for outcome in outcomes)
        assert made.verifier.counts["held"] == 15
        await counted(made, known=5)


async def test_shadow_mode_counts_to_the_end(genesys):
    genesys.delay = 0.3
    async with bench(genesys, settings=SHADOW) as made:
        await made.one()
        assert not made.verifier.counts["known"]
    assert made.verifier.counts["known"] == 1


async def test_the_end_of_shadow_mode_does_not_wait_for_ever(genesys, monkeypatch):
    monkeypatch.setattr(verification, "_SHADOW_GRACE_S", 0.1)
    genesys.delay = 5
    async with asyncio.timeout(3):
        async with bench(genesys, settings=SHADOW) as made:
            await made.one()
        assert not made.sink._shadow_lookups or all(
            task.cancelling() for task in made.sink._shadow_lookups
        )


# --- settings -------------------------------------------------------------------------------


def test_what_is_missing_is_named_each(genesys):
    with pytest.raises(ConfigErrors) as caught:
        Verifier(GenesysOptions(conversation="detail.["))
    assert [problem.where for problem in caught.value.problems] == [
        "region",
        "client_id",
        "client_secret",
        "conversation",
    ]


def test_a_client_id_with_a_colon_is_refused(genesys):
    with pytest.raises(ConfigError, match="has a colon"):
        Verifier(options(genesys, client_id=Secret("a:b")))


async def test_nothing_secret_is_logged_whatever_goes_wrong(genesys, caplog):
    caplog.set_level(logging.DEBUG)
    said = ""
    for trouble in (401, 403, 404, 429, 500, "hangs_up"):
        async with bench(genesys) as made:
            genesys.status = trouble if isinstance(trouble, int) else 0
            genesys.hangs_up = trouble == "hangs_up"
            await made.sink.deliver([delivery()])
            parts = (made.sink, made.verifier, made.verifier.lookups, made.verifier._api)
            said += repr([vars(part) for part in parts])
    said += repr([vars(record) for record in caplog.records])
    assert "oncebridge.genesys" in said
    for secret in (CLIENT_SECRET, CLIENT_ID, "t0ken-of-genesys", "Bearer", "Basic "):
        assert secret not in said
