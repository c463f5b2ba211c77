"""A sink in the store's own database: what it gets, and what its answers come to."""

import pytest
from tests.faults.doubles import After, Bench, ScriptedSink, event, rule, virtual

from oncebridge import Unknown, Verdict, Yes
from oncebridge.sinks.api import Already, Lost
from oncebridge.stores.api import Commit, Commits, Fate, Release, Releases, Reply


class TableSink(ScriptedSink):
    """Write event, commits and releases into *store* together, unless the script says other."""

    def __init__(self, *script, **options):
        super().__init__(*script, **options)
        self.joints = []
        self.store = None

    def joins(self, store):
        self.store = store.inner
        return True

    async def deliver_jointly(self, joints):
        self.joints += joints
        answers = await self.deliver([joint.delivery for joint in joints])
        for joint, answer in zip(joints, answers, strict=True):
            if isinstance(answer, Yes):
                written = await self.store.commit(Commits.of(joint.commits))
                assert written == [Reply.COMMITTED] * len(joint.commits)
                await self.store.release(Releases.of(joint.releases))
        return answers


class ElsewhereSink(TableSink):
    def joins(self, store):
        return False


@virtual
async def test_the_commit_goes_with_the_event_and_not_by_itself():
    async with Bench(sink=TableSink()) as bench:
        first = await bench.one(event())
        second = await bench.one(event(id="e2"))
        assert (first.verdict, second.verdict) == (Verdict.DELIVERED, Verdict.DUPLICATE)
        (joint,) = bench.sink.joints
        (commit,) = joint.commits
        assert isinstance(commit, Commit)
        assert (commit.key, commit.fate) == (first.key, Fate.DELIVERED)
        assert commit.generation == joint.delivery.generation
        assert bench.store.calls["commit"] == 0
        assert bench.gateway.books.forwarded == 1


@virtual
async def test_a_sink_elsewhere_is_a_sink_like_any_other():
    async with Bench(sink=ElsewhereSink()) as bench:
        assert (await bench.one(event())).verdict is Verdict.DELIVERED
        assert bench.sink.joints == []
        assert bench.store.calls["commit"] == 1


@virtual
async def test_what_another_has_committed_meanwhile_is_a_duplicate():
    async with Bench(sink=TableSink(Already())) as bench:
        outcome = await bench.one(event())
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.DUPLICATE, True)
        assert not outcome.forwarded
        assert bench.gateway.books.forwarded == 0


@virtual
async def test_what_another_has_taken_over_comes_again():
    async with Bench(sink=TableSink(Lost())) as bench:
        outcome = await bench.one(event())
        assert (outcome.verdict, outcome.acknowledge) == (Verdict.BUSY, False)
        await bench.until_acknowledged(event())
        assert len(bench.sink.taken) == 1
        assert bench.sink.taken[0].attempt == 1, "nothing was sent the first time"


@virtual
async def test_an_unclear_answer_is_tried_again_under_the_same_generation():
    async with Bench(sink=TableSink(Unknown("gone"))) as bench:
        await bench.until_acknowledged(event())
        generations = {joint.delivery.generation for joint in bench.sink.joints}
        assert (len(bench.sink.joints), len(generations)) == (2, 1)


@virtual
async def test_the_newest_state_is_written_in_the_same_step():
    latest = rule(key="id", latest={"entity": "detail.e", "version": "detail.v"})
    async with Bench(latest, sink=TableSink()) as bench:
        newer = await bench.one(event({"e": 1, "v": 2}, id="b"))
        older = await bench.one(event({"e": 1, "v": 1}, id="a"))
        assert (newer.verdict, older.verdict) == (Verdict.DELIVERED, Verdict.STALE)
        (joint,) = bench.sink.joints
        (release,) = joint.releases
        assert isinstance(release, Release)
        assert b"2" in release.memo


@virtual
async def test_no_heartbeat_gets_in_the_way_of_the_transaction():
    async with Bench(sink=TableSink(After(9, Yes()))) as bench:
        bench.gateway._leases._interval_s = 1
        assert (await bench.one(event())).verdict is Verdict.DELIVERED
        assert bench.store.asked["extend"] == []


@virtual
async def test_what_is_not_deduplicated_has_nothing_to_commit():
    async with Bench(rule(key="none"), sink=TableSink()) as bench:
        assert (await bench.one(event())).verdict is Verdict.BYPASSED
        assert (await bench.one(event())).verdict is Verdict.BYPASSED
        assert [joint.commits for joint in bench.sink.joints] == [(), ()]


@pytest.mark.parametrize("answer", [Already(), Lost()])
@virtual
async def test_an_entity_is_free_again_after_another_was_first(answer):
    latest = rule(key="id", latest={"entity": "detail.e", "version": "detail.v"})
    async with Bench(latest, sink=TableSink(answer)) as bench:
        await bench.one(event({"e": 1, "v": 1}, id="a"))
        outcome = await bench.one(event({"e": 1, "v": 2}, id="b"))
        assert outcome.verdict is Verdict.DELIVERED
