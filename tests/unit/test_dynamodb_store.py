"""What the contract cannot know: addresses, checks at the start, faults, and the clock."""

import asyncio
import base64
import logging
import os
from contextlib import asynccontextmanager
from datetime import timedelta
from email.utils import formatdate, parsedate_to_datetime

import boto3
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers.aws import AWS
from tests.servers.meddler import (
    changing,
    failing,
    failing_statements,
    hang,
    meddling,
    saying,
    swallow,
    vanish,
)

from oncebridge.aws.templates import rendering
from oncebridge.aws.templates.access import ACTIONS
from oncebridge.base.clock import system_clock
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.events.key import Part
from oncebridge.service.addresses import StorePlace
from oncebridge.stores.api import (
    Busy,
    Claim,
    Commit,
    Commits,
    Fate,
    Held,
    Memories,
    Memory,
    NoAnswer,
    Record,
    Release,
    Releases,
    Reply,
    Want,
    Wants,
)
from oncebridge.stores.conditional import Records
from oncebridge.stores.dynamodb.store import DynamoDBOptions, DynamoDBStore
from oncebridge.stores.record_encoding import decode_record, encode_records
from oncebridge.testing import ManualClock

FORM_ITEM = {
    "k": {"B": base64.b64encode(b"oncebridge:form").decode()},
    "r": {"B": base64.b64encode(b"\x01").decode()},
}


@pytest.fixture
def server(dynoxide):
    return dynoxide


@pytest.fixture
def table(server):
    name = server.table()
    yield name
    server.drop(name)


@pytest.fixture
async def meddler(server):
    async with meddling(server) as found:
        yield found


@asynccontextmanager
async def opened(meddler, table, *, clock=None, **options):
    patience = {"timeout": timedelta(seconds=30), **options}  # with a busy machine
    options = DynamoDBOptions(endpoint=meddler.endpoint, **patience)
    async with DynamoDBStore(table, options, clock=clock) as store:
        meddler.calls.clear()
        yield store


def want(*keys, lease_ms=30_000):
    parts = tuple(Part(key) for key in keys or (os.urandom(8),))
    return Want(parts, os.urandom(16), os.urandom(16), lease_ms, 60_000)


def wants(count):
    return [want() for _ in range(count)]


def items_of(server, table):
    """Give the items of records, without that with their form."""
    items = server.ask("Scan", {"TableName": table})["Items"]
    return [item for item in items if item["k"] != FORM_ITEM["k"]]


def done(claim, part=0):
    held = claim.held[part]
    return Commit(held.key, held.generation, Fate.DELIVERED, 60_000)


# --- addresses --------------------------------------------------------------------------------

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/records"


@pytest.mark.parametrize(
    ("url", "name", "region"),
    [
        ("dynamodb://records", "records", None),
        ("dynamodb://Genesys_dedup.v2-b?region=eu-north-1", "Genesys_dedup.v2-b", "eu-north-1"),
        (f"dynamodb:{ARN}", "records", "eu-west-1"),
        (
            "dynamodb:arn:aws-us-gov:dynamodb:us-gov-west-1:123456789012:table/records",
            "records",
            "us-gov-west-1",
        ),
    ],
)
def test_a_table_is_named_by_an_address(url, name, region):
    store = DynamoDBStore.from_url(url)
    assert (store._name, store._client._account._region) == (name, region)


@pytest.mark.parametrize(
    "url",
    [
        "dynamodb:",
        "dynamodb://",
        "dynamodb://ab",
        "dynamodb://records/more",
        "dynamodb://records?table=x",
        "dynamodb://user@records",
        'dynamodb://rec"ords',
        "dynamodb:arn:aws:dynamodb:eu-west-1:123456789012:table/records/index/x",
        "dynamodb:arn:aws:s3:::records",
        f"dynamodb://{'r' * 256}",
        "redis://records",
    ],
)
def test_an_address_that_names_no_table_is_refused(url):
    with pytest.raises(ConfigError, match=r"DynamoDB|only \?region"):
        DynamoDBStore.from_url(url)


@pytest.mark.parametrize("url", [f"dynamodb:{ARN}", "dynamodb://records?region=eu-west-1"])
def test_two_regions_are_one_too_many(url):
    assert DynamoDBStore.from_url(url, DynamoDBOptions(region="eu-west-1"))
    with pytest.raises(ConfigError, match=r"(says|has) eu-west-1"):
        DynamoDBStore.from_url(url, DynamoDBOptions(region="us-east-1"))


def test_the_address_and_its_options_are_found_by_the_configuration():
    place = StorePlace.of("dynamodb://records", timeout="3s", max_skew="3s", connections=4)
    assert isinstance(place.opened, DynamoDBStore)
    assert place.opened._client._timeout_s == 3
    assert place.opened._margin_ms == 3000
    with pytest.raises(ConfigError, match="timeout"):
        StorePlace.of("dynamodb://records", timeout="0s")


# --- encoded records ---------------------------------------------------------------------------

_times = st.integers(0, 2**53)
_records = st.builds(
    Record,
    key=st.binary(max_size=50),
    token=st.sampled_from([b"", b"t" * 16]),
    generation=st.binary(min_size=16, max_size=16),
    until_ms=_times,
    attempts=st.integers(0, 1000),
    hash=st.binary(max_size=32),
    fate=st.sampled_from([None, *Fate]),
    memo=st.binary(max_size=300),
    hard_until_ms=_times,
    keep_until_ms=_times,
)


def packed(*records, key=None):
    columns = Records.of(records)
    return encode_records(columns, columns.keys if key is None else key)


@given(st.lists(_records, max_size=3))
def test_records_come_back_as_they_were_packed(records):
    data = packed(*records)
    assert [decode_record(one) for one in data] == records
    assert packed(*[decode_record(one) for one in data]) == data
    beside = zip(packed(*records, key=b""), records, strict=True)
    assert [decode_record(one, record.key) for one, record in beside] == records


@given(st.lists(_records, max_size=3))
def test_a_record_is_packed_the_same_alone_and_among_others(records):
    assert packed(*records) == [packed(record)[0] for record in records]


@given(_records)
def test_an_item_is_far_smaller_than_a_kilobyte(record):
    (data,) = packed(record, key=b"")
    assert len(data) < 80 + len(record.hash) + len(record.memo)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x02", b"\x01", b"\x01\x90", b"\x01" + b"\xff" * 40]
)
def test_what_is_no_record_is_not_taken_for_one(data):
    with pytest.raises(StoreError, match=r"form that this version does not know|damaged"):
        decode_record(data)


def test_a_fate_of_a_later_version_is_not_taken_for_another():
    record = Record(b"k", b"", b"g" * 16, 1, 1, b"", Fate.DEAD, b"", 0, 1)
    data = packed(record)[0].replace(bytes([Fate.DEAD]), b"\x63", 1)
    with pytest.raises(StoreError, match="damaged"):
        decode_record(data)


# --- opening ----------------------------------------------------------------------------------


async def test_a_table_that_is_not_there_is_told_with_what_to_do(server):
    store = DynamoDBStore("nowhere", DynamoDBOptions(endpoint=server.endpoint))
    with pytest.raises(ConfigError, match=r"no DynamoDB table nowhere.*oncebridge migrate"):
        await store.open()
    await store.aclose()


async def test_a_table_with_another_key_is_refused(server):
    server.ask(
        "CreateTable",
        {
            "TableName": "of-others",
            "AttributeDefinitions": [{"AttributeName": "k", "AttributeType": "S"}],
            "KeySchema": [{"AttributeName": "k", "KeyType": "HASH"}],
            "BillingMode": "PAY_PER_REQUEST",
        },
    )
    store = DynamoDBStore("of-others", DynamoDBOptions(endpoint=server.endpoint))
    with pytest.raises(ConfigError, match="only key must be k, of type binary"):
        await store.open()
    await store.aclose()
    server.drop("of-others")


async def test_items_of_others_are_not_taken_for_records(server, table):
    item = {"k": {"B": "AAAA"}, "v": {"S": "something else"}}
    server.ask("PutItem", {"TableName": table, "Item": item})
    async with DynamoDBStore(table, DynamoDBOptions(endpoint=server.endpoint)) as store:
        with pytest.raises(StoreError, match="items that are not from oncebridge"):
            await store.peek([b"\0\0\0"])
        with pytest.raises(StoreError, match="items that are not from oncebridge"):
            await store.scan()


def _described(**more):
    return changing(lambda told: told["Table"].update(more))


_REPLICAS = [{"RegionName": "eu-central-1", "ReplicaStatus": "ACTIVE"}]


@pytest.mark.parametrize(
    "more",
    [
        {"Replicas": _REPLICAS},
        {"Replicas": _REPLICAS, "MultiRegionConsistency": "EVENTUAL"},
        {"GlobalTableVersion": "2017.11.29"},
    ],
)
async def test_replicas_that_are_eventually_consistent_are_refused(meddler, table, more):
    meddler.next("DescribeTable", _described(**more))
    with pytest.raises(ConfigError, match="two Regions could both deliver the same event"):
        async with opened(meddler, table):
            pass


async def test_replicas_with_strong_consistency_do_without_transactions_and_expiry(meddler, table):
    meddler.next("DescribeTable", _described(Replicas=_REPLICAS, MultiRegionConsistency="STRONG"))
    clock = ManualClock()
    async with opened(meddler, table, clock=clock) as store:
        (claim,) = await store.claim(Wants.of([want(b"one", b"two")]))
        assert isinstance(claim, Claim)
        assert meddler.count("TransactWriteItems") == 0
        clock.advance(200_000)
        assert [await store.purge(), await store.purge()] == [2, 0]
        assert await store.peek([b"one", b"two"]) == [None, None]
    assert meddler.count("DescribeTimeToLive") == 0


async def test_purging_keeps_up_with_what_is_added(meddler, table):
    meddler.next("DescribeTable", _described(Replicas=_REPLICAS, MultiRegionConsistency="STRONG"))
    clock = ManualClock()
    async with opened(meddler, table, clock=clock) as store:
        await store.remember(Memories.of([Memory(b"kept", b"g" * 16, Fate.DELIVERED, 10**9)]))
        for _ in range(10):
            claims = await store.claim(Wants.of(wants(40)))
            await store.commit(Commits.of([done(claim) for claim in claims]))
            while await store.purge(10) >= 10:
                pass
            clock.advance(40_000)  # what is done is remembered for 60 s
        records, _ = await store.scan()
        assert b"kept" in [record.key for record in records]
        assert len(records) <= 3 * 40 + 1


async def test_purging_removes_nothing_that_was_changed_meanwhile(meddler, table):
    meddler.next("DescribeTable", _described(Replicas=_REPLICAS, MultiRegionConsistency="STRONG"))
    clock = ManualClock()
    async with opened(meddler, table, clock=clock) as store:
        await store.claim(Wants.of([want(b"one")]))
        clock.advance(200_000)

        async def claimed_meanwhile(asked, pass_on):
            await store.claim(Wants.of([want(b"one")]))
            return await pass_on(asked)

        meddler.next("DeleteItem", claimed_meanwhile)
        assert await store.purge() == 0
        (record,) = await store.peek([b"one"])
        assert record.attempts == 2


@pytest.mark.parametrize("status", ["CREATING", "DELETING", "INACCESSIBLE_ENCRYPTION_CREDENTIALS"])
async def test_a_table_that_is_not_ready_may_be_so_later(meddler, table, status):
    meddler.next("DescribeTable", _described(TableStatus=status))
    with pytest.raises(StoreUnavailable, match=status.lower()):
        async with opened(meddler, table):
            pass


async def test_a_table_of_another_account_is_not_taken_for_the_one_that_is_meant(meddler, table):
    meddler.next("DescribeTable", _described(TableArn=f"{ARN}-2"))
    options = DynamoDBOptions(endpoint=meddler.endpoint)
    store = DynamoDBStore(f"arn:aws:dynamodb:us-east-1:123456789012:table/{table}", options)
    with pytest.raises(ConfigError, match="profile that assumes a role there"):
        await store.open()
    await store.aclose()


@pytest.mark.parametrize(
    "found",
    [
        {"TimeToLiveStatus": "DISABLED"},
        {"TimeToLiveStatus": "DISABLING", "AttributeName": "x"},
        {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires"},
    ],
)
async def test_a_table_that_never_forgets_is_warned_of(meddler, table, caplog, found):
    meddler.next("DescribeTimeToLive", saying(200, {"TimeToLiveDescription": found}))
    async with opened(meddler, table):
        pass
    (record,) = caplog.records
    assert (record.message, record.do) == (
        "oncebridge.dynamodb_without_expiry",
        "oncebridge migrate",
    )


async def test_a_table_as_it_should_be_is_opened_without_a_word(meddler, table, caplog):
    async with opened(meddler, table) as store:
        await store.open()
        assert meddler.calls == []
    assert caplog.records == []


async def test_expiry_that_may_not_be_looked_at_is_no_reason_to_stop(meddler, table, caplog):
    meddler.next("DescribeTimeToLive", failing("AccessDeniedException"))
    async with opened(meddler, table):
        pass
    assert [record.message for record in caplog.records] == ["oncebridge.dynamodb_expiry_unknown"]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("AccessDeniedException", ConfigError, "AWS denies access to the DynamoDB table"),
        ("UnrecognizedClientException", ConfigError, "does not accept the credentials"),
        ("InvalidSignatureException", ConfigError, "does not accept the signature"),
        ("ValidationException", ConfigError, "DynamoDB refuses: ValidationException: so it is"),
        ("ThrottlingException", StoreUnavailable, "ThrottlingException"),
        ("InternalServerError", StoreUnavailable, "InternalServerError"),
    ],
)
async def test_a_start_that_fails_says_whether_a_human_is_needed(
    meddler, table, code, kind, message
):
    meddler.always("DescribeTable", failing(code))
    with pytest.raises(kind, match=message):
        async with opened(meddler, table):
            pass


async def test_a_start_without_a_server_may_be_tried_again(table):
    options = DynamoDBOptions(endpoint="http://127.0.0.1:9")
    store = DynamoDBStore(table, options)
    with pytest.raises(StoreUnavailable, match="connection refused"):
        await store.open()
    await store.aclose()


# --- the form of the records -------------------------------------------------------------------


async def test_a_table_has_the_form_of_its_records_from_the_start_and_for_ever(server, table):
    options = DynamoDBOptions(endpoint=server.endpoint)
    stores = [DynamoDBStore(table, options) for _ in range(5)]
    await asyncio.gather(*[store.open() for store in stores])
    assert server.ask("Scan", {"TableName": table})["Items"] == [FORM_ITEM]
    for store in stores:
        assert await store.scan() == ([], b"")
        assert await store.purge() == 0
        await store.aclose()


async def test_where_items_do_not_expire_purging_leaves_the_form(meddler, server, table):
    meddler.next("DescribeTable", _described(Replicas=_REPLICAS, MultiRegionConsistency="STRONG"))
    clock = ManualClock()
    async with opened(meddler, table, clock=clock) as store:
        await store.claim(Wants.of(wants(3)))
        clock.advance(10**9)
        assert await store.purge() == 3
    assert server.ask("Scan", {"TableName": table})["Items"] == [FORM_ITEM]


async def test_a_worker_does_not_start_on_records_of_a_newer_form(server, table):
    item = {**FORM_ITEM, "r": {"B": base64.b64encode(b"\x02").decode()}}
    server.ask("PutItem", {"TableName": table, "Item": item})
    store = DynamoDBStore(table, DynamoDBOptions(endpoint=server.endpoint))
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"{table} has records of form 02.*upgrade this"):
            await store.open()
    await store.aclose()
    assert server.ask("Scan", {"TableName": table})["Items"] == [item]


async def test_a_form_that_cannot_be_read_now_may_be_so_later(meddler, table):
    meddler.always("BatchGetItem", _leaving_unread(1))
    with pytest.raises(StoreUnavailable, match="throttles"):
        async with opened(meddler, table, timeout=timedelta(seconds=0.3)):
            pass
    meddler.always("BatchGetItem", failing("ThrottlingException"))
    with pytest.raises(StoreUnavailable):
        async with opened(meddler, table):
            pass


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [swallow, vanish])
async def test_a_claim_whose_answer_was_lost_is_known_by_its_token(meddler, table, fault):
    async with opened(meddler, table) as store:
        asked = want()
        meddler.next("BatchExecuteStatement", fault)
        with pytest.raises(StoreUnavailable, match="connection closed without an answer"):
            await store.claim(Wants.of([asked]))
        (claim,) = await store.claim(Wants.of([asked]))
        assert isinstance(claim, Claim)
        assert claim.held == (Held(asked.parts[0].key, asked.generation, 1, b""),)
        assert await store.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]


@pytest.mark.parametrize("fault", [swallow, vanish])
async def test_a_claim_of_two_parts_whose_answer_was_lost_is_known_too(meddler, table, fault):
    async with opened(meddler, table) as store:
        asked = want(b"one", b"two")
        meddler.next("TransactWriteItems", fault)
        with pytest.raises(StoreUnavailable):
            await store.claim(Wants.of([asked]))
        (claim,) = await store.claim(Wants.of([asked]))
        assert [held.attempts for held in claim.held] == [1, 1]
        assert (
            await store.commit(Commits.of([done(claim, 0), done(claim, 1)]))
            == [Reply.COMMITTED] * 2
        )


async def test_a_take_over_whose_answer_was_lost_counts_once(meddler, table):
    clock = ManualClock()
    async with opened(meddler, table, clock=clock) as store:
        await store.claim(Wants.of([want(b"one", lease_ms=10)]))
        clock.advance(10)
        asked = want(b"one")
        meddler.next(
            "BatchExecuteStatement", failing_statements("DuplicateItem", lambda _: True), swallow
        )
        with pytest.raises(StoreUnavailable):
            await store.claim(Wants.of([asked]))
        (claim,) = await store.claim(Wants.of([asked]))
        assert claim.held[0].attempts == 2


async def test_a_commit_whose_answer_was_lost_was_made(meddler, table):
    async with opened(meddler, table) as store:
        (claim,) = await store.claim(Wants.of([want()]))
        meddler.next("BatchExecuteStatement", swallow)
        with pytest.raises(StoreUnavailable):
            await store.commit(Commits.of([done(claim)]))
        assert await store.commit(Commits.of([done(claim)])) == [Reply.ALREADY]


async def test_a_call_ends_when_its_time_is_over(meddler, table):
    async with opened(meddler, table, timeout=timedelta(seconds=0.3)) as store:
        for operation, call in (
            ("BatchExecuteStatement", store.claim(Wants.of(wants(1)))),
            ("BatchExecuteStatement", store.claim(Wants.of(wants(60)))),
            ("TransactWriteItems", store.claim(Wants.of([want(b"1", b"2")]))),
            ("BatchGetItem", store.peek([b"1"])),
            ("Scan", store.scan()),
        ):
            meddler.always(operation, hang)
            async with asyncio.timeout(3):
                with pytest.raises(StoreUnavailable, match=r"no answer within 0\.3 s"):
                    await call


async def test_what_one_call_of_several_leaves_open_is_told_for_its_items_alone(meddler, table):
    async with opened(meddler, table) as store:
        meddler.next("BatchExecuteStatement", vanish)
        answers = await store.claim(Wants.of(wants(60)))
        open_ = [at for at, answer in enumerate(answers) if isinstance(answer, NoAnswer)]
        assert len(open_) in (10, 25)
        assert sum(isinstance(answer, Claim) for answer in answers) == 60 - len(open_)


@pytest.mark.parametrize(
    "code",
    [
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "ThrottlingError",
        "InternalServerError",
        "SomethingNew",
    ],
)
async def test_a_statement_that_is_throttled_is_handed_back(meddler, table, code):
    async with opened(meddler, table) as store:
        asked = wants(4)
        meddler.next("BatchExecuteStatement", failing_statements(code, lambda at: at == 2))
        answers = await store.claim(Wants.of(asked))
        assert [type(answer) for answer in answers] == [Claim, Claim, NoAnswer, Claim]
        assert answers[2].reason == f"DynamoDB: {code}"
        again = await store.claim(Wants.of(asked))
        assert [type(answer) for answer in again] == [Claim] * 4


async def test_a_commit_that_is_throttled_is_handed_back(meddler, table):
    async with opened(meddler, table) as store:
        claims = await store.claim(Wants.of(wants(3)))
        fault = failing_statements("ThrottlingError", lambda at: at == 1)
        meddler.next("BatchExecuteStatement", fault)
        answers = await store.commit(Commits.of([done(claim) for claim in claims]))
        assert [type(answer) for answer in answers] == [Reply, NoAnswer, Reply]
        assert await store.commit(Commits.of([done(claims[1])])) == [Reply.COMMITTED]


@pytest.mark.parametrize("code", ["ThrottlingException", "RequestLimitExceeded"])
async def test_a_call_that_is_throttled_is_handed_back(meddler, table, code):
    async with opened(meddler, table) as store:
        meddler.next("BatchExecuteStatement", failing(code))
        with pytest.raises(StoreUnavailable, match=code):
            await store.claim(Wants.of(wants(3)))
        assert meddler.count("BatchExecuteStatement") == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ResourceNotFound", "; create it with: oncebridge migrate"),
        ("AccessDenied", "AWS denies access"),
        ("ValidationError", "DynamoDB refuses"),
    ],
)
async def test_what_is_no_use_repeating_is_said_so(meddler, table, code, message):
    async with opened(meddler, table) as store:
        meddler.next("BatchExecuteStatement", failing_statements(code, lambda at: at == 1))
        with pytest.raises(StoreError, match=message) as caught:
            await store.claim(Wants.of(wants(2)))
        assert not isinstance(caught.value, StoreUnavailable)
        meddler.next("BatchExecuteStatement", failing(f"{code}Exception"))
        with pytest.raises(StoreError, match=message) as caught:
            await store.claim(Wants.of(wants(2)))
        assert not isinstance(caught.value, StoreUnavailable)


def _cancelled(*codes):
    reasons = [{"Code": code} for code in codes]
    return failing("TransactionCanceledException", CancellationReasons=reasons)


async def test_a_transaction_that_met_another_is_tried_again(meddler, table):
    async with opened(meddler, table) as store:
        meddler.next("TransactWriteItems", _cancelled("None", "TransactionConflict"))
        (claim,) = await store.claim(Wants.of([want(b"one", b"two")]))
        assert isinstance(claim, Claim)
        assert meddler.count("BatchGetItem") == 1


async def test_a_transaction_that_keeps_meeting_others_is_handed_back(meddler, table):
    async with opened(meddler, table) as store:
        meddler.always("TransactWriteItems", _cancelled("None", "TransactionConflict"))
        (answer,) = await store.claim(Wants.of([want(b"one", b"two")]))
        assert answer == NoAnswer("other workers keep changing this key")


async def test_a_transaction_that_is_throttled_is_handed_back(meddler, table):
    async with opened(meddler, table) as store:
        meddler.next("TransactWriteItems", _cancelled("ThrottlingError", "None"))
        (answer, other) = await store.claim(
            Wants.of([want(b"one", b"two"), want(b"three", b"four")])
        )
        assert {type(answer), type(other)} == {NoAnswer, Claim}
        told = answer if isinstance(answer, NoAnswer) else other
        assert told.reason == "DynamoDB: ThrottlingError"


async def test_a_transaction_that_is_refused_for_good_is_said_so(meddler, table):
    async with opened(meddler, table) as store:
        meddler.next("TransactWriteItems", _cancelled("None", "ValidationError"))
        with pytest.raises(StoreError, match="DynamoDB refuses: ValidationError"):
            await store.claim(Wants.of([want(b"one", b"two")]))


def _leaving_unread(count):
    async def rule(asked, pass_on):
        ((table, keys),) = asked["RequestItems"].items()
        left = keys["Keys"][:count]
        keys["Keys"] = keys["Keys"][count:]
        told = {"Responses": {table: []}}
        if keys["Keys"]:
            _, told = await pass_on(asked)
        return 200, {**told, "UnprocessedKeys": {table: {"Keys": left, "ConsistentRead": True}}}

    return rule


async def test_what_was_left_unread_is_read_with_the_next_call(meddler, table):
    async with opened(meddler, table) as store:
        claims = await store.claim(Wants.of(wants(5)))
        keys = [claim.held[0].key for claim in claims]
        meddler.next("BatchGetItem", _leaving_unread(5), _leaving_unread(2))
        records = await store.peek([*keys, b"nothing"])
        assert [record and record.key for record in records] == [*keys, None]
        assert meddler.count("BatchGetItem") == 3


async def test_what_stays_unread_is_no_answer_and_not_absent(meddler, table):
    async with opened(meddler, table, timeout=timedelta(seconds=0.3)) as store:
        first = wants(2)
        await store.claim(Wants.of(first))
        meddler.always("BatchGetItem", _leaving_unread(1))
        others = [want(one.parts[0].key) for one in first]
        answers = await store.claim(Wants.of(others))
        assert [type(answer) for answer in answers] == [NoAnswer, Busy]
        with pytest.raises(StoreUnavailable, match="throttles"):
            await store.peek([one.parts[0].key for one in first])


async def test_an_answer_that_cannot_be_read_is_none(meddler, table):
    async with opened(meddler, table) as store:
        meddler.next("BatchExecuteStatement", saying(200, {"Responses": []}))
        with pytest.raises(StoreUnavailable, match="another number of statements"):
            await store.claim(Wants.of(wants(1)))
        (claim,) = await store.claim(Wants.of(wants(1)))
        assert isinstance(claim, Claim)


async def test_an_outage_is_over_when_the_server_is_back(tmp_path, aws_identity):
    from tests.servers.aws import _dynoxide, _dynoxide_server, _ministack

    program = _dynoxide()
    server = _dynoxide_server(tmp_path, program) if program else _ministack(tmp_path)
    server.process.start()
    try:
        table = server.table()
        options = DynamoDBOptions(endpoint=server.endpoint, timeout=timedelta(seconds=1))
        async with DynamoDBStore(table, options) as store:
            (claim,) = await store.claim(Wants.of(wants(1)))
            server.process.freeze()
            with pytest.raises(StoreUnavailable, match="no answer"):
                await store.commit(Commits.of([done(claim)]))
            server.process.thaw()
            (answer,) = await store.commit(Commits.of([done(claim)]))
            assert answer in (Reply.COMMITTED, Reply.ALREADY)
            server.process.kill()
            with pytest.raises(StoreUnavailable):
                await store.claim(Wants.of(wants(30)))
            with pytest.raises(StoreUnavailable):
                await store.peek([b"k"])
    finally:
        server.process.kill()


# --- round trips ------------------------------------------------------------------------------


async def test_a_batch_takes_one_call_for_every_25(meddler, table):
    async with opened(meddler, table) as store:
        asked = wants(100)
        claims = await store.claim(Wants.of(asked))
        assert [name for name, _ in meddler.calls] == ["BatchExecuteStatement"] * 4
        assert {text["Statement"] for _, call in meddler.calls for text in call["Statements"]} == {
            store._table._insert
        }
        meddler.calls.clear()
        await store.commit(Commits.of([done(claim) for claim in claims]))
        assert [name for name, _ in meddler.calls] == ["BatchExecuteStatement"] * 4
        meddler.calls.clear()
        await store.claim(Wants.of([want(one.parts[0].key) for one in asked]))
        assert meddler.count("BatchExecuteStatement") == 4
        assert meddler.count("BatchGetItem") == 1
        assert all(
            keys["ConsistentRead"]
            for name, call in meddler.calls
            if name == "BatchGetItem"
            for keys in call["RequestItems"].values()
        )


@pytest.mark.parametrize(
    "key",
    [
        *(b"", b"k" * 2048, b"k" * 2049, b"k" * 10_000),
        *(b"oncebridge:sha256:" + b"d" * 32, b"oncebridge:form"),
    ],
)
async def test_a_key_of_any_length_has_a_place_of_its_own(meddler, table, key):
    async with opened(meddler, table) as store:
        (claim,) = await store.claim(Wants.of([want(key)]))
        assert claim.held[0].key == key
        assert isinstance((await store.claim(Wants.of([want(key)])))[0], Busy)
        assert (await store.peek([key]))[0].key == key
        records, _ = await store.scan()
        assert [record.key for record in records] == [key]
        (statement,) = meddler.calls[0][1]["Statements"]
        assert len(base64.b64decode(statement["Parameters"][2]["B"])) <= 2048


async def test_an_item_ends_a_day_after_its_record_and_in_seconds(server, meddler, table):
    async with opened(meddler, table) as store:
        (claim,) = await store.claim(Wants.of([want()]))
        (record,) = await store.peek([claim.held[0].key])
        (item,) = items_of(server, table)
        assert int(item["x"]["N"]) == record.keep_until_ms // 1000 + 86_400


async def test_an_item_of_a_record_long_past_does_not_go_at_once(server, meddler, table):
    clock = ManualClock(1_000_000_000)  # January 1970
    async with opened(meddler, table, clock=clock) as store:
        await store.claim(Wants.of([want(b"one"), want(b"two", b"three")]))
    for item in items_of(server, table):
        assert int(item["x"]["N"]) > system_clock() / 1000 + 86_000


# --- the clock --------------------------------------------------------------------------------


def _shifted(seconds):
    return lambda date: formatdate(parsedate_to_datetime(date).timestamp() + seconds, usegmt=True)


@pytest.mark.parametrize(("seconds", "side"), [(600, "behind"), (-600, "ahead of")])
async def test_a_host_whose_clock_is_off_does_not_start(meddler, table, seconds, side):
    meddler.date = _shifted(seconds)
    with pytest.raises(ConfigError, match=rf"(600|599)\.\d s {side} AWS's.*Set the clock"):
        async with opened(meddler, table):
            pass


async def test_a_clock_that_is_off_is_told_even_if_the_signature_was_refused(meddler, table):
    meddler.date = _shifted(600)

    async def refuse(asked, pass_on):
        await pass_on(asked)
        return 400, {"__type": "x#InvalidSignatureException", "message": "Signature expired"}

    meddler.always("DescribeTable", refuse)
    with pytest.raises(ConfigError, match="Set the clock"):
        async with opened(meddler, table):
            pass


async def test_a_host_whose_clock_is_a_little_off_keeps_dynamodbs_time(meddler, table):
    meddler.date = _shifted(30)
    async with opened(meddler, table, max_skew=timedelta(minutes=1)) as store:
        assert abs(await store.now_ms() - system_clock() - 30_000) < 1000
        (claim,) = await store.claim(Wants.of([want()]))
        assert abs(claim.now_ms - system_clock() - 30_000) < 1000


async def test_a_clock_that_goes_wrong_later_is_warned_of(meddler, table, caplog):
    async with opened(meddler, table, max_skew=timedelta(seconds=2)) as store:
        store._client.clock.offset_ms = 60_000
        await store.claim(Wants.of(wants(1)))
        await store.claim(Wants.of(wants(1)))
    (record,) = caplog.records
    assert (record.message, record.levelno) == ("oncebridge.dynamodb_clock_is_off", logging.WARNING)
    assert abs(record.offset_ms) > 2000


async def test_a_server_that_does_not_tell_the_time_is_warned_of(meddler, table, caplog):
    meddler.date = lambda _: "soon"
    async with opened(meddler, table):
        pass
    assert [record.message for record in caplog.records] == ["oncebridge.dynamodb_clock_unknown"]


async def test_a_claim_is_taken_over_only_when_it_is_over_by_any_clock(meddler, table):
    async with opened(meddler, table, max_skew=timedelta(seconds=2)) as store:
        store._client.clock.local = local = ManualClock(system_clock())
        store._client.clock.note = lambda *_: None
        await store.claim(Wants.of([want(b"one", lease_ms=1000)]))
        local.advance(2999)
        (answer,) = await store.claim(Wants.of([want(b"one")]))
        assert answer == Busy(b"one", 1)
        local.advance(1)
        (answer,) = await store.claim(Wants.of([want(b"one")]))
        assert answer.held[0].attempts == 2


async def test_what_was_given_back_is_free_without_a_margin(meddler, table):
    async with opened(meddler, table) as store:
        (claim,) = await store.claim(Wants.of([want(b"one")]))
        assert await store.release(Releases.of([Release(b"one", claim.token)])) == [Reply.RELEASED]
        assert isinstance((await store.claim(Wants.of([want(b"one")])))[0], Claim)


async def test_of_two_hosts_whose_clocks_differ_one_holds_a_claim(meddler, table):
    async with opened(meddler, table) as slow, opened(meddler, table) as fast:
        now = system_clock()
        for store, off_ms in ((slow, -900), (fast, 900)):
            store._client.clock.local = ManualClock(now + off_ms)
            store._client.clock.note = lambda *_: None
        (claim,) = await slow.claim(Wants.of([want(b"one", lease_ms=1000)]))
        for _ in range(10):
            slow._client.clock.local.advance(100)
            fast._client.clock.local.advance(100)
            assert isinstance((await fast.claim(Wants.of([want(b"one")])))[0], Busy)
        assert await slow.commit(Commits.of([done(claim)])) == [Reply.COMMITTED]


# --- making the table -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ministack", "dynoxide"])
async def test_the_table_is_made_and_made_once(request, caplog, kind):
    server = request.getfixturevalue(kind)
    options = DynamoDBOptions(endpoint=server.endpoint)
    for expected in (
        ["created the table made, billed on demand", "switched expiry on for the table made"],
        [],
    ):
        store = DynamoDBStore("made", options)
        assert await store.migrate() == expected
        await store.aclose()
    async with DynamoDBStore("made", options) as store:
        assert isinstance((await store.claim(Wants.of(wants(1))))[0], Claim)
    assert caplog.records == []
    server.drop("made")


async def test_a_table_that_somebody_else_makes_just_now_is_waited_for(meddler, server):
    name = "made-by-two"

    async def made_meanwhile(asked, pass_on):
        await pass_on(asked)
        return await pass_on(asked)

    meddler.next("CreateTable", made_meanwhile)
    meddler.next(
        "DescribeTable",
        failing("ResourceNotFoundException"),
        failing("ResourceNotFoundException"),
    )
    store = DynamoDBStore(name, DynamoDBOptions(endpoint=meddler.endpoint))
    assert len(await store.migrate()) == 2
    await store.aclose()
    server.drop(name)


async def test_a_table_that_expires_by_something_else_is_left_alone(meddler, table):
    expiry = {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires"}
    meddler.next("DescribeTimeToLive", saying(200, {"TimeToLiveDescription": expiry}))
    store = DynamoDBStore(table, DynamoDBOptions(endpoint=meddler.endpoint))
    with pytest.raises(ConfigError, match="expires items by expires, not by x"):
        await store.migrate()
    await store.aclose()
    assert meddler.count("UpdateTimeToLive") == 0


@pytest.mark.parametrize("operation", ["BatchGetItem", "BatchExecuteStatement"])
async def test_rights_that_are_missing_show_at_the_start(meddler, table, operation):
    meddler.always(operation, failing("AccessDeniedException"))
    with pytest.raises(ConfigError, match="AWS denies access"):
        async with opened(meddler, table):
            pass


async def test_who_may_not_make_a_table_is_told(meddler):
    meddler.next("CreateTable", failing("AccessDeniedException"))
    store = DynamoDBStore("forbidden", DynamoDBOptions(endpoint=meddler.endpoint))
    with pytest.raises(ConfigError, match="AWS denies access to the DynamoDB table forbidden"):
        await store.migrate()
    await store.aclose()


async def test_the_cloudformation_template_makes_a_table_that_serves(ministack):
    name = f"stacked-{os.getpid()}"
    client = boto3.client(
        "cloudformation",
        region_name="us-east-1",
        endpoint_url=ministack.endpoint,
        aws_access_key_id=AWS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=AWS["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_stack(
        StackName=name,
        TemplateBody=rendering.table(name),
        Capabilities=["CAPABILITY_IAM"],
    )
    for _ in range(100):
        (stack,) = client.describe_stacks(StackName=name)["Stacks"]
        if not stack["StackStatus"].endswith("IN_PROGRESS"):
            break
        await asyncio.sleep(0.1)
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    told = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
    assert told["Store"] == f"dynamodb://{name}?region=us-east-1"
    options = DynamoDBOptions(endpoint=ministack.endpoint)
    async with DynamoDBStore.from_url(told["Store"], options) as store:
        assert isinstance((await store.claim(Wants.of(wants(1))))[0], Claim)
    client.close()


def test_the_cloudformation_template_switches_expiry_on():
    # The emulator passes over it.
    text = rendering.table("genesys-dedup")
    assert "TimeToLiveSpecification:\n        AttributeName: x\n        Enabled: true\n" in text


def test_the_terraform_template_says_the_same():
    text = rendering.table("genesys-dedup", format="terraform")
    for line in (
        'default = "genesys-dedup"',
        'billing_mode                = "PAY_PER_REQUEST"',
        'hash_key                    = "k"',
        'type = "B"',
        'attribute_name = "x"',
        *(f'"{action}",' for action in ACTIONS["store.dynamodb"]),
    ):
        assert line in text
    assert text.count("{") == text.count("}")


def test_a_template_for_a_name_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="not the name of a DynamoDB table"):
        rendering.table('a"b')


async def test_the_policy_of_the_template_allows_all_that_is_done(meddler, table):
    clock = ManualClock()
    async with DynamoDBStore(
        table, DynamoDBOptions(endpoint=meddler.endpoint), clock=clock
    ) as store:
        claim, _ = await store.claim(Wants.of([want(b"one"), want(b"two", b"three")]))
        await store.commit(Commits.of([done(claim)]))
        await store.forget([b"one"])
        await store.scan()
        await store.purge()
    needed = {
        "BatchExecuteStatement": {"PartiQLInsert", "PartiQLUpdate"},
        "TransactWriteItems": {"PutItem"},
    }
    used = set().union(*(needed.get(name, {name}) for name, _ in meddler.calls))
    assert {f"dynamodb:{action}" for action in used} == set(ACTIONS["store.dynamodb"])


def test_a_store_is_made_without_a_loop_and_without_asking_anybody():
    assert isinstance(DynamoDBStore("records"), DynamoDBStore)
    assert msgspec.structs.asdict(DynamoDBOptions())["max_skew"] == timedelta(seconds=2)
