"""
The arguments and results of the scripts in `records.lua`, which documents both.

Arguments are columns as the batch has them: what all items share is sent once. MessagePack would
take the server twice as long, and the one in Redis cannot read byte strings of current encoders.
"""

import re
from binascii import hexlify, unhexlify
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from struct import Struct as Layout
from struct import iter_unpack
from typing import Any, ClassVar, Final

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

_NUMBER = Layout(">Q").pack
_LENGTH = Layout(">I").pack
_SWAP = Layout(">BQQQI").pack
_HASH_LENGTH = Layout(">H")
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

Arguments = Sequence[bytes]


class Named(Columns[bytes], frozen=True, gc=False):
    """Keys for a script that takes one argument for each, or none at all."""

    row: ClassVar = bytes

    arguments: Column[bytes] = b""


Batch = Wants | Columns[Any]


def _wants_arguments(wants: Wants) -> Arguments:
    return (
        _numbers(wants.lease_ms),
        _numbers(wants.keep_ms),
        _checked_tokens(wants.token, {0, 16}),
        _checked_tokens(wants.generation, {16}),
        *_memos(wants.memo, len(wants)),
        *_texts(wants.hash, len(wants.keys)),
        _numbers(wants.slide_ms),
        b"" if wants.sizes is None else bytes(wants.sizes),
    )


def _commits_arguments(commits: Commits) -> Arguments:
    return (
        _tokens(commits.generation),
        _numbers(commits.window_ms),
        _numbers(commits.hard_ms),
        _numbers(commits.fate),
        *_memos(commits.memo, len(commits.keys)),
    )


def _releases_arguments(releases: Releases) -> Arguments:
    return (
        _tokens(releases.token),
        _numbers(releases.delay_ms),
        _numbers(releases.keep_ms),
        _numbers(releases.unsent),
        *_memos(releases.memo, len(releases.keys)),
    )


def _extensions_arguments(extensions: Extensions) -> Arguments:
    return _tokens(extensions.token), _numbers(extensions.lease_ms)


def _memories_arguments(memories: Memories) -> Arguments:
    count = len(memories.keys)
    return (
        _tokens(memories.generation),
        _numbers(memories.window_ms),
        _numbers(memories.fate),
        *_memos(memories.memo, count),
        *_texts(memories.hash, count),
    )


def _named_arguments(named: Named) -> Arguments:
    return named.arguments if isinstance(named.arguments, list) else ()


_ENCODERS: Final[Mapping[type, Callable[[Any], Arguments]]] = {
    Wants: _wants_arguments,
    Commits: _commits_arguments,
    Releases: _releases_arguments,
    Extensions: _extensions_arguments,
    Memories: _memories_arguments,
    Named: _named_arguments,
}


def encode(batch: Batch) -> Arguments:
    """Return the arguments of the script for *batch*, after the time."""
    return _ENCODERS[type(batch)](batch)


def encode_load(record: Record) -> bytes:
    return _NUMBER(_within(record.keep_until_ms, _LATEST_KEEP_MS)) + encode_record(record)


def encode_swap(expected: bytes, value: bytes, keep_until_ms: int) -> bytes:
    """Write *value* (empty: remove) if *expected* (empty: no record) is stored."""
    return _SWAP(1 if value else 0, keep_until_ms, 0, 0, len(expected)) + expected + value


def encode_start(value: bytes, lease_ms: int, keep_ms: int) -> bytes:
    """Write *value*, with a lease from now on, if there is no record."""
    return _SWAP(2, 0, lease_ms, keep_ms, 0) + value


def _numbers(column: Column[int] | Column[Fate] | Column[bool]) -> bytes:
    return b"".join(map(_NUMBER, column)) if isinstance(column, list) else _NUMBER(column)


def _tokens(column: Column[bytes]) -> bytes:
    return b"".join(map(_sixteen, column)) if isinstance(column, list) else _sixteen(column)


def _sixteen(name: bytes) -> bytes:
    """Return a token or generation with 16 bytes; one of another length matches no record."""
    return name if len(name) == 16 else name[:16].ljust(16, b"\0")


def _checked_tokens(column: Column[bytes], sizes: set[int]) -> bytes:
    if sizes.issuperset(map(len, column if isinstance(column, list) else (column,))):
        return _tokens(column)
    raise StoreError("a claim needs a token and a generation of 16 bytes each")


def _texts(column: Column[bytes], count: int) -> tuple[bytes, bytes]:
    """Return the lengths of texts (only one if all are as long), and the texts joined."""
    if not column:
        return _NO_LENGTH, b""
    texts = spread(column, count)
    sizes = list(map(len, texts))
    if sizes.count(sizes[0]) == count:
        return _LENGTH(sizes[0]), b"".join(texts)
    return b"".join(map(_LENGTH, sizes)), b"".join(texts)


_NO_LENGTH = _LENGTH(0)


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
_BEGINNING = b'["' + _UUID + b'",'
_PLAIN, _SHORT, _AS_STORED = b"\0", b"\1", b"\2"


def _memos(column: Column[Any], count: int) -> tuple[bytes, ...]:
    """Return the forms of memos, the ids of those in short form, and the rest of each as texts."""
    if not column:
        return _AS_STORED if column is None else _PLAIN, b"", _NO_LENGTH, b""
    memos = spread(column, count)
    if None not in memos and (alike := _shorten_alike(memos)) is not None:
        return alike
    given = [(2, b"") if memo is None else _shorten_memo(memo) for memo in memos]
    return (
        bytes([form for form, _ in given]),
        b"".join([text[:16] for form, text in given if form == 1]),
        *_texts([text[16:] if form == 1 else text for form, text in given], count),
    )


def _shorten_alike(memos: Sequence[bytes]) -> tuple[bytes, ...] | None:
    """Return what `_memos` does if all have a short form and one shape; faster than one by one."""
    first, whole = memos[0], b"".join(memos)
    shape = first.translate(_SHAPE)
    if (
        shape[:40] != _BEGINNING
        or first[-1] != 93  # ]
        or whole.translate(_SHAPE) != shape * len(memos)
        or len(set(map(len, memos))) > 1
    ):
        return None
    rest = len(first) - 41
    ids, rests = zip(*iter_unpack(f"2x36s2x{rest}sx", whole), strict=True)
    return _SHORT, unhexlify(b"".join(ids).replace(b"-", b"")), _LENGTH(rest), b"".join(rests)


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


def claim_answer(wants: Wants, at: int, told: Any, now_ms: int) -> ClaimAnswer | int:
    """Return the answer to the claim at position *at*, of which the script has *told* something."""
    if isinstance(told, list):
        want = wants[at]
        records = [decode_record(p.key, v) for p, v in zip(want.parts, told, strict=True)]
        held = tuple([Held(r.key, r.generation, r.attempts, r.memo) for r in records])
        claim = Claim(want.token, held, now_ms)
        return HELD if claim.is_as_asked(want) else claim
    letter, number, value = told[:1], told[1] - 1, told[2:]
    key = wants.keys[at if wants.sizes is None else wants.places(at)[number]]
    if letter == b"B":
        return Busy(key, int.from_bytes(value, "big"))
    fate, memo = _fate_and_memo(value)
    return Duplicate(key, fate, memo) if letter == b"D" else Mismatch(key, memo)


def _fate_and_memo(value: bytes) -> tuple[Fate, bytes]:
    """Return these of a done record; faster than `decode_record`."""
    try:
        first, second = value[:2]
        fate = _FATES[first >> 5]
        at = 21 if second & 32 else 15  # with a hard end or without
        _, memo = _content_and_memo(value, at, second >> 6, is_short=first & 16)
    except (IndexError, ValueError) as error:
        raise StoreError(_UNREADABLE) from error
    if fate is None:
        raise StoreError(_UNREADABLE)
    return fate, memo
