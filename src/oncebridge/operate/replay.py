"""
Replays and drops dead letters.

The order of the steps loses no event, wherever the process dies:

    check     if the event was delivered in the meantime, drop the dead letter
    forget    remove the record of its death, or it would be a duplicate
    process   on its route, or the one named instead, as if it had just arrived
    drop      the dead letter, once the event is acknowledged

Between the steps the dead letter still exists, and the next replay continues from there. An
event that dies again becomes a new dead letter before the old one is dropped.

Both actions are written to the operator log first, from `oncebridge dead` and the dashboard.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.dead_letters.api import DeadLetter, DeadLetters
from oncebridge.engine import pauses
from oncebridge.engine.router import RouteEntry, Router, RouterAnswer
from oncebridge.engine.verdict import Verdict
from oncebridge.events.event import Event
from oncebridge.operate.explain.expected_verdict import belongs_to_event, contents, touched
from oncebridge.operate.identity import Identities
from oncebridge.operate.operator_log import OperatorLog
from oncebridge.service.config import Setup
from oncebridge.stores import transitions
from oncebridge.stores.api import Fate, Record, Store

_PAGE = 100


class DeadLetterFilter(Struct, frozen=True):
    """Selects dead letters: by number, or all with the same reason and route."""

    numbers: tuple[int, ...] = ()
    """Empty for all."""
    reason: str = ""
    route: str | None = None
    up_to: int | None = None
    """The highest number: events that die again during a replay are not replayed."""

    def takes(self, letter: DeadLetter) -> bool:
        return (
            (not self.reason or letter.reason == self.reason)
            and (self.route is None or letter.route == self.route)
            and (self.up_to is None or letter.number <= self.up_to)
        )


async def select(dead: DeadLetters, choice: DeadLetterFilter) -> AsyncIterator[DeadLetter]:
    """Yield the selected dead letters, oldest first; they may be dropped in the meantime."""
    if choice.numbers:
        for number in sorted(set(choice.numbers)):
            for letter in await dead.list(after=number - 1, limit=1):
                if letter.number == number and choice.takes(letter):
                    yield letter
        return
    after = 0
    while page := await dead.list(after=after, limit=_PAGE):
        after = page[-1].number
        for letter in page:
            if choice.takes(letter):
                yield letter


class Replayed(Struct, frozen=True):
    """The result for one dead letter."""

    number: int
    gone: bool
    """The dead letter was dropped."""
    verdict: Verdict | None
    """None if it was not processed."""
    reason: str = ""

    @property
    def is_resolved(self) -> bool:
        """Return whether it needs no more attention."""
        return self.gone and self.verdict is not Verdict.DEAD

    @property
    def result(self) -> str:
        """The result in a word or two."""
        if self.gone and self.verdict is Verdict.DEAD:
            return "dead again"
        return "kept" if not self.gone else self.verdict.value if self.verdict else "gone"


class Replayer:
    """
    Replays dead letters through *router*, which is open.

    *before* is called with the dead letters that are about to be replayed. All go to the route
    *to*, if given: then claim and key are those of that route, and the records of their own
    routes are left alone.
    """

    def __init__(
        self,
        setup: Setup,
        router: Router,
        *,
        before: Callable[[Sequence[DeadLetter]], Awaitable[None]],
        to: str | None = None,
    ) -> None:
        self._store: Store = setup.config.store.opened
        self._dead: DeadLetters = setup.config.dead.opened
        self._identities = Identities(setup)
        self._before = before
        self._to = to
        self._all = router
        self._ways = {
            gateway.route: Router(
                [RouteEntry(gateway)], dead=self._dead, settings=setup.config.settings()
            )
            for gateway in router.gateways
        }

    async def replay(
        self, letters: Sequence[DeadLetter], *, within: timedelta | None = None
    ) -> list[Replayed]:
        """
        Replay each dead letter, and return the results in order.

        *within* limits the time: an event that cannot be sent by then stays a dead letter.
        """
        done: dict[int, Replayed] = {}
        if self._to is not None:
            letters = [self._moved(letter, self._to) for letter in letters]
        ready = await self._without_paused_routes(letters, done)
        if ready:
            await self._before(ready)
        ready = await self._not_delivered_since(ready, done)
        ready = await self._forgotten(ready, done)
        for router, batch in self._by_router(ready):
            answers = await router.process([letter.raw for letter in batch], within=within)
            for letter, answer in zip(batch, answers, strict=True):
                done[letter.number] = _replayed(letter, answer)
            await self._dead.drop([o.number for o in batch if done[o.number].gone])
        return [done[letter.number] for letter in letters]

    def _moved(self, letter: DeadLetter, route: str) -> DeadLetter:
        """Return *letter* as of *route*, with the rule and the key of that route."""
        if letter.route == route:
            return letter
        (gateway,) = self._ways[route].gateways
        is_shadow = gateway.settings.mode == "shadow"
        plan = gateway.rules.plan_arrival(self._identities.read(letter.raw), shadow=is_shadow)
        return replace(letter, route=route, rule=plan.rule.name, key=plan.key)

    def _route_of(self, letter: DeadLetter) -> str | None:
        """Return the route of a dead letter; None if it goes to all that its event matches."""
        return self._to or (letter.route if letter.rule else None)

    async def _without_paused_routes(
        self, letters: Sequence[DeadLetter], done: dict[int, Replayed]
    ) -> list[DeadLetter]:
        """Return those whose route exists and is not paused."""
        routes = list(self._ways)
        states = await pauses.paused(self._store, routes)
        paused = {route for route, is_paused in zip(routes, states, strict=True) if is_paused}
        ready = []
        for letter in letters:
            route = self._route_of(letter)
            if route is not None and route not in self._ways:
                why = (
                    f"there is no route {route!r} in this configuration; "
                    "`oncebridge dead replay --to ROUTE` uses another"
                )
                _keep(letter, why, done)
            elif route in paused or (route is None and paused):
                _keep(letter, "the route is paused", done)
            else:
                ready.append(letter)
        return ready

    async def _not_delivered_since(
        self, letters: Sequence[DeadLetter], done: dict[int, Replayed]
    ) -> list[DeadLetter]:
        """Drop those whose event was delivered in the meantime; return the others."""
        records = await self._look([letter.key for letter in letters if letter.key])
        now_ms = await self._store.now_ms()
        ready, delivered = [], []
        for letter in letters:
            record = records.get(letter.key)
            if record is not None and self._is_delivered(letter, record, now_ms):
                delivered.append(letter.number)
                done[letter.number] = Replayed(
                    letter.number, True, Verdict.DUPLICATE, "it was delivered in the meantime"
                )
            else:
                ready.append(letter)
        await self._dead.drop(delivered)
        return ready

    def _is_delivered(self, letter: DeadLetter, record: Record, now_ms: int) -> bool:
        """Return whether *record* shows that this very event was delivered."""
        if record.fate is not Fate.DELIVERED or transitions.state(record, now_ms) != "done":
            return False
        return belongs_to_event(record, self._contents_of(letter))

    async def _forgotten(
        self, letters: Sequence[DeadLetter], done: dict[int, Replayed]
    ) -> list[DeadLetter]:
        """Remove the records of these deaths; return those that no worker holds."""
        own = {letter.number: self._contents_of(letter) for letter in letters}
        records = await self._look([key for each in own.values() for key in each])
        now_ms = await self._store.now_ms()
        ready = []
        gone: list[bytes] = []
        for letter in letters:
            there = [record for key in own[letter.number] if (record := records.get(key))]
            held = [r for r in there if transitions.state(r, now_ms) == "claimed"]
            if held:
                left_s = max(record.until_ms - now_ms for record in held) / 1000
                why = f"held, or waiting for its next attempt, for {left_s:.1f} s more"
                _keep(letter, why, done, Verdict.BUSY)
                continue
            gone += [
                record.key
                for record in there
                if record.fate is not Fate.DELIVERED
                and belongs_to_event(record, own[letter.number])
            ]
            ready.append(letter)
        if gone:
            await self._store.forget(list(dict.fromkeys(gone)))
        return ready

    async def _look(self, keys: Sequence[bytes]) -> dict[bytes, Record]:
        return await _peek(self._store, keys)

    def _contents_of(self, letter: DeadLetter) -> dict[bytes, bytes]:
        return contents_of(letter, self._identities)

    def _by_router(self, letters: Sequence[DeadLetter]) -> list[tuple[Router, list[DeadLetter]]]:
        """Group by route; a dead letter without one goes to all routes that its event matches."""
        batches: dict[str | None, list[DeadLetter]] = {}
        for letter in letters:
            batches.setdefault(self._route_of(letter), []).append(letter)
        return [(self._ways[name] if name else self._all, each) for name, each in batches.items()]


# --- dropping -----------------------------------------------------------------------------


class LetterToDrop(Struct, frozen=True):
    """A dead letter to drop, without its payload."""

    number: int
    route: str
    key: bytes
    own: dict[bytes, bytes]
    """Every key of its event, with its content."""

    @classmethod
    def of(cls, letter: DeadLetter, identities: Identities) -> "LetterToDrop":
        return cls(letter.number, letter.route, letter.key, contents_of(letter, identities))


async def drop(
    doomed: Sequence[LetterToDrop],
    dead: DeadLetters,
    store: Store | None,
    operator_log: OperatorLog,
) -> int:
    """
    Drop dead letters for good, after writing to the operator log; return how many there were.

    *store* tells which keys belong to other events by now; without it, all are logged.
    """
    owns = [each.own for each in doomed]
    if store is not None:
        keys = await keys_of(owns, store)
    else:
        keys = {key: one for own in owns for key, one in own.items()}
    await _write(operator_log, "drop", doomed, keys)
    return await dead.drop([each.number for each in doomed])


# --- operator log -------------------------------------------------------------------------


async def write_replay(
    setup: Setup, operator_log: OperatorLog, letters: Sequence[DeadLetter]
) -> None:
    """Log that *letters* are about to be replayed."""
    identities = Identities(setup)
    owns = [contents_of(letter, identities) for letter in letters]
    await _write(operator_log, "replay", letters, await keys_of(owns, setup.config.store.opened))


async def _write(
    operator_log: OperatorLog,
    verb: str,
    letters: Sequence[DeadLetter] | Sequence[LetterToDrop],
    keys: Mapping[bytes, bytes],
) -> None:
    await operator_log.write(
        f"dead {verb}",
        routes=sorted({letter.route for letter in letters}),
        numbers=[letter.number for letter in letters],
        keys=keys,
    )


def contents_of(letter: DeadLetter, identities: Identities) -> dict[bytes, bytes]:
    """Return the keys of an event, by the rules of then and of now, with its content."""
    own = {letter.key: b""} if letter.key else {}
    event = identities.read(letter.raw)
    if not letter.rule or not isinstance(event, Event):
        return own
    way = identities.on(letter.route, event)
    return own | contents(way) if way is not None else own


async def keys_of(owns: Sequence[Mapping[bytes, bytes]], store: Store) -> dict[bytes, bytes]:
    """Return the contents of all events, without keys that belong to other events."""
    found = await _peek(store, [key for own in owns for key in own])
    return {key: one for own in owns for key, one in touched(own, found).items()}


async def _peek(store: Store, keys: Sequence[bytes]) -> dict[bytes, Record]:
    keys = list(dict.fromkeys(keys))
    found = await store.peek(keys) if keys else []
    return {record.key: record for record in found if record is not None}


def _keep(
    letter: DeadLetter, reason: str, done: dict[int, Replayed], verdict: Verdict | None = None
) -> None:
    done[letter.number] = Replayed(letter.number, False, verdict, reason)


def _replayed(letter: DeadLetter, answer: RouterAnswer) -> Replayed:
    # A conflict that its rule does not deliver became a new dead letter, or was dropped.
    is_kept_back = answer.verdict is Verdict.CONFLICT and not any(
        outcome.forwarded for _, outcome in answer.outcomes
    )
    verdict = Verdict.DEAD if is_kept_back else answer.verdict
    return Replayed(letter.number, answer.acknowledge, verdict, answer.reason)
