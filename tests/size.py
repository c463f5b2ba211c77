"""
How large a test is: small in the quick suite, as large as it gets with `--full`.

Outside pytest, everything is full.
"""

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_full = True


def choose(*, full: bool) -> None:
    """Set the size; `tests/conftest.py` calls it before any test is collected."""
    global _full  # noqa: PLW0603 - one switch for the whole run
    _full = full


def is_full() -> bool:
    """Return True if everything is to be tried."""
    return _full


def sized(quick: T, full: T) -> T:
    """Return the one of the two that fits the size of this run."""
    return full if _full else quick


def examples(full: int) -> int:
    """Return how many Hypothesis examples to try: a tenth of *full* in the quick suite."""
    return sized(min(full, max(5, full // 10)), full)


def full(*values: Any) -> list[Any]:
    """Return *values* for `parametrize`, each marked `full`; a tuple has several arguments."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
        for value in values
    ]


def some(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return *values* for `parametrize`; those that are not in *quick* are marked `full`."""
    return [value if value in quick else full(value)[0] for value in values]
