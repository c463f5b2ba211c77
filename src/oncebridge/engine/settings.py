"""The settings of a gateway: one frozen record, with the default of each."""

from datetime import timedelta
from typing import Annotated, Literal

from msgspec import Struct

from oncebridge.base.durations import format_duration
from oncebridge.base.options import Doc, Rate
from oncebridge.errors import ConfigError
from oncebridge.events.event import Limits
from oncebridge.events.rules import DEFAULT_WINDOW

DEFAULT_ROUTE = "default"
"""The name of a route without one. It is not taken from the sink's address, which may be secret and
may change: the name is part of every key."""


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of a gateway; the defaults fit most uses."""

    window: Annotated[
        timedelta,
        Doc(
            "How long an event is remembered, unless its rule says otherwise. The default covers "
            "four days of Genesys re-sends, one day of EventBridge retries, and a margin.",
            example="6d",
        ),
    ] = DEFAULT_WINDOW
    lease: Annotated[
        timedelta, Doc("How long a claim lasts without a heartbeat.", example="30s")
    ] = timedelta(seconds=30)
    sink_timeout: Annotated[
        timedelta,
        Doc(
            "How long one delivery may take; after that its result counts as unknown.",
            example="10s",
        ),
    ] = timedelta(seconds=10)
    commit_budget: Annotated[
        timedelta,
        Doc("How long a commit is retried before the event is acknowledged without it.", "5s"),
    ] = timedelta(seconds=5)
    margin: Annotated[
        timedelta, Doc("How much longer than a delivery a claim must last.", "1s")
    ] = timedelta(seconds=1)
    max_hold: Annotated[
        timedelta,
        Doc("How long an event may wait for its turn in this worker.", example="15m"),
    ] = timedelta(minutes=15)
    patience: Annotated[
        timedelta,
        Doc("How long to wait for an entity that another worker holds.", example="10s"),
    ] = timedelta(seconds=10)
    max_attempts: Annotated[
        int,
        Doc(
            "Failed attempts that are due to the event before it goes to the dead letters: its result "
            "is unknown, or it is refused while other events are delivered.",
            example="8",
            at_least=1,
        ),
    ] = 8
    give_up_after: Annotated[
        timedelta | None,
        Doc(
            "The age, counted from the first attempt, at which an event that fails goes to the "
            "dead letters. Default: its window, or 12h where the source retries in place "
            "(Kinesis, FIFO queues, files, a spool).",
            example="1d",
        ),
    ] = None
    backoff: Annotated[
        timedelta,
        Doc(
            "The pause after the first failure is random, up to this; it doubles each time.",
            example="1s",
        ),
    ] = timedelta(seconds=1)
    max_backoff: Annotated[
        timedelta, Doc("The longest pause, even if a sink asks for a longer one.", "5m")
    ] = timedelta(minutes=5)
    breaker: Annotated[
        int,
        Doc(
            "Failures in a row after which a sink or store counts as down; nothing is claimed until a "
            "single attempt succeeds.",
            example="5",
            at_least=1,
        ),
    ] = 5
    rate: Annotated[
        Rate | None,
        Doc(
            "The most events that the sink of a route is sent, by all workers together: they share "
            "the rate through the store. By default, a sink that throttles sets the rate.",
            example="100/s",
        ),
    ] = None
    order: Annotated[
        Literal["none", "entity"],
        Doc('"entity" delivers the events of one entity (of the rule) one at a time, in order.'),
    ] = "none"
    mode: Annotated[
        Literal["enforce", "shadow"],
        Doc('"shadow" forwards everything and only counts the events it would have dropped.'),
    ] = "enforce"
    on_store_outage: Annotated[
        Literal["hold", "deliver"],
        Doc(
            '"deliver" sends without a claim while the store is down, so duplicates may be delivered.'
        ),
    ] = "hold"
    explain: Annotated[
        bool, Doc("Keep the id and the time of the first arrival with each key, about 60 bytes.")
    ] = True
    limits: Annotated[Limits, Doc("Limits of the size and depth of an event.")] = Limits()
    bare: Annotated[
        bool, Doc("Accept events without an envelope (a target with `InputPath: $.detail`).")
    ] = False

    def check(self) -> None:
        """Raise `ConfigError` if the settings contradict each other."""
        needed = self.sink_timeout + self.commit_budget + self.margin
        if self.lease < needed:
            raise ConfigError(
                "lease",
                f"{format_duration(self.lease)} is too short: a delivery "
                f"({format_duration(self.sink_timeout)}), its commit "
                f"({format_duration(self.commit_budget)}) and a margin "
                f"({format_duration(self.margin)}) must fit in it; set a longer lease, or a shorter "
                "sink_timeout or commit_budget",
            )
        for name in ("max_attempts", "breaker"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
