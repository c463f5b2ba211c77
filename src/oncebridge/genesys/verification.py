"""
Send only events whose conversation exists.

A `VerifyingSink` stands around a sink. It gets what the gateway has claimed, so only first
arrivals are ever looked up, passes on what may go, and answers for the rest:

| what Genesys says                     | answer                                             |
| ------------------------------------- | -------------------------------------------------- |
| it exists                             | the sink's own                                     |
| (the event names none)                | `on_unnamed`: the sink's own, or `Never`           |
| not known, the event is *settle* old  | `on_unknown`: `Never`, or the sink's own           |
| not known, the event is younger       | `No`: what was just published may be ahead of it   |
| not for us to see                     | `on_unknown`                                       |
| nothing: down, too slow, too much     | `on_api_outage`: `No`, or the sink's own           |
| no access                             | `Closed`, whatever the policy: somebody has to look|
| (no turn in time: *lookups*)          | `No`, whatever the policy                          |

An event is refused for good only by an answer to a request that was sent after the event had
settled; a remembered "not known" or "not for us to see" makes it ask again.

None of these answers but an outage and a refusal says anything about the sink, and its breaker
hears of no other. The look-ups of a call run at once and take at most half of its time; the sink
has the rest. A sink that keeps events with the store's records in one transaction still does. In
shadow mode everything is passed on at once, looked up beside that, and only counted.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any, Final, TypeVar

from oncebridge.base.clock import Clock, Dice, SystemDice, ms, system_clock
from oncebridge.base.options import Problems, written
from oncebridge.base.secrets import Secret
from oncebridge.engine.rate_limit import RateLimit
from oncebridge.engine.settings import Settings
from oncebridge.errors import ConfigError, SinkRejected
from oncebridge.events.event import Event
from oncebridge.events.key import compile_field
from oncebridge.genesys.api import (
    Api,
    Exists,
    Finding,
    Hidden,
    Hosts,
    Missing,
    Refused,
    Unsaid,
    is_plausible,
)
from oncebridge.genesys.lookups import BRIEFLY_S, Later, Lookups
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

_TELL_S: Final = 10.0
"""How often the same trouble is told at most."""
_MOST_BESIDE: Final = 1000
"""How many sends in shadow mode may be looked up at once."""
_LEAVE_S: Final = 2.0
"""How long what is looked up in shadow mode may take at the end."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_SNAPSHOTS: Final = re.compile(r"v2\.(users|routing\.queues)\.[^.]+\.conversations(\.[a-z]+)?")
"""Topics whose body is the conversation itself."""

_T = TypeVar("_T")
_A = TypeVar("_A")


class Verifier:
    """
    Who asks Genesys, for all routes: they share the OAuth client, and what was said.

    `counts` has what became of the events: `known`, `unknown`, `hidden` (not for us to see),
    `settling`, `held`, `unverified` (sent though nobody could say), `refused`, `unnamed` (no
    conversation in them); and `lookups`, the requests.
    """

    def __init__(self, options: GenesysOptions, *, dice: Dice | None = None) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        pace = RateLimit(options.lookups)
        self._api, self.conversation = _made(options, pace)
        self.lookups = Lookups(self._api, pace, options, self.counts, dice or SystemDice())
        self._untold: Counter[str] = Counter()
        self._told_at: dict[str, float] = {}

    @staticmethod
    def check(options: GenesysOptions, settings: Settings) -> None:
        """Raise `ConfigError` if look-ups would leave the sink too little time."""
        if 2 * options.timeout > settings.sink_timeout:
            raise ConfigError(
                "timeout",
                f"{written(options.timeout)} is more than half of sink_timeout "
                f"({written(settings.sink_timeout)}), and the sink needs time too",
            )

    def around(
        self, sink: Sink | Callable[[Event], Any], settings: Settings, clock: Clock = system_clock
    ) -> "VerifyingSink":
        """Make *sink* one that gets verified events only."""
        return VerifyingSink(sink, self, settings, clock=clock)

    async def open(self) -> None:
        """Log in; an OAuth client that is refused is a wrong setting, an API away may come."""
        match await self._api.log_in():
            case Refused(reason):
                raise ConfigError("genesys.client_secret", reason)
            case Unsaid(reason):
                self.warn("oncebridge.genesys_is_away", error=reason)

    async def aclose(self) -> None:
        """Break off what is asked, and let go of connections; safe to repeat."""
        await self.lookups.aclose()
        await self._api.aclose()

    def warn(self, trouble: str, /, **fields: object) -> None:
        """Tell of trouble now and then, and how often there was some since the last time."""
        self._untold[trouble] += 1
        now = asyncio.get_running_loop().time()
        if now >= self._told_at.get(trouble, now):
            self._told_at[trouble] = now + _TELL_S
            _log.warning(trouble, extra={"times": self._untold.pop(trouble), **fields})


class VerifyingSink:
    """Pass on to *sink* what *verifier* has found to be real, and answer for the rest."""

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
        self._beside: set[asyncio.Task[list[SinkAnswer | None]]] = set()
        """What is looked up beside the sends of shadow mode."""

    @property
    def batch(self) -> int:
        return self._sink.batch

    @property
    def concurrency(self) -> int:
        return self._sink.concurrency

    @property
    def verified(self) -> Mapping[str, int]:
        """What the verifier has counted, for all routes together."""
        return self._verifier.counts

    def around(self, sink: Sink | Callable[[Event], Any]) -> "VerifyingSink":
        """Stand around another sink in the same way."""
        return self._verifier.around(sink, self._settings, self._clock)

    def __getattr__(self, name: str) -> Any:
        # Whatever else is asked of a sink is asked of the one inside.
        if name == "_sink":
            raise AttributeError(name)
        return getattr(self._sink, name)

    async def open(self) -> None:
        await self._sink.open()
        await self._verifier.open()

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        return await self._pass_on(deliveries, deliveries, self._sink.deliver)

    async def aclose(self) -> None:
        if self._beside:
            await asyncio.wait(self._beside, timeout=_LEAVE_S)
        for task in self._beside:
            task.cancel()
        with suppress(Exception):  # the sink has to be closed all the same
            await self._verifier.aclose()
        await self._sink.aclose()

    # --- exactly once ------------------------------------------------------------------

    def joins(self, store: Store) -> bool:
        """Return whether the sink inside keeps its events where *store* keeps its records."""
        self._joint = as_joint_sink(self._sink, store)
        return self._joint is not None

    async def deliver_jointly(self, joints: Sequence[Joint]) -> Sequence[JointAnswer]:
        assert self._joint is not None  # noqa: S101 - or nobody would ask for this
        deliveries = [each.delivery for each in joints]
        return await self._pass_on(joints, deliveries, self._joint.deliver_jointly)

    # --- verifying ---------------------------------------------------------------------

    async def _pass_on(
        self,
        items: Sequence[_T],
        deliveries: Sequence[Delivery],
        send: Callable[[Sequence[_T]], Awaitable[Sequence[_A]]],
    ) -> "Sequence[_A | SinkAnswer]":
        """Send what may go, and answer for the rest."""
        if self._is_shadow:
            self._verify_beside(deliveries)
            return await send(items)
        answers = await self._verify(deliveries)
        going = [item for item, answer in zip(items, answers, strict=True) if answer is None]
        sent = iter(await _sent(going, send) if going else ())
        return [next(sent) if answer is None else answer for answer in answers]

    def _verify_beside(self, deliveries: Sequence[Delivery]) -> None:
        """Look up what is sent anyway, and keep nobody waiting for it."""
        if len(self._beside) >= _MOST_BESIDE:
            self._verifier.counts["held"] += len(deliveries)
            return
        task = asyncio.get_running_loop().create_task(self._verify(deliveries))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _verify(self, deliveries: Sequence[Delivery]) -> list[SinkAnswer | None]:
        """Return the answer to each delivery that may not go; None to those that may."""
        named = [self._verifier.conversation(delivery.event) for delivery in deliveries]
        # Before the look-ups: an event that settles meanwhile is asked for again.
        left = [self._settles_in_ms(delivery.event) for delivery in deliveries]
        settled: dict[str, list[float]] = {}
        now = asyncio.get_running_loop().time()
        for name, left_ms in zip(named, left, strict=True):
            if is_plausible(name):
                when = settled.setdefault(name, [])
                when += [now + left_ms / 1000] if left_ms <= 0 else []
        found = await self._found(settled, self._time_s(deliveries))
        return [
            self._judged(name, left_ms, found) for name, left_ms in zip(named, left, strict=True)
        ]

    def _time_s(self, deliveries: Sequence[Delivery]) -> float:
        """Return how long look-ups may take: half of what the call may, the rest is the sink's."""
        left_s = min([each.ends for each in deliveries]) - asyncio.get_running_loop().time()
        return max(min(left_s, self._settings.sink_timeout.total_seconds()) / 2, 0)

    async def _found(
        self, settled: Mapping[str, Sequence[float]], within_s: float
    ) -> dict[str, Finding | Later]:
        """
        Look conversations up, or remember what was said about them.

        *settled* has when the settled events of each conversation had settled, in loop time.
        """
        found: dict[str, Finding | Later] = {}
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

    def _is_final(self, found: Finding, *, is_settled: bool) -> bool:
        """Return whether an event would be refused for good because of *found*."""
        is_negative = isinstance(found, Hidden) or (is_settled and isinstance(found, Missing))
        return is_negative and self._verifier.options.on_unknown == "dead"

    def _judged(
        self, name: Any, left_ms: float, found: Mapping[str, Finding | Later]
    ) -> SinkAnswer | None:
        if name is None or name is False:  # as JMESPath says that it has found nothing
            self._verifier.counts["unnamed"] += 1
            if self._verifier.options.on_unnamed == "deliver":
                return None
            return Never("it names no conversation", unsent=True)
        if not is_plausible(name):
            # Nor will it ever be one, so it is not waited for; and not quoted.
            return self._unknown("what stands for its conversation is not the id of one")
        return self._answer(name, left_ms, found[name])

    def _answer(self, name: str, left_ms: float, found: Finding | Later) -> SinkAnswer | None:
        verifier, counts = self._verifier, self._verifier.counts
        match found:
            case Exists():
                counts["known"] += 1
                return None
            case Missing():
                if left_ms <= 0:
                    return self._unknown(f"the conversation {name} is not known to Genesys")
                counts["settling"] += 1
                reason = f"the conversation {name} is not known to Genesys yet"
                return No(reason, int(min(left_ms, BRIEFLY_S * 1000)), too_early=True)
            case Refused(reason):
                counts["refused"] += 1
                verifier.warn("oncebridge.genesys_refuses", error=reason)
                return Closed(reason)
            case Hidden():
                counts["hidden"] += 1
                return self._unwanted(
                    f"Genesys does not show the conversation {name} to this client (403): its "
                    "role or divisions do not cover it"
                )
            case Later(reason, wait_ms):
                counts["held"] += 1
                return No(reason, wait_ms, too_early=True)
            case Unsaid(reason, wait_ms) if verifier.options.on_api_outage == "hold":
                counts["held"] += 1
                verifier.warn("oncebridge.genesys_is_away", error=reason)
                return No(reason, wait_ms)
            case Unsaid(reason):
                counts["unverified"] += 1
                verifier.warn("oncebridge.sent_unverified", error=reason)
                return None

    def _unknown(self, reason: str) -> SinkAnswer | None:
        self._verifier.counts["unknown"] += 1
        return self._unwanted(reason)

    def _unwanted(self, reason: str) -> SinkAnswer | None:
        if self._verifier.options.on_unknown == "dead":
            return Never(reason, unsent=True)
        self._verifier.warn("oncebridge.conversation_is_unknown", what=reason)
        return None

    def _settles_in_ms(self, event: Event) -> float:
        """
        Return for how long the conversation of *event* may still be on its way to the API.

        Where that is over, the result is at most 0: how long ago it ended. An event without a
        time has always settled, and so has one from the far future, which never would.
        """
        published_ms = _published_ms(event)
        settle_ms = ms(self._verifier.options.settle)
        if published_ms is None:
            return -inf
        left_ms = settle_ms - (self._clock() - published_ms)
        return left_ms if left_ms <= 2 * settle_ms else -inf


async def _sent(
    going: Sequence[_T], send: Callable[[Sequence[_T]], Awaitable[Sequence[_A]]]
) -> "Sequence[_A | SinkAnswer]":
    """Send, and get an answer for each: what was answered for already must not suffer."""
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


def _named(event: Event) -> Any:
    """Find the conversation where Genesys puts it; None, if the event names none."""
    body = event.detail.get("eventBody")
    if not isinstance(body, dict):
        return None
    name, topic = body.get("conversationId"), event.detail.get("topicName")
    if name is None and isinstance(topic, str) and _SNAPSHOTS.fullmatch(topic):
        return body.get("id")
    return name


def _published_ms(event: Event) -> int | None:
    """Return when an event was published; one without an envelope has the time in its detail."""
    text = event.time or event.detail.get("timestamp")
    if not isinstance(text, str):
        return None
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        return None
    if instant.tzinfo is None:
        instant = instant.replace(tzinfo=UTC)
    return (instant - _EPOCH) // _MS


# --- settings ------------------------------------------------------------------------------


def _made(options: GenesysOptions, pace: RateLimit) -> tuple[Api, Callable[[Event], Any]]:
    """Make who is asked, and what finds the conversation; or raise all that is wrong."""
    problems = Problems()
    for name in ("region", "client_id", "client_secret"):
        if getattr(options, name) is None:
            problems.add(name, 'is missing, and verify = "genesys" needs it')
    client_id, secret = options.client_id or Secret(""), options.client_secret or Secret("")
    if ":" in client_id.reveal():
        problems.add("client_id", "has a colon, which Basic authentication cannot carry")
    api: Api | None = None
    find: Callable[[Event], Any] = _named
    if options.region is not None:
        with problems.caught():
            hosts = Hosts.of(options.region, "region")
            api = Api(hosts, client_id, secret, timeout=options.timeout, pace=pace)
    if options.conversation is not None:
        with problems.caught():
            find = compile_field(options.conversation, "conversation")
    problems.check()
    assert api is not None  # noqa: S101 - or it was raised
    return api, find
