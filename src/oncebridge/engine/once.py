"""
The decorator that protects one function.

    @once(store=SQLiteStore("seen.db"), key=["detail.orderId"])
    def charge(order): ...

The first call with an order runs the function; a duplicate call returns without running it, in
this process or any other with the same store. If the function raises, the caller gets the
exception, and the call may be repeated.
"""

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

from oncebridge.dead_letters.api import DeadLetters
from oncebridge.engine.blocking import BlockingGateway
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Outcome
from oncebridge.errors import EventError, HandedBack
from oncebridge.events.event import Event, from_object, parse
from oncebridge.events.rules import Rule
from oncebridge.sinks.function import FunctionSink
from oncebridge.stores.api import Store

P = ParamSpec("P")
R = TypeVar("R")
_MOST_CALLS = 1000
"""So many at once; a further one is handed back."""


def once(
    *,
    store: Store,
    key: str | Sequence[str] = "content",
    ignore: Sequence[str] = (),
    window: str = "6d",
    timeout: timedelta = timedelta(seconds=30),
    route: str | None = None,
    dead: DeadLetters | None = None,
    otherwise: Any = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """
    Run the function once per event, its first argument.

    The event may be an `Event`, the bytes of one, or a mapping; a mapping without an envelope is
    treated as the detail, so its fields are `detail.…` here, too. *key*, *ignore* and *window*
    are those of a rule. *timeout* is how long the function may take.

    A duplicate call returns *otherwise*. Raise `HandedBack` if the call is neither made nor known
    to have been made (another worker is running it, the store is down).

    *route* separates functions in one store; the default is the function's name.
    """

    def protect(function: Callable[P, R]) -> Callable[P, R]:
        name = route or f"{function.__module__}.{function.__qualname__}"
        spec = {"name": name, "key": key if isinstance(key, str) else list(key), "window": window}
        if ignore:
            spec["ignore"] = list(ignore)
        budgets = Settings()
        settings = Settings(
            sink_timeout=timeout,
            lease=max(budgets.lease, timeout + budgets.commit_budget + 2 * budgets.margin),
        )
        calls: dict[int, _Call] = {}
        is_async = inspect.iscoroutinefunction(function)

        async def await_call(event: Event) -> None:
            call = calls[id(event)]
            with call:
                call.value = await function(*call.args, **call.kwargs)  # type: ignore[misc] # it is async

        def make_call(event: Event) -> None:
            call = calls[id(event)]
            with call:
                call.value = function(*call.args, **call.kwargs)
                if inspect.isawaitable(call.value):
                    raise TypeError(
                        "the function returned an awaitable; make it an async def to protect it"
                    )

        gateway = Gateway(
            store=store,
            sink=FunctionSink(await_call if is_async else make_call, concurrency=_MOST_CALLS),
            rules=[Rule.parse(spec, "once")],
            dead=dead,
            route=name,
            settings=settings,
        )

        @functools.wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            call = _Call(args, kwargs)
            calls[id(call.event)] = call
            try:
                (outcome,) = await gateway.process([call.event])
            finally:
                del calls[id(call.event)]
            return call.result(outcome, otherwise)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> Any:
            call = _Call(args, kwargs)
            calls[id(call.event)] = call
            try:
                (outcome,) = blocking.process([call.event])
            finally:
                del calls[id(call.event)]
            return call.result(outcome, otherwise)

        if is_async:
            return cast("Callable[P, R]", awaited)
        blocking = BlockingGateway(gateway)
        return called

    return protect


class _Call:
    """One call of the function: its arguments, and how it ended."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not args:
            raise TypeError("a function protected by once takes the event as its first argument")
        self.args = args
        self.kwargs = kwargs
        self.event = _event(args[0])
        self.value: Any = None
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        """Keep the error that it raises, but not that its time is over."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, asyncio.CancelledError):
            self.error = error

    def result(self, outcome: Outcome, otherwise: Any) -> Any:
        if self.error is not None:
            raise self.error
        if outcome.forwarded:
            return self.value
        if outcome.acknowledge:
            return otherwise
        raise HandedBack(outcome.reason or outcome.verdict, outcome.retry_after_ms / 1000)


def _event(argument: Any) -> Event:
    if isinstance(argument, Event):
        return copy.copy(argument)  # two calls with the same object are two calls
    if isinstance(argument, bytes):
        return parse(argument, bare=True)
    if isinstance(argument, Mapping):
        return from_object(argument, bare=True)
    raise EventError("not-an-object", "once takes an Event, bytes, or a mapping")
