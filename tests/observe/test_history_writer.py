"""Every arrival that is kept is written once, in bounds, whatever the store does meanwhile."""

import asyncio
import itertools
import json
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faults.doubles import FaultyStore
from tests.observe.arrivals import (
    NOW_MS,
    TOPIC,
    decision,
    event,
    key,
    numbers,
    recorder,
    remember,
    report,
    together,
)
from tests.observe.arrivals import everything as search
from tests.size import examples

from oncebridge.engine.causes import Cause
from oncebridge.engine.hooks import Decision
from oncebridge.engine.verdict import First, Outcome, Verdict
from oncebridge.errors import StoreUnavailable
from oncebridge.events.event import Unreadable
from oncebridge.events.key import Part
from oncebridge.observe.history import SLOTS, HistoryPage, HistoryRow, page_key, tail_key
from oncebridge.observe.history_reader import HistoryReader
from oncebridge.observe.history_writer import MOST_BYTES, MOST_PAYLOADS, MOST_ROWS, MOST_WAITING
from oncebridge.observe.masking import Mask
from oncebridge.observe.sampling import MOST_A_SECOND, Sampler
from oncebridge.stores.api import Releases, Want, Wants
from oncebridge.stores.memory import MemoryStore
from oncebridge.testing.clock import ManualClock

DAY_MS = 24 * 3600 * 1000


def only(recording) -> HistoryRow:
    (seen,) = recording.rows()
    return seen.row


async def sheet(store, name: bytes) -> HistoryPage | None:
    (record,) = await store.peek([name])
    return HistoryPage.read(record.memo) if record is not None else None


async def kept(store, *workers, clock=None) -> list[int]:
    """Read all numbers out of the store, as somebody else would."""
    archive = HistoryReader(store, clock=clock or ManualClock())
    return numbers(await search(archive, [report(worker) for worker in workers]))


# --- rows -----------------------------------------------------------------------------------


def test_a_row_says_what_arrived_and_what_became_of_it():
    kept = recorder(MemoryStore())
    first = First("id-0", NOW_MS - 5000)
    told = decision(7, Verdict.DUPLICATE, first=first, reason="why", forwarded=True)
    remember(kept, told, cause=Cause.RE_EMISSION)
    assert only(kept) == HistoryRow(
        1,
        NOW_MS,
        "crm",
        "duplicate",
        "calls",
        key(7),
        "id-7",
        "aws.partner/genesys.com/cloud/org/prod",
        TOPIC,
        TOPIC,
        "conversation-7",
        "123456789012",
        "eu-central-1",
        "",
        "2026-01-02T03:04:05Z",
        len(told.event.raw),
        "why",
        "id-0",
        NOW_MS - 5000,
        "re-emission",
        12.0,
        2,
        True,
        False,
        b"",
    )


def test_of_what_is_no_event_only_verdict_reason_and_size_are_kept():
    kept = recorder(MemoryStore(), payloads=Mask([]))
    raw = b'{"secret": "secret"'
    unreadable = Unreadable(raw, "not-json", "the text is not JSON")
    outcome = Outcome(Verdict.DEAD, True, reason="not-json: the text is not JSON")
    remember(kept, Decision("crm", unreadable, outcome, NOW_MS))
    row = only(kept)
    assert (row.verdict, row.reason, row.size) == ("dead", outcome.reason, len(raw))
    assert "secret" not in repr(row)


async def test_texts_are_cut_however_long():
    store = MemoryStore()
    long = "x" * 1000
    other = event(
        1,
        {"eventBody": {"conversationId": long}},
        **{"id": long, "source": long, "detail-type": long, "account": long, "region": long},
        **{"time": long, "replay-name": long},
    )
    kept = recorder(store)
    told = decision(of=other, reason=long, first=First(long, 1))
    remember(kept, told)
    row = only(kept)
    texts = [
        value
        for value in (getattr(row, f) for f in HistoryRow.__struct_fields__)
        if type(value) is str
    ]
    assert max(map(len, texts)) == 300
    assert {len(t) for t in texts if t.startswith("x")} == {128, 300}
    await kept.write()
    assert await kept_rows(store) == [row]


async def kept_rows(store, worker="w1") -> list[HistoryRow]:
    found = await search(HistoryReader(store, clock=ManualClock()), [report(worker)])
    return [seen.row for seen in found.rows]


async def test_half_characters_in_a_reason_cost_no_row():
    store = MemoryStore()
    kept = recorder(store)
    remember(kept, decision(1, Verdict.FAILED, reason="caf\udce9"))
    remember(kept, decision(2))
    await kept.write()
    assert [row.reason for row in await kept_rows(store)] == ["", "caf?"]


def test_what_a_mask_names_is_kept_in_no_other_place_of_a_row():
    def row(*names: str, of=None) -> HistoryRow:
        kept = recorder(MemoryStore(), mask=Mask(names))
        remember(kept, decision(of=of, first=First("id-0", 1)))
        return only(kept)

    assert row("ani").entity == "conversation-1"
    assert row("ConversationId").entity == ""
    assert row("detail.eventBody.conversationId").entity == ""
    assert row("detail.eventBody").entity == ""
    assert row("interactionId").entity == "conversation-1"
    named = event(1, {"topicName": "v2.users.ana.presence"})
    assert row(of=named).entity == "v2.users.ana.presence"
    assert row("topicName", of=named).entity == ""
    bare = event(1, {"topicName": "v2.users.ana.presence"}, **{"detail-type": ""})
    assert row(of=bare).topic == "v2.users.ana.presence"
    assert row("topicName", of=bare).topic == ""
    assert (row("account").account, row("region").region) == ("", "")
    assert (row("id").id, row("id").first_id, row("id").entity) == ("", "", "conversation-1")
    assert (row("detail-type").topic, row("detail-type").detail_type) == ("", "")


async def test_payloads_are_kept_masked_where_that_is_allowed():
    store = MemoryStore()
    kept = recorder(store, payloads=Mask(["ani"]))
    remember(kept, decision(1))
    remember(kept, decision(2, of=event(2, {"text": "y" * 9000})))
    await kept.write()
    cut, whole = await kept_rows(store)
    body = json.loads(whole.payload)["detail"]["eventBody"]
    assert body == {"conversationId": "conversation-1", "ani": "•••"}
    assert len(cut.payload) <= 4096
    assert "…" in cut.payload.decode()
    without = recorder(store, "w2")
    remember(without, decision(1))
    await without.write()
    assert [row.payload for row in await kept_rows(store, "w2")] == [b""]


async def test_payloads_that_wait_are_bounded_and_the_rows_are_kept_all_the_same():
    store = MemoryStore()
    kept = recorder(store, payloads=Mask([]))
    large = event(1, {"text": "y" * 1_000_000})
    for _ in range(20):
        remember(kept, decision(of=large))
    small = event(2, {"n": 1})
    await kept.write()
    remember(kept, decision(of=small))
    await kept.write()
    rows = await kept_rows(store)
    assert len(rows) == 21
    assert b'"n":1' in rows[0].payload
    assert len(rows[1].payload) == 0
    assert (rows[0].bare, rows[1].bare) == (False, True)


async def test_so_many_payloads_are_masked_at_a_time_and_the_other_rows_say_that_they_have_none():
    store = MemoryStore()
    kept = recorder(store, payloads=Mask([]))
    of = event()
    for _ in range(2):
        for number in range(2 * MOST_PAYLOADS):
            remember(kept, decision(number, of=of))
        refused = Unreadable(b"{", "not-json", "the text is not JSON")
        remember(kept, Decision("crm", refused, Outcome(Verdict.DEAD, True), NOW_MS))
        await kept.write()
    rows = (await kept_rows(store))[::-1]
    a_time = [(True, False)] * MOST_PAYLOADS + [(False, True)] * MOST_PAYLOADS + [(False, False)]
    assert [(bool(row.payload), row.bare) for row in rows] == a_time * 2


async def test_the_loop_is_let_go_again_and_again_while_payloads_are_masked(monkeypatch):
    class Counting(Mask):
        masked_bytes = 0

        def brief(self, raw: bytes) -> bytes:
            self.masked_bytes += len(raw)
            return super().brief(raw)

    mask = Counting(["ani"])
    spells: list[int] = []

    async def at_once(work, *given):
        before = mask.masked_bytes
        done = work(*given)
        spells.append(mask.masked_bytes - before)
        return done

    monkeypatch.setattr("oncebridge.observe.history_writer.asyncio.to_thread", at_once)
    kept = recorder(MemoryStore(), payloads=mask)
    of = event()
    for number in range(1000):
        remember(kept, decision(number, of=of))
    await kept.write()
    assert sum(spells) == MOST_PAYLOADS * len(of.raw)
    assert max(spells) < 20_000


async def test_payloads_of_rows_that_are_gone_leave_their_room_to_others():
    kept = recorder(MemoryStore(), payloads=Mask([]))
    of = event()
    for _ in range(MOST_WAITING + 10):
        remember(kept, decision(of=of))
    await kept.write()
    payloads = [seen.row.number for seen in kept.rows() if seen.row.payload]
    assert kept.lost == 10
    assert payloads == [*range(11, MOST_PAYLOADS + 1), *range(MOST_WAITING + 1, MOST_WAITING + 11)]


async def test_a_write_that_is_cut_off_costs_no_payload():
    store = MemoryStore()
    kept = recorder(store, payloads=Mask([]))
    for number in range(200):
        remember(kept, decision(number))
    for pause_s in (0, 0.001, 0.003):
        writing = asyncio.create_task(kept.write())
        await asyncio.sleep(pause_s)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
    await kept.write(last=True)
    rows = await kept_rows(store)
    assert [row.number for row in rows] == list(range(200, 0, -1))
    assert all(row.payload for row in rows)
    assert kept.lost == 0


# --- pages ----------------------------------------------------------------------------------


async def test_few_rows_go_into_the_tail_and_many_into_the_page():
    store = FaultyStore(MemoryStore())
    kept = recorder(store)
    await kept.write()
    assert not store.calls
    assert kept.pages == 0
    for number in range(1, 201):
        remember(kept, decision(number))
        if number % 10 == 0:
            await kept.write()
    await kept.write()
    assert kept.pages == 1
    page, tail = await sheet(store, page_key("w1", 0)), await sheet(store, tail_key("w1"))
    assert page is not None
    assert tail is not None
    assert (page.number, page.is_full, page.last) == (0, False, 140)
    assert (tail.number, tail.count, tail.last) == (0, 60, 200)
    written = Counter(release.key for release in store.asked["release"])
    assert written == {page_key("w1", 0): 2, tail_key("w1"): 20}
    assert await kept_of(store) == list(range(200, 0, -1))


async def kept_of(store, worker="w1") -> list[int]:
    return await kept(store, worker)


async def test_nothing_new_is_nothing_written():
    store = FaultyStore(MemoryStore())
    kept = recorder(store)
    remember(kept, decision())
    await kept.write()
    calls = store.calls.copy()
    for _ in range(3):
        await kept.write(last=True)
    assert store.calls == calls


async def test_a_full_page_is_written_once_more_and_never_again():
    store = FaultyStore(MemoryStore())
    kept = recorder(store)
    for number in range(1, 1201):
        remember(kept, decision(number))
    await kept.write()
    full = await sheet(store, page_key("w1", 0))
    assert full is not None
    assert full.is_full
    assert full.count <= MOST_ROWS
    assert len(full.text()) <= MOST_BYTES + 5
    assert len(full.write()) < 64_000
    store.asked["release"].clear()
    remember(kept, decision(1))
    await kept.write()
    assert [release.key for release in store.asked["release"]] == [tail_key("w1")]
    assert await kept_of(store) == list(range(1201, 0, -1))


async def test_a_page_of_payloads_is_bounded_by_its_bytes():
    store = MemoryStore()
    kept = recorder(store, payloads=Mask([]))
    for number in range(200):
        remember(kept, decision(number, of=event(number, {"text": "é" * 1900})))
    await kept.write()
    full = await sheet(store, page_key("w1", 0))
    assert full is not None
    assert 30 < full.count < 60
    assert len(full.text()) <= MOST_BYTES + 5
    assert len(await kept_of(store)) == 200


async def test_the_ring_wraps_and_memory_and_store_agree(monkeypatch):
    monkeypatch.setattr("oncebridge.observe.history_writer.MOST_ROWS", 5)
    store = MemoryStore()
    kept = recorder(store)
    for number in range(1, 1003):
        remember(kept, decision(number))
        if number % 7 == 0:
            await kept.write()
    await kept.write()
    assert kept.pages == 201
    lasting = list(range(1002, 1002 - (SLOTS - 1) * 5 - 2, -1))
    assert [seen.row.number for seen in kept.rows()] == lasting[::-1]
    assert await kept_of(store) == lasting
    assert kept.lost == 0
    places = {page_key("w1", n) for n in range(1000)} | {tail_key("w1")}
    assert len(places) == SLOTS + 1
    found = [record for record in await store.peek(list(places)) if record is not None]
    assert len(found) <= SLOTS + 1


async def test_what_is_written_late_waits_but_not_at_the_end():
    clock, store = ManualClock(), FaultyStore(MemoryStore())
    kept = recorder(store, clock=clock, lag=timedelta(seconds=10))
    remember(kept, decision(1, at_ms=clock()))
    await kept.write()
    clock.advance(9000)
    await kept.write()
    assert not store.calls
    clock.advance(1000)
    await kept.write()
    assert await kept_of(store) == [1]
    remember(kept, decision(2, at_ms=clock()))
    await kept.write()
    assert await kept_of(store) == [1]
    await kept.write(last=True)
    assert await kept_of(store) == [2, 1]
    for number in range(600):
        remember(kept, decision(number, at_ms=clock()))
    await kept.write()
    assert len(await kept_of(store)) == 602, "a page that is full need not wait"
    remember(kept, decision(3, at_ms=clock() + 1))
    await kept.write()
    assert len(await kept_of(store)) == 603, "nor a row of the future"


# --- how long -------------------------------------------------------------------------------


async def test_nothing_stays_for_longer_than_it_may():
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    kept = recorder(store, clock=clock)
    arrived: dict[bytes, int] = {}
    for number in range(1, 300):
        remember(kept, decision(number, at_ms=clock()))
        await kept.write()
        for name in [tail_key("w1"), *(page_key("w1", n) for n in range(SLOTS))]:
            (record,) = await store.peek([name])
            found = HistoryPage.read(record.memo) if record is not None else None
            if record is not None and found is not None and found.count:
                arrived[name] = min(row.at_ms for row in found.rows())
                assert record.keep_until_ms <= arrived[name] + DAY_MS
        assert clock() - min(seen.row.at_ms for seen in kept.rows()) <= DAY_MS
        clock.advance(3600_000)
        await kept.write()
    found = await search(HistoryReader(store, clock=clock), [report(kept)])
    ages = [clock() - seen.row.at_ms for seen in found.rows]
    assert max(ages) <= DAY_MS
    assert len(ages) >= 19, "at least seven eighths of the time are kept"
    assert kept.lost == 0


async def test_memory_lets_go_as_well_while_nothing_arrives():
    clock = ManualClock()
    kept = recorder(MemoryStore(clock=clock), clock=clock)
    remember(kept, decision(1, at_ms=clock()))
    await kept.write()
    clock.advance(DAY_MS + 1)
    await kept.write()
    assert not kept.rows()


# --- a store that is away -------------------------------------------------------------------


@pytest.mark.parametrize("seam", ["claim.before", "claim.after", "release.before", "release.after"])
async def test_a_store_that_comes_back_gets_everything_once(seam):
    clock = ManualClock()
    store = FaultyStore(MemoryStore(clock=clock))
    kept = recorder(store, clock=clock)
    store.arm(seam, times=3)
    for number in range(1, 1001):
        remember(kept, decision(number))
        if number % 200 == 0 and number <= 600:
            with pytest.raises(StoreUnavailable):
                await kept.write()
    await kept.write()
    assert await kept_of(store) == list(range(1000, 0, -1))
    assert kept.lost == 0


@pytest.mark.parametrize("operation", ["claim", "release"])
@pytest.mark.parametrize("applied", [True, False])
async def test_no_answer_is_asked_again_next_time(operation, applied):
    clock = ManualClock()
    store = FaultyStore(MemoryStore(clock=clock))
    kept = recorder(store, clock=clock)
    remember(kept, decision(1))
    store.silence(operation, applied=applied)
    with pytest.raises(StoreUnavailable, match="no answer for this one"):
        await kept.write()
    remember(kept, decision(2))
    await kept.write()
    assert await kept_of(store) == [2, 1]


async def test_whoever_else_holds_the_record_is_waited_for():
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    kept = recorder(store, clock=clock)
    await store.claim(Wants.of([Want((Part(tail_key("w1")),), b"t" * 16, b"g" * 16, 9000, 1000)]))
    remember(kept, decision(1))
    await kept.write()
    assert await kept_of(store) == []
    clock.advance(9001)
    await kept.write()
    assert await kept_of(store) == [1]


async def test_a_release_that_comes_late_does_no_harm():
    clock = ManualClock()
    store = FaultyStore(MemoryStore(clock=clock))
    kept = recorder(store, clock=clock)
    remember(kept, decision(1))
    store.arm("release.before")
    with pytest.raises(StoreUnavailable):
        await kept.write()
    (late,) = store.asked["release"]
    remember(kept, decision(2))
    store.meanwhile("release.before", lambda: store.inner.release(Releases.of([late])))
    await kept.write()
    assert await kept_of(store) == [2, 1]
    assert await store.inner.release(Releases.of([late])) != []
    assert await kept_of(store) == [2, 1]


async def test_a_write_that_is_cut_off_is_made_good():
    clock = ManualClock()
    store = FaultyStore(MemoryStore(clock=clock))
    kept = recorder(store, clock=clock)
    for number in range(1, 901):
        remember(kept, decision(number))
    for pause_s in (0, 0.001, 0.003, 0.01):
        store.takes_s = 30
        writing = asyncio.create_task(kept.write())
        await asyncio.sleep(pause_s)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    store.takes_s = 0
    await kept.write(last=True)
    assert await kept_of(store) == list(range(900, 0, -1))


async def test_while_the_store_is_away_the_oldest_go_and_are_counted(monkeypatch):
    monkeypatch.setattr("oncebridge.observe.history_writer.MOST_ROWS", 5)
    store = FaultyStore(MemoryStore())
    kept = recorder(store)
    store.arm("claim.before", times=1e9)
    for number in range(1, 1001):
        remember(kept, decision(number))
        if number % 50 == 0:
            with pytest.raises(StoreUnavailable):
                await kept.write()
    store.disarm()
    await kept.write()
    found = await kept_of(store)
    assert found[0] == 1000
    assert len(found) == SLOTS * 5
    assert kept.lost == 1000 - len(found)


def test_what_nobody_writes_is_bounded():
    kept = recorder(MemoryStore())
    told = decision()
    for _ in range(MOST_WAITING + 10):
        remember(kept, told)
    assert len(kept.rows()) == MOST_WAITING
    assert kept.lost == 10


FAULTS = ["claim.before", "claim.after", "release.before", "release.after"]
STEPS = st.one_of(
    st.integers(1, 90).map(lambda count: ("add", count)),
    st.sampled_from(FAULTS).map(lambda seam: ("fault", seam)),
    st.sampled_from(["claim", "release"]).map(lambda operation: ("silence", operation)),
    st.just(("write", 0)),
    st.integers(1, 8000).map(lambda count: ("wait", count)),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=examples(60))
def test_whatever_the_store_does_all_rows_are_there_once_in_the_end(steps):
    asyncio.run(_follow(steps))


async def _follow(steps) -> None:
    clock = ManualClock()
    store = FaultyStore(MemoryStore(clock=clock))
    kept = recorder(store, clock=clock)
    number = 0
    reader = HistoryReader(store, clock=clock)
    for what, value in steps:
        if what == "add":
            for number in range(number + 1, number + value + 1):  # noqa: B020 - counts on
                remember(kept, decision(number))
        elif what == "fault":
            store.arm(value)
        elif what == "silence":
            store.silence(value, applied=True)
        elif what == "wait":
            clock.advance(value)
        else:
            with suppress(StoreUnavailable):
                await kept.write()
            seen = numbers(await search(reader, [report(kept)]))
            assert len(seen) == len(set(seen))
    store.disarm()
    store._silences.clear()
    clock.advance(5001)
    await kept.write()
    everything = list(range(number, 0, -1))
    assert numbers(await search(reader, [report(kept)])) == everything
    assert [seen.row.number for seen in kept.rows()] == everything[::-1]


# --- sampling -------------------------------------------------------------------------------


def sampled(kept, count: int, clock, *, seconds: int = 1, **more) -> list[int]:
    """Give the keys that are kept of *count* arrivals in each of some seconds."""
    of = event()
    before = len(kept.rows())
    for second in range(seconds):
        for number in range(count):
            told = decision(second * count + number, of=of, at_ms=clock(), **more)
            remember(kept, told)
        clock.advance(1000)
    return [seen.row.number for seen in kept.rows()[before:]]


def test_while_there_are_few_all_are_kept():
    clock = ManualClock()
    kept = recorder(MemoryStore(), mode="sample", clock=clock)
    assert len(sampled(kept, MOST_A_SECOND, clock, seconds=10)) == 10 * MOST_A_SECOND
    assert kept.left_out == 0


def test_when_there_are_many_some_are_kept_and_the_others_counted():
    clock = ManualClock()
    kept = recorder(MemoryStore(), mode="sample", clock=clock)
    sampled(kept, 5000, clock, seconds=2)
    before, out = len(kept.rows()), kept.left_out
    sampled(kept, 3000, clock, seconds=4)
    taken = len(kept.rows()) - before
    assert taken + kept.left_out - out == 12_000
    assert 4 * MOST_A_SECOND / 3 < taken < 4 * MOST_A_SECOND * 1.5
    for _ in range(12):
        sampled(kept, 10, clock)
    out = kept.left_out
    sampled(kept, MOST_A_SECOND, clock)
    assert kept.left_out == out


def test_a_burst_within_one_second_is_bounded_as_well():
    clock = ManualClock()
    kept = recorder(MemoryStore(), mode="sample", clock=clock)
    assert len(sampled(kept, 20_000, clock)) < 10 * MOST_A_SECOND


def test_all_are_kept_where_all_are_wanted():
    clock = ManualClock()
    kept = recorder(MemoryStore(), clock=clock)
    assert len(sampled(kept, 3000, clock)) == 3000


def test_one_event_again_and_again_does_not_fill_the_history():
    clock = ManualClock()
    kept = recorder(MemoryStore(), mode="sample", clock=clock)
    of = event()
    for _ in range(5):
        for _ in range(2000):
            remember(kept, decision(1, Verdict.DUPLICATE, of=of, at_ms=clock()))
        clock.advance(1000)
    assert len(kept.rows()) < 5 * 3 * MOST_A_SECOND


@pytest.mark.parametrize("verdict", [Verdict.DEAD, Verdict.CONFLICT, Verdict.FAILED])
def test_what_went_wrong_is_kept_in_any_case_up_to_a_bound(verdict):
    clock = ManualClock()
    kept = recorder(MemoryStore(), mode="sample", clock=clock)
    sampled(kept, 5000, clock, seconds=3)
    of = event()
    before = len(kept.rows())
    for number in range(40):
        remember(kept, decision(number, verdict, of=of, at_ms=clock()))
    assert len(kept.rows()) - before == 40
    for number in range(3000):
        remember(kept, decision(number, verdict, of=of, at_ms=clock()))
    assert len(kept.rows()) - before < 800


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200), st.integers(0, 12))
def test_of_one_event_all_copies_are_kept_or_none(arrivals, bits):
    clock = ManualClock()
    sampler = Sampler()
    sampler._second, sampler._bits = clock() // 1000, bits
    taken: dict[tuple[int, bool], set[bool]] = {}
    of = {n: event(n) for n, _ in arrivals}
    for number, has_key in arrivals:
        told = decision(number, of=of[number], **({} if has_key else {"key": b""}))
        one = bool(sampler.select(together(told)))
        taken.setdefault((number, has_key), set()).add(one)
    assert all(len(answers) == 1 for answers in taken.values())


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(1, 400)), max_size=30),
    st.integers(0, 6),
    st.sampled_from([Verdict.DELIVERED, Verdict.FAILED]),
)
@settings(max_examples=examples(50))
def test_of_a_batch_the_same_are_kept_as_one_by_one(batches, bits, verdict):
    of, clock, numbers_ = event(), ManualClock(), itertools.count()
    alone, batched = Sampler(), Sampler()
    for sampler in (alone, batched):
        sampler._second, sampler._bits = clock() // 1000, bits
    for wait_ms, count in batches:
        clock.advance(wait_ms)
        told = [
            decision(n, verdict, of=of, at_ms=clock(), **({} if n % 9 else {"key": b""}))
            for n in itertools.islice(numbers_, count)
        ]
        one_by_one = [at for at, one in enumerate(told) if alone.select(together(one))]
        assert [*batched.select(together(*told))] == one_by_one


def test_of_a_batch_each_row_has_its_own_cause_and_what_is_left_out_is_counted():
    kept = recorder(MemoryStore(), mode="sample")
    kept._sampler._second, kept._sampler._bits = NOW_MS // 1000, 2
    told = [decision(n, Verdict.DUPLICATE, key=b"%d" % n + bytes([n])) for n in range(8)]
    causes = [Cause.REDELIVERY, None, None, None, Cause.REPLAY, None, None, None]
    kept.decided(together(*told), causes)
    rows = [seen.row for seen in kept.rows()]
    assert [(row.number, row.id, row.cause) for row in rows] == [
        (1, "id-0", "redelivery"),
        (2, "id-4", "replay"),
    ]
    assert kept.left_out == 6


@given(st.binary(min_size=33, max_size=33))
def test_whoever_is_kept_among_few_is_kept_among_more(name):
    def takes(bits: int) -> bool:
        clock = ManualClock()
        sampler = Sampler()
        sampler._second, sampler._bits = clock() // 1000, bits
        told = decision(key=name)
        return bool(sampler.select(together(told)))

    answers = [takes(bits) for bits in range(33)]
    assert answers == sorted(answers, reverse=True)
    assert answers[0]
