"""
Columns of requests as arrays, as the functions in the database take them.

A value that applies to all items is an array of one element. Arrays of `bytea` and `bigint` are
encoded here, in the server's binary format. The driver can do that too, but checks for every
element whether it is an array, which takes most of the time.
"""

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import Any, Final, TypeVar

from msgspec.structs import astuple

from oncebridge.stores.api import Column, Columns, Wants

_T = TypeVar("_T")

_LONGEST_KEY: Final = 1000
"""Fits into an index; the limit there is about 2,700 bytes."""

_BYTEA: Final = 17  # the numbers of the types
_INT8: Final = 20
_EMPTY: Final = Struct(">iiI")  # dimensions, whether there are NULLs, type of the elements
_FRONT: Final = Struct(">iiIii")  # the same; how many, counted from
_SIZE: Final = Struct(">i")
_NULL: Final = _SIZE.pack(-1)
_NUMBER: Final = Struct(">iq")  # size and value
_ONE_BYTES: Final = Struct(">iiIiii")  # all but the value, as most arrays have one
_ONE_NUMBER: Final = Struct(">iiIiiiq")


def claim_arrays(wants: Wants) -> tuple[Any, ...]:
    """Return claims as the arrays that the function `claim` takes."""
    lasts: list[int] = []
    for size in wants.sizes or ():
        lasts += [len(lasts) + size] * size
    columns: Sequence[Any] = (
        wants.token,
        wants.generation,
        wants.lease_ms,
        wants.keep_ms,
        wants.memo,
    )
    keys, wholes = stored_keys(wants.keys)
    parts = *map(wants.by_key, columns), wants.hash, wants.slide_ms
    return keys, *map(as_array, parts), lasts, wholes


def arrays(batch: Columns[Any]) -> tuple[Any, ...]:
    """Return a batch as the arrays that the function for it takes: one per field, in order."""
    keys, *columns = astuple(batch)
    return stored_keys(keys)[0], *map(as_array, columns)


def as_array(column: Column[_T]) -> list[_T]:
    """Return a column as an array; a value that applies to all items is an array of one."""
    return column if isinstance(column, list) else [column]


def stored_keys(keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """
    Return keys that fit into an index, and the full keys in the positions of shortened ones.

    A shortened key equals no other key. The second list is empty if no key was shortened.
    """
    if max(map(len, keys), default=0) <= _LONGEST_KEY:
        return keys, []
    return (
        [
            key if len(key) <= _LONGEST_KEY else key[: _LONGEST_KEY - 31] + sha256(key).digest()
            for key in keys
        ],
        [key if len(key) > _LONGEST_KEY else b"" for key in keys],
    )


def encode_bytes(values: Sequence[Any]) -> bytes:
    """Return bytes, or None for NULL, as an array of `bytea` in the server's binary format."""
    if not values:
        return _EMPTY.pack(0, 0, _BYTEA)
    if len(values) == 1 and values[0] is not None:
        return b"".join((_ONE_BYTES.pack(1, 0, _BYTEA, 1, 1, len(values[0])), values[0]))
    sizes = {None if value is None else len(value) for value in values}
    front = _FRONT.pack(1, None in sizes, _BYTEA, len(values), 1)
    if len(sizes) == 1 and None not in sizes:  # one value, and nearly all keys and memos
        return _SIZE.pack(sizes.pop()).join([front, *values])
    pieces = [front]
    for value in values:
        pieces += (_NULL,) if value is None else (_SIZE.pack(len(value)), value)
    return b"".join(pieces)


def encode_numbers(values: Sequence[int]) -> bytes:
    """Return an array of `bigint` in the server's binary format."""
    if len(values) == 1:
        return _ONE_NUMBER.pack(1, 0, _INT8, 1, 1, 8, values[0])
    if not values:
        return _EMPTY.pack(0, 0, _INT8)
    front = _FRONT.pack(1, 0, _INT8, len(values), 1)
    return b"".join([front, *[_NUMBER.pack(8, value) for value in values]])
