"""The payload of a call as JSON: data classes, models, and Powertools' JMESPath functions."""

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Final

import jmespath
import msgspec
from jmespath.exceptions import JMESPathError
from jmespath.functions import signature

from oncebridge.errors import ConfigError, EventError
from oncebridge.events.canonical import canonical
from oncebridge.events.exact_float import read_decimal
from oncebridge.events.framing import gunzip
from oncebridge.events.key import ExactFunctions

_UNPACKED: Final = 16 << 20
"""Largest decompressed payload: it may come from an untrusted sender."""


class _PowertoolsFunctions(ExactFunctions):
    """The functions that Powertools adds to JMESPath."""

    @signature({"types": ["string"]})
    def _func_powertools_json(self, value: str) -> Any:
        return json.loads(value, parse_float=read_decimal)

    @signature({"types": ["string"]})
    def _func_powertools_base64(self, value: str) -> str:
        return base64.b64decode(value).decode()

    @signature({"types": ["string"]})
    def _func_powertools_base64_gzip(self, value: str) -> str:
        return gunzip(base64.b64decode(value), _UNPACKED).decode()


def finder(
    where: str, expression: str, options: Mapping[str, Any] | None
) -> Callable[[Any], Any] | None:
    """Return a function that evaluates *expression*; None if it is empty."""
    if not expression:
        return None
    chosen = jmespath.Options(**(options or {"custom_functions": _PowertoolsFunctions()}))
    try:
        compiled = jmespath.compile(expression)
    except JMESPathError as error:
        raise ConfigError(where, f"{expression!r} is not JMESPath: {error}") from None
    return lambda data: compiled.search(data, options=chosen)


def plain(data: Any) -> Any:
    """Return the dict of a data class, a model or a data class of Powertools."""
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return dataclasses.asdict(data)
    if hasattr(data, "model_dump"):
        return data.model_dump(mode="json")
    return getattr(data, "raw_event", data)


def is_missing(key: Any) -> bool:
    """Return True if Powertools would find no key in *key*."""
    if isinstance(key, dict):
        return all(item is None for item in key.values())
    if isinstance(key, list | tuple):
        return all(item is None for item in key)
    return not key and not isinstance(key, int | float)


def digest(value: Any) -> str:
    """Return a hash of *value* as canonical JSON; raise if it is not JSON."""
    try:
        text = canonical(value)
    except EventError:  # it has values that are not JSON
        text = canonical(json.loads(json.dumps(value, default=_instead)))
    return sha256(text).hexdigest()


def encoded(value: Any) -> bytes:
    """Return *value* as JSON; raise if it is not JSON."""
    text = json.dumps(value, default=_instead, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def _instead(value: Any) -> Any:
    simple = plain(value)
    if simple is not value:
        return simple
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset):
        raise EventError("not-json", f"a {type(value).__name__} has no form in JSON")
    return msgspec.to_builtins(value)  # times, decimals, UUIDs, enums
