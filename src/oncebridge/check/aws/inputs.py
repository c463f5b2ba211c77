"""
Check what a target sends for an event: all of it, a part, or something else.

A sample event is transformed as the target would do it, and the result is read as oncebridge would
read it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from oncebridge.events.event import Unreadable, read

_SAMPLE: Final[dict[str, Any]] = {
    "version": "0",
    "id": "0f1e2d3c-0000-4000-8000-00000000abcd",
    "detail-type": "v2.users.{id}.presence",
    "source": "aws.partner/genesys.com/cloud/organisation/suffix",
    "account": "111122223333",
    "time": "2026-03-01T06:00:00Z",
    "region": "eu-west-1",
    "resources": [],
    "detail": {
        "topicName": "v2.users.sample.presence",
        "version": "2",
        "eventBody": {"source": "PURECLOUD", "presenceDefinition": {"id": "sample"}},
        "metadata": {"CorrelationId": "sample"},
        "timestamp": "2026-03-01T06:00:00.123Z",
    },
}
_PLACE: Final = re.compile(r"<([^<>]+)>")
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\['([^']+)'\]|\[(\d+)\]")
_PREDEFINED: Final = {
    "aws.events.event": {name: value for name, value in _SAMPLE.items() if name != "detail"},
    "aws.events.event.json": _SAMPLE,
}


class SentInput(Struct, frozen=True):
    """What a target sends, and how oncebridge reads it."""

    says: str
    """The setting of the target; empty if the event is sent unchanged."""
    is_event: bool = True
    """Whether oncebridge can read it as an event, with its present settings."""
    is_bare: bool = False
    """Whether it is the detail alone."""
    is_constant: bool = False
    lost: tuple[str, ...] = ()
    """Fields of the event that are missing or changed."""


def sent_input(target: Mapping[str, Any], *, bare: bool) -> SentInput:
    """Return what a *target* sends, and how it is read; *bare* is the setting of that name."""
    if target.get("Input"):
        return SentInput("Input", is_event=False, is_constant=True)
    path = target.get("InputPath")
    if path and path != "$":
        says = f"InputPath {path}"
        sent = json.dumps(_at(path))
    elif target.get("InputTransformer"):
        says = "InputTransformer"
        sent = _written(target["InputTransformer"])
    else:
        return SentInput("")
    is_bare = path == "$.detail"
    event = read(sent.encode(), bare=bare)
    if isinstance(event, Unreadable):
        return SentInput(says, is_event=False, is_bare=is_bare)
    whole = read(json.dumps(_SAMPLE).encode())
    assert not isinstance(whole, Unreadable)  # noqa: S101 - it is above
    members = ("id", "source", "detail_type", "time")
    lost = [name for name in members if getattr(event, name) != getattr(whole, name)]
    if event.canonical != whole.canonical:
        lost.append("detail")
    return SentInput(says, is_bare=is_bare, lost=tuple(lost))


def _at(path: str) -> Any:
    """Return the value at a path of the sample; `sample` if it has none."""
    value: Any = _SAMPLE
    for found in _STEP.finditer(path.removeprefix("$")):
        name = found[1] or found[2]
        if name is not None and isinstance(value, dict):
            value = value.get(name, "sample")
        elif found[3] and isinstance(value, list) and int(found[3]) < len(value):
            value = value[int(found[3])]
        else:
            return "sample"
    return value


def _written(transformer: Mapping[str, Any]) -> str:
    """Return a template, filled in as EventBridge does."""
    paths = transformer.get("InputPathsMap") or {}
    template = str(transformer.get("InputTemplate", ""))
    parts: list[str] = []
    end, is_quoted = 0, False
    for found in _PLACE.finditer(template):
        before = template[end : found.start()]
        parts.append(before)
        is_quoted ^= before.replace('\\"', "").count('"') % 2 == 1
        end = found.end()
        name = found[1].strip()
        value = _at(str(paths[name])) if name in paths else _PREDEFINED.get(name, "sample")
        text = json.dumps(value)
        if is_quoted:  # a text goes in as it is, all else as it is written
            text = text[1:-1] if isinstance(value, str) else json.dumps(text)[1:-1]
        parts.append(text)
    return "".join(parts) + template[end:]
