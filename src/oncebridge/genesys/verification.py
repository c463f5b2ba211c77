"""
Deliver only events whose conversation exists in Genesys Cloud.

A `VerifyingSink` wraps a sink. It gets claimed events, so duplicates are never looked up. It
delivers verified events to the sink, and answers for the others itself:

| result of the lookup                  | answer                                             |
| ------------------------------------- | -------------------------------------------------- |
| exists                                | the sink's own                                     |
| (the event names no conversation)     | `on_unnamed`: the sink's own, or `Never`           |
| not found, event older than *settle*  | `on_unknown`: `Never`, or the sink's own           |
| not found, the event is younger       | `No`: the conversation may not be visible yet      |
| hidden from the OAuth client          | `on_unknown`                                       |
| none: down, too slow, throttled       | `on_api_outage`: `No`, or the sink's own           |
| no access                             | `Closed`, in any case: the operator has to fix it  |
| (rate limit: *lookups*)               | `No`, in any case                                  |

An event is refused finally only after a request that was sent after the event had settled; a
cached "not found" or "hidden" leads to another lookup.

Only an outage and a refused client count for the circuit breaker of the sink. The lookups of a
call run concurrently and take at most half of its time; the sink has the rest. A sink that writes
events and the store's records in one transaction still does. In shadow mode all events are
delivered at once, looked up at the same time, and only counted.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Final, TypeVar

from oncebridge.base.clock import Clock, Dice, SystemDice, ms, system_clock
from oncebridge.base.options import Problems, format_setting
from oncebridge.base.secrets import Secret
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.settings import Settings
from oncebridge.errors import ConfigError, SinkRejected
from oncebridge.events.event import Event
from oncebridge.events.key import compile_field
from oncebridge.events.timestamps import parse_instant
from oncebridge.genesys.api import (
    Api,
    ClientRefused,
    Exists,
    Hidden,
    Hosts,
    LookupFailed,
    LookupResult,
    Missing,
    is_conversation_id,
)
from oncebridge.genesys.lookups import BRIEFLY_S, LookupDelayed, Lookups
from oncebridge.service.genesys_options import GenesysOptions
from oncebridge.sinks.api import (
    Closed,
    Delivery,
    Joint,
    JointAnswer,
    JointSink,
    Never,
    No,
    Sink,
    SinkAnswer,
    Unknown,
    as_joint_sink,
)
from oncebridge.sinks.function import FunctionSink
from oncebridge.stores.api import Store

_log = logging.getLogger("oncebridge")

_WARN_EVERY_S: Final = 10.0
"""The minimum time between two warnings about the same problem."""
_MAX_SHADOW_LOOKUPS: Final = 1000
"""The maximum number of concurrent lookup batches in shadow mode."""
_SHADOW_GRACE_S: Final = 2.0
"""How long closing waits for lookups of shadow mode."""

_SNAPSHOTS: Final = re.compile(r"v2\.(users|routing\.queues)\.[^.]+\.conversations(\.[a-z]+)?")
"""Topics whose body is the conversation itself."""

_T = TypeVar("_T")
_A = TypeVar("_A")


class Verifier:
    """
    Looks up conversations for all routes, which share the OAuth client and the cached results.

    `counts` has the results of the events: `known`, `unknown`, `hidden` (not visible to the
    OAuth client), `settling`, `held`, `unverified` (delivered during an outage), `refused`,
    `unnamed` (without a conversation); and `lookups`, the requests.
    """

    def __init__(self, options: GenesysOptions, *, dice: Dice | None = None) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        rate_limit = RateLimit(options.lookups)
        self._api, self.conversation = _build(options, rate_limit)
        self.lookups = Lookups(self._api, rate_limit, options, self.counts, dice or SystemDice())
        self._unlogged: Counter[str] = Counter()
        self._next_warning_at: dict[str, float] = {}

    @staticmethod
    def check(options: GenesysOptions, settings: Settings) -> None:
        """Raise `ConfigError` if lookups would leave the sink too little time."""
        if 2 * options.timeout > settings.sink_timeout:
            raise ConfigError(
                "timeout",
                f"{format_setting(options.timeout)} is more than half of sink_timeout "
                f"({format_setting(settings.sink_timeout)}), and the sink needs time too",
            )

    def around(
        self, sink: Sink | Callable[[Event], Any], settings: Settings, clock: Clock = system_clock
    ) -> "VerifyingSink":
        """Return a sink that delivers only verified events to *sink*."""
        return VerifyingSink(sink, self, settings, clock=clock)

    async def open(self) -> None:
        """Log in; raise `ConfigError` if the OAuth client is refused, warn if the API is unavailable."""
        match await self._api.log_in():
            case ClientRefused(reason):
                raise ConfigError("genesys.client_secret", reason)
            case LookupFailed(reason):
                self.warn("oncebridge.genesys_is_away", error=reason)

    async def aclose(self) -> None:
        """Cancel pending lookups, and close all connections; may be called again."""
        await self.lookups.aclose()
        await self._api.aclose()

    def warn(self, trouble: str, /, **fields: object) -> None:
        """Log a warning, at most every 10 s, with the number of occurrences since the last one."""
        self._unlogged[trouble] += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_warning_at.get(trouble, now):
            self._next_warning_at[trouble] = now + _WARN_EVERY_S
            _log.warning(trouble, extra={"times": self._unlogged.pop(trouble), **fields})


class VerifyingSink:
    """Delivers the events that *verifier* has verified to *sink*, and answers for the others."""

    def __init__(
        self,
        sink: Sink | Callable[[Event], Any],
        verifier: Verifier,
        settings: Settings,
        *,
        clock: Clock = system_clock,
    ) -> None:
        self._sink: Sink = FunctionSink(sink) if callable(sink) else sink
        self._verifier = verifier
        self._settings = settings
        self._clock = clock
        self._joint: JointSink | None = None
        self._is_shadow = settings.mode == "shadow"
        self._shadow_lookups: set[asyncio.Task[list[SinkAnswer | None]]] = set()
        """The running lookups of shadow mode."""

    @property
    def batch(self) -> int:
        return self._sink.batch

    @property
    def concurrency(self) -> int:
        return self._sink.concurrency

    @property
    def verified(self) -> Mapping[str, int]:
        """The counts of the verifier, for all routes together."""
        return self._verifier.counts

    def around(self, sink: Sink | Callable[[Event], Any]) -> "VerifyingSink":
        """Wrap another sink in the same way."""
        return self._verifier.around(sink, self._settings, self._clock)

    def __getattr__(self, name: str) -> Any:
        # All other attributes are those of the wrapped sink.
        if name == "_sink":
            raise AttributeError(name)
        return getattr(self._sink, name)

    async def open(self) -> None:
        await self._sink.open()
        await self._verifier.open()

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        return await self._deliver_verified(deliveries, deliveries, self._sink.deliver)

    async def aclose(self) -> None:
        if self._shadow_lookups:
            await asyncio.wait(self._shadow_lookups, timeout=_SHADOW_GRACE_S)
        for task in self._shadow_lookups:
            task.cancel()
        with suppress(Exception):  # the sink has to be closed all the same
            await self._verifier.aclose()
        await self._sink.aclose()

    # --- exactly once ------------------------------------------------------------------

    def joins(self, store: Store) -> bool:
        """Return True if the wrapped sink writes events in the transactions of *store*."""
        self._joint = as_joint_sink(self._sink, store)
        return self._joint is not None

    async def deliver_jointly(self, joints: Sequence[Joint]) -> Sequence[JointAnswer]:
        assert self._joint is not None  # noqa: S101 - called only after joins()
        deliveries = [each.delivery for each in joints]
        return await self._deliver_verified(joints, deliveries, self._joint.deliver_jointly)

    # --- verifying ---------------------------------------------------------------------

    async def _deliver_verified(
        self,
        items: Sequence[_T],
        deliveries: Sequence[Delivery],
        send: Callable[[Sequence[_T]], Awaitable[Sequence[_A]]],
    ) -> "Sequence[_A | SinkAnswer]":
        """Deliver the verified events, and answer for the others."""
        if self._is_shadow:
            self._verify_in_shadow(deliveries)
            return await send(items)
        answers = await self._verify(deliveries)
        going = [item for item, answer in zip(items, answers, strict=True) if answer is None]
        sent = iter(await _send_safely(going, send) if going else ())
        return [next(sent) if answer is None else answer for answer in answers]

    def _verify_in_shadow(self, deliveries: Sequence[Delivery]) -> None:
        """Look the events up in the background; they are delivered in any case."""
        if len(self._shadow_lookups) >= _MAX_SHADOW_LOOKUPS:
            self._verifier.counts["held"] += len(deliveries)
            return
        task = asyncio.get_running_loop().create_task(self._verify(deliveries))
        self._shadow_lookups.add(task)
        task.add_done_callback(self._shadow_lookups.discard)

    async def _verify(self, deliveries: Sequence[Delivery]) -> list[SinkAnswer | None]:
        """Return the answer for each delivery that is refused; None for the verified ones."""
        named = [self._verifier.conversation(delivery.event) for delivery in deliveries]
        # Before the lookups: an event that settles during them is looked up again.
        left = [self._settles_in_ms(delivery.event) for delivery in deliveries]
        settled: dict[str, list[float]] = {}
        now = asyncio.get_running_loop().time()
        for name, left_ms in zip(named, left, strict=True):
            if is_conversation_id(name):
                when = settled.setdefault(name, [])
                when += [now + left_ms / 1000] if left_ms <= 0 else []
        found = await self._look_up(settled, self._lookup_time_s(deliveries))
        return [
            self._answer_for(name, left_ms, found)
            for name, left_ms in zip(named, left, strict=True)
        ]

    def _lookup_time_s(self, deliveries: Sequence[Delivery]) -> float:
        """Return how long lookups may take: half of the time of the call; the sink has the rest."""
        left_s = min([each.ends for each in deliveries]) - asyncio.get_running_loop().time()
        return max(min(left_s, self._settings.sink_timeout.total_seconds()) / 2, 0)

    async def _look_up(
        self, settled: Mapping[str, Sequence[float]], within_s: float
    ) -> dict[str, LookupResult | LookupDelayed]:
        """
        Return the results for the conversations, cached or looked up.

        *settled* has the times, in loop time, at which the events of each conversation settled.
        """
        found: dict[str, LookupResult | LookupDelayed] = {}
        unknown = []
        lookups = self._verifier.lookups
        for name, when in settled.items():
            known = lookups.remembered(name)
            if known is None or self._is_final(known, is_settled=bool(when)):
                unknown.append(name)
            else:
                found[name] = known
        if unknown:
            since = [max(settled[name], default=-inf) for name in unknown]
            asked = [
                lookups.find(name, within_s, since_s)
                for name, since_s in zip(unknown, since, strict=True)
            ]
            found |= zip(unknown, await asyncio.gather(*asked), strict=True)
        return found

    def _is_final(self, found: LookupResult, *, is_settled: bool) -> bool:
        """Return True if an event would be refused finally because of *found*."""
        is_negative = isinstance(found, Hidden) or (is_settled and isinstance(found, Missing))
        return is_negative and self._verifier.options.on_unknown == "dead"

    def _answer_for(
        self, name: Any, left_ms: float, found: Mapping[str, LookupResult | LookupDelayed]
    ) -> SinkAnswer | None:
        if name is None or name is False:  # the results of JMESPath without a match
            self._verifier.counts["unnamed"] += 1
            if self._verifier.options.on_unnamed == "deliver":
                return None
            return Never("the event names no conversation", unsent=True)
        if not is_conversation_id(name):
            # It never will be an id, so it is refused at once, and not quoted.
            return self._answer_unknown("the event has no valid conversation id")
        return self._answer(name, left_ms, found[name])

    def _answer(
        self, name: str, left_ms: float, found: LookupResult | LookupDelayed
    ) -> SinkAnswer | None:
        verifier, counts = self._verifier, self._verifier.counts
        match found:
            case Exists():
                counts["known"] += 1
                return None
            case Missing():
                if left_ms <= 0:
                    return self._answer_unknown(f"the conversation {name} is not known to Genesys")
                counts["settling"] += 1
                reason = f"the conversation {name} is not known to Genesys yet"
                return No(reason, int(min(left_ms, BRIEFLY_S * 1000)), too_early=True)
            case ClientRefused(reason):
                counts["refused"] += 1
                verifier.warn("oncebridge.genesys_refuses", error=reason)
                return Closed(reason)
            case Hidden():
                counts["hidden"] += 1
                return self._answer_unwanted(
                    f"Genesys does not show the conversation {name} to this client (403): its "
                    "role or divisions do not cover it"
                )
            case LookupDelayed(reason, wait_ms):
                counts["held"] += 1
                return No(reason, wait_ms, too_early=True)
            case LookupFailed(reason, wait_ms) if verifier.options.on_api_outage == "hold":
                counts["held"] += 1
                verifier.warn("oncebridge.genesys_is_away", error=reason)
                return No(reason, wait_ms)
            case LookupFailed(reason):
                counts["unverified"] += 1
                verifier.warn("oncebridge.sent_unverified", error=reason)
                return None

    def _answer_unknown(self, reason: str) -> SinkAnswer | None:
        self._verifier.counts["unknown"] += 1
        return self._answer_unwanted(reason)

    def _answer_unwanted(self, reason: str) -> SinkAnswer | None:
        if self._verifier.options.on_unknown == "dead":
            return Never(reason, unsent=True)
        self._verifier.warn("oncebridge.conversation_is_unknown", what=reason)
        return None

    def _settles_in_ms(self, event: Event) -> float:
        """
        Return how long the conversation of *event* may still be invisible in the API.

        If the time is over, the result is at most 0: how long ago it ended. An event without a
        time counts as settled, and so does one from the far future, which never would settle.
        """
        published_ms = _published_ms(event)
        settle_ms = ms(self._verifier.options.settle)
        if published_ms is None:
            return -inf
        left_ms = settle_ms - (self._clock() - published_ms)
        return left_ms if left_ms <= 2 * settle_ms else -inf


async def _send_safely(
    going: Sequence[_T], send: Callable[[Sequence[_T]], Awaitable[Sequence[_A]]]
) -> "Sequence[_A | SinkAnswer]":
    """Deliver, and return an answer for each item, also if the sink raises."""
    answer: SinkAnswer
    try:
        sent = await send(going)
        if len(sent) == len(going):
            return sent
        answer = Unknown(f"the sink gave {len(sent)} answers for {len(going)} events")
    except SinkRejected as error:
        answer = Never(type(error).__name__)
    except Exception as error:  # noqa: BLE001 - it may raise anything; its text may quote the event
        answer = Unknown(type(error).__name__)
    return [answer] * len(going)


def _conversation_of(event: Event) -> Any:
    """Return the conversation id of a Genesys event; None if it names none."""
    body = event.detail.get("eventBody")
    if not isinstance(body, dict):
        return None
    name, topic = body.get("conversationId"), event.detail.get("topicName")
    if name is None and isinstance(topic, str) and _SNAPSHOTS.fullmatch(topic):
        return body.get("id")
    return name


def _published_ms(event: Event) -> int | None:
    """Return when an event was published; without an envelope, from its detail."""
    text = event.time or event.detail.get("timestamp")
    return parse_instant(text) if isinstance(text, str) else None


# --- settings ------------------------------------------------------------------------------


def _build(options: GenesysOptions, rate_limit: RateLimit) -> tuple[Api, Callable[[Event], Any]]:
    """Return the API and the function that finds the conversation; raise all errors together."""
    problems = Problems()
    for name in ("region", "client_id", "client_secret"):
        if getattr(options, name) is None:
            problems.add(name, 'is missing, and verify = "genesys" needs it')
    client_id, secret = options.client_id or Secret(""), options.client_secret or Secret("")
    if ":" in client_id.reveal():
        problems.add("client_id", "has a colon, which Basic authentication cannot carry")
    api: Api | None = None
    find: Callable[[Event], Any] = _conversation_of
    if options.region is not None:
        with problems.caught():
            hosts = Hosts.of(options.region, "region")
            api = Api(hosts, client_id, secret, timeout=options.timeout, rate_limit=rate_limit)
    if options.conversation is not None:
        with problems.caught():
            find = compile_field(options.conversation, "conversation")
    problems.check()
    assert api is not None  # noqa: S101 - or it was raised
    return api, find
