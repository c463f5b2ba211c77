"""One place decides: each step by itself, and that `explain` says what the gateway then does."""

import asyncio
import json
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.cli.worlds import setup_of
from tests.faults.doubles import CountingDice, VirtualLoop
from tests.size import sized

from oncebridge import Gateway, Rule, Settings, Verdict
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.decide import Action, Policy, Step, after_claim, after_entity, first_step
from oncebridge.engine.memos import NO_STATE, EntityState
from oncebridge.events.access import AllowOptions, SenderAllowlist
from oncebridge.events.event import read
from oncebridge.events.framing import RawRecord
from oncebridge.events.key import Part
from oncebridge.events.rules import Plan, Span
from oncebridge.operate.explain.expected_verdict import contents
from oncebridge.operate.explain.explainer import explain
from oncebridge.operate.explain.words import summary
from oncebridge.operate.identity import Identities
from oncebridge.operate.resend import Resender
from oncebridge.stores.api import (
    Busy,
    Claim,
    Commits,
    Duplicate,
    Fate,
    Held,
    Mismatch,
    NoAnswer,
    Releases,
    Wants,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing import ManualClock

ENFORCE, SHADOW = Policy(max_attempts=2), Policy(is_shadow=True, max_attempts=2)
OPEN = Policy(sends_without_store=True)
KEY, ENTITY = b"key", b"entity"
SECOND = 1000


def plan(action="deduplicate", on_conflict="deliver", **more):
    spec = {"latest": {"entity": "detail.e", "version": "detail.v"}} if "entity" in more else {}
    spec |= {"quiet": {"entity": "detail.e", "state": "detail.s", "for": "1s"}} if spec else {}
    rule = Rule.parse({"name": "one", "key": "id", "on_conflict": on_conflict, **spec})
    parts = more.pop("parts", (Part(KEY, b"mine"),))
    return Plan(rule, action, parts, (Span(60 * SECOND, 0),) * len(parts), **more)


def claim(attempts=1):
    return Claim(b"token", (Held(KEY, b"generation", attempts, b""),), 0)


# --- the first step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "policy", "action", "verdict"),
    [
        (plan(), ENFORCE, Action.CLAIM, Verdict.DELIVERED),
        (plan("dead"), ENFORCE, Action.CLAIM, Verdict.DELIVERED),
        (plan("dead", parts=()), ENFORCE, Action.BURY, Verdict.DEAD),
        (plan("dead", parts=()), SHADOW, Action.SEND, Verdict.DEAD),
        (plan("bypass", parts=()), ENFORCE, Action.SEND, Verdict.BYPASSED),
        (plan("discard", parts=()), ENFORCE, Action.SETTLE, Verdict.DISCARDED),
        (plan("discard", parts=()), SHADOW, Action.SEND, Verdict.DISCARDED),
        (plan("discard", parts=(), refused=True), SHADOW, Action.SETTLE, Verdict.DISCARDED),
    ],
)
def test_the_first_step(given, policy, action, verdict):
    step = first_step(given, policy)
    assert (step.action, step.verdict) == (action, verdict)
    assert step.plan is (given if action is Action.CLAIM else None)


# --- after a claim --------------------------------------------------------------------------

DUPLICATE, BUSY = Duplicate(KEY, Fate.DELIVERED, b""), Busy(KEY, 5)


@pytest.mark.parametrize(
    ("given", "answer", "policy", "action", "verdict"),
    [
        (plan(), claim(), ENFORCE, Action.SEND, Verdict.DELIVERED),
        (plan(), claim(2), ENFORCE, Action.SEND, Verdict.DELIVERED),
        (plan(), claim(3), ENFORCE, Action.BURY, Verdict.DEAD),
        (plan(), claim(3), Policy(), Action.SEND, Verdict.DELIVERED),
        (plan(), claim(3), SHADOW, Action.SEND, Verdict.DELIVERED),
        (plan(entity=ENTITY), claim(), ENFORCE, Action.CLAIM_ENTITY, Verdict.DELIVERED),
        (plan(entity=ENTITY), claim(3), ENFORCE, Action.BURY, Verdict.DEAD),
        (plan(entity=ENTITY), claim(3), SHADOW, Action.CLAIM_ENTITY, Verdict.DELIVERED),
        (plan("dead"), claim(), ENFORCE, Action.BURY, Verdict.DEAD),
        (plan("dead"), claim(), SHADOW, Action.BURY, Verdict.DEAD),
        (plan(), DUPLICATE, ENFORCE, Action.SETTLE, Verdict.DUPLICATE),
        (plan(), DUPLICATE, SHADOW, Action.SEND, Verdict.DUPLICATE),
        (plan("dead"), DUPLICATE, SHADOW, Action.SETTLE, Verdict.DUPLICATE),
        (plan(), BUSY, ENFORCE, Action.RETURN, Verdict.BUSY),
        (plan(), BUSY, SHADOW, Action.SEND, Verdict.BUSY),
        (plan("dead"), BUSY, SHADOW, Action.RETURN, Verdict.BUSY),
        (plan(), NoAnswer("away"), ENFORCE, Action.RETURN, Verdict.FAILED),
        (plan(), NoAnswer("away"), OPEN, Action.SEND, Verdict.DELIVERED),
        (plan("dead"), NoAnswer("away"), OPEN, Action.BURY, Verdict.DEAD),
    ],
)
def test_the_step_after_a_claim(given, answer, policy, action, verdict):
    step = after_claim(given, answer, policy)
    assert (step.action, step.verdict) == (action, verdict)
    assert step.is_unprotected == (isinstance(answer, NoAnswer) and action is Action.SEND)


def test_a_mismatch_leads_to_a_claim_under_another_key():
    given = plan()
    step = after_claim(given, Mismatch(KEY, b""), ENFORCE)
    assert (step.action, step.verdict) == (Action.CLAIM, Verdict.CONFLICT)
    assert step.plan == given.in_conflict(KEY)
    assert step.plan.key != KEY


@pytest.mark.parametrize(
    ("on_conflict", "attempts", "policy", "action", "reason"),
    [
        ("deliver", 1, ENFORCE, Action.SEND, ""),
        ("deliver", 3, ENFORCE, Action.BURY, "attempts"),
        ("dead", 1, ENFORCE, Action.BURY, "conflict"),
        ("dead", 1, SHADOW, Action.SEND, ""),
        ("duplicate", 1, ENFORCE, Action.DROP, ""),
        ("duplicate", 3, ENFORCE, Action.BURY, "attempts"),
        ("duplicate", 3, SHADOW, Action.SEND, ""),
    ],
)
def test_a_conflict_that_is_claimed(on_conflict, attempts, policy, action, reason):
    given = plan(on_conflict=on_conflict).in_conflict(KEY)
    step = after_claim(given, claim(attempts), policy, is_conflict=True)
    assert step == Step(action, Verdict.CONFLICT, reason)


# --- after the entity's claim ---------------------------------------------------------------

NOW_MS = 1_700_000_000_000
STATE = EntityState().after_delivery(plan(entity=ENTITY, version=("number", 2), state=b"a"), NOW_MS)
AHEAD = ("instant", (NOW_MS + 10 * 86_400_000) * 1000)


@pytest.mark.parametrize(
    ("state", "own", "on_conflict", "ends"),
    [
        (NO_STATE, (("number", 1), b"a"), "deliver", (Action.SEND, Verdict.DELIVERED)),
        (STATE, (("number", 3), b"b"), "deliver", (Action.SEND, Verdict.DELIVERED)),
        (STATE, (("number", 2), b"b"), "deliver", (Action.SEND, Verdict.DELIVERED)),
        (STATE, (("number", 1), b"b"), "deliver", (Action.DROP, Verdict.STALE)),
        (STATE, (("number", 3), b"a"), "deliver", (Action.DROP, Verdict.UNCHANGED)),
        (STATE, (("instant", 1), b"b"), "deliver", (Action.SEND, Verdict.CONFLICT)),
        (STATE, (("instant", 1), b"b"), "dead", (Action.BURY, Verdict.CONFLICT)),
        (NO_STATE, (AHEAD, b"b"), "duplicate", (Action.BURY, Verdict.CONFLICT)),
    ],
)
@pytest.mark.parametrize("is_conflict", [False, True])
def test_the_step_after_the_claim_of_an_entity(state, own, on_conflict, ends, is_conflict):
    (version, body), (enforced, verdict) = own, ends
    given = plan(on_conflict=on_conflict, entity=ENTITY, version=version, state=body)
    reason = "version" if verdict is Verdict.CONFLICT else ""
    if verdict is Verdict.DELIVERED and is_conflict:
        verdict = Verdict.CONFLICT
    for policy, action in ((ENFORCE, enforced), (SHADOW, Action.SEND)):
        step = after_entity(given, state, NOW_MS + 1, policy, is_conflict=is_conflict)
        assert step == Step(action, verdict, reason)


# --- what is said, and what is done -----------------------------------------------------------

WINDOW_MS = 600_000
LATEST = {"latest": {"entity": "detail.e", "version": "detail.v"}}
QUIET = {"quiet": {"entity": "detail.e", "state": "detail.s", "for": "500ms"}}
ENTITIES = [LATEST, {}, QUIET, LATEST | QUIET, {"entity": "detail.e"}]
KEYS = ["content", "id", ["detail.k"], ["detail.k", "detail.s"]]


@st.composite
def tiers(draw):
    tier = {
        "key": draw(st.sampled_from(KEYS)),
        "check": draw(st.sampled_from([True, True, False])),
        "window": "10m",
    }
    return tier | draw(st.sampled_from([{}, {"sliding": True, "max_window": "20m"}]))


@st.composite
def rules(draw):
    """Draw the rules of a route: perhaps one that refuses senders, and one for all events."""
    allowed = AllowOptions(sources=["shop"], otherwise=draw(st.sampled_from(["dead", "discard"])))
    guards = [Rule.for_refused_senders(SenderAllowlist(allowed))] if draw(st.booleans()) else []
    spec = draw(st.sampled_from([*[None] * 18, {"discard": True}, {"key": "none"}]))
    if spec is None:
        spec = {"tiers": draw(st.lists(tiers(), min_size=1, max_size=3))}
        spec |= {
            "on_missing": draw(st.sampled_from(["content", "deliver", "dead"])),
            "on_conflict": draw(st.sampled_from(["deliver", "dead", "duplicate"])),
            "on_replay": draw(st.sampled_from(["deduplicate", "deliver", "separate"])),
            **draw(st.sampled_from(ENTITIES)),
        }
    return [*guards, Rule.parse({"name": "one", **spec})]


policies = st.builds(
    Settings,
    mode=st.sampled_from(["enforce", "enforce", "shadow"]),
    max_attempts=st.integers(1, 3),
    order=st.sampled_from(["none", "entity"]),
    patience=st.just(timedelta(0)),
)


@st.composite
def events(draw):
    detail = {
        "k": draw(st.sampled_from([*[1] * 7, None])),
        "e": draw(st.sampled_from([*["E"] * 7, None])),
        "v": draw(st.sampled_from([2, 1, 2.5, 1, 2, "2023-11-14T22:13:20Z", "2023-11-20", "odd"])),
        "s": draw(st.sampled_from(["a", "b"])),
    }
    event = {
        "id": draw(st.sampled_from([*["i1"] * 7, None])),
        "source": draw(st.sampled_from([*["shop"] * 7, "stranger"])),
        "detail-type": "A",
        "replay-name": draw(st.sampled_from([None, None, None, "r"])),
        "detail": {name: value for name, value in detail.items() if value is not None},
    }
    return json.dumps({name: value for name, value in event.items() if value is not None}).encode()


@st.composite
def records(
    draw, ends=(*Fate, "released", "held"), lefts=(5_000, 5_000, 1, 0), attempts=(1, 0, 2, 3)
):
    """Draw how a record came to be: attempts, how the last one ended, and until when that counts."""
    return {
        "attempts": draw(st.sampled_from(attempts)),
        "ended": draw(st.sampled_from(ends)),
        "left_ms": draw(st.sampled_from(lefts)),
        "hash": draw(st.sampled_from(["other", "other", "own", ""])),
        "memo": draw(st.sampled_from([b"", b'["a1",1699999000000]'])),
    }


class World:
    """A route with a store in which records were made, and its gateway."""

    def __init__(self, setup, rules, policy):
        (route,) = setup.routes
        self.route = replace(route, rules=tuple(rules), settings=policy)
        self.setup = replace(setup, routes=(self.route,))
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.dead = MemoryDeadLetters()
        self.sent = []
        self.gateway = Gateway(
            store=self.store,
            sink=self.take,
            dead=self.dead,
            rules=rules,
            route=route.name,
            settings=policy,
            clock=self.clock,
            dice=CountingDice(),
        )

    async def take(self, event):
        self.sent.append(event.raw)

    def way(self, raw):
        (way,) = Identities(self.setup).of(read(raw))
        return way

    async def make_record(self, key, hash_, memo, made, now_ms):
        """Make one record; what is left of it is counted from *now_ms*."""
        clock, generation = self.clock, b"g" * 16
        token = b""
        for attempt in range(1, made["attempts"] + 1):
            token = attempt.to_bytes(16)
            lasts_ms = now_ms + made["left_ms"] - clock() if attempt == made["attempts"] else 1
            wants = Wants([key], token, generation, lasts_ms, 3_600_000, memo, hash_)
            await self.store.claim(wants)
            if attempt < made["attempts"]:
                clock.advance(1)
        left_ms = now_ms + made["left_ms"] - clock()
        if made["ended"] == "released":
            await self.store.release(Releases([key], token, left_ms, 3_600_000))
        elif made["ended"] != "held":
            ended = Commits([key], generation, made["ended"], left_ms, left_ms + 60_000)
            await self.store.commit(ended)


def state_of(world, raw, at_ms):
    """Return the memo of an entity of which the event *raw* was delivered."""
    way = world.way(raw)
    plan = way.plan if way.plan.entity else None
    return EntityState().after_delivery(plan, at_ms).write() if plan is not None else b""


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return setup_of(tmp_path_factory.mktemp("world"))


worlds = st.fixed_dictionaries(
    {
        "rules": rules(),
        "policy": policies,
        "made": st.lists(records(), min_size=3, max_size=3),
        "conflicts": st.lists(records(attempts=[0, 0, 0, 1, 2]), min_size=3, max_size=3),
        "entity": records(["released", "released", "held"], [0, 0, 0, 0, 1, 5_000]),
        "earlier": st.tuples(
            events(), st.sampled_from([0, 300, 499, 500, WINDOW_MS - 1, WINDOW_MS])
        ),
    }
)


async def world_of(setup, raw, drawn):
    """Return a world with records under the keys of the event *raw*, and of its entity."""
    world = World(setup, drawn["rules"], drawn["policy"])
    way, now_ms = world.way(raw), world.clock() + 1_000
    tiers = len(way.plan.parts)
    for at, (key, own) in enumerate(contents(way).items()):  # the tiers, and then their conflicts
        one = drawn["made" if at < tiers else "conflicts"][at % tiers]
        hash_ = {"own": own, "other": b"o" * len(own), "": b""}[one["hash"]]
        await world.make_record(key, hash_, one["memo"], one, now_ms)
    if way.plan.entity:
        before, ago_ms = drawn["earlier"]
        memo = state_of(world, before, now_ms - ago_ms)
        await world.make_record(way.plan.entity, b"", memo, drawn["entity"], now_ms)
    world.clock.now_ms = now_ms
    return world


def run(test):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(test)


@settings(max_examples=sized(300, 5_000), deadline=None)
@given(raw=events(), drawn=worlds)
def test_what_is_said_to_happen_is_what_the_gateway_then_does(setup, raw, drawn):
    async def test():
        world = await world_of(setup, raw, drawn)
        said = [one async for one in explain([RawRecord(raw, 1, 0, 1)], world.setup, world.store)]
        judged = said[0].judged
        async with world.gateway:
            (outcome,) = await world.gateway.process([raw])
            assert world.gateway.books.balance
        assert judged.verdict is outcome.verdict
        assert (judged.action is Action.SEND) == outcome.forwarded == bool(world.sent)
        assert (judged.action is Action.BURY) == bool(await world.dead.list())
        assert (judged.action is Action.RETURN) == (not outcome.acknowledge)
        if outcome.verdict is Verdict.DUPLICATE:
            assert judged.first == outcome.first
        if judged.is_shadow:
            assert (drawn["policy"].mode, outcome.forwarded) == ("shadow", True)
        assert summary(said[0])

    run(test())


@settings(max_examples=sized(100, 1_000), deadline=None)
@given(raw=events(), drawn=worlds)
def test_what_can_be_sent_again_is_sent(setup, raw, drawn):
    async def logged(_intent):
        pass

    async def test():
        world = await world_of(setup, raw, drawn)
        event, way = read(raw), world.way(raw)
        async with world.gateway:
            again = Resender(world.store, {way.route.name: world.gateway}, before=logged)
            resent = await again.send(event, way)
            assert resent.is_sent == (not resent.why_not)
            assert bool(resent.intent.why_not) == (not world.sent)

    run(test())
