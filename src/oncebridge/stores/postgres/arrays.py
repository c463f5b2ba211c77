"""
Items turned into arrays, one per field, as the functions in the database take them.

Arrays of `bytea` are also written and read here, in the server's own form. The driver can do that
too, but asks of every element whether it is an array itself, which takes longer than all else.
"""

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import Any, Final, TypeVar

from oncebridge.stores.api import Commit, Release

_T = TypeVar("_T")

_LONGEST_KEY: Final = 1000
"""What fits into an index with room to spare; the limit is about 2,700 bytes."""

_BYTEA: Final = 17  # the number of the type
_FRONT: Final = Struct(">iiI")  # dimensions, whether there are NULLs, type of the elements
_DIMENSION: Final = Struct(">ii")  # how many, counted from
_SIZE: Final = Struct(">i")
_NULL: Final = _SIZE.pack(-1)


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


def written(values: Sequence[bytes | None]) -> bytes:
    """Write an array of `bytea` as the server reads it."""
    if not values:
        return _FRONT.pack(0, 0, _BYTEA)
    front = _FRONT.pack(1, None in values, _BYTEA) + _DIMENSION.pack(len(values), 1)
    given = [value for value in values if value is not None]
    sizes = set(map(len, given))
    if len(sizes) == 1 and len(given) == len(values):  # tokens, generations, and nearly all keys
        return _SIZE.pack(sizes.pop()).join([front, *given])
    pieces = [front]
    for value in values:
        pieces += (_NULL,) if value is None else (_SIZE.pack(len(value)), value)
    return b"".join(pieces)


def read(data: bytes) -> list[bytes | None]:
    """Read an array of `bytea` as the server writes it."""
    dimensions, _, _ = _FRONT.unpack_from(data)
    values: list[bytes | None] = []
    if not dimensions:
        return values
    at = _FRONT.size + dimensions * _DIMENSION.size
    while at < len(data):
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        values.append(None if size < 0 else data[at : at + size])
        at += max(size, 0)
    return values


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
    """Return the keys that were shortened, each in its place; nothing if none was."""
    if max(map(len, keys)) <= _LONGEST_KEY:
        return []
    return [key if len(key) > _LONGEST_KEY else b"" for key in keys]
