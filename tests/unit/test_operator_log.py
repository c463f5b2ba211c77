"""The trail in the store: every act is there, bounded, and no other record is touched."""

import asyncio
import json
from pathlib import Path

import pytest

from oncebridge.base.clock import SystemDice
from oncebridge.engine.memos import Memo
from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part, conflict_key, make_key
from oncebridge.operate import operator_log
from oncebridge.operate.operator_log import (
    KEPT_MS,
    MOST_ACTS,
    MOST_BYTES,
    AuditFile,
    OperatorAction,
    OperatorActions,
    OperatorLog,
    StoreOperatorLog,
    who,
)
from oncebridge.stores.api import Want, Wants
from oncebridge.stores.copying import Copying
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite.store import SQLiteStore
from oncebridge.testing.clock import ManualClock

KEY = make_key("crm", b"content", "com.example.shop", "Order", (b"{}",))
NAME = operator_log.event_log_key(KEY)


async def acts(store, name: bytes = NAME) -> tuple[OperatorAction, ...]:
    return (await operator_log.read(store, [name])).get(name, OperatorActions()).acts


async def test_an_act_is_kept_with_who_when_and_why():
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    pen = StoreOperatorLog(store, by="ana@box")
    await pen.write("forget", [NAME], route="crm", reason="the CRM lost it")
    clock.advance(1000)
    await pen.write("resend", [NAME])
    first, second = await acts(store)
    assert (first.verb, first.who, first.route, first.reason) == (
        "forget",
        "ana@box",
        "crm",
        "the CRM lost it",
    )
    assert (second.verb, second.reason) == ("resend", "")
    assert second.at_ms - first.at_ms == 1000
    assert first.name != second.name


async def test_whoever_runs_the_process_is_named():
    store = MemoryStore()
    await StoreOperatorLog(store).write("forget", [NAME])
    (act,) = await acts(store)
    assert act.who == who()
    assert "@" in act.who


async def test_one_act_stands_under_every_key_of_an_event_and_is_told_once():
    store = MemoryStore()
    names = [NAME, operator_log.event_log_key(b"other")]
    await StoreOperatorLog(store).write("forget", names)
    await StoreOperatorLog(store).write("release", names[1:])
    found = await operator_log.read(store, names)
    assert [act.verb for act in operator_log.merged(list(found.values())).acts] == [
        "forget",
        "release",
    ]


async def test_only_the_last_acts_are_kept_and_the_others_counted():
    store = MemoryStore()
    for number in range(MOST_ACTS + 7):
        await StoreOperatorLog(store).write("forget", [NAME], reason=f"n{number}")
    kept = (await operator_log.read(store, [NAME]))[NAME]
    assert len(kept.acts) == MOST_ACTS
    assert kept.acts[-1].reason == f"n{MOST_ACTS + 6}"
    assert kept.before == 7


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}", "\x00"])
async def test_a_trail_stays_small_whatever_the_reasons(letter):
    store = MemoryStore()
    for _ in range(12):
        await StoreOperatorLog(store, by="u" * 500).write("forget", [NAME], reason=letter * 5000)
    (record,) = await store.peek([NAME])
    assert len(record.memo) <= MOST_BYTES
    kept = OperatorActions.read(record.memo)
    assert kept.acts
    assert len(kept.acts) + kept.before == 12
    assert kept.acts[-1].reason == letter * 200


async def test_half_characters_of_an_argument_are_no_obstacle():
    store = MemoryStore()
    await StoreOperatorLog(store).write("forget", [NAME], reason="caf\udce9")
    assert (await acts(store))[0].reason == "caf?"


async def test_a_trail_that_cannot_be_read_is_known_to_have_been_there():
    assert OperatorActions.read(b"\xff") == OperatorActions(before=1)
    newer = json.loads(OperatorActions((OperatorAction("n", 1, "ana", "forget"),)).write()) | {
        "more": 1
    }
    newer["acts"][0] += ["of a later version"]
    assert OperatorActions.read(json.dumps(newer).encode()).acts[0].verb == "forget"


def test_a_trail_is_never_mistaken_for_an_event_nor_its_key_for_another():
    memo = OperatorActions((OperatorAction("n", 1, "ana", "forget"),)).write()
    assert Memo.read(memo) == Memo()
    kinds = [b"content", b"id", b"fields", b"entity", b"about", b"paused"]
    others = {make_key("crm", kind, "", "", ()) for kind in kinds}
    others |= {make_key("", kind, "", "", (KEY,)) for kind in kinds}
    others |= {KEY, conflict_key(KEY, b"h" * 16), conflict_key(b"operator log", KEY)}
    names = {
        NAME,
        operator_log.route_log_key("crm"),
        operator_log.route_log_key(""),
        operator_log.event_log_key(b""),
    }
    assert len(names) == 4
    assert not names & others


async def test_writers_at_the_same_time_lose_no_act(tmp_path):
    async with (
        SQLiteStore(tmp_path / "seen.db") as one,
        SQLiteStore(tmp_path / "seen.db") as other,
    ):
        writers = [
            StoreOperatorLog(store).write("forget", [NAME], reason=str(n))
            for n, store in enumerate([one, other] * 8)
        ]
        await asyncio.gather(*writers)
        assert {act.reason for act in await acts(one)} == {str(n) for n in range(16)}


async def test_a_writer_that_died_is_waited_for(monkeypatch):
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await StoreOperatorLog(store).write("forget", [NAME])
    token, generation = SystemDice().tokens(2)
    await store.claim(Wants.of([Want((Part(NAME),), token, generation, 5000, KEPT_MS)]))
    writing = asyncio.create_task(StoreOperatorLog(store).write("release", [NAME]))
    await asyncio.sleep(0.05)
    assert not writing.done()
    clock.advance(5000)
    await writing
    assert [act.verb for act in await acts(store)] == ["forget", "release"]


class Forgetful:
    """A store whose answers to releases get lost, though they were heeded."""

    def __init__(self, store: MemoryStore, times: int) -> None:
        self._store = store
        self._times = times
        self.claim, self.peek = store.claim, store.peek

    async def release(self, releases):
        told = await self._store.release(releases)
        if self._times:
            self._times -= 1
            raise StoreUnavailable("who knows")
        return told


async def test_an_answer_that_is_lost_makes_no_second_act():
    store = MemoryStore()
    await StoreOperatorLog(Forgetful(store, 2)).write("forget", [NAME])
    assert [act.verb for act in await acts(store)] == ["forget"]


async def test_what_cannot_be_written_is_said(monkeypatch):
    monkeypatch.setattr(operator_log, "_PATIENCE_S", 0.2)
    store = MemoryStore(max_keys=1)
    await StoreOperatorLog(store).write("forget", [NAME])
    with pytest.raises(StoreUnavailable, match=r"so nothing was done.*is full"):
        await StoreOperatorLog(store).write("forget", [operator_log.route_log_key("crm")])
    token, generation = SystemDice().tokens(2)
    await store.claim(Wants.of([Want((Part(NAME),), token, generation, 60_000, KEPT_MS)]))
    with pytest.raises(StoreUnavailable, match="other processes keep writing"):
        await StoreOperatorLog(store).write("forget", [NAME])


async def test_it_is_kept_for_ninety_days_and_then_purged():
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await StoreOperatorLog(store).write("forget", [NAME])
    clock.advance(KEPT_MS - 60_000)
    await store.purge()
    assert await acts(store)
    clock.advance(120_000)
    await store.purge()
    assert await store.peek([NAME]) == [None]


async def test_a_copy_takes_the_trail_along_and_brings_it_up_to_date(tmp_path):
    async with (
        SQLiteStore(tmp_path / "old.db") as old,
        SQLiteStore(tmp_path / "new.db") as new,
    ):
        for verb in ("forget", "release"):
            await StoreOperatorLog(old).write(verb, [NAME, operator_log.route_log_key("crm")])
            copying = Copying(old, new)
            await copying.step()
            assert copying.live == 0
        assert [act.verb for act in await acts(new)] == ["forget", "release"]
        assert len(await acts(new, operator_log.route_log_key("crm"))) == 2


async def test_a_copy_leaves_a_trail_that_the_other_store_has_begun_itself(tmp_path):
    async with SQLiteStore(tmp_path / "a") as one, SQLiteStore(tmp_path / "b") as other:
        await StoreOperatorLog(one).write("forget", [NAME])
        await StoreOperatorLog(other).write("resend", [NAME])
        copying = Copying(one, other)
        while await copying.step():
            pass
        assert (copying.known, copying.copied) == (1, 0)
        assert [act.verb for act in await acts(other)] == ["resend"]
        assert [act.verb for act in await acts(one)] == ["forget"]


async def test_file_log_and_store_have_the_same(tmp_path: Path, caplog):
    store = MemoryStore()
    trails = OperatorLog(AuditFile(str(tmp_path / "audit")), store, reason="because")
    await trails.write("forget", routes=["crm"], keys={KEY: b""})
    await trails.write_on_routes("pause", ["crm", "lake"])
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["verb"], line["routes"], line["reason"]) for line in lines] == [
        ("forget", ["crm"], "because"),
        ("pause", ["crm", "lake"], "because"),
    ]
    assert lines[0]["keys"] == [KEY.hex()]
    assert [(act.verb, act.route) for act in await acts(store)] == [("forget", "crm")]
    for route in ("crm", "lake"):
        (act,) = await acts(store, operator_log.route_log_key(route))
        assert (act.verb, act.reason) == ("pause", "because")


async def test_an_act_tells_to_which_content_it_was_done():
    """Another event may have the same key by now, or may have had it then."""
    store = MemoryStore()
    trails = OperatorLog(AuditFile(None), store)
    await trails.write("forget", keys={KEY: b"content of one"})
    await trails.write("resend", keys={KEY: b""})
    one, unknown = await acts(store)
    assert one.is_of(b"content of one", surely=True)
    assert not one.is_of(b"another content")
    assert one.is_of(b"")
    assert unknown.is_of(b"another content")
    assert not unknown.is_of(b"another content", surely=True)


async def test_events_without_a_key_are_told_once_on_their_route():
    """There is little room, and who has paused the route is to stay there."""
    store = MemoryStore()
    trails = OperatorLog(AuditFile(None), store, reason="lost")
    await trails.write_on_routes("pause", ["crm"])
    for _ in range(MOST_ACTS + 1):
        await trails.write("resend", routes=["crm"])
    await trails.write("resend", routes=["lake"])
    names = [operator_log.route_log_key(name) for name in ("crm", "lake")]
    found = [[act.verb for act in await acts(store, name)] for name in names]
    assert found == [["pause", "resend"], ["resend"]]


async def test_without_a_store_the_file_has_it(tmp_path: Path):
    trails = OperatorLog(AuditFile(str(tmp_path / "audit")), None)
    await trails.write("dead drop", numbers=[3], keys={KEY: b""})
    await trails.write_on_routes("pause", ["crm"])
    first, second = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert (first["numbers"], first["keys"]) == ([3], [KEY.hex()])
    assert "reason" not in second
