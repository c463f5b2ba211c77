"""
A second reader of events, without a thought for speed, to compare the first one with.

It needs nothing but the standard library's `json`, and says no more than yes or no: the
detail, or `Refused`.
"""

import json
import math

DEEPEST = 100
LONGEST_INTEGER = 4300


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

    def number(text):
        value = float(text)
        if not math.isfinite(value):
            raise Refused
        return value

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
            parse_float=number,
            parse_int=whole,
            parse_constant=constant,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Refused from None
    if raw.startswith(b"\xef\xbb\xbf") or _depth(value) > DEEPEST:
        raise Refused
    return value


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
