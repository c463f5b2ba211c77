"""
Records as bytes, for backends that store each as one value.

The first byte is the version of the form; a MessagePack array follows. Equal records have equal
bytes, so the bytes can be the condition of a write. A table or bucket has the same byte in a place
of its own, so that a worker finds out at its start whether it knows the form of what is stored.
"""

from typing import Final

import msgspec

from oncebridge.errors import ConfigError, StoreError
from oncebridge.stores.api import Column, Fate, Record, spread
from oncebridge.stores.conditional import Records, mapped

FORM: Final = b"\x01"
_FATES = (None, *Fate)

_Fields = tuple[int, int, int, int, int, bytes, bytes, bytes, bytes, bytes]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Fields).decode


def check_form(found: bytes, where: str) -> None:
    """Raise `ConfigError` if the records in *where* have another form than ours."""
    if found != FORM:
        raise ConfigError(
            "",
            f"{where} has records of form {found.hex()}, and this version of oncebridge knows only "
            f"form {FORM.hex()}: a newer version has written them; upgrade this worker",
        )


def encode_records(records: Records, keys: Column[bytes]) -> list[bytes]:
    """Return *records* as bytes, with *keys*: empty for those whose key is stored next to them."""
    columns = (
        mapped(lambda fate: fate or 0, records.fate),
        records.until_ms,
        records.keep_until_ms,
        records.hard_until_ms,
        records.attempts,
        records.token,
        records.generation,
        records.hash,
        records.memo,
        keys,
    )
    count = len(records)
    rows = zip(*[spread(column, count) for column in columns], strict=True)
    return [FORM + _encode(row) for row in rows]


def decode_record(data: bytes, key: bytes | None = None) -> Record:
    """Return the record in *data*; *key* is for records without their key."""
    if data[:1] != FORM:
        raise StoreError(
            "a record has a form that this version does not know; it was probably written by a "
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
