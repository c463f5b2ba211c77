import asyncio
from collections.abc import Collection

from msgspec.structs import replace

from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    Duplicate,
    Fate,
    Held,
    Memories,
    Portable,
    Record,
    Reply,
)
from oncebridge.testing.contract.harness import CONTENT, TASKS, Harness, _fresh, needs

_SHAPES = [b"", b" ", b"\n", b"\x00", b"\x00\x00", b"\xff\xfe\x80", b"{a}b", b"*", b"'", b"%"]
_SHAPES += ["é🎉".encode(), b"k" * 10_000]


class PortabilityCases(Harness):
    """Copying: all records can be scanned, and loaded into another store unchanged."""

    store: Portable

    def _record(
        self,
        key: bytes,
        until_ms: int,
        fate: Fate | None = Fate.DELIVERED,
        *,
        token: bytes = b"",
        attempts: int = 1,
        content: bytes = b"",
        memo: bytes = b"",
        hard_until_ms: int = 0,
        keep_until_ms: int = 0,
    ) -> Record:
        """Make a record as another store would hand it over."""
        keep_until = keep_until_ms or (until_ms if fate else until_ms + self.long)
        return Record(
            key, token, _fresh(), until_ms, attempts, content, fate, memo, hard_until_ms, keep_until
        )

    async def _scanned(self, keys: Collection[bytes], limit: int = 1000) -> dict[bytes, Record]:
        """Scan to the end; return the records of *keys*, as other tests may have records there."""
        found: dict[bytes, Record] = {}
        place = b""
        while True:
            records, place = await self.store.scan(place, limit)
            found |= {record.key: record for record in records if record.key in keys}
            if not place:
                return found

    # --- scan --------------------------------------------------------------------

    @needs("portable")
    async def test_a_scan_sees_every_record_as_it_is(self) -> None:
        done, dead, back, waiting, live, register = keys = self.keys(6)
        await self.committed(done, content=CONTENT, memo=b"m", hard_ms=2 * self.long)
        await self.committed(dead, fate=Fate.DEAD)
        for key, delay in ((back, 0), (waiting, self.long)):
            claim = await self.hold(self.want(key, content=CONTENT))
            assert await self.release(self.back(claim, delay, memo=b"why")) is Reply.RELEASED
        await self.hold(self.want(live, memo=b"first copy"))
        claim = await self.hold(self.want(register))
        await self.release(self.back(claim, memo=b"v1", unsent=True))
        lapsed = (await self.lapsed(self.key(), memo=b"m")).held[0].key
        there = await self.store.peek([*keys, lapsed])
        assert None not in there
        seen = await self._scanned([*keys, lapsed])
        assert [seen.get(key) for key in [*keys, lapsed]] == there

    @needs("portable")
    async def test_a_scan_in_small_steps_misses_nothing(self) -> None:
        keys = self.keys(20)
        await self.store.remember(Memories.of([self.memory(key) for key in keys]))
        for limit in (3, 4, 10, 20, 21):
            assert set(await self._scanned(keys, limit)) == set(keys)

    @needs("portable")
    async def test_a_step_of_a_scan_may_be_repeated(self) -> None:
        keys = self.keys(20)
        await self.store.remember(Memories.of([self.memory(key) for key in keys]))
        first, place = await self.store.scan(b"", 5)
        seen = {record.key for record in first}
        while place:
            await self.store.scan(place, 5)
            records, place = await self.store.scan(place, 5)
            seen |= {record.key for record in records}
        assert seen.issuperset(keys)

    @needs("portable")
    async def test_what_stands_there_during_the_whole_scan_is_seen(self) -> None:
        keys = self.keys(60)
        staying, leaving = keys[::2], keys[1::2]
        await self.store.remember(Memories.of([self.memory(key) for key in keys]))
        records, place = await self.store.scan(b"", 10)
        seen = {record.key for record in records}
        while place:
            gone = [leaving.pop() for _ in range(min(5, len(leaving)))]
            await self.store.forget(gone)
            await self.store.remember(
                Memories.of([self.memory(key) for key in self.keys(3)] if gone else [])
            )
            records, place = await self.store.scan(place, 10)
            seen |= {record.key for record in records}
        assert seen.issuperset(staying)

    @needs("portable")
    async def test_a_scan_changes_nothing(self) -> None:
        lapsed = await self.lapsed(self.key())
        live = await self.hold(self.want(self.key()))
        done = await self.committed(self.key(), hard_ms=2 * self.long)
        keys = [claim.held[0].key for claim in (lapsed, live, done)]
        before = await self.store.peek(keys)
        await self._scanned(keys)
        assert await self.store.peek(keys) == before
        assert (await self.hold(self.want(keys[0]))).held[0].attempts == 2
        assert await self.commit(self.done(live)) is Reply.COMMITTED

    @needs("portable")
    async def test_keys_of_any_shape_are_scanned_and_loaded(self) -> None:
        start, until = self.key(), await self.store.now_ms() + self.long
        records = [self._record(start + shape, until, memo=shape[:99]) for shape in _SHAPES]
        assert await self.store.load(records) == [Reply.REMEMBERED] * len(records)
        seen = await self._scanned([record.key for record in records], 5)
        for record in records:
            assert _is_same(seen.get(record.key), record)

    # --- load --------------------------------------------------------------------

    @needs("portable")
    async def test_records_are_loaded_as_they_are(self) -> None:
        now = await self.store.now_ms()
        later, ago = now + self.long, now - self.short
        key = self.key
        records = [self._record(key(), later, fate, attempts=fate) for fate in Fate]
        records += [
            self._record(key(), later, content=CONTENT, memo=bytes(range(256))),
            self._record(key(), later, hard_until_ms=later + self.long),
            self._record(key(), ago, None, attempts=3, content=CONTENT, memo=b"why"),
            self._record(key(), later, None, attempts=2, memo=b"why"),
            self._record(key(), later, None, token=_fresh(), memo=b"first copy"),
            self._record(key(), ago, None, token=_fresh(), keep_until_ms=later),
            self._record(key(), ago, None, attempts=0, memo=b"v1", keep_until_ms=later),
        ]
        assert await self.store.load(records) == [Reply.REMEMBERED] * len(records)
        there = await self.store.peek([record.key for record in records])
        for loaded, record in zip(there, records, strict=True):
            assert _is_same(loaded, record)

    @needs("portable")
    async def test_a_loaded_window_ends_when_its_record_says(self) -> None:
        key, until = self.key(), await self.store.now_ms() + 2 * self.short
        assert await self.store.load([self._record(key, until, Fate.STALE, memo=b"m")]) == [
            Reply.REMEMBERED
        ]
        assert await self.ask(self.want(key)) == Duplicate(key, Fate.STALE, b"m")
        await self.wait(2 * self.short)
        want = self.want(key)
        assert (await self.hold(want)).held == (Held(key, want.generation, 1, b""),)

    @needs("portable")
    async def test_loaded_attempts_go_on_counting(self) -> None:
        ago = await self.store.now_ms() - self.short
        record = self._record(self.key(), ago, None, attempts=3, content=CONTENT, memo=b"why")
        await self.store.load([record])
        claim = await self.hold(self.want(record.key, content=CONTENT))
        assert claim.held == (Held(record.key, record.generation, 4, b"why"),)

    @needs("portable")
    async def test_a_loaded_delay_is_waited_for(self) -> None:
        key, due = self.key(), await self.store.now_ms() + 2 * self.short
        await self.store.load([self._record(key, due, None)])
        assert isinstance(await self.ask(self.want(key)), Busy)
        await self.wait(2 * self.short)
        assert (await self.hold(self.want(key))).held[0].attempts == 2

    @needs("portable")
    async def test_a_loaded_hold_is_its_holders(self) -> None:
        key, until = self.key(), await self.store.now_ms() + self.long
        mine = self.want(key)
        await self.store.load([self._record(key, until, None, token=mine.token)])
        assert isinstance(await self.ask(self.want(key)), Busy)
        assert isinstance(claim := await self.ask(mine), Claim)
        assert await self.release(self.back(claim)) is Reply.RELEASED

    @needs("portable")
    async def test_a_loaded_record_keeps_its_generation(self) -> None:
        now = await self.store.now_ms()
        done = self._record(self.key(), now + self.long)
        free = self._record(self.key(), now - self.short, None)
        await self.store.load([done, free])
        for record, reply in ((done, Reply.ALREADY), (free, Reply.COMMITTED)):
            held = Held(record.key, record.generation, 1, b"")
            other = Held(record.key, _fresh(), 1, b"")
            assert await self.commit(self.done(Claim(b"", (other,), 0))) is Reply.FENCED
            assert await self.commit(self.done(Claim(b"", (held,), 0))) is reply

    @needs("portable")
    async def test_a_loaded_window_slides_up_to_its_hard_end(self) -> None:
        key, now = self.key(), await self.store.now_ms()
        until, hard = now + self.long, now + 2 * self.long
        await self.store.load([self._record(key, until, hard_until_ms=hard)])
        pushed = await self.ask(self.want(Part(key, slide_ms=5 * self.long)))
        assert isinstance(pushed, Duplicate)
        assert (await self.see(key)).until_ms == hard

    @needs("portable")
    async def test_loading_leaves_what_is_there_alone(self) -> None:
        done, live = self.keys(2)
        await self.committed(done, memo=b"first")
        await self.hold(self.want(live))
        lapsed = (await self.lapsed(self.key(), memo=b"v2")).held[0].key
        claim = await self.hold(self.want(self.key()))
        await self.release(self.back(claim, self.long))
        keys = [done, live, lapsed, claim.held[0].key]
        before = await self.store.peek(keys)
        until = await self.store.now_ms() + 2 * self.long
        for fate in (Fate.DEAD, None):
            records = [self._record(key, until, fate, memo=b"second") for key in keys]
            assert await self.store.load(records) == [Reply.KNOWN] * 4
            assert await self.store.peek(keys) == before

    @needs("portable")
    async def test_loading_takes_the_place_of_what_is_past_its_window(self) -> None:
        key = self.key()
        await self.committed(key, window_ms=self.short, content=CONTENT, memo=b"old")
        await self.wait(self.short)
        record = self._record(key, await self.store.now_ms() + self.long, Fate.DEAD, memo=b"new")
        assert await self.store.load([record]) == [Reply.REMEMBERED]
        assert _is_same(await self.see(key), record)

    @needs("portable")
    async def test_loading_twice_changes_nothing(self) -> None:
        now = await self.store.now_ms()
        done = self._record(self.key(), now + self.long, memo=b"m")
        free = self._record(self.key(), now - self.short, None, memo=b"m")
        assert await self.store.load([done, free]) == [Reply.REMEMBERED] * 2
        before = await self.store.peek([done.key, free.key])
        later = [replace(one, until_ms=one.until_ms + 1, memo=b"n") for one in (done, free)]
        assert await self.store.load(later) == [Reply.KNOWN] * 2
        assert await self.store.peek([done.key, free.key]) == before

    @needs("portable")
    async def test_what_was_loaded_is_not_purged_before_its_time(self) -> None:
        key, now = self.key(), await self.store.now_ms()
        ages = now + 100 * self.purge_slack_ms
        await self.store.load([self._record(key, now, None, memo=b"v1", keep_until_ms=ages)])
        await self.wait(self.short + self.purge_slack_ms)
        await self.purge()
        assert (await self.hold(self.want(key))).held[0].memo == b"v1"

    @needs("portable")
    async def test_a_batch_of_hundreds_of_records_answers_in_order(self) -> None:
        keys, until = self.keys(600), await self.store.now_ms() + self.long
        await self.store.remember(
            Memories.of([self.memory(key, memo=b"there") for key in keys[::3]])
        )
        records = [self._record(key, until, memo=key) for key in keys]
        assert await self.store.load(records) == [
            *[Reply.KNOWN, Reply.REMEMBERED, Reply.REMEMBERED] * 200
        ]
        for key, record in zip(keys, await self.store.peek(keys), strict=True):
            assert record is not None
            assert record.memo == (b"there" if key in keys[::3] else key)
        assert await self.store.load([]) == []

    @needs("portable")
    async def test_of_many_loads_at_once_exactly_one_wins_each_key(self) -> None:
        keys, until = self.keys(10), await self.store.now_ms() + self.long
        batches = [
            [self._record(key, until, memo=b"%d" % task) for key in keys] for task in range(TASKS)
        ]
        answers = await asyncio.gather(*[self.store.load(records) for records in batches])
        for record, replies in zip(
            await self.store.peek(keys), zip(*answers, strict=True), strict=True
        ):
            assert sorted(map(str, replies)) == [str(Reply.KNOWN)] * (TASKS - 1) + [
                str(Reply.REMEMBERED)
            ]
            assert record is not None
            assert record.memo == b"%d" % replies.index(Reply.REMEMBERED)


def _is_same(loaded: Record | None, given: Record) -> bool:
    """Compare records; a store may keep only the first bytes of a done record's generation."""
    if loaded is None:
        return False
    head = loaded.generation if given.fate else given.generation
    is_head = len(head) >= 8 and given.generation.startswith(head)
    return is_head and replace(given, generation=head) == loaded
