"""Observes a running service: counts, reports, history and telemetry."""

import asyncio
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final

from oncebridge.base.clock import Clock, Dice
from oncebridge.engine.counters import Books
from oncebridge.engine.hooks import Decisions, TripHook
from oncebridge.events.rules import Rule
from oncebridge.observe.agreement import DisagreementWarnings, warn_of_new_sinks
from oncebridge.observe.duplicate_causes import DuplicateCauses
from oncebridge.observe.fleet import FleetMember, read
from oncebridge.observe.history import Mode
from oncebridge.observe.history_rows import RowMask
from oncebridge.observe.history_writer import HistoryWriter
from oncebridge.observe.masking import Mask
from oncebridge.observe.report import Report, State, StoreHealth
from oncebridge.observe.store_health import read_store_health
from oncebridge.observe.telemetry import from_environment
from oncebridge.observe.worker_counters import WorkerCounters
from oncebridge.service.addresses import scheme_of
from oncebridge.service.config import Config
from oncebridge.stores.api import Store

_CHARGED: Final = ("dynamodb", "s3")
"""Stores where each write costs money: history and counts are written less often."""
_LAG: Final = timedelta(seconds=10)
_IDLE_MS: Final = 10_000
"""A worker without work writes its counts this often."""
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9.-]+")


def worker_name(dice: Dice) -> str:
    """Return a unique name for this process that can be part of an address."""
    host = _UNSAFE.sub("-", platform.node())[:40] or "worker"
    return f"{host}-{os.getpid()}-{dice.tokens(1)[0][:3].hex()}"


def mode_of(config: Config) -> Mode:
    """Return how much history is kept: `auto` keeps some if there is a dashboard."""
    if config.history != "auto":
        return config.history
    return "sample" if config.dashboard else "off"


def mask_of(config: Config) -> Mask:
    """Return the mask for payloads that are shown."""
    return Mask(config.mask, shape_only=not config.dashboard_payloads)


class Monitor:
    """
    Observes a service.

    *look* returns the state of the service, *books* its counters; *rules* are those of its routes.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        *,
        look: Callable[["Monitor"], State],
        books: Callable[[], Mapping[str, Books]],
        rules: Mapping[str, Sequence[Rule]],
        clock: Clock,
        dice: Dice,
    ) -> None:
        self.name = worker_name(dice)
        self.started_ms = clock()
        self.store_health = StoreHealth()
        self._config = config
        self._store = store
        self._look = look
        self._books = books
        self._clock = clock
        self._dice = dice
        secrets = RowMask(mask_of(config))
        self._meters = WorkerCounters(
            clock,
            names_topics=not secrets.hide_topics,
            names_entities=not secrets.hide_entities,
        )
        self.travelled: TripHook = self._meters.travelled
        """Counts one call of the store or a sink."""
        self._repeats = DuplicateCauses(rules)
        self._member = FleetMember(store, dice=dice)
        self._is_sharing = config.share_counts
        self.is_charged = scheme_of(config.store.url) in _CHARGED
        self._has_compared_sinks = False
        self._shared: tuple[int, ...] = ()
        self._shared_ms = 0
        self._warnings = DisagreementWarnings(rules)
        mode = mode_of(config)
        self.recorder: HistoryWriter | None = None
        if mode != "off":
            self.recorder = HistoryWriter(
                store,
                self.name,
                mode=mode,
                keep=config.history_keep,
                payloads=mask_of(config) if config.dashboard_payloads else None,
                clock=clock,
                dice=dice,
                mask=mask_of(config),
                lag=_LAG if self.is_charged else timedelta(0),
            )
        self._telemetry = from_environment(os.environ, self.report, self.name)
        self.tracer = self._telemetry.tracer if self._telemetry else None
        self.context = self._telemetry.context if self._telemetry and self.tracer else None
        """Reads trace contexts of events, if they are traced."""

    def open(self) -> None:
        """Start exporting telemetry, on the running loop."""
        if self._telemetry is not None:
            self._telemetry.open()

    def decided(self, decisions: Decisions) -> None:
        """Count arrivals, and record those that the history keeps."""
        causes = self._repeats.causes_of(decisions)
        self._meters.decided(decisions, causes)
        if self.recorder is not None:
            self.recorder.decided(decisions, causes)

    def report(self) -> Report:
        """Return the current state and counts."""
        return Report(self._look(self), self._meters.counts(self._books()))

    async def measure(self, *, is_open: bool) -> None:
        """Measure the health of the store; one that is not open yet does not answer."""
        kind = scheme_of(self._config.store.url)
        if is_open:
            self.store_health = await read_store_health(kind, self._store, self._clock)
        else:
            self.store_health = StoreHealth(kind=kind, answers=False)

    async def share(self) -> None:
        """
        Write counts to the store, for other workers and the dashboard.

        Called once a second; writes if there was work, else every ten seconds, and always every
        ten seconds if writes cost money. Later counts are lost if this worker is killed.
        """
        if not self._is_sharing:
            return
        now_ms = self._clock()
        books = self._books().values()
        counted = tuple(number for book in books for number in (book.arrived, book.in_flight))
        has_worked = counted != self._shared and not self.is_charged
        if has_worked or not 0 <= now_ms - self._shared_ms < _IDLE_MS:
            self._shared, self._shared_ms = counted, now_ms
            await self._member.write(self.report())

    async def compare(self) -> None:
        """Read the reports of all workers, and log settings that contradict each other."""
        report = self.report()
        if not self._has_compared_sinks:
            sinks = {name: route.sink for name, route in report.state.routes.items()}
            await warn_of_new_sinks(self._store, sinks, self._dice)
            self._has_compared_sinks = True
        if self._is_sharing:
            self._warnings.log(await read(self._store, report))

    async def record(self) -> None:
        """Write history to the store."""
        if self.recorder is not None:
            await self.recorder.write()

    async def aclose(self, *, has_run: bool) -> None:
        """Write the last counts and history, if the service has run."""
        ends = [self._leave()] if has_run else []
        ends += [self._telemetry.aclose()] if self._telemetry is not None else []
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if error is not None:
                raise error

    async def _leave(self) -> None:
        if self._is_sharing:
            await self._member.leave(self.report())
        if self.recorder is not None:
            await self.recorder.write(last=True)
