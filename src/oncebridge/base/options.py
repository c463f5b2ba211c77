"""
Settings, each declared once.

A group of settings is a frozen Struct with fields such as

    lease: Annotated[timedelta, Doc("How long a claim lasts.", example="30s")] = timedelta(seconds=30)

From this are made: the reader of the configuration (which reports all errors together), the
JSON Schema, the reference page, the command-line flags and the environment variables. This
module does not know which settings exist.
"""

import json
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from difflib import get_close_matches
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import msgspec
from msgspec import Struct
from msgspec.structs import fields as struct_fields

from oncebridge.base.durations import format_duration, parse_duration
from oncebridge.errors import ConfigError, ConfigErrors

S = TypeVar("S", bound=Struct)


class Doc(Struct, frozen=True):
    """The description of a setting in one sentence, an example, and its limits."""

    text: str
    example: str = ""
    at_least: float | None = None
    """For a duration: seconds."""
    at_most: float | None = None
    or_one: bool = False
    """For a list: a single value is accepted as a list of one."""


class Size(int):
    """A number of bytes, written `64KiB`, `1MiB`, `2GiB` or `500B`."""


class Rate(float):
    """How often per second, written `100/s`, `3000/m` or `5000/h`."""


class Text(str):
    """A value from the environment or a flag, always text; *origin* is the variable or flag."""

    __slots__ = ("origin",)
    origin: str

    @classmethod
    def of(cls, text: str, origin: str) -> "Text":
        made = cls(text)
        made.origin = origin
        return made


class Setting(Struct, frozen=True):
    """The declaration of one setting."""

    name: str
    kind: Any
    doc: Doc
    default: Any
    required: bool


@runtime_checkable
class Readable(Protocol):
    """
    A type with its own reader, for settings that are more than a plain value.

    If it has `is_secret`, its value is never quoted. A text that must not be printed unchanged
    has the printable form as `shown`.
    """

    @classmethod
    def read_option(cls, value: Any, where: str, problems: "Problems") -> Any:
        """Return the value; add errors to *problems*, or raise `ConfigError` for one."""
        ...

    @classmethod
    def option_schema(cls) -> dict[str, Any]: ...

    @classmethod
    def option_form(cls) -> str:
        """Return a few words for the accepted form."""
        ...


@cache
def settings_of(kind: type[Struct]) -> tuple[Setting, ...]:
    """Return the settings of *kind*: its own first, then the inherited ones."""
    hints = get_type_hints(kind, include_extras=True)
    inherited = {name for base in kind.__mro__[1:] for name in getattr(base, "__annotations__", ())}
    found = []
    for field in sorted(struct_fields(kind), key=lambda field: field.name in inherited):
        hint, doc = hints[field.name], Doc("")
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            doc = next((note for note in notes if isinstance(note, Doc)), doc)
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        required = default is msgspec.NODEFAULT
        name = field.encode_name
        found.append(Setting(name, hint, doc, None if required else default, required))
    return tuple(found)


# --- errors -----------------------------------------------------------------------------


class Problems:
    """Collects the errors of one configuration; *file* is the file it was read from."""

    def __init__(self, file: str = "") -> None:
        self.found: list[ConfigError] = []
        self._file = file

    def add(self, where: str, message: str) -> None:
        self.found.append(ConfigError(where, message))

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Collect a `ConfigError` that is raised inside, and continue after the block."""
        try:
            yield
        except ConfigErrors as errors:
            self.found += errors.problems
        except ConfigError as error:
            self.found.append(error)

    def check(self) -> None:
        """Raise all collected errors, if there are any; equal ones once."""
        found = list({str(problem): problem for problem in self.found}.values())
        if len(found) == 1 and not self._file:
            raise found[0]
        if found:
            raise ConfigErrors(found, self._file)


def did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """Return a suggestion for a misspelt *name*, or the list of allowed names."""
    close = get_close_matches(name, allowed, 1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"allowed: {', '.join(allowed)}" if allowed else "there are no settings here"


# --- reading ----------------------------------------------------------------------------


def read(kind: type[S], table: Any, where: str, problems: Problems) -> S | None:
    """Return *table* as a *kind*; None if it has errors, which are added to *problems*."""
    if not isinstance(table, Mapping):
        names = ", ".join(setting.name for setting in settings_of(kind))
        problems.add(where, f"must be a table with {names}")
        return None
    before = len(problems.found)
    values, _ = read_values(kind, table, where, problems)
    return None if len(problems.found) > before else kind(**values)


def read_values(
    kind: type[Struct], table: Mapping[str, Any], where: str, problems: Problems
) -> tuple[dict[str, Any], set[str]]:
    """
    Return the valid values of *table* by field, and the names of the fields with errors.

    In a list, items with errors are None.
    """
    settings = settings_of(kind)
    known = [setting.name for setting in settings]
    for name, value in table.items():
        if name not in known:
            place = origin(value, _under(where, str(name)))
            problems.add(place, f"no such setting; {did_you_mean(str(name), known)}")
    renamed = {field.encode_name: field.name for field in struct_fields(kind)}
    values: dict[str, Any] = {}
    flawed = set()
    for setting in settings:
        place = _under(where, setting.name)
        before = len(problems.found)
        if setting.name in table:
            with problems.caught():
                value = convert(table[setting.name], setting.kind, setting.doc, place, problems)
                values[renamed[setting.name]] = value
        elif setting.required:
            problems.add(place, "is missing")
        if len(problems.found) > before:
            flawed.add(renamed[setting.name])
    return values, flawed


def convert(value: Any, kind: Any, doc: Doc, where: str, problems: Problems) -> Any:
    """Return *value* as a value of *kind*, or raise `ConfigError`."""
    where = origin(value, where)
    outer = get_origin(kind)
    if kind is Any:
        return value
    if outer is Annotated:
        return convert(value, get_args(kind)[0], doc, where, problems)
    if outer in (Union, types.UnionType):
        return _one_of(value, get_args(kind), doc, where, problems)
    if outer is Literal:
        return _choice(value, get_args(kind), where)
    if outer in (list, tuple):
        return _items(value, kind, doc, where, problems)
    if outer is dict:
        return _members(value, get_args(kind)[1], doc, where, problems)
    if isinstance(kind, type) and issubclass(kind, Readable):
        return kind.read_option(value, where, problems)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return read(kind, value, where, problems)
    return _within(_READERS[kind](value, where), doc, where)


def _one_of(value: Any, kinds: Sequence[Any], doc: Doc, where: str, problems: Problems) -> Any:
    kinds = [kind for kind in kinds if kind is not type(None)]
    errors = []
    for kind in kinds:
        found = len(problems.found)
        try:
            read = convert(value, kind, doc, where, problems)
        except ConfigError as error:
            errors.append(error)
            continue
        return read if len(problems.found) == found else None
    if len(kinds) == 1:
        raise errors[0]
    forms = " or ".join(describe_type(kind) for kind in kinds)
    hint = "".join(_HINT.findall(" ".join(one.message for one in errors))[:1])
    raise ConfigError(where, f"{_found(value, kinds)}must be {forms}{_for_example(doc)}{hint}")


_HINT = re.compile(r"; did you mean '[^']*'\?")


def _choice(value: Any, allowed: Sequence[Any], where: str) -> Any:
    if isinstance(value, str) and value in allowed:
        return str(value)
    close = get_close_matches(value, allowed, 1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(where, f"{_shown(value)}: must be one of {', '.join(allowed)}{hint}")


def _items(value: Any, kind: Any, doc: Doc, where: str, problems: Problems) -> Any:
    inner = get_args(kind)[0]
    read: list[Any]
    is_joined = isinstance(value, Text) and inner is str  # from outside of a file, with commas
    if doc.or_one and isinstance(value, str | Mapping) and not is_joined:
        read = [convert(value, inner, doc, where, problems)]
        return tuple(read) if get_origin(kind) is tuple else read
    if isinstance(value, Text):
        parts = [part.strip() for part in value.split(",")]
        # An empty variable is an error: an empty list would turn the setting off.
        value = [Text.of(part, value.origin) for part in parts if part] or None
    if not isinstance(value, list | tuple):
        shown = "" if value is None else _found(value, (inner,))
        raise ConfigError(
            where, f"{shown}must be a list of {describe_type(inner)}{_for_example(doc)}"
        )
    read = []
    for at, item in enumerate(value):
        read.append(None)
        with problems.caught():
            read[at] = convert(item, inner, doc, f"{where}[{at}]", problems)
    return tuple(read) if get_origin(kind) is tuple else read


def _members(value: Any, inner: Any, doc: Doc, where: str, problems: Problems) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(where, f"{_found(value, (inner,))}must be a table{_for_example(doc)}")
    read = {}
    for name, item in value.items():
        with problems.caught():
            read[str(name)] = convert(item, inner, doc, _under(where, str(name)), problems)
    return read


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(where, f"{_shown(value)}: must be text, and not empty")
    return str(value)


def _flag(value: Any, where: str) -> bool:
    if isinstance(value, Text) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ConfigError(where, f"{_shown(value)}: must be true or false")
    return value


def _whole(value: Any, where: str) -> int:
    if isinstance(value, Text) and re.fullmatch(r"-?\d{1,18}", value, re.ASCII):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(where, f"{_shown(value)}: must be a whole number")
    if not -(2**63) <= value < 2**63:
        raise ConfigError(where, "is too large; a whole number may have at most 64 bits")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, Text) and re.fullmatch(r"-?\d+(\.\d+)?", value, re.ASCII):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(where, f"{_shown(value)}: must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(where, "must be a finite number")
    return number


_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"(\d{1,12})\s*(B|KB|MB|GB|KiB|MiB|GiB)", re.ASCII)
_PER = {"s": 1, "m": 60, "h": 3600}
_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*/\s*([smh])", re.ASCII)


def _size(value: Any, where: str) -> Size:
    if isinstance(value, Size):
        return value
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        return Size(int(found[1]) * _SIZES[found[2]])
    raise ConfigError(
        where, f"{_shown(value)}: is not a size; write a number and a unit: 64KiB, 1MiB, 2GiB"
    )


def _rate(value: Any, where: str) -> Rate:
    if isinstance(value, Rate):
        return value
    if isinstance(value, str) and (found := _RATE.fullmatch(value.strip())) and float(found[1]):
        return Rate(float(found[1]) / _PER[found[2]])
    raise ConfigError(where, f"{_shown(value)}: is not a rate; write 100/s, 3000/m or 5000/h")


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    str: _text,
    bool: _flag,
    int: _whole,
    float: _number,
    Size: _size,
    Rate: _rate,
    timedelta: parse_duration,
}


def _within(value: Any, doc: Doc, where: str) -> Any:
    least, most = bounds(type(value), doc)
    if least is not None and value < least:
        raise ConfigError(
            where, f"{format_setting(value)}: must be at least {format_setting(least)}"
        )
    if most is not None and value > most:
        raise ConfigError(where, f"{format_setting(value)}: must be at most {format_setting(most)}")
    return value


def bounds(kind: Any, doc: Doc) -> tuple[Any, Any]:
    """Return the minimum and the maximum of a setting of *kind*; None where there is none."""
    kinds = (kind, *get_args(kind))

    def of_kind(bound: Any) -> Any:
        if bound is not None and timedelta in kinds:
            return timedelta(seconds=bound)
        return Size(bound) if bound is not None and Size in kinds else bound

    return of_kind(doc.at_least), of_kind(doc.at_most)


def _under(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def origin(value: Any, where: str) -> str:
    """Return the variable or flag that *value* came from, or *where*."""
    return value.origin if isinstance(value, Text) else where


def _for_example(doc: Doc) -> str:
    return f", such as {doc.example}" if doc.example else ""


def _shown(value: Any) -> str:
    """Return *value* as text for an error message, at most 60 characters."""
    if isinstance(value, Mapping):
        return "a table"
    try:
        text = repr(str(value)) if isinstance(value, str) else repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _found(value: Any, kinds: Sequence[Any]) -> str:
    """Return *value* as text for an error message; empty if one of *kinds* is a secret."""
    return "" if any(map(_is_secret, kinds)) else f"{_shown(value)}: "


def _is_secret(kind: Any) -> bool:
    return getattr(kind, "is_secret", False) or any(map(_is_secret, get_args(kind)))


# --- writing ----------------------------------------------------------------------------


def format_setting(value: Any) -> str:
    """Return a value as the configuration file writes it, with secrets masked."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case timedelta():
            return format_duration(value)
        case Size():
            return _written_size(value)
        case Rate():
            return _written_rate(value)
        case str():
            return json.dumps(getattr(value, "shown", value), ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(format_setting(item) for item in value)}]"
        case dict():
            return "{}" if not value else "{…}"
        case _:
            return "" if isinstance(value, Struct) else str(value)


def _written_size(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _SIZES[unit] and not size % _SIZES[unit]:
            return f"{size // _SIZES[unit]}{unit}"
    return f"{size}B"


def _written_rate(rate: float) -> str:
    for unit, seconds in _PER.items():
        each = round(rate * seconds, 6)
        if each and Rate(each / seconds) == rate:
            return f"{each:.6f}".rstrip("0").rstrip(".") + f"/{unit}"
    return f"{rate:.6f}/s"


_FORMS: dict[Any, tuple[str, dict[str, Any]]] = {
    str: ("text", {"type": "string", "minLength": 1}),
    bool: ("true or false", {"type": "boolean"}),
    int: ("whole number", {"type": "integer"}),
    float: ("number", {"type": "number"}),
    Size: ("size", {"type": "string", "pattern": rf"^\s*{_SIZE.pattern}\s*$"}),
    Rate: ("rate", {"type": "string", "pattern": rf"^\s*{_RATE.pattern}\s*$"}),
    timedelta: ("duration", {"type": "string", "pattern": r"^\s*\d+(\.\d+)?(ms|s|m|h|d)\s*$"}),
    Any: ("anything", {}),
}


def describe_type(kind: Any) -> str:
    """Return a few words for the accepted form of *kind*."""
    outer = get_origin(kind)
    if outer is Annotated:
        return describe_type(get_args(kind)[0])
    if outer in (Union, types.UnionType):
        return " or ".join(describe_type(one) for one in get_args(kind) if one is not type(None))
    if outer is Literal:
        return ", ".join(f'"{one}"' for one in get_args(kind))
    if outer in (list, tuple):
        return f"list of {describe_type(get_args(kind)[0])}"
    if outer is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, Readable):
        return kind.option_form()
    if isinstance(kind, type) and issubclass(kind, Struct):
        return "table"
    return _FORMS[kind][0]


def schema(kind: Any, doc: Doc | None = None) -> dict[str, Any]:
    """Return the JSON Schema of *kind*."""
    outer = get_origin(kind)
    if outer is Annotated:
        return schema(get_args(kind)[0], doc)
    if outer in (Union, types.UnionType):
        kinds = [one for one in get_args(kind) if one is not type(None)]
        several = [schema(one, doc) for one in kinds]
        return several[0] if len(kinds) == 1 else {"anyOf": several}
    if outer is Literal:
        return {"enum": list(get_args(kind))}
    if outer in (list, tuple):
        items = schema(get_args(kind)[0], doc)
        array = {"type": "array", "items": items}
        return {"anyOf": [items, array]} if doc is not None and doc.or_one else array
    if outer is dict:
        return {"type": "object", "additionalProperties": schema(get_args(kind)[1], doc)}
    if isinstance(kind, type) and issubclass(kind, Readable):
        return kind.option_schema()
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _table_schema(kind)
    described = dict(_FORMS[kind][1])
    if doc is not None and described.get("type") in ("integer", "number"):
        described |= {} if doc.at_least is None else {"minimum": doc.at_least}
        described |= {} if doc.at_most is None else {"maximum": doc.at_most}
    return described


def _table_schema(kind: type[Struct]) -> dict[str, Any]:
    properties = {}
    for setting in settings_of(kind):
        described = schema(setting.kind, setting.doc) | {"description": setting.doc.text}
        default = _plain(setting.default)
        if default is not None:
            described["default"] = default
        properties[setting.name] = described
    required = [setting.name for setting in settings_of(kind) if setting.required]
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _plain(value: Any) -> Any:
    """Return a default as a JSON value; None if the schema should not show it."""
    if isinstance(value, timedelta | Size | Rate):
        return format_setting(value)
    if isinstance(value, bool | int | float | str):
        return value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) and value else None
