"""
The events of a run: real Genesys shapes with invented ids, and their repeats.

Events are made on demand from their number, so that a long run needs no memory for
them. Four neighbours share a conversation; two of those also share the participant and
differ by one millisecond only: a key that is too coarse merges them, and the oracle
calls that a loss.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

_ORIGINAL = Path(__file__).parents[1] / "events" / "variants" / "00_original.json"
_FIRST_MS = 1_765_552_507_656  # even, so that the last bit tells two neighbours apart
_NEAR = 60  # how many places apart a repeat and its event stand, at most, when they are near


class Copy(NamedTuple):
    """One message: an event, and which sending of it. The first has number 0."""

    event: int
    emission: int


class Stream:
    """*events* distinct events and about *duplicates* times as many repeats, shuffled."""

    def __init__(self, events: int, duplicates: float, seed: int) -> None:
        self.events = events
        self._seed = seed
        self._template = _template()
        self.copies = list(self._shuffled(duplicates, Random(f"{seed}/stream")))

    def _shuffled(self, duplicates: float, dice: Random) -> Iterator[Copy]:
        """
        Put all in random places.

        Most repeats stay near their event, so that two workers often have both in hand
        at the same time; the others come long before or after.
        """
        places = [dice.random() for _ in range(self.events)]
        placed = [(place, Copy(event, 0)) for event, place in enumerate(places)]
        total = self.events * (1 + duplicates)
        for _ in range(round(self.events * duplicates)):
            event = dice.randrange(self.events)
            near = places[event] + dice.uniform(-_NEAR, _NEAR) / total
            place = near if dice.random() < 0.7 else dice.random()
            # The same envelope again, or sent anew with another id, time and timestamp.
            emission = 0 if dice.random() < 0.5 else dice.randrange(1, 6)
            placed.append((place, Copy(event, emission)))
        return (copy for _, copy in sorted(placed))

    def render(self, copy: Copy) -> bytes:
        event, emission = copy
        conversation, rest = divmod(event, 4)
        participant, later = divmod(rest, 2)
        number = event * 8 + emission
        text = self._template
        for name, value in (
            ("@id", self._uuid(1, number)),
            ("@conversation", self._uuid(2, conversation)),
            ("@participant", self._uuid(3, participant)),
            ('"@eventTime"', str(_FIRST_MS + later)),
            ("@time", f"2025-12-12T15:15:{7 + 4 * emission:02d}Z"),
            ("@stamp", f"2025-12-12T15:15:{7 + 4 * emission:02d}.919Z"),
            # Some are sent anew with another correlation id, some by a second integration.
            ("@correlation", self._uuid(4, number if emission in {2, 4} else event * 8)),
            ("@integration", "genesys-audit" if emission in {3, 4} else "genesys-prod"),
        ):
            text = text.replace(name, value)
        return text.encode()

    def recognise(self, raw: bytes) -> int | None:
        """Tell which event *raw* is; None if a byte of it is not as it was sent."""
        try:
            number = int(json.loads(raw)["id"][-12:], 16)
        except (ValueError, KeyError, TypeError):
            return None
        copy = Copy(*divmod(number, 8))
        return copy.event if self.render(copy) == raw else None

    def recognise_detail(self, raw: bytes) -> int | None:
        """Tell which event *raw* is, in whatever envelope; None if its detail was changed."""
        try:
            detail = json.loads(raw)["detail"]
            body = detail["eventBody"]
            conversation = int(body["conversationId"][-12:], 16)
            participant = int(body["participantId"][-12:], 16)
            event = conversation * 4 + participant * 2 + body["eventTime"] - _FIRST_MS
        except (ValueError, KeyError, TypeError):
            return None
        known = (json.loads(self.render(Copy(event, emission)))["detail"] for emission in range(6))
        return event if detail in known else None

    def _uuid(self, kind: int, number: int) -> str:
        return f"{self._seed & 0xFFFFFFFF:08x}-{kind:04x}-4000-8000-{number:012x}"


def _template() -> str:
    envelope = json.loads(_ORIGINAL.read_bytes())
    envelope |= {"id": "@id", "time": "@time"}
    envelope["source"] = envelope["source"].replace("genesys-prod", "@integration")
    detail = envelope["detail"]
    detail["topicName"] = "v2.detail.events.conversation.@conversation.user.end"
    detail["eventBody"] |= {
        "eventTime": "@eventTime",
        "conversationId": "@conversation",
        "participantId": "@participant",
    }
    detail["metadata"]["CorrelationId"] = "@correlation"
    detail["timestamp"] = "@stamp"
    return json.dumps(envelope, separators=(",", ":"))
