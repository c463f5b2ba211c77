"""
Parse the received bytes into an immutable event.

The bytes are kept, because a sink delivers them unchanged. Input that cannot be compared safely
is refused, with a code for the reason: duplicate names, half of a surrogate pair.

Most events take a fast path: they are decoded and encoded again. Encoding never makes a text
longer, so an equal length proves that nothing was dropped, and the encoding is the canonical
form that a key needs anyway. All others take an exact and slower path, with the same results.
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
from oncebridge.events.canonical import (
    canonical,
    canonical_plain,
    encode_sorted,
    plain_number,
    with_names_in_order,
)
from oncebridge.events.exact_float import SURE, counts_as_double, holds_exact_float, read_decimal
from oncebridge.events.trace_context import BytesWithContext

REASONS: Final[Mapping[str, str]] = {
    "not-json": "the bytes are not JSON in UTF-8",
    "not-an-object": "the JSON is not an object",
    "no-detail": "there is no detail object, and no string that contains one",
    "duplicate-name": "an object has the same name twice, so it can be read in two ways",
    "not-finite": "a number is NaN, infinite or beyond the range of a double",
    "lone-surrogate": "a string has half a surrogate pair, which UTF-8 cannot encode",
    "too-deep": "the event is nested more deeply than the limit",
    "too-large": "the event is larger than the limit",
    "too-many-values": "the event has more values than the limit",
    "number-too-long": "a number has more digits than the limit",
}
"""Why an event is refused: the code for counting, and the message."""

_Object = dict[str, Any]

# One byte is found much faster as a number than as a text of one byte.
_BACKSLASH, _BRACKET, _COLON = b"\\[:"
_GZIP: Final = b"\x1f\x8b"

_LARGE: Final = 32 * 1024
"""Up to this size, any input is read within a few milliseconds."""
_EXACT_COST: Final = 4
"""How much slower the exact path is per value than the worst case of the fast path."""
_DIGITS: Final = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG_NUMBER: Final = b"0" * 1001
"""The time for an integer grows with the square of its digits."""
_BRACES: Final = bytes.maketrans(b"[]", b"{}")
_UNSHAPED: Final = bytes(set(range(256)) - set(b'{}[]"'))
_USUAL_DEPTH: Final = 12


class Limits(Struct, frozen=True):
    """
    The maximum size of an event, which bounds the time for reading any input.

    *max_bytes* counts the bytes as received; EventBridge and SQS send at most 1 MiB.
    *max_depth* counts the envelope as one level. *max_values* counts objects, arrays and
    their values; an empty one counts twice.
    """

    max_bytes: Annotated[Size, Doc("The largest event that is read.", example="2MiB")] = Size(
        2 * 1024 * 1024
    )
    max_depth: Annotated[
        int, Doc("How many levels an event may be nested.", "100", at_least=2, at_most=1000)
    ] = 100
    max_values: Annotated[
        int, Doc("How many values an event may have.", "150000", at_least=100)
    ] = 150_000


class Unreadable(Struct, frozen=True):
    """A record that is not an event: its bytes, the reason (see `REASONS`) and the message."""

    raw: bytes
    reason: str
    message: str
    context: str = ""
    """See `Event.context`."""


class _Envelope(
    Struct,
    forbid_unknown_fields=True,
    omit_defaults=True,
    gc=False,
    rename={"detail_type": "detail-type", "replay_name": "replay-name"},
):
    """
    The envelope as EventBridge writes it; any other takes the exact path.

    So does one that contains a default (``"id": null``), which changes its length.
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
    One event, parsed once and immutable.

    *raw* has the received bytes. *detail* and `envelope` are parsed, and read-only by
    convention; in them a whole number is an integer, also if it was written ``1.0``, and a
    decimal that a double would round is an `ExactFloat`. A field that the envelope lacks, or
    that has another type there, is None or empty: an id of ``7`` is not an id. `envelope` has
    the original value. *bare* is True if there was no envelope and all of it is the detail.

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
    """The `traceparent` that arrived with the bytes, if tracing is on."""

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
            values = zip(_FIELDS, astuple(top), strict=True)
            top = {name: value for (name, default), value in values if value != default}
            top["detail"] = self.detail
            force_setattr(self, "_envelope", top)
        return top

    def __repr__(self) -> str:
        # A detail may have personal data, and a repr may be logged.
        return f"<Event of {len(self.raw)} bytes>"


_FIELDS: Final = [(field.encode_name, field.default) for field in fields(_Envelope)]
_DEFAULTS: Final = Limits()

_DETAIL: Final = b'"detail":'
_SEAM: Final = len(_DETAIL + b",")
"""How much longer an event without whitespace is than its detail and the rest separately."""

_SEAM_ASIDE: Final = len(b",") - len(b"{}")
"""The same if members of the detail stayed with the rest, and so did its name."""


def parse(
    raw: bytes, *, limits: Limits = _DEFAULTS, bare: bool = False, apart: tuple[str, ...] = ()
) -> Event:
    """
    Return the event in *raw*, or raise `EventError` with the reason.

    With *bare*, an object without a ``detail`` member is treated as the detail itself.
    *apart* has the members of the detail that the key will ignore (`ContentKey.apart`). It
    does not change the result; it saves that key a second encoding.
    """
    found = read(raw, limits=limits, bare=bare, apart=apart)
    if isinstance(found, Unreadable):
        raise EventError(found.reason, found.message)
    return found


def parse_all(
    raws: Iterable[bytes],
    *,
    limits: Limits = _DEFAULTS,
    bare: bool = False,
    apart: tuple[str, ...] = (),
) -> list[Event | Unreadable]:
    """Return one event or `Unreadable` per record, in order; a bad record affects no other."""
    return [read(raw, limits=limits, bare=bare, apart=apart) for raw in raws]


def read(
    raw: bytes, *, limits: Limits = _DEFAULTS, bare: bool = False, apart: tuple[str, ...] = ()
) -> Event | Unreadable:
    """Return what `parse` does, or an `Unreadable` with the reason instead of an error."""
    if type(raw) is BytesWithContext:
        found = read(raw.raw, limits=limits, bare=bare, apart=apart)
        set_context(found, raw.context)
        return found
    size = len(raw)
    try:
        if size > _LARGE or size > limits.max_bytes or size > limits.max_values:
            _check_size(raw, limits)
        try:
            top = _decode_envelope(raw)
            detail = top.detail
            top.detail = aside = {}  # the default, and so left out of the rest
            remaining = {**detail} if apart else detail
            for name in apart:
                if name in remaining:
                    aside[name] = remaining[name]
                    del remaining[name]
            # As `canonical_plain` does; each call costs, and this is done for every event.
            kept = encode_sorted(remaining)
            if not kept.isascii():
                kept = with_names_in_order(kept, remaining)
            rest = _encode(top)
        except (ValueError, RecursionError):
            detail = {}
        if not detail or (
            len(kept) + len(rest) + (_SEAM_ASIDE if aside else _SEAM) != size
            and not _same_colons(raw, kept + rest if aside else kept + _DETAIL + rest)
        ):
            return _read_unusual(raw, limits, bare=bare, apart=apart)
        most = limits.max_depth - 1
        flat = (raw if aside else kept).replace(b"{", b"[", limits.max_depth)
        if _BRACKET in flat.replace(b"[", b"]", most):  # faster than counting them
            _check_depth(raw if aside else kept, detail, most)
    except EventError as error:
        return Unreadable(raw, error.reason, str(error))
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


def set_context(arrival: Event | Unreadable, context: str) -> None:
    """Set the trace *context* of a record that was just read."""
    force_setattr(arrival, "context", context)


def from_object(
    mapping: Mapping[str, Any],
    *,
    limits: Limits = _DEFAULTS,
    bare: bool = False,
    apart: tuple[str, ...] = (),
) -> Event:
    """
    Return an event for a caller that only has the parsed object, such as a Lambda function.

    Its *raw* is a compact encoding, and a number has the value that the caller's parser gave it.
    """
    whole = dict(mapping)
    try:
        if holds_exact_float(whole):
            raw = canonical(whole)
        else:
            # NaN is allowed here; `parse` refuses it.
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
    # The comparison of lengths in `parse` requires that no number becomes longer, as 1e5 would.
    # Without an exponent none can: the fewest possible digits are written.
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
    Return True if encoding *again* dropped no member, whatever the whitespace and escapes.

    Each member has a colon of its own, and a string keeps its colons, unless one was
    written as an escape.
    """
    if _BACKSLASH in raw and b"\\u003" in raw:
        return False
    # There are never fewer. Searching for one more takes half the time of counting them.
    return _COLON not in raw.replace(b":", b";", again.count(b":"))


def _check_size(raw: bytes, limits: Limits) -> None:
    if len(raw) > limits.max_bytes:
        raise EventError("too-large", f"{len(raw)} bytes, and the limit is {limits.max_bytes}")
    _check_cost(raw, limits.max_values)


def _check_cost(text: bytes, most_values: int) -> None:
    """Raise `EventError` for input that would take too long to read, before it is parsed."""
    if not _excess(text, most_values):  # counted with the strings, so there are no more
        return
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # A string is a value or its name, so there are at most two for each value.
    is_beyond = plain.count(b'"') > 4 * most_values
    outside = b"" if is_beyond else b'"'.join(plain.split(b'"')[::2])
    excess = "too-many-values" if is_beyond else _excess(outside, most_values)
    if excess:
        raise EventError(excess, f"{REASONS[excess]} (at most {most_values} values)")


def _excess(text: bytes, most_values: int) -> str:
    if 1 + text.count(b",") + text.count(b"[") + text.count(b"{") > most_values:
        return "too-many-values"
    return "number-too-long" if _LONG_NUMBER in text.translate(_DIGITS) else ""


def _check_depth(text: bytes, value: Any, limit: int) -> None:
    """Raise `EventError` if *value*, which was read from *text*, is nested too deeply."""
    if _BACKSLASH not in text:  # so no quote is inside of a string
        # If a string has a bracket, its quotes remain, and the values are walked through.
        shape = text.translate(_BRACES, _UNSHAPED).replace(b'""', b"")
        for _ in range(min(limit, _USUAL_DEPTH)):
            shape = shape.replace(b"{}", b"")
            if not shape:
                return
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


def _read_unusual(raw: bytes, limits: Limits, *, bare: bool, apart: tuple[str, ...]) -> Event:
    """Return an event that the fast path cannot read: other fields, other types, errors."""
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
    """Return the value of any JSON, and True if all its floats are known to be plain."""
    try:
        value = _decode_any(raw)
        again = _encode(value)
    except ValueError:
        is_whole = False
    except RecursionError:
        if len(raw) > _LARGE:  # the exact path would take too long for the same result
            _refuse("too-deep")
        is_whole = False
    else:
        is_whole = len(again) == len(raw) or _same_colons(raw, again)
    if not is_whole:
        return _read_exactly(raw, limits), False
    _check_depth(raw, value, limits.max_depth)
    return value, True


def _read_inner(text: str, limits: Limits) -> tuple[Any, bool]:
    """Return the value of a detail that was sent as a string of JSON."""
    inner = text.encode()
    _check_cost(inner, limits.max_values)
    try:
        return _read(inner, limits)
    except EventError as error:
        if error.reason == "not-json":
            _refuse("no-detail")
        raise


def _read_exactly(raw: bytes, limits: Limits) -> Any:
    """Return the value of any JSON, read exactly; raise `EventError` with the reason."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        if raw.startswith(_GZIP):
            raise EventError(
                "not-json",
                "the bytes are gzip that was not unpacked: sent without Content-Encoding, damaged, "
                "with too many members, or compressed too much",
            ) from None
        at = error.start
        is_surrogate = raw[at] == 0xED and raw[at + 1 : at + 2] >= b"\xa0"  # as in CESU-8
        _refuse("lone-surrogate" if is_surrogate else "not-json")
    if len(raw) > _LARGE:
        _check_cost(raw, limits.max_values // _EXACT_COST)
    if text.startswith("\ufeff"):
        raise EventError("not-json", "the text begins with a byte order mark; remove it")
    try:
        value = _exact_decoder.decode(text)
    except json.JSONDecodeError as error:
        raise EventError("not-json", f"the text is not JSON (at character {error.pos})") from None
    except ValueError:
        _refuse("number-too-long")
    except RecursionError:
        _refuse("too-deep")
    _check_depth(raw, value, limits.max_depth)
    try:
        _encode(value)
    except UnicodeEncodeError:
        _refuse("lone-surrogate")
    return value


def _unique_members(pairs: list[tuple[str, Any]]) -> _Object:
    members = dict(pairs)
    if len(members) != len(pairs):
        _refuse("duplicate-name")
    return members


def _read_float(text: str) -> int | float:
    value = read_decimal(text)
    if not math.isfinite(value):
        _refuse("not-finite")
    number = plain_number(value) if type(value) is float else None
    return value if number is None else number


def _refuse(reason: str) -> NoReturn:
    # The cause is dropped, because it may quote the payload.
    raise EventError(reason, REASONS[reason]) from None


_exact_decoder = json.JSONDecoder(
    object_pairs_hook=_unique_members,
    parse_float=_read_float,
    parse_constant=lambda _: _refuse("not-finite"),
)


def _string(top: _Object, name: str) -> str | None:
    value = top.get(name)
    return value if isinstance(value, str) else None


def _strings(value: Any) -> Sequence[str]:
    return value if type(value) is list and all(type(item) is str for item in value) else ()
