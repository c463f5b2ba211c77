"""The function sink: calls a Python function once per event."""

import asyncio
import importlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from msgspec import Struct

from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, SinkRejected
from oncebridge.events.event import Event
from oncebridge.sinks.api import Delivery, Never, No, SinkAnswer, Unknown, Yes


class FunctionOptions(Struct, frozen=True, kw_only=True):
    """Options of the function sink."""

    concurrency: Annotated[int, Doc("How many calls may run at once.", "1", at_least=1)] = 1


class FunctionSink:
    """
    Call *function* with each event; if it returns, the event is delivered.

    A plain function runs in a thread, so that it may block; an `async def` runs on the loop. If it
    raises `SinkRejected`, the event goes to the dead letters. On any other exception the event is
    retried later, and counts as maybe delivered, since the function may have done part of its work.

    *concurrency* calls run at once. The default is one: most functions are not written to be
    called from several threads.
    """

    Options: ClassVar = FunctionOptions
    batch = 1

    def __init__(
        self, function: Callable[[Event], Awaitable[Any] | Any], *, concurrency: int = 1
    ) -> None:
        if concurrency < 1:
            raise ConfigError("concurrency", f"must be at least 1, not {concurrency}")
        called = getattr(function, "__call__", None)  # noqa: B004 - an object may have one
        if any(map(_is_generator, (function, called))):
            raise ConfigError(
                "", "the function is a generator (it has a yield), and would never run"
            )
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            called
        )
        self.concurrency = concurrency
        self._threads: ThreadPoolExecutor | None = None
        self._free = threading.Semaphore(concurrency)

    @classmethod
    def from_url(cls, url: str, options: FunctionOptions | None = None) -> Self:
        """Find the function of `python:MODULE:FUNCTION`."""
        match url.split(":"):
            case ["python", module, name] if module and name:
                pass
            case _:
                raise ConfigError(
                    "", f"{url!r}: the address of a function is python:MODULE:FUNCTION"
                )
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError("", f"{url!r}: {type(error).__name__}: {error}") from error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything
            # Without the text of the error, which may quote a secret.
            raise ConfigError("", f"{url!r}: importing it raised {_type_name(error)}") from None
        if not callable(found):
            raise ConfigError("", f"{url!r}: is not a function")
        return cls(found, concurrency=(options or FunctionOptions()).concurrency)

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        return [await self._call(delivery.event) for delivery in deliveries]

    async def aclose(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    async def _call(self, event: Event) -> SinkAnswer:
        try:
            if self._is_async:
                result = await self._function(event)
            elif self._free.acquire(blocking=False):
                result = await self._call_in_thread(event)
                if isinstance(result, Future):
                    result = asyncio.wrap_future(result)
                if inspect.isawaitable(result):
                    result = await result  # a plain wrapper around an async def
            else:
                # Calls that were cancelled still run, and this one would be queued after them.
                return No("the function is still busy with an earlier event")
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                return Unknown("the function returned a generator, whose body did not run")
        except SinkRejected as error:
            return Never(_type_name(error))
        except _Exit as error:
            return Unknown(str(error))
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            return Unknown(_type_name(error))
        except SystemExit as error:
            return Unknown(_type_name(error))
        return Yes()

    async def _call_in_thread(self, event: Event) -> Any:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self.concurrency, thread_name_prefix="oncebridge-sink"
            )
        call = self._threads.submit(self._call_safely, event)
        call.add_done_callback(lambda _: self._free.release())
        return await asyncio.wrap_future(call)

    def _call_safely(self, event: Event) -> Any:
        """Call the function; turn exceptions that would end the process into `_Exit`."""
        try:
            return self._function(event)
        except (SystemExit, KeyboardInterrupt, StopIteration) as error:
            raise _Exit(_type_name(error)) from None


class _Exit(Exception):
    """The function raised an exception that would end the process, or that a future cannot hold."""


def _is_generator(function: Any) -> bool:
    inner = inspect.unwrap(function) if callable(function) else function
    while isinstance(inner, partial):
        inner = inner.func
    return inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner)


def _type_name(error: BaseException) -> str:
    """Return the name of the error's type only: its text may quote the event."""
    return type(error).__name__
