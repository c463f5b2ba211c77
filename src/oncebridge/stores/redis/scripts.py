"""
The arguments and results of the scripts in `records.lua`, which documents both.

What all items of a batch share is sent once. MessagePack would take the server twice as long, and the one in Redis cannot read byte strings of current encoders.
"""

import re
from binascii import hexlify, unhexlify
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from operator import add
from struct import Struct as Layout
from typing import Any, Final

from msgspec import Struct

from oncebridge.errors import StoreError
from oncebridge.stores.api import (
    HELD,
    Busy,
    Claim,
    ClaimAnswer,
    Column,
    Columns,
    Commits,
    Duplicate,
    Extensions,
    Fate,
    Held,
    Memories,
    Mismatch,
    Record,
    Releases,
    Wants,
    folded,
    spread,
)

FORM: Final = 1
"""The form of records; a store with a newer one is not opened."""
FORM_KEY: Final = b"oncebridge-form"
"""Where a store keeps the form of its records, next to them."""

LATEST_MS = 2**45 - 1
"""The latest end of a record, in the year 3084; later ends are cut to it."""

_LATEST_KEEP_MS = 2**48 - 1
_NO_TOKEN = bytes(16)
_FATES = (None, *Fate)
_UNREADABLE = "a record cannot be read; it was written by a newer version, or not by oncebridge"
_HARD, _HASH = 2**45, 2**46

# A token or generation of another length than 16 is cut or filled up; it matches no record.
_WANT = Layout(">QQ16s16sBBQB").pack
_COMMIT = Layout(">16sQQBB").pack
_RELEASE = Layout(">16sQQBB").pack
_EXTENSION = Layout(">16sQ").pack
_MEMORY = Layout(">8sQBBB").pack
_LOAD = Layout(">Q").pack
_SWAP = Layout(">BQQQI").pack
_HASH_LENGTH = Layout(">H")
_OPEN = Layout(">I16s16s").pack


class Script(Struct, frozen=True):
    """The script of one operation."""

    source: bytes
    sha: bytes


@cache
def read_scripts() -> dict[str, Script]:
    """Return all scripts by the name of their operation."""
    text = files(__package__).joinpath("records.lua").read_text("utf-8")
    _, _, every, *parts = re.split(r"(?m)^--# (\w+)$", text)
    found = {}
    for name, own in zip(parts[::2], parts[1::2], strict=True):
        source = (every + own).encode()
        sha = sha1(source, usedforsecurity=False).hexdigest().encode()
        found[name] = Script(source, sha)
    return found


# --- arguments --------------------------------------------------------------------------


class KeyBatch(Columns[Any], frozen=True, gc=False):
    """Keys for a script with other terms than those of a store's operations."""

    own: Sequence[bytes] = ()
    """The argument for each key, if the script takes one."""
    terms: bytes = b""


Batch = Wants | Columns[Any]
_Arguments = tuple[bytes, list[bytes]]
"""The terms of all names or of each, and the own value of each; none if the script takes none."""


def _encode_wants(batch: Wants) -> _Arguments:
    for tokens, sizes in ((batch.token, {0, 16}), (batch.generation, {16})):
        if not sizes.issuperset(map(len, tokens if isinstance(tokens, list) else (tokens,))):
            raise StoreError("a claim needs a token and a generation of 16 bytes each")
    short, memos = _memo_fields(batch.memo, len(batch))
    columns: list[Any]
    columns = [batch.lease_ms, batch.keep_ms, batch.token, batch.generation, batch.sizes or 1]
    columns += short, memos
    if batch.sizes is not None:
        columns = [batch.by_key(column) for column in columns]
    form, own = _with_hashes(batch.hash, columns.pop())
    return _terms(_WANT, [*columns, batch.slide_ms, form], len(batch.keys)), own


def _encode_commits(batch: Commits) -> _Arguments:
    form, own = _memo_fields(batch.memo, len(batch.keys))
    columns = [batch.generation, batch.window_ms, batch.hard_ms, batch.fate, form]
    return _terms(_COMMIT, columns, len(batch.keys)), own


def _encode_releases(batch: Releases) -> _Arguments:
    form, own = _memo_fields(batch.memo, len(batch.keys))
    columns = [batch.token, batch.delay_ms, batch.keep_ms, batch.unsent, form]
    return _terms(_RELEASE, columns, len(batch.keys)), own


def _encode_extensions(batch: Extensions) -> _Arguments:
    return _terms(_EXTENSION, [batch.token, batch.lease_ms], len(batch.keys)), []


def _encode_memories(batch: Memories) -> _Arguments:
    short, memos = _memo_fields(batch.memo, len(batch.keys))
    form, own = _with_hashes(batch.hash, memos)
    columns = [batch.generation, batch.window_ms, batch.fate, short, form]
    return _terms(_MEMORY, columns, len(batch.keys)), own


_ENCODERS: Final[Mapping[type, Callable[[Any], _Arguments]]] = {
    Wants: _encode_wants,
    Commits: _encode_commits,
    Releases: _encode_releases,
    Extensions: _encode_extensions,
    Memories: _encode_memories,
    KeyBatch: lambda batch: (batch.terms, [*batch.own]),
}


def encode(batch: Batch) -> _Arguments:
    """Return the arguments of the script for *batch*."""
    return _ENCODERS[type(batch)](batch)


def _terms(pack: Callable[..., bytes], columns: Sequence[Column[Any]], count: int) -> bytes:
    if list not in map(type, columns):
        return pack(*columns)
    return b"".join(map(pack, *[spread(column, count) for column in columns]))


def _with_hashes(column: Column[bytes], memos: Sequence[bytes]) -> tuple[Column[int], list[bytes]]:
    """Return the form of the hashes, and each hash with its memo."""
    if not column:
        return 0, [*memos]
    hashes = spread(column, len(memos))
    if {32}.issuperset(map(len, hashes)):
        return 1, [*map(add, hashes, memos)]
    fields = [_hash_field(content) for content in hashes]
    own = [field + memo for (_, field), memo in zip(fields, memos, strict=True)]
    return folded([form for form, _ in fields]), own


def encode_load(record: Record) -> bytes:
    return _LOAD(_within(record.keep_until_ms, _LATEST_KEEP_MS)) + encode_record(record)


def encode_swap(expected: bytes, value: bytes, keep_until_ms: int) -> bytes:
    """Write *value* (empty: remove) if *expected* (empty: no record) is stored."""
    return _SWAP(1 if value else 0, keep_until_ms, 0, 0, len(expected)) + expected + value


def encode_start(value: bytes, lease_ms: int, keep_ms: int) -> bytes:
    """Write *value*, with a lease from now on, if there is no record."""
    return _SWAP(2, 0, lease_ms, keep_ms, 0) + value


def _hash_field(content: bytes) -> tuple[int, bytes]:
    if not content:
        return 0, b""
    if len(content) == 32:
        return 1, content
    return 2, _HASH_LENGTH.pack(len(content)) + content


# --- records ----------------------------------------------------------------------------


def encode_record(record: Record) -> bytes:
    """Return *record* in the format of the scripts."""
    is_short, memo = _shorten_memo(record.memo)
    form, field = _hash_field(record.hash)
    until = _within(record.until_ms, LATEST_MS)
    if record.fate is None:
        return (
            bytes((16 * is_short,))
            + (form * _HASH + until).to_bytes(6, "big")
            + _within(record.keep_until_ms, _LATEST_KEEP_MS).to_bytes(6, "big")
            + _OPEN(_within(record.attempts, 2**32 - 1), record.token, record.generation)
            + field
            + memo
        )
    hard = _within(record.hard_until_ms, LATEST_MS)
    return (
        bytes((32 * record.fate + 16 * is_short + _within(record.attempts, 15),))
        + (form * _HASH + (_HARD if hard else 0) + until).to_bytes(6, "big")
        + record.generation[:8].ljust(8, b"\0")
        + (hard.to_bytes(6, "big") if hard else b"")
        + field
        + memo
    )


def decode_record(key: bytes, value: bytes) -> Record:
    """Return the record in *value*, which a script wrote."""
    try:
        return _read(key, value)
    except (IndexError, TypeError, ValueError) as error:
        raise StoreError(_UNREADABLE) from error


def _read(key: bytes, value: bytes) -> Record:
    first, bits = value[0], int.from_bytes(value[1:7], "big")
    fate, until = _FATES[first >> 5], bits % _HARD
    hard = 0
    if fate is None:
        at = 49
        keep_until = int.from_bytes(value[7:13], "big")
        attempts = int.from_bytes(value[13:17], "big")
        token, generation = value[17:33], value[33:49]
        if token == _NO_TOKEN:
            token = b""
    else:
        at = 15
        keep_until, attempts, token, generation = until, first % 16, b"", value[7:15]
        if bits & _HARD:
            hard, at = int.from_bytes(value[15:21], "big"), 21
    if len(value) < at:
        raise ValueError("it is too short")
    form = bits // _HASH
    if form == 2:
        at += 2
        end = at + int.from_bytes(value[at - 2 : at], "big")
    else:
        end = at + (0, 32)[form]
    memo = _restore_memo(value[end:]) if first & 16 else value[end:]
    content = value[at:end]
    return Record(key, token, generation, until, attempts, content, fate, memo, hard, keep_until)


def _within(number: int, most: int) -> int:
    return max(0, min(number, most))


# --- memos ------------------------------------------------------------------------------
#
# Nearly every memo is a JSON list that starts with the id of an event, a UUID. Its 36 characters
# are stored as 16 bytes, so that a done record fits into one allocation of Redis.

_HEX = b"0123456789abcdef"
_SHAPE = bytes.maketrans(b"h" + _HEX, b"x" + b"h" * 16)
_UUID = b"hhhhhhhh-hhhh-hhhh-hhhh-hhhhhhhhhhhh"
_BEGINNING = b'["' + _UUID + b'",'


def _memo_fields(column: Column[Any], count: int) -> tuple[Column[int], list[bytes]]:
    """Return the form of memos, and each in this form; none if all stay as they are stored."""
    if not isinstance(column, list):
        form, memo = _memo_field(column)
        return form, [] if column is None else [memo] * count
    if count > 1 and None not in column and (alike := _shorten_alike(column)) is not None:
        return 1, alike
    fields = [_memo_field(memo) for memo in column]
    return folded([form for form, _ in fields]), [memo for _, memo in fields]


def _memo_field(memo: bytes | None) -> tuple[int, bytes]:
    return (2, b"") if memo is None else _shorten_memo(memo)


def _shorten_alike(memos: Sequence[bytes]) -> list[bytes] | None:
    """Return the short forms of memos if all have one and are of one shape; faster than each."""
    first, whole = memos[0], b"".join(memos)
    shape = first.translate(_SHAPE)
    if (
        shape[:40] != _BEGINNING
        or first[-1] != 93  # ]
        or whole.translate(_SHAPE) != shape * len(memos)
        or len(set(map(len, memos))) > 1
    ):
        return None
    ids = unhexlify(b"".join([memo[2:38] for memo in memos]).translate(None, b"-"))
    starts = range(0, len(ids), 16)
    return [ids[at : at + 16] + memo[40:-1] for at, memo in zip(starts, memos, strict=True)]


def _shorten_memo(memo: bytes) -> tuple[int, bytes]:
    """Return 1 and the short form of *memo*, or 0 and *memo* if it has none."""
    if (
        memo[:2] == b'["'
        and memo[38:40] == b'",'
        and memo[-1] == 93  # ]
        and memo[2:38].translate(_SHAPE) == _UUID
    ):
        return 1, unhexlify(memo[2:38].replace(b"-", b"")) + memo[40:-1]
    return 0, memo


def _restore_memo(kept: bytes) -> bytes:
    name = hexlify(kept[:16])
    return b'["%b-%b-%b-%b-%b",%b]' % (
        name[:8],
        name[8:12],
        name[12:16],
        name[16:20],
        name[20:],
        kept[16:],
    )


# --- results ----------------------------------------------------------------------------


def claim_answer(wants: Wants, at: int, outcome: Any, now_ms: int) -> ClaimAnswer | int:
    """Return the answer to the claim at position *at*, whose outcome was not the usual one."""
    if isinstance(outcome, list):
        want = wants[at]
        records = [decode_record(p.key, v) for p, v in zip(want.parts, outcome, strict=True)]
        held = tuple([Held(r.key, r.generation, r.attempts, r.memo) for r in records])
        claim = Claim(want.token, held, now_ms)
        return HELD if claim.is_as_asked(want) else claim
    letter, number, value = outcome[:1], outcome[1] - 1, outcome[2:]
    key = wants.keys[at if wants.sizes is None else wants.places(at)[number]]
    if letter == b"B":
        return Busy(key, int.from_bytes(value, "big"))
    record = decode_record(key, value)
    if record.fate is None:
        raise StoreError(_UNREADABLE)
    if letter == b"D":
        return Duplicate(key, record.fate, record.memo)
    return Mismatch(key, record.memo)
