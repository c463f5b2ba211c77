"""
Every EventBridge event, passed on once.

The names below are what people import. Stores, sinks and dead letters are imported by
path (`from oncebridge.stores.sqlite import SQLiteStore`), so that nobody pays for a driver
they do not use.
"""

from oncebridge.blocking import BlockingGateway
from oncebridge.books import Books
from oncebridge.dead import DeadLetter, DeadLetters
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
from oncebridge.event import Event, Limits, Unreadable, from_object, parse, parse_all
from oncebridge.flight import Arrival
from oncebridge.gateway import Gateway
from oncebridge.hooks import Decision, Hook, RoundTrip, Trace, Tracer, TripHook
from oncebridge.once import once
from oncebridge.pattern import Pattern
from oncebridge.rules import Latest, Quiet, Rule, Tier
from oncebridge.settings import Settings
from oncebridge.sink import (
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
from oncebridge.store import Store
from oncebridge.verdict import First, Outcome, Verdict

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
