import asyncio

import pytest

from oncebridge.engine.cpu_turns import TURN_S, CpuTurns


def work(cpu_turns, seconds):
    """Keep the loop busy for as long, as costly work does."""
    while cpu_turns.used_s < seconds:
        pass


async def test_turns_are_taken_one_at_a_time_in_the_order_of_asking():
    cpu_turns, seen = CpuTurns(), []

    async def take(name):
        for part in range(3):
            async with cpu_turns:
                seen.append((part, name))

    await asyncio.gather(*[take(name) for name in "abc"])
    assert seen == [(part, name) for part in range(3) for name in "abc"]


async def test_after_a_long_turn_the_loop_is_free_for_as_long():
    cpu_turns, loop, times = CpuTurns(), asyncio.get_running_loop(), []

    async def take():
        async with cpu_turns:
            times.append(loop.time())
            work(cpu_turns, 2 * TURN_S)
            times.append(loop.time())

    await asyncio.gather(take(), take())
    began, ended, began_next, _ = times
    assert began_next - ended >= 0.9 * (ended - began)


async def test_others_have_the_loop_between_any_two_turns():
    cpu_turns, turns, others = CpuTurns(), [], []

    async def take():
        for _ in range(5):
            async with cpu_turns:
                turns.append(len(others))

    async def other():
        while len(turns) < 5:
            others.append(None)
            await asyncio.sleep(0)

    await asyncio.gather(take(), other())
    assert turns == sorted(set(turns)), "something else ran between any two"


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_turn_ends_with_an_error_or_a_cancellation(is_long):
    cpu_turns = CpuTurns()

    async def take():
        async with cpu_turns:
            work(cpu_turns, TURN_S if is_long else 0)
            raise ZeroDivisionError

    async def take_and_rest():
        async with cpu_turns:
            work(cpu_turns, 100 * TURN_S)

    with pytest.raises(ZeroDivisionError):
        await take()
    resting = asyncio.create_task(take_and_rest())
    waiting = asyncio.create_task(take_and_rest())
    await asyncio.sleep(0)
    resting.cancel()
    waiting.cancel()
    await asyncio.gather(resting, waiting, return_exceptions=True)
    async with asyncio.timeout(5), cpu_turns:
        pass
