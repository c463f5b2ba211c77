"""Sets the outcome of each arrival, once, and reports it to whom it concerns."""

from collections.abc import Iterable, Mapping, Sequence

from oncebridge.engine.batch import Batch
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import Decisions, Hook, call_hooks, guarded
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
        rows = [row for row in rows if outcomes[row] is None]
        for row in rows:
            is_forwarded = row in forwarded
            its = terms[row]
            if its is not None and row not in entries:
                rule, key, is_unprotected = its.rule, keys[row], False
                duplicate_of = firsts.get(row) if firsts else None
                sent_as = batch.sent_as(row) if hashes[row] and row in batch.sent else b""
            else:
                entry = entries[row]
                rule, key, is_unprotected = entry.plan.rule, entry.key, entry.unprotected
                duplicate_of, sent_as = entry.duplicate_of, entry.sent_as
            outcomes[row] = Outcome(
                verdict,
                is_final or is_forwarded,
                rule.name,
                key,
                retry_after_ms,
                reason,
                is_forwarded,
                is_unprotected,
                duplicate_of,
                blamed,
                sent_as,
            )
        if rows:
            self._end_leases(batch, rows)
            self._books.settle(verdict, len(rows))
            if batch.turns or batch.settled is not None or batch.traces or self._hooks:
                self._report(batch, rows, [*filter(None, map(outcomes.__getitem__, rows))])

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

    def _report(self, batch: Batch, rows: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Report outcomes to the entity queues, the caller, the tracer and the hooks."""
        entries, traces = batch.entries, batch.traces
        for row, outcome in zip(rows, outcomes, strict=True):
            if batch.turns and row in entries and entries[row].entity:
                batch.turns[entries[row].entity].settled(acknowledged=outcome.acknowledge)
            batch.report(row, outcome)
            if traces and (trace := traces[row]) is not None:
                guarded(None, trace.ended, outcome)
        if self._hooks:
            events = [*map(batch.events.__getitem__, rows)]
            attempts = [entries[row].attempt if row in entries else 1 for row in rows]
            took_s = batch.now() - batch.began
            decided = Decisions(self._route, events, outcomes, batch.arrived_ms, took_s, attempts)
            call_hooks(self._hooks, decided)
