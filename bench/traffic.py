"""The events of all rows, the rule for them, and a key as people write it by hand."""

import hashlib
import json
from collections.abc import Sequence
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
    template = json.loads((EVENTS / "v2.detail.events.conversation.id.user.end.json").read_bytes())
    detail = template.pop("detail")
    body = detail.pop("eventBody")
    body["attributes"] = {f"attribute {n}": f"a value of some length, {n}" for n in range(13)}

    def event(number: int, copy: int) -> bytes:
        stamp = f"2025-12-12T15:15:{number % 60:02}.{copy:03}Z"
        mark = hashlib.md5(f"{number} {copy}".encode()).hexdigest()
        own = hashlib.md5(f"{number}".encode()).hexdigest()
        inner = {**body, "conversationId": own, "eventTime": 1_765_552_507_657 + number}
        metadata = {"CorrelationId": mark}
        whole = {**template, "id": mark, "time": f"{stamp[:19]}Z"}
        whole["detail"] = {**detail, "eventBody": inner, "metadata": metadata, "timestamp": stamp}
        return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()

    return [
        event(first + at - back, 1) if is_repeat(at, back) else event(first + at, 0)
        for at in range(count)
    ]


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
