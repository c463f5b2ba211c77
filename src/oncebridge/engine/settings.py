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
    """The settings of a gateway. Most installations keep the defaults."""

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
            "Timeout of one send; after it, it is unknown whether the event arrived.",
            example="10s",
        ),
    ] = timedelta(seconds=10)
    commit_budget: Annotated[
        timedelta,
        Doc("How long a commit is tried before the event is acknowledged without it.", "5s"),
    ] = timedelta(seconds=5)
    margin: Annotated[timedelta, Doc("How much longer than a send its claim must last.", "1s")] = (
        timedelta(seconds=1)
    )
    max_hold: Annotated[
        timedelta,
        Doc("How long an event may be held in a worker, including waits.", example="15m"),
    ] = timedelta(minutes=15)
    patience: Annotated[
        timedelta,
        Doc("How long to wait in place for an entity that another worker holds.", example="10s"),
    ] = timedelta(seconds=10)
    max_attempts: Annotated[
        int,
        Doc(
            "Failed attempts, by the event's own fault, after which it goes to the dead "
            "letters: no clear answer, or refused while other events were delivered.",
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
            "Longest pause after a first failure; it doubles each time. The pause is random, from "
            "0 up to this.",
            example="1s",
        ),
    ] = timedelta(seconds=1)
    max_backoff: Annotated[
        timedelta, Doc("Longest pause before a retry, even if a sink asks for a longer one.", "5m")
    ] = timedelta(minutes=5)
    breaker: Annotated[
        int,
        Doc(
            "Failures in a row after which a sink or store counts as down; then nothing is "
            "claimed until a single try succeeds.",
            example="5",
            at_least=1,
        ),
    ] = 5
    rate: Annotated[
        Rate | None,
        Doc(
            "Rate limit of a route's sink, for all workers together: they share it through the "
            "store. Without it, only throttling by the sink limits the rate.",
            example="100/s",
        ),
    ] = None
    order: Annotated[
        Literal["none", "entity"],
        Doc('"entity" delivers the events of one entity (of the rule) one at a time, in order.'),
    ] = "none"
    mode: Annotated[
        Literal["enforce", "shadow"],
        Doc('"shadow" forwards everything and only counts what it would have dropped.'),
    ] = "enforce"
    on_store_outage: Annotated[
        Literal["hold", "deliver"],
        Doc('"deliver" sends events unprotected while the store is down; duplicates are possible.'),
    ] = "hold"
    explain: Annotated[
        bool, Doc("Store the first arrival's id and time with each key, about 60 bytes.")
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
                f"{format_duration(self.lease)} is too short: a send "
                f"({format_duration(self.sink_timeout)}), its commit "
                f"({format_duration(self.commit_budget)}) and a margin "
                f"({format_duration(self.margin)}) must fit in it; set a longer lease, or a shorter "
                "sink_timeout or commit_budget",
            )
        for name in ("max_attempts", "breaker"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
