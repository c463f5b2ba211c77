"""
The EventBridge sink: puts events on an event bus.

**`Yes` means:** EventBridge has accepted the event and assigned an id. Which rules match it, and
whether their targets accept it, is not known here.
**What is sent:** source (unless AWS reserves it), detail-type, time, resources and detail. The
event gets a new id, and the account and Region of the bus. Where events are traced, the trace is
sent as X-Ray's header, which AWS passes to the targets.
**Loops:** a rule of the bus may send the event back here. The detail lists the buses and routes
that the event went through, so such an event is recognised and becomes a dead letter.
**Missing bus:** AWS accepts events for a bus that does not exist, and drops them. So the bus is
looked up at the start and once a minute.

PutEvents takes no id, account or Region, and not every source. The originals are sent inside the
detail, as a member `oncebridge`:

    "oncebridge": {"id": …, "source": …, "time": …, "account": …, "region": …, "replay-name": …,
                   "key": …, "unprotected": true, "via": ["arn:aws:events:…:event-bus/clean#route"]}

Members without a value are left out. The rest of the detail stays as it was received, byte for
byte. After several hops, `id` to `replay-name` are still those of the first event, `key` is that
of the last hop, and `via` lists all hops. A member of that name that oncebridge did not write is
kept inside ours, as `was`.

| result                                                  | answer      |
| ------------------------------------------------------- | ----------- |
| it has an id                                            | `Yes`       |
| nothing could be sent                                   | `No`        |
| `ThrottlingException`                                   | `Throttled` |
| `InternalFailure`, no answer                            | `Unknown`   |
| access denied, no such bus                              | `Closed`    |
| malformed, too large, sent by this route before (loop)  | `Never`     |
"""

import asyncio
import re
from collections.abc import Sequence
from datetime import datetime
from math import inf
from typing import Annotated, Any, ClassVar, Final, Self

import msgspec
from msgspec import Raw, Struct

from oncebridge.aws.client import AwsError, NotSent, Unclear
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError
from oncebridge.events.event import Event
from oncebridge.events.trace_context import xray_of
from oncebridge.sinks.api import Closed, Delivery, Never, SinkAnswer, Unknown, Yes
from oncebridge.sinks.aws.answers import answer_to, answer_to_code
from oncebridge.sinks.aws.batches import CallLimits, Entry, send_all
from oncebridge.sinks.aws.target import (
    AwsSinkOptions,
    TargetKind,
    client_for,
    decode_answer,
    raise_or_log,
)

_BUS: Final = TargetKind("events", "an event bus", "event-bus/", r"[.\-_A-Za-z0-9]{1,256}")
_LIMITS: Final = CallLimits(entries=10, bytes=1 << 20, each=1 << 20)
_CHECK_EVERY_S: Final = 60.0
_TIME_BYTES: Final = 14
_MOST_DETAIL_TYPE: Final = 128
_DEFAULT_SOURCE: Final = "oncebridge"
_RESERVED: Final = "aws."
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_MEMBER: Final = "oncebridge"
_OF_EACH_HOP: Final = frozenset({"key", "unprotected"})
_WHITESPACE: Final = b" \t\r\n"


class EventsSinkOptions(AwsSinkOptions, frozen=True, kw_only=True):
    """Options of the EventBridge sink."""

    source: Annotated[
        str | None,
        Doc(
            "The source of all events sent. If it is not set, events keep their source; events "
            "without one, or with one that begins with aws. (which AWS refuses), get oncebridge.",
            "crm.clean",
        ),
    ] = None
    detail_type: Annotated[
        str, Doc("The detail-type of events that have none.", "Conversation")
    ] = "event"


class _Put(Struct, frozen=True, omit_defaults=True, rename="pascal"):
    """One entry of PutEvents."""

    source: str
    detail_type: str
    detail: str
    event_bus_name: str
    time: int | None = None
    resources: Sequence[str] = ()
    trace_header: str = ""
    """Not part of the size."""

    @property
    def size(self) -> int:
        """Size as AWS counts it."""
        texts = (self.source, self.detail_type, self.detail, *self.resources)
        return sum(len(text.encode()) for text in texts) + _TIME_BYTES * (self.time is not None)


class _Puts(Struct, frozen=True, rename="pascal"):
    entries: Sequence[_Put]


class _EntryResult(Struct, frozen=True, rename="pascal"):
    event_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None

    @property
    def answer(self) -> SinkAnswer:
        if self.error_code:
            return answer_to_code(self.error_code, self.error_message or "")
        return (
            Yes() if self.event_id else Unknown("EventBridge returned neither an id nor an error")
        )


class _EntryResults(Struct, frozen=True, rename="pascal"):
    entries: list[_EntryResult] = []


class _Bus(Struct, frozen=True, rename="pascal"):
    arn: str = ""


class _EventDetail(Struct):
    detail: Raw


_encode = msgspec.json.Encoder().encode
_results = msgspec.json.Decoder(_EntryResults).decode
_described = msgspec.json.Decoder(_Bus).decode
_event_detail = msgspec.json.Decoder(_EventDetail).decode
_string = msgspec.json.Decoder(str).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode


class EventsSink:
    """Put events on the bus at *url*: `events://BUS` or `events:ARN`."""

    Options: ClassVar[type[EventsSinkOptions]] = EventsSinkOptions
    batch = _LIMITS.entries

    def __init__(self, url: str, options: EventsSinkOptions | None = None) -> None:
        self._options = options = options or EventsSinkOptions()
        _check(options)
        self.concurrency = options.concurrency
        self._bus = _BUS.from_url(url, options.region)
        self._client = client_for(
            self._bus, options, "events", "describe_event_bus", Name=self._bus.name
        )
        self._hop = ""
        """Identifies the bus; known when its Region is."""
        self._check_at = -inf
        self._missing: Closed | None = None

    @classmethod
    def from_url(cls, url: str, options: EventsSinkOptions | None = None) -> Self:
        """Use the bus of `events://BUS`, `events://BUS?region=REGION` or `events:ARN`."""
        return cls(url, options)

    async def open(self) -> None:
        """Check that the bus exists; if that cannot be found out now, it is checked later."""
        try:
            await self._check_bus()
        except (AwsError, NotSent, Unclear) as error:
            raise_or_log(error, f"event bus {self._bus.name}")
            self._note_failed_check(error)

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        refusal = await self._refusal_of_all() if deliveries else None
        if refusal is not None:
            return [refusal] * len(deliveries)
        return await send_all([self._entry(one) for one in deliveries], _LIMITS, self._put)

    async def aclose(self) -> None:
        await self._client.aclose()

    # --- the bus -------------------------------------------------------------------------

    async def _check_bus(self) -> None:
        """Describe the bus; raise if it does not exist, or if AWS does not answer."""
        place = await self._client.open()
        self._hop = self._hop or self._bus.arn or f"events://{self._bus.name}?region={place.region}"
        self._check_at = asyncio.get_running_loop().time() + _CHECK_EVERY_S
        asked = _encode({"Name": self._bus.given})
        body = await self._client.call("DescribeEventBus", asked)
        described = decode_answer(_described, body)
        self._hop = described.arn or self._hop
        self._missing = None

    async def _refusal_of_all(self) -> SinkAnswer | None:
        """Check the bus again from time to time; return the answer if nothing can be sent."""
        if self._missing is None and asyncio.get_running_loop().time() < self._check_at:
            return None
        try:
            await self._check_bus()
        except (AwsError, NotSent, Unclear) as error:
            self._note_failed_check(error)
            if not self._hop:
                return answer_to(error)
        except ConfigError as error:  # the credentials are gone
            return Closed(str(error))
        return self._missing

    def _note_failed_check(self, error: AwsError | NotSent | Unclear) -> None:
        if isinstance(error, AwsError) and error.is_missing:
            self._missing = Closed(f"there is no event bus {self._bus.name}")
        elif isinstance(error, AwsError) and error.is_denied:
            self._check_at = inf

    # --- sending -------------------------------------------------------------------------

    def _entry(self, delivery: Delivery) -> Entry[_Put] | Never:
        event = delivery.event
        hop = f"{self._hop}#{delivery.route}"
        if hop in hops_of(event):
            return Never(self._advice(event.source))
        detail_type = event.detail_type or self._options.detail_type
        if len(detail_type) > _MOST_DETAIL_TYPE:
            # AWS would accept the event and drop it.
            return Never(f"the detail-type is longer than {_MOST_DETAIL_TYPE} characters")
        try:
            detail = detail_with_origin(delivery, hop).decode()
        except (ValueError, RecursionError) as error:
            return Never(f"the detail cannot be read: {type(error).__name__}")
        put = _Put(
            self._source(event.source),
            detail_type,
            detail,
            self._bus.given,
            _seconds(event.time),
            event.resources,
            xray_of(delivery.trace) if delivery.trace else "",
        )
        return Entry(put, put.size)

    def _source(self, source: str) -> str:
        if self._options.source is not None:
            return self._options.source
        return source if source and not _is_reserved(source) else _DEFAULT_SOURCE

    def _advice(self, source: str) -> str:
        ours = self._options.source or _DEFAULT_SOURCE
        pattern = (
            _encode({"source": [{"anything-but": ours}]}).decode()
            if source == ours
            # The source was kept, so a pattern on it would also match new events.
            else '{"detail": {"oncebridge": {"via": [{"exists": false}]}}}'
        )
        return (
            f"a loop: this route put it on event bus {self._bus.name} before; add to the pattern "
            f"of the rule that brings it back: {pattern}"
        )

    async def _put(self, puts: Sequence[_Put]) -> Sequence[SinkAnswer]:
        body = await self._client.call("PutEvents", _encode(_Puts(puts)))
        return [result.answer for result in decode_answer(_results, body).entries]


def _seconds(time: str | None) -> int | None:
    """Return the time of an event as PutEvents takes it; None if it is not a time."""
    if time is None or not _RFC3339.fullmatch(time):
        return None
    try:
        seconds = int(datetime.fromisoformat(time).timestamp())
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 else None


def _is_reserved(source: str) -> bool:
    return source.lower().startswith(_RESERVED)


def _check(options: EventsSinkOptions) -> None:
    if options.source is not None and (not options.source or _is_reserved(options.source)):
        raise ConfigError("source", "must not be empty or begin with aws., which AWS refuses")
    if not 1 <= len(options.detail_type) <= _MOST_DETAIL_TYPE:
        raise ConfigError("detail_type", f"must have 1 to {_MOST_DETAIL_TYPE} characters")


# --- the detail ----------------------------------------------------------------------------


def hops_of(event: Event) -> list[str]:
    """Return the buses and routes of oncebridge that *event* went through."""
    member = event.detail.get(_MEMBER)
    via = member.get("via") if isinstance(member, dict) else None
    is_ours = isinstance(via, list) and all(isinstance(hop, str) for hop in via)
    return via if via and is_ours else []


def detail_with_origin(delivery: Delivery, hop: str) -> bytes:
    """Return the detail as JSON, with the member that has the event's origin and *hop*."""
    event = delivery.event
    text = _detail(event)
    if _MEMBER not in event.detail:
        rest = text[1:] if event.detail else b"}"
        comma = b"," if event.detail else b""
        return b'{"%b":%b%b%b' % (_MEMBER.encode(), _encode(_origin(delivery, hop)), comma, rest)
    # The object is encoded again; the value of each other member stays as it is.
    members = _members(text)
    origin = _origin(delivery, hop)
    if via := hops_of(event):
        latest = {name: value for name, value in origin.items() if name in _OF_EACH_HOP}
        origin = {**_members(members[_MEMBER]), **latest, "via": [*via, hop]}
    else:
        origin["was"] = members[_MEMBER]
    return _encode({**members, _MEMBER: origin})


def _detail(event: Event) -> bytes:
    """Return the detail as it was received."""
    if event.bare:
        return event.raw.strip(_WHITESPACE)
    text = bytes(_event_detail(event.raw).detail)
    return _string(text).encode().strip(_WHITESPACE) if text.startswith(b'"') else text


def _origin(delivery: Delivery, hop: str) -> dict[str, Any]:
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
