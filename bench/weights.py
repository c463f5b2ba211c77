"""What a key takes in a SQLite file, and whether the file stays as it is once windows end."""

import asyncio
import sqlite3
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from passing import Hand, pass_keys
from table import BATCH, Effort, Line, Measured, Results, Topic, build, met, middle, times

from oncebridge.stores.sqlite.store import SQLiteStore

FLAT = 1.3
"""What may be called flat: no more than this, from the least to the most."""


def sqlite_bytes(effort: Effort) -> Measured:
    """Weigh the file with and without the memo that explains a duplicate."""
    keys = 50_000 if effort.quick else 200_000
    measured: Measured = {"keys": keys}
    memo = b'["1dfbc15a-2a17-4071-923d-8f2d1614d09b",1765552507919]'
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
        for name, note in (("with memo", memo), ("without memo", b"")):
            path = Path(directory) / f"{name}.db"

            async def fill(path: Path = path, note: bytes = note) -> None:
                async with SQLiteStore(path) as store:
                    await pass_keys(store, keys, memo=note)

            asyncio.run(fill())
            measured[name] = path.stat().st_size / keys
    return measured


def sqlite_flat(effort: Effort) -> Measured:
    """Write ten windows' worth of keys, and look at the file on the way."""
    worth = 5_000 if effort.quick else 20_000
    window_ms = 60_000
    clock = Hand()
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=build(), prefix="bench-") as directory:
        path = Path(directory) / "flat.db"

        async def fill() -> None:
            async with SQLiteStore(path, clock=clock) as store:
                for number in range(1, 11):
                    for _ in range(worth // BATCH):
                        await pass_keys(store, BATCH, window_ms=window_ms)
                        clock.now_ms += window_ms * BATCH // worth
                    if number in {1, 2, 5, 10}:
                        db = sqlite3.connect(path)
                        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                        db.close()
                        sizes[f"{number}x"] = path.stat().st_size

        asyncio.run(fill())
    return {"keys": worth, "sizes": sizes, "ratio": sizes["10x"] / sizes["2x"]}


def lines(results: Results) -> Iterator[Line]:
    runs = results["sqlite-bytes"]
    ours = middle(runs, "with memo", "{:.0f} B")
    without = f"{middle(runs, 'without memo', '{:.0f} B')} without explanations"
    yield Line(f"SQLite, one key of {runs[0]['keys']:,}", ours, without)
    runs = results["sqlite-flat"]
    sizes = runs[0]["sizes"]
    listed = " ".join(f"{size / 2**20:.1f}" for size in sizes.values())
    ratios = [run["ratio"] for run in runs]
    yield Line(
        f"SQLite, MiB after n x {runs[0]['keys']:,} keys",
        listed,
        f"at {', '.join(sizes)}",
        "",
        times(ratios),
        f"flat (≤ {FLAT}x)",
        met(statistics.median(ratios) <= FLAT),
    )


TOPIC = Topic(
    "weights",
    "Disk space per key",
    {"sqlite-bytes": sqlite_bytes, "sqlite-flat": sqlite_flat},
    lines,
    "The second line writes the keys of ten windows; the file must be about as large after ten as after "
    "two. The tables on store size and shared stores have the size of a key elsewhere.",
)
