import json
from collections import Counter
from itertools import islice

import pytest

from oncebridge import Gateway, Rule, Verdict
from oncebridge.genesys.simulator import LOOK_ALIKES, REPEATS, Label, Simulated, simulate
from oncebridge.stores.memory import MemoryStore

RULE = {
    "name": "genesys",
    "key": "content",
    "ignore": ["detail.timestamp", "detail.metadata"],
    "scope": "organisation",
}
SEEDS = [0, 1, 2, 7, 2**64 + 1]


def firsts(arrivals: list[Simulated]) -> dict[int, Simulated]:
    found: dict[int, Simulated] = {}
    for one in arrivals:
        found.setdefault(one.truth, one)
    return found


def test_a_seed_gives_the_same_stream_every_time():
    assert list(simulate(3, 500)) == list(simulate(3, 500))


def test_a_longer_stream_begins_with_the_shorter_one():
    assert list(simulate(3, 300)) == list(islice(simulate(3, 900), 300))


def test_another_seed_gives_another_stream():
    assert {one.raw for one in simulate(3, 100)}.isdisjoint(one.raw for one in simulate(4, 100))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_few_hundred_arrivals_hold_every_label(seed):
    labels = {one.label for one in simulate(seed, 300)}

    assert labels == set(Label)
    assert {Label.FIRST} | REPEATS | LOOK_ALIKES == set(Label)


def test_about_a_third_are_repeats_or_as_many_as_asked_for():
    def share(**how) -> float:
        return sum(one.label in REPEATS for one in simulate(5, 5000, **how)) / 5000

    assert share() == pytest.approx(0.3, abs=0.03)
    assert share(repeats=0.6) == pytest.approx(0.6, abs=0.05)
    assert share(repeats=0) == 0


def test_a_share_of_one_or_more_is_refused():
    with pytest.raises(ValueError, match="repeats"):
        list(simulate(1, 1, repeats=1))


@pytest.mark.parametrize("seed", SEEDS)
def test_arrivals_come_in_order_and_no_repeat_before_its_first(seed):
    arrivals = list(simulate(seed, 1000))

    assert [one.at_ms for one in arrivals] == sorted(one.at_ms for one in arrivals)
    assert not any(one.label in REPEATS for one in firsts(arrivals).values())
    assert sum(one.label not in REPEATS for one in arrivals) == len(firsts(arrivals))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_truth_is_topic_and_body_and_nothing_else(seed):
    bodies: dict[int, set[str]] = {}
    for one in simulate(seed, 1000):
        detail = json.loads(one.raw, parse_int=float)["detail"]
        said = json.dumps([detail["topicName"], detail["eventBody"]], sort_keys=True)
        bodies.setdefault(one.truth, set()).add(said)

    assert all(len(spellings) == 1 for spellings in bodies.values())
    assert len(set.union(*bodies.values())) == len(bodies)


def test_a_repeat_differs_from_its_first_as_its_label_says():
    arrivals = list(simulate(11, 2000))
    first = firsts(arrivals)
    for one in arrivals:
        then, now = json.loads(first[one.truth].raw), json.loads(one.raw)
        changed = {name for name in then | now if then.get(name) != now.get(name)}
        match one.label:
            case Label.REDELIVERY:
                assert one.raw == first[one.truth].raw
            case Label.REORDERED:
                assert one.raw != first[one.truth].raw
                assert not changed
            case Label.REPLAY:
                assert changed == {"replay-name"}
            case Label.RE_EMISSION:
                assert {"id", "detail"} <= changed <= {"id", "time", "detail"}
            case Label.SECOND_INTEGRATION:
                assert {"id", "source"} <= changed <= {"id", "source", "region", "time", "detail"}


def test_a_look_alike_resembles_an_event_of_the_same_topic():
    arrivals = list(simulate(11, 2000))
    first = firsts(arrivals)
    for one in arrivals:
        assert (one.resembles is not None) == (one.label in LOOK_ALIKES)
        if one.resembles in first:
            then, now = json.loads(first[one.resembles].raw), json.loads(one.raw)
            assert one.resembles != one.truth
            assert then["detail-type"] == now["detail-type"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("batch", [1, 25])
async def test_a_gateway_passes_each_logical_event_on_once(seed, batch):
    arrivals = list(simulate(seed, 600))
    truths = {one.raw: one.truth for one in arrivals}
    taken: Counter[int] = Counter()

    async def deliver(event) -> None:
        taken[truths[event.raw]] += 1

    outcomes = []
    gateway = Gateway(store=MemoryStore(), sink=deliver, rules=[Rule.parse(RULE)])
    async with gateway:
        for at in range(0, len(arrivals), batch):
            raws = [one.raw for one in arrivals[at : at + batch]]
            outcomes += await gateway.process(raws)

    assert taken == Counter(firsts(arrivals).keys())
    for one, outcome in zip(arrivals, outcomes, strict=True):
        repeat = one.label in REPEATS
        assert outcome.verdict is (Verdict.DUPLICATE if repeat else Verdict.DELIVERED), one.label
