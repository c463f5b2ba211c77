"""
The public API as people use it, read by type checkers and never run.

A line that stops type-checking here is a breaking change for somebody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Self, assert_type

from msgspec import Struct

from oncebridge import (
    BlockingGateway,
    Books,
    Closed,
    DeadLetter,
    DeadLetters,
    Decision,
    Decisions,
    Delivery,
    Event,
    First,
    Gateway,
    Hook,
    Never,
    No,
    Outcome,
    Rule,
    Settings,
    Sink,
    SinkAnswer,
    Store,
    Trace,
    Unknown,
    Unreadable,
    Verdict,
    Yes,
    from_object,
    once,
    parse,
    parse_all,
)
from oncebridge.base.options import Doc, Rate, Size, schema
from oncebridge.base.secrets import Secret
from oncebridge.dead_letters.file import FileDeadLetters
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.dead_letters.sqlite import SQLiteDeadLetters
from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.service import Service, gateways
from oncebridge.service.addresses import SinkPlace, SourcePlace, StorePlace
from oncebridge.service.config import Config, Route, Setup, load, with_sink
from oncebridge.sinks.file import FileSink
from oncebridge.sinks.function import FunctionOptions, FunctionSink
from oncebridge.sinks.http import HttpSink, HttpSinkOptions
from oncebridge.sinks.stdout import StdoutSink
from oncebridge.sources.api import Host, Source
from oncebridge.sources.file import FileSource
from oncebridge.sources.http import HttpSource, HttpSourceOptions
from oncebridge.stores.api import (
    ClaimAnswers,
    CommitAnswer,
    Commits,
    ExtendAnswer,
    Extensions,
    Memories,
    NoAnswer,
    Record,
    ReleaseAnswer,
    Releases,
    RememberAnswer,
    Wants,
)
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.sqlite import SQLiteStore

# --- what comes with the package fits the protocols -----------------------------------------

memory: Store = MemoryStore(max_keys=10)
sqlite: Store = SQLiteStore("seen.db", busy_timeout=timedelta(seconds=5))
dead_in_memory: DeadLetters = MemoryDeadLetters()
dead_on_disk: DeadLetters = SQLiteDeadLetters("dead.db")
function: Sink = FunctionSink(print, concurrency=4)
stores: list[Store] = [MemoryStore.from_url("memory:"), SQLiteStore.from_url("sqlite:seen.db")]
sinks: list[Sink] = [
    HttpSink("https://crm.example.com/", HttpSinkOptions(sign=(Secret("whsec_…"),))),
    HttpSink.from_url("https://crm.example.com/", HttpSinkOptions(concurrency=4)),
    FunctionSink.from_url("python:builtins:print", FunctionOptions(concurrency=4)),
    FileSink.from_url("file:out.ndjson"),
    StdoutSink.from_url("-"),
]
sources: list[Source] = [
    HttpSource.from_url("http://127.0.0.1:8080/", HttpSourceOptions(api_keys=(Secret("…" * 16),))),
    FileSource.from_url("-"),
]
dead: list[DeadLetters] = [
    FileDeadLetters.from_url("file:dead.ndjson"),
    MemoryDeadLetters.from_url("memory:"),
    SQLiteDeadLetters.from_url("sqlite:dead.db"),
]


# --- a store and a sink of one's own --------------------------------------------------------


class SilentStore:
    """A store that never answers, and inherits nothing."""

    async def open(self) -> None: ...

    async def claim(self, wants: Wants) -> ClaimAnswers:
        return ClaimAnswers.of(wants, [NoAnswer("silent") for _ in wants])

    async def commit(self, commits: Commits) -> list[CommitAnswer]:
        return [NoAnswer("silent") for _ in commits]

    async def release(self, releases: Releases) -> list[ReleaseAnswer]:
        return [NoAnswer("silent") for _ in releases]

    async def extend(self, extensions: Extensions) -> list[ExtendAnswer]:
        return [NoAnswer("silent") for _ in extensions]

    async def remember(self, memories: Memories) -> list[RememberAnswer]:
        return [NoAnswer("silent") for _ in memories]

    async def peek(self, keys: Sequence[bytes]) -> list[Record | None]:
        return [None for _ in keys]

    async def forget(self, keys: Sequence[bytes]) -> list[bool]:
        return [False for _ in keys]

    async def purge(self, limit: int = 1000) -> int:
        return 0

    async def now_ms(self) -> int:
        return 0

    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


class PostingSink:
    """A sink with plain attributes where the protocol has properties."""

    batch = 10
    concurrency = 4

    async def open(self) -> None: ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> list[SinkAnswer]:
        answers: list[SinkAnswer] = []
        for delivery in deliveries:
            assert_type(delivery.event, Event)
            assert_type(delivery.idempotency_key, str)
            assert_type(delivery.version, int | float | None)
            match delivery.attempt:
                case 1:
                    answers.append(Yes())
                case 2:
                    answers.append(No("refused", retry_after_ms=1000))
                case 3:
                    answers.append(Unknown("reset"))
                case 4:
                    answers.append(Closed("401"))
                case _:
                    answers.append(Never("400"))
        return answers

    async def aclose(self) -> None: ...


class MeasuredSink:
    """A sink with properties."""

    @property
    def batch(self) -> int:
        return 1

    @property
    def concurrency(self) -> int:
        return 1

    async def open(self) -> None: ...

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        return [Yes()] * len(deliveries)

    async def aclose(self) -> None: ...


class ListedDeadLetters:
    """Dead letters of one's own."""

    def __init__(self) -> None:
        self._letters: list[DeadLetter] = []

    async def open(self) -> None: ...

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        self._letters += letters

    async def list(self, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
        return self._letters[after : after + limit]

    async def drop(self, numbers: Sequence[int]) -> int:
        return len(numbers)

    async def aclose(self) -> None: ...


own_store: Store = SilentStore()
own_sink: Sink = PostingSink()
measured_sink: Sink = MeasuredSink()
own_dead: DeadLetters = ListedDeadLetters()


# --- a source of one's own, with options -----------------------------------------------------


class QueueOptions(Struct, frozen=True, kw_only=True):
    """What can be set about a queue."""

    wait: Annotated[timedelta, Doc("How long to wait for more.", example="20s")] = timedelta(
        seconds=20
    )
    most: Annotated[Size, Doc("The largest message.", at_least=1)] = Size(256 * 1024)
    rate: Annotated[Rate | None, Doc("How many to ask for.", example="5/s")] = None
    password: Annotated[Secret | None, Doc("Who asks.", example="env:QUEUE_PASSWORD")] = None


class QueueSource:
    """A source that inherits nothing."""

    Options: ClassVar = QueueOptions

    @classmethod
    def from_url(cls, url: str, options: QueueOptions | None = None) -> Self:
        if not url:
            raise ConfigError("", "there is no queue")
        return cls()

    async def open(self, host: Host) -> None:
        assert_type(host.batch, int)
        host.inbox.put([b"{}"], lambda at, answer: print(at, answer.acknowledge))

    async def run(self) -> None: ...

    def stop(self) -> None: ...

    def progress(self) -> tuple[int, int] | None:
        return None

    async def aclose(self) -> None: ...


own_source: Source = QueueSource.from_url("queue:events", QueueOptions(wait=timedelta(0)))


# --- a configuration --------------------------------------------------------------------------


def configure() -> Setup:
    try:
        setup = load("oncebridge.toml", environment={}, flags={"sink.concurrency": "3"})
    except ConfigErrors as errors:
        assert_type(errors.problems, tuple[ConfigError, ...])
        assert_type(errors.problems[0].where, str)
        raise
    assert_type(setup.config, Config)
    assert_type(setup.config.source, list[SourcePlace])
    assert_type(setup.config.store, StorePlace)
    assert_type(setup.config.lease, timedelta)
    assert_type(setup.config.settings(), Settings)
    assert_type(setup.routes, tuple[Route, ...])
    assert_type(setup.config.route, str)
    assert_type(gateways(setup), list[Gateway])
    assert_type(schema(Config), dict[str, Any])
    return with_sink(setup, SinkPlace.of("https://crm.example.com/", concurrency=3))


async def serve() -> None:
    service = Service(configure(), hooks=[count])
    await service.open()
    await service.run()
    assert_type(await service.close(timedelta(seconds=5)), bool)
    assert_type(service.counts(), dict[str, int])
    assert_type(service.books(), dict[str, Books])


# --- a gateway ------------------------------------------------------------------------------


def count(decisions: Sequence[Decision]) -> None:
    for decision in decisions:
        assert_type(decision.event, Event | Unreadable)
        assert_type(decision.outcome, Outcome)
        assert_type(decision.outcome.verdict, Verdict)


def count_columns(decisions: Decisions) -> None:
    assert_type(decisions.verdict, Verdict)
    assert_type(decisions[0], Decision)
    assert_type(decisions[1:], list[Decision])
    assert_type(decisions.events, Sequence[Event | Unreadable])
    assert_type(decisions.outcomes, Sequence[Outcome])


hook: Hook = count


class NoTraces:
    def arrived(self, route: str, events: Sequence[Event | Unreadable]) -> list[Trace | None]:
        return [None] * len(events)


gateway = Gateway(
    store=SilentStore(),
    sink=PostingSink(),
    rules=[
        Rule.parse({"name": "orders", "key": ["detail.orderId"]}, "rules[0]"),
        Rule(name="the rest"),
    ],
    dead=ListedDeadLetters(),
    route="crm",
    settings=Settings(lease=timedelta(minutes=1), mode="shadow", on_store_outage="deliver"),
    hooks=[hook, count_columns, lambda decisions: print(decisions.route)],
    tracer=NoTraces(),
    clock=lambda: 1_700_000_000_000,
)


def process(event: Event) -> None:
    print(event.detail["orderId"], event.id, event.raw)


async def process_async(event: Event) -> str:
    return event.source


plain = Gateway(store=MemoryStore(), sink=process)
on_the_loop = Gateway(store=MemoryStore(), sink=process_async)
short = Gateway(store=MemoryStore(), sink=lambda event: print(event.detail_type))


async def run() -> None:
    async with gateway as opened:
        assert_type(opened, Gateway)
        mixed: list[bytes | Event | Unreadable] = [
            b"{}",
            parse(b"{}"),
            Unreadable(b"", "not-base64", "no base64"),
        ]
        outcomes = await opened.process(
            mixed, within=timedelta(seconds=10), patience=timedelta(seconds=1)
        )
        assert_type(outcomes, list[Outcome])
        for outcome in outcomes:
            assert_type(outcome.acknowledge, bool)
            assert_type(outcome.retry_after_ms, int)
            assert_type(outcome.first, First | None)
            if outcome.verdict is Verdict.DUPLICATE and outcome.first is not None:
                print(outcome.first.id, outcome.first.arrived_ms)
        assert_type(await opened.drain(timedelta(seconds=5)), bool)
        assert_type(opened.books, Books)
        assert_type(opened.books.verdicts[Verdict.DELIVERED], int)
        assert_type(opened.books.counts(), dict[str, int])


def run_blocking() -> None:
    with BlockingGateway(plain) as blocking:
        assert_type(blocking.process([b"{}"]), list[Outcome])
        assert_type(blocking.close(), bool)
    asyncio.run(run())


# --- events ---------------------------------------------------------------------------------

read = parse_all([b"{}"])
assert_type(read, list[Event | Unreadable])
made = from_object({"detail": {"a": 1}}, bare=True)
assert_type(made, Event)
assert_type(made.canonical, bytes)
assert_type(made.replay_name, str | None)


# --- once keeps the signature ---------------------------------------------------------------


@once(store=MemoryStore(), key=["detail.orderId"], window="1h")
def charge(order: dict[str, int], rate: float, *, currency: str = "EUR") -> str:
    return f"{order['orderId'] * rate} {currency}"


@once(store=SQLiteStore("seen.db"), key="id", timeout=timedelta(seconds=5), otherwise="known")
async def charge_later(order: Event, rate: float) -> str:
    return f"{order.id} {rate}"


assert_type(charge({"orderId": 1}, 1.5, currency="USD"), str)
keeps_plain: Callable[[dict[str, int], float], str] = charge
keeps_async: Callable[[Event, float], Awaitable[str]] = charge_later


async def call() -> None:
    assert_type(await charge_later(made, 2.0), str)


charge({"orderId": 1}, "a lot")  # type: ignore[arg-type]
charge({"orderId": 1}, 1.5, country="US")  # type: ignore[call-arg]
Gateway(store=PostingSink(), sink=process)  # type: ignore[arg-type]
Gateway(store=MemoryStore(), sink=process, settings=Settings(mode="loud"))  # type: ignore[arg-type]
