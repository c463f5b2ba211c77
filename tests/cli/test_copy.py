"""Another store takes over, and what was passed on stays passed on."""

import asyncio
import os
import re
import signal

import pytest
from tests.cli.strangers import CANARY, installed
from tests.cli.worlds import event

from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores.api import Fate, Memories, Memory, Want, Wants
from oncebridge.stores.copying import Copying
from oncebridge.stores.sqlite.store import SQLiteStore

OLD, NEW = "sqlite:old.db", "sqlite:new.db"
HOUR = 3_600_000


@pytest.fixture
def remembered(tmp_path):
    """Put records into a file."""

    def remember(count: int, name: str = "old.db") -> None:
        async def put() -> None:
            async with SQLiteStore(tmp_path / name) as store:
                await store.remember(
                    Memories.of(
                        [
                            Memory(b"%d" % number, b"g" * 16, Fate.DELIVERED, HOUR)
                            for number in range(count)
                        ]
                    )
                )

        asyncio.run(put())

    return remember


def copied(call, *args: str, **more) -> dict:
    (told,) = call("copy", "--from", OLD, "--to", NEW, "--json", *args, **more).objects()
    return told


RULES = """
[[rules]]
name = "newest"
key = "id"
latest = { entity = "detail.order", version = "detail.version" }
"""


def state(version: int, id: str) -> dict:  # noqa: A002
    return event(id=id) | {"detail": {"order": 7, "version": version}}


def passed(call, store: str) -> dict:
    flags = ("-c", "pipe.toml", "--source", "file:events.ndjson", "--store", store)
    return call("run", *flags, "--sink", "file:out.ndjson", "--json").objects()[-1]


def test_what_was_passed_on_stays_passed_on(run, call, write, tmp_path):
    write("pipe.toml", RULES)
    write("events.ndjson", state(1, "a"), state(3, "b"))
    assert passed(call, OLD)["delivered"] == 2
    told = run("copy", "--from", OLD, "--to", NEW)
    # Two events and their entity; what the worker counted, and the list with its name in it; the
    # epoch of the store, and where its route delivers to.
    assert told.out.split() == ["copied", "7"]
    assert told.err == ""
    assert passed(call, NEW)["duplicate"] == 2
    write("events.ndjson", state(2, "c"))
    assert passed(call, NEW)["stale"] == 1
    assert (tmp_path / "out.ndjson").read_text().count("\n") == 2


def test_the_counts_are_told_to_people_and_programs(call, remembered):
    remembered(1234)
    told = call("copy", "--from", OLD, "--to", NEW)
    assert told.out == "copied             1,234\n"
    assert copied(call) == {
        "copied": 0,
        "updated": 0,
        "known": 1234,
        "expired": 0,
        "live": 0,
        "live_keys": [],
        "complete": True,
        "dry_run": False,
    }


def test_a_dry_run_makes_nothing(call, remembered, tmp_path):
    remembered(3)
    told = call("copy", "--from", OLD, "--to", NEW, "--dry-run")
    assert told.out.split() == ["copied", "3"]
    assert "nothing was changed" in told.err
    assert not (tmp_path / "new.db").exists()
    copied(call)
    remembered(5)
    told = copied(call, "--dry-run")
    assert (told["copied"], told["known"], told["dry_run"]) == (2, 3, True)


@pytest.mark.full
async def test_what_a_worker_holds_is_named_and_the_exit_code_says_so(run, tmp_path):
    async with SQLiteStore(tmp_path / "old.db") as store:
        await store.claim(Wants.of([Want((Part(b"key"),), b"t" * 16, b"g" * 16, 600_000, HOUR)]))
    told = run("copy", "--from", OLD, "--to", NEW, code=1)
    assert told.out.split()[:4] == ["copied", "0", "live", "1"]
    assert re.search(rf"held +{b'key'.hex()} for \d+\.\d s", told.out)
    assert re.search(r"stop the workers, and copy again after \d+ s", told.err)
    (told,) = run("copy", "--from", OLD, "--to", NEW, "--json", code=1).objects()
    assert (told["live"], told["live_keys"]) == (1, [b"key".hex()])


@pytest.mark.full
def test_a_configuration_file_names_a_store_with_its_options(call, write, remembered, tmp_path):
    remembered(2)
    write("old.toml", f'store = {{ url = "{OLD}", busy_timeout = "1s" }}')
    write("new.toml", f'store = "{NEW}"')
    told = call("copy", "--from", "old.toml", "--to", "new.toml", ONCEBRIDGE_STORE="sqlite:x.db")
    assert told.out.split() == ["copied", "2"]
    assert not (tmp_path / "x.db").exists()
    write("new.toml", 'store = { url = "sqlite:new.db", bussy_timeout = "1s" }')
    told = call("copy", "--from", "old.toml", "--to", "new.toml", code=2)
    assert "did you mean 'busy_timeout'?" in told.err
    assert "no such file" in call("copy", "--from", OLD, "--to", "none.toml", code=2).err


def test_an_address_may_stand_in_the_environment(call, remembered):
    remembered(2)
    told = call("copy", "--from", "env:OLD_STORE", "--to", NEW, OLD_STORE=OLD)
    assert told.out.split() == ["copied", "2"]


@pytest.mark.parametrize(
    ("from_", "to", "told"),
    [
        ("memory:", NEW, "--from: memory: is inside the memory of the running service"),
        (OLD, "memory:", "--to: memory: is inside the memory of the running service"),
        (OLD, OLD, "--to: sqlite:old.db is the same store as --from"),
        ("sqlite:none.db", NEW, "--from: sqlite:none.db does not exist"),
        (OLD, "sqlit:new.db", "--to: 'sqlit' is not supported here; did you mean 'sqlite'?"),
        ("old.db", NEW, "--from: 'old.db' is not supported here; allowed: "),
        (OLD, "fixed:x", "--to: fixed:x cannot be copied"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_made(
    call, remembered, monkeypatch, tmp_path, *, from_, to, told
):
    remembered(1)
    installed(monkeypatch)
    assert told in call("copy", "--from", from_, "--to", to, code=2).err
    assert not (tmp_path / "new.db").exists()


def test_both_stores_have_to_be_named(call):
    assert "Missing option '--to'" in call("copy", "--from", OLD, code=2).err


def test_a_store_that_cannot_be_opened_is_told(call, remembered):
    remembered(1)
    told = call("copy", "--from", OLD, "--to", "sqlite:no/such/place.db", code=3)
    assert "the directory does not exist" in told.err
    assert told.out == ""


def test_a_store_that_goes_away_is_told_with_what_was_done(call, remembered, monkeypatch):
    remembered(2500)
    step = Copying.step

    async def failing(self):
        if self.copied == 2000:
            raise StoreUnavailable("new.db: is away")
        return await step(self)

    with monkeypatch.context() as patched:
        patched.setattr(Copying, "step", failing)
        told = call("copy", "--from", OLD, "--to", NEW, code=3)
    assert told.out.split() == ["copied", "2,000"]
    assert "run it again" in told.err
    assert "new.db: is away" in told.err
    assert copied(call)["known"] == 2000


def interrupted(monkeypatch, times: int) -> None:
    """Press Ctrl-C as soon as a batch was copied."""
    step = Copying.step

    async def step_and_press(self):
        more = await step(self)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        return more

    monkeypatch.setattr(Copying, "step", step_and_press)


@pytest.mark.parametrize(("times", "code"), [(1, 1), (2, 130)])
def test_it_may_be_stopped_and_begun_again(call, remembered, monkeypatch, *, times, code):
    remembered(2500)
    with monkeypatch.context() as patched:
        interrupted(patched, times)
        told = copied(call, code=code)
    assert (told["copied"], told["complete"]) == (1000, False)
    told = copied(call)
    assert (told["copied"], told["known"], told["complete"]) == (1500, 1000, True)


def test_a_password_is_never_shown(call, remembered, monkeypatch):
    remembered(1)
    installed(monkeypatch)
    away = f"away://user:{CANARY}@host/"
    for told in (
        call("copy", "--from", away, "--to", NEW, code=3),
        call("copy", "--from", OLD, "--to", away, code=3),
        call("copy", "--from", away, "--to", away, code=2),
        call("copy", "--from", f"fixed://user:{CANARY}@host/", "--to", NEW, code=2),
        call("copy", "--from", f"nothing://user:{CANARY}@host/", "--to", NEW, code=2),
    ):
        assert CANARY not in told.out + told.err
        assert "oncebridge: " in told.err
