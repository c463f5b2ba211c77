"""
Derive the key of an event.

A key is one byte for the version of this algorithm, and the SHA-256 of everything that
identifies the event: the namespace, the kind of key, the source, the detail-type, and the
parts that the rule chose. Each is preceded by its length, so that ``a|bc`` and ``ab|c`` are
two keys.

A kind of key returns None if the event has too little: a part that is missing or null, an
empty id, a detail with nothing left in it. A constant would make unrelated events duplicates.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import jmespath
from jmespath.exceptions import JMESPathError
from jmespath.functions import Functions, signature
from msgspec import Struct
from msgspec.structs import replace

from oncebridge.errors import ConfigError, EventError
from oncebridge.events.canonical import canonical, canonical_plain
from oncebridge.events.event import Event, parse
from oncebridge.events.exact_float import holds_exact_float, read_decimal

Scope = Literal["source", "organisation"]

if TYPE_CHECKING:
    from _hashlib import HASH


class Part(Struct, frozen=True, gc=False):
    """One key of a claim, with the data that the store needs to decide about it."""

    key: bytes
    hash: bytes = b""
    slide_ms: int = 0
    """A duplicate pushes the window's end to now + *slide_ms*; 0 for a fixed window."""


KEY_VERSION: Final = 1
"""The first byte of every key; it changes if an event would get another key than before."""

_VERSION_BYTE: Final = bytes([KEY_VERSION])
_SHORT: Final = 512
"""Details of this size and above are not checked for having too little content."""


class KeyKind(Protocol):
    """One way to identify events; its name *kind* is part of the key."""

    @property
    def kind(self) -> bytes: ...

    def parts(self, event: Event) -> tuple[bytes, ...] | None:
        """Return the other parts of the key; None if the event cannot be identified."""


class ContentKey:
    """
    The canonical detail, without the paths in *ignore*.

    A path consists of names and dots and starts at the envelope: ``detail.timestamp``. ``*``
    matches any name or any element of an array, and a name with special characters is
    written in double quotes: ``detail."odd.name"``. *where* is the setting, for errors.

    If paths are ignored, the rest must have a value that is not null or empty; members in
    *labels* do not suffice. Details above 512 bytes are not checked for this: they hardly ever
    consist of nulls. A detail without a member that is in *needs* has no key.

    *apart* is for `oncebridge.events.event.parse`, which then encodes each event only once.
    """

    kind: Final = b"content"

    def __init__(
        self,
        ignore: Sequence[str] = (),
        *,
        where: str = "ignore",
        labels: Sequence[str] = (),
        needs: Sequence[str] = (),
    ) -> None:
        self.ignore = _string_tuple(ignore, where)
        self.labels, self.needs = _string_tuple(labels, "labels"), _string_tuple(needs, "needs")
        self._paths = [_read_path(path, f"{where}[{n}]") for n, path in enumerate(self.ignore)]
        names = [path[0] for path in self._paths if len(path) == 1 and path[0] is not None]
        self._names = tuple(names) if len(names) == len(self._paths) else None
        self.apart: tuple[str, ...] = self._names or ()
        self._insufficient_names = frozenset(self.apart + self.labels)
        # If every name counts, only the empty detail is insufficient.
        self._short = _SHORT if self._insufficient_names else len(b"{}") + 1

    def parts(self, event: Event) -> tuple[bytes, ...] | None:
        body = self.body(event)
        if len(body) < self._short and self._is_insufficient(body, event.detail):
            return None
        if self.needs and any(holds_only_null(event.detail.get(name)) for name in self.needs):
            return None
        return (body,)

    def body(self, event: Event) -> bytes:
        """Return the detail without the ignored paths, as canonical bytes; ``{}`` if it is empty."""
        if event.apart == self._names:
            return event.kept
        if self._names is not None:
            left = {name: item for name, item in event.detail.items() if name not in self._names}
        else:
            left = _without(event.detail, self._paths)
            if holds_only_null(left):
                return b"{}"
        return canonical_plain(left) if event.plain else canonical(left)

    def maker(self, start: "Callable[[], HASH]") -> Callable[[Event], bytes | None]:
        """Return a function that makes keys, as `key_maker` does; *start* begins a hash."""
        names, body_of, parts_of = self._names, self.body, self.parts
        short = sys.maxsize if self.needs else self._short

        def make(event: Event) -> bytes | None:  # in one function: each call costs
            body = event.kept if event.apart == names else body_of(event)
            size = len(body)
            if size < short and parts_of(event) is None:
                return None
            hashed = start()
            hashed.update(size.to_bytes(8))
            hashed.update(body)
            return _VERSION_BYTE + hashed.digest()

        return make

    def _is_insufficient(self, body: bytes, detail: Mapping[str, Any]) -> bool:
        if not self._insufficient_names:
            return body == b"{}"
        if self._names is None:
            detail = _without(detail, self._paths)
        for name, item in detail.items():
            if name not in self._insufficient_names and not holds_only_null(item):
                return False
        return True


class IdKey:
    """The id that EventBridge gave the event."""

    kind: Final = b"id"

    def parts(self, event: Event) -> tuple[bytes, ...] | None:
        return (event.id.encode(),) if event.id else None


class FieldsKey:
    """
    The values that JMESPath *expressions* find in the envelope.

    The expressions are part of the key, so rules with different expressions never have the
    same keys. A value is used in its canonical form: 1 and 1.0 are equal, ``"1"`` is different.
    *where* is the setting, for errors.
    """

    kind: Final = b"fields"

    def __init__(self, expressions: Sequence[str], *, where: str = "key") -> None:
        self.expressions = _string_tuple(expressions, where)
        if not expressions:
            raise ConfigError(where, "is empty; list at least one field, such as detail.id")
        self._finders = [
            (each.encode(), compile_field(each, f"{where}[{n}]"))
            for n, each in enumerate(self.expressions)
        ]
        if not any(holds_only_null(find(_EMPTY)) for _, find in self._finders):
            raise ConfigError(
                where,
                "has a value even if the event is empty, so different events would get the same "
                "key; use at least one field without a fallback",
            )

    def parts(self, event: Event) -> tuple[bytes, ...] | None:
        found: list[bytes] = []
        for expression, find in self._finders:
            value = find(event)
            if holds_only_null(value):
                return None
            try:
                found += (expression, canonical(value))
            except EventError:
                # An expression may return a value outside of JSON, such as to_number('nan').
                return None
        return tuple(found)


def make_key(
    namespace: str, kind: bytes, source: str, detail_type: str, parts: tuple[bytes, ...]
) -> bytes:
    """Return the key: 33 bytes, the first of which is `KEY_VERSION`."""
    hashed = _hash_prefix(namespace, kind, source, detail_type).copy()
    hashed.update(_length_prefixed(parts))
    return _VERSION_BYTE + hashed.digest()


def key_maker(
    namespace: str, how: KeyKind, source: str, detail_type: str
) -> Callable[[Event], bytes | None]:
    """Return a function that returns `make_key` of the parts *how* finds; None if it finds none."""
    parts_of, start = how.parts, _hash_prefix(namespace, how.kind, source, detail_type).copy
    if isinstance(how, ContentKey):
        return how.maker(start)

    def make(event: Event) -> bytes | None:
        parts = parts_of(event)
        if parts is None:
            return None
        hashed = start()
        hashed.update(_length_prefixed(parts))
        return _VERSION_BYTE + hashed.digest()

    return make


def fingerprint(
    event: Event, *, content: ContentKey | None = None, source: str | None = None
) -> bytes:
    """
    Return 16 bytes that are equal if two events with the same key have the same content.

    Only the data of the sender counts, without the paths that *content* ignores, and not what
    the transport adds (id, time, region …). *source* replaces the event's, for a wider scope.
    """
    body = event.canonical if content is None else content.body(event)
    scope = event.source if source is None else source
    hashed = _hash_prefix("", b"fingerprint", scope, event.detail_type).copy()
    hashed.update(_length_prefixed((body,)))
    return hashed.digest()[:16]


def conflict_key(key: bytes, fingerprint: bytes) -> bytes:
    """Return the key of an event that has the same *key* as another event but other content."""
    return _VERSION_BYTE + sha256(_length_prefixed((b"conflict", key, fingerprint))).digest()


_ORGANISATION: Final = re.compile(
    r"(aws\.partner/genesys\.com(?:\.test)?/cloud/[^/]+)/.+", re.DOTALL
)


@lru_cache(maxsize=1024)
def scoped_source(source: str, scope: Scope) -> str:
    """Return the source for a key; with "organisation", without the name of the integration."""
    if scope == "organisation" and (found := _ORGANISATION.fullmatch(source)):
        return found[1]
    return source


def _length_prefixed(parts: Sequence[bytes]) -> bytes:
    """Return the parts, each preceded by its length."""
    framed = b""
    for part in parts:
        framed += len(part).to_bytes(8) + part
    return framed


# Few senders send many events, so the common beginning of their keys is hashed once.
@lru_cache(maxsize=4096)
def _hash_prefix(namespace: str, kind: bytes, source: str, detail_type: str) -> "HASH":
    """Return the hash of everything before the parts; copy it, never update it."""
    return sha256(
        _length_prefixed((namespace.encode(), kind, source.encode(), detail_type.encode()))
    )


def _string_tuple(items: Sequence[str], where: str) -> tuple[str, ...]:
    if isinstance(items, str) or not all(isinstance(item, str) for item in items):
        raise ConfigError(where, "must be a list of strings")
    return tuple(items)


# A step of a path: a name, or None for the star, which matches any name and any element.
_Path = tuple[str | None, ...]

_STEP: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\*|[^.*"\s\[\]]+')
_PATH_HELP: Final = (
    "write names and dots, starting with detail, such as detail.timestamp or "
    'detail.items.*.sentAt; quote a name with special characters: detail."odd.name"'
)


def _read_path(path: str, where: str) -> _Path:
    """Return the steps of an ignored path below ``detail``."""
    steps: list[str | None] = []
    position = 0
    while True:
        step = _STEP.match(path, position)
        if not step:
            raise ConfigError(where, f"{path!r} has no name at column {position + 1}; {_PATH_HELP}")
        steps.append(_read_step(step[0], where))
        position = step.end()
        if position == len(path):
            break
        if path[position] != ".":
            raise ConfigError(where, f"{path!r} has no dot at column {position + 1}; {_PATH_HELP}")
        position += 1
    if steps[0] != "detail" or len(steps) == 1:
        raise ConfigError(where, f"{path!r} is not below detail; {_PATH_HELP}")
    return tuple(steps[1:])


def _read_step(step: str, where: str) -> str | None:
    try:
        name = _unquote(step)
        name.encode()
    except ValueError:
        raise ConfigError(where, f"{step} is not a name in quotes; {_PATH_HELP}") from None
    return None if step == "*" else name


def _without(value: Any, paths: Sequence[_Path]) -> Any:
    """Return *value* without *paths*; unaffected parts are shared, not copied."""
    if isinstance(value, dict):
        members = ((name, item, _below(paths, name)) for name, item in value.items())
        return {
            name: _without(item, below) if below else item
            for name, item, below in members
            if () not in below
        }
    if isinstance(value, list):
        below = _below(paths, None)
        return [] if () in below else [_without(item, below) for item in value]
    return value


def _below(paths: Sequence[_Path], name: str | None) -> list[_Path]:
    return [path[1:] for path in paths if path[0] is None or path[0] == name]


def holds_only_null(value: Any) -> bool:
    """Return True for null and for what has only nulls, as ``[a, b]`` gives for missing fields."""
    kind = type(value)
    if kind is not dict and kind is not list:
        return value is None
    waiting = [value]  # no recursion: an event may be nested as deeply as Python's stack
    while waiting:
        within = waiting.pop()
        for item in within.values() if type(within) is dict else within:
            if type(item) is dict or type(item) is list:
                waiting.append(item)
            elif item is not None:
                return False
    return True


_NAME: Final = r'(?:[A-Za-z_][A-Za-z0-9_]*|"(?:[^"\\]|\\.)*")'
_PATH: Final = rf"{_NAME}(?:\.{_NAME})*"
_PLAIN: Final = re.compile(rf"\s*(?P<head>{_PATH})(?P<each>\[\](?:\.(?P<tail>{_PATH}))?)?\s*")

_Find = Callable[[Any], Any]
_EMPTY: Final = replace(parse(b'{"detail":{}}'), _envelope={})


def compile_field(expression: str, where: str = "field") -> Callable[[Event], Any]:
    """Return a function that evaluates a JMESPath expression; it returns None without a match."""
    try:
        compiled = jmespath.compile(expression)
    except JMESPathError as error:
        raise ConfigError(where, f"{expression!r} is not JMESPath: {_first_line(error)}") from None
    _check_functions(compiled.parsed, expression, where)
    plain = [_PLAIN.fullmatch(choice) for choice in expression.split("||")]
    if all(plain):
        return _compile_plain([each for each in plain if each])

    def search(event: Event) -> Any:
        try:
            return compiled.search(event.envelope, _EXACT)
        except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
            # A function got an argument of a wrong type, often the null of a missing field.
            return None

    return search


class ExactFunctions(Functions):
    """The functions of JMESPath without rounding; those that calculate refuse an `ExactFloat`."""

    @signature({"types": []})
    def _func_to_string(self, value: Any) -> Any:
        if holds_exact_float(value):
            raise ValueError("json would round the number")
        return super()._func_to_string(value)  # type: ignore[misc]  # not in its stubs

    @signature({"types": []})
    def _func_to_number(self, value: Any) -> Any:
        if isinstance(value, str) and _DECIMAL.fullmatch(value):
            return read_decimal(value)
        return super()._func_to_number(value)  # type: ignore[misc]


_EXACT: Final = jmespath.Options(custom_functions=ExactFunctions())
_DECIMAL: Final = re.compile(r"-?[0-9]+(?=[.eE])(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


def _compile_plain(choices: Sequence[re.Match[str]]) -> Callable[[Event], Any]:
    """Compile an expression of names and dots without JMESPath, which is much slower."""
    heads = [_names(choice["head"]) for choice in choices]
    tails = [
        _walker(_names(choice["tail"] or "")) if choice["each"] else None for choice in choices
    ]

    is_inner = all(head[0] == "detail" for head in heads)
    walkers = [_walker(head[1:] if is_inner else head) for head in heads]
    find = _first([_collector(w, t) if t else w for w, t in zip(walkers, tails, strict=True)])
    if is_inner:  # building the envelope costs time
        return lambda event: find(event.detail)
    return lambda event: find(event.envelope)


def _first(finders: Sequence[_Find]) -> _Find:
    """Return what ``a || b`` does: the first result that is not empty, or else the last one."""
    *others, last = finders
    if not others:
        return last

    def choose(value: Any) -> Any:
        for find in others:
            found = find(value)
            if found or type(found) is int or type(found) is float:  # 0 is a result
                return found
        return last(value)

    return choose


def _collector(head: _Find, tail: _Find) -> _Find:
    """Evaluate `head[].tail` as JMESPath does: flatten lists once, and leave out null."""

    def collect(envelope: Any) -> Any:
        found = head(envelope)
        if not isinstance(found, list):
            return None
        items = (item for one in found for item in (one if isinstance(one, list) else (one,)))
        return [value for value in map(tail, items) if value is not None]

    return collect


def _walker(names: Sequence[str]) -> _Find:
    def walk(envelope: Any) -> Any:
        value = envelope
        for name in names:
            if not isinstance(value, dict):
                return None
            value = value.get(name)
        return value

    return walk


def _names(path: str) -> list[str]:
    return [*map(_unquote, re.findall(_NAME, path))]


def _unquote(name: str) -> str:
    return str(json.loads(name)) if name.startswith('"') else name


def _first_line(error: JMESPathError) -> str:
    first = str(error).splitlines()[0].rstrip(": ")
    return f"{first} (quote a name with special characters)" if "-" in first else first


def _check_functions(node: Any, expression: str, where: str) -> None:
    """Raise `ConfigError` for an unknown function; JMESPath would notice only when it is called."""
    if not isinstance(node, dict):
        return
    if node["type"] == "function_expression" and node["value"] not in Functions.FUNCTION_TABLE:
        known = ", ".join(sorted(Functions.FUNCTION_TABLE))
        raise ConfigError(
            where,
            f"{expression!r} calls the unknown function {node['value']!r}; allowed: {known}",
        )
    for child in node["children"]:
        _check_functions(child, expression, where)
