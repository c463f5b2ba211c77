"""
The books: every arrival ends in exactly one verdict.

At any moment `arrived == sum(verdicts) + in_flight`. The other counts say what happened
on the way.
"""

from collections import Counter

from oncebridge.engine.verdict import Verdict


class Books:
    """Counts of one gateway since it was made."""

    def __init__(self) -> None:
        self.arrived = 0
        """All that came."""
        self.in_flight = 0
        """What has no verdict yet."""
        self.verdicts: dict[Verdict, int] = dict.fromkeys(Verdict, 0)
        """How many ended in each."""
        self.forwarded = 0
        """Events the sink said yes to."""
        self.retried = 0
        """Claims of an event that was tried before."""
        self.ambiguous = 0
        """Sends that ended without a clear answer."""
        self.unwell = 0
        """Sends that the sink answered with its own trouble (HTTP 502, 503, 504)."""
        self.throttled = 0
        """Sends that the sink refused because there were too many."""
        self.late_commits = 0
        """Commits recorded after their lease had ended."""
        self.acked_uncommitted = 0
        """Acknowledged after the sink's yes while the commit was still to be recorded."""
        self.fenced_commits = 0
        """Commits refused because the key had started anew."""
        self.registers_behind = 0
        """Newest states that could not be written down: an older one may pass later."""
        self.stale_runs = 0
        """Entities of which many events in a row were stale: their newest version may be wrong."""
        self.lease_lost = 0
        """Holds that another worker took over: both may have delivered the event."""
        self.unprotected = 0
        """Sent while the store was down, or after it had lost its records."""
        self.store_errors = 0
        """Calls that the store did not answer."""
        self.forgotten = 0
        """Commits given up because too many were waiting for the store."""

    def arrive(self, count: int) -> None:
        """Count arrivals in."""
        self.arrived += count
        self.in_flight += count

    def settle(self, verdict: Verdict, count: int = 1) -> None:
        """Count arrivals out."""
        self.verdicts[verdict] += count
        self.in_flight -= count

    @property
    def balance(self) -> bool:
        """Return whether every arrival is accounted for."""
        return self.arrived == sum(self.verdicts.values()) + self.in_flight

    def counts(self) -> dict[str, int]:
        """List all counts by name."""
        counts = Counter({verdict.value: count for verdict, count in self.verdicts.items()})
        return {
            **{name: value for name, value in vars(self).items() if isinstance(value, int)},
            **counts,
        }
