import asyncio

import pytest
from tests.faults.doubles import now, virtual

from oncebridge.engine.ordering import LaneRunner


class Bringing:
    """Record what is brought together, and do with each item as *does* says."""

    def __init__(self, does):
        self.batches = []
        self._does = does

    async def __call__(self, items, tell):
        self.batches.append(items)
        await asyncio.gather(*[self._one(at, item, tell) for at, item in enumerate(items)])

    async def _one(self, at, item, tell):
        is_done = await self._does(item)
        if is_done is not None:
            tell(at, is_done)


async def done_at_once(_):
    return True


def slowly(**seconds):
    """Take so many seconds for the items named; none for the others."""

    async def does(item):
        await asyncio.sleep(seconds.get(item, 0))
        return True

    return does


async def run(lanes, does):
    bring = Bringing(does)
    await LaneRunner(lanes, bring).run()
    return bring.batches


@virtual
async def test_where_there_is_nothing_nothing_is_brought():
    assert await run([], done_at_once) == []
    assert await run([[], []], done_at_once) == []


@virtual
async def test_what_may_start_together_does():
    lanes = [["a1", "a2", "a3"], ["b1", "b2"], ["c1"]]
    assert await run(lanes, done_at_once) == [["a1", "b1", "c1"], ["a2", "b2"], ["a3"]]


@virtual
async def test_lanes_do_not_wait_for_each_other():
    batches = await run([["a1", "a2"], ["b1", "b2", "b3"]], slowly(a1=10))
    assert batches == [["a1", "b1"], ["b2"], ["b3"], ["a2"]]


@virtual
async def test_the_next_one_starts_when_the_one_before_is_done_and_not_when_its_batch_is():
    started = {}

    async def does(item):
        started[item] = now()
        await asyncio.sleep({"a1": 1, "b1": 5}.get(item, 0))
        return True

    began = now()
    await run([["a1", "a2"], ["b1", "b2"]], does)
    assert {item: at - began for item, at in started.items()} == pytest.approx(
        {"a1": 0, "b1": 0, "a2": 1, "b2": 5}
    )


@pytest.mark.parametrize("told", [False, None])
@virtual
async def test_where_one_is_not_done_the_rest_of_its_lane_is_left_alone(told):
    async def does(item):
        return told if item == "a2" else True

    batches = await run([["a1", "a2", "a3"], ["b1", "b2", "b3"]], does)
    assert batches == [["a1", "b1"], ["a2", "b2"], ["b3"]]


@virtual
async def test_it_ends_when_the_last_batch_is_back_and_not_when_all_is_told():
    ended = []

    async def bring(_, tell):
        tell(0, True)
        await asyncio.sleep(3)
        ended.append(now())

    await LaneRunner([["a1"]], bring).run()
    assert ended == [now()]


class Ending(Exception):
    """An error of the work."""


def going_on(seconds, log):
    """Make work that breaks at `bad`; whatever else is under way takes its time to leave."""

    async def does(item):
        if item == "bad":
            await asyncio.sleep(1)
            raise Ending
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(seconds)
            log.append(item)
            raise
        return True

    return does


@virtual
async def test_an_error_is_raised():
    async def does(_):
        raise Ending

    began = now()
    with pytest.raises(Ending):
        await run([["a1", "a2"], ["b1"]], does)
    assert now() == began


@virtual
async def test_an_error_ends_the_others_and_waits_until_they_have_told_what_was_done():
    log = []
    does = going_on(2, log)

    async def bring(items, tell):
        if items == ["first", "first"]:
            tell(0, True)
            await asyncio.sleep(0.1)
            tell(1, True)
        else:
            await does(items[0])

    began = now()
    with pytest.raises(Ending):
        await LaneRunner([["first", "slow"], ["first", "bad"]], bring).run()
    assert log == ["slow"]
    assert now() - began == pytest.approx(0.1 + 1 + 2)


@virtual
async def test_of_two_errors_at_once_one_is_raised_and_none_is_unheard():
    async def bring(items, tell):
        if len(items) == 2:
            tell(0, True)
            await asyncio.sleep(0)
            tell(1, True)
            return
        await asyncio.sleep(1)
        raise Ending

    with pytest.raises(Ending):
        await LaneRunner([["a1", "a2"], ["b1", "b2"]], bring).run()


@virtual
async def test_who_breaks_it_off_waits_until_all_is_told():
    log = []
    work = asyncio.create_task(run([["a1", "a2"]], going_on(2, log)))
    await asyncio.sleep(1)
    began = now()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert log == ["a1"]
    assert now() - began == pytest.approx(2)
