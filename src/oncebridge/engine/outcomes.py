"""Sets the outcome of each arrival, once, and reports it to whom it concerns."""

from collections.abc import Iterable, Mapping, Sequence

from oncebridge.engine.batch import Batch
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import Decision, Hook, call_hooks, ended
from oncebridge.engine.leases import Leases
from oncebridge.engine.verdict import HANDED_BACK, First, Outcome, Verdict


class Outcomes:
    """Settles events: outcome, leases, counters, the caller's callback, tracer and hooks."""

    def __init__(self, route: str, books: Books, leases: Leases, hooks: Sequence[Hook]) -> None:
        self._route = route
        self._books = books
        self._leases = leases
        self._hooks = tuple(hooks)

    def settle(
        self,
        batch: Batch,
        rows: Iterable[int],
        verdict: Verdict,
        *,
        reason: str = "",
        retry_after_ms: int = 0,
        blamed: bool = False,
        firsts: Mapping[int, First | None] = {},
    ) -> None:
        """
        Set the verdict of *rows*; each arrival gets exactly one.

        *firsts* has the arrivals of which events without an entry are duplicates.
        """
        outcomes, entries, forwarded = batch.outcomes, batch.entries, batch.forwarded
        terms, keys, hashes = batch.terms, batch.keys, batch.hashes
        is_final = verdict not in HANDED_BACK
        settled: list[int] = []
        for row in rows:
            if outcomes[row] is not None:
                continue
            settled.append(row)
            is_forwarded = row in forwarded
            its = terms[row]
            if row in entries or its is None:
                entry = entries[row]
                outcomes[row] = Outcome(
                    verdict,
                    is_final or is_forwarded,
                    entry.plan.rule.name,
                    entry.key,
                    retry_after_ms,
                    reason,
                    is_forwarded,
                    entry.unprotected,
                    entry.duplicate_of,
                    blamed,
                    entry.sent_as,
                )
            else:
                outcomes[row] = Outcome(
                    verdict,
                    is_final or is_forwarded,
                    its.rule.name,
                    keys[row],
                    retry_after_ms,
                    reason,
                    is_forwarded,
                    False,
                    firsts.get(row) if firsts else None,
                    blamed,
                    batch.sent_as(row) if hashes[row] and row in batch.sent else b"",
                )
        if settled:
            self._end_leases(batch, settled)
            self._books.settle(verdict, len(settled))
            self._report(batch, settled)

    def _end_leases(self, batch: Batch, rows: Sequence[int]) -> None:
        leases, entries = batch.leases, batch.entries
        first = leases[rows[0]]
        if not entries and first is not None and len(first.keys) == len(rows):
            self._leases.discard((first,))
            return
        for row in rows:
            lease = leases[row]
            if row in entries:
                self._leases.discard((lease, entries[row].entity_lease))
            elif lease is not None:
                self._leases.discard_keys(lease, (batch.keys[row],))

    def _report(self, batch: Batch, rows: Sequence[int]) -> None:
        """Report outcomes to the entity queues, the caller, the tracer and the hooks."""
        outcomes = [outcome for row in rows if (outcome := batch.outcomes[row]) is not None]
        if batch.turns:
            for row, outcome in zip(rows, outcomes, strict=True):
                entry = batch.entries.get(row)
                if entry is not None and entry.entity:
                    batch.turns[entry.entity].settled(acknowledged=outcome.acknowledge)
        if batch.settled is not None:
            for row, outcome in zip(rows, outcomes, strict=True):
                batch.report(row, outcome)
        if batch.traces:
            for row, outcome in zip(rows, outcomes, strict=True):
                if (trace := batch.traces[row]) is not None:
                    ended(trace, outcome)
        if self._hooks:
            took_s, entries = batch.now() - batch.began, batch.entries
            decisions = [
                Decision(
                    self._route,
                    batch.events[row],
                    outcome,
                    batch.arrived_ms,
                    took_s,
                    entries[row].attempt if row in entries else 1,
                )
                for row, outcome in zip(rows, outcomes, strict=True)
            ]
            call_hooks(self._hooks, *decisions)
