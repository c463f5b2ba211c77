"""New keys, passed through a store with nothing around it: claimed, and committed."""

import os
import time
from collections.abc import Callable

from table import BATCH

from oncebridge import Store
from oncebridge.events.key import Part
from oncebridge.stores.api import Claim, Commit, Fate, Want

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
    """Claim and commit *count* new keys in batches; give the seconds the store took by *timer*."""
    took = 0.0
    for at in range(0, count, BATCH):
        drawn = os.urandom(64 * min(BATCH, count - at))
        wants = [
            Want(
                (Part(b"\1" + drawn[n : n + 32]),),
                drawn[n + 32 : n + 48],
                drawn[n + 48 : n + 64],
                LEASE_MS,
                window_ms,
                memo,
            )
            for n in range(0, len(drawn), 64)
        ]
        begins = timer()
        answers = await store.claim(wants)
        took += timer() - begins
        held = [answer.held[0] for answer in answers if isinstance(answer, Claim)]
        if len(held) != len(wants):
            raise SystemExit(f"a new key was not claimed: {answers}")
        commits = [Commit(h.key, h.generation, Fate.DELIVERED, window_ms) for h in held]
        begins = timer()
        await store.commit(commits)
        took += timer() - begins
    return took
