"""
Masks payloads: hides values by field name, or all values.

Field names are always shown; only values are hidden. JSON inside a string is masked as well. Other
text is not parsed: a phone number in a note is hidden only if the note is.

The result is bounded for any event: long strings are cut, levels below 64 are removed, and so is
everything after about 200 KB. Each cut is marked by an `…`.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

HIDDEN: Final = "•••"
LARGEST: Final = 4 << 20
"""Larger payloads are not parsed, in bytes."""

_ROOM: Final = 200_000
_BRIEF_LARGEST, _BRIEF = 256 << 10, 4096
_LONGEST_TEXT, _LONGEST_NAME = 2000, 200
_DEEPEST: Final = 64
_LONGEST_NUMBER: Final = 1000
_CUT: Final = "…"
_DETAIL: Final = "detail"
_ENVELOPE: Final = frozenset(
    {
        *("version", "id", "detail-type", "source", "account", "time", "region", "resources"),
        "replay-name",
    }
)
"""Fields set by the transport, without personal data."""
_BLANK: Final = "\ufeff \t\r\n"
_LIKE_JSON: Final = ("{", "[", '"')
_ODD: Final = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Invisible characters, and those that change the text direction."""

_Path = tuple[str, ...]


class Mask:
    """
    Hides values of events.

    *names* are field names, case-insensitive, whose value is hidden at any level. A dotted name is
    a path from the top of the event, through the elements of lists (`[]` is optional); `*` matches
    any field. With *shape_only*, every value is hidden except those of the envelope.
    """

    def __init__(self, names: Sequence[str], *, shape_only: bool = False) -> None:
        self._hidden = _Hidden(names)
        self._shape_only = shape_only

    def masked(self, value: Any) -> Any:
        """Return a copy of a parsed event with values hidden."""
        return self._walked(value, _ROOM)

    def masked_text(self, raw: bytes) -> str:
        """Return an event as indented JSON with values hidden; for other data only its size."""
        size = f"{len(raw):,} bytes"
        if len(raw) > LARGEST:
            return f"{size}: too large to be shown"
        try:
            return _written(self.masked(_parsed(raw)), indent=2)
        except RecursionError:
            return f"{size}: nested too deeply to be shown"
        except ValueError:
            return f"{size}, not JSON"

    def brief(self, raw: bytes) -> bytes:
        """Return masked JSON of at most 4 KB for the history; empty if not JSON or too large."""
        if len(raw) > _BRIEF_LARGEST:
            return b""
        try:
            text = _written(self._walked(_parsed(raw), _BRIEF)).encode()
        except (ValueError, RecursionError):
            return b""
        if len(text) <= _BRIEF:
            return text
        return text[: _BRIEF - 3].decode("utf-8", "ignore").encode() + _CUT.encode()

    def hides(self, *path: str) -> bool:
        """Return True if the value at *path* is hidden."""
        steps = tuple(step.casefold() for step in path)
        if not self._hidden.names.isdisjoint(steps):
            return True
        return any(
            len(hidden) <= len(steps)
            and all(one in (step, "*") for one, step in zip(hidden, steps, strict=False))
            for hidden in self._hidden.paths
        )

    def _walked(self, value: Any, room: int) -> Any:
        walk = _Walk(self._hidden, room)
        return walk.shape(value) if self._shape_only else walk.event(value)


def indented(payload: bytes) -> str:
    """Return the result of `Mask.brief` indented; unchanged if it was cut."""
    try:
        return _written(json.loads(payload), indent=2)
    except (ValueError, RecursionError):
        return payload.decode("utf-8", "replace")


class _Walk:
    """Copies one event; *room* is how many characters more may be shown."""

    def __init__(self, hidden: "_Hidden", room: int) -> None:
        self._hidden = hidden
        self._room = room

    # --- hiding by name ---------------------------------------------------------------------

    def event(self, value: Any) -> Any:
        """Copy an event, or several."""
        if type(value) is list:
            return self._list(value, 0, self.event)
        paths = list(self._hidden.paths)
        if type(value) is dict and _DETAIL not in value:  # without an envelope, it is the detail
            paths += [path[1:] for path in paths if path[0] == _DETAIL]
        return self._value(value, paths, 0)

    def _value(self, value: Any, paths: Sequence[_Path], depth: int) -> Any:
        if type(value) is str:
            return self._text(value, paths, depth)
        if type(value) is list:
            return self._list(value, depth, lambda item: self._value(item, paths, depth + 1))
        if type(value) is not dict:
            return _plain(value)
        if depth and _DETAIL in value:  # an event inside of something else
            paths = [*paths, *self._hidden.paths]

        def member(name: str, item: Any) -> Any:
            folded = name.casefold()
            below = [path[1:] for path in paths if path[0] in (folded, "*")] if paths else ()
            if folded in self._hidden.names or () in below:
                return HIDDEN
            return self._value(item, below, depth + 1)

        return self._object(value, depth, member)

    def _text(self, text: str, paths: Sequence[_Path], depth: int) -> str:
        """Mask JSON in a string; hide text that looks like JSON and may contain a hidden name."""
        bare = text.strip(_BLANK)
        if bare.startswith(_LIKE_JSON) and depth < _DEEPEST:
            try:
                value = _parsed(bare)
            except (ValueError, RecursionError):
                if self._hidden.may_be_in(bare):
                    return HIDDEN
            else:
                return _written(self._value(value, paths, depth + 1))
        elif '"' in bare and self._hidden.are_quoted_in(bare):
            return HIDDEN
        return self._cut(text, _LONGEST_TEXT)

    # --- hiding all -------------------------------------------------------------------------

    def shape(self, value: Any) -> Any:
        """Copy the structure of events; of the envelope also the values."""
        if type(value) is list:
            return self._list(value, 0, self.shape)
        if type(value) is dict and _DETAIL in value:
            return self._object(value, 0, self._envelope)
        return self._shape(value, 0)

    def _envelope(self, name: str, item: Any) -> Any:
        if name.casefold() in self._hidden.names:
            return HIDDEN
        if name == _DETAIL and type(item) is str:
            try:
                return _written(self._shape(_parsed(item), 1))
            except (ValueError, RecursionError):
                return HIDDEN
        if name in _ENVELOPE and type(item) is str:
            return self._cut(item, _LONGEST_TEXT)
        if name in _ENVELOPE and type(item) is list and all(type(one) is str for one in item):
            return self._list(item, 1, lambda one: self._cut(one, _LONGEST_TEXT))
        return self._shape(item, 1)

    def _shape(self, value: Any, depth: int) -> Any:
        if type(value) is list:
            return self._list(value, depth, lambda item: self._shape(item, depth + 1))
        if type(value) is dict:
            return self._object(value, depth, lambda _, item: self._shape(item, depth + 1))
        return HIDDEN

    # --- limits -----------------------------------------------------------------------------

    def _object(
        self, value: dict[str, Any], depth: int, copy: Callable[[str, Any], Any]
    ) -> dict[str, Any] | str:
        if depth >= _DEEPEST:
            return _CUT
        shown: dict[str, Any] = {}
        for at, (name, item) in enumerate(value.items()):
            if not self._has_room(depth):
                shown[_CUT] = f"{len(value) - at:,} more"
                break
            shown[self._cut(name, _LONGEST_NAME)] = copy(name, item)
        return shown

    def _list(self, value: list[Any], depth: int, copy: Callable[[Any], Any]) -> list[Any] | str:
        if depth >= _DEEPEST:
            return _CUT
        shown: list[Any] = []
        for at, item in enumerate(value):
            if not self._has_room(depth):
                shown.append(f"{_CUT} {len(value) - at:,} more")
                break
            shown.append(copy(item))
        return shown

    def _has_room(self, depth: int) -> bool:
        self._room -= 8 + 2 * depth
        return self._room > 0

    def _cut(self, text: str, most: int) -> str:
        most = min(most, max(self._room, 0))
        self._room -= min(len(text), most)
        return text if len(text) <= most else f"{text[:most]}{_CUT} ({len(text):,} characters)"


def _plain(value: Any) -> Any:
    """Return a scalar; a very long number becomes text, as it could not be encoded."""
    is_long = type(value) is int and value.bit_length() > _LONGEST_NUMBER
    return _CUT if is_long else value


class _Hidden:
    """Hidden field names and paths."""

    def __init__(self, names: Sequence[str]) -> None:
        given = [name.strip().casefold() for name in names if name.strip(" .[]")]
        steps = [tuple(step.strip().removesuffix("[]") for step in n.split(".")) for n in given]
        # A dotted name may also be a single field name.
        self.names = frozenset([*given, *(path[0] for path in steps if len(path) == 1)])
        self.paths = tuple(path for path in steps if len(path) > 1)
        self._all = {*self.names, *(path[-1] for path in self.paths)} - {"*"}
        either = "|".join(re.escape(name) for name in sorted(self._all))
        self._quoted = re.compile(rf'"\s*(?:{either})\s*\\*"') if either else None

    def may_be_in(self, text: str) -> bool:
        """Return True if *text* may contain a hidden name, possibly with escapes."""
        folded = text.casefold()
        return "\\u" in folded or any(name in folded for name in self._all)

    def are_quoted_in(self, text: str) -> bool:
        """Return True if *text* contains a hidden name as a JSON string."""
        return self._quoted is not None and self._quoted.search(text.casefold()) is not None


# --- lenient JSON ---------------------------------------------------------------------------


def _parsed(raw: bytes | str) -> Any:
    """Parse JSON leniently, so that refused events can be shown."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        text = raw if isinstance(raw, str) else raw.decode()
        return _reader.decode(text.removeprefix("\ufeff"))


def _read_int(text: str) -> int | str:
    return int(text) if len(text) < _LONGEST_NUMBER else f"{text[:20]}{_CUT} ({len(text):,} digits)"


_reader = json.JSONDecoder(parse_int=_read_int, strict=False)


def _written(value: Any, indent: int | None = None) -> str:
    """Return JSON in which invisible characters are escaped."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    return _ODD.sub(_escaped, text)


def _escaped(found: "re.Match[str]") -> str:
    return json.dumps(found[0])[1:-1]
