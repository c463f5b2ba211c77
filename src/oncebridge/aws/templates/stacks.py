"""The path of an event as a stack: rule, queue, function or worker, table, alarms."""

import re
from typing import Final, Literal

from oncebridge.aws.templates.access import ACTIONS
from oncebridge.aws.templates.rendering import Format, render
from oncebridge.engine.settings import Settings
from oncebridge.errors import ConfigError

Kind = Literal["lambda", "worker"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{2,47}")
_SPARE: Final = 5
"""Receives that are not a failed attempt: a message that was busy, a worker that stopped."""


def stack(kind: Kind, name: str = "oncebridge", *, format: Format = "cloudformation") -> str:  # noqa: A002
    """Return the stack of a *kind*; its parameter for names is *name* by default."""
    if not _NAME.fullmatch(name):
        raise ConfigError("", f"{name!r}: a name is 3 to 48 letters, digits, _ and -")
    return render(
        "stack",
        format,
        kind=kind,
        name=name,
        actions=ACTIONS,
        # oncebridge has to give up before the queue does.
        receives=Settings().max_attempts + _SPARE,
    )
