"""
Handlers written for Powertools' idempotency, first with Powertools and then with ours.

The handler is one text; only its import and its store are swapped. Both run on the same
DynamoDB emulator, get the same events, and have to come to the same end, but where ours is
meant to differ.
"""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import gzip
import json
import logging
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import boto3
import pytest
import redis
from aws_lambda_powertools.utilities import idempotency as theirs
from aws_lambda_powertools.utilities.idempotency import exceptions
from aws_lambda_powertools.utilities.idempotency.persistence.base import BasePersistenceLayer
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from aws_lambda_powertools.utilities.idempotency.serialization.custom_dict import (
    CustomDictSerializer,
)
from tests.faults.doubles import FaultyStore
from tests.servers.aws import DynamoDBServer, fresh
from tests.servers.redis import RedisServer

from oncebridge import ConfigError, StoreUnavailable
from oncebridge.aws import powertools as ours
from oncebridge.aws.powertools.payload import is_missing
from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore
from oncebridge.stores.memory import MemoryStore
from oncebridge.stores.redis.store import RedisStore
from oncebridge.stores.sqlite.store import SQLiteStore

pytestmark = pytest.mark.filterwarnings("ignore:the time left is unknown")

LONG_S = 30
HOUR_MS = 3_600_000


class Invocation:
    """What a handler asks Lambda."""

    function_name = "orders"
    memory_limit_in_mb = 128
    invoked_function_arn = "arn:aws:lambda:us-east-1:123456789012:function:orders"
    aws_request_id = "0d9ef1b4-6d1e-4d57-9a3a-7d2f40a6c001"

    def __init__(self, left_ms: int = 20_000) -> None:
        self.left_ms = left_ms

    def get_remaining_time_in_millis(self) -> int:
        return self.left_ms


class Clock:
    """The time as a store sees it."""

    def __init__(self) -> None:
        self.now_ms = 1_790_000_000_000

    def __call__(self) -> int:
        return self.now_ms


class Shop:
    """What a handler does to the world: money is taken, once or too often."""

    def __init__(self) -> None:
        self.charged: list[Any] = []
        self.fails: set[Any] = set()

    def charge(self, order: Any, amount: Any = 1) -> dict[str, Any]:
        if order in self.fails:
            self.fails.remove(order)
            raise ConnectionError("the bank is away")
        self.charged.append(order)
        return {"order": order, "amount": amount, "receipt": len(self.charged)}


def aside(function: Callable[..., Any], **arguments: Any) -> "Future[Any]":
    """Call *function* in a thread that nobody has to wait for, should it hang."""
    ended: Future[Any] = Future()

    def call() -> None:
        try:
            ended.set_result(function(**arguments))
        except BaseException as error:  # noqa: BLE001 - it is raised where it is asked for
            ended.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return ended


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    ours.close()


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def their_store(dynoxide: DynamoDBServer) -> Iterator[Any]:
    name = fresh("powertools")
    dynoxide.ask(
        "CreateTable",
        {
            "TableName": name,
            "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "S"}],
            "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
            "BillingMode": "PAY_PER_REQUEST",
        },
    )
    client = boto3.client("dynamodb", endpoint_url=dynoxide.endpoint, region_name="us-east-1")
    # One for each function: a layer keeps the configuration that it is first given.
    yield lambda: theirs.DynamoDBPersistenceLayer(table_name=name, boto3_client=client)
    client.close()


@pytest.fixture
def our_store(dynoxide: DynamoDBServer) -> DynamoDBStore:
    return DynamoDBStore(dynoxide.table(), DynamoDBOptions(endpoint=dynoxide.endpoint))


THEIR_IMPORT = "from aws_lambda_powertools.utilities.idempotency import"
OUR_IMPORT = "from oncebridge.aws.powertools import"

APP = f"""
import json

from aws_lambda_powertools.utilities.batch import BatchProcessor, EventType, process_partial_response
{THEIR_IMPORT} IdempotencyConfig, idempotent_function

processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)
config = IdempotencyConfig(
    event_key_jmespath="powertools_json(body).order", expires_after_seconds=3600, use_local_cache=False
)


@idempotent_function(data_keyword_argument="record", config=config, persistence_store=store)
def record_handler(record):
    body = json.loads(record.body)
    return shop.charge(body["order"])


def lambda_handler(event, context):
    config.register_lambda_context(context)
    return process_partial_response(
        event=event, record_handler=record_handler, processor=processor, context=context
    )
"""


def app(store: Any, shop: Shop, *, swapped: bool, source: str = APP) -> Any:
    """Load the handler, with its import swapped or not."""
    module: dict[str, Any] = {"__name__": "app", "store": store, "shop": shop}
    assert THEIR_IMPORT in source
    exec(source.replace(THEIR_IMPORT, OUR_IMPORT) if swapped else source, module)
    return module["lambda_handler"]


def batch(*orders: Any) -> dict[str, Any]:
    return {
        "Records": [
            {
                "messageId": f"m-{at}-{order}",
                "receiptHandle": f"r-{at}",
                "body": json.dumps({"order": order, "sent": at}),
                "attributes": {"ApproximateReceiveCount": "1"},
                "messageAttributes": {},
                "md5OfBody": "0",
                "eventSource": "aws:sqs",
                "eventSourceARN": "arn:aws:sqs:us-east-1:123456789012:orders",
                "awsRegion": "us-east-1",
            }
            for at, order in enumerate(orders)
        ]
    }


def failed(*names: str) -> dict[str, Any]:
    return {"batchItemFailures": [{"itemIdentifier": name} for name in names]}


# --- the same handler, the same events, the same end ------------------------------------------


@pytest.mark.parametrize("swapped", [False, True], ids=["theirs", "ours"])
def test_a_batch_handler_comes_to_the_same_end(swapped, shop, their_store, our_store):
    handler = app(our_store if swapped else their_store(), shop, swapped=swapped)
    shop.fails = {"third"}
    assert handler(batch("first", "second", "first"), Invocation()) == failed()
    assert handler(batch("first", "third", "fourth"), Invocation()) == failed("m-1-third")
    assert handler(batch("third", "second"), Invocation()) == failed()
    assert handler(batch("first", "second", "third", "fourth"), Invocation()) == failed()
    assert shop.charged == ["first", "second", "fourth", "third"]


WHOLE = f"""
{THEIR_IMPORT} IdempotencyConfig, idempotent

config = IdempotencyConfig(
    event_key_jmespath="[detail.customer, detail.order]",
    payload_validation_jmespath="detail.amount",
    expires_after_seconds=3600,
)


@idempotent(config=config, persistence_store=store)
def lambda_handler(event, context):
    return shop.charge(event["detail"]["order"], event["detail"]["amount"])
"""


def bus_event(order: str, amount: int = 7, **detail: Any) -> dict[str, Any]:
    detail = {"customer": "c1", "order": order, "amount": amount, **detail}
    return {"id": f"id-{amount}", "detail-type": "order", "source": "shop", "detail": detail}


@pytest.mark.parametrize("swapped", [False, True], ids=["theirs", "ours"])
def test_a_handler_answers_repeats_and_refuses_other_payloads(
    swapped, shop, their_store, our_store
):
    library: Any = ours if swapped else exceptions
    store = our_store if swapped else their_store()
    handler = app(store, shop, swapped=swapped, source=WHOLE)
    first = handler(bus_event("a"), Invocation())
    assert first == {"order": "a", "amount": 7, "receipt": 1}
    assert handler(bus_event("a"), Invocation()) == first
    for _ in range(2):
        with pytest.raises(library.IdempotencyValidationError):
            handler(bus_event("a", 8), Invocation())
    shop.fails = {"b"}
    with pytest.raises(ConnectionError):
        handler(bus_event("b"), Invocation())
    assert handler(bus_event("b"), Invocation())["receipt"] == 2
    # A part of the key may be missing, but not all of it.
    assert handler(bus_event("d", customer=None), Invocation())["receipt"] == 3
    assert handler(bus_event("d", customer=None), Invocation())["receipt"] == 3
    assert shop.charged == ["a", "b", "d"]


@pytest.mark.parametrize("swapped", [False, True], ids=["theirs", "ours"])
def test_a_payload_without_a_key_is_not_protected_or_refused(swapped, shop, their_store, our_store):
    library: Any = ours if swapped else theirs
    errors: Any = ours if swapped else exceptions

    def protect(**options: Any) -> Any:
        config = library.IdempotencyConfig(
            event_key_jmespath="order", lambda_context=Invocation(), **options
        )
        store = our_store if swapped else their_store()
        decorate = library.idempotent_function(
            data_keyword_argument="data", config=config, persistence_store=store
        )

        @decorate
        def function(data: Any) -> Any:
            return shop.charge(data.get("order"))

        return function

    lax, strict = protect(), protect(raise_on_no_idempotency_key=True)
    for data in ({}, {}, {"order": ""}):
        with pytest.warns(UserWarning, match="no key|No idempotency key"):
            lax(data=data)
    assert shop.charged == [None, None, ""]
    with pytest.raises(errors.IdempotencyKeyError):
        strict(data={})
    strict(data={"order": 0})
    strict(data={"order": 0})
    assert shop.charged == [None, None, "", 0]
    with pytest.raises(RuntimeError, match="keyword"):
        strict({"order": 0})


@pytest.mark.parametrize("swapped", [False, True], ids=["theirs", "ours"])
def test_of_many_at_once_one_is_made(swapped, shop, their_store, our_store):
    library: Any = ours if swapped else theirs
    errors: Any = ours if swapped else exceptions
    all_are_there = threading.Barrier(8)
    others = threading.Semaphore(0)
    config = library.IdempotencyConfig(lambda_context=Invocation())
    decorate = library.idempotent_function(
        data_keyword_argument="order",
        config=config,
        persistence_store=our_store if swapped else their_store(),
    )

    @decorate
    def charge(order: str) -> Any:
        for _ in range(7):
            assert others.acquire(timeout=LONG_S)
        return shop.charge(order)

    def call() -> str:
        all_are_there.wait(LONG_S)
        try:
            charge(order="o1")
        except errors.IdempotencyAlreadyInProgressError:
            others.release()
            return "in progress"
        return "made"

    with ThreadPoolExecutor(8) as threads:
        ended = [each.result() for each in [threads.submit(call) for _ in range(8)]]
    assert sorted(ended) == ["in progress"] * 7 + ["made"]
    assert shop.charged == ["o1"]


# --- what ours does better --------------------------------------------------------------------


class Frozen:
    """A stands still past its lease, B takes over, A fails late, and C asks while B is at it."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.begun = {name: threading.Event() for name in "ABC"}
        self.gates = {name: threading.Event() for name in "ABC"}
        self.gates["C"].set()

    def work(self, name: str) -> Any:
        self.begun[name].set()
        assert self.gates[name].wait(LONG_S)
        if name == "A":
            raise ConnectionError("much too late")
        return self.shop.charge(name)

    def run(self, call: Callable[[str], Any], thaw: Callable[[], None]) -> tuple[Any, Any, Any]:
        with ThreadPoolExecutor(3) as threads:
            a = threads.submit(call, "A")
            assert self.begun["A"].wait(LONG_S)
            thaw()
            b = threads.submit(call, "B")
            assert self.begun["B"].wait(LONG_S)
            self.gates["A"].set()
            assert isinstance(a.exception(LONG_S), ConnectionError)
            c = threads.submit(call, "C")
            c_ended: Any = c.exception(LONG_S) or c.result()
            self.gates["B"].set()
            return b.result(LONG_S), c_ended, call("C")


def test_a_frozen_holder_undoes_the_hold_of_who_took_over_with_powertools(shop, their_store):
    invocation = Invocation(50)
    decorate: Any = theirs.idempotent_function(
        data_keyword_argument="order",
        config=theirs.IdempotencyConfig(lambda_context=invocation),  # type: ignore[arg-type]
        persistence_store=their_store(),
    )
    frozen = Frozen(shop)

    @decorate
    def work(order: str, name: str) -> Any:
        assert order == "o1"
        return frozen.work(name)

    def thaw() -> None:
        threading.Event().wait(0.1)  # the 50 ms of A are over
        invocation.left_ms = 20_000

    frozen.run(lambda name: work(order="o1", name=name), thaw)
    assert shop.charged == ["C", "B"], "C was made while B was at it"


def test_a_frozen_holder_undoes_nothing_with_ours(shop, dynoxide):
    clock = Clock()
    options = DynamoDBOptions(endpoint=dynoxide.endpoint)
    frozen = Frozen(shop)

    @ours.idempotent_function(
        data_keyword_argument="order",
        config=ours.IdempotencyConfig(expires_after_seconds=86_400, lambda_context=Invocation()),
        persistence_store=DynamoDBStore(dynoxide.table(), options, clock=clock),
    )
    def work(order: str, name: str) -> Any:
        assert order == "o1"
        return frozen.work(name)

    def thaw() -> None:
        clock.now_ms += HOUR_MS  # as the store sees it, the lease of A is over

    b, c, again = frozen.run(lambda name: work(order="o1", name=name), thaw)
    assert isinstance(c, ours.IdempotencyAlreadyInProgressError)
    assert c.retry_after_s > 0
    assert again == b == {"order": "B", "amount": 1, "receipt": 1}
    assert shop.charged == ["B"]


def test_a_handler_waits_for_the_one_that_is_at_it(shop, our_store):
    begun, gate = threading.Event(), threading.Event()

    @ours.idempotent(persistence_store=our_store)
    def handler(event: Any, context: Any) -> Any:
        begun.set()
        assert gate.wait(LONG_S)
        return shop.charge(event["order"])

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(handler, {"order": 1}, Invocation())
        assert begun.wait(LONG_S)
        second = threads.submit(handler, {"order": 1}, Invocation())
        with pytest.raises(ours.IdempotencyAlreadyInProgressError):
            handler({"order": 1}, Invocation(1_000))  # which leaves no time to wait
        gate.set()
        assert first.result(LONG_S) == second.result(LONG_S)
    assert shop.charged == [1]


def test_what_else_the_page_says_of_powertools(shop, their_store):
    """Each of these is a difference that the migration page names."""
    config = theirs.IdempotencyConfig(lambda_context=Invocation())  # type: ignore[arg-type]
    layer = their_store()

    def protect(function: Any, **options: Any) -> Any:
        return theirs.idempotent_function(
            function,
            data_keyword_argument="order",
            **{"config": config, "persistence_store": layer, **options},
        )

    def charge_in_bytes(order: str) -> bytes:
        shop.charge(order)
        return b"no JSON"

    unkept = protect(charge_in_bytes)
    with pytest.raises(exceptions.IdempotencyPersistenceLayerError):
        unkept(order="a")
    with pytest.raises(exceptions.IdempotencyAlreadyInProgressError):
        unkept(order="a")
    assert shop.charged == ["a"]

    def charge(order: Any) -> Any:
        return shop.charge(order["id"])

    other = theirs.IdempotencyConfig(event_key_jmespath="id", lambda_context=Invocation())  # type: ignore[arg-type]
    second = protect(charge, config=other)  # on a layer that has its configuration already
    second(order={"id": "b", "sent": 1})
    second(order={"id": "b", "sent": 2})
    assert shop.charged == ["a", "b", "b"]


@pytest.mark.parametrize("swapped", [False, True], ids=["theirs", "ours"])
def test_an_equal_payload_on_redis(swapped, shop, redis_server: RedisServer):
    library: Any = ours if swapped else theirs
    name = fresh("order")
    port = int(redis_server.url.rsplit(":", 1)[1].split("/")[0])
    config = library.IdempotencyConfig(
        event_key_jmespath="id", payload_validation_jmespath="amount", lambda_context=Invocation()
    )
    with contextlib.ExitStack() as stack:
        if swapped:
            store: Any = RedisStore(redis_server.url)
        else:
            client = stack.enter_context(redis.Redis("127.0.0.1", port, decode_responses=True))
            with pytest.warns(DeprecationWarning, match="CachePersistenceLayer"):  # of its own
                store = CachePersistenceLayer(client=client)
        decorate = library.idempotent_function(
            data_keyword_argument="order", config=config, persistence_store=store
        )

        @decorate
        def charge(order: Any) -> Any:
            return shop.charge(order["id"])

        first = charge(order={"id": name, "amount": 1})
        if swapped:
            assert charge(order={"id": name, "amount": 1}) == first
        else:
            with pytest.raises(exceptions.IdempotencyValidationError):
                charge(order={"id": name, "amount": 1})
    assert shop.charged == [name]


# --- going over -------------------------------------------------------------------------------

BOTH = APP.replace(
    "@idempotent_function(",
    """@ours.idempotent_function(
    data_keyword_argument="record",
    config=our_config,
    persistence_store=our_store,
    key_prefix="orders",
)
@idempotent_function(""",
).replace(
    "    config.register",
    "    our_config.register_lambda_context(context)\n    config.register",
)
AFTER = APP.replace(
    'data_keyword_argument="record",', 'data_keyword_argument="record", key_prefix="orders",'
)


def test_going_over_lets_no_repeat_through_and_there_is_a_way_back(shop, their_store, our_store):
    before = app(their_store(), shop, swapped=False)
    assert before(batch("old", "older"), Invocation()) == failed()

    module = {
        "__name__": "app",
        "store": their_store(),
        "shop": shop,
        "ours": ours,
        "our_store": our_store,
        "our_config": ours.IdempotencyConfig(event_key_jmespath="powertools_json(body).order"),
    }
    exec(BOTH, module)
    both: Any = module["lambda_handler"]
    assert both(batch("old", "new"), Invocation()) == failed()
    assert both(batch("old", "new", "newer"), Invocation()) == failed()
    assert shop.charged == ["old", "older", "new", "newer"]

    # Containers of the old version are still there, and there may be a way back.
    assert before(batch("new", "newer", "newest"), Invocation()) == failed()
    assert both(batch("newest"), Invocation()) == failed()
    assert shop.charged == ["old", "older", "new", "newer", "newest"]

    # One window later: what was brought again meanwhile is known to ours alone.
    after = app(our_store, shop, swapped=True, source=AFTER)
    assert after(batch("old", "new", "newer", "newest"), Invocation()) == failed()
    assert shop.charged == ["old", "older", "new", "newer", "newest"]


def test_while_going_over_what_the_old_version_holds_comes_again(shop, their_store, our_store):
    begun, gate = threading.Event(), threading.Event()
    config = theirs.IdempotencyConfig(lambda_context=Invocation())  # type: ignore[arg-type]
    old: Any = theirs.idempotent_function(
        data_keyword_argument="order",
        config=config,
        persistence_store=their_store(),
        key_prefix="x",
    )
    outside = ours.idempotent_function(data_keyword_argument="order", persistence_store=our_store)

    def charge(order: str) -> Any:
        begun.set()
        assert gate.wait(LONG_S)
        return shop.charge(order)

    inner = old(charge)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(inner, order="o1")
        assert begun.wait(LONG_S)
        new = outside(inner)
        with pytest.raises(exceptions.IdempotencyAlreadyInProgressError):
            new(order="o1")
        gate.set()
        result = first.result(LONG_S)
    assert new(order="o1") == new(order="o1") == result
    assert shop.charged == ["o1"]


# --- results ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "dynamodb"])
def test_every_store_keeps_results(kind, tmp_path, dynoxide, redis_server: RedisServer, shop):
    stores: dict[str, Callable[[], Any]] = {
        "memory": MemoryStore,
        "sqlite": lambda: SQLiteStore(str(tmp_path / "seen.db")),
        "redis": lambda: RedisStore(redis_server.url),
        "dynamodb": lambda: DynamoDBStore(
            dynoxide.table(), DynamoDBOptions(endpoint=dynoxide.endpoint)
        ),
    }
    name = fresh("order")

    @ours.idempotent_function(data_keyword_argument="order", persistence_store=stores[kind]())
    def charge(order: Any) -> Any:
        return {**shop.charge(order), "long": "é" * 20_000}

    first = charge(order=name)
    assert charge(order=name) == first
    assert shop.charged == [name]


def test_a_result_is_of_its_own_window(shop):
    clock = Clock()

    @ours.idempotent_function(
        data_keyword_argument="order", persistence_store=MemoryStore(clock=clock)
    )
    def charge(order: str) -> Any:
        return shop.charge(order)

    assert [charge(order="a")["receipt"] for _ in range(2)] == [1, 1]
    clock.now_ms += HOUR_MS - 1
    assert charge(order="a")["receipt"] == 1
    clock.now_ms += 1  # and the first result is still in the store
    assert [charge(order="a")["receipt"] for _ in range(2)] == [2, 2]


def test_a_result_lasts_as_long_as_its_record(shop):
    clock = Clock()

    class Slow(MemoryStore):
        async def commit(self, commits: Any) -> Any:
            clock.now_ms += 60_000  # the record's window begins so much later
            return await super().commit(commits)

    @ours.idempotent_function(data_keyword_argument="order", persistence_store=Slow(clock=clock))
    def charge(order: str) -> Any:
        return shop.charge(order)

    first = charge(order="a")
    clock.now_ms += HOUR_MS - 1
    assert charge(order="a") == first


def test_what_cannot_be_kept_is_told_and_repeats_give_none(shop, caplog):
    def protect(result: Any, **options: Any) -> Any:
        @ours.idempotent_function(
            data_keyword_argument="order", persistence_store=MemoryStore(), **options
        )
        def charge(order: str) -> Any:
            shop.charge(order)
            return result

        return charge

    caplog.set_level(logging.WARNING, "oncebridge")
    for at, (result, options) in enumerate(
        [("x" * 100, {"keep_bytes": 101}), (b"bytes", {}), ({1, 2}, {})]
    ):
        charge = protect(result, **options)
        assert charge(order=at) == result
        assert charge(order=at) is None
    assert [record.message for record in caplog.records] == ["oncebridge.result_not_kept"] * 3
    caplog.clear()
    silent = protect("secret", keep_bytes=0)
    assert (silent(order="s"), silent(order="s")) == ("secret", None)
    told = protect(b"bytes", on_duplicate=lambda order: f"{order} was charged before")
    assert (told(order="t"), told(order="t")) == (b"bytes", "t was charged before")
    assert protect(None)(order="n") is None
    assert shop.charged == [0, 1, 2, "s", "t", "n"]


async def test_the_answer_to_a_lost_result_is_still_an_answer(shop):
    store = FaultyStore(MemoryStore())

    @ours.idempotent_function(data_keyword_argument="order", persistence_store=store)
    def charge(order: str) -> Any:
        return shop.charge(order)

    store.arm("remember.before", error=StoreUnavailable("away"))
    assert charge(order="a")["receipt"] == 1
    assert charge(order="a") is None
    assert shop.charged == ["a"]


def test_a_serializer_makes_results_into_json_and_back(shop):
    @dataclasses.dataclass
    class Receipt:
        order: str
        amount: Decimal

    serializer = CustomDictSerializer(
        to_dict=dataclasses.asdict,
        from_dict=lambda data: Receipt(data["order"], Decimal(data["amount"])),
    )

    @ours.idempotent_function(
        data_keyword_argument="order",
        persistence_store=MemoryStore(),
        output_serializer=serializer,
    )
    def charge(order: str) -> Receipt:
        shop.charge(order)
        return Receipt(order, Decimal("1.10"))

    assert charge(order="a") == charge(order="a") == Receipt("a", Decimal("1.10"))
    assert shop.charged == ["a"]
    with pytest.raises(ConfigError, match="output_serializer"):
        ours.idempotent_function(
            data_keyword_argument="order",
            persistence_store="memory:",
            output_serializer=CustomDictSerializer,  # type: ignore[arg-type]
        )


def test_a_serializer_may_call_a_protected_function(shop):
    store = MemoryStore()

    @ours.idempotent_function(data_keyword_argument="number", persistence_store=store)
    def masked(number: str) -> str:
        return number[-2:]

    @ours.idempotent_function(
        data_keyword_argument="order",
        persistence_store=store,
        output_serializer=CustomDictSerializer(
            to_dict=lambda card: {"card": masked(number=card)},
            from_dict=lambda kept: kept["card"],
        ),
    )
    def charge(order: str) -> str:
        shop.charge(order)
        return "4711"

    assert [aside(charge, order="a").result(LONG_S) for _ in range(2)] == ["4711", "11"]


# --- where calls run, and how they end ----------------------------------------------------------


def test_a_call_runs_in_its_callers_thread_and_may_make_others(shop):
    store = MemoryStore()
    threads: list[int] = []

    @ours.idempotent_function(data_keyword_argument="order", persistence_store=store)
    def charge(order: str) -> Any:
        threads.append(threading.get_ident())
        return shop.charge(order)

    @ours.idempotent(persistence_store=store)
    def handler(event: Any, context: Any) -> Any:
        threads.append(threading.get_ident())
        return [charge(order=order) for order in event["orders"]]

    first = handler({"orders": ["a", "b", "a"]}, Invocation())
    assert [receipt["receipt"] for receipt in first] == [1, 2, 1]
    assert handler({"orders": ["a", "b", "a"]}, Invocation()) == first
    assert threads == [threading.get_ident()] * 3


def test_an_async_function_runs_on_its_callers_loop(shop):
    loops: list[Any] = []

    @ours.idempotent(persistence_store=MemoryStore())
    async def handler(event: Any, context: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return shop.charge(event["order"])

    async def several() -> list[Any]:
        assert asyncio.get_running_loop() not in loops
        calls = [handler({"order": 1}, Invocation()) for _ in range(3)]
        return await asyncio.gather(*calls)

    assert [each["receipt"] for _ in range(2) for each in asyncio.run(several())] == [1] * 6
    assert shop.charged == [1]
    assert len(loops) == 1


def test_an_async_call_that_is_cancelled_may_be_made_again(shop):
    @ours.idempotent_function(
        data_keyword_argument="order",
        persistence_store=MemoryStore(),
        patience=timedelta(seconds=LONG_S),
    )
    async def charge(order: str, *, hangs: bool) -> Any:
        if hangs:
            begun.set()
            await asyncio.sleep(3600)
        return shop.charge(order)

    async def cancel(*, waiting: bool) -> None:
        call = asyncio.create_task(charge(order="a", hangs=True))
        await begun.wait()
        second = asyncio.create_task(charge(order="a", hangs=False))
        await asyncio.sleep(0.05)
        for task in [second, call] if waiting else [call]:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        if not waiting:
            assert (await second)["receipt"] == 1
        begun.clear()

    async def both() -> None:
        await cancel(waiting=True)
        assert shop.charged == []
        await cancel(waiting=False)

    begun = asyncio.Event()
    asyncio.run(both())
    assert shop.charged == ["a"]


class Ending(Invocation):
    """An invocation whose time runs."""

    def __init__(self, left_ms: int) -> None:
        super().__init__(left_ms)
        self._ends = time.monotonic() + left_ms / 1000

    def get_remaining_time_in_millis(self) -> int:
        return int((self._ends - time.monotonic()) * 1000)


def test_a_call_that_ends_in_its_last_moment_is_held_and_recorded(shop):
    """Tried anew where this machine was too slow to look in that moment."""
    config = ours.IdempotencyConfig()

    @ours.idempotent_function(
        data_keyword_argument="order", config=config, persistence_store=MemoryStore()
    )
    def charge(order: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return shop.charge(order)
        invocation = config.lambda_context
        assert invocation is not None
        while invocation.get_remaining_time_in_millis() > 150:
            time.sleep(0.01)
        config.register_lambda_context(Invocation())
        with ThreadPoolExecutor(1) as threads:
            second.append(threads.submit(charge, order=order).exception(LONG_S))
        left_ms.append(invocation.get_remaining_time_in_millis())
        return shop.charge(order)

    second: list[Any] = []
    left_ms: list[int] = []
    for order in range(20):
        config.register_lambda_context(Ending(600))
        first = charge(order=order)
        if left_ms[-1] > 0:
            break
    assert isinstance(second[-1], ours.IdempotencyAlreadyInProgressError)
    config.register_lambda_context(Invocation(100))  # too little for a call, enough for a repeat
    assert charge(order=order) == first
    assert shop.charged.count(order) == 1


def test_a_call_that_outlasts_its_time_gives_what_it_gave_and_is_recorded(shop):
    config = ours.IdempotencyConfig(lambda_context=Invocation(400))

    @ours.idempotent_function(
        data_keyword_argument="order", config=config, persistence_store=MemoryStore()
    )
    def charge(order: str) -> Any:
        time.sleep(1)
        return shop.charge(order)

    first = charge(order="a")
    config.register_lambda_context(Invocation())
    assert charge(order="a") == first
    assert shop.charged == ["a"]


async def test_a_call_that_outlasts_its_time_and_cannot_be_recorded_is_told(shop, caplog):
    store = FaultyStore(MemoryStore())
    config = ours.IdempotencyConfig(lambda_context=Invocation(400))

    @ours.idempotent_function(data_keyword_argument="order", config=config, persistence_store=store)
    def charge(order: str) -> Any:
        time.sleep(1)
        return shop.charge(order)

    store.arm("commit.before", times=1e9)
    assert charge(order="a")["receipt"] == 1
    assert [record.message for record in caplog.records] == ["oncebridge.call_not_recorded"]


async def test_nobody_waits_in_the_last_second(shop):
    store = FaultyStore(MemoryStore())
    begun, gate = threading.Event(), threading.Event()
    config = ours.IdempotencyConfig(lambda_context=Invocation(1_000))

    @ours.idempotent_function(
        data_keyword_argument="order",
        config=config,
        persistence_store=store,
        patience=timedelta(seconds=LONG_S),
    )
    def charge(order: str) -> Any:
        begun.set()
        assert gate.wait(LONG_S)
        return shop.charge(order)

    with ThreadPoolExecutor(1) as threads:
        config.register_lambda_context(Invocation())
        first = threads.submit(charge, order="a")
        assert begun.wait(LONG_S)
        config.register_lambda_context(Invocation(1_000))
        with pytest.raises(ours.IdempotencyAlreadyInProgressError):
            charge(order="a")
        assert store.calls["claim"] == 2, "it looked once, and did not wait"
        gate.set()
        assert first.result(LONG_S)["receipt"] == 1


async def test_without_time_or_store_no_call_is_made(shop):
    store = FaultyStore(MemoryStore())
    config = ours.IdempotencyConfig(lambda_context=Invocation(100))

    @ours.idempotent_function(data_keyword_argument="order", config=config, persistence_store=store)
    def charge(order: str) -> Any:
        return shop.charge(order)

    with pytest.raises(ours.IdempotencyPersistenceLayerError, match="no time left"):
        charge(order="a")
    config.register_lambda_context(Invocation(2_000))
    store.arm("claim.before", times=1e9, error=StoreUnavailable("away"))
    with pytest.raises(ours.IdempotencyPersistenceLayerError, match="did not answer"):
        charge(order="a")
    assert shop.charged == []


def test_a_repeat_whose_result_cannot_be_read_has_to_come_again(shop):
    class Away(MemoryStore):
        async def peek(self, keys: Any) -> Any:
            raise StoreUnavailable("away")

    @ours.idempotent_function(data_keyword_argument="order", persistence_store=Away())
    def charge(order: str) -> Any:
        return shop.charge(order)

    assert charge(order="a")["receipt"] == 1
    with pytest.raises(ours.IdempotencyPersistenceLayerError, match="did not answer"):
        charge(order="a")
    assert shop.charged == ["a"]


def test_calls_that_raise_stand_in_nobodys_way(shop):
    @ours.idempotent_function(data_keyword_argument="order", persistence_store=MemoryStore())
    def charge(order: int) -> Any:
        return shop.charge(order)

    shop.fails = set(range(20))
    for order in range(20):
        with pytest.raises(ConnectionError):
            charge(order=order)
    assert charge(order=20)["receipt"] == 1


def test_a_call_that_raises_may_be_made_again_at_once_and_counts_as_tried():
    store = FaultyStore(MemoryStore())

    @ours.idempotent_function(data_keyword_argument="order", persistence_store=store)
    def leave(order: int) -> None:
        sys.exit(order)

    for _ in range(20):
        with pytest.raises(SystemExit):
            leave(order=1)
    assert [release.unsent for release in store.asked["release"]] == [False] * 20


@pytest.mark.parametrize("kind", ["wrapper", "async wrapper", "lambda"])
def test_what_has_done_nothing_yet_when_it_returns_is_refused(kind):
    async def charge(order: str) -> str:
        return order

    @functools.wraps(charge)
    def wrapper(**order: str) -> Any:
        return charge(**order)

    async def awaited(**order: str) -> Any:
        return charge(**order)

    functions = {
        "wrapper": wrapper,
        "async wrapper": awaited,
        "lambda": lambda order: (each for each in order),
    }
    protected: Any = ours.idempotent_function(
        data_keyword_argument="order", persistence_store=MemoryStore()
    )(functions[kind])

    async def call() -> Any:
        given = protected(order="a")
        return await given if kind == "async wrapper" else given

    for _ in range(2):  # it was not recorded
        with pytest.raises(TypeError, match="awaitable or a generator"):
            asyncio.run(call())


def test_generator_functions_are_refused():
    def charge(order: str) -> Iterator[str]:
        yield order

    async def charge_async(order: str) -> Any:
        yield order

    for function in (charge, charge_async):
        with pytest.raises(TypeError, match="generator function"):
            ours.idempotent_function(data_keyword_argument="order", persistence_store="memory:")(
                function
            )


class Gated(MemoryStore):
    """A store that takes its time to write results."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = threading.Event(), threading.Event()

    async def remember(self, memories: Any) -> Any:
        self.asked.set()
        assert await asyncio.to_thread(self.gate.wait, LONG_S)
        return await super().remember(memories)


def test_cancelled_after_the_call_was_made_it_is_recorded_all_the_same(shop):
    store = Gated()

    @ours.idempotent_function(
        data_keyword_argument="order",
        persistence_store=store,
        patience=timedelta(seconds=LONG_S),
    )
    async def charge(order: str) -> Any:
        return shop.charge(order)

    async def cancel() -> Any:
        call = asyncio.create_task(charge(order="a"))
        assert await asyncio.to_thread(store.asked.wait, LONG_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        store.gate.set()
        return await charge(order="a")

    assert asyncio.run(cancel())["receipt"] == 1
    assert shop.charged == ["a"]


def test_an_interrupted_wait_leaves_nothing_behind(shop):
    store = FaultyStore(MemoryStore())
    begun, gate = threading.Event(), threading.Event()

    @ours.idempotent_function(
        data_keyword_argument="order",
        persistence_store=store,
        patience=timedelta(seconds=LONG_S),
    )
    def charge(order: str) -> Any:
        begun.set()
        assert gate.wait(LONG_S)
        return shop.charge(order)

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def interrupt_when_waiting() -> None:
        while store.calls["claim"] < 3:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    shop.fails = {"a"}
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(charge, order="a")
            assert begun.wait(LONG_S)
            threads.submit(interrupt_when_waiting)
            with pytest.raises(Interrupted):
                charge(order="a")
            gate.set()
            assert isinstance(first.exception(LONG_S), ConnectionError)
    finally:
        signal.signal(signal.SIGUSR1, before)
    time.sleep(0.6)  # would it still wait, it would have taken the key by now
    assert charge(order="a")["receipt"] == 1


def test_close_waits_a_little_and_keeps_no_caller_waiting(shop, caplog):
    begun, gate = threading.Event(), threading.Event()

    @ours.idempotent_function(data_keyword_argument="order", persistence_store=MemoryStore())
    def charge(order: str) -> Any:
        begun.set()
        assert gate.wait(LONG_S)
        return shop.charge(order)

    first = aside(charge, order="a")
    assert begun.wait(LONG_S)
    ours.close(timedelta(seconds=0.1))
    gate.set()
    assert first.result(LONG_S)["receipt"] == 1
    assert [record.message for record in caplog.records] == ["oncebridge.call_not_recorded"]
    assert charge(order="b")["receipt"] == 2, "it starts anew"


def test_after_close_an_address_is_opened_anew(shop, tmp_path):
    @ours.idempotent_function(
        data_keyword_argument="order", persistence_store=f"sqlite:{tmp_path / 'seen.db'}"
    )
    def charge(order: str) -> Any:
        return shop.charge(order)

    for _ in range(2):
        assert charge(order="a")["receipt"] == 1
        ours.close()
    assert shop.charged == ["a"]


FORKED = """
import os, signal
from oncebridge.aws.powertools import close, idempotent_function
from oncebridge.errors import ConfigError

@idempotent_function(data_keyword_argument="order", persistence_store="memory:")
def charge(order):
    return order

assert charge(order=1) == 1
if (child := os.fork()) == 0:
    signal.alarm(30)  # should it hang
    try:
        charge(order=2)
    except ConfigError as error:
        close()
        print("refused" if "forked" in str(error) else error, flush=True)
        os._exit(0)
os.waitpid(child, 0)
assert charge(order=3) == 3
close()
if (child := os.fork()) == 0:
    signal.alarm(30)
    print(charge(order=4), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_is_told_so():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "refused\n4\n"


# --- the rest -----------------------------------------------------------------------------------


def test_functions_and_prefixes_are_kept_apart(shop, monkeypatch):
    store = MemoryStore()

    def protect(**options: Any) -> Any:
        @ours.idempotent_function(data_keyword_argument="order", persistence_store=store, **options)
        def charge(order: str) -> Any:
            return shop.charge(order)

        return charge

    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "orders")
    orders, same, other = protect(), protect(), protect(key_prefix="other")
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "refunds")
    refunds = protect()
    receipts = [call(order="a")["receipt"] for call in (orders, same, other, refunds, orders)]
    assert receipts == [1, 1, 2, 3, 1]


def test_what_is_no_dict_has_a_key_too(shop):
    @dataclasses.dataclass
    class Order:
        number: int
        price: Decimal
        by: UUID

    class Model:
        def model_dump(self, mode: str) -> Any:
            assert mode == "json"
            return {"number": 9}

    @ours.idempotent_function(data_keyword_argument="order", persistence_store="memory:")
    def charge(order: Any) -> Any:
        return shop.charge(str(order)[:5])["receipt"]

    by = UUID("0d9ef1b4-6d1e-4d57-9a3a-7d2f40a6c001")
    calls = [Order(1, Decimal("1.5"), by), Order(1, Decimal("1.5"), by), Order(2, Decimal(1), by)]
    assert [charge(order=order) for order in calls] == [1, 1, 2]
    assert [charge(order=order) for order in ("a", "a", 7, [7], {"number": 9}, Model())] == [
        *(3, 3, 4, 5, 6, 6)
    ]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"of": {1, 2}}, "a set has no form in JSON"),
        ({"of": object()}, "TypeError"),
        ({"of": "\ud800"}, "surrogate"),
        ({"of": float("nan")}, "finite"),
        ({"of": 10**5000}, "ValueError"),
        (nested(100_000), "RecursionError"),
    ],
    ids=["set", "object", "surrogate", "nan", "digits", "depth"],
)
def test_a_payload_of_which_no_key_can_be_made_is_refused_by_name(payload, why, shop):
    @ours.idempotent_function(data_keyword_argument="order", persistence_store="memory:")
    def charge(order: Any) -> Any:
        return shop.charge(1)

    with pytest.raises(ours.IdempotencyKeyError, match=why) as raised:
        charge(order=payload)
    assert raised.value.__cause__ is None, "which could quote the payload"
    assert shop.charged == []


def test_large_and_deep_payloads_have_keys_too(shop):
    @ours.idempotent_function(data_keyword_argument="order", persistence_store="memory:")
    def charge(order: Any) -> Any:
        return shop.charge(1)["receipt"]

    large = {"a": "x" * 3_000_000}
    calls = [charge(order=order) for order in (large, large, {**large, "b": 1}, nested(99))]
    assert calls == [1, 1, 2, 3]


@pytest.mark.parametrize(
    "key",
    [
        *(None, "", " ", 0, 0.0, False, [], {}, [None], [None, 1], [""], [[]], [[None]], (None,)),
        *({"a": None}, {"a": {}}, {"items": []}, {"a": None, "b": 0}),
    ],
    ids=repr,
)
def test_a_key_is_missing_where_powertools_misses_it(key):
    assert is_missing(key) is BasePersistenceLayer.is_missing_idempotency_key(key)


def test_the_functions_of_powertools_in_expressions(shop):
    packed = "H4sIAAAAAAACA6tWyi9KSS1SsjKsBQBeJ3//CwAAAA=="
    config = ours.IdempotencyConfig(
        event_key_jmespath="powertools_json(powertools_base64_gzip(data)).order"
    )

    @ours.idempotent_function(
        data_keyword_argument="record", config=config, persistence_store=MemoryStore()
    )
    def charge(record: Any) -> Any:
        return shop.charge("x")["receipt"]

    plain = ours.IdempotencyConfig(event_key_jmespath="powertools_json(powertools_base64(data)).n")
    assert plain.find_key is not None
    assert plain.find_key({"data": "eyJuIjogMX0="}) == 1
    assert [charge(record={"data": packed, "n": n}) for n in range(2)] == [1, 1]


def test_a_packed_payload_is_not_unpacked_without_end(shop):
    config = ours.IdempotencyConfig(event_key_jmespath="powertools_base64_gzip(data)")

    @ours.idempotent_function(
        data_keyword_argument="record", config=config, persistence_store=MemoryStore()
    )
    def charge(record: Any) -> Any:
        return shop.charge("x")

    bomb = base64.b64encode(gzip.compress(bytes(17 << 20))).decode()
    for data, why in ((bomb, "unpacks to more"), ("AAAA", "gzip"), (7, "JMESPathTypeError")):
        with pytest.raises(ours.IdempotencyKeyError, match=why):
            charge(record={"data": data})
    assert shop.charged == []


@contextlib.contextmanager
def warned_here(message: str) -> Iterator[None]:
    """Expect one warning, about the line that made the call."""
    with pytest.warns(UserWarning, match=message) as found:
        yield
    assert [Path(one.filename).name for one in found] == [Path(__file__).name]


@pytest.mark.parametrize("word", ["1", "y", "YES", "t", "true", "on"])
@pytest.mark.parametrize("swapped", [False, True], ids=["theirs", "ours"])
def test_switched_off_by_the_environment_every_call_is_made(
    swapped, word, shop, monkeypatch, their_store
):
    library: Any = ours if swapped else theirs
    store = MemoryStore() if swapped else their_store()

    @library.idempotent_function(data_keyword_argument="order", persistence_store=store)
    def charge(order: str) -> Any:
        return shop.charge(order)

    @library.idempotent(persistence_store=store)
    def handler(event: str, _: Any) -> Any:
        return shop.charge(event)

    monkeypatch.setenv("POWERTOOLS_IDEMPOTENCY_DISABLED", word)
    for _ in range(2):
        with pytest.warns(UserWarning, match="production"):
            handler("b", None)
        with warned_here("production"):
            charge(order="a")
        with warned_here("production"):
            charge("a")  # even so
    assert shop.charged == ["b", "a", "a"] * 2


async def test_an_async_function_is_switched_off_too(shop, monkeypatch):
    @ours.idempotent_function(data_keyword_argument="order", persistence_store=MemoryStore())
    async def charge(order: str) -> Any:
        return shop.charge(order)

    monkeypatch.setenv("POWERTOOLS_IDEMPOTENCY_DISABLED", "true")
    for _ in range(2):
        with warned_here("production"):
            await charge("a")
    assert shop.charged == ["a", "a"]


@pytest.mark.parametrize("swapped", [False, True], ids=["theirs", "ours"])
def test_a_call_without_a_lambda_context_is_protected_and_warned_of(
    swapped, shop, their_store, our_store
):
    library: Any = ours if swapped else theirs
    config = library.IdempotencyConfig()
    store = our_store if swapped else their_store()

    @library.idempotent_function(
        data_keyword_argument="order", config=config, persistence_store=store
    )
    def charge(order: str) -> Any:
        return shop.charge(order)

    @library.idempotent(persistence_store=our_store if swapped else their_store())
    def handler(event: str, _: Any) -> Any:
        return shop.charge(event)

    for _ in range(2):
        with pytest.warns(UserWarning, match="time left.*register_lambda_context"):
            charge(order="a")
        with pytest.warns(UserWarning, match="time left.*register_lambda_context"):
            handler("b", None)
    config.register_lambda_context(Invocation())
    with warnings.catch_warnings(action="error"):
        charge(order="a")
        handler("b", Invocation())
    assert shop.charged == ["a", "b"]


def test_a_hook_that_is_set_later_is_called_by_theirs_and_refused_by_ours(shop, their_store):
    def protect(library: Any, config: Any, store: Any) -> Any:
        @library.idempotent_function(
            data_keyword_argument="order", config=config, persistence_store=store
        )
        def charge(order: str) -> Any:
            return shop.charge(order)

        return charge

    config: Any = theirs.IdempotencyConfig(lambda_context=Invocation())  # type: ignore[arg-type]
    config.response_hook = lambda response, _: {**response, "hooked": True}
    charge = protect(theirs, config, their_store())
    charge(order="a")
    assert charge(order="a")["hooked"]
    config = ours.IdempotencyConfig(lambda_context=Invocation())
    with pytest.raises(ConfigError, match=r"response_hook.*on_duplicate"):
        config.response_hook = print
    assert config.response_hook is None
    config.response_hook = None
    charge = protect(ours, config, MemoryStore())
    assert charge(order="b") == charge(order="b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("event_key_jmespath", "order"),
        ("payload_validation_jmespath", "amount"),
        ("jmespath_options", {}),
        ("expires_after_seconds", 60),
    ],
)
def test_what_would_have_no_effect_later_is_refused(name, value):
    config = ours.IdempotencyConfig()
    with pytest.raises(ConfigError, match=f"{name}.*IdempotencyConfig"):
        setattr(config, name, value)
    config.raise_on_no_idempotency_key = True  # what is looked at for each call may change
    charge = ours.idempotent_function(
        data_keyword_argument="order", config=config, persistence_store=MemoryStore()
    )(print)
    with pytest.raises(ours.IdempotencyKeyError):
        charge(order=None)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"event_key_jmespath": "a..b"}, "event_key_jmespath.*is not JMESPath"),
        ({"payload_validation_jmespath": "["}, "payload_validation_jmespath.*is not JMESPath"),
        ({"response_hook": print}, "response_hook.*on_duplicate"),
        ({"expires_after_seconds": 0}, "expires_after_seconds"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        ours.IdempotencyConfig(**options)


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="persistence_store"):
        ours.idempotent(persistence_store="dynamo://table")(print)


def test_powertools_itself_is_not_needed():
    code = "import sys, oncebridge.aws.powertools; print('aws_lambda_powertools' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"
