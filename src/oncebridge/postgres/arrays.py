"""Items turned into arrays, one per field, as the functions in the database take them."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Final, TypeVar

from oncebridge.store import Commit, Release

_T = TypeVar("_T")

_LONGEST_KEY: Final = 1000
"""What fits into an index with room to spare; the limit is about 2,700 bytes."""


def commit_arrays(commits: Sequence[Commit]) -> tuple[Any, ...]:
    """Turn commits around: what `commit` and `settle` take."""
    return (
        stored_keys([asked.key for asked in commits]),
        [asked.generation for asked in commits],
        folded([int(asked.fate) for asked in commits]),
        folded([asked.window_ms for asked in commits]),
        folded([asked.hard_ms for asked in commits]),
        _given([asked.memo for asked in commits]),
    )


def release_arrays(releases: Sequence[Release]) -> tuple[Any, ...]:
    """Turn releases around: what `release` and `settle` take."""
    return (
        stored_keys([asked.key for asked in releases]),
        [asked.token for asked in releases],
        folded([asked.delay_ms for asked in releases]),
        folded([asked.keep_ms for asked in releases]),
        folded([asked.unsent for asked in releases]),
        _given([asked.memo for asked in releases]),
    )


def _given(memos: list[bytes | None]) -> list[bytes | None]:
    return [] if memos.count(None) == len(memos) else memos


def folded(values: list[_T]) -> list[_T]:
    """Send one where all are the same."""
    return values[:1] if values and values.count(values[0]) == len(values) else values


def stored_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Shorten keys that do not fit into an index; no other key looks like a shortened one."""
    return [
        key if len(key) <= _LONGEST_KEY else key[: _LONGEST_KEY - 31] + sha256(key).digest()
        for key in keys
    ]


def whole_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Give the keys that were shortened, each in its place; nothing if none was."""
    if max(map(len, keys)) <= _LONGEST_KEY:
        return []
    return [key if len(key) > _LONGEST_KEY else b"" for key in keys]
