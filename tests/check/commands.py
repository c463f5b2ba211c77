"""Whether a command of the AWS CLI is one: its service, its operation, and what it is given."""

import json
import re
import shlex
from functools import cache
from typing import Any

import botocore.session
from botocore import xform_name
from botocore.validate import validate_parameters

_GLOBAL = {"--query", "--output", "--region", "--profile", "--endpoint-url"}
_SERVICES = {"s3api": "s3"}
_session = botocore.session.Session()


@cache
def _model(service: str) -> Any:
    return _session.get_service_model(_SERVICES.get(service, service))


def check_command(line: str) -> tuple[str, str, dict[str, Any]] | None:
    """
    Refuse what the CLI would refuse.

    Give what would be called: the service, the method and its arguments; nothing for what waits.
    """
    aws, service, operation, *given = shlex.split(line.partition(" > ")[0])
    assert aws == "aws", line
    if operation == "wait":
        waiters = _session.get_waiter_model(service).waiter_names
        assert xform_name(given[0], "-") in {xform_name(name, "-") for name in waiters}, line
        return None
    model = _model(service)
    named = {xform_name(name, "-"): name for name in model.operation_names}
    assert operation in named, line
    shape = model.operation_model(named[operation]).input_shape
    members = {xform_name(name, "-"): name for name in shape.members}
    arguments = {}
    for flag, value in _pairs(given):
        if flag in _GLOBAL:
            continue
        if value and value[0].startswith("file://"):
            return None  # what is in there is somebody's own
        plain = flag.removeprefix("--")
        name = members.get(plain) or members.get(plain.removeprefix("no-"))
        assert name is not None, f"{flag} in {line}"
        arguments[name] = _value(value, shape.members[name], flag)
    validate_parameters(arguments, shape)
    return _SERVICES.get(service, service), xform_name(named[operation]), arguments


def _pairs(given: list[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for word in given:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def _value(words: list[str], shape: Any, flag: str) -> Any:
    match shape.type_name:
        case "boolean":
            assert not words, flag
            return not flag.startswith("--no-")
        case "integer" | "long":
            return int(words[0])
        case "list":
            return json.loads(words[0]) if words[0].startswith("[") else words
        case "map" | "structure":
            if words[0].startswith("{"):
                return json.loads(words[0])
            pairs = [pair.split("=", 1) for pair in re.split(r",(?=\w+=)", words[0])]
            return {
                name: value == "true"
                if value in ("true", "false") and _is_flag(shape, name)
                else value
                for name, value in pairs
            }
    assert len(words) == 1, flag
    return words[0]


def _is_flag(shape: Any, name: str) -> bool:
    return shape.type_name == "structure" and shape.members[name].type_name == "boolean"
