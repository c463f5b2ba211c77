"""Finds the causes of duplicates when they are decided."""

from collections.abc import Mapping, Sequence
from typing import Final

from oncebridge.engine.causes import Cause, Sighting, duplicate_cause, likely_cause, remembered
from oncebridge.engine.hooks import Decisions
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.key import IdKey
from oncebridge.events.rules import Rule

MOST_FIRSTS: Final = 20_000
"""About 6 MB."""
_MOST_ORIGINS: Final = 1000
_LONGEST: Final = 512
"""Longer values are not remembered, as they would be kept for ten thousand events."""

_HALF: Final = MOST_FIRSTS // 2
_NO_RULES: Final[Mapping[str, Sequence[Rule]]] = {}
# Looking up enum members is slow, and this runs for every batch.
_DELIVERED: Final = Verdict.DELIVERED
_DUPLICATE: Final = Verdict.DUPLICATE
_CONFLICT: Final = Verdict.CONFLICT
_CAUSES: Final = {
    Verdict.STALE: Cause.OUT_OF_ORDER,
    Verdict.UNCHANGED: Cause.DOUBLE_EMISSION,
}

_Origin = tuple[str, str | None, str | None]
"""Source, account and Region of an event."""
_Came = tuple[str | None, _Origin, str | None]
"""Id, origin, and replay name of an event."""


class DuplicateCauses:
    """
    Find causes; remembers the origin of the latest first arrivals.

    *rules* by route: a conflict under a rule that deduplicates by id is a reused id.
    """

    def __init__(self, rules: Mapping[str, Sequence[Rule]] = _NO_RULES) -> None:
        self._by_id = {
            (route, rule.name) for route, its in rules.items() for rule in its if _goes_by_id(rule)
        }
        # Two halves, of which the older one is dropped at once: cheaper than one at a time.
        self._firsts: dict[bytes, _Came] = {}
        self._older: dict[bytes, _Came] = {}
        # Few senders send many events: their origin is kept once, by source.
        self._origins: dict[str, _Origin] = {}

    def causes_of(self, decisions: Decisions) -> Sequence[Cause | None]:
        """Return a cause for each; None for first arrivals, and for causes that are not known."""
        events, outcomes, verdict = decisions.events, decisions.outcomes, decisions.verdict
        if verdict is _DELIVERED or verdict is _CONFLICT:
            # A conflict is the first arrival of another event, and may be redelivered as such.
            self._remember(events, outcomes)
        if verdict is _DUPLICATE:
            return [
                self._duplicate_cause(outcomes[at], event) if type(event) is Event else None
                for at, event in enumerate(events)
            ]
        if verdict is _CONFLICT:
            route, by_id = decisions.route, self._by_id
            is_by_id = [(route, outcome.rule) in by_id for outcome in outcomes]
            return [Cause.ID_REUSED if each else None for each in is_by_id]
        return [_CAUSES.get(verdict)] * len(outcomes)

    def _remember(self, events: Sequence[Event | Unreadable], outcomes: Sequence[Outcome]) -> None:
        origins, firsts = self._origins, self._firsts
        for at, event in enumerate(events):
            if type(event) is not Event:
                continue
            origin, id_, replay = origins.get(event.source), event.id, event.replay_name
            if origin is None or origin[1] != event.account or origin[2] != event.region:
                origin = self._add_origin(event.source, event.account, event.region)
                if origin is None:
                    continue
            if (id_ and len(id_) > _LONGEST) or (replay and len(replay) > _LONGEST):
                continue
            if len(firsts) >= _HALF:
                self._older, self._firsts = firsts, {}
                firsts = self._firsts
            firsts[outcomes[at].key] = id_, origin, replay

    def _add_origin(self, source: str, account: str | None, region: str | None) -> _Origin | None:
        if len(source) + len(account or "") + len(region or "") > _LONGEST:
            return None
        if len(self._origins) >= _MOST_ORIGINS:
            self._origins.clear()
        origin = self._origins[source] = source, account, region
        return origin

    def _duplicate_cause(self, outcome: Outcome, event: Event) -> Cause:
        key, first, later = outcome.key, outcome.first, Sighting.of(event)
        came = self._firsts.get(key) or self._older.get(key)
        if came is None or (first is not None and first.id != remembered(came[0])):
            # Another worker had the first arrival, or it was long ago.
            return likely_cause(first.id if first else None, later)[0]
        if key not in self._firsts:
            self._firsts[key] = came
        id_, (source, account, region), replay = came
        then = Sighting(id_ or "", source, account or "", region or "", replay or "")
        return duplicate_cause(then, later)


def _goes_by_id(rule: Rule) -> bool:
    """Return True if all keys of *rule* with content comparison are ids."""
    compared = [tier for tier in rule.tiers if tier.check]
    return bool(compared) and all(isinstance(tier.key, IdKey) for tier in compared)
