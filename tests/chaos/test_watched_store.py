"""A test of the witness: what a worker says about its commits is neither too much nor too little."""

from contextlib import suppress

import pytest

from oncebridge.errors import StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Commit,
    Commits,
    Fate,
    NoAnswer,
    Release,
    Releases,
    Want,
    Wants,
)
from oncebridge.stores.memory import MemoryStore

from .worker import WatchedStore

KEY = b"k" * 32
GENERATION = b"g" * 16


class Written:
    """Keep what would be told to the harness."""

    def __init__(self):
        self.late_commits = set()

    def late(self, commits):
        self.late_commits.update(commits)

    def in_time(self, commits):
        self.late_commits.difference_update(commits)


class Moody(MemoryStore):
    """Says nothing about the next few commits, though it may have heard them."""

    def __init__(self):
        super().__init__()
        self.moods = []

    async def commit(self, commits):
        mood = self.moods.pop(0) if self.moods else "answers"
        if mood == "refuses":
            raise StoreUnavailable("away")
        answers = await super().commit(commits) if mood in ("answers", "loses the reply") else []
        if mood == "loses the reply":
            raise StoreUnavailable("reset")
        return answers or [NoAnswer("throttled")] * len(commits)


@pytest.fixture
def notes():
    return Written()


async def claimed(store, *, token=b"t" * 16, lease_ms=60_000):
    want = Want((Part(KEY),), token, GENERATION, lease_ms, 60_000)
    await store.claim(Wants.of([want]))


async def committed(store):
    with suppress(StoreUnavailable):
        await store.commit(Commits.of([Commit(KEY, GENERATION, Fate.DELIVERED, 60_000)]))


async def test_a_commit_in_time_is_not_late(notes):
    store = WatchedStore(MemoryStore(), 60, notes)
    await claimed(store)
    await committed(store)
    assert notes.late_commits == set()


async def test_a_commit_after_the_lease_is_late(notes):
    store = WatchedStore(MemoryStore(), 0, notes)
    await claimed(store)
    await committed(store)
    assert notes.late_commits == {(KEY.hex(), 1)}


@pytest.mark.parametrize("mood", ["refuses", "loses the reply", "throttles"])
async def test_a_commit_that_never_lands_is_late(notes, mood):
    moody = Moody()
    moody.moods = [mood]
    store = WatchedStore(moody, 60, notes)
    await claimed(store)
    await committed(store)
    assert notes.late_commits == {(KEY.hex(), 1)}


@pytest.mark.parametrize("mood", ["refuses", "loses the reply", "throttles"])
async def test_a_commit_that_lands_at_last_but_in_time_is_not_late(notes, mood):
    moody = Moody()
    moody.moods = [mood, mood]
    store = WatchedStore(moody, 60, notes)
    await claimed(store)
    for _ in range(3):
        await committed(store)
    assert notes.late_commits == set()


async def test_a_commit_that_lands_after_the_lease_stays_late(notes):
    moody = Moody()
    moody.moods = ["refuses"]
    store = WatchedStore(moody, 0, notes)
    await claimed(store)
    await committed(store)
    await committed(store)
    assert notes.late_commits == {(KEY.hex(), 1)}


async def test_what_the_next_attempt_commits_in_time_does_not_make_the_first_one_timely(notes):
    moody = Moody()
    moody.moods = ["refuses"]
    store = WatchedStore(moody, 60, notes)
    await claimed(store, lease_ms=0)
    await committed(store)
    await claimed(store, token=b"u" * 16)
    await committed(store)
    assert notes.late_commits == {(KEY.hex(), 1)}


async def test_an_attempt_that_the_same_worker_takes_over_is_late(notes):
    """The store was locked: the lease was over before the commit was even sent."""
    store = WatchedStore(MemoryStore(), 0, notes)
    await claimed(store, lease_ms=0)
    await claimed(store, token=b"u" * 16)
    assert notes.late_commits == {(KEY.hex(), 1)}


async def test_an_attempt_that_was_released_is_not_late(notes):
    store = WatchedStore(MemoryStore(), 0, notes)
    await claimed(store, lease_ms=0)
    await store.release(Releases.of([Release(KEY, b"t" * 16)]))
    await claimed(store, token=b"u" * 16)
    assert notes.late_commits == set()


async def test_an_attempt_is_not_late_before_its_lease_is_over(notes):
    """A store that gives the key away too early has no excuse."""
    store = WatchedStore(MemoryStore(), 60, notes)
    await claimed(store, lease_ms=0)
    await claimed(store, token=b"u" * 16)
    assert notes.late_commits == set()
