"""The judge says of each arrival what a gateway says that passes on everything at once."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import CountingDice, VirtualLoop
from tests.size import examples

from oncebridge import Gateway, Rule, Verdict
from oncebridge.audit.engine import audit
from oncebridge.audit.judge import Judge
from oncebridge.audit.rows import ComplexPlan
from oncebridge.audit.verdicts import UNKEYED
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.events.event import read
from oncebridge.events.rules import RuleSet
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing import ManualClock

MINUTE = 60_000
START_MS = 1_790_000_000_000

# Gaps hit windows of 7 and 14 minutes to the millisecond. A register is kept for 60, and when
# a store forgets it after that is its own affair: no sum of gaps lies there.
GAPS = [0, 1, 200, 499, 500, 700, 7 * MINUTE, 120 * MINUTE]

SHORT, LONG = {"window": "7m"}, {"window": "60m"}
TIERS = [{"key": "id", **SHORT}, {"key": "content", "window": "14m", "ignore": ["detail.noise"]}]
LATEST = {"latest": {"entity": "detail.e", "version": "detail.v"}}
QUIET = {"quiet": {"entity": "detail.e", "state": "detail.s", "for": "500ms"}}

RULES = {
    "content": {"ignore": ["detail.noise"], **SHORT},
    "id": {"key": "id", **SHORT},
    "id, conflicts dead": {"key": "id", "on_conflict": "dead", **SHORT},
    "id, conflicts dropped": {"key": "id", "on_conflict": "duplicate", **SHORT},
    "id, unchecked": {"key": "id", "check": False, **SHORT},
    "fields": {"key": ["detail.k"], "window": "14m"},
    "fields or deliver": {"key": ["detail.k"], "on_missing": "deliver", **SHORT},
    "fields or dead": {"key": ["detail.k"], "on_missing": "dead", **SHORT},
    "fields, checked": {"key": ["detail.k", "detail.e"], "check": True, **SHORT},
    "two tiers": {"tiers": TIERS},
    "three tiers": {"tiers": [*TIERS, {"key": ["detail.k"], "check": True, **LONG}]},
    "sliding": {"ignore": ["detail.noise"], **SHORT, "sliding": True, "max_window": "14m"},
    "newest wins": {"key": "id", **LATEST, **LONG},
    "quiet": {"key": "content", **QUIET, **LONG},
    "both": {"key": "content", "ignore": ["detail.noise"], **LATEST, **QUIET, **LONG},
    "both in tiers": {"tiers": [TIERS[0], {"key": "content", **LONG}], **LATEST, **QUIET},
    "replays pass": {"on_replay": "deliver", **SHORT},
    "replays apart": {"on_replay": "separate", **LATEST, **LONG},
    "bypass": {"key": "none"},
    "discard": {"discard": True},
}


def rule(name, topic=None):
    match = {} if topic is None else {"match": {"detail-type": [topic]}}
    return Rule.parse({"name": name, **RULES[name], **match})


@st.composite
def streams(draw, most=25):
    """Draw arrivals that have much in common, each with the time since the one before."""
    count = draw(st.integers(1, most))
    return [draw(arrivals()) for _ in range(count)]


@st.composite
def arrivals(draw):
    detail = {
        "k": draw(st.sampled_from([1, 2, None])),
        "e": draw(st.sampled_from(["E", "F", None])),
        "v": draw(st.sampled_from([1, 2, 3, 2.5, "2026-01-01T00:00:00Z", "odd"])),
        "s": draw(st.sampled_from(["a", "b"])),
        "noise": draw(st.sampled_from([1, 2])),
    }
    event = {
        "id": draw(st.sampled_from(["i1", "i2", "i3", None])),
        "source": "shop",
        "detail-type": draw(st.sampled_from(["A", "B"])),
        "replay-name": draw(st.sampled_from([None, None, "r"])),
        "detail": {name: value for name, value in detail.items() if value is not None},
    }
    event = {name: value for name, value in event.items() if value is not None}
    return draw(st.sampled_from(GAPS)), json.dumps(event).encode()


async def _take(_event):
    """Take everything at once."""


def by_a_gateway(rules, stream):
    """Let each arrival pass a real gateway with a store in memory, one at a time."""

    async def run():
        clock = ManualClock(START_MS)
        gateway = Gateway(
            store=MemoryStore(clock=clock),
            sink=_take,
            dead=MemoryDeadLetters(),
            rules=rules,
            route="audit",
            clock=clock,
            dice=CountingDice(),
        )
        verdicts = []
        async with gateway:
            for gap, raw in stream:
                clock.advance(gap)
                (outcome,) = await gateway.process([raw])
                # An audit counts each arrival that has no key as dead, and not only the first.
                is_dead = gateway.rules.plan(read(raw)).action == "dead"
                verdicts.append(Verdict.DEAD if is_dead else outcome.verdict)
        return verdicts

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def by_a_judge(rules, stream):
    plans, judge, at_ms = RuleSet(rules, namespace="audit"), Judge(), START_MS
    verdicts = []
    for number, (gap, raw) in enumerate(stream):
        at_ms += gap
        plan = plans.plan(read(raw))
        if plan.parts:
            found = judge.judge(number, at_ms, ComplexPlan.of(plan).plan(plan.rule))
            verdicts.append(found.verdict)
        else:
            verdicts.append(UNKEYED[plan.action])
    return verdicts


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=examples(25), deadline=None)
@given(stream=streams())
def test_one_rule_comes_out_as_in_the_gateway(name, stream):
    rules = [rule(name)]
    assert by_a_judge(rules, stream) == by_a_gateway(rules, stream)


@settings(max_examples=examples(50), deadline=None)
@given(stream=streams(), one=st.sampled_from([*RULES]), other=st.sampled_from([*RULES]))
def test_two_rules_that_may_share_keys_come_out_as_in_the_gateway(stream, one, other):
    rules = [rule(one, "A"), rule(other, "B")] if one != other else [rule(one)]
    assert by_a_judge(rules, stream) == by_a_gateway(rules, stream)


# --- through the whole engine ---------------------------------------------------------------


def by_an_audit(rules, stream, folder):
    """Audit the stream as a log with the time of each line, and learn the verdict of each."""
    lines, at_ms = [], START_MS
    for gap, raw in stream:
        at_ms += gap
        lines.append(json.dumps({"logEvents": [{"timestamp": at_ms, "message": raw.decode()}]}))
    path = folder / "recorded.ndjson"
    path.write_text("\n".join(lines))
    verdicts = dict.fromkeys(range(1, len(stream) + 1))

    def note(difference):
        verdicts[int(difference.place.rpartition(":")[2])] = difference.before

    # Another verdict than any rule gives makes every arrival a difference.
    never = Rule.parse({"name": "discarded", "discard": True})
    if any(r.discard for r in rules):
        never = Rule.parse({"name": "bypassed", "key": "none"})
    report = audit([path], rules, candidate=[never], differences=note)
    same = Verdict.DISCARDED if never.discard else Verdict.BYPASSED
    found = [verdict or same for verdict in verdicts.values()]
    assert report.verdicts == {verdict: found.count(verdict) for verdict in set(found)}
    return found


@pytest.mark.parametrize(
    "names",
    [
        ("content", "two tiers"),
        ("id", "id, conflicts dropped"),
        ("fields", "fields, checked"),
        ("both in tiers", "sliding"),
        ("newest wins", "quiet"),
        ("replays apart", "three tiers"),
        ("fields or dead", "replays pass"),
        ("both", "discard"),
    ],
)
@settings(max_examples=examples(3), deadline=None)
@given(data=st.data())
@pytest.mark.full
def test_a_whole_audit_comes_out_as_in_the_gateway(names, data, tmp_path_factory):
    stream = data.draw(st.lists(arrivals(), min_size=30, max_size=120))
    rules = [rule(names[0], "A"), rule(names[1], "B")]
    folder = tmp_path_factory.mktemp("audit")
    assert by_an_audit(rules, stream, folder) == by_a_gateway(rules, stream)
