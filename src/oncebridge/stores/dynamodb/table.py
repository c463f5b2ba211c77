"""
A DynamoDB table of records, written with conditions.

An item has the key `k`, the encoded record `r`, and `x`, the second after which DynamoDB may
remove it. The condition of a write is that `r` has exactly the bytes that were read, so these
bytes are the version of a record. One more item has the form of all records, and never expires.

Writes are batches of statements, which DynamoDB runs and answers one by one. The texts of the
statements are constant; all values are parameters.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from hashlib import sha256
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from oncebridge.aws.client import AwsClient, AwsError, NotSent, Unclear
from oncebridge.base.clock import Clock
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.stores.api import Column, NoAnswer, answered, spread
from oncebridge.stores.conditional import (
    ConditionalBackend,
    Records,
    VersionedRecord,
    mapped,
    places_of,
    version_of,
)
from oncebridge.stores.record_encoding import FORM, check_form, decode_record, encode_records

_T = TypeVar("_T")
_Item = TypeVar("_Item")

_STATEMENTS: Final = 25
_READS: Final = 100
_LONGEST_KEY: Final = 2048
_OURS: Final = b"oncebridge:"
"""No key begins so in the table: one that does is replaced by its digest."""
_DIGESTED: Final = _OURS + b"sha256:"
_FORM: Final = _OURS + b"form"
_DAY_S: Final = 86_400
_PAUSE_S: Final = 0.05

_UNREAD: Final = NoAnswer("DynamoDB throttles: it did not read this key")
_encode = msgspec.json.Encoder().encode

_Values = tuple[dict[str, bytes], dict[str, str], dict[str, bytes]]

_CONFLICT_CODES = frozenset({"ConditionalCheckFailed", "DuplicateItem", "TransactionConflict"})
"""Another worker has written the item, or is writing it; reading again shows the result."""
_FINAL_CODES = frozenset({"AccessDenied", "ResourceNotFound", "ValidationError"})


class _Bytes(Struct):
    value: bytes = field(name="B")


class _Stored(Struct):
    k: _Bytes
    r: _Bytes


class _ItemKey(Struct):
    k: _Bytes


class _ItemKeys(Struct, rename="pascal"):
    keys: list[_ItemKey]


class _ReadItems(Struct, rename="pascal"):
    responses: dict[str, list[_Stored]]
    unprocessed_keys: dict[str, _ItemKeys] = {}


class _ScanPage(Struct, rename="pascal"):
    items: list[_Stored]
    last_evaluated_key: _ItemKey | None = None


class _StatementError(Struct, rename="pascal"):
    code: str = ""
    message: str | None = None


class _StatementResult(Struct, rename="pascal"):
    error: _StatementError | UnsetType = UNSET


class _StatementResults(Struct, rename="pascal"):
    responses: list[_StatementResult]


class _Cancelled(Struct, rename="pascal"):
    cancellation_reasons: list[_StatementError] = []


_Object = dict[str, msgspec.Raw]


class DynamoDBTable(ConditionalBackend):
    """The table *name*; keys that DynamoDB leaves unread are requested again for *timeout_s*."""

    def __init__(self, client: AwsClient, name: str, *, clock: Clock, timeout_s: float) -> None:
        self.has_transactions = True
        self.written = 0
        """How many statements were run: at least two for each item that was added."""
        self._client = client
        self._name = name
        self.now_ms = clock
        self._timeout_s = timeout_s
        # The name was checked; all values are parameters.
        self._insert = f"INSERT INTO \"{name}\" VALUE {{'r': ?, 'x': ?, 'k': ?}}"
        self._update = f'UPDATE "{name}" SET r = ?, x = ? WHERE k = ? AND r = ?'  # noqa: S608

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        return await _in_chunks(keys, _READS, self._read)

    async def write(self, records: Records, before: Column[bytes | None]) -> list[Any]:
        items, versions = self._items(records)
        statements = [
            {"Statement": self._insert, "Parameters": item}
            if expected is None
            else {"Statement": self._update, "Parameters": (*item, {"B": expected})}
            for item, expected in zip(items, spread(before, len(items)), strict=True)
        ]
        answers = await _in_chunks(statements, _STATEMENTS, self._execute)
        self.written += len(statements)
        return [
            version if answer is True else answer
            for version, answer in zip(versions, answers, strict=True)
        ]

    async def write_together(
        self, records: Records, before: Column[VersionedRecord | None], sizes: Sequence[int]
    ) -> list[Any]:
        if not self.has_transactions:
            return await super().write_together(records, before, sizes)
        items, versions = self._items(records)
        expected = spread(mapped(version_of, before), len(items))
        groups = places_of(sizes)
        ones = [places.start for places in groups if len(places) == 1]
        alone = iter(await self.write(records.select(ones), [expected[at] for at in ones]))
        puts = [
            [self._put(items[at], expected[at]) for at in places]
            for places in groups
            if len(places) > 1
        ]
        together = iter(await _in_chunks(puts, 1, self._transact))
        answers: list[Any] = []
        for places in groups:
            answer = next(alone if len(places) == 1 else together)
            answers += [versions[at] if answer is True else answer for at in places]
        return answers

    async def remove(self, keys: Sequence[bytes], before: Sequence[Any]) -> list[bool | NoAnswer]:
        return await _in_chunks([*zip(keys, before, strict=True)], 1, self._remove)

    async def check_form(self) -> None:
        """Raise `ConfigError` if the records have another form; write ours to a new table."""
        insert = f"INSERT INTO \"{self._name}\" VALUE {{'r': ?, 'k': ?}}"  # it has no end
        statement = {"Statement": insert, "Parameters": ({"B": FORM}, {"B": _FORM})}
        (found,) = await self._stored([_FORM])
        while found is None:
            (answer,) = await self._execute([statement])
            answered(answer)
            (found,) = await self._stored([_FORM])
        check_form(answered(found).r.value, f"the DynamoDB table {self._name}")

    async def scan(
        self, place: bytes, limit: int, *, consistent: bool = True
    ) -> tuple[list[VersionedRecord], bytes]:
        """Return about *limit* records from *place* on, and the next place; empty at the end."""
        start: dict[str, Any] = {"ExclusiveStartKey": {"k": {"B": place}}} if place else {}
        asked = {"TableName": self._name, "Limit": limit, "ConsistentRead": consistent, **start}
        page = decoded(_ScanPage, await self.call("Scan", asked))
        following = page.last_evaluated_key
        entries = [_entry(item) for item in page.items if item.k.value != _FORM]
        return entries, following.k.value if following else b""

    async def call(self, operation: str, asked: Any, expected: Collection[str] = ()) -> bytes:
        """Call an operation; raise `StoreError`, or `AwsError` if its code is *expected*."""
        try:
            return await self._client.call(operation, _encode(asked))
        except (NotSent, Unclear) as error:
            raise StoreUnavailable(f"DynamoDB: {error}") from None
        except ConfigError as error:
            raise StoreError(error.message) from None
        except AwsError as error:
            if error.code in expected:
                raise
            if error.retryable:
                raise StoreUnavailable(f"DynamoDB: {error}") from error
            raise StoreError(advice(error.code, error.message, self._name)) from error

    # --- chunks ----------------------------------------------------------------------------

    async def _read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        found = await self._stored(_places(keys))
        return [_entry(item) if isinstance(item, _Stored) else item for item in found]

    async def _stored(self, places: Sequence[bytes]) -> list[_Stored | NoAnswer | None]:
        now_s = asyncio.get_running_loop().time
        ends, pause = now_s() + self._timeout_s, _PAUSE_S
        found: dict[bytes, _Stored | NoAnswer] = {}
        unread: Sequence[bytes] = places
        while True:
            asked = {"Keys": [{"k": {"B": place}} for place in unread], "ConsistentRead": True}
            answer = await self.call("BatchGetItem", {"RequestItems": {self._name: asked}})
            page = decoded(_ReadItems, answer)
            for items in page.responses.values():
                found |= {item.k.value: item for item in items}
            unread = [key.k.value for left in page.unprocessed_keys.values() for key in left.keys]
            if not unread or now_s() + pause > ends:
                found |= dict.fromkeys(unread, _UNREAD)
                return [found.get(place) for place in places]
            await asyncio.sleep(pause)
            pause *= 2

    def _items(self, records: Records) -> tuple[list[_Values], list[bytes]]:
        """Return the values of `r`, `x` and `k`, and the versions that the records will have."""
        keys = records.keys
        places = _places(keys)
        inside = [b"" if place is key else key for place, key in zip(places, keys, strict=True)]
        versions = encode_records(records, inside)
        # DynamoDB expires items by its own clock, whichever clock decides here; so never too early.
        soonest_ms = self._client.clock.local()
        ends = mapped(
            lambda keep_until_ms: {"N": str(max(keep_until_ms, soonest_ms) // 1000 + _DAY_S)},
            records.keep_until_ms,
        )
        values = zip(versions, spread(ends, len(keys)), places, strict=True)
        return [({"B": version}, end, {"B": place}) for version, end, place in values], versions

    async def _execute(self, statements: Sequence[Any]) -> list[Any]:
        """Run statements; return True for each that has written, None where its condition failed."""
        answer = await self.call("BatchExecuteStatement", {"Statements": statements})
        results = decoded(_StatementResults, answer).responses
        if len(results) != len(statements):
            raise StoreUnavailable("DynamoDB answered for another number of statements")
        return [
            True if result.error is UNSET else self._refused([result.error]) for result in results
        ]

    async def _remove(self, items: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        """Remove one item; a statement would not report whether it existed."""
        ((key, before),) = items
        (place,) = _places([key])
        asked = {"TableName": self._name, "Key": {"k": {"B": place}}, **_condition(before)}
        expected = ("ConditionalCheckFailedException", "TransactionConflictException")
        try:
            answer = await self.call("DeleteItem", asked, expected)
        except AwsError:
            return [False]
        decoded(_Object, answer)
        return [True]

    def _put(self, values: _Values, before: bytes | None) -> dict[str, Any]:
        item = dict(zip("rxk", values, strict=True))
        return {"Put": {"TableName": self._name, "Item": item, **_condition(before)}}

    async def _transact(self, groups: Sequence[list[dict[str, Any]]]) -> list[Any]:
        """
        Write one group; return True, or None if a condition failed.

        Without a ClientRequestToken: with it, DynamoDB would confirm a repeated request for ten
        minutes, even if the claim was taken over meanwhile. A repeated claim reads the item instead.
        """
        (puts,) = groups
        asked = {"TransactItems": puts}
        try:
            answer = await self.call("TransactWriteItems", asked, ("TransactionCanceledException",))
        except AwsError as error:
            return [self._refused(decoded(_Cancelled, error.body).cancellation_reasons)]
        decoded(_Object, answer)  # another server's page does not confirm anything
        return [True]

    def _refused(self, failures: Sequence[_StatementError]) -> NoAnswer | None:
        for failure in failures:
            if failure.code in _FINAL_CODES:
                raise StoreError(advice(failure.code, failure.message or "", self._name))
        codes = [failure.code for failure in failures if failure.code != "None"]
        if _CONFLICT_CODES.intersection(codes):
            return None
        return NoAnswer(f"DynamoDB: {', '.join(codes)}")


async def _in_chunks(
    items: Sequence[_Item], size: int, call: Callable[[Sequence[_Item]], Awaitable[list[_T]]]
) -> list[_T | NoAnswer]:
    """Make calls with *size* items each, all at once; raise only if all calls fail."""
    if len(items) <= size:
        return [*await call(items)] if items else []
    chunks = [items[at : at + size] for at in range(0, len(items), size)]
    results = await asyncio.gather(*map(call, chunks), return_exceptions=True)
    answers: list[_T | NoAnswer] = []
    failed = 0
    for chunk, result in zip(chunks, results, strict=True):
        if isinstance(result, StoreUnavailable):
            answers += [NoAnswer(str(result))] * len(chunk)
            failed += 1
        elif isinstance(result, BaseException):
            raise result
        else:
            answers += result
    if failed == len(chunks):
        raise StoreUnavailable(str(results[0]))
    return answers


def _places(keys: Sequence[bytes]) -> list[bytes]:
    """
    Return the `k` of items.

    A key that DynamoDB does not accept is replaced by its digest, and so is one that looks like
    an item of ours. The record then contains the key.
    """
    return [
        key
        if 0 < len(key) <= _LONGEST_KEY and not key.startswith(_OURS)
        else _DIGESTED + sha256(key).digest()
        for key in keys
    ]


def _entry(item: _Stored) -> VersionedRecord:
    place, version = item.k.value, item.r.value
    key = None if place.startswith(_DIGESTED) else place
    return VersionedRecord(decode_record(version, key), version)


def _condition(before: bytes | None) -> dict[str, Any]:
    if before is None:
        return {"ConditionExpression": "attribute_not_exists(k)"}
    values = {":r": {"B": before}}
    return {"ConditionExpression": "r = :r", "ExpressionAttributeValues": values}


def decoded(kind: type[_T], body: bytes) -> _T:
    """Return an answer; raise `StoreError` if it has items of others."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        if isinstance(error, msgspec.ValidationError) and kind in (_ReadItems, _ScanPage):
            raise StoreError(
                "the DynamoDB table has items that are not from oncebridge; use a separate table"
            ) from None
        raise StoreUnavailable("DynamoDB: the answer cannot be read") from None


def advice(code: str, message: str, table: str) -> str:
    """Return what to do about an error that a retry does not solve."""
    match code.removesuffix("Exception"):
        case "ResourceNotFound":
            return f"there is no DynamoDB table {table}; create it with: oncebridge migrate"
        case "AccessDenied":
            return f"AWS denies access to the DynamoDB table {table}: {message}"
        case "UnrecognizedClient" | "ExpiredToken" | "InvalidClientTokenId":
            return f"AWS does not accept the credentials: {message or code}"
        case "InvalidSignature" | "IncompleteSignature" | "RequestExpired":
            return f"AWS does not accept the signature; check this host's clock: {message}"
        case _:
            return f"DynamoDB refuses: {code}: {message}"
