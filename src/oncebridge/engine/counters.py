"""
Counters: every arrival ends in exactly one verdict.

At any moment `arrived == sum(verdicts) + in_flight`. The other counters are about what happened
in between.
"""

from oncebridge.engine.verdict import Verdict


class Books:
    """The counters of one gateway since it was created."""

    def __init__(self) -> None:
        self.arrived = 0
        """All arrivals."""
        self.in_flight = 0
        """Arrivals without a verdict yet."""
        self.verdicts: dict[Verdict, int] = dict.fromkeys(Verdict, 0)
        """Arrivals by their verdict."""
        self.forwarded = 0
        """Events the sink said yes to."""
        self.retried = 0
        """Claims of events that were tried before."""
        self.ambiguous = 0
        """Sends that ended without a clear answer."""
        self.unwell = 0
        """Sends that failed because of a problem of the sink (HTTP 502, 503, 504)."""
        self.throttled = 0
        """Sends that the sink throttled."""
        self.late_commits = 0
        """Commits recorded after their lease had ended."""
        self.acked_uncommitted = 0
        """Acknowledged after the sink's yes while the commit was still to be recorded."""
        self.fenced_commits = 0
        """Commits refused because the key had been claimed anew, in a later generation."""
        self.registers_behind = 0
        """Newest states that could not be recorded: an older one may be delivered later."""
        self.stale_runs = 0
        """Entities with many stale events in a row: their newest version may be wrong."""
        self.lease_lost = 0
        """Claims that another worker took over: both may have delivered the event."""
        self.unprotected = 0
        """Sent while the store was down, or after it had lost its records."""
        self.store_errors = 0
        """Calls that the store did not answer."""
        self.forgotten = 0
        """Commits given up because too many were waiting for the store."""

    def arrive(self, count: int) -> None:
        """Count new arrivals."""
        self.arrived += count
        self.in_flight += count

    def settle(self, verdict: Verdict, count: int = 1) -> None:
        """Count arrivals that got their verdict."""
        self.verdicts[verdict] += count
        self.in_flight -= count

    @property
    def balance(self) -> bool:
        """True if every arrival is accounted for."""
        return self.arrived == sum(self.verdicts.values()) + self.in_flight

    def counts(self) -> dict[str, int]:
        """Return all counters by name."""
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return counts | {verdict.value: count for verdict, count in self.verdicts.items()}
