"""
From the bytes that arrived to an event that never changes.

The bytes are read once and kept, because they are what a sink passes on. What cannot be
told apart safely is refused here, with one word for the reason, so that the rest of the
product meets no surprise: no name twice, no number that was rounded, no half character.

Most events take a short way. They are decoded, encoded again, and the two texts are
compared by length: encoding never makes a text longer than it was received, so an equal
length proves that nothing was dropped, and the encoding is the canonical form that a key
needs anyway. Anything unusual takes an exact and slower way, with the same answers.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, fields, force_setattr

from oncebridge.base.options import Doc, Size
from oncebridge.errors import EventError
from oncebridge.events.canonical import canonical, canonical_plain, plain_number
from oncebridge.events.exact_float import SURE, counts_as_double, holds_exact_float, read_decimal
from oncebridge.events.trace_context import BytesWithContext

REASONS: Final[Mapping[str, str]] = {
    "not-json": "the bytes are not JSON in UTF-8",
    "not-an-object": "the JSON is not an object",
    "no-detail": "there is no detail object, nor a string that holds one",
    "duplicate-name": "an object has the same name twice, so it can be read in two ways",
    "not-finite": "a number is NaN, infinite or beyond the range of a double",
    "lone-surrogate": "a string holds half a surrogate pair, which UTF-8 cannot carry",
    "too-deep": "the event is nested more deeply than the limit",
    "too-large": "the event is larger than the limit",
    "too-many-values": "the event holds more values than the limit",
    "number-too-long": "a number has more digits than are read",
}
"""Why an event is refused: the word for counting, and the sentence for people."""

_Object = dict[str, Any]

# One byte is found much faster as a number than as a text of one byte.
_BACKSLASH, _BRACE, _BRACKET, _COLON = b"\\{[:"
_GZIP: Final = b"\x1f\x8b"

_LARGE: Final = 32 * 1024
"""What is not larger is read within a few milliseconds, whatever it is."""
_EXACT_COST: Final = 4
"""How many times as long the exact way takes for a value, compared to the short way at its worst."""
_DIGITS: Final = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG_NUMBER: Final = b"0" * 1001
"""The time for an integer grows with the square of its digits."""


class Limits(Struct, frozen=True):
    """
    How large an event may be.

    *max_bytes* counts the bytes as received; EventBridge sends at most 1 MiB, SQS the
    same. *max_depth* counts the envelope as one level. *max_values* counts objects, arrays
    and what they hold; an empty one counts twice. They bound the time that reading takes,
    whatever the bytes are.
    """

    max_bytes: Annotated[Size, Doc("The largest event that is read.", example="2MiB")] = Size(
        2 * 1024 * 1024
    )
    max_depth: Annotated[
        int, Doc("How many levels an event may be nested.", "100", at_least=2, at_most=1000)
    ] = 100
    max_values: Annotated[
        int, Doc("How many values an event may hold.", "150000", at_least=100)
    ] = 150_000


class Unreadable(Struct, frozen=True):
    """A record that is no event: its bytes, the reason (see `REASONS`) and the message."""

    raw: bytes
    reason: str
    message: str
    context: str = ""
    """As an event's."""


class _Envelope(
    Struct,
    forbid_unknown_fields=True,
    omit_defaults=True,
    gc=False,
    rename={"detail_type": "detail-type", "replay_name": "replay-name"},
):
    """
    The envelope as EventBridge writes it; any other takes the exact way.

    A default is left out when it is encoded again, so an envelope that spells one out
    (``"id": null``) does not reach its own length, and takes the exact way too.
    """

    version: str | None = None
    id: str | None = None
    detail_type: str = ""
    source: str = ""
    account: str | None = None
    time: str | None = None
    region: str | None = None
    resources: list[str] | None = None
    replay_name: str | None = None
    detail: _Object = {}


class Event(Struct, frozen=True, eq=False, gc=False):
    """
    One event, parsed once and never changed.

    *raw* is what was received, byte for byte. *detail* and `envelope` are parsed, and
    read-only by convention; in them a whole number is an integer, also when it was
    spelt ``1.0``, and a decimal that a double would round is an `ExactFloat`: a float that
    compares by its exact value. *id*, *time*, *account*, *region* and *replay_name* are None, *source*
    and *detail_type* are empty, and *resources* has no items, where the envelope has no
    such field or has something other than a string (a list of strings) there: an id of
    ``7`` or ``null`` is no id. `envelope` still shows what stood there.
    *bare* says that there was no envelope and the whole text is the detail.

    *kept* is the canonical detail without the names in *apart* (see `parse`).
    Two events are never equal, even when they arrived with the same bytes.
    """

    raw: bytes
    detail: _Object
    id: str | None
    source: str
    detail_type: str
    time: str | None
    account: str | None
    region: str | None
    resources: Sequence[str]
    replay_name: str | None
    bare: bool
    plain: bool
    apart: tuple[str, ...]
    kept: bytes
    _envelope: _Envelope | _Object
    _canonical: bytes | None = None
    context: str = ""
    """The `traceparent` that came beside the bytes, where events are traced."""

    @property
    def canonical(self) -> bytes:
        """The canonical form of the whole detail."""
        if not self.apart:
            return self.kept
        if self._canonical is None:
            text = canonical_plain(self.detail) if self.plain else canonical(self.detail)
            force_setattr(self, "_canonical", text)
            return text
        return self._canonical

    @property
    def envelope(self) -> Mapping[str, Any]:
        """The whole event as one mapping, with the parsed detail and any unknown field."""
        top = self._envelope
        if isinstance(top, _Envelope):
            values = zip(_NAMES, _DEFAULTS, astuple(top), strict=True)
            top = {name: value for name, default, value in values if value != default}
            top["detail"] = self.detail
            force_setattr(self, "_envelope", top)
        return top

    def __repr__(self) -> str:
        # a detail may hold personal data, and a repr ends up in logs
        return f"<Event of {len(self.raw)} bytes>"


_NAMES: Final = [field.encode_name for field in fields(_Envelope)]
_DEFAULTS: Final = [field.default for field in fields(_Envelope)]
_DEFAULT_LIMITS: Final = Limits()

_DETAIL: Final = b'"detail":'
_SEAM: Final = len(_DETAIL + b",")
"""How much longer an event without a blank is than its detail and the rest on their own."""

_SEAM_ASIDE: Final = len(b",") - len(b"{}")
"""The same where some of the detail stayed with the rest, and its name with it."""


def parse(
    raw: bytes,
    *,
    limits: Limits = _DEFAULT_LIMITS,
    bare: bool = False,
    apart: tuple[str, ...] = (),
) -> Event:
    """
    Read one event, or raise `EventError` with the reason.

    With *bare*, an object without a ``detail`` member is taken as the detail itself.
    *apart* names members of the detail which the key is going to ignore (give it
    `ContentKey.apart`). It changes no answer; it spares that key a second encoding.
    """
    if len(raw) > limits.max_bytes:
        raise EventError("too-large", f"{len(raw)} bytes, and the limit is {limits.max_bytes}")
    if len(raw) > _LARGE or len(raw) > limits.max_values:
        _check_cost(raw, limits.max_values)
    try:
        top = _decode_envelope(raw)
        detail = remaining = top.detail
        top.detail = aside = {}  # the default, and so left out of the rest
        if apart:
            remaining = detail.copy()
            for name in apart:
                if name in remaining:
                    aside[name] = remaining.pop(name)
        kept = canonical_plain(remaining)
        rest = _encode(top)
    except (ValueError, RecursionError):
        detail = {}
    if not detail or (
        len(kept) + len(rest) + (_SEAM_ASIDE if aside else _SEAM) != len(raw)
        and not _same_colons(raw, kept + rest if aside else kept + _DETAIL + rest)
    ):
        return _parse_unusual(raw, limits, bare=bare, apart=apart)
    if _may_be_deep(raw if aside else kept, limits.max_depth - 1):
        _check_depth(detail, limits.max_depth - 1)
    return Event(
        raw,
        detail,
        top.id,
        top.source,
        top.detail_type,
        top.time,
        top.account,
        top.region,
        top.resources or (),
        top.replay_name,
        False,
        True,
        apart,
        kept,
        top,
    )


def parse_all(
    raws: Iterable[bytes],
    *,
    limits: Limits = _DEFAULT_LIMITS,
    bare: bool = False,
    apart: tuple[str, ...] = (),
) -> list[Event | Unreadable]:
    """Read a batch: one answer per record, in order, and no record spoils another's."""
    return [read(raw, limits=limits, bare=bare, apart=apart) for raw in raws]


def read(
    raw: bytes,
    *,
    limits: Limits = _DEFAULT_LIMITS,
    bare: bool = False,
    apart: tuple[str, ...] = (),
) -> Event | Unreadable:
    """Read one event; what is none is a value too, with the reason."""
    if type(raw) is BytesWithContext:
        found = read(raw.raw, limits=limits, bare=bare, apart=apart)
        carry(found, raw.context)
        return found
    try:
        return parse(raw, limits=limits, bare=bare, apart=apart)
    except EventError as error:
        return Unreadable(raw, error.reason, str(error))


def carry(arrival: Event | Unreadable, context: str) -> None:
    """Note the *context* that came beside what was just read."""
    force_setattr(arrival, "context", context)


def from_object(
    mapping: Mapping[str, Any],
    *,
    limits: Limits = _DEFAULT_LIMITS,
    bare: bool = False,
    apart: tuple[str, ...] = (),
) -> Event:
    """
    Make an event for a caller that only has the parsed object, such as a Lambda.

    The bytes as they were received are gone; *raw* becomes a compact encoding, and a
    number counts as the double that the caller's parser made of it.
    """
    whole = dict(mapping)
    try:
        if holds_exact_float(whole):
            raw = canonical(whole)
        else:
            # NaN is let through here, so that `parse` refuses it like any other
            raw = json.dumps(
                whole, ensure_ascii=False, check_circular=False, separators=(",", ":")
            ).encode()
    except UnicodeEncodeError:
        _refuse("lone-surrogate")
    except RecursionError:
        _refuse("too-deep")
    except ValueError:
        _refuse("number-too-long")
    except TypeError as error:
        raise EventError("not-json", f"the object is not made of JSON values: {error}") from None
    return parse(raw, limits=limits, bare=bare, apart=apart)


def _read_plain_float(text: str) -> int | float:
    # Much faster than float(). It is exact for a short text, and a longer one is checked below.
    double = _decode_float(text)
    number = plain_number(double)
    # The comparison of lengths in `parse` needs that nothing grows, as 1e5 would.
    # Without an exponent nothing can: the digits written are the fewest that will do.
    if number is None or (
        ("e" in text or "E" in text) and (not number or len(repr(number)) > len(text))
    ):
        raise ValueError
    # A double keeps all digits of a short text. A longer text is mostly its shortest form.
    if len(text) > SURE and _encode(number) != text.encode() and not counts_as_double(text, double):
        raise ValueError
    return number


_decode_float = msgspec.json.Decoder(float).decode
_decode_envelope = msgspec.json.Decoder(_Envelope, float_hook=_read_plain_float).decode
_decode_any = msgspec.json.Decoder(float_hook=_read_plain_float).decode
_encode = msgspec.json.Encoder(enc_hook=float).encode  # the hook is for an ExactFloat


def _same_colons(raw: bytes, again: bytes) -> bool:
    """
    Prove in spite of blanks and escapes that encoding *again* dropped no member.

    Each member has a colon of its own, and a string keeps the colons it had, unless
    one was spelt as an escape.
    """
    if _BACKSLASH in raw and b"\\u003" in raw:
        return False
    # There are no fewer. To look for one more takes half the time of counting them.
    return _COLON not in raw.replace(b":", b";", again.count(b":"))


def _may_be_deep(text: bytes, limit: int) -> bool:
    """Return True if *text* has enough brackets to be nested more deeply than *limit*."""
    # Most have a few. To look for one too many takes half the time of counting them.
    flat = text.replace(b"{", b"[", limit)
    return _BRACE in flat or _BRACKET in flat.replace(b"[", b"]", limit)


def _check_cost(text: bytes, most_values: int) -> None:
    """Refuse what would take too long to read, before anything is read."""
    if not _excess(text, most_values):  # with what is in strings: there is no more
        return
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # A string is a value or its name, so there are at most two for each value.
    is_beyond = plain.count(b'"') > 4 * most_values
    excess = "too-many-values" if is_beyond else _excess(_outside(plain), most_values)
    if excess:
        raise EventError(excess, f"{REASONS[excess]} (at most {most_values} values)")


def _outside(text: bytes) -> bytes:
    """Return a *text* without escapes as it is outside of strings."""
    return b'"'.join(text.split(b'"')[::2])


def _excess(text: bytes, most_values: int) -> str:
    if _count_values(text) > most_values:
        return "too-many-values"
    return "number-too-long" if _LONG_NUMBER in text.translate(_DIGITS) else ""


def _count_values(text: bytes) -> int:
    """Count what begins with a comma or a bracket; outside of strings, every value but one."""
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_depth(value: Any, limit: int) -> None:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    _refuse("too-deep")


def _parse_unusual(raw: bytes, limits: Limits, *, bare: bool, apart: tuple[str, ...]) -> Event:
    """Read whatever the short way leaves: other fields, other types, faults."""
    top, plain = _read(raw, limits)
    if type(top) is not dict:
        _refuse("not-an-object")
    bare = bare and "detail" not in top
    if bare:
        top = {"detail": top}
    elif type(top.get("detail")) is str:
        top["detail"], plain = _read_inner(top["detail"], limits)
    detail = top.get("detail")
    if type(detail) is not dict:
        _refuse("no-detail")
    remaining = {name: item for name, item in detail.items() if name not in apart}
    return Event(
        raw,
        detail,
        _string(top, "id"),
        _string(top, "source") or "",
        _string(top, "detail-type") or "",
        _string(top, "time"),
        _string(top, "account"),
        _string(top, "region"),
        _strings(top.get("resources")),
        _string(top, "replay-name"),
        bare,
        plain,
        apart,
        canonical_plain(remaining) if plain else canonical(remaining),
        top,
    )


def _read(raw: bytes, limits: Limits) -> tuple[Any, bool]:
    """Read any JSON; the second answer says whether its floats are known to be plain."""
    try:
        value = _decode_any(raw)
        again = _encode(value)
    except ValueError:
        is_whole = False
    except RecursionError:
        if len(raw) > _LARGE:  # the exact way would take too long to find out the same
            _refuse("too-deep")
        is_whole = False
    else:
        is_whole = len(again) == len(raw) or _same_colons(raw, again)
    if not is_whole:
        return _read_exactly(raw, limits), False
    if _may_be_deep(raw, limits.max_depth):
        _check_depth(value, limits.max_depth)
    return value, True


def _read_inner(text: str, limits: Limits) -> tuple[Any, bool]:
    """Read a detail that was sent as a string of JSON."""
    inner = text.encode()
    if len(inner) > _LARGE or len(inner) > limits.max_values:
        _check_cost(inner, limits.max_values)
    try:
        return _read(inner, limits)
    except EventError as error:
        if error.reason == "not-json":
            _refuse("no-detail")
        raise


def _read_exactly(raw: bytes, limits: Limits) -> Any:
    """Read any JSON member by member, and give the reason if it cannot be taken."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        if raw.startswith(_GZIP):
            raise EventError(
                "not-json",
                "the bytes are gzip that was not unpacked: sent without Content-Encoding, damaged, "
                "of too many members, or packed too tightly",
            ) from None
        _refuse("lone-surrogate" if _is_surrogate(raw, error.start) else "not-json")
    if len(raw) > _LARGE:
        _check_cost(raw, limits.max_values // _EXACT_COST)
    if text.startswith("\ufeff"):
        raise EventError("not-json", "the text begins with a byte order mark; send it without")
    try:
        value = _exact_decoder.decode(text)
    except json.JSONDecodeError as error:
        raise EventError("not-json", f"the text is not JSON (at character {error.pos})") from None
    except RecursionError:
        _refuse("too-deep")
    if _may_be_deep(raw, limits.max_depth):
        _check_depth(value, limits.max_depth)
    try:
        _encode(value)
    except UnicodeEncodeError:
        _refuse("lone-surrogate")
    return value


def _is_surrogate(raw: bytes, start: int) -> bool:
    """Recognise a surrogate that was encoded on its own, as CESU-8 does."""
    return raw[start] == 0xED and raw[start + 1 : start + 2] >= b"\xa0"


def _without_repeats(pairs: list[tuple[str, Any]]) -> _Object:
    members = dict(pairs)
    if len(members) != len(pairs):
        _refuse("duplicate-name")
    return members


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        _refuse("number-too-long")


def _read_float(text: str) -> int | float:
    try:
        value = read_decimal(text)
    except ValueError:
        _refuse("number-too-long")
    if not math.isfinite(value):
        _refuse("not-finite")
    number = plain_number(value) if type(value) is float else None
    return value if number is None else number


def _read_constant(_text: str) -> NoReturn:
    _refuse("not-finite")


def _refuse(reason: str) -> NoReturn:
    # nothing of the payload may be quoted, so the error that led here is not kept either
    raise EventError(reason, REASONS[reason]) from None


_exact_decoder = json.JSONDecoder(
    object_pairs_hook=_without_repeats,
    parse_float=_read_float,
    parse_int=_read_int,
    parse_constant=_read_constant,
)


def _string(top: _Object, name: str) -> str | None:
    value = top.get(name)
    return value if isinstance(value, str) else None


def _strings(value: Any) -> Sequence[str]:
    return value if type(value) is list and all(type(item) is str for item in value) else ()
