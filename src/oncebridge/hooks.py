"""
What happened, told to whoever wants to know.

A hook is a function that takes one frozen record per arrival. It runs on the gateway's
loop, so it should be quick; if it raises, that is logged and the event goes its way.
"""

import logging
from collections.abc import Callable, Sequence

from msgspec import Struct

from oncebridge.event import Event, Unreadable
from oncebridge.verdict import Outcome

_log = logging.getLogger("oncebridge")


class Decision(Struct, frozen=True, gc=False):
    """One arrival and what became of it."""

    route: str
    event: Event | Unreadable
    outcome: Outcome


Hook = Callable[[Decision], None]


def tell(hooks: Sequence[Hook], decision: Decision) -> None:
    """Call every hook."""
    for hook in hooks:
        try:
            hook(decision)
        except Exception:  # noqa: BLE001 - a hook must never cost an event
            _log.exception("oncebridge.hook_failed")
