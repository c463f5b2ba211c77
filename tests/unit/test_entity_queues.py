import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import VirtualLoop, virtual
from tests.size import examples

from oncebridge.engine.ordering import enqueue

X, Y = b"x", b"y"


def is_waiting(task):
    return not task.done()


async def pause():
    for _ in range(5):
        await asyncio.sleep(0)


@virtual
async def test_the_first_in_line_does_not_wait():
    turns = {}
    turn = enqueue(turns, [X])[X]
    await turn.wait_for_previous()
    assert (turn.left, turn.failed, turn.ahead) == (1, False, None)


@virtual
async def test_the_second_waits_until_all_events_of_the_first_are_settled():
    turns = {}
    first, second = enqueue(turns, [X, X])[X], enqueue(turns, [X])[X]
    coming = asyncio.create_task(second.wait_for_previous())
    await pause()
    assert is_waiting(coming)
    first.settled(acknowledged=True)
    await pause()
    assert is_waiting(coming)
    first.settled(acknowledged=True)
    await coming
    assert not second.failed


@virtual
async def test_what_fails_ahead_fails_all_who_stand_behind():
    turns = {}
    line = [enqueue(turns, [X])[X] for _ in range(4)]
    line[0].settled(acknowledged=False)
    for turn in line[1:]:
        await turn.wait_for_previous()
        assert turn.failed
        turn.settled(acknowledged=False)
    assert turns == {}


@virtual
async def test_one_of_several_events_that_fails_is_enough():
    turns = {}
    first, second = enqueue(turns, [X, X, X])[X], enqueue(turns, [X])[X]
    for acknowledged in (True, False, True):
        first.settled(acknowledged=acknowledged)
    await second.wait_for_previous()
    assert second.failed


@virtual
async def test_entities_do_not_wait_for_each_other():
    turns = {}
    enqueue(turns, [X])
    other = enqueue(turns, [Y])[Y]
    await asyncio.wait_for(other.wait_for_previous(), 1)


@virtual
async def test_a_failure_is_forgotten_when_the_line_is_empty():
    turns = {}
    enqueue(turns, [X])[X].settled(acknowledged=False)
    later = enqueue(turns, [X])[X]
    await later.wait_for_previous()
    assert not later.failed


@virtual
async def test_one_that_is_broken_off_while_it_waits_does_not_open_the_way_past_those_ahead():
    turns = {}
    first, second, third = [enqueue(turns, [X])[X] for _ in range(3)]
    coming = asyncio.create_task(third.wait_for_previous())
    second.settled(acknowledged=False)
    await pause()
    assert is_waiting(coming), "the first is still under way"
    fourth = enqueue(turns, [X])[X]
    assert fourth.ahead is third
    first.settled(acknowledged=True)
    await coming
    assert third.failed, "the second was handed back"
    third.settled(acknowledged=False)
    fourth.settled(acknowledged=False)
    assert turns == {}


@virtual
async def test_when_all_behind_are_broken_off_who_comes_new_still_waits_for_the_first():
    turns = {}
    first, *others = [enqueue(turns, [X])[X] for _ in range(4)]
    for turn in others:
        turn.settled(acknowledged=False)
    newcomer = enqueue(turns, [X])[X]
    coming = asyncio.create_task(newcomer.wait_for_previous())
    await pause()
    assert is_waiting(coming)
    first.settled(acknowledged=True)
    await coming
    newcomer.settled(acknowledged=True)
    assert turns == {}


@virtual
async def test_a_very_long_line_that_is_broken_off_ends_without_ado():
    turns = {}
    line = [enqueue(turns, [X])[X] for _ in range(20_000)]
    for turn in line[1:]:
        turn.settled(acknowledged=False)
    assert turns == {X: line[-1]}
    line[0].settled(acknowledged=True)
    await line[-1].done
    assert turns == {}


batches = st.lists(
    st.tuples(
        st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=4),
        st.floats(0, 1),
        st.floats(0, 3),
        st.booleans(),
        st.none() | st.floats(0, 5),
    ),
    max_size=15,
)


class Crowd:
    """Batches that stand, come, work, and are broken off; and what was seen of them."""

    def __init__(self):
        self.turns = {}
        self.inside: dict[bytes, int] = {}
        self.through: dict[bytes, list[int]] = {}

    async def run(self, number, entities, works, is_good):
        own = enqueue(self.turns, entities)
        left = list(entities)
        try:
            for entity, turn in own.items():
                await turn.wait_for_previous()
                assert entity not in self.inside, "two at once"
                self.inside[entity] = number
            await asyncio.sleep(works)
            while left:
                entity = left.pop()
                self.settle(number, entity, own[entity], is_good and not own[entity].failed)
        finally:
            for entity in left:
                self.settle(number, entity, own[entity], is_good=False)

    def settle(self, number, entity, turn, is_good):
        if turn.left == 1 and self.inside.get(entity) == number:
            del self.inside[entity]
        if is_good:
            self.through.setdefault(entity, []).append(number)
        turn.settled(acknowledged=is_good)

    async def wait_for_previous(self, batches):
        tasks = []
        for number, (entities, comes, works, is_good, broken) in enumerate(batches):
            await asyncio.sleep(comes)
            task = asyncio.create_task(self.run(number, entities, works, is_good))
            if broken is not None:
                asyncio.get_running_loop().call_later(broken, task.cancel)
            tasks.append(task)
        return await asyncio.gather(*tasks, return_exceptions=True)


@settings(max_examples=examples(300))
@given(batches)
def test_nobody_overtakes_waits_in_a_circle_or_is_forgotten(batches):
    crowd = Crowd()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:  # a deadlock raises there
        ended = runner.run(crowd.wait_for_previous(batches))
    assert [one for one in ended if isinstance(one, Exception)] == []
    assert crowd.turns == {}
    for numbers in crowd.through.values():
        assert numbers == sorted(numbers), "in the order of arrival"


@pytest.mark.parametrize("times", [1, 3])
@virtual
async def test_nothing_is_remembered_of_those_who_have_gone(times):
    turns = {}
    for _ in range(times):
        own = enqueue(turns, [X, Y, X])
        assert set(turns) == {X, Y}
        for entity in (X, Y, X):
            own[entity].settled(acknowledged=True)
        assert turns == {}
