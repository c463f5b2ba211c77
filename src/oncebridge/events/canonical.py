"""
The canonical form of JSON values: RFC 8785, with exact numbers.

Two events have the same content if their canonical bytes are equal, whatever the order of
their names, the whitespace, or the notation of a number or a character.

There is one intended deviation from the RFC. The RFC reads every number as a double, so
9223372036854775807 and 9223372036854775806 get the same text, and two events would become
one. Here a Python integer of any size is written digit by digit, and a decimal that a double
would round (an `ExactFloat`) with its own digits and exponent. A float is written as
ECMAScript writes it, so 1, 1.0 and 1e0 are equal.
"""

import math
import re
from typing import Any

import msgspec

from oncebridge.errors import EventError
from oncebridge.events.exact_float import ExactFloat, lay_out, read_decimal, significant_digits

encode_sorted = msgspec.json.Encoder(order="sorted").encode
"""Encode with names sorted by code point, and strings exactly as the RFC asks."""

decode_canonical = msgspec.json.Decoder(float_hook=read_decimal).decode
"""Return the value of a text that `canonical` wrote, with exact numbers."""

_EXACT_BELOW = 2.0**53
"""The first double whose neighbours are not all integers; from here on digits are lost."""

_PLAIN_FROM = 1e-4
"""From here up, msgspec, Python and ECMAScript write a fraction the same way."""

_ASTRAL = bytes(range(0xF0, 0xF5))
"""The bytes that begin a character from U+10000 up, in UTF-8."""

_BACKSLASH = b"\\"[0]
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+"')


def canonical(value: Any) -> bytes:
    """
    Return the canonical form of a parsed JSON *value*.

    Raise `EventError` for values outside of JSON: NaN and infinities, lone surrogates,
    names that are not strings, and objects of other types.
    """
    try:
        return canonical_plain(value) if _is_plain(value) else _write(value).encode()
    except UnicodeEncodeError:
        # the cause would quote the text
        raise EventError("lone-surrogate", "a string has half a surrogate pair") from None
    except RecursionError:
        raise EventError("too-deep", "the value is nested too deeply to be written") from None
    except ValueError:
        raise EventError("number-too-long", "an integer has too many digits") from None


def canonical_plain(value: Any) -> bytes:
    """Return the canonical form of a *value* whose floats are all plain (see `plain_number`)."""
    text = encode_sorted(value)
    return text if text.isascii() else with_names_in_order(text, value)


def with_names_in_order(text: bytes, value: Any) -> bytes:
    """Return the *text* that msgspec made of a *value*, with all names in the order of the RFC."""
    # It sorts by UTF-16 units. Among names below U+10000 that is the order of code points.
    return _write(value).encode() if _has_astral_name(text) else text


def plain_number(value: float) -> int | float | None:
    """
    Return *value* as a number that msgspec and ECMAScript write in the same way.

    A whole number becomes an integer, a fraction stays a float. Return None for the few that
    they write differently, and for a number that is not finite.
    """
    if value.is_integer():
        return int(value) if -_EXACT_BELOW < value < _EXACT_BELOW else None
    return value if _PLAIN_FROM <= abs(value) < _EXACT_BELOW else None


def number_text(value: float) -> str:
    """Return the text that ECMAScript's ``Number::toString`` makes of a float."""
    if not math.isfinite(value):
        raise EventError("not-finite", "a number is not finite")
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    return sign + lay_out(*significant_digits(repr(value)))


def _is_plain(value: Any) -> bool:
    """Return True if msgspec writes every number canonically, and supports every type."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return True
    if kind is float:
        return type(plain_number(value)) is float
    if kind is dict:
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    return kind is list and all(_is_plain(item) for item in value)


def _has_astral_name(text: bytes) -> bool:
    """Return True if a name has a character from U+10000 up; in other strings they are common."""
    for first in _ASTRAL:
        at = text.find(first)
        while at >= 0:
            end = _end_of_string(text, at)
            if text.startswith(b":", end):
                return True
            at = text.find(first, end)
    return False


def _end_of_string(text: bytes, at: int) -> int:
    """Return the index after the string that *at* is in."""
    end = text.find(b'"', at) + 1
    if text[end - 2] != _BACKSLASH:
        return end
    rest = _REST_OF_STRING.match(text, at)
    assert rest is not None  # noqa: S101 - msgspec ends every string
    return rest.end()


def _write(value: Any) -> str:
    """Return the canonical text, in plain Python: for values that msgspec writes differently."""
    kind = type(value)
    if kind is float:
        return number_text(value)
    if kind is ExactFloat:
        return str(value.text)
    if kind is dict:
        members = (
            f"{encode_sorted(name).decode()}:{_write(value[name])}" for name in _in_order(value)
        )
        return f"{{{','.join(members)}}}"
    if kind is list:
        return f"[{','.join(map(_write, value))}]"
    if kind is str or kind is int or kind is bool or value is None:
        return encode_sorted(value).decode()
    raise EventError("not-json", f"a {kind.__name__} has no form in JSON")


def _in_order(names: dict[Any, Any]) -> list[str]:
    if any(type(name) is not str for name in names):
        raise EventError("not-json", "a name is not a string")
    return sorted(names, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
