"""
The detail of an event that goes on to another bus, with where it came from.

PutEvents takes no id, account or Region, and not every source. So the originals travel inside
the detail, as a member `oncebridge`:

    "oncebridge": {"id": …, "source": …, "time": …, "account": …, "region": …, "replay-name": …,
                   "key": …, "unprotected": true, "via": ["arn:aws:events:…:event-bus/clean#route"]}

What there is none of is left out. All else in the detail stays as it was received, byte for
byte. After several hops, `id` to `replay-name` are still those of the first event, `key` is that
of the last hop, and `via` lists all of them. A member of that name that is not ours moves into
ours, as `was`.
"""

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from oncebridge.events.event import Event
from oncebridge.sinks.api import Delivery

_NAME: Final = "oncebridge"
_OF_EACH_HOP: Final = frozenset({"key", "unprotected"})
_BLANK: Final = b" \t\r\n"


class _Envelope(Struct):
    detail: Raw


_envelope = msgspec.json.Decoder(_Envelope).decode
_string = msgspec.json.Decoder(str).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


def went_through(event: Event) -> list[str]:
    """List the buses and routes of oncebridge that *event* came through."""
    member = event.detail.get(_NAME)
    via = member.get("via") if isinstance(member, dict) else None
    is_ours = isinstance(via, list) and all(isinstance(hop, str) for hop in via)
    return via if via and is_ours else []


def detail_with_passage(delivery: Delivery, hop: str) -> bytes:
    """Return the text of the detail with where the event came from, *hop* included."""
    event = delivery.event
    text = _detail(event)
    if _NAME not in event.detail:
        rest = text[1:] if event.detail else b"}"
        comma = b"," if event.detail else b""
        return b'{"%b":%b%b%b' % (_NAME.encode(), _encode(_passage(delivery, hop)), comma, rest)
    # The text around our member is written anew; each other value stays as it is.
    members = _members(text)
    passage = _passage(delivery, hop)
    if via := went_through(event):
        latest = {name: value for name, value in passage.items() if name in _OF_EACH_HOP}
        passage = {**_members(members[_NAME]), **latest, "via": [*via, hop]}
    else:
        passage["was"] = members[_NAME]
    return _encode({**members, _NAME: passage})


def _detail(event: Event) -> bytes:
    """Return the object that is the detail, as it was received."""
    if event.bare:
        return event.raw.strip(_BLANK)
    text = bytes(_envelope(event.raw).detail)
    return _string(text).encode().strip(_BLANK) if text.startswith(b'"') else text


def _passage(delivery: Delivery, hop: str) -> dict[str, Any]:
    event = delivery.event
    found = {
        "id": event.id,
        "source": event.source,
        "time": event.time,
        "account": event.account,
        "region": event.region,
        "replay-name": event.replay_name,
        "key": delivery.idempotency_key,
        "unprotected": delivery.unprotected,
        "via": [hop],
    }
    return {name: value for name, value in found.items() if value}
