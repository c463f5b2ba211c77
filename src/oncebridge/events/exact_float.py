"""
Decimal numbers that a double would round.

Rounding would make 1.000000000000000001 and 1.000000000000000002 one value, and two events one.

A number is treated as its nearest double if that double, written with as many significant
digits, has the same digits. So 0.1, 0.10000000000000001 and 0.10000000000000000555 are one
number, because serialisers write one double in all of these ways. Any other number has its
exact decimal value, as an integer or as an `ExactFloat`.
"""

import math
import operator
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Final, Self

SURE: Final = 16
"""With a point or an exponent, so long a text has at most 15 digits: a normal double keeps them."""

_LEAST_NORMAL: Final = sys.float_info.min

_MOST_DIGITS: Final = 767
"""No double has more significant digits when it is written out in full."""

_LONGEST_EXPONENT: Final = 18
"""The digits of the largest exponent that `Decimal` can hold."""

_WHOLE: Final = 21
"""ECMAScript writes a whole number of up to so many digits without an exponent."""


class ExactFloat(float):
    """
    A number that a double would round.

    To arithmetic and to `json` it is the nearest double. Comparisons use the exact value,
    which is *text*, in the form that `oncebridge.events.canonical` writes.
    """

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]  # for copy and pickle
        return (self.text,)

    def __repr__(self) -> str:
        return self.text

    def __bool__(self) -> bool:
        return True  # also 1e-400, whose nearest double is zero

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExactFloat) and self.text == other.text

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: object) -> bool:
        return self._compare(operator.lt, other)

    def __le__(self, other: object) -> bool:
        return self._compare(operator.le, other)

    def __gt__(self, other: object) -> bool:
        return self._compare(operator.gt, other)

    def __ge__(self, other: object) -> bool:
        return self._compare(operator.ge, other)

    def _compare(self, compare: Callable[[Decimal, Decimal], bool], other: object) -> bool:
        if isinstance(other, float):
            # A double has the value of the digits that are written for it: 0.1 is 0.1.
            exact = Decimal(repr(other))
        elif isinstance(other, int):
            exact = Decimal(other)
        else:
            return NotImplemented  # type: ignore[no-any-return]
        return not exact.is_nan() and compare(Decimal(self.text), exact)


def holds_exact_float(value: object) -> bool:
    """Return True if *value* has an `ExactFloat` anywhere, which `json` would round."""
    if isinstance(value, dict):
        return any(map(holds_exact_float, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_exact_float, value))
    return isinstance(value, ExactFloat)


def read_decimal(text: str) -> int | float:
    """
    Return a number that is written with a fraction or an exponent.

    The result is a double (infinite if the number is too large for one), an integer, or an
    `ExactFloat`. Raise `ValueError` if the exponent is too long.
    """
    double = float(text)
    if len(text) <= SURE and abs(double) >= _LEAST_NORMAL:
        return double
    if not math.isfinite(double):
        return double
    digits, point = significant_digits(text)
    if _are_written(digits, point, double):
        return double
    exact = ("-" if text.startswith("-") else "") + lay_out(digits, point)
    return int(exact) if len(digits) <= point <= _WHOLE else ExactFloat(exact)


def counts_as_double(text: str, double: float) -> bool:
    """Return True if a serialiser may write *text* for *double*, which is the nearest to it."""
    if f"{double:.{len(text) - 1 - text.find('.')}f}" == text:
        return True  # as below, but faster
    return _are_written(*significant_digits(text), double)


def _are_written(digits: str, point: int, double: float) -> bool:
    if not double:
        return not digits
    if len(digits) > _MOST_DIGITS:
        return False
    if (digits, point) == significant_digits(f"{double:.{len(digits) - 1}e}"):
        return True
    # The shortest digits are not always the nearest: 5.684341886080802e-14 is 2 to the -44.
    return (digits, point) == significant_digits(repr(double))


def significant_digits(text: str) -> tuple[str, int]:
    """
    Return the digits of a number and the position of its decimal point.

    The absolute value is 0.DIGITS times ten to the power of the position. Zero has no digits.
    Underscores and a plus sign are allowed, because TOML has them.
    """
    mantissa, _, exponent = text.replace("_", "").lower().lstrip("+-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    written = whole + fraction
    digits = written.lstrip("0")
    if not digits:
        return "", 0
    point = len(whole) - len(written) + len(digits)
    if exponent:
        if len(exponent) > _LONGEST_EXPONENT and len(exponent.lstrip("+-0")) > _LONGEST_EXPONENT:
            raise ValueError("the exponent is too long")
        point += int(exponent)
    return digits.rstrip("0"), point


def lay_out(digits: str, point: int) -> str:
    """Return the text that ECMAScript's ``Number::toString`` makes of these digits."""
    count = len(digits)
    if count <= point <= _WHOLE:
        return digits + "0" * (point - count)
    if 0 < point <= _WHOLE:
        return f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if count > 1 else ""
    return f"{digits[0]}{fraction}e{point - 1:+d}"
