"""The events of all rows, the rule for them, and a key as people write it by hand."""

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from oncebridge import Delivery, Rule, SinkAnswer, Yes

EVENTS = Path(__file__).parents[1] / "tests" / "events"
IGNORED = ("timestamp", "metadata")
RULE = Rule.parse(
    {"name": "ours", "ignore": [f"detail.{name}" for name in IGNORED], "scope": "organisation"}
)


def make_events(count: int, *, first: int = 0, back: int = 1003) -> list[bytes]:
    """
    Make Genesys-like events of 1.8 KB, every fifth the re-emission of an earlier one.

    *first* is the number of the first event: other numbers are other events. A re-emission
    comes *back* events after the first one, which must not be on its way any more; *back* is
    3 more than a multiple of 5, so that it is of an event that is not one itself.
    """
    return [
        _event(first + at - back, 1) if is_repeat(at, back) else _event(first + at, 0)
        for at in range(count)
    ]


_MARK, _OWN, _TIME, _STAMP, _NUMBER = "<mark>", "<own>", "<time>", "<stamp>", 987_654_321_000
"""What differs from event to event; it is put into a text that was written once."""


@cache
def _pattern() -> list[str]:
    """Write an event, and cut it where something has to be put in."""
    whole = json.loads((EVENTS / "v2.detail.events.conversation.id.user.end.json").read_bytes())
    detail = whole["detail"]
    body = detail.pop("eventBody")
    attributes = {f"attribute {n}": f"a value of some length, {n}" for n in range(13)}
    whole |= {"id": _MARK, "time": _TIME}
    body |= {"attributes": attributes, "conversationId": _OWN, "eventTime": _NUMBER}
    detail |= {"metadata": {"CorrelationId": _MARK}, "timestamp": _STAMP, "eventBody": body}
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    return re.split(f"({_MARK}|{_OWN}|{_TIME}|{_STAMP}|{_NUMBER})", text)


def _event(number: int, copy: int) -> bytes:
    second = f"2025-12-12T15:15:{number % 60:02}"
    told = {
        _MARK: _uuid(f"{number} {copy}"),
        _OWN: _uuid(f"{number}"),
        _TIME: f"{second}Z",
        _STAMP: f"{second}.{copy:03}Z",
        f"{_NUMBER}": f"{1_765_552_507_657 + number}",
    }
    return "".join([told.get(piece, piece) for piece in _pattern()]).encode()


def _uuid(text: str) -> str:
    name = hashlib.md5(text.encode()).hexdigest()
    return f"{name[:8]}-{name[8:12]}-{name[12:16]}-{name[16:20]}-{name[20:]}"


def is_repeat(at: int, back: int) -> bool:
    """Tell whether event *at* of `make_events` is a re-emission."""
    return at % 5 == 4 and at > back


def naive_key(raw: bytes, ignored: Sequence[str] = ()) -> str:
    """Make a key as people do by hand."""
    detail = json.loads(raw)["detail"]
    if ignored:
        detail = {name: value for name, value in detail.items() if name not in ignored}
    return hashlib.sha256(json.dumps(detail, sort_keys=True).encode()).hexdigest()


class NullSink:
    """Take everything and do nothing."""

    batch = 1000
    concurrency = 8

    async def open(self) -> None: ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        return [Yes()] * len(deliveries)

    async def aclose(self) -> None: ...
