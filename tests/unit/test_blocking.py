import gc
import threading
import time
import warnings
from datetime import timedelta

import pytest
from tests.faults.doubles import event

from oncebridge import BlockingGateway, Gateway, Settings, Verdict
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore


def gateway(sink=None, **settings):
    got = []
    settings.setdefault("store", MemoryStore())
    return BlockingGateway(Gateway(sink=sink or got.append, **settings)), got


def test_calls_share_one_loop_and_one_memory():
    blocking, got = gateway()
    with blocking:
        (first,) = blocking.process([event()])
        (second,) = blocking.process([event()])
        assert (first.verdict, second.verdict) == (Verdict.DELIVERED, Verdict.DUPLICATE)
        assert [one.detail for one in got] == [{"n": 1}]
        assert blocking.books.arrived == 2
        assert blocking.books.balance


def test_a_store_on_disk_serves_several_calls(tmp_path):
    blocking, got = gateway(store=SQLiteStore(tmp_path / "seen.db"))
    with blocking:
        for _ in range(3):
            assert all(o.acknowledge for o in blocking.process([event({"n": n}) for n in range(3)]))
        assert len(got) == 3


def test_an_async_sink_runs_on_the_same_loop():
    loops = []

    async def sink(one):
        import asyncio

        loops.append(asyncio.get_running_loop())

    blocking, _ = gateway(sink)
    with blocking:
        blocking.process([event({"n": 1})])
        blocking.process([event({"n": 2})])
    assert len(loops) == 2
    assert loops[0] is loops[1]


def test_the_callers_time_is_handed_on():
    blocking, got = gateway()
    with blocking:
        (outcome,) = blocking.process([event()], within=timedelta(seconds=0.5))
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.FAILED, False)
        assert got == []


def test_the_callers_patience_is_handed_on():
    store = MemoryStore()
    one, _ = gateway(lambda _: time.sleep(0.1), store=store)
    two, got = gateway(store=store)
    with one, two:
        thread = threading.Thread(target=one.process, args=([event()],))
        thread.start()
        while not len(store):
            time.sleep(0.001)
        (outcome,) = two.process([event()], patience=timedelta(seconds=5))
        thread.join()
        assert outcome.verdict is Verdict.DUPLICATE
        assert got == []


def test_threads_take_turns():
    at_once = 0
    most = 0
    lock = threading.Lock()

    def sink(one):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.001)
        with lock:
            at_once -= 1

    blocking, _ = gateway(sink)
    outcomes = []
    with blocking:

        def work(n):
            outcomes.extend(blocking.process([event({"n": n})]))

        threads = [threading.Thread(target=work, args=(n % 4,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(o.verdict for o in outcomes) == ["delivered"] * 4 + ["duplicate"] * 8
        assert most == 1
        assert blocking.books.in_flight == 0


def test_what_goes_wrong_raises_and_the_next_call_works():
    class Broken(MemoryStore):
        broken = True

        async def claim(self, wants):
            if self.broken:
                raise RuntimeError("a bug in a driver")
            return await super().claim(wants)

    store = Broken()
    blocking, got = gateway(store=store)
    with blocking:
        with pytest.raises(RuntimeError):
            blocking.process([event()])
        store.broken = False
        (outcome,) = blocking.process([event()])
        assert outcome.verdict is Verdict.DELIVERED
        assert len(got) == 1
        assert blocking.books.balance


def test_closing_finishes_what_is_owed():
    class Slow(MemoryStore):
        failures = 12

        async def commit(self, commits):
            from oncebridge import StoreUnavailable

            if self.failures:
                self.failures -= 1
                raise StoreUnavailable("not now")
            return await super().commit(commits)

    store = Slow()
    settings = Settings(commit_budget=timedelta(milliseconds=10))
    blocking, _ = gateway(store=store, settings=settings)
    store.failures = 3
    (outcome,) = blocking.process([event()])
    assert outcome.acknowledge
    assert blocking.close()
    assert store.failures == 0


def test_closing_says_that_something_is_left():
    class Down(MemoryStore):
        async def commit(self, commits):
            from oncebridge import StoreUnavailable

            raise StoreUnavailable("not now")

    settings = Settings(commit_budget=timedelta(milliseconds=10))
    blocking, _ = gateway(store=Down(), settings=settings)
    (outcome,) = blocking.process([event()])
    assert outcome.acknowledge
    assert not blocking.close(timedelta(milliseconds=20))


# Was a bug: a second close raises RuntimeError("Runner is closed"), and leaves a coroutine unawaited.
def test_closing_twice_is_harmless():
    blocking, _ = gateway()
    with blocking:
        blocking.process([event()])
        assert blocking.close()
    assert blocking.close()


# Was a bug: Runner.run refuses after the coroutine was made: "coroutine was never awaited", and no hint.
async def test_inside_a_running_loop_it_says_so():
    blocking, _ = gateway()
    with pytest.raises(RuntimeError, match=r"await|Gateway"):
        blocking.process([event()])


# Was a bug: after close, process makes a coroutine that the closed runner refuses: "never awaited".
def test_after_closing_everything_is_handed_back_or_refused():
    blocking, got = gateway()
    blocking.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            (outcome,) = blocking.process([event()])
            acknowledged = outcome.acknowledge
        except RuntimeError:
            acknowledged = False
        gc.collect()
    assert not acknowledged
    assert got == []
