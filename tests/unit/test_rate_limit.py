import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.faults.doubles import now, virtual

from oncebridge.engine.rate_limit import RateLimit


async def wait(pace, count):
    await asyncio.sleep(pace.take(count, now()))


@pytest.mark.parametrize("rate", [0.5, 1.0, 7.0, 100.0, 5000.0])
@virtual
async def test_so_many_events_at_such_a_rate_take_their_time(rate):
    pace, began = RateLimit(rate), now()
    count = min(int(rate * 20), 2000)
    for _ in range(count):
        await wait(pace, 1)
    assert now() - began == pytest.approx((count - 1) / rate - 0.1, abs=1 / rate + 0.01)


@virtual
async def test_many_who_ask_at_once_are_served_in_the_order_of_asking():
    pace, served = RateLimit(10), []

    async def ask(name):
        await wait(pace, 1)
        served.append((name, now()))

    began = now()
    await asyncio.gather(*[ask(name) for name in range(30)])
    assert [name for name, _ in served] == list(range(30))
    gaps = [at - began for _, at in served]
    assert gaps[:2] == [0, 0], "a little room for a burst"
    assert gaps[-1] == pytest.approx(2.8)


@virtual
async def test_a_pause_saves_up_a_tenth_of_a_second_and_no_more():
    pace = RateLimit(100)
    await wait(pace, 1)
    await asyncio.sleep(3600)
    began = now()
    for _ in range(11):
        await wait(pace, 1)
    assert now() == pytest.approx(began)
    await wait(pace, 1)
    assert now() - began == pytest.approx(0.01, abs=1e-6)


@virtual
async def test_a_batch_passes_whole_and_the_next_one_waits_for_all_of_it():
    pace, began = RateLimit(10), now()
    await wait(pace, 50)
    assert now() == began
    await wait(pace, 1)
    assert now() - began == pytest.approx(4.9)


@virtual
async def test_one_who_stops_waiting_does_not_let_the_others_go_too_early():
    pace, began, served = RateLimit(1), now(), []

    async def ask():
        await wait(pace, 1)
        served.append(now() - began)

    tasks = [asyncio.create_task(ask()) for _ in range(5)]
    await asyncio.sleep(0.5)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert served == pytest.approx([0, 0.9, 2.9, 3.9])


@virtual
async def test_asking_how_long_it_would_take_reserves_nothing():
    pace = RateLimit(10)
    assert pace.left_s(now()) == 0
    await wait(pace, 21)
    for _ in range(5):
        assert pace.left_s(now()) == pytest.approx(2)
    assert pace.take(1, now()) == pytest.approx(2)
    assert pace.left_s(now()) == pytest.approx(2.1)


@given(
    st.floats(0.1, 1000),
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 20)), min_size=1, max_size=60),
)
def test_no_stretch_of_time_sees_more_than_the_rate_and_one_burst(rate, asked):
    pace, at, sent = RateLimit(rate), 50.0, []
    for passes, count in asked:
        at += passes
        sent.append((at + pace.take(count, at), count))
    moments = [moment for moment, _ in sent]
    assert moments == sorted(moments), "served in the order of asking"
    for first in range(len(sent)):
        total = 0
        for moment, count in sent[first:]:
            # What goes at this moment was paid for by the time since the first, the burst,
            # and the batch itself, which goes whole.
            assert total <= (moment - sent[first][0] + 0.1) * rate + 1e-6
            total += count
