"""Why an arrival came again, as far as can be told when it is decided."""

from collections.abc import Mapping, Sequence
from typing import Final

from oncebridge.engine.causes import Cause, Sighting, cause_of_repeat, likely_cause, remembered
from oncebridge.engine.hooks import Decision
from oncebridge.engine.verdict import First, Verdict
from oncebridge.events.event import Event
from oncebridge.events.key import IdKey
from oncebridge.events.rules import Rule

MOST_FIRSTS: Final = 20_000
"""About 6 MB."""
_MOST_WAYS: Final = 1000
_LONGEST: Final = 512
"""What is longer is somebody's mischief, and would be kept for ten thousand events."""

_HALF: Final = MOST_FIRSTS // 2
_NO_RULES: Final[Mapping[str, Sequence[Rule]]] = {}
# An enum's members are slow to find, and this is asked for every event.
_DELIVERED: Final = Verdict.DELIVERED
_DUPLICATE: Final = Verdict.DUPLICATE
_CONFLICT: Final = Verdict.CONFLICT
_CAUSES: Final = {
    Verdict.STALE: Cause.OUT_OF_ORDER,
    Verdict.UNCHANGED: Cause.DOUBLE_EMISSION,
}

_Way = tuple[str, str | None, str | None]
"""By which source, account and Region events come."""
_Came = tuple[str | None, _Way, str | None]
"""How an event came: its id, its way, and the name of the replay."""


class DuplicateCauses:
    """
    Name causes; how the latest first arrivals came is remembered, for as many as there is room.

    *rules* are those of each route: a conflict is an id that was used again where they go by it.
    """

    def __init__(self, rules: Mapping[str, Sequence[Rule]] = _NO_RULES) -> None:
        self._by_id = {
            (route, rule.name) for route, its in rules.items() for rule in its if _goes_by_id(rule)
        }
        # Two halves, of which the older one goes as a whole: cheaper than one at a time.
        self._firsts: dict[bytes, _Came] = {}
        self._older: dict[bytes, _Came] = {}
        # Few senders send many events: what they all say is kept once, and found by the source.
        self._ways: dict[str, _Way] = {}

    def cause_of(self, decision: Decision) -> Cause | None:
        """Name the cause; None where it did not come again."""
        outcome, event = decision.outcome, decision.event
        verdict = outcome.verdict
        if type(event) is not Event:
            return None
        if verdict is _DELIVERED:
            self._remember(outcome.key, event)
            return None
        if verdict is _DUPLICATE:
            return self._cause_of_repeat(outcome.key, event, outcome.first)
        if verdict is _CONFLICT:
            # It is the first one of another event, and may come again as that.
            self._remember(outcome.key, event)
            is_by_id = (decision.route, outcome.rule) in self._by_id
            return Cause.ID_REUSED if is_by_id else None
        return _CAUSES.get(verdict)

    def _remember(self, key: bytes, event: Event) -> None:
        way, id_, replay = self._ways.get(event.source), event.id, event.replay_name
        if way is None or way[1] != event.account or way[2] != event.region:
            way = self._add_way(event.source, event.account, event.region)
        if way is None or (id_ and len(id_) > _LONGEST) or (replay and len(replay) > _LONGEST):
            return
        if len(self._firsts) >= _HALF:
            self._older, self._firsts = self._firsts, {}
        self._firsts[key] = id_, way, replay

    def _add_way(self, source: str, account: str | None, region: str | None) -> _Way | None:
        if len(source) + len(account or "") + len(region or "") > _LONGEST:
            return None
        if len(self._ways) >= _MOST_WAYS:
            self._ways.clear()
        way = self._ways[source] = source, account, region
        return way

    def _cause_of_repeat(self, key: bytes, event: Event, first: First | None) -> Cause:
        later = Sighting.of(event)
        came = self._firsts.get(key) or self._older.get(key)
        if came is None or (first is not None and first.id != remembered(came[0])):
            # The first one was another worker's, or is long ago.
            return likely_cause(first.id if first else None, later)[0]
        if key not in self._firsts:
            self._firsts[key] = came
        id_, (source, account, region), replay = came
        then = Sighting(id_ or "", source, account or "", region or "", replay or "")
        return cause_of_repeat(then, later)


def _goes_by_id(rule: Rule) -> bool:
    """Return whether all keys of *rule* under which content is compared are ids."""
    compared = [tier for tier in rule.tiers if tier.check]
    return bool(compared) and all(isinstance(tier.key, IdKey) for tier in compared)
