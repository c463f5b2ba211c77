"""
TESTPLAN §8: one check for each known bug, run on the snippet that has it and on ours.

A check that the snippet passes proves nothing, so every test asserts both: red there,
green here. Rows xvii and xviii need Redis and Postgres, and are tested with those stores;
those that need AWS are in `test_naive_on_aws`.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.faults.doubles import CountingDice, FaultyStore, event, now_ms, virtual

from oncebridge import Gateway, Rule, Settings, StoreUnavailable, Verdict
from oncebridge.check.rules import lint
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.events.key import Part
from oncebridge.sinks.function import FunctionSink
from oncebridge.stores.api import Want, Wants
from oncebridge.stores.memory import MemoryStore

from . import naive

WINDOW = "5m"
HANG = "hang"


class World:
    """The same surroundings for a snippet and for ours: a clock, a store and a sink."""

    def __init__(self) -> None:
        self.skew_ms = 0
        self.sent: list[bytes] = []
        """What the sink has taken."""
        self.script: list[Any] = []
        """What the sink does next: take so many seconds, raise, or hang. Then it says yes."""
        self.table = naive.Table(self.clock)
        self.store = FaultyStore(MemoryStore(clock=self.clock))
        self.dead = MemoryDeadLetters()

    def clock(self) -> int:
        return now_ms() + self.skew_ms

    async def send(self, raw: bytes) -> None:
        step = self.script.pop(0) if self.script else 0
        if step == HANG:
            await asyncio.Event().wait()
        if isinstance(step, Exception):
            raise step
        if isinstance(step, tuple):
            await asyncio.sleep(step[0])
            raise step[1]
        await asyncio.sleep(step)
        self.sent.append(raw)


class Ours:
    """A gateway behind the interface of the snippets."""

    def __init__(
        self, world: World, *, offset_ms: int = 0, bare: bool = False, **spec: Any
    ) -> None:
        async def take(one: Any) -> None:
            await world.send(one.raw)

        self.gateway = Gateway(
            store=world.store,
            sink=FunctionSink(take, concurrency=16),
            rules=[Rule.parse({"name": "the rule", "window": WINDOW} | spec)],
            dead=world.dead,
            settings=Settings(max_attempts=3, bare=bare),
            clock=lambda: world.clock() + offset_ms,
            dice=CountingDice(),
        )

    async def handle(self, raw: bytes) -> bool:
        (outcome,) = await self.gateway.process([raw])
        assert self.gateway.books.balance
        return outcome.acknowledge


Subject = Any
Make = Callable[..., Subject]
Check = Callable[[World, Make], Awaitable[None]]


def of(**spec: Any) -> Make:
    """Make ours with a rule."""
    return lambda world, **more: Ours(world, **spec, **more)


async def is_red(check: Check, make: Make) -> None:
    with pytest.raises(AssertionError):
        await check(World(), make)


async def is_green(check: Check, make: Make) -> None:
    await check(World(), make)


async def until_acknowledged(subject: Subject, raw: bytes, *, every_s: float = 5) -> None:
    """Be a queue: bring it again until it is acknowledged."""
    for _ in range(60):
        try:
            if await subject.handle(raw):
                return
        except Exception:  # noqa: BLE001 - a failed invocation: the record comes again
            pass
        await asyncio.sleep(every_s)
    raise AssertionError("never acknowledged")


# --- i: get_item, then put_item -------------------------------------------------------------


async def sixteen_copies_at_once_are_one(world: World, make: Make) -> None:
    barrier = asyncio.Barrier(16)
    world.table.always["get"] = barrier.wait
    workers = [make(world) for _ in range(16)]
    await asyncio.gather(*[worker.handle(event()) for worker in workers])
    assert len(world.sent) == 1


@virtual
async def test_i_get_then_put():
    await is_red(sixteen_copies_at_once_are_one, naive.GetThenPut)
    await is_green(sixteen_copies_at_once_are_one, Ours)


# --- ii: an expired row that is still there -------------------------------------------------


async def the_window_ends_though_the_row_is_still_there(world: World, make: Make) -> None:
    subject = make(world)
    await until_acknowledged(subject, event())
    await asyncio.sleep(299.999)
    await until_acknowledged(subject, event())
    assert len(world.sent) == 1
    await asyncio.sleep(0.001)
    await until_acknowledged(subject, event())
    assert len(world.sent) == 2


@virtual
async def test_ii_attribute_not_exists_alone():
    await is_red(the_window_ends_though_the_row_is_still_there, naive.NotExistsOnly)
    await is_green(the_window_ends_though_the_row_is_still_there, Ours)


# --- iii: mark, then process ----------------------------------------------------------------


async def a_failure_after_the_mark_loses_nothing(world: World, make: Make) -> None:
    world.script = [ConnectionError("reset")]
    await until_acknowledged(make(world), event())
    assert world.sent == [event()]


async def a_crash_after_the_mark_loses_nothing(world: World, make: Make) -> None:
    world.script = [HANG]
    worker = asyncio.create_task(make(world).handle(event()))
    await asyncio.sleep(1)
    worker.cancel()  # and nothing of it is left but the store
    await asyncio.gather(worker, return_exceptions=True)
    await until_acknowledged(make(world), event())
    assert world.sent == [event()]


@pytest.mark.parametrize(
    "check", [a_failure_after_the_mark_loses_nothing, a_crash_after_the_mark_loses_nothing]
)
@virtual
async def test_iii_mark_then_process(check):
    await is_red(check, naive.MarkThenProcess)
    await is_green(check, Ours)


@virtual
async def test_iii_the_second_attempt_is_counted():
    world = World()
    world.script = [ConnectionError("reset")]
    ours = Ours(world)
    await until_acknowledged(ours, event())
    assert ours.gateway.books.retried == 1


KILLED = """
import asyncio, os, sqlite3, sys, time
from datetime import timedelta
from oncebridge import Gateway, Settings
from oncebridge.stores.sqlite import SQLiteStore

how, path, out, event, hangs = sys.argv[1:]

def take(one):
    if hangs == "hangs":
        print("sending", flush=True)
        time.sleep(60)
    with open(out, "a") as file:
        file.write("taken\\n")

def mark_then_process():
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("CREATE TABLE IF NOT EXISTS seen (key PRIMARY KEY)")
    if db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (event,)).rowcount:
        take(event)
    db.close()

async def ours():
    short = [timedelta(milliseconds=n) for n in (200, 50, 50, 10)]
    settings = Settings(lease=short[0], sink_timeout=short[1], commit_budget=short[2], margin=short[3])
    if hangs == "hangs":  # long enough to be killed while sending
        settings = Settings(lease=timedelta(seconds=1), sink_timeout=timedelta(seconds=0.8),
                            commit_budget=short[2], margin=short[3])
    async with Gateway(store=SQLiteStore(path), sink=take, settings=settings) as gateway:
        (outcome,) = await gateway.process([event.encode()], patience=timedelta(seconds=5))
        assert outcome.acknowledge, outcome

asyncio.run(ours()) if how == "ours" else mark_then_process()
"""


@pytest.mark.parametrize(("how", "taken"), [("naive", 0), ("ours", 1)])
def test_iii_killed_between_the_mark_and_the_send(tmp_path, how, taken):
    out = tmp_path / "out"
    out.touch()
    command = [sys.executable, "-c", KILLED, how, str(tmp_path / "seen.db"), str(out)]
    command.append(event().decode())
    victim = subprocess.Popen([*command, "hangs"], stdout=subprocess.PIPE, text=True)
    assert victim.stdout.readline() == "sending\n"
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    subprocess.run([*command, "works"], check=True, timeout=30)
    assert out.read_text().count("taken") == taken


# --- iv, v, vi, ix: what is the same --------------------------------------------------------


def wrapped(n: int) -> bytes:
    """An SQS record that nobody unwrapped."""
    return json.dumps({"messageId": str(n), "body": event({"n": n}, id=str(n)).decode()}).encode()


async def ten_wrapped_records_all_get_a_place(world: World, make: Make) -> None:
    subject = make(world)
    for n in range(10):
        await until_acknowledged(subject, wrapped(n))
    letters = [letter.raw for letter in await world.dead.list()]
    places = world.sent + letters
    assert sorted(places) == sorted(wrapped(n) for n in range(10))


@virtual
async def test_iv_the_hash_of_a_detail_that_is_not_there():
    keys = {naive.HashOfDetail(World()).key(wrapped(n)) for n in range(5)}
    assert [key[:8] for key in keys] == ["44136fa3"]  # of {}
    await is_red(ten_wrapped_records_all_get_a_place, naive.HashOfDetail)
    await is_green(ten_wrapped_records_all_get_a_place, Ours)
    await is_green(ten_wrapped_records_all_get_a_place, of(bare=True))


async def events_without_an_id_are_not_merged(world: World, make: Make) -> None:
    subject = make(world)
    events = [event({"n": n}, id=None) for n in range(3)]
    for one in events:
        await until_acknowledged(subject, one)
    assert world.sent == events


async def rubbish_is_not_merged(world: World, make: Make) -> None:
    subject = make(world)
    rubbish = [b"rubbish 1", b"rubbish 2", b"rubbish 3"]
    for one in rubbish:
        await until_acknowledged(subject, one)
    assert [letter.raw for letter in await world.dead.list()] == rubbish


@pytest.mark.parametrize("check", [events_without_an_id_are_not_merged, rubbish_is_not_merged])
@virtual
async def test_v_a_constant_for_want_of_a_key(check):
    await is_red(check, naive.ConstantFallback)
    await is_green(check, of(key="id"))
    await is_green(check, of(key=["detail.missing"]))


async def one_conversation_has_three_states(world: World, make: Make) -> None:
    subject = make(world)
    states = [
        event({"conversationId": "c", "status": status}, id=status)
        for status in ("open", "transfer", "close")
    ]
    for one in states:
        await until_acknowledged(subject, one)
    assert world.sent == states


@virtual
async def test_vi_the_conversation_alone():
    await is_red(one_conversation_has_three_states, naive.ConversationOnly)
    await is_green(one_conversation_has_three_states, Ours)
    # Told to do the same, ours does: so the linter warns of such a key, and of no better one.
    naive_key, better = ["detail.conversationId"], ["detail.conversationId", "detail.status"]
    await is_red(one_conversation_has_three_states, of(key=naive_key))
    await is_green(one_conversation_has_three_states, of(key=better))
    assert [one.code for one in lint([Rule.parse({"name": "r", "key": naive_key})])] == [
        "key-coarse"
    ]
    assert lint([Rule.parse({"name": "r", "key": better})]) == []


async def equal_details_of_others_are_others(world: World, make: Make) -> None:
    subject = make(world)
    events = [
        event(source=source, detail_type=kind)
        for source, kind in itertools.product(("a", "b"), ("x", "y"))
    ]
    for one in events:
        await until_acknowledged(subject, one)
    assert world.sent == events


async def names_do_not_run_into_each_other(world: World, make: Make) -> None:
    subject = make(world)
    events = [event(source=s, detail_type=t) for s, t in (("a", "bc"), ("ab", "c"), ("abc", ""))]
    for one in events:
        await until_acknowledged(subject, one)
    assert world.sent == events


@virtual
async def test_ix_the_detail_alone():
    await is_red(equal_details_of_others_are_others, naive.HashOfDetail)
    await is_green(equal_details_of_others_are_others, Ours)
    await is_red(names_do_not_run_into_each_other, naive.HashOfJoinedText)
    await is_green(names_do_not_run_into_each_other, Ours)
    await is_green(names_do_not_run_into_each_other, of(key="id"))
    await is_green(names_do_not_run_into_each_other, of(key=["detail.n"]))


# --- vii: timestamp <= last_seen ------------------------------------------------------------

LATEST = {"key": "id", "latest": {"entity": "detail.e", "version": "detail.v"}}


def state(version: int, name: str = "") -> bytes:
    return event({"e": "E", "v": version}, id=f"{version}{name}")


async def two_events_of_one_millisecond_both_go(world: World, make: Make) -> None:
    subject = make(world)
    for one in (state(5, "a"), state(5, "b"), state(4)):
        await until_acknowledged(subject, one)
    assert world.sent == [state(5, "a"), state(5, "b")]


async def an_old_state_never_follows_a_new_one(world: World, make: Make) -> None:
    for run in range(1000):
        world.sent.clear()
        one, two = make(world), make(world)
        entity = f"E{run}"
        new, old = (event({"e": entity, "v": v}, id=f"{run}-{v}") for v in (2, 1))
        world.script = [(run % 7) / 100, (run % 5) / 100]
        first = asyncio.create_task(until_acknowledged(one, new))
        await asyncio.sleep((run % 11) / 100)
        await until_acknowledged(two, old)
        await first
        assert world.sent in ([new], [old, new])


@virtual
async def test_vii_not_newer_than_the_last_seen():
    await is_red(two_events_of_one_millisecond_both_go, naive.LastSeen)
    await is_green(two_events_of_one_millisecond_both_go, of(**LATEST))


@virtual
async def test_vii_compare_and_send_later():
    await is_red(an_old_state_never_follows_a_new_one, naive.LastSeen)
    await is_red(an_old_state_never_follows_a_new_one, naive.CompareThenSend)
    await is_green(an_old_state_never_follows_a_new_one, of(**LATEST))


# --- viii: errors swallowed -----------------------------------------------------------------


async def _unavailable() -> None:
    raise StoreUnavailable("no answer")


def nothing_fails(world: World) -> None:
    pass


def the_claim_fails(world: World) -> None:
    world.table.always["add"] = _unavailable
    world.store.arm("claim.before", times=1e9)


def the_send_fails(world: World) -> None:
    world.script = [ValueError("refused")] * 100


def the_commit_fails(world: World) -> None:
    world.table.always["put"] = _unavailable
    world.store.arm("commit.before", times=1e9)


def acknowledged_means_taken_or_kept(raw: bytes, break_it: Callable[[World], None]) -> Check:
    async def check(world: World, make: Make) -> None:
        break_it(world)
        try:
            acknowledged = await make(world).handle(raw)
        except Exception:  # noqa: BLE001 - raised: the invocation failed, and the record comes again
            acknowledged = False
        kept = [letter.raw for letter in await world.dead.list()]
        assert not acknowledged or raw in world.sent + kept

    return check


@pytest.mark.parametrize(
    ("raw", "break_it"),
    [(b"rubbish", nothing_fails), (event(), the_claim_fails), (event(), the_send_fails)],
    ids=["parse", "claim", "send"],
)
@virtual
async def test_viii_errors_swallowed(raw, break_it):
    check = acknowledged_means_taken_or_kept(raw, break_it)
    await is_red(check, naive.SwallowsErrors)
    await is_green(check, Ours)


@virtual
async def test_viii_a_commit_that_fails_is_no_loss():
    # The event was taken, so it is acknowledged; the record follows when the store is back.
    world = World()
    the_commit_fails(world)
    ours = Ours(world)
    assert await ours.handle(event())
    assert world.sent == [event()]
    assert ours.gateway.books.acked_uncommitted == 1
    world.store.disarm()
    assert await ours.gateway.drain(timedelta(minutes=2))
    assert await Ours(world).handle(event())
    assert world.sent == [event()]


# --- x: clocks ------------------------------------------------------------------------------


async def skewed_clients_share_one_window(world: World, make: Make) -> None:
    slow, fast = make(world, offset_ms=-600_000), make(world, offset_ms=600_000)
    await until_acknowledged(slow, event())
    await until_acknowledged(fast, event())
    await asyncio.sleep(290)
    await until_acknowledged(fast, event())
    await until_acknowledged(slow, event())
    assert len(world.sent) == 1
    await asyncio.sleep(15)
    await until_acknowledged(slow, event())
    await until_acknowledged(fast, event())
    assert len(world.sent) == 2


@virtual
async def test_x_windows_by_the_workers_clocks():
    await is_red(skewed_clients_share_one_window, naive.LocalClock)
    await is_green(skewed_clients_share_one_window, Ours)


# --- xi, xii, xiii, xiv: claims -------------------------------------------------------------


async def a_second_copy_waits_for_the_first(world: World, make: Make) -> None:
    world.script = [HANG]
    holder = asyncio.create_task(make(world).handle(event()))
    await asyncio.sleep(1)
    second = asyncio.create_task(until_acknowledged(make(world), event()))
    await asyncio.sleep(1)
    holder.cancel()  # killed, after the second copy was answered
    await asyncio.gather(holder, return_exceptions=True)
    await second
    assert world.sent == [event()]


@virtual
async def test_xi_busy_taken_for_a_duplicate():
    await is_red(a_second_copy_waits_for_the_first, naive.BusyIsDuplicate)
    await is_green(a_second_copy_waits_for_the_first, Ours)


async def a_late_release_frees_nothing(world: World, make: Make) -> None:
    world.script = [(8, ConnectionError("reset")), 0]
    frozen = asyncio.create_task(make(world).handle(event()))
    await asyncio.sleep(1)
    world.skew_ms += 40_000  # frozen past the lease …
    await until_acknowledged(make(world), event())  # … another delivers and commits …
    assert world.sent == [event()]
    assert not await frozen  # … and the first one fails, and gives its claim back
    await until_acknowledged(make(world), event())
    assert world.sent == [event()]


async def a_commit_of_an_earlier_life_changes_nothing(world: World, make: Make) -> None:
    held = asyncio.Event()
    world.table.meanwhile["commit"] = held.wait
    world.store.meanwhile("commit.before", held.wait)
    frozen = asyncio.create_task(make(world).handle(event()))  # the sink said yes …
    await asyncio.sleep(1)
    world.skew_ms += 40_000  # … and it froze before the commit
    await until_acknowledged(make(world), event())
    world.skew_ms += 400_000  # the window ends, and a new event of that key comes
    before = len(world.sent)
    world.script = [(3, ConnectionError("reset"))]
    new = asyncio.create_task(until_acknowledged(make(world), event()))
    await asyncio.sleep(1)
    held.set()  # now the old commit arrives
    await frozen
    await new
    assert len(world.sent) == before + 1


@virtual
async def test_xii_release_and_commit_without_a_fence():
    await is_red(a_late_release_frees_nothing, naive.Unfenced)
    await is_green(a_late_release_frees_nothing, Ours)
    await is_red(a_commit_of_an_earlier_life_changes_nothing, naive.UnfencedCommit)
    await is_green(a_commit_of_an_earlier_life_changes_nothing, Ours)


async def a_worker_that_is_stuck_does_not_hold_for_ever(world: World, make: Make) -> None:
    world.script = [HANG]
    stuck = asyncio.create_task(make(world).handle(event()))
    await asyncio.sleep(1)
    other = asyncio.create_task(until_acknowledged(make(world), event()))
    try:
        async with asyncio.timeout(120):
            await asyncio.wait({other})
    except TimeoutError:
        other.cancel()
    stuck.cancel()
    await asyncio.gather(stuck, other, return_exceptions=True)
    assert world.sent == [event()]


@virtual
async def test_xiii_a_heartbeat_that_runs_by_itself():
    await is_red(a_worker_that_is_stuck_does_not_hold_for_ever, naive.FreeHeartbeat)
    await is_green(a_worker_that_is_stuck_does_not_hold_for_ever, Ours)


async def a_lost_reply_is_not_somebody_else(world: World, make: Make) -> None:
    async def lost() -> None:
        raise ConnectionError("reply lost")

    world.table.after["add"] = lost
    world.store.arm("claim.after")
    assert await make(world).handle(event())
    assert world.sent == [event()]


@virtual
async def test_xiv_the_reply_to_a_claim_is_lost():
    await is_red(a_lost_reply_is_not_somebody_else, naive.FreshTokenOnResend)
    await is_green(a_lost_reply_is_not_somebody_else, Ours)


@virtual
async def test_token_is_worker_id():
    # The mutant that no simulation finds: a delayed release of attempt 1 lands in attempt 2.
    world = World()
    world.script = [ConnectionError("reset"), 8]
    held = asyncio.Event()
    world.store.meanwhile("release.before", held.wait)
    first = asyncio.create_task(Ours(world).handle(event()))
    await asyncio.sleep(1)
    world.skew_ms += 40_000
    second = asyncio.create_task(Ours(world).handle(event()))
    await asyncio.sleep(1)
    held.set()
    assert not await first
    (answer,) = await world.store.inner.claim(
        Wants.of([Want((Part((await _only_key(world))),), bytes(16), bytes(16), 1000, 1000)])
    )
    assert type(answer).__name__ == "Busy"
    assert await second
    assert world.sent == [event()]


async def _only_key(world: World) -> bytes:
    return world.store.asked["claim"][0].parts[0].key


# --- xv: numbers ----------------------------------------------------------------------------


async def long_numbers_are_kept_apart_and_whole(world: World, make: Make) -> None:
    subject = make(world)
    numbers = 123456789012345678901234567890, 123456789012345678901234567891
    events = [event({"order": number, "price": 1.10}) for number in numbers]
    for one in events:
        await until_acknowledged(subject, one)
    assert world.sent == events


@virtual
async def test_xv_numbers_through_floats():
    await is_red(long_numbers_are_kept_apart_and_whole, naive.ThroughFloats)
    await is_green(long_numbers_are_kept_apart_and_whole, Ours)
    await is_green(long_numbers_are_kept_apart_and_whole, of(key="id"))
    await is_green(long_numbers_are_kept_apart_and_whole, of(key=["detail.order"]))


# --- xvi: an outage burns nothing -----------------------------------------------------------


async def an_outage_of_a_minute_gives_nothing_up(world: World, make: Make) -> None:
    events = [event({"n": n}) for n in range(5)]
    down = True

    async def fail() -> None:
        if down:
            raise StoreUnavailable("down")

    world.table.always["add"] = fail
    world.store.arm("claim.before", times=1e9, for_s=60)
    subject = make(world)
    waiting = [asyncio.create_task(until_acknowledged(subject, one)) for one in events]
    await asyncio.sleep(60)
    down = False
    await asyncio.gather(*waiting)
    assert sorted(world.sent) == sorted(events)
    assert await world.dead.list() == []


@virtual
async def test_xvi_attempts_burnt_while_the_store_is_down():
    await is_red(an_outage_of_a_minute_gives_nothing_up, naive.CountsEveryNack)
    await is_green(an_outage_of_a_minute_gives_nothing_up, Ours)


# Was a bug: while the store is down every bounce is told the same short pause (`_backoff(1)`, at most 1 s), so a
# queue that follows it counts some 90 receives a minute, and a redrive policy gives the event up.
@virtual
async def test_xvi_the_pause_grows_while_the_store_is_down():
    world = World()
    world.store.arm("claim.before", times=1e9, for_s=60)
    ours = Ours(world)
    bounces = 0
    while True:
        (outcome,) = await ours.gateway.process([event()])
        if outcome.acknowledge:
            break
        bounces += 1
        await asyncio.sleep(outcome.retry_after_ms / 1000)
    assert outcome.verdict is Verdict.DELIVERED
    assert bounces <= 13  # the maxReceiveCount that the protocol asks for: max_attempts + 5


# --- xix: windows shorter than the redelivery -----------------------------------------------


async def a_redelivery_after_a_day_is_a_duplicate(world: World, make: Make) -> None:
    subject = make(world)
    await until_acknowledged(subject, event())
    await asyncio.sleep(24 * 3600)  # as long as EventBridge tries
    await until_acknowledged(subject, event())
    assert len(world.sent) == 1


@virtual
async def test_xix_a_window_of_minutes():
    await is_red(a_redelivery_after_a_day_is_a_duplicate, naive.ShortWindow)
    await is_green(a_redelivery_after_a_day_is_a_duplicate, of(window="6d"))


@virtual
async def test_xix_what_a_short_window_does_by_content():
    # Documented: the late copy goes again, and the next real event of that content is swallowed.
    world = World()
    ours = Ours(world, window="5m")
    await until_acknowledged(ours, event(id="first"))
    await asyncio.sleep(3600)
    await until_acknowledged(ours, event(id="first"))
    await asyncio.sleep(60)
    await until_acknowledged(ours, event(id="a real second one"))
    assert world.sent == [event(id="first")] * 2


# --- xx: when to come again -----------------------------------------------------------------


@virtual
async def test_xx_a_retry_after_is_never_negative():
    world = World()
    snippet = naive.NegativeRetryAfter(world)
    await snippet.claim(snippet.key(event()))
    assert await snippet.retry_after_ms(event(), behind_ms=40_000) < 0  # red
    world.script = [HANG]
    holder = asyncio.create_task(Ours(world, offset_ms=40_000).handle(event()))
    await asyncio.sleep(0.1)
    late = Ours(world, offset_ms=-40_000)
    for _ in range(20):
        (outcome,) = await late.gateway.process([event()])
        if outcome.acknowledge:
            break
        assert outcome.retry_after_ms > 0
        await asyncio.sleep(2)
    assert outcome.acknowledge
    holder.cancel()
    await asyncio.gather(holder, return_exceptions=True)
