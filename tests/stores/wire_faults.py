"""
Ask a store through a wire that is cut, and judge what it makes of it.

The promises: a call that could not be answered says so, in the words of the contract and in
time; asked again it ends as if it had been asked once; what arrives late changes nothing any
more; and the store needs nobody's help to work again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from oncebridge.errors import StoreError, StoreUnavailable
from oncebridge.stores.api import ClaimAnswers, NoAnswer, Store

from .kinds import Running
from .operations import Claiming, Committing, Operation
from .proxy import GARBAGE, Fault, Proxy

TIMEOUT_S = 0.7
GRACE_S = 3.0
LATE_S = 1.5 * TIMEOUT_S
_TRIES = (0.05, 0.2, 0.5)  # about as often as the ledger asks again
_ARRIVES = frozenset(
    {
        Fault.RESET_AFTER,
        Fault.SWALLOW,
        Fault.TRICKLE,
        Fault.LATE_REPLY,
        Fault.GARBAGE,
        Fault.CUT,
    }
)
"""The request is applied, and nobody hears of it."""
_NEVER_ARRIVES = frozenset({Fault.REFUSE, Fault.RESET_BEFORE, Fault.HALF_OPEN})

SILENCE = NoAnswer("for the whole call")
Opener = Callable[[int, float], Store]
"""From a port and a timeout to a store."""


@dataclass
class Trial:
    """One request, and what befalls it."""

    operation: Operation
    fault: Fault
    after: int = 0
    """How many exchanges pass before the fault strikes."""
    is_warm: bool = True
    """The store has done the same before: its connections and statements are ready."""
    elsewhere: bool = False
    """Another worker, whose wire is whole, makes the request first when it is made again."""
    garbage: bytes = GARBAGE

    struck: int = 0
    applied: bool = False
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def complain(self, what: str) -> None:
        where = f"{self.fault.value}, {self.operation.name}"
        if self.after:
            where += f" after {self.after} exchanges"
        if self.elsewhere:
            where += ", elsewhere first"
        if self.garbage != GARBAGE:
            where += f", answered by {self.garbage!r}"
        self.complaints.append(f"{where}: {what[:400]}")

    @property
    def _timeout_s(self) -> float:
        return 5.0 if self.fault is Fault.CRUMBS else TIMEOUT_S  # what only takes time gets it

    async def run(self, port: int, direct: Store, opened: Opener) -> None:
        """Put a store of one's own to it; *direct* is a handle whose wire is whole."""
        with Proxy(port, late_s=LATE_S, garbage=self.garbage) as proxy:
            async with aclosing(opened(proxy.port, self._timeout_s)) as store:
                await self._prepare(store)
                proxy.strike(self.fault, after=self.after)
                await self._through_the_fault(store, proxy)
                self.applied = await self.operation.is_applied(direct)
                self._judge_arrival()
                if self.elsewhere:
                    await self.again(direct, "with the fault still there")
                proxy.heal()
                if not self.operation.is_upkeep:
                    await self.again(store, "after the fault")
                await self._ask_another(store)
                await self._in_the_end(direct)

    async def _prepare(self, store: Store) -> None:
        """Make everything ready, in spite of a machine that may have other things to do."""
        await patiently(store.open)
        if self.is_warm:
            twin = type(self.operation)()
            await patiently(lambda: twin.prepare(store))
            await patiently(lambda: twin.ask(store))
        await patiently(lambda: self.operation.prepare(store))

    async def _through_the_fault(self, store: Store, proxy: Proxy) -> None:
        """Ask, and see that the answer is one of those that are allowed, in time."""
        now = asyncio.get_running_loop().time
        began = now()
        most_s = self._timeout_s + GRACE_S
        answer = await self._heard(self.operation.ask(store), within_s=most_s + 0.5)
        if answer is not SILENCE:
            self._judge(answer, proxy)
        elif self.fault is Fault.CRUMBS:
            self.complain("no answer, although nothing was lost")
        self.struck = proxy.struck
        self.seconds = now() - began
        if self.seconds > most_s:
            self.complain(f"took {self.seconds:.1f} s")

    def _judge(self, answer: Any, proxy: Proxy) -> None:
        if not self.operation.accepts(answer):
            self.complain(f"answered {answer}")
        elif self.fault is not Fault.CRUMBS and proxy.struck and not self.after:
            self.complain(f"answered {answer}, although nothing came back")

    def _judge_arrival(self) -> None:
        if self.after:
            return
        if not (self.struck or self.operation.is_upkeep or self.fault is Fault.REFUSE):
            self.complain("the fault never struck, so this says nothing")
        if self.applied and self.fault in _NEVER_ARRIVES:
            self.complain("applied, although the request never arrived")
        # One round trip each, by the contract, so the first reply was the reply.
        at_once = type(self.operation) in (Claiming, Committing)
        if self.is_warm and at_once and self.fault in _ARRIVES and not self.applied:
            self.complain("not applied by its one round trip")

    async def again(self, store: Store, when: str) -> None:
        """Ask again, as the ledger would, until there is an answer; it must be the right one."""
        for pause in _TRIES:
            answer = await self._heard(self.operation.ask(store))
            if answer is not SILENCE:
                if not self.operation.accepts(answer):
                    self.complain(f"{when}: answered {answer}")
                return
            await asyncio.sleep(pause)
        self.complain(f"{when}: still no answer")

    async def _ask_another(self, store: Store) -> None:
        """Ask something else: an answer that was still to come would be taken for this one's."""
        another = Claiming()
        for _ in _TRIES:
            answer = await self._heard(another.ask(store))
            if answer is not SILENCE:
                if not another.accepts(answer):
                    self.complain(f"another claim was answered {answer}")
                return
        self.complain("another claim got no answer")

    async def _in_the_end(self, store: Store) -> None:
        """See that all is as if there had been no fault, and stays so."""
        if self.complaints or self.operation.is_upkeep:
            return  # one complaint leads to another
        objection = await self._heard(self.operation.objection(store))
        if objection is SILENCE or objection:
            self.complain(f"in the end: {objection}")
        if self.fault not in (Fault.LATE_REQUEST, Fault.LATE_REPLY):
            return
        before = await self._heard(self.operation.state(store))
        await asyncio.sleep(max(0.0, LATE_S - self.seconds) + 0.3)
        after = await self._heard(self.operation.state(store))
        if after != before:
            self.complain(f"what came late changed {before} to {after}")

    async def _heard(self, call: Coroutine[Any, Any, Any], within_s: float = 10.0) -> Any:
        """Wait for an answer; `SILENCE` if there was none."""
        asking = asyncio.create_task(call)
        await asyncio.wait({asking}, timeout=within_s)
        if not asking.done():
            asking.cancel()
            await asyncio.wait({asking})
            self.complain("never ends")
            return SILENCE
        error = asking.exception()
        if error is None:
            return SILENCE if is_silent(asking.result()) else asking.result()
        # Who answers nonsense in the right form may do so for ever.
        allowed = StoreUnavailable if self.garbage == GARBAGE else StoreError
        if not isinstance(error, allowed) or not str(error):
            self.complain(f"raised {type(error).__name__}: {error}")
        return SILENCE


async def patiently(call: Callable[[], Awaitable[Any]]) -> None:
    """Do what has nothing to do with a fault, where the timeout is a short one."""
    for _ in range(5):
        try:
            await call()
        except (StoreUnavailable, OSError):  # the latter from stores that are wrong
            await asyncio.sleep(0.1)
        else:
            return
    await call()


def is_silent(answer: Any) -> bool:
    """Tell whether there was no answer, for a part of it at least."""
    answers = answer if isinstance(answer, list | ClaimAnswers) else [answer]
    return any(isinstance(one, NoAnswer) for one in answers)


async def complaints(
    running: Running, trials: list[Trial], opened: Opener | None = None
) -> list[str]:
    """Run *trials* beside each other, each on a wire of its own: most of it is waiting."""
    through = opened or (lambda port, timeout_s: running.store(port=port, timeout_s=timeout_s))
    places = asyncio.Semaphore(running.kind.at_once)

    async def run(trial: Trial, direct: Store) -> None:
        trial.operation.slack_ms = int(running.kind.slack_s * 1000)
        async with places:
            await trial.run(running.port, direct, through)

    async with running.store() as direct:
        await asyncio.gather(*(run(trial, direct) for trial in trials))
    return [complaint for trial in trials for complaint in trial.complaints]
