"""
The whole way of an event as a stack: rule, queue, function or worker, table, alarms.

The texts are `stack.yaml` and `stack.tf` beside this module. Lines after `#: lambda` or
`#: worker` are for that one alone, until `#: both`; a line with `@BACKEND@` stands for one line
for each thing that the backend does.
"""

import re
from importlib.resources import files
from typing import Final, Literal

from oncebridge.aws.templates.access import ACTIONS
from oncebridge.engine.settings import Settings
from oncebridge.errors import ConfigError

Kind = Literal["lambda", "worker"]
Format = Literal["cloudformation", "terraform"]

_FILES: Final = {"cloudformation": "stack.yaml", "terraform": "stack.tf"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{2,47}")
_MARK = "#: "
_PLACE = re.compile(r"@([a-z.]+)@")
_SPARE: Final = 5
"""Receives that are nobody's fault: a message that was busy, a worker that was stopped."""


def stack(kind: Kind, name: str = "oncebridge", *, format: Format = "cloudformation") -> str:  # noqa: A002
    """Write the stack of a *kind*, in which all is called *name* unless its parameter differs."""
    if not _NAME.fullmatch(name):
        raise ConfigError("", f"{name!r}: a name is 3 to 48 letters, digits, _ and -")
    values = {
        **ACTIONS,
        "name": (name,),
        # oncebridge has to have given up before the queue does.
        "receives": (str(Settings().max_attempts + _SPARE),),
    }
    text = (files(__package__) / _FILES[format]).read_text("utf-8")
    lines: list[str] = []
    is_meant = True
    for line in text.splitlines():
        if line.startswith(_MARK):
            is_meant = line.removeprefix(_MARK) in (kind, "both")
        elif is_meant:
            lines += _filled(line, values)
    return "\n".join(lines) + "\n"


def _filled(line: str, values: dict[str, tuple[str, ...]]) -> list[str]:
    found = _PLACE.search(line)
    if found is None:
        return [line]
    return [line.replace(found[0], value) for value in values[found[1]]]
