"""How a gateway behaves: one frozen record, each setting with its default and its reason."""

from datetime import timedelta
from typing import Literal

from msgspec import Struct

from oncebridge.duration import format_duration
from oncebridge.errors import ConfigError
from oncebridge.event import Limits


class Settings(Struct, frozen=True, kw_only=True):
    """The defaults are meant to be kept."""

    lease: timedelta = timedelta(seconds=30)
    """How long a claim lasts without a heartbeat."""
    sink_timeout: timedelta = timedelta(seconds=10)
    """How long one send may take; after that nobody knows whether it arrived."""
    commit_budget: timedelta = timedelta(seconds=5)
    """How long a commit is tried before the event is acknowledged without it."""
    margin: timedelta = timedelta(seconds=1)
    """What a claim must outlast a send by."""
    max_hold: timedelta = timedelta(minutes=15)
    """How long an event may wait here for its turn, heartbeat or not."""
    patience: timedelta = timedelta(seconds=10)
    """How long to wait in place for an entity that another worker holds."""
    max_attempts: int = 8
    """Sends without a clear answer before an event goes to the dead letters."""
    backoff: timedelta = timedelta(seconds=1)
    """The pause after a first failure is drawn from none to this; it doubles each time."""
    max_backoff: timedelta = timedelta(minutes=5)
    """The longest pause, also where a sink asks for a longer one."""
    mode: Literal["enforce", "shadow"] = "enforce"
    """`shadow` forwards everything and only counts what it would have dropped."""
    on_store_outage: Literal["hold", "deliver"] = "hold"
    """`deliver` sends unprotected while the store is down; duplicates may pass."""
    explain: bool = True
    """Remember the first arrival's id and time with each key, about 60 bytes."""
    limits: Limits = Limits()
    """How large and how deep an event may be."""
    bare: bool = False
    """Accept events without an envelope (a rule target with `InputPath: $.detail`)."""

    def check(self) -> None:
        """Refuse settings that cannot keep the promise."""
        needed = self.sink_timeout + self.commit_budget + self.margin
        if self.lease < needed:
            raise ConfigError(
                "lease",
                f"{format_duration(self.lease)} is too short: a send "
                f"({format_duration(self.sink_timeout)}), its commit "
                f"({format_duration(self.commit_budget)}) and a margin "
                f"({format_duration(self.margin)}) have to fit in it",
            )
        if self.max_attempts < 1:
            raise ConfigError("max_attempts", f"must be at least 1, not {self.max_attempts}")
