"""
What a request says, read once and strictly.

A path is taken apart before it is decoded, so an encoded slash is part of a name and never
parts two. What is not UTF-8, or holds control characters where a name should be, is nothing we
have written and is not read any further.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote

from oncebridge.http.server import Request

MOST_FIELDS: Final = 5000
_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FORM: Final = b"application/x-www-form-urlencoded"


class Unreadable(Exception):
    """It cannot be read; told as a page with status 400."""


class WrongKind(Exception):
    """A body that no form of ours sends; told as a page with status 415."""


def segments(path: str) -> tuple[str, ...]:
    """Take a path apart and decode each part."""
    if _PERCENT.search(path):
        raise Unreadable
    try:
        parts = tuple(unquote(part, errors="strict") for part in path.split("/")[1:])
    except UnicodeDecodeError:
        raise Unreadable from None
    if any(_CONTROL.search(part) for part in parts):
        raise Unreadable
    return parts


def query(request: Request) -> dict[str, str]:
    """Read what stands behind the path; of a name that came twice, the last."""
    return dict(_pairs(request.query, 100))


def form(request: Request) -> Mapping[str, Sequence[str]]:
    """Read what was posted."""
    kind = (request.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if request.body and kind != _FORM:
        raise WrongKind
    found: dict[str, list[str]] = {}
    try:
        text = request.body.decode("ascii")
    except UnicodeDecodeError:  # a browser encodes whatever is not
        raise Unreadable from None
    for name, value in _pairs(text, MOST_FIELDS):
        found.setdefault(name, []).append(value)
    return found


def _pairs(text: str, most: int) -> list[tuple[str, str]]:
    if _PERCENT.search(text):
        raise Unreadable
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=most, errors="strict")
    except ValueError:  # not UTF-8, or too many
        raise Unreadable from None


def cookies(request: Request) -> dict[str, str]:
    """Read the cookies; of a name that came twice, none: one of them is not ours."""
    found: dict[str, str] = {}
    doubled: set[str] = set()
    for header in request.values(b"cookie"):
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            doubled |= {name} & found.keys()
            found[name] = value
    return {name: value for name, value in found.items() if name not in doubled}
