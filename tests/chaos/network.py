"""
Every fault of the wire at every operation of every store, and at the HTTP sink, counted.

The trials are those of `tests/stores`, which judge one request each: that it ends in time, in the
words of the contract, that asked again it ends as if it had been asked once, and that nothing
that comes late changes a record. Here they are run all at once, and make one row of the table.
"""

import asyncio
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tests.servers import aws
from tests.stores.kinds import SHARED, Kind, Running, running
from tests.stores.operations import OPERATIONS, UPKEEP, ClaimingMany
from tests.stores.proxy import Fault, Proxy
from tests.stores.wire_faults import GRACE_S, TIMEOUT_S, Trial, complaints

from oncebridge.errors import StoreUnavailable
from oncebridge.events.event import parse
from oncebridge.http.server import Request, Response, Server
from oncebridge.sinks.api import Delivery, No, SinkAnswer, Unknown, Yes
from oncebridge.sinks.http import HttpSink

KINDS = {kind.name: kind for kind in SHARED}
_STAYS = (Fault.SWALLOW, Fault.HALF_OPEN, Fault.LATE_REPLY, Fault.LATE_REQUEST)
_BREAKS = (Fault.RESET_BEFORE, Fault.RESET_AFTER, Fault.CUT)
_HANGS = (Fault.SWALLOW, Fault.TRICKLE, Fault.HALF_OPEN)
_AT_ONCE = 8
_NOT_READY = "could not be prepared"
_LATE = (" took ", "no answer", "never ends", _NOT_READY)


@dataclass
class NetworkReport:
    """What became of all trials of one kind."""

    trials: int = 0
    faults: int = 0
    operations: int = 0
    wrong: int = 0
    again: int = 0
    """How many were run again, because they took too long beside others."""
    longest_s: float = 0.0
    allowed_s: float = TIMEOUT_S + GRACE_S
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def hung(self) -> int:
        return sum("never ends" in one or " took " in one for one in self.complaints)


def trials_of(kind: Kind) -> list[Trial]:
    """List every fault at every operation, and at every exchange that one may be broken off at."""
    made = [
        Trial(operation(), fault, elsewhere=elsewhere)
        for operation in OPERATIONS
        for fault in Fault
        # Where the connection stays, the server may think that we are still there.
        for elsewhere in ((False, True) if fault in _STAYS else (False,))
    ]
    in_time = [fault for fault in Fault if fault is not Fault.CRUMBS]
    made += [Trial(operation(), fault, is_warm=False) for operation in UPKEEP for fault in in_time]
    made += [
        Trial(operation(), fault, after=after, is_warm=False)
        for operation in OPERATIONS
        for fault in _BREAKS
        for after in range(3)
    ]
    made += [
        Trial(ClaimingMany(kind.many), fault, after=after)
        for fault in (*_BREAKS, *_HANGS)
        for after in range(2)
    ]
    made += [
        Trial(operation(), Fault.GARBAGE, garbage=lie, is_warm=False)
        for operation in (*OPERATIONS, *UPKEEP)
        for lie in kind.lies
    ]
    return made


def run_store(store: str) -> NetworkReport:
    """Put a store of this kind to all trials."""
    kind = KINDS[store]
    made, began = trials_of(kind), monotonic()
    with _identity(), _quietly(), running(kind) as server:
        judged, again = asyncio.run(_tried(server, made))
    # What only comes slowly gets the time that it takes.
    timed = [trial.seconds for trial in judged if trial.fault is not Fault.CRUMBS]
    return NetworkReport(
        trials=len(judged),
        faults=len({trial.fault for trial in judged}),
        operations=len({trial.operation.name for trial in judged}),
        wrong=sum(bool(trial.complaints) for trial in judged),
        again=again,
        longest_s=max(timed),
        seconds=monotonic() - began,
        complaints=[complaint for trial in judged for complaint in trial.complaints],
    )


async def _tried(server: Running, made: Sequence[Trial]) -> tuple[list[Trial], int]:
    """Run the trials, a few at a time; tell how many were run again, and alone."""
    judged: list[Trial] = []
    for at in range(0, len(made), _AT_ONCE):
        some = made[at : at + _AT_ONCE]
        await asyncio.gather(*(_try(server, trial) for trial in some))
        judged += some
    again = 0
    for at, trial in enumerate(judged):
        if trial.complaints and all(map(_is_of_time, trial.complaints)):
            again += 1
            judged[at] = _anew(trial)
            await _try(server, judged[at])
    return judged, again


async def _try(server: Running, trial: Trial) -> None:
    try:
        await complaints(server, [trial])
    except StoreUnavailable as error:  # of what it needs before the fault
        trial.complain(f"{_NOT_READY}: {error}")


def _is_of_time(complaint: str) -> bool:
    """
    Tell whether it may be us who were late, with so many threads on few cores.

    Then the trial is run again, alone. A wrong answer is never forgiven.
    """
    return any(words in complaint for words in _LATE)


def _anew(trial: Trial) -> Trial:
    kind = type(trial.operation)
    many = isinstance(trial.operation, ClaimingMany)
    operation = ClaimingMany(len(trial.operation.wants)) if many else kind()
    return Trial(
        operation,
        trial.fault,
        after=trial.after,
        is_warm=trial.is_warm,
        elsewhere=trial.elsewhere,
        garbage=trial.garbage,
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what drivers log of connections that broke; hundreds do."""
    logger = logging.getLogger("asyncio")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        gc.collect()  # some is told when it is collected
        logger.disabled = before


@contextmanager
def _identity() -> Iterator[None]:
    """Have credentials that open nothing, for the emulators."""
    before = {name: os.environ.get(name) for name in aws.AWS}
    os.environ.update(aws.AWS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- the sink ----------------------------------------------------------------------------

_SEND_S = 2.0
_EVENT = (
    b'{"version":"0","id":"3c9e1f70-0000-4000-8000-000000000001","detail-type":"Parcel Weighed",'
    b'"source":"com.example.depot","detail":{"parcel":1}}'
)


def run_sink() -> NetworkReport:
    """Put the HTTP sink to all faults, on a new connection and on one that has been used."""
    began = monotonic()
    report = asyncio.run(_sink_trials())
    report.seconds = monotonic() - began
    return report


async def _sink_trials() -> NetworkReport:
    arrived: set[str] = set()

    def take(request: Request, respond: Any) -> None:
        arrived.add((request.header(b"idempotency-key") or b"").decode().strip('"'))
        respond(Response(200))

    server = Server(take, host="127.0.0.1", port=0)
    await server.open()
    report = NetworkReport(faults=len(Fault), operations=2, allowed_s=_SEND_S + GRACE_S)
    try:
        for fault in Fault:
            for is_warm in (False, True):
                seconds, complaint = await _one_send(server.port, fault, arrived, is_warm=is_warm)
                report.trials += 1
                report.longest_s = max(report.longest_s, seconds)
                if complaint:
                    report.wrong += 1
                    which = "a used" if is_warm else "a new"
                    report.complaints.append(f"{fault.value}, {which} connection: {complaint}")
    finally:
        await server.aclose()
    return report


async def _one_send(
    port: int, fault: Fault, arrived: set[str], *, is_warm: bool
) -> tuple[float, str]:
    """Send through a fault; tell how long that took, and what is wrong with the answer."""
    with Proxy(port, late_s=1.5 * _SEND_S) as proxy:
        async with aclosing(HttpSink(f"http://127.0.0.1:{proxy.port}/sink")) as sink:
            if is_warm:
                await _sent(sink, _delivery())
            proxy.strike(fault)
            delivery, began = _delivery(), monotonic()
            answer = await _sent(sink, delivery)
            seconds = monotonic() - began
            has_arrived = delivery.idempotency_key in arrived
            proxy.heal()
            again = await _sent(sink, delivery)
    if seconds > _SEND_S + GRACE_S:
        return seconds, f"took {seconds:.1f} s"
    if fault is Fault.CRUMBS:
        return seconds, "" if isinstance(answer, Yes) else f"answered {answer}"
    if isinstance(answer, No) and has_arrived:
        return seconds, "arrived, although it says that nothing was sent"
    if not isinstance(answer, No | Unknown):
        return seconds, f"answered {answer}, although nothing came back"
    return seconds, "" if isinstance(again, Yes) else f"after the fault: answered {again}"


async def _sent(sink: HttpSink, delivery: Delivery) -> SinkAnswer:
    """Send as the gateway does: what has no answer in time may have arrived."""
    try:
        async with asyncio.timeout(_SEND_S):
            (answer,) = await sink.deliver([delivery])
    except TimeoutError:
        return Unknown("no answer in time")
    return answer


def _delivery() -> Delivery:
    return Delivery(parse(_EVENT), os.urandom(32))
