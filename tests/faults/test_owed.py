"""
Copies of what was delivered while the store could not record it.

Only this worker knows that it was delivered, until the store answers again.
"""

import asyncio
from datetime import timedelta

from oncebridge import Never, Settings, Unknown, Verdict, Yes
from oncebridge.stores.api import Fate

from .doubles import Bench, ScriptedSink, event, eventually, now, rule, virtual

DELIVERED, DUPLICATE, FAILED = Verdict.DELIVERED, Verdict.DUPLICATE, Verdict.FAILED
BY_ID = {"key": "id", "window": "1h"}


async def owing(bench, arrival, for_s=120):
    """Deliver *arrival* while the store takes claims and no commits."""
    bench.store.arm("commit.before", times=1e9, for_s=for_s)
    outcome = await bench.one(arrival)
    assert outcome.verdict is DELIVERED
    assert bench.gateway.owed == 1
    return outcome


@virtual
async def test_a_copy_of_what_is_owed_is_a_duplicate_and_is_not_sent_again():
    async with Bench(rule(**BY_ID)) as bench:
        first = await owing(bench, event())
        await asyncio.sleep(60)  # beyond the lease: the store would let it be claimed
        copy = await bench.one(event())
        assert (copy.verdict, copy.acknowledge) == (DUPLICATE, True)
        assert (copy.key, copy.first.id) == (first.key, "e1")
        assert len(bench.sink.taken) == 1
        await asyncio.sleep(120)
        assert (await bench.record(first.key)).fate is Fate.DELIVERED
        assert len(bench.sink.taken) == 1


@virtual
async def test_also_while_the_store_does_not_answer_at_all():
    async with Bench(rule(**BY_ID)) as bench:
        await owing(bench, event())
        bench.store.arm("claim.before", times=1e9, for_s=60)
        copy, other = await bench.process(event(), event(id="e2"))
        assert (copy.verdict, other.verdict) == (DUPLICATE, FAILED)


@virtual
async def test_other_content_waits_until_the_store_can_tell_them_apart():
    async with Bench(rule(**BY_ID)) as bench:
        await owing(bench, event({"n": 1}))
        await asyncio.sleep(60)
        other = await bench.one(event({"n": 2}))
        assert (other.verdict, other.acknowledge) == (FAILED, False)
        assert "not recorded yet" in other.reason
        assert len(bench.sink.taken) == 1
        await asyncio.sleep(120)
        assert (await bench.one(event({"n": 2}))).verdict is Verdict.CONFLICT
        assert len(bench.sink.taken) == 2


@virtual
async def test_what_is_owed_counts_for_its_window_from_the_delivery_and_no_longer():
    async with Bench(rule(**BY_ID)) as bench:
        await owing(bench, event(), for_s=7200)
        await asyncio.sleep(3400)
        assert (await bench.one(event())).verdict is DUPLICATE
        await asyncio.sleep(300)
        assert (await bench.one(event())).verdict is DELIVERED
        assert len(bench.sink.taken) == 2


@virtual
async def test_an_owed_release_is_no_proof_of_a_delivery():
    async with Bench(rule(**BY_ID), sink=ScriptedSink(Unknown("reset"))) as bench:
        bench.store.arm("release.before", times=1e9, for_s=60)
        failed = await bench.one(event())
        assert failed.verdict is FAILED
        await asyncio.sleep(120)
        assert (await bench.one(event())).verdict is DELIVERED


@virtual
async def test_what_was_sent_unprotected_is_not_sent_again_by_the_same_worker():
    settings = Settings(on_store_outage="deliver")
    async with Bench(rule(**BY_ID), settings=settings) as bench:
        for seam in ("claim.before", "remember.before"):
            bench.store.arm(seam, times=1e9, for_s=60)
        outcomes = [await bench.one(event()) for _ in range(3)]
        assert [outcome.verdict for outcome in outcomes] == [DELIVERED, DUPLICATE, DUPLICATE]
        other = await bench.one(event({"n": 2}))
        assert other.verdict is FAILED
        assert len(bench.sink.taken) == 1


@virtual
async def test_debts_are_paid_before_new_claims_when_the_store_answers_again():
    async with Bench(rule(**BY_ID)) as bench:
        first = await owing(bench, event(), for_s=100)
        bench.store.arm("claim.before", times=1e9, for_s=100)
        await bench.one(event(id="e2"))
        await asyncio.sleep(101)
        assert (await bench.record(first.key)).fate is None, "the next try is some seconds away"
        assert (await bench.one(event(id="e3"))).verdict is DELIVERED
        assert (await bench.record(first.key)).fate is Fate.DELIVERED


@virtual
async def test_a_debt_that_cannot_be_paid_holds_back_only_its_own_key():
    async with Bench(rule(**BY_ID)) as bench:
        bench.store.silence("commit", times=1e9)
        first = await bench.one(event())
        bench.store.silence("commit", lambda asked: asked.key == first.key, times=1e9)
        outcomes = await bench.process(*[event(id=f"x{n}") for n in range(20)], event())
        assert [outcome.verdict for outcome in outcomes] == [DELIVERED] * 20 + [DUPLICATE]
        bench.store.silence("commit", times=0)
        await eventually(lambda: not bench.gateway.owed, within_s=120)


@virtual
async def test_in_shadow_mode_a_copy_is_forwarded_and_counted_as_a_duplicate():
    async with Bench(rule(**BY_ID), settings=Settings(mode="shadow")) as bench:
        await owing(bench, event())
        await asyncio.sleep(60)
        copy = await bench.one(event())
        assert (copy.verdict, copy.forwarded) == (DUPLICATE, True)


@virtual
async def test_a_conflict_that_was_sent_unprotected_is_not_sent_again():
    settings = Settings(on_store_outage="deliver")
    async with Bench(rule(**BY_ID), settings=settings) as bench:
        await bench.one(event({"n": 1}))
        bench.store.arm("commit.before", times=1e9, for_s=60)
        assert (await bench.one(event({"n": 2}))).verdict is Verdict.CONFLICT
        bench.store.arm("claim.before", times=1e9, for_s=60)
        copy = await bench.one(event({"n": 2}))
        assert copy.verdict is DUPLICATE
        assert len(bench.sink.taken) == 2


@virtual
async def test_a_debt_whose_window_is_over_does_not_end_the_claim_of_the_next_event():
    settings = Settings(give_up_after=timedelta(hours=10))
    async with Bench(rule(**BY_ID), settings=settings) as bench:
        first = await owing(bench, event(), for_s=3700)
        await asyncio.sleep(3650)  # the window is over, and the store still takes no commits
        bench.sink.otherwise = Unknown("reset")
        bench.store.disarm()
        failed = await bench.one(event())
        assert failed.verdict is FAILED
        await asyncio.sleep(60)
        assert (await bench.record(first.key)).fate is None
        bench.sink.otherwise = Yes()
        assert (await bench.one(event())).verdict is DELIVERED


@virtual
async def test_an_owed_death_is_no_delivery_a_replay_is_sent():
    async with Bench(rule(**BY_ID), sink=ScriptedSink(Never("422"))) as bench:
        bench.store.arm("commit.before", times=1e9, for_s=120)
        dead = await bench.one(event())
        assert dead.verdict is Verdict.DEAD
        await asyncio.sleep(60)
        assert await bench.store.forget([dead.key]) == [True]
        assert (await bench.one(event())).verdict is DELIVERED
        assert len(bench.sink.taken) == 1


@virtual
async def test_a_store_that_hangs_holds_up_no_more_than_one_payment():
    async with Bench(rule(**BY_ID), settings=Settings(on_store_outage="deliver")) as bench:
        bench.store.takes_s = 5.0
        bench.store.arm("claim.before", times=1e9, for_s=300)
        bench.store.arm("release.before", times=1e9, for_s=300)
        bench.store.arm("remember.before", times=1e9, for_s=300)
        waits = []

        async def bring(number):
            began = now()
            await bench.one(event(id=f"h{number}"))
            waits.append(now() - began)

        tasks = []
        for number in range(100):
            tasks.append(asyncio.create_task(bring(number)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
        assert max(waits) < 60
        assert len(bench.sink.taken) == 100
