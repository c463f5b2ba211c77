"""
Which runs there are, by name, in the sizes that were asked for.

A name is a kind of run and a store, as in `kill:redis`; who asks for `kill` gets all stores.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .harness import Run
from .service import ServiceRun

STORES = ("sqlite", "redis", "postgres", "dynamodb", "s3")
_SHARES = {"dynamodb": 2, "s3": 5}
_CALM = {"lease_s": 15, "sink_timeout_s": 10, "commit_budget_s": 4}


class Size(NamedTuple):
    """How much is to happen."""

    seed: int
    events: int = 100_000
    kills: int = 150

    def for_store(self, store: str) -> "Size":
        """Return the size for *store*: an emulator gets less, so that all rows fit into 90 minutes."""
        share = _SHARES.get(store, 1)
        return self._replace(events=self.events // share, kills=self.kills // share)

    @property
    def limit_s(self) -> float:
        """An hour for a run that takes minutes: only one that is stuck gets there."""
        return 600 + self.events / 30


FAR = {"latency_s": 0.02}
"""For a control: a sink so far away that a kill almost always hits a batch on its way."""


class Plan(NamedTuple):
    """One run, and what it is called."""

    name: str
    what: str
    run: Run | ServiceRun


def plans(stores: Sequence[str], size: Size) -> Iterator[Plan]:
    """Give all runs with real processes: of each store, and the controls."""
    for store in stores:
        yield from _of_each_store(store, size.for_store(store))
        yield from _OF_ITS_OWN[store](size)
    few: dict[str, Any] = {"seed": size.seed, "events": 2000, "kills": 25, **FAR}
    for control in ("mark-before", "mark-after"):
        title = f"control: {control.replace('-', ' ')}"
        yield Plan(f"control:{control}", title, Run(kind=f"controls:{control}", **few))
    if "postgres" in stores:
        apart = Run(store="postgres", sink="statement", apart=True, **few)
        yield Plan("control:two-transactions", "control: two transactions", apart)


def _of_each_store(store: str, size: Size) -> Iterator[Plan]:
    seed, events, kills = size
    killed = Run(
        seed=seed,
        store=store,
        events=events,
        kills=kills,
        stops=kills // 10,
        unclear=0.001,
        limit_s=size.limit_s,
    )
    yield Plan(f"kill:{store}", "kill -9 and freeze", killed)
    left = Run(
        seed=seed,
        store=store,
        events=max(events // 5, 2000),
        terms=max(kills // 3, 10),
        lease_s=7,
        sink_timeout_s=5,
        visibility_s=8,
        limit_s=size.limit_s,
    )
    yield Plan(f"leave:{store}", "asked to leave", left)
    if store != "sqlite":
        # A wire that is struck stands still for a second or two each time.
        cut = Run(
            seed=seed,
            store=store,
            events=max(events // 10, 2000),
            kills=kills // 10,
            cuts=max(kills // 3, 10),
            limit_s=size.limit_s,
        )
        yield Plan(f"cut:{store}", "kill -9, and the wire to the store", cut)


def _of_sqlite(size: Size) -> Iterator[Plan]:
    """Run the whole service between HTTP on both sides; each event is a request, so fewer."""
    seed, events, kills = size
    yield Plan("service:sqlite", "service, kill -9", _service("sqlite", size))
    spool = _service("sqlite", size, spool=True)
    yield Plan("spool:sqlite", "service with a spool, kill -9", spool)
    leaving = ServiceRun(
        seed=seed,
        events=max(events // 10, 2000),
        terms=max(kills // 3, 10),
        limit_s=size.limit_s,
        **_CALM,
    )
    yield Plan("service-leave:sqlite", "service, asked to leave", leaving)
    # The emulators take a hundred events a second or two.
    few, some = max(events // 10, 1500), max(kills // 5, 8)
    queue = _fed("queue", size, events=few, kills=some, services=3)
    yield Plan("queue:sqlite", "bus and queue, kill -9", queue)
    calm = _fed("queue", size, events=few // 2, terms=some, **_CALM)
    yield Plan("queue-leave:sqlite", "bus and queue, asked to leave", calm)
    stream = _fed("stream", size, events=few * 2, kills=some // 2)
    yield Plan("stream:sqlite", "stream that is resharded, in order, kill -9", stream)


def _of_redis(size: Size) -> Iterator[Plan]:
    yield Plan("service:redis", "service, kill -9", _service("redis", size))
    # But for "always", what the server forgets may come again; it stands in the table.
    for name, store in (
        ("crash-always", "redis:always"),
        ("crash", "redis"),
        ("crash-memory", "redis:memory"),
    ):
        yield Plan(f"{name}:redis", "kill -9, the server too", _crashing(store, size))
    shadow = _crashing("redis:always", size, shadow=True)
    yield Plan("shadow:redis", "shadow mode, kill -9, the server too", shadow)
    opens = _crashing("redis:always", size, fails_open=True)
    yield Plan("deliver:redis", "outages with `deliver`, kill -9, the server too", opens)


def _of_postgres(size: Size) -> Iterator[Plan]:
    seed, events, kills = size
    yield Plan("service:postgres", "service, kill -9", _service("postgres", size))
    yield Plan("crash:postgres", "kill -9, the server too", _crashing("postgres", size))
    joint = Run(
        seed=seed,
        store="postgres",
        sink="statement",
        events=events,
        kills=kills,
        stops=kills // 10,
        limit_s=size.limit_s,
    )
    yield Plan("joint:postgres", "one transaction, kill -9 and freeze", joint)
    for sink in ("statement", "table"):
        crashing = _crashing("postgres", size, sink=sink)
        what = f"one transaction ({sink}), the server too"
        yield Plan(f"joint-crash-{sink}:postgres", what, crashing)


def _of_an_emulator(_: Size) -> Iterator[Plan]:
    """Leave it alive: one that keeps its records in memory says nothing about the real one."""
    yield from ()


_OF_ITS_OWN: dict[str, Callable[[Size], Iterator[Plan]]] = {
    "sqlite": _of_sqlite,
    "redis": _of_redis,
    "postgres": _of_postgres,
    "dynamodb": _of_an_emulator,
    "s3": _of_an_emulator,
}


def _fed(feed: str, size: Size, **more: Any) -> ServiceRun:
    return ServiceRun(seed=size.seed, feed=feed, limit_s=size.limit_s, **more)


def _service(store: str, size: Size, *, spool: bool = False) -> ServiceRun:
    return ServiceRun(
        seed=size.seed,
        store=store,
        events=size.events // 2,
        kills=size.kills // 2,
        spool=spool,
        limit_s=size.limit_s,
    )


def _crashing(store: str, size: Size, **more: Any) -> Run:
    seed, events, kills = size
    return Run(
        seed=seed,
        store=store,
        **more,
        events=events // 2,
        kills=kills // 3,
        stops=kills // 30,
        crashes=max(kills // 10, 3),
        limit_s=size.limit_s,
    )
