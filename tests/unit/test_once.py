import asyncio
import functools
import inspect
import json
import threading
from datetime import timedelta

import pytest

from oncebridge import ConfigError, EventError, HandedBack, SinkRejected, from_object, once
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing import ManualClock

LATER_MS = 600_000


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def protect(clock):
    """Protect functions as `once` does, and let go of their loops afterwards."""
    made = []

    def make(function=None, **settings):
        if function is None:
            return functools.partial(make, **settings)
        settings.setdefault("store", MemoryStore(clock=clock))
        protected = once(**settings)(function)
        made.append(protected)
        return protected

    yield make
    for protected in made:
        gateway = inspect.getclosurevars(protected).nonlocals.get("blocking")
        if gateway is not None:
            gateway.close()


# --- plain functions ------------------------------------------------------------------------


def test_the_first_call_runs_and_a_repeat_does_not(protect):
    calls = []

    @protect(key=["detail.id"])
    def charge(order, rate, *, currency):
        calls.append((order, rate, currency))
        return order["id"] * rate

    assert charge({"id": 7}, 2, currency="EUR") == 14
    assert charge({"id": 7}, 2, currency="EUR") is None
    assert charge({"id": 8}, 2, currency="USD") == 16
    assert calls == [({"id": 7}, 2, "EUR"), ({"id": 8}, 2, "USD")]


def test_a_repeat_returns_what_it_is_told_to(protect):
    double = protect(lambda order: order["id"] * 2, otherwise="known", route="double")
    assert [double({"id": 1}), double({"id": 1})] == [2, "known"]


def test_a_result_of_none_is_a_result(protect):
    calls = []
    note = protect(calls.append, otherwise="known", route="note")
    assert note({"id": 1}) is None
    assert note({"id": 1}) == "known"
    assert calls == [{"id": 1}]


def test_after_the_window_the_call_is_made_again(protect, clock):
    calls = []
    note = protect(calls.append, window="1m", route="note")
    note({"id": 1})
    clock.advance(59_000)
    note({"id": 1})
    assert len(calls) == 1
    clock.advance(2_000)
    note({"id": 1})
    assert len(calls) == 2


def test_an_event_may_come_as_an_event_as_bytes_or_as_a_mapping(protect):
    calls = []
    note = protect(calls.append, otherwise="known", route="note")
    order = {"detail": {"id": 1}, "id": "e", "source": "s"}
    assert note(order) is None
    assert note(from_object(order)) == "known"
    assert note(json.dumps(order).encode()) == "known"
    assert note({"id": 1}) is None  # a detail alone has no source: another event
    assert len(calls) == 2


def test_ignored_fields_do_not_count(protect):
    calls = []
    note = protect(calls.append, ignore=["detail.at"], otherwise="known", route="note")
    assert note({"id": 1, "at": 1}) is None
    assert note({"id": 1, "at": 2}) == "known"


def test_an_error_is_the_callers_and_the_call_may_be_made_again(protect, clock):
    calls = []

    @protect
    def charge(order):
        calls.append(order)
        if len(calls) == 1:
            raise ZeroDivisionError("the first time")
        return "done"

    with pytest.raises(ZeroDivisionError, match="the first time"):
        charge({"id": 1})
    clock.advance(LATER_MS)
    assert charge({"id": 1}) == "done"
    assert charge({"id": 1}) is None


def test_too_soon_after_an_error_the_call_is_handed_back(protect):
    @protect
    def charge(order):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        charge({"id": 1})
    with pytest.raises(HandedBack) as caught:
        charge({"id": 1})
    assert caught.value.retry_after_s > 0
    assert str(caught.value) == "busy"


def test_a_rejection_is_the_callers_and_goes_to_the_dead_letters(protect):
    letters = MemoryDeadLetters()

    @protect(dead=letters, otherwise="known")
    def charge(order):
        raise SinkRejected("no such card")

    with pytest.raises(SinkRejected):
        charge({"id": 1})
    (letter,) = asyncio.run(letters.list())
    assert json.loads(letter.raw) == {"id": 1}
    assert charge({"id": 1}) == "known"


def test_what_the_store_does_not_answer_is_handed_back(protect, clock):
    charge = protect(lambda _: "done", store=MemoryStore(max_keys=1, clock=clock), route="x")
    assert charge({"id": 1}) == "done"
    with pytest.raises(HandedBack, match="full"):
        charge({"id": 2})


@pytest.mark.parametrize("argument", [None, 5, "text", [1]])
def test_what_is_no_event_is_refused(protect, argument):
    note = protect(lambda _: None, route="x")
    with pytest.raises(EventError):
        note(argument)


@pytest.mark.parametrize("argument", [b"rubbish", {"id": float("nan")}, {"id": {1}}])
def test_what_cannot_be_read_is_refused(protect, argument):
    note = protect(lambda _: None, route="x")
    with pytest.raises(EventError):
        note(argument)


def test_without_an_argument_there_is_no_event(protect):
    note = protect(lambda *_: None, route="x")
    with pytest.raises(TypeError, match="first argument"):
        note()


def test_without_a_key_and_without_an_id_nothing_runs(protect):
    calls = []
    note = protect(calls.append, route="x")
    with pytest.raises(HandedBack, match="dead letters: none are configured"):
        note({})
    assert calls == []


def test_the_name_and_the_text_of_a_function_are_kept(protect):
    def charge(order):
        """Take money."""

    protected = protect(charge)
    assert protected.__name__ == "charge"
    assert protected.__doc__ == "Take money."
    assert inspect.signature(protected) == inspect.signature(charge)


def test_two_functions_on_one_store_are_kept_apart(protect, clock):
    store = MemoryStore(clock=clock)

    @protect(store=store)
    def one(order):
        return "one"

    @protect(store=store)
    def two(order):
        return "two"

    assert (one({"id": 1}), two({"id": 1})) == ("one", "two")


def test_two_workers_with_one_route_share_what_they_know(protect, tmp_path):
    stores = [SQLiteStore(tmp_path / "seen.db") for _ in range(2)]
    workers = [protect(lambda _: "ran", store=store, route="charge") for store in stores]
    assert [worker({"id": 1}) for worker in workers] == ["ran", None]


def test_a_wrong_rule_is_refused_when_the_function_is_made():
    with pytest.raises(ConfigError, match="is not a duration"):
        once(store=MemoryStore(), window="soon")(print)
    with pytest.raises(ConfigError, match="JMESPath"):
        once(store=MemoryStore(), key=["detail..x"])(print)


def test_a_function_that_takes_too_long_is_handed_back_and_not_run_twice(protect):
    calls, goes_on = [], threading.Event()

    @protect(timeout=timedelta(milliseconds=50))
    def slow(order):
        calls.append(order)
        goes_on.wait(5)

    with pytest.raises(HandedBack, match="no answer within"):
        slow({"id": 1})
    goes_on.set()
    assert len(calls) == 1


def test_threads_take_turns_and_each_gets_its_own_result(protect):
    double = protect(lambda order: order["id"] * 2, route="double")
    results = {}

    def work(n):
        results[n] = double({"id": n})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: 2 * n for n in range(8)}


# Was a bug: BlockingGateway makes the coroutine before Runner.run refuses, so the caller gets an unhelpful
# RuntimeError, and "coroutine 'Gateway.process' was never awaited" on top.
async def test_a_plain_function_inside_a_running_loop_is_refused_with_a_hint(protect):
    calls = []
    note = protect(calls.append, route="x")
    with pytest.raises(RuntimeError, match=r"async def|thread|await"):
        note({"id": 1})
    assert calls == []
    # from a thread it works, there or anywhere
    await asyncio.to_thread(note, {"id": 1})
    assert calls == [{"id": 1}]


def test_a_plain_function_that_gives_an_awaitable_is_not_counted_as_done(protect, clock):
    class Promise:
        def __await__(self):
            yield

    promise = protect(lambda _: Promise(), otherwise="known", route="x")
    for _ in range(2):
        with pytest.raises(TypeError, match="async def"):
            promise({"id": 1})
        clock.advance(LATER_MS)


# --- async functions ------------------------------------------------------------------------


async def test_an_async_function_runs_once(protect):
    calls = []

    @protect(key=["detail.id"], otherwise="known")
    async def charge(order, rate=1):
        await asyncio.sleep(0)
        calls.append(order)
        return order["id"] * rate

    assert inspect.iscoroutinefunction(charge)
    assert await charge({"id": 7}, rate=3) == 21
    assert await charge({"id": 7}) == "known"
    assert calls == [{"id": 7}]


async def test_an_async_error_is_the_callers(protect, clock):
    failing = True

    @protect
    async def charge(order):
        if failing:
            raise KeyError("first")
        return "done"

    with pytest.raises(KeyError, match="first"):
        await charge({"id": 1})
    failing = False
    clock.advance(LATER_MS)
    assert await charge({"id": 1}) == "done"


async def test_of_two_calls_at_once_one_runs_and_the_other_is_handed_back(protect):
    calls = []

    @protect
    async def charge(order):
        calls.append(order)
        await asyncio.sleep(0.01)
        return "done"

    results = await asyncio.gather(charge({"id": 1}), charge({"id": 1}), return_exceptions=True)
    assert results[0] == "done"
    assert isinstance(results[1], HandedBack)
    assert results[1].retry_after_s > 0
    assert len(calls) == 1


# Was a bug: _Calls keeps calls by the id of their Event object; the second call overwrites and then removes
# the first one's: neither runs, and the caller hears of a KeyError.
async def test_one_event_object_in_two_calls_at_once(protect):
    calls = []

    @protect
    async def charge(order, name):
        calls.append(name)
        await asyncio.sleep(0.01)
        return name

    order = from_object({"detail": {"id": 1}})
    results = await asyncio.gather(
        charge(order, "first"), charge(order, "second"), return_exceptions=True
    )
    assert calls == ["first"]
    assert results[0] == "first"
    assert isinstance(results[1], HandedBack)


async def test_many_calls_at_once_do_not_wait_for_each_other(protect):
    gate = asyncio.Event()
    waiting = []

    @protect
    async def charge(order):
        waiting.append(order)
        if len(waiting) == 20:
            gate.set()
        await asyncio.wait_for(gate.wait(), 5)
        return order["id"]

    results = await asyncio.gather(*[charge({"id": n}) for n in range(20)])
    assert results == list(range(20))


async def test_a_cancelled_call_is_forgotten(protect):
    started = asyncio.Event()

    @protect
    async def charge(order):
        started.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(charge({"id": 1}))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gateway = inspect.getclosurevars(charge).nonlocals["gateway"]
    assert gateway.books.balance
    assert gateway.books.in_flight == 0
    assert inspect.getclosurevars(charge).nonlocals["calls"] == {}


async def test_a_call_whose_time_is_over_is_handed_back(protect):
    @protect(route="x", key=["detail.id"], timeout=timedelta(seconds=0.05))
    async def charge(order):
        await asyncio.sleep(60)

    with pytest.raises(HandedBack, match="no answer within"):
        await charge({"id": 1})
