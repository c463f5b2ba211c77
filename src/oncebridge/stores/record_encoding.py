"""
A record as bytes, for backends that store it as one value.

The first byte is the version of the format; a MessagePack array follows. Equal records have equal
bytes, so the bytes can be the condition of a write.
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
    """Return *record* as bytes; without its key if that is stored next to it."""
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
    """Return the record of `encode_record`; *key* is for records without their key."""
    if data[:1] != _VERSION:
        raise StoreError(
            "a record has a format that this version does not know; it was probably written by a "
            "newer version: upgrade this one"
        )
    try:
        fate, until, keep, hard, attempts, token, generation, hash_, memo, inner = _decode(
            memoryview(data)[1:]
        )
        own = inner if key is None else key
        return Record(
            own, token, generation, until, attempts, hash_, _FATES[fate], memo, hard, keep
        )
    except (msgspec.DecodeError, IndexError):
        raise StoreError("a record cannot be read: it is damaged") from None
