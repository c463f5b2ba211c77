"""
Reads the path, query, form and cookies of a request strictly.

A path is split before it is decoded, so an encoded slash is part of a name. Anything that is not
UTF-8, and names with control characters, are refused: no page of this dashboard sends them.
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


class UnreadableRequest(Exception):
    """Shown as a page with status 400."""


class WrongContentType(Exception):
    """The body is not a form; shown as a page with status 415."""


def segments(path: str) -> tuple[str, ...]:
    """Split a path, and decode each part."""
    if _PERCENT.search(path):
        raise UnreadableRequest
    try:
        parts = tuple(unquote(part, errors="strict") for part in path.split("/")[1:])
    except UnicodeDecodeError:
        raise UnreadableRequest from None
    if any(_CONTROL.search(part) for part in parts):
        raise UnreadableRequest
    return parts


def query(request: Request) -> dict[str, str]:
    """Return the query; of a repeated name, the last value."""
    return dict(_pairs(request.query, 100))


def form(request: Request) -> Mapping[str, Sequence[str]]:
    """Return the posted form."""
    kind = (request.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if request.body and kind != _FORM:
        raise WrongContentType
    found: dict[str, list[str]] = {}
    try:
        text = request.body.decode("ascii")
    except UnicodeDecodeError:  # a browser percent-encodes other characters
        raise UnreadableRequest from None
    for name, value in _pairs(text, MOST_FIELDS):
        found.setdefault(name, []).append(value)
    return found


def _pairs(text: str, most: int) -> list[tuple[str, str]]:
    if _PERCENT.search(text):
        raise UnreadableRequest
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=most, errors="strict")
    except ValueError:  # not UTF-8, or too many
        raise UnreadableRequest from None


def cookies(request: Request) -> dict[str, str]:
    """Return the cookies, without repeated names: one of them is not ours."""
    found: dict[str, str] = {}
    doubled: set[str] = set()
    for header in request.values(b"cookie"):
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            doubled |= {name} & found.keys()
            found[name] = value
    return {name: value for name, value in found.items() if name not in doubled}
