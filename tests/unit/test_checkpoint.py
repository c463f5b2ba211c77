import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import CountingDice, FaultyStore, VirtualLoop, now_ms, virtual
from tests.size import examples

from oncebridge import StoreError, StoreUnavailable
from oncebridge.sources.checkpoint import Checkpoint, CheckpointTaken
from oncebridge.stores.memory import MemoryStore

LEASE_MS = 60_000


def store():
    return FaultyStore(MemoryStore(clock=now_ms))


def checkpoint(store, name="/data/in.ndjson", mark="abc"):
    return Checkpoint(
        store, "file", name, mark, dice=CountingDice(), lease_ms=LEASE_MS, keep_ms=10**9
    )


@virtual
async def test_the_place_is_there_for_the_next_one():
    kept = store()
    first = checkpoint(kept)
    assert await first.take() == b""
    await first.save(b"17")
    await first.release(b"42")
    assert await checkpoint(kept).take() == b"42"


@virtual
async def test_a_place_that_was_cleared_is_the_beginning():
    kept = store()
    first = checkpoint(kept)
    await first.take()
    await first.save(b"17")
    await first.clear()
    assert await checkpoint(kept).take() == b""


@pytest.mark.parametrize("other", [{"name": "/data/other.ndjson"}, {"mark": "def"}])
@virtual
async def test_another_name_or_mark_has_a_place_of_its_own(other):
    kept = store()
    first = checkpoint(kept)
    await first.take()
    await first.save(b"17")
    assert await checkpoint(kept, **other).take() == b""


@virtual
async def test_while_one_holds_it_another_is_told_so_in_plain_words():
    kept = store()
    await checkpoint(kept).take()
    await asyncio.sleep(20)
    with pytest.raises(CheckpointTaken) as refused:
        await checkpoint(kept).take()
    assert str(refused.value) == (
        "/data/in.ndjson: another process is reading it; its claim ends in 40 s at the earliest"
    )
    assert refused.value.left_s == 40


@virtual
async def test_who_saves_holds_it_for_another_lease():
    kept = store()
    first = checkpoint(kept)
    await first.take()
    for number in range(5):
        await asyncio.sleep(50)
        await first.save(b"%d" % number)
    with pytest.raises(CheckpointTaken):
        await checkpoint(kept).take()


@virtual
async def test_who_keeps_it_holds_it_without_saving():
    kept = store()
    first = checkpoint(kept)
    await first.take()
    await first.save(b"17")
    for _ in range(100):
        await asyncio.sleep(20)
        await first.extend()
    with pytest.raises(CheckpointTaken):
        await checkpoint(kept).take()
    await first.release(b"18")
    assert await checkpoint(kept).take() == b"18"


@virtual
async def test_a_hold_that_lapsed_and_that_nobody_took_is_taken_up_again():
    kept = store()
    first = checkpoint(kept)
    await first.take()
    await asyncio.sleep(1000)
    await first.extend()
    await asyncio.sleep(1000)
    await first.save(b"17")
    with pytest.raises(CheckpointTaken):
        await checkpoint(kept).take()


@pytest.mark.parametrize("step", ["extend", "save", "release", "clear"])
@virtual
async def test_who_was_away_for_too_long_learns_that_another_goes_on(step):
    kept = store()
    first, second = checkpoint(kept), checkpoint(kept)
    await first.take()
    await first.save(b"17")
    await asyncio.sleep(61)
    assert await second.take() == b"17"
    with pytest.raises(CheckpointTaken):
        await getattr(first, step)(*([] if step in ("extend", "clear") else [b"18"]))
    await second.save(b"99")
    await second.release(b"100")
    assert await checkpoint(kept).take() == b"100", "nothing was changed behind its back"


@virtual
async def test_a_store_that_does_not_answer_is_no_reason_to_think_another_has_it():
    kept = store()
    first = checkpoint(kept)
    await first.take()
    for operation in ("claim", "release", "extend"):
        kept.silence(operation, times=1)
        with pytest.raises(StoreError):
            await (first.extend() if operation == "extend" else first.save(b"17"))
        await first.save(b"18")
    assert await first.release(b"19") is None
    assert await checkpoint(kept).take() == b"19"


@pytest.mark.parametrize(
    "seam",
    [
        *("claim.before", "claim.after", "release.before", "release.after"),
        *("extend.before", "extend.after"),
    ],
)
@pytest.mark.parametrize("step", ["keep", "save"])
@virtual
async def test_an_answer_that_was_lost_on_the_way_does_no_harm(seam, step):
    kept = store()
    first = checkpoint(kept)
    await first.take()
    await first.save(b"17")
    kept.arm(seam)
    for _ in range(3):
        try:
            await (first.extend() if step == "keep" else first.save(b"18"))
        except StoreUnavailable:
            continue
    kept.disarm()
    with pytest.raises(CheckpointTaken):
        await checkpoint(kept).take()
    await first.release(b"19")
    assert await checkpoint(kept).take() == b"19"


@virtual
async def test_a_claim_whose_answer_was_lost_is_found_again_at_the_start():
    kept = store()
    kept.arm("claim.after")
    first = checkpoint(kept)
    with pytest.raises(StoreUnavailable):
        await first.take()
    assert await first.take() == b""
    with pytest.raises(CheckpointTaken):
        await checkpoint(kept).take()


@virtual
async def test_what_is_kept_outlives_a_purge():
    kept = store()
    first = checkpoint(kept)
    await first.take()
    await first.release(b"17")
    await asyncio.sleep(24 * 3600)
    await kept.inner.purge(1000)
    assert await checkpoint(kept).take() == b"17"


STEP = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["take", "keep", "save", "give_back", "wait", "lose", "fail"]),
    st.floats(0, 40),
)


class Two:
    """Two who want the same checkpoint, and until when each believes to hold it."""

    def __init__(self):
        self.kept = store()
        self.both = [checkpoint(self.kept), checkpoint(self.kept)]
        self.until = [0, 0]
        self.has_taken = [False, False]

    async def do(self, who, step, number):
        one, before = self.both[who], now_ms()
        match step:
            case "lose":
                self.kept.arm(["claim.after", "release.after", "extend.after"][number % 3])
            case "fail":
                self.kept.arm(["claim.before", "release.before", "extend.before"][number % 3])
            case "take":
                await one.take()
                self.has_taken[who] = True
                self.until[who] = before + LEASE_MS
            case "give_back" if self.has_taken[who]:
                self.until[who] = 0
                await one.release(b"x")
                self.has_taken[who] = False
            case "keep" | "save" if self.has_taken[who]:
                self.until[who] = 0
                await (one.extend() if step == "keep" else one.save(b"y"))
                self.until[who] = before + LEASE_MS

    async def run(self, steps):
        for number, (who, step, pause) in enumerate(steps):
            await asyncio.sleep(pause if step == "wait" else 0)
            try:
                await self.do(who, step, number)
            except CheckpointTaken:
                self.has_taken[who], self.until[who] = False, 0
            except StoreError:
                pass
            assert not all(until > now_ms() for until in self.until), "both hold it"


@settings(max_examples=examples(200))
@given(st.lists(STEP, max_size=30))
def test_two_never_hold_it_at_once_whatever_is_lost_on_the_way(steps):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(Two().run(steps))
