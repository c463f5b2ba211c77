"""
A record as a few bytes, for backends that keep it as one value.

The first byte tells the version of the form; what follows is a MessagePack array. Equal
records have equal bytes, so the bytes themselves can be a condition.
"""

import msgspec

from oncebridge.errors import StoreError
from oncebridge.stores.api import Fate, Record

_VERSION = b"\x01"
_FATES = (None, *Fate)

_Fields = tuple[int, int, int, int, int, bytes, bytes, bytes, bytes, bytes]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Fields).decode


def encode_record(record: Record, *, with_key: bool = True) -> bytes:
    """Write *record*; without its key where the place it goes to tells that."""
    return _VERSION + _encode(
        (
            record.fate or 0,
            record.until_ms,
            record.keep_until_ms,
            record.hard_until_ms,
            record.attempts,
            record.token,
            record.generation,
            record.hash,
            record.memo,
            record.key if with_key else b"",
        )
    )


def decode_record(data: bytes, key: bytes | None = None) -> Record:
    """Read what `encode_record` wrote; *key* is for records without theirs."""
    if data[:1] != _VERSION:
        raise StoreError(
            "a record is in a form that this version does not know; was it written by a newer one?"
        )
    try:
        fate, until, keep, hard, attempts, token, generation, hash_, memo, inner = _decode(
            memoryview(data)[1:]
        )
        return Record(
            inner if key is None else key,
            token,
            generation,
            until,
            attempts,
            hash_,
            _FATES[fate],
            memo,
            hard,
            keep,
        )
    except (msgspec.DecodeError, IndexError):
        raise StoreError("a record is damaged: it cannot be read") from None
