"""
A second reader of events, without a thought for speed, to compare the first one with.

It needs nothing but the standard library's `json`, and says no more than yes or no: the
detail, or `Refused`.
"""

import json
import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

from oncebridge.events.exact_float import ExactFloat

DEEPEST = 100
LONGEST_INTEGER = 4300
LONGEST_EXPONENT = 18


class Refused(Exception):
    """The slow reader does not take it either."""


def read_slowly(raw):
    """Read as `parse` promises to, without a thought for speed; give the detail."""
    top = _json_slowly(raw)
    if not isinstance(top, dict):
        raise Refused
    detail = top.get("detail")
    if isinstance(detail, str):
        detail = _json_slowly(detail.encode())
    if not isinstance(detail, dict):
        raise Refused
    return detail


def _json_slowly(raw):
    def members(pairs):
        if len({name for name, _ in pairs}) < len(pairs):
            raise Refused
        return dict(pairs)

    def whole(text):
        if len(text.lstrip("-")) > LONGEST_INTEGER:
            raise Refused
        return int(text)

    def constant(_text):
        raise Refused

    try:
        value = json.loads(
            raw.decode(),
            object_pairs_hook=members,
            parse_float=decimal_slowly,
            parse_int=whole,
            parse_constant=constant,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Refused from None
    if raw.startswith(b"\xef\xbb\xbf") or _depth(value) > DEEPEST:
        raise Refused
    return value


def decimal_slowly(text):
    """Read a number that is not written as an integer, in another way than `read_decimal`."""
    double = float(text)
    mantissa, _, exponent = text.lower().partition("e")
    if not math.isfinite(double):
        raise Refused
    if not mantissa.strip("-.0"):
        return double
    if len(exponent.lstrip("+-0")) > LONGEST_EXPONENT:
        raise Refused
    unrounded = Context(prec=len(text), Emin=MIN_EMIN, Emax=MAX_EMAX)
    exact = Decimal(text).normalize(unrounded)
    as_precise = Context(prec=len(exact.as_tuple().digits), Emin=MIN_EMIN, Emax=MAX_EMAX)
    if exact in (Decimal(repr(double)), as_precise.create_decimal(Decimal(double))):
        return double
    if exact == exact.to_integral_value() and abs(exact) < 10**21:
        return int(exact)
    return ExactFloat(decimal_text(exact))


def decimal_text(exact):
    """Write a normalised decimal as ECMAScript would if it had as many digits."""
    sign, digits, exponent = exact.as_tuple()
    text = "".join(map(str, digits))
    point = len(text) + exponent
    if point > 21 or point < -5:
        mantissa = text[0] + ("." + text[1:] if text[1:] else "")
        body = f"{mantissa}e{'+' if point > 0 else '-'}{abs(point - 1)}"
    elif point <= 0:
        body = "0." + "0" * -point + text
    elif point >= len(text):
        body = text + "0" * (point - len(text))
    else:
        body = text[:point] + "." + text[point:]
    return "-" * sign + body


def _depth(value):
    level, depth = [value], 0
    while level:
        level = [v for v in level if isinstance(v, dict | list)]
        depth += bool(level)
        level = [i for v in level for i in (v.values() if isinstance(v, dict) else v)]
    return depth


def exactly(value):
    """Make values comparable: numbers by their worth, true apart from 1."""
    match value:
        case dict():
            return {name: exactly(item) for name, item in value.items()}
        case list():
            return [exactly(item) for item in value]
        case bool() | None | str():
            return (type(value).__name__, value)
        case _:
            return ("number", value)
