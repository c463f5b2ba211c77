"""
A simulated Genesys Cloud event stream, labelled with which arrivals are duplicates.

It has complete conversations of an invented contact centre, several at once: callers, queues,
agents, transcripts, after-call work. It includes the kinds of duplicates that real streams
have (`REPEATS`), and events that only look like duplicates (`LOOK_ALIKES`). Each arrival has
the number of its logical event, so that a test can count losses, duplicates and mix-ups.

Two arrivals are the same event exactly if they have the same topic and `eventBody`; copies
differ as real copies do (id, time, timestamp, correlation, integration, JSON notation).
Everything depends on the seed only.
"""

import json
import random  # noqa: TID251 - seeded
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final

from msgspec import Struct


class Label(StrEnum):
    """The kind of an arrival: a first, a duplicate, or an event that only looks like one."""

    FIRST = "first"

    REDELIVERY = "redelivery"
    """The same bytes again: the target did not acknowledge them."""
    RE_EMISSION = "re-emission"
    """Published again: new id, time and timestamp, and sometimes a new correlation."""
    SECOND_INTEGRATION = "second-integration"
    """The same through another integration of the organisation, sometimes in another region."""
    REPLAY = "replay"
    """Out of an archive, with a `replay-name`."""
    REORDERED = "reordered"
    """The same event, rewritten in transit: other order, whitespace, number notation."""

    OTHER_AGENT = "other-agent"
    """Another agent left the same conversation in the same millisecond."""
    ONE_MS_LATER = "one-ms-later"
    """The same, but it happened one millisecond later."""
    ACW_AGAIN = "acw-again"
    """After-call work once more, because the conversation was reopened."""
    FINAL_TRANSCRIPT = "final-transcript"
    """The final form of an utterance that arrived as a partial one before."""
    SECOND_UPDATE = "second-update"
    """Another update of the attributes in the same millisecond."""
    EQUAL_PRESENCE = "equal-presence"
    """Another user, with the same presence since the same millisecond: equal bodies."""


_KINDS: Final = tuple(Label)
REPEATS: Final = frozenset(_KINDS[1:6])
"""Labels of arrivals that must not be delivered."""
LOOK_ALIKES: Final = frozenset(_KINDS[6:])
"""Labels of arrivals that resemble another event and must be delivered."""

START_MS: Final = 1_765_551_600_000
"""2025-12-12T15:00:00Z, where the simulated day begins."""


class Simulated(Struct, frozen=True):
    """One arrival, and which event it is."""

    raw: bytes
    truth: int
    """The number of the logical event: equal for all its copies, and for nothing else."""
    label: Label
    at_ms: int
    """When it arrives, counted from the start."""
    resembles: int | None = None
    """For a look-alike: the number of the event it could be mistaken for."""


def simulate(
    seed: int, events: int, *, repeats: float = 0.3, start_ms: int = START_MS
) -> Iterator[Simulated]:
    """
    Yield *events* arrivals in the order in which they arrive.

    *repeats* is the share of duplicates among them, below 1. Arrivals are created on demand,
    so a stream can have any length. A few hundred contain every label.
    """
    if not 0 <= repeats < 1:
        raise ValueError(f"repeats must be from 0 up to, not including, 1: not {repeats}")
    dice = random.Random(seed)  # noqa: S311 - a simulation
    centre = _ContactCentre(dice, start_ms)
    bus = _EventBus(dice, start_ms, repeats)
    waiting: list[tuple[int, int, Simulated]] = []
    order = count()
    begins = 0
    for _ in range(events):
        # No event of a conversation arrives before the conversation begins.
        while not waiting or waiting[0][0] >= begins:
            for fact in centre.conversation(begins):
                for arrival in bus.send(fact):
                    heappush(waiting, (arrival.at_ms, next(order), arrival))
            begins += dice.randrange(3_000, 15_000)
        yield heappop(waiting)[2]


_Body = dict[str, Any]

_DETAIL: Final = "v2.detail.events.conversation.{id}."
_AGENTS: Final = (
    *("Ada Quill", "Bo Larkin", "Cleo Marsh", "Dev Osei", "Ewa Lind", "Femi Roth"),
    *("Gus Pell", "Hana Voss", "Ivo Crane", "Juno Beck", "Kit Amari", "Lea Stroud"),
)
_SAYINGS: Final = (
    *("i would like to move my appointment", "the invoice is wrong", "thank you very much"),
    *("can you repeat the number", "we had ten people", "it stopped working yesterday"),
)


class _Fact(Struct, frozen=True):
    """One logical event, before it is sent."""

    truth: int
    topic: str
    name: str
    body: _Body
    at_ms: int
    label: Label = Label.FIRST
    resembles: int | None = None


class _ContactCentre:
    """The contact centre: the logical events in their order."""

    def __init__(self, dice: random.Random, start_ms: int) -> None:
        self._dice = dice
        self._start_ms = start_ms
        self._numbers = count()
        self._oddities = _forever(dice, _KINDS[6:])
        self._users = [_uuid(dice) for _ in _AGENTS]
        self._free_ms = [0] * len(_AGENTS)
        self._queues = [_uuid(dice) for _ in range(4)]
        self._presences = {"AVAILABLE": _uuid(dice), "BREAK": _uuid(dice)}
        self._facts: list[_Fact] = []
        self._odd: set[Label] = set()

    def conversation(self, begins: int) -> list[_Fact]:
        """Return the events of one call."""
        dice = self._dice
        self._facts = []
        self._odd = {next(self._oddities), next(self._oddities)}
        conversation, contact, queue = _uuid(dice), _uuid(dice), dice.choice(self._queues)
        agent = min(range(len(_AGENTS)), key=self._free_ms.__getitem__)
        queued = begins + dice.randrange(500, 4_000)
        answered = max(queued + dice.randrange(1_000, 9_000), self._free_ms[agent] + 1_000)
        talks = answered + dice.randrange(800, 2_500)
        caller, acd, user = (
            {"participantId": _uuid(dice), "sessionId": _uuid(dice)} for _ in "123"
        )
        acd |= {"queueId": queue}
        user |= {"queueId": queue, "userId": self._users[agent]}
        call: _Body = {"mediaType": "VOICE", "provider": "Edge", "direction": "INBOUND"}
        call |= {"ani": f"tel:+1555555{dice.randrange(10_000):04}", "dnis": "tel:+15555550000"}
        call |= {"conversationExternalContactIds": [contact]}

        def happen(kind: str, at: int, who: _Body, **more: Any) -> _Fact:
            body = {"eventTime": self._start_ms + at, "conversationId": conversation}
            return self._add(f"{_DETAIL}{kind}", conversation, {**body, **who, **call, **more}, at)

        happen("customer.start", begins, caller, externalContactId=contact)
        happen("acd.start", queued, acd, routingPriority=dice.randrange(50))
        self._attributes(conversation, caller, queued + 40)
        took: _Body = {"connectedDurationMs": answered - queued, "flowType": "inqueuecall"}
        took |= {"acdOutcome": "ANSWERED", "answeredUserId": user["userId"]}
        happen("acd.end", answered, acd, disconnectType="TRANSFER", **took)
        happen("user.start", talks, user, utilizationLabel=_uuid(dice))
        self._status(agent, "INTERACTING", talks + 15)
        ends = self._transcripts(conversation, talks)

        spent = {"interactingDurationMs": ends - talks, "heldDurationMs": dice.randrange(9_000)}
        happen("customer.end", ends, caller, disconnectType="ENDPOINT", **spent)
        left = happen("user.end", ends + 30, user, disconnectType="PEER", **spent)
        other = {"participantId": _uuid(dice), "sessionId": _uuid(dice), "userId": _uuid(dice)}
        self._add_look_alike(left, Label.OTHER_AGENT, other)
        self._add_look_alike(left, Label.ONE_MS_LATER, {"eventTime": self._start_ms + ends + 31}, 1)
        wrapped = ends + dice.randrange(4_000, 25_000)
        notes: _Body = {"wrapupCode": _uuid(dice), "wrapupNotes": "will call back"}
        notes |= {"wrapupDurationMs": wrapped - ends}
        happen("wrapup", wrapped, user, **notes)
        acw = happen("acw", wrapped + 1, user, **notes)
        reopened = wrapped + dice.randrange(3_000, 12_000)
        later = {"eventTime": self._start_ms + reopened}
        self._add_look_alike(acw, Label.ACW_AGAIN, later, reopened - acw.at_ms)
        self._status(agent, "IDLE", reopened + 50)
        self._presence(agent, reopened + 120)
        # One call at a time, so that an agent has no two equal states in one millisecond.
        self._free_ms[agent] = reopened + 200
        return self._facts

    def _add(self, topic: str, entity: str, body: _Body, at: int) -> _Fact:
        name = topic.replace("{id}", entity)
        fact = _Fact(next(self._numbers), topic, name, body, at)
        self._facts.append(fact)
        return fact

    def _add_look_alike(
        self, fact: _Fact, label: Label, changes: _Body, later: int = 0, name: str = ""
    ) -> None:
        """Add an event that differs from *fact* only in *changes* or *name*, if it is its turn."""
        if label in self._odd:
            number, at = next(self._numbers), fact.at_ms + later
            body, name = {**fact.body, **changes}, name or fact.name
            self._facts.append(_Fact(number, fact.topic, name, body, at, label, fact.truth))

    def _attributes(self, conversation: str, caller: _Body, at: int) -> None:
        attributes = {"Café": "ünïcödé", "language": "en-US", " step": "menu"}
        body: _Body = {
            "conversationId": conversation,
            "participantId": caller["participantId"],
            "eventTime": self._start_ms + at,
            "communications": [{"id": caller["sessionId"], "mediaType": "VOICE"}],
            "attributes": attributes,
        }
        fact = self._add(f"{_DETAIL}attributes", conversation, body, at)
        more = {"attributes": {**attributes, "verified": "true"}}
        self._add_look_alike(fact, Label.SECOND_UPDATE, more)

    def _transcripts(self, conversation: str, talks: int) -> int:
        """Add the transcripts of both sides; return when the call ends."""
        dice, communication, at = self._dice, _uuid(self._dice), talks
        for turn in range(dice.randrange(1, 4)):
            at += dice.randrange(2_000, 12_000)
            said: _Body = {"confidence": dice.random(), "durationMs": dice.randrange(400, 2_000)}
            said |= {"offsetMs": at - talks, "transcript": dice.choice(_SAYINGS)}
            partial = turn == 0 and Label.FINAL_TRANSCRIPT in self._odd
            spoken: _Body = {"utteranceId": _uuid(dice), "isFinal": not partial}
            spoken |= {"channel": dice.choice(["EXTERNAL", "INTERNAL"]), "alternatives": [said]}
            body: _Body = {
                "eventTime": _iso(self._start_ms + at),
                "conversationId": conversation,
                "communicationId": communication,
                "sessionStartTimeMs": self._start_ms + talks,
                "transcripts": [spoken],
                "status": {"offsetMs": at - talks, "status": "SESSION_ONGOING"},
            }
            fact = self._add("v2.conversations.{id}.transcription", conversation, body, at)
            if partial:
                final = {"transcripts": [{**spoken, "isFinal": True}]}
                self._add_look_alike(fact, Label.FINAL_TRANSCRIPT, final, 600)
        return at + dice.randrange(1_500, 6_000)

    def _status(self, agent: int, status: str, at: int) -> None:
        since = {"status": status, "startTime": _iso(self._start_ms + at)}
        user = self._users[agent]
        self._add("v2.users.{id}.routingStatus", user, {"id": user, "routingStatus": since}, at)

    def _presence(self, agent: int, at: int) -> None:
        """Change an agent's presence, which an audit records."""
        user, presence = self._users[agent], self._dice.choice([*self._presences])
        definition = {"id": self._presences[presence], "systemPresence": presence}
        body: _Body = {"source": "PURECLOUD", "presenceDefinition": definition, "primary": True}
        body |= {"message": "", "modifiedDate": _iso(self._start_ms + at)}
        fact = self._add("v2.users.{id}.presence", user, body, at)
        other = f"v2.users.{_uuid(self._dice)}.presence"
        self._add_look_alike(fact, Label.EQUAL_PRESENCE, {}, name=other)
        audit: _Body = {"id": _uuid(self._dice), "userId": user, "username": {"id": ""}}
        audit |= {"serviceName": "Presence", "action": "Update", "entityType": "UserPresence"}
        audit |= {"eventTime": _iso((self._start_ms + at) // 1000 * 1000)}
        audit |= {"entity": {"id": user, "name": _AGENTS[agent]}}
        audit |= {"propertyChanges": [{"property": "PRESENCE", "newValues": [presence]}]}
        topic = "v2.audits.entitytype.{id}.entityid.{id}"
        name = topic.replace("{id}", "UserPresence", 1).replace("{id}", user)
        self._facts.append(_Fact(next(self._numbers), topic, name, audit, at + 5))


class _EventBus:
    """The transport: events arrive late, out of order, and more than once."""

    def __init__(self, dice: random.Random, start_ms: int, repeats: float) -> None:
        self._dice = dice
        self._start_ms = start_ms
        self._repeats = repeats
        self._kinds = _forever(dice, _KINDS[1:6])
        self._organisation = f"aws.partner/genesys.com/cloud/{_uuid(dice)}"

    def send(self, fact: _Fact) -> Iterator[Simulated]:
        """Yield the first arrival of an event, and its duplicates."""
        dice, truth = self._dice, fact.truth
        published = fact.at_ms + dice.randrange(1, 379)
        arrives = published + dice.randrange(20, 400)
        event = self._event(fact, published)
        yield Simulated(_compact(event), truth, fact.label, arrives, fact.resembles)
        while dice.random() < self._repeats:
            kind = next(self._kinds)
            raw, delay = self._make_repeat(event, kind, published)
            yield Simulated(raw, truth, kind, arrives + delay)

    def _event(self, fact: _Fact, published: int) -> _Body:
        stamp = _iso(self._start_ms + published)
        suffix = "-archival" if fact.topic.startswith("v2.audits") else ""
        return {
            "version": "0",
            "id": _uuid(self._dice),
            "detail-type": fact.topic,
            "source": f"{self._organisation}/genesys-prod",
            "account": "123456789012",
            "time": f"{stamp[:19]}Z",
            "region": "us-east-1",
            "resources": [],
            "detail": {
                "topicName": fact.name,
                "version": "2",
                "eventBody": fact.body,
                "metadata": {"CorrelationId": f"{_uuid(self._dice)}{suffix}"},
                "timestamp": stamp,
            },
        }

    def _make_repeat(self, event: _Body, kind: Label, published: int) -> tuple[bytes, int]:
        """Return the bytes of a duplicate, and how much later than the first it arrives."""
        dice = self._dice
        match kind:
            case Label.RE_EMISSION:
                delay = dice.choice([dice.randrange(2, 500), dice.randrange(1_000, 30_000)])
                return _compact(self._published(event, published + delay)), delay
            case Label.SECOND_INTEGRATION:
                delay = dice.randrange(1, 300)
                copy = self._published(event, published + delay)
                region = dice.choice(["us-east-1", "us-west-2"])
                suffix = "genesys-audit" if region == "us-east-1" else "genesys-dr"
                copy |= {"source": f"{self._organisation}/{suffix}", "region": region}
                return _compact(copy), delay
            case Label.REPLAY:
                copy = {**event, "replay-name": "replay-2025-12-12"}
                return _compact(copy), dice.randrange(10_000, 60_000)
            case Label.REORDERED:
                indent = dice.choice([None, 2])
                return json.dumps(_rewritten(event), indent=indent).encode(), dice.randrange(
                    9, 9_000
                )
            case _:
                return _compact(event), dice.randrange(500, 45_000)

    def _published(self, event: _Body, at: int) -> _Body:
        """Return *event* as it is published again: EventBridge gives it a new id."""
        stamp = _iso(self._start_ms + at)
        detail = {**event["detail"], "timestamp": stamp}
        if self._dice.random() < 0.5:
            detail["metadata"] = {"CorrelationId": _uuid(self._dice)}
        return {**event, "id": _uuid(self._dice), "time": f"{stamp[:19]}Z", "detail": detail}


def _uuid(dice: random.Random) -> str:
    text = f"{dice.getrandbits(128):032x}"
    return f"{text[:8]}-{text[8:12]}-4{text[13:16]}-a{text[17:20]}-{text[20:]}"


def _forever(dice: random.Random, labels: Sequence[Label]) -> Iterator[Label]:
    """Yield labels in random order, each once before any occurs again."""
    while True:
        yield from dice.sample(labels, len(labels))


def _compact(event: _Body) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def _rewritten(value: Any) -> Any:
    """Return *value* with its members in reverse order, and whole numbers as `1.0`."""
    if isinstance(value, dict):
        return {name: _rewritten(value[name]) for name in reversed(value)}
    if isinstance(value, list):
        return [_rewritten(item) for item in value]
    return float(value) if type(value) is int else value


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _iso(at_ms: int) -> str:
    instant = _EPOCH + timedelta(milliseconds=at_ms)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
