"""
Every EventBridge event, delivered once.

The names below are what people import. Stores, sinks and dead letters are imported by
path (`from oncebridge.stores.sqlite import SQLiteStore`), so that a program loads no driver that it
does not use.
"""

from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.engine.batch import Arrival
from oncebridge.engine.blocking import BlockingGateway
from oncebridge.engine.counters import Books
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.hooks import Decision, Decisions, Hook, RoundTrip, Trace, Tracer, TripHook
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
