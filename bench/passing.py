"""New keys, passed through a store with nothing around it: claimed, and committed."""

import os
import time
from collections.abc import Callable

from table import BATCH

from oncebridge import Store
from oncebridge.stores.api import HELD, Commits, Fate, Wants

WINDOW_MS = 6 * 86_400_000
LEASE_MS = 30_000


class Hand:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now_ms = 1_765_551_600_000

    def __call__(self) -> int:
        return self.now_ms


async def pass_keys(
    store: Store,
    count: int,
    *,
    window_ms: int = WINDOW_MS,
    memo: bytes = b"",
    timer: Callable[[], float] = time.perf_counter,
) -> float:
    """
    Claim and commit *count* new keys in batches; give the seconds the store took by *timer*.

    The calls are those of the gateway: one token and one generation, and a memo for each key.
    """
    took = 0.0
    for at in range(0, count, BATCH):
        size = min(BATCH, count - at)
        drawn = os.urandom(32 * size)
        keys = [b"\1" + drawn[n : n + 32] for n in range(0, len(drawn), 32)]
        token, generation = os.urandom(16), os.urandom(16)
        wants = Wants(keys, token, generation, LEASE_MS, window_ms, [memo] * size)
        begins = timer()
        answers = await store.claim(wants)
        took += timer() - begins
        if answers.each != [HELD] * size:
            raise SystemExit(f"a new key was not claimed: {answers.each}")
        commits = Commits(keys, generation, Fate.DELIVERED, window_ms)
        begins = timer()
        await store.commit(commits)
        took += timer() - begins
    return took
