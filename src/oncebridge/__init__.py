"""
Every EventBridge event, delivered once.

The names below are what people import. Stores, sinks and dead letters are imported by
path (`from oncebridge.stores.sqlite import SQLiteStore`), so that a program loads no driver that it
does not use. For the same reason, each name is imported from its module on first use: the command
line, a store and a Lambda function load only what they need of the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncebridge.dead_letters.api import DeadLetter, DeadLetters
    from oncebridge.engine.batch import Arrival
    from oncebridge.engine.blocking import BlockingGateway
    from oncebridge.engine.counters import Books
    from oncebridge.engine.gateway import Gateway
    from oncebridge.engine.hooks import (
        Decision,
        Decisions,
        Hook,
        RoundTrip,
        Trace,
        Tracer,
        TripHook,
    )
    from oncebridge.engine.once import once
    from oncebridge.engine.settings import Settings
    from oncebridge.engine.verdict import First, Outcome, Verdict
    from oncebridge.errors import (
        ConfigError,
        DeadLetterError,
        EventError,
        HandedBack,
        OncebridgeError,
        SinkError,
        SinkRejected,
        StoreError,
        StoreUnavailable,
    )
    from oncebridge.events.event import Event, Limits, Unreadable, from_object, parse, parse_all
    from oncebridge.events.pattern import Pattern
    from oncebridge.events.rules import Latest, Quiet, Rule, Tier
    from oncebridge.sinks.api import (
        Closed,
        Delivery,
        Never,
        No,
        Sink,
        SinkAnswer,
        Throttled,
        Unknown,
        Unwell,
        Yes,
    )
    from oncebridge.stores.api import Store

__version__ = "0.1.0"

__all__ = [
    "Arrival",
    "BlockingGateway",
    "Books",
    "Closed",
    "ConfigError",
    "DeadLetter",
    "DeadLetterError",
    "DeadLetters",
    "Decision",
    "Decisions",
    "Delivery",
    "Event",
    "EventError",
    "First",
    "Gateway",
    "HandedBack",
    "Hook",
    "Latest",
    "Limits",
    "Never",
    "No",
    "OncebridgeError",
    "Outcome",
    "Pattern",
    "Quiet",
    "RoundTrip",
    "Rule",
    "Settings",
    "Sink",
    "SinkAnswer",
    "SinkError",
    "SinkRejected",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "Throttled",
    "Tier",
    "Trace",
    "Tracer",
    "TripHook",
    "Unknown",
    "Unreadable",
    "Unwell",
    "Verdict",
    "Yes",
    "from_object",
    "once",
    "parse",
    "parse_all",
]

_MODULES = {
    "oncebridge.dead_letters.api": {"DeadLetter", "DeadLetters"},
    "oncebridge.engine.batch": {"Arrival"},
    "oncebridge.engine.blocking": {"BlockingGateway"},
    "oncebridge.engine.counters": {"Books"},
    "oncebridge.engine.gateway": {"Gateway"},
    "oncebridge.engine.hooks": {
        "Decision",
        "Decisions",
        "Hook",
        "RoundTrip",
        "Trace",
        "Tracer",
        "TripHook",
    },
    "oncebridge.engine.once": {"once"},
    "oncebridge.engine.settings": {"Settings"},
    "oncebridge.engine.verdict": {"First", "Outcome", "Verdict"},
    "oncebridge.errors": {
        "ConfigError",
        "DeadLetterError",
        "EventError",
        "HandedBack",
        "OncebridgeError",
        "SinkError",
        "SinkRejected",
        "StoreError",
        "StoreUnavailable",
    },
    "oncebridge.events.event": {
        "Event",
        "Limits",
        "Unreadable",
        "from_object",
        "parse",
        "parse_all",
    },
    "oncebridge.events.pattern": {"Pattern"},
    "oncebridge.events.rules": {"Latest", "Quiet", "Rule", "Tier"},
    "oncebridge.sinks.api": {
        "Closed",
        "Delivery",
        "Never",
        "No",
        "Sink",
        "SinkAnswer",
        "Throttled",
        "Unknown",
        "Unwell",
        "Yes",
    },
    "oncebridge.stores.api": {"Store"},
}
"""Where each name comes from."""


if not TYPE_CHECKING:  # type checkers know the names, and report others

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return globals().setdefault(name, getattr(import_module(module), name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
