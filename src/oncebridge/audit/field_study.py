"""
Study events that no rule matches: which field identifies them, which ones are noise.

Only a sample is read, and a suggestion from it may drop real events, so the conditions are strict.
A field named like an event's id identifies events unless one of its values has other content,
apart from times and fields about the sending. Any other id must occur again, in events with more
content, and these may differ only in stamps of the sending (`sentAt`, `attempt`, `traceId`): if
another time differs, it may be a second event. If nothing identifies events, a field is noise if
it alone differs between events and its name is about the sending.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from oncebridge.audit.report import FieldStudy
from oncebridge.events.canonical import canonical, decode_canonical

_Leaves = dict[str, Any]
Samples = Mapping[tuple[str, str], Sequence[bytes]]

_FEWEST: Final = 3
_MOST_LEAVES: Final = 200
_DEEPEST: Final = 6

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SENDING: Final = re.compile(
    r"(?:sent|send|publish|published|emit|emitted|deliver|delivered|process|processed|receive"
    r"|received|ingest|ingested|generated|dispatch|dispatched|retry|retried)"
    r"_?(?:at|on|time|date|timestamp|count|number|id)?"
    r"|(?:delivery|retry|attempt|send)_?(?:count|number|no|time|timestamp|date|id)|attempts?"
    r"|(?:trace|span|request|correlation|message|delivery|invocation|batch)_?id|traceparent",
    re.IGNORECASE | re.ASCII,
)
_STAMP: Final = re.compile(
    r"(?:sent|published|emitted|dispatched|retried)_?(?:at|on|time|date|timestamp)"
    r"|(?:send|publish|emit|dispatch|retry)_?(?:time|date|timestamp)"
    r"|(?:delivery|retry|send)_?(?:count|number|no|attempts?)|attempts?|attempt_?(?:count|number|no)"
    r"|(?:trace|span)_?id|traceparent",
    re.IGNORECASE | re.ASCII,
)
"""
Names that are always about the sending.

Not those that may be the subject of an event, such as `messageId` or `deliveredAt`.
"""
_TIME: Final = re.compile(
    r".*(?:time|date|timestamp|_at|_on|millis)|.*[a-z](?:At|On)|ts", re.IGNORECASE | re.ASCII
)
_EVENT_ID: Final = re.compile(
    r"(?:event|dedup|deduplication|idempotency)_?(?:id|uuid|key|guid)",
    re.IGNORECASE | re.ASCII,
)
_ID: Final = re.compile(r".*(?:Id|_id|ID|Uuid|uuid|Guid|guid)|id|key", re.ASCII)
_ENTITIES: Final = (
    *("conversationId", "conversation_id", "interactionId", "interaction_id"),
    *("entityId", "entity_id"),
)


def study_all(samples: Iterable[Samples]) -> tuple[FieldStudy, ...]:
    """Study the samples of the workers, most events first."""
    joined: dict[tuple[str, str], list[bytes]] = defaultdict(list)
    for some in samples:
        for kind, raws in some.items():
            joined[kind] += raws
    studies = [study(*kind, raws) for kind, raws in joined.items() if len(raws) >= _FEWEST]
    return tuple(sorted(studies, key=lambda one: (-one.sampled, one.source, one.detail_type)))


def study(source: str, detail_type: str, details: Sequence[bytes]) -> FieldStudy:
    """Study events of one kind by their details, in canonical form."""
    different = list(dict.fromkeys(details))
    events = [_leaves(decode_canonical(detail)) for detail in different]
    identifying, noise = _identifying(events)
    if identifying is None:
        noise = _noise(events)
    left = {_without(event, noise, only=identifying) for event in events}
    return FieldStudy(
        source,
        detail_type,
        len(details),
        tuple(sorted(noise)),
        identifying,
        _entity(events, identifying),
        len(events) - len(left),
    )


def _leaves(detail: Mapping[str, Any]) -> _Leaves:
    """Return the value at the end of each path; an array is an end."""
    found: _Leaves = {}
    pending: list[tuple[str, Mapping[str, Any], int]] = [("detail", detail, 1)]
    while pending and len(found) < _MOST_LEAVES:
        path, members, depth = pending.pop()
        for name, value in members.items():
            below = f"{path}.{name if _NAME.fullmatch(name) else canonical(name).decode()}"
            if isinstance(value, dict) and value and depth < _DEEPEST:
                pending.append((below, value, depth + 1))
            else:
                found[below] = value if isinstance(value, str | int) else canonical(value)
    return found


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _without(event: _Leaves, paths: frozenset[str], only: str | None = None) -> Any:
    """Return the identity of an event if *paths* do not count."""
    if only is not None and only in event:
        return event[only]
    return frozenset(item for item in event.items() if item[0] not in paths)


def _identifying(events: Sequence[_Leaves]) -> tuple[str | None, frozenset[str]]:
    """Return the field that identifies events, and the fields in which copies differ."""
    best: tuple[bool, int, str] | None = None
    noise: frozenset[str] = frozenset()
    for path in _everywhere(events):
        if not _ID.fullmatch(_last(path)):
            continue
        differing, again = _differing(events, path)
        is_event_id = _EVENT_ID.fullmatch(_last(path)) is not None
        may_differ = _is_noise if is_event_id else _is_stamp
        if not all(may_differ(_last(each)) for each in differing):
            continue
        if not is_event_id and not (again and _differ_elsewhere(events, {path, *differing})):
            continue  # unique so far, or the only field: that proves nothing
        if best is None or (is_event_id, again) > best[:2]:
            best, noise = (is_event_id, again, path), frozenset(differing)
    return (best[2], noise) if best else (None, frozenset())


def _everywhere(events: Sequence[_Leaves]) -> list[str]:
    """Return the paths that every event has, with a value that is not empty."""
    common = set(events[0])
    for event in events:
        common.intersection_update(path for path, value in event.items() if value not in ("", 0))
    return sorted(common)


def _differing(events: Sequence[_Leaves], path: str) -> tuple[set[str], int]:
    """Return the fields that differ between events of one value, and the number of such events."""
    firsts: dict[Any, _Leaves] = {}
    differing: set[str] = set()
    again = 0
    for event in events:
        first = firsts.setdefault(event[path], event)
        if first is not event:
            again += 1
            differing.update(dict(first.items() ^ event.items()))
    return differing, again


def _differ_elsewhere(events: Sequence[_Leaves], paths: set[str]) -> bool:
    """Return whether events differ in more than *paths*."""
    left = {_without(event, frozenset(paths)) for event in events}
    return len(left) > 1


def _is_stamp(name: str) -> bool:
    return _STAMP.fullmatch(name) is not None


def _is_noise(name: str) -> bool:
    return _SENDING.fullmatch(name) is not None or _TIME.fullmatch(name) is not None


def _noise(events: Sequence[_Leaves]) -> frozenset[str]:
    """Return the fields about the sending that alone differ between some events."""
    paths = frozenset(path for event in events for path in event if _SENDING.fullmatch(_last(path)))
    if not paths:
        return paths
    firsts: dict[Any, _Leaves] = {}
    differing: set[str] = set()
    for event in events:
        first = firsts.setdefault(_without(event, paths), event)
        if first is not event:
            differing.update(dict(first.items() ^ event.items()))
    return frozenset(differing)


def _entity(events: Sequence[_Leaves], identifying: str | None) -> str | None:
    """Return the path of the entity that several different events share."""
    common = [path for path in _everywhere(events) if path != identifying]
    for name in _ENTITIES:
        for path in common:
            if _last(path) == name:
                return path
    ids = [path for path in common if _ID.fullmatch(_last(path)) and not _is_noise(_last(path))]
    counted = [(len({event[path] for event in events}), path) for path in ids]
    # At least a tenth as many values as events: otherwise it is common to all of them.
    fitting = [(many, path) for many, path in counted if len(events) / 10 <= many < len(events)]
    return max(fitting)[1] if fitting else None
