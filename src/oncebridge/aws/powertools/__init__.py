"""
The idempotency decorators of Powertools for AWS Lambda, on oncebridge's protocol.

    @idempotent_function(
        data_keyword_argument="order", config=config, persistence_store="dynamodb://orders-once"
    )
    def charge(order): ...

Names, arguments and errors are those of `aws_lambda_powertools.utilities.idempotency`, as far as
their meaning can be kept. Powertools itself is not needed.

A duplicate call gets the result of the first one, as JSON. The store keeps it in a second record,
named by the event's key and generation and written before the commit: a call that finds the event
done finds its result, and never that of another window.
"""

import asyncio
import dataclasses
import functools
import inspect
import json
import logging
import os
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast

from oncebridge.aws.handler import Context
from oncebridge.aws.powertools.background_loop import BackgroundLoop, ProtectedCall
from oncebridge.aws.powertools.payload import digest, encoded, finder, is_missing, plain
from oncebridge.base.clock import ms
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.settings import Settings
from oncebridge.engine.verdict import Outcome, Verdict
from oncebridge.errors import ConfigError, HandedBack, OncebridgeError, StoreError
from oncebridge.events.event import Event, parse
from oncebridge.events.key import make_key
from oncebridge.events.rules import Rule
from oncebridge.service.addresses import backend
from oncebridge.sinks.api import Delivery, No, SinkAnswer, Unknown, Yes
from oncebridge.stores.api import Commit, Commits, Fate, Memories, Memory, NoAnswer, Store

_log = logging.getLogger("oncebridge")
P = ParamSpec("P")
R = TypeVar("R")

_LONGEST: Final = timedelta(minutes=15)
"""The longest time a Lambda function may run."""
_SPARE: Final = timedelta(seconds=1)
"""This much of the time left is not used for waiting: the function needs some of it."""
_MARGIN: Final = timedelta(milliseconds=250)
"""A call with less time left is not started, and one that is started is given up only this long
after its time: a call that ends in the last moment is recorded, too."""
_FREE_AGAIN_S: Final = 0.002
"""Until a released claim is free: a millisecond, by the store's clock."""
_FIXED: Final = (
    "event_key_jmespath",
    "payload_validation_jmespath",
    "jmespath_options",
    "expires_after_seconds",
)
_SWITCH: Final = "POWERTOOLS_IDEMPOTENCY_DISABLED"
_DISABLED: Final = ("1", "y", "yes", "t", "true", "on")
_HEAD: Final = 8
"""Every store keeps at least this many bytes of a done record's generation."""
_MOST: Final = 64 << 10


class IdempotencyAlreadyInProgressError(HandedBack):
    """Another call is running, and did not end in the time there was: retry."""


class IdempotencyPersistenceLayerError(HandedBack):
    """The call was not made: the store did not answer, or there is no time left. Retry."""


class IdempotencyKeyError(OncebridgeError):
    """The payload has no key, or a key cannot be made from it."""


class IdempotencyValidationError(OncebridgeError):
    """The key is known with another payload."""


class Serializer(Protocol):
    """Converts a result to JSON and back."""

    def to_dict(self, data: Any) -> Any: ...

    def from_dict(self, data: Any) -> Any: ...


class IdempotencyConfig:
    """
    Which calls are the same, and for how long.

    *use_local_cache*, *local_cache_max_items* and *hash_function* have no effect.
    """

    def __init__(
        self,
        *,
        event_key_jmespath: str = "",
        payload_validation_jmespath: str = "",
        jmespath_options: Mapping[str, Any] | None = None,
        raise_on_no_idempotency_key: bool = False,
        expires_after_seconds: int = 60 * 60,
        use_local_cache: bool = False,  # noqa: ARG002
        local_cache_max_items: int = 256,  # noqa: ARG002
        hash_function: str = "",  # noqa: ARG002
        lambda_context: Context | None = None,
        response_hook: object = None,
    ) -> None:
        self.response_hook = response_hook
        if expires_after_seconds < 1:
            raise ConfigError("expires_after_seconds", "must be at least 1")
        self.find_key = finder("event_key_jmespath", event_key_jmespath, jmespath_options)
        self.find_payload = finder(
            "payload_validation_jmespath", payload_validation_jmespath, jmespath_options
        )
        self.raise_on_no_idempotency_key = raise_on_no_idempotency_key
        self.window = timedelta(seconds=expires_after_seconds)
        self.lambda_context = lambda_context

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse what would have no effect."""
        if name == "response_hook" and value is not None:
            raise ConfigError(name, "is not supported; pass on_duplicate to the decorator")
        if name in _FIXED:
            raise ConfigError(name, "cannot be changed later; pass it to IdempotencyConfig()")
        super().__setattr__(name, value)

    def register_lambda_context(self, lambda_context: Context) -> None:
        """Set the context of this invocation, so that its time left is respected."""
        self.lambda_context = lambda_context


def idempotent(
    *,
    persistence_store: Store | str,
    config: IdempotencyConfig | None = None,
    key_prefix: str | None = None,
    on_duplicate: Callable[[Any], Any] | None = None,
    patience: timedelta | None = None,
    keep_bytes: int = _MOST,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """
    Run a Lambda handler once for each event; a duplicate returns what the first call returned.

    *persistence_store* is a store of oncebridge, or its address. *on_duplicate* is called with the
    event of a duplicate, and its result is returned instead of the stored one. If the same call is
    running elsewhere, it is waited for while the invocation has time, at most for *patience* if
    that is set. A result of more than *keep_bytes* is not stored: its duplicates return None, or
    the result of *on_duplicate*.
    """
    config = config or IdempotencyConfig()

    def find(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Found:
        context: Any = args[1] if len(args) > 1 else kwargs.get("context")
        if hasattr(context, "get_remaining_time_in_millis"):
            config.register_lambda_context(context)
        return (args[0] if args else kwargs["event"]), config.lambda_context

    options = _Options(find, config, key_prefix, on_duplicate, patience, keep_bytes)
    return lambda handler: _protect(
        handler, _ProtectedFunction(handler, persistence_store, options)
    )


def idempotent_function(
    *,
    data_keyword_argument: str,
    persistence_store: Store | str,
    config: IdempotencyConfig | None = None,
    output_serializer: Serializer | None = None,
    key_prefix: str | None = None,
    on_duplicate: Callable[[Any], Any] | None = None,
    patience: timedelta = timedelta(0),
    keep_bytes: int = _MOST,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """
    Run any function once for each value of one of its keyword arguments.

    Like `idempotent`, but a call that is running elsewhere is waited for only with *patience*: it
    would use the time of the other records of a batch.
    """
    if inspect.isclass(output_serializer):
        raise ConfigError(
            "output_serializer", "must be an object with to_dict and from_dict, not a class"
        )

    config = config or IdempotencyConfig()

    def find(_: Sequence[Any], kwargs: Mapping[str, Any]) -> _Found:
        if data_keyword_argument not in kwargs:
            raise RuntimeError(
                f"{data_keyword_argument!r} is missing; pass it as a keyword argument"
            )
        return kwargs[data_keyword_argument], config.lambda_context

    options = _Options(
        find, config, key_prefix, on_duplicate, patience, keep_bytes, output_serializer
    )
    return lambda function: _protect(
        function, _ProtectedFunction(function, persistence_store, options)
    )


_background: Final = BackgroundLoop()
close: Final = _background.close


_Found = tuple[Any, Context | None]
"""The payload of a call, and the context of its invocation."""


@dataclasses.dataclass(frozen=True)
class _Options:
    find: Callable[[Sequence[Any], Mapping[str, Any]], _Found]
    config: IdempotencyConfig
    prefix: str | None
    on_duplicate: Callable[[Any], Any] | None
    patience: timedelta | None
    keep_bytes: int
    serializer: Serializer | None = None


def _protect(function: Callable[P, R], guard: "_ProtectedFunction") -> Callable[P, R]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            "a generator function cannot be protected: it has not run when it returns; protect its caller"
        )

    @functools.wraps(function)
    def protected(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_switched_off():
            return function(*args, **kwargs)
        data, context = guard.options.find(args, kwargs)
        if (event := guard.event(data)) is None:
            return function(*args, **kwargs)
        call = ProtectedCall(guard.packed)
        kept = call.run(guard.start(call, event, context), lambda: function(*args, **kwargs))
        return cast(R, guard.result(call, data, kept))

    @functools.wraps(function)
    async def protected_async(*args: P.args, **kwargs: P.kwargs) -> Any:
        made = cast(Callable[P, Awaitable[Any]], function)
        if _is_switched_off():
            return await made(*args, **kwargs)
        data, context = guard.options.find(args, kwargs)
        if (event := guard.event(data)) is None:
            return await made(*args, **kwargs)
        call = ProtectedCall(guard.packed)
        kept = await call.run_async(
            guard.start(call, event, context), lambda: made(*args, **kwargs)
        )
        result = guard.result(call, data, kept)
        return await result if inspect.isawaitable(result) else result

    is_async = inspect.iscoroutinefunction(function)
    return cast(Callable[P, R], protected_async) if is_async else protected


def _is_switched_off() -> bool:
    if os.environ.get(_SWITCH, "").lower() not in _DISABLED:
        return False
    warnings.warn(
        f"{_SWITCH} is set: no call is protected; do not use this in production", stacklevel=3
    )
    return True


class _ProtectedFunction:
    """One protected function: its gateway, and the sink that makes its calls."""

    batch = 1
    concurrency = 1000

    def __init__(self, function: Callable[..., Any], store: Store | str, options: _Options) -> None:
        self.options = options
        self._calls: dict[int, ProtectedCall] = {}
        self._open_store = _opener(store)
        self._store = self._open_store()
        name = f"{function.__module__}.{function.__qualname__}"
        # Handlers have the same name everywhere, and functions may share a table.
        where = os.environ.get("AWS_LAMBDA_FUNCTION_NAME", "function")
        self._route = options.prefix or f"{where}.{name}"
        rule = {
            "name": name,
            "key": ["detail.key"],
            "window": f"{ms(options.config.window)}ms",
            "check": options.config.find_payload is not None,
            "on_conflict": "duplicate",
        }
        self._rule = Rule.parse(rule, "idempotency")

    def make_gateway(self) -> Gateway:
        """Return a new gateway, for the first call and for the first after `close`."""
        self._store = self._open_store()
        return Gateway(
            store=self._store,
            sink=self,
            rules=[self._rule],
            route=self._route,
            # A call that raises may be repeated at once, and says nothing about other calls.
            settings=Settings(
                sink_timeout=_LONGEST,
                lease=_LONGEST + 10 * _SPARE,
                max_hold=_LONGEST + 10 * _SPARE,
                margin=_MARGIN,
                backoff=timedelta(milliseconds=1),
                max_backoff=timedelta(milliseconds=1),
                breaker=1 << 30,
            ),
        )

    def event(self, data: Any) -> Event | None:
        """Return an event made from the payload; None if the call is not protected."""
        config, checked = self.options.config, ""
        try:
            payload = plain(data)
            key = config.find_key(payload) if config.find_key else payload
            hashed = digest(key)
            if config.find_payload:
                checked = digest(config.find_payload(payload))
        except (TypeError, ValueError, RecursionError, OncebridgeError) as error:
            # The text of other errors may quote the payload.
            says = str(error) if isinstance(error, OncebridgeError) else type(error).__name__
            raise IdempotencyKeyError(f"a key cannot be made from the payload: {says}") from None
        if is_missing(key):
            if config.raise_on_no_idempotency_key:
                raise IdempotencyKeyError("the payload has no key")
            warnings.warn("the payload has no key, so the call is not protected", stacklevel=3)
            return None
        return parse(encoded({"detail": {"key": hashed, "checked": checked}}))

    def start(
        self, call: ProtectedCall, event: Event, context: Context | None
    ) -> "Future[bytes | None]":
        """Start the processing of a call by the gateway."""
        within, patience = None, self.options.patience or timedelta(0)
        if context is None:
            warnings.warn(
                "the time left is unknown, so a call that dies is held for 15 minutes; call "
                "IdempotencyConfig.register_lambda_context",
                stacklevel=3,
            )
        else:
            left = timedelta(milliseconds=context.get_remaining_time_in_millis())
            within = left + 2 * _MARGIN
            most = max(left - _SPARE, timedelta(0))
            patience = most if self.options.patience is None else min(patience, most)
        return _background.start(
            self.make_gateway,
            lambda gateway: self._take(gateway, call, event, within, patience),
        )

    def packed(self, value: Any) -> bytes | None:
        """Return a result as JSON, to be stored; None if it is not or cannot be stored."""
        if value is None or not self.options.keep_bytes:
            return None
        serializer = self.options.serializer
        try:
            text = encoded(serializer.to_dict(value) if serializer else value)
            if len(text) > self.options.keep_bytes:
                raise ValueError(f"{len(text)} bytes")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - the call was made, whatever its result is
            _warn("oncebridge.result_not_kept", error)
            return None
        return text

    def result(self, call: ProtectedCall, data: Any, kept: bytes | None) -> Any:
        """Return the result of the call, or the stored one of the call it is a duplicate of."""
        if call.error is not None:
            raise call.error
        if call.is_begun:
            return call.value
        if self.options.on_duplicate is not None:
            return self.options.on_duplicate(data)
        value = None if kept is None else json.loads(kept)
        return (
            self.options.serializer.from_dict(value) if self.options.serializer and kept else value
        )

    # --- on the gateway's loop ---------------------------------------------------------

    async def _take(
        self,
        gateway: Gateway,
        call: ProtectedCall,
        event: Event,
        within: timedelta | None,
        patience: timedelta,
    ) -> bytes | None:
        self._calls[id(event)] = call
        try:
            (outcome,) = await gateway.process([event], within=within, patience=patience)
            if not call.is_begun:
                return await self._kept(outcome)
        except StoreError as error:
            message = f"the store did not answer: {error}"
            raise IdempotencyPersistenceLayerError(message, _SPARE.total_seconds()) from error
        finally:
            del self._calls[id(event)]
        # If the call was made, its caller gets its result, whatever happened to the record.
        if call.error is not None:
            await asyncio.sleep(_FREE_AGAIN_S)
        elif not outcome.acknowledge:
            await self._record_late(call)
        return None

    async def _kept(self, outcome: Outcome) -> bytes | None:
        """Return the stored result of the first call, or raise if there is none."""
        wait_s = outcome.retry_after_ms / 1000
        if outcome.verdict is Verdict.BUSY:
            raise IdempotencyAlreadyInProgressError(
                "another call with the same key is running", wait_s
            )
        if not outcome.acknowledge:
            raise IdempotencyPersistenceLayerError(outcome.reason or outcome.verdict, wait_s)
        (record,) = await self._store.peek([outcome.key])
        if outcome.verdict is Verdict.CONFLICT or (record and record.fate is Fate.DROPPED):
            raise IdempotencyValidationError("the key is known with another payload")
        if record is None or not self.options.keep_bytes:
            return None
        (kept,) = await self._store.peek([self._place(record.key, record.generation)])
        return kept.memo if kept else None

    async def _record_late(self, call: ProtectedCall) -> None:
        """Record a call that was given up, but succeeded after its time."""
        await call.end()
        if call.error is not None or (done := call.delivery) is None:
            return
        await self._keep(call.packed, done)
        window = ms(self.options.config.window)
        # By its generation: if another call has started meanwhile, the first success counts.
        commit = Commit(done.key, done.generation, Fate.DELIVERED, window)
        try:
            _check(await self._store.commit(Commits.of([commit])))
        except StoreError as error:
            _warn("oncebridge.call_not_recorded", error)

    async def open(self) -> None:
        """Do nothing: there is nothing to open."""

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[SinkAnswer]:
        (delivery,) = deliveries
        call = self._calls[id(delivery.event)]
        left_s = delivery.ends - asyncio.get_running_loop().time() - _MARGIN.total_seconds()
        if left_s < _MARGIN.total_seconds():
            return [No("no time left", too_early=True)]
        call.delivery = delivery
        if not await call.made():
            return [No("the caller does not wait any more", too_early=True)]
        if call.error is not None:
            return [Unknown(type(call.error).__name__)]
        await self._keep(call.packed, delivery)
        return [Yes()]

    async def aclose(self) -> None:
        """Do nothing: calls end by themselves."""

    async def _keep(self, text: bytes | None, delivery: Delivery) -> None:
        if text is None:
            return
        place = self._place(delivery.key, delivery.generation)
        longer = ms(
            self.options.config.window + _LONGEST
        )  # longer than the record that refers to it
        memory = Memory(place, delivery.generation, Fate.DELIVERED, longer, memo=text)
        try:
            _check(await self._store.remember(Memories.of([memory])))
        except Exception as error:  # noqa: BLE001 - as in `packed`
            _warn("oncebridge.result_not_kept", error)

    def _place(self, key: bytes, generation: bytes) -> bytes:
        return make_key(self._route, b"result", "", "", (key, generation[:_HEAD]))


def _opener(store: Store | str) -> Callable[[], Store]:
    """Return a function that opens the store; for an address, a new one each time."""
    if not isinstance(store, str):
        return lambda: store
    found = backend("oncebridge.stores", store, "persistence_store", written=store)
    return lambda: cast(Store, found.from_url(store))


def _check(answers: Sequence[object]) -> None:
    for answer in answers:
        if isinstance(answer, NoAnswer):
            raise StoreError(answer.reason)


def _warn(what: str, error: BaseException) -> None:
    _log.warning(what, extra={"error": type(error).__name__})
