import asyncio

import pytest
from tests.faults.doubles import virtual

from oncebridge.engine.claims import CallBatcher
from oncebridge.stores.api import Commits


class Store:
    """Answers each question with itself in capitals, after *takes_s*."""

    def __init__(self, takes_s=1.0):
        self.takes_s = takes_s
        self.calls = []
        self.under_way = 0
        self.most_under_way = 0
        self.error = None

    async def __call__(self, batch):
        questions = [commit.generation.decode() for commit in batch]
        self.calls.append(questions)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.takes_s)
            if self.error:
                raise self.error
            return [question.upper() for question in questions]
        finally:
            self.under_way -= 1


class Batcher(CallBatcher):
    """Asks about names: the key is the first letter, and the name is told by the generation."""

    async def ask(self, names):
        keys, generations = [name[:1].encode() for name in names], [name.encode() for name in names]
        return await super().ask(Commits(keys, generations))


def batcher(store, **settings):
    return Batcher(store, lambda answers, _, part: answers[part], **settings)


@virtual
async def test_alone_nobody_waits():
    store = Store()
    ask = batcher(store).ask
    began = asyncio.get_running_loop().time()
    assert await ask(["a", "b"]) == ["A", "B"]
    assert asyncio.get_running_loop().time() - began == pytest.approx(1)
    assert store.calls == [["a", "b"]]


@virtual
async def test_what_is_asked_meanwhile_goes_together_and_everybody_gets_his_own():
    store = Store()
    ask = batcher(store, at_once=1).ask
    questions = [["a"], ["b", "c"], ["d"], ["e", "f"]]
    answers = await asyncio.gather(*map(ask, questions))
    assert answers == [["A"], ["B", "C"], ["D"], ["E", "F"]]
    assert store.calls == [["a"], ["b", "c", "d", "e", "f"]]


@virtual
async def test_no_more_than_so_many_calls_at_once():
    store = Store()
    ask = batcher(store, at_once=2, most=1).ask
    await asyncio.gather(*[ask([name]) for name in "abcdefgh"])
    assert store.most_under_way == 2
    assert len(store.calls) == 8


@virtual
async def test_a_call_is_not_larger_than_so_many_questions():
    store = Store()
    ask = batcher(store, at_once=1, most=3).ask
    await asyncio.gather(ask(["a"]), ask(["b", "c"]), ask(["d", "e"]), ask(["f"]))
    assert store.calls == [["a"], ["b", "c", "f"], ["d", "e"]]


@virtual
async def test_a_single_large_question_goes_all_the_same():
    store = Store()
    ask = batcher(store, at_once=1, most=2).ask
    first, large = await asyncio.gather(ask(["a"]), ask(["b", "c", "d", "e"]))
    assert (first, large) == (["A"], ["B", "C", "D", "E"])


@virtual
async def test_one_key_does_not_stand_twice_in_a_call():
    store = Store()
    ask = batcher(store, at_once=1).ask
    answers = await asyncio.gather(ask(["x"]), ask(["a1"]), ask(["a2"]), ask(["b"]), ask(["a3"]))
    assert answers == [["X"], ["A1"], ["A2"], ["B"], ["A3"]]
    assert store.calls == [["x"], ["a1", "b"], ["a2"], ["a3"]]


@virtual
async def test_everybody_in_a_call_that_fails_hears_of_it_and_nobody_else():
    store = Store()
    ask = batcher(store, at_once=1).ask
    first = asyncio.create_task(ask(["a"]))
    await asyncio.sleep(0.5)
    others = [asyncio.create_task(ask([name])) for name in "bc"]
    await asyncio.sleep(1)
    store.error = ConnectionError("gone")
    assert await first == ["A"]
    for other in others:
        with pytest.raises(ConnectionError):
            await other
    store.error = None
    assert await ask(["d"]) == ["D"]


@virtual
async def test_after_a_failure_of_the_first_the_others_still_go():
    store = Store()
    ask = batcher(store, at_once=1).ask
    store.error = ConnectionError("gone")
    first, second = asyncio.create_task(ask(["a"])), asyncio.create_task(ask(["b"]))
    with pytest.raises(ConnectionError):
        await first
    store.error = None
    assert await second == ["B"]


@virtual
async def test_who_gives_up_waiting_does_not_harm_the_others():
    store = Store()
    ask = batcher(store, at_once=1).ask
    tasks = [asyncio.create_task(ask([name])) for name in "abc"]
    await asyncio.sleep(0.5)
    tasks[1].cancel()
    assert await tasks[2] == ["C"]
    assert tasks[1].cancelled()
    assert await tasks[0] == ["A"]


@virtual
async def test_who_made_the_call_and_gives_up_leaves_the_way_free():
    store = Store()
    ask = batcher(store, at_once=1).ask
    tasks = [asyncio.create_task(ask([name])) for name in "abc"]
    await asyncio.sleep(0.5)
    tasks[0].cancel()
    assert await tasks[1] == ["B"]
    assert await tasks[2] == ["C"]
    assert await ask(["d"]) == ["D"]
    assert store.under_way == 0


@virtual
async def test_all_are_served_under_load():
    store = Store(0.01)
    ask = batcher(store, at_once=2, most=7).ask
    answers = await asyncio.gather(*[ask([f"{n % 9}-{n}"]) for n in range(300)])
    assert answers == [[f"{n % 9}-{n}"] for n in range(300)]
    assert sum(map(len, store.calls)) == 300
    for call in store.calls:
        assert len({question[0] for question in call}) == len(call) <= 7
