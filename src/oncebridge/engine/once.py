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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

from oncebridge.dead_letters.api import DeadLetters
from oncebridge.engine.blocking import BlockingGateway
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Outcome
from oncebridge.errors import EventError, HandedBack, SinkRejected
from oncebridge.events.event import Event, from_object, parse
from oncebridge.events.rules import Rule
from oncebridge.sinks.api import Delivery, Never, SinkAnswer, Unknown, Yes
from oncebridge.stores.api import Store

P = ParamSpec("P")
R = TypeVar("R")


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
        calls = _CallSink(function)
        gateway = Gateway(
            store=store,
            sink=calls,
            rules=[Rule.parse(spec, "once")],
            dead=dead,
            route=name,
            settings=settings,
        )

        @functools.wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            with calls.made(args, kwargs) as call:
                (outcome,) = await gateway.process([call.event])
            return call.result(outcome, otherwise)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> Any:
            with calls.made(args, kwargs) as call:
                (outcome,) = blocking.process([call.event])
            return call.result(outcome, otherwise)

        if inspect.iscoroutinefunction(function):
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
        self.error: Exception | None = None

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


class _CallSink:
    """The sink that makes the calls."""

    batch = 1
    concurrency = 1000

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._calls: dict[int, _Call] = {}

    @contextmanager
    def made(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Call]:
        """Make a call when its event is delivered."""
        call = _Call(args, kwargs)
        self._calls[id(call.event)] = call
        try:
            yield call
        finally:
            del self._calls[id(call.event)]

    async def open(self) -> None:
        """Do nothing: there is nothing to open."""

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        (delivery,) = deliveries
        call = self._calls[id(delivery.event)]
        try:
            if self._is_async:
                call.value = await self._function(*call.args, **call.kwargs)
            else:
                call.value = await asyncio.to_thread(self._function, *call.args, **call.kwargs)
                if inspect.isawaitable(call.value):
                    raise TypeError(  # noqa: TRY301 - raised to the caller like any other
                        "the function returned an awaitable; make it an async def to protect it"
                    )
        except SinkRejected as error:
            call.error = error
            return [Never(type(error).__name__)]
        except Exception as error:  # noqa: BLE001 - raised to the caller
            call.error = error
            return [Unknown(type(error).__name__)]
        return [Yes()]

    async def aclose(self) -> None:
        """Do nothing: calls end by themselves."""
