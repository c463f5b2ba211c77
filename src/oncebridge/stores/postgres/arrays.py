"""
Requests as arrays, one per field, as the functions in the database take them.

Arrays of `bytea` are encoded and decoded here, in the server's binary format. The driver can do
that too, but checks for every element whether it is an array, which takes most of the time.
"""

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import Any, Final, TypeVar

from oncebridge.stores.api import Commit, Release

_T = TypeVar("_T")

_LONGEST_KEY: Final = 1000
"""Fits into an index; the limit there is about 2,700 bytes."""

_BYTEA: Final = 17  # the number of the type
_FRONT: Final = Struct(">iiI")  # dimensions, whether there are NULLs, type of the elements
_DIMENSION: Final = Struct(">ii")  # how many, counted from
_SIZE: Final = Struct(">i")
_NULL: Final = _SIZE.pack(-1)


def commit_arrays(commits: Sequence[Commit]) -> tuple[Any, ...]:
    """Return commits as the arrays that the functions `commit` and `settle` take."""
    return (
        stored_keys([asked.key for asked in commits]),
        [asked.generation for asked in commits],
        folded([int(asked.fate) for asked in commits]),
        folded([asked.window_ms for asked in commits]),
        folded([asked.hard_ms for asked in commits]),
        _given([asked.memo for asked in commits]),
    )


def release_arrays(releases: Sequence[Release]) -> tuple[Any, ...]:
    """Return releases as the arrays that the functions `release` and `settle` take."""
    return (
        stored_keys([asked.key for asked in releases]),
        [asked.token for asked in releases],
        folded([asked.delay_ms for asked in releases]),
        folded([asked.keep_ms for asked in releases]),
        folded([asked.unsent for asked in releases]),
        _given([asked.memo for asked in releases]),
    )


def encode_array(values: Sequence[bytes | None]) -> bytes:
    """Return an array of `bytea` in the server's binary format."""
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


def decode_array(data: bytes) -> list[bytes | None]:
    """Return the elements of an array of `bytea` in the server's binary format."""
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
    """Return one element if all are equal, otherwise all."""
    return values[:1] if values and values.count(values[0]) == len(values) else values


def stored_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return keys that fit into an index; a shortened key equals no other key."""
    return [
        key if len(key) <= _LONGEST_KEY else key[: _LONGEST_KEY - 31] + sha256(key).digest()
        for key in keys
    ]


def whole_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return the full keys of those that were shortened, in their positions; empty if none was."""
    if max(map(len, keys)) <= _LONGEST_KEY:
        return []
    return [key if len(key) > _LONGEST_KEY else b"" for key in keys]
