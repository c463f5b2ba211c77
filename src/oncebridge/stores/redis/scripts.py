"""
The arguments and results of the scripts in `records.lua`.

The values of one item are one byte string in a fixed order, which `records.lua` documents next to
the script that reads it. MessagePack would take the server twice as long, and the one in Redis
cannot read byte strings of current encoders.
"""

import re
from binascii import hexlify, unhexlify
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from struct import Struct as Layout
from typing import Any

from msgspec import Struct

from oncebridge.errors import StoreError
from oncebridge.events.key import Part
from oncebridge.stores.api import (
    Busy,
    Claim,
    ClaimAnswer,
    Commit,
    Duplicate,
    Extension,
    Fate,
    Held,
    Memory,
    Mismatch,
    Record,
    Release,
    Want,
)

LATEST_MS = 2**45 - 1
"""The latest end of a record, in the year 3084; later ends are cut to it."""

_LATEST_KEEP_MS = 2**48 - 1
_NO_TOKEN = bytes(16)
_FATES = (None, *Fate)
_HARD, _HASH = 2**45, 2**46

_WANT = Layout(">QQQBBB").pack
_COMMIT = Layout(">QQBB").pack
_RELEASE = Layout(">QQBB").pack
_EXTENSION = Layout(">Q").pack
_MEMORY = Layout(">QBBB").pack
_LOAD = Layout(">Q").pack
_SWAP = Layout(">BQQQI").pack
_LENGTH = Layout(">H")
_ATTEMPTS = Layout(">I")


class Script(Struct, frozen=True):
    """The script of one operation."""

    source: bytes
    sha: bytes


@cache
def read_scripts() -> dict[str, Script]:
    """Return all scripts by the name of their operation."""
    text = files(__package__).joinpath("records.lua").read_text("utf-8")
    _, *parts = re.split(r"(?m)^--# (\w+)$", text)
    sources = dict(zip(parts[::2], parts[1::2], strict=True))
    every = _without_comments(sources.pop("every"))
    return {name: _script(every + _without_comments(own)) for name, own in sources.items()}


def _script(source: str) -> Script:
    text = source.encode()
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


def _without_comments(source: str) -> str:
    return re.sub(r"(?m)^--.*\n|^\n|  -- .*$", "", source)


# --- arguments --------------------------------------------------------------------------


def encode_wants(wants: Sequence[Want]) -> list[bytes]:
    """Return all distinct terms, which of them each part uses (from 1), and its own values."""
    terms: dict[tuple[int, ...], int] = {}
    which = bytearray()
    own = []
    for want in wants:
        token, generation = want.token or _NO_TOKEN, want.generation
        if len(token) != 16 or len(generation) != 16:
            raise StoreError("a claim needs a token and a generation of 16 bytes each")
        is_short, memo = _shorten_memo(want.memo)
        lease_ms, keep_ms, count, first = (
            want.lease_ms,
            want.keep_ms,
            len(want.parts),
            16 * is_short,
        )
        for part in want.parts:
            form, field = _hash_field(part.hash)
            each = lease_ms, keep_ms, part.slide_ms, count, first, form
            which.append(terms.setdefault(each, len(terms) + 1))
            own.append(token + generation + field + memo)
    return [b"".join([_WANT(*each) for each in terms]), bytes(which), *own]


def encode_commits(commits: Sequence[Commit]) -> list[bytes]:
    """Return all distinct terms, which of them each commit uses (from 1), and its own values."""
    terms: dict[tuple[int, ...], int] = {}
    which = bytearray()
    own = []
    for commit in commits:
        how, memo = _new_memo(commit.memo)
        each = commit.window_ms, commit.hard_ms, int(commit.fate), how
        which.append(terms.setdefault(each, len(terms) + 1))
        own.append(_sixteen(commit.generation) + memo)
    return [b"".join([_COMMIT(*each) for each in terms]), bytes(which), *own]


def encode_release(release: Release) -> bytes:
    how, memo = _new_memo(release.memo)
    return (
        _RELEASE(release.delay_ms, release.keep_ms, release.unsent, how)
        + _sixteen(release.token)
        + memo
    )


def encode_extension(extension: Extension) -> bytes:
    return _EXTENSION(extension.lease_ms) + _sixteen(extension.token)


def encode_memory(memory: Memory) -> bytes:
    is_short, memo = _shorten_memo(memory.memo)
    form, field = _hash_field(memory.hash)
    return (
        _MEMORY(memory.window_ms, memory.fate, is_short, form)
        + _sixteen(memory.generation)[:8]
        + field
        + memo
    )


def encode_load(record: Record) -> bytes:
    return _LOAD(_within(record.keep_until_ms, _LATEST_KEEP_MS)) + encode_record(record)


def encode_swap(expected: bytes, value: bytes, keep_until_ms: int) -> bytes:
    """Write *value* (empty: remove) if *expected* (empty: no record) is stored."""
    return _SWAP(1 if value else 0, keep_until_ms, 0, 0, len(expected)) + expected + value


def encode_start(value: bytes, lease_ms: int, keep_ms: int) -> bytes:
    """Write *value*, with a lease from now on, if there is no record."""
    return _SWAP(2, 0, lease_ms, keep_ms, 0) + value


def _sixteen(name: bytes) -> bytes:
    """Return a token or generation with 16 bytes; one of another length matches no record."""
    return name if len(name) == 16 else name[:16].ljust(16, b"\0")


def _new_memo(memo: bytes | None) -> tuple[int, bytes]:
    if memo is None:
        return 0, b""
    is_short, text = _shorten_memo(memo)
    return 1 + is_short, text


def _hash_field(content: bytes) -> tuple[int, bytes]:
    if not content:
        return 0, b""
    if len(content) == 32:
        return 1, content
    return 2, _LENGTH.pack(len(content)) + content


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
            + _ATTEMPTS.pack(_within(record.attempts, 2**32 - 1))
            + _sixteen(record.token)
            + _sixteen(record.generation)
            + field
            + memo
        )
    hard = _within(record.hard_until_ms, LATEST_MS)
    return (
        bytes((32 * record.fate + 16 * is_short + _within(record.attempts, 15),))
        + (form * _HASH + (_HARD if hard else 0) + until).to_bytes(6, "big")
        + _sixteen(record.generation)[:8]
        + (hard.to_bytes(6, "big") if hard else b"")
        + field
        + memo
    )


def decode_record(key: bytes, value: bytes) -> Record:
    """Return the record in *value*, which a script wrote."""
    try:
        return _read(key, value)
    except (IndexError, TypeError, ValueError) as error:
        raise StoreError(
            "a record cannot be read; it was written by a newer version, or not by oncebridge"
        ) from error


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
    content, memo = _content_and_memo(value, at, bits // _HASH, is_short=first & 16)
    return Record(key, token, generation, until, attempts, content, fate, memo, hard, keep_until)


def _content_and_memo(value: bytes, at: int, form: int, *, is_short: int) -> tuple[bytes, bytes]:
    size = (0, 32, 0)[form]
    if form == 2:
        size, at = int.from_bytes(value[at : at + 2], "big"), at + 2
    memo = value[at + size :]
    return value[at : at + size], _restore_memo(memo) if is_short else memo


def _within(number: int, most: int) -> int:
    return max(0, min(number, most))


# --- memos ------------------------------------------------------------------------------
#
# Nearly every memo is a JSON list that starts with the id of an event, a UUID. Its 36 characters
# are stored as 16 bytes, so that a done record fits into one allocation of Redis.

_HEX = b"0123456789abcdef"
_SHAPE = bytes.maketrans(b"h" + _HEX, b"x" + b"h" * 16)
_UUID = b"hhhhhhhh-hhhh-hhhh-hhhh-hhhhhhhhhhhh"


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


def claim_answer(want: Want, result: Any, now_ms: int) -> ClaimAnswer:
    """Return the answer to one want."""
    if result == 0:
        parts = want.parts
        if len(parts) == 1:  # the common case by far
            first = Held(parts[0].key, want.generation, 1, want.memo)
            return Claim(want.token, (first,), now_ms)
        held = tuple([Held(p.key, want.generation, 1, want.memo) for p in parts])
        return Claim(want.token, held, now_ms)
    if isinstance(result, list):
        records = [decode_record(p.key, v) for p, v in zip(want.parts, result, strict=True)]
        held = tuple([Held(r.key, r.generation, r.attempts, r.memo) for r in records])
        return Claim(want.token, held, now_ms)
    part: Part = want.parts[result[1] - 1]
    return _REFUSALS[result[0]](decode_record(part.key, result[2:]), now_ms)


def _duplicate(record: Record, _: int) -> ClaimAnswer:
    if record.fate is None:
        raise StoreError("a script returned a result that is not valid; check that this is Redis")
    return Duplicate(record.key, record.fate, record.memo)


_REFUSALS: dict[int, Callable[[Record, int], ClaimAnswer]] = {
    ord("D"): _duplicate,
    ord("B"): lambda record, now_ms: Busy(record.key, record.until_ms - now_ms),
    ord("M"): lambda record, _: Mismatch(record.key, record.memo),
}
