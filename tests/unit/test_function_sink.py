import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tests.faults.doubles import event

from oncebridge import (
    ConfigError,
    Delivery,
    Gateway,
    Never,
    Settings,
    SinkError,
    SinkRejected,
    Unknown,
    Verdict,
    Yes,
    parse,
)
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.sinks.function import FunctionSink
from oncebridge.stores.memory import MemoryStore

got: list = []


def collect(one):
    """The target of `from_url` below."""
    got.append(one)


not_callable = 5


@pytest.fixture(autouse=True)
def _empty():
    got.clear()


async def send(sink, *details):
    deliveries = [Delivery(parse(event(detail)), b"key") for detail in details or [{"n": 1}]]
    try:
        return list(await sink.deliver(deliveries))
    finally:
        await sink.aclose()


async def test_returning_is_a_yes_whatever_is_returned():
    for value in (None, False, 0, Never("ignored"), ValueError()):
        assert await send(FunctionSink(lambda _, value=value: value)) == [Yes()]


async def test_a_plain_function_runs_in_a_thread_of_its_own():
    threads = []
    sink = FunctionSink(lambda _: threads.append(threading.current_thread()))
    assert await send(sink) == [Yes()]
    assert threads[0] is not threading.main_thread()


async def test_an_async_function_runs_on_the_loop():
    loops = []

    async def function(one):
        loops.append(asyncio.get_running_loop())

    assert await send(FunctionSink(function)) == [Yes()]
    assert loops == [asyncio.get_running_loop()]


class Callable:
    def __call__(self, one):
        got.append(one.detail)


class AsyncCallable:
    async def __call__(self, one):
        await asyncio.sleep(0)
        got.append(one.detail)

    async def method(self, one):
        await asyncio.sleep(0)
        got.append(one.detail)

    @classmethod
    async def of_the_class(cls, one):
        await asyncio.sleep(0)
        got.append(one.detail)


async def later(extra, one):
    await asyncio.sleep(0)
    got.append(one.detail)


def wrapped(function):
    """A decorator as people write them: plain outside, whatever inside."""

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@pytest.mark.parametrize(
    "function",
    [
        Callable(),
        AsyncCallable(),
        AsyncCallable().method,
        AsyncCallable.of_the_class,
        functools.partial(later, "extra"),
        functools.partial(functools.partial(later), "extra"),
        functools.partial(AsyncCallable.method, AsyncCallable()),
        lambda one: later("extra", one),
        wrapped(AsyncCallable().method),
        functools.partial(wrapped(later), "extra"),
        functools.partial(AsyncCallable()),
    ],
    ids=[
        "callable",
        "async-callable",
        "async-method",
        "async-classmethod",
        "partial",
        "partial-of-partial",
        "partial-of-method",
        "lambda",
        "decorated-method",
        "partial-of-decorated",
        "partial-of-async-callable",
    ],
)
async def test_whatever_the_shape_the_function_has_run_before_the_yes(function):
    # A coroutine that nobody awaits, answered with a yes, is an event lost.
    assert await send(FunctionSink(function)) == [Yes()]
    assert got == [{"n": 1}]


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_is_unknown_and_not_quoted(is_async):
    def fail(one):
        raise SinkError("card 4111")

    async def fail_async(one):
        raise SinkError("card 4111")

    assert await send(FunctionSink(fail_async if is_async else fail)) == [Unknown("SinkError")]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_rejection_is_never(is_async):
    class NoSuchCard(SinkRejected):
        pass

    def fail(one):
        raise NoSuchCard("4111")

    async def fail_async(one):
        raise NoSuchCard("4111")

    assert await send(FunctionSink(fail_async if is_async else fail)) == [Never("NoSuchCard")]


async def test_an_error_in_what_was_returned_is_an_error():
    async def fail(one):
        raise SinkRejected("no")

    assert await send(FunctionSink(lambda one: fail(one))) == [Never("SinkRejected")]  # noqa: PLW0108


async def test_each_event_of_a_batch_has_an_answer_of_its_own():
    def choosy(one):
        if one.detail["n"] % 2:
            raise ValueError

    answers = await send(FunctionSink(choosy), *[{"n": n} for n in range(4)])
    assert answers == [Yes(), Unknown("ValueError"), Yes(), Unknown("ValueError")]


async def test_so_many_threads_run_at_once_and_no_more():
    both = threading.Barrier(2, timeout=5)
    sink = FunctionSink(lambda _: both.wait(), concurrency=2)
    assert sink.concurrency == 2
    deliveries = [Delivery(parse(event({"n": n})), b"key") for n in range(2)]
    answers = await asyncio.gather(*[sink.deliver([one]) for one in deliveries])
    assert answers == [[Yes()], [Yes()]]
    await sink.aclose()


async def test_closing_twice_and_using_again_is_harmless():
    sink = FunctionSink(collect)
    await sink.open()
    await sink.aclose()
    await sink.aclose()
    assert await send(sink) == [Yes()]
    assert await send(sink) == [Yes()]


def test_defaults_are_careful():
    sink = FunctionSink(collect)
    assert (sink.batch, sink.concurrency) == (1, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        FunctionSink(collect, concurrency=0)


# Was a bug: a call that hangs keeps its thread after the sink_timeout, and those behind it time out in the pool's
# queue without ever running, each counted as an attempt: one stuck call sends all others to the dead
# letters. (Gateway._slots is free again, the thread is not.)
async def test_a_call_that_hangs_does_not_give_up_the_events_behind_it():
    goes_on = threading.Event()

    def function(one):
        if one.detail["n"] == 0:
            goes_on.wait(10)

    settings = Settings(
        lease=timedelta(seconds=1),
        sink_timeout=timedelta(milliseconds=30),
        backoff=timedelta(milliseconds=1),
        max_backoff=timedelta(milliseconds=1),
        max_attempts=2,
        commit_budget=timedelta(milliseconds=100),
        margin=timedelta(milliseconds=100),
    )
    letters = MemoryDeadLetters()
    gateway = Gateway(store=MemoryStore(), sink=function, settings=settings, dead=letters)
    try:
        await gateway.process([event({"n": 0})])
        for _ in range(4):
            (outcome,) = await gateway.process([event({"n": 1})])
            assert outcome.verdict in {Verdict.FAILED, Verdict.DELIVERED}
            await asyncio.sleep(outcome.retry_after_ms / 1000)
        assert await letters.list() == []
    finally:
        goes_on.set()
        await gateway.aclose()


# --- addresses ------------------------------------------------------------------------------


async def test_an_address_names_a_function():
    assert await send(FunctionSink.from_url(f"python:{__name__}:collect")) == [Yes()]
    assert [one.detail for one in got] == [{"n": 1}]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("python:", "python:MODULE:FUNCTION"),
        ("python:json", "python:MODULE:FUNCTION"),
        ("python::dumps", "python:MODULE:FUNCTION"),
        ("python:json:", "python:MODULE:FUNCTION"),
        ("python:json:dumps:x", "python:MODULE:FUNCTION"),
        ("json:dumps", "python:MODULE:FUNCTION"),
        ("python:no_such_module:f", "no_such_module"),
        ("python:json:no_such_function", "no_such_function"),
        (f"python:{__name__}:not_callable", "is not a function"),
    ],
)
def test_a_wrong_address_is_refused_with_what_was_found(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        FunctionSink.from_url(url)
    assert caught.value.where == ""
    assert url in caught.value.message


# Was a bug: a module that fails while it is imported (a SyntaxError, a KeyError for a missing variable of the
# environment) raises that out of from_url instead of a ConfigError that names the address.
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_sink_module.py").write_text("import os\nos.environ['NO_SUCH_VARIABLE']\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="broken_sink_module"):
        FunctionSink.from_url("python:broken_sink_module:f")


def generating(event):
    yield event


async def generating_later(event):
    yield event


class Generating:
    def __call__(self, event):
        yield event


@pytest.mark.parametrize(
    "function",
    [
        generating,
        generating_later,
        Generating(),
        functools.partial(generating),
        functools.partial(generating_later),
    ],
)
def test_a_function_that_would_never_run_is_refused(function):
    with pytest.raises(ConfigError, match="yield"):
        FunctionSink(function)


@pytest.mark.parametrize("made", [generating, generating_later])
async def test_a_generator_is_no_yes(made):
    (answer,) = await send(FunctionSink(lambda one: (0, made(one))[1]))
    assert isinstance(answer, Unknown)
    assert "generator" in answer.reason


async def test_the_future_of_another_thread_is_waited_for():
    with ThreadPoolExecutor(1) as pool:
        assert await send(FunctionSink(lambda e: pool.submit(lambda: 1))) == [Yes()]
        failed = await send(FunctionSink(lambda e: pool.submit(lambda: 1 / 0)))
        assert failed == [Unknown("ZeroDivisionError")]


async def test_the_end_of_an_iterator_is_a_failure_like_any_other():
    async with asyncio.timeout(5):
        assert await send(FunctionSink(lambda e: next(iter([])))) == [Unknown("StopIteration")]
