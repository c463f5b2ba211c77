"""
A DynamoDB table of records, written with conditions.

An item has the key `k`, the encoded record `r`, and `x`, the second after which DynamoDB may
remove it. The condition of a change is that `r` has exactly the bytes that were read.

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
from oncebridge.stores.api import NoAnswer, Record
from oncebridge.stores.conditional import (
    ChangeAnswer,
    RecordChange,
    RecordChanged,
    RecordDiffers,
    VersionedRecord,
    change_in_turn,
)
from oncebridge.stores.record_encoding import decode_record, encode_record

_T = TypeVar("_T")
_Item = TypeVar("_Item")

_STATEMENTS: Final = 25
_READS: Final = 100
_LONGEST_KEY: Final = 2048
_DIGESTED: Final = b"oncebridge:sha256:"
_DAY_S: Final = 86_400
_PAUSE_S: Final = 0.05

_DIFFERS: Final = RecordDiffers()
_encode = msgspec.json.Encoder().encode

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


_found = msgspec.json.Decoder(_ReadItems).decode
_page = msgspec.json.Decoder(_ScanPage).decode
_results = msgspec.json.Decoder(_StatementResults).decode
_cancelled = msgspec.json.Decoder(_Cancelled).decode
_an_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class DynamoDBTable:
    """
    The table *name*; see `oncebridge.stores.conditional.ConditionalBackend`.

    Keys that DynamoDB leaves unread are requested again for *timeout_s*.
    """

    def __init__(self, client: AwsClient, name: str, *, clock: Clock, timeout_s: float) -> None:
        self.has_transactions = True
        self.written = 0
        """How many statements were run: at least two for each item that was added."""
        self._client = client
        self._name = name
        self._clock = clock
        self._timeout_s = timeout_s
        # The name was checked; all values are parameters.
        self._insert = f"INSERT INTO \"{name}\" VALUE {{'k': ?, 'r': ?, 'x': ?}}"
        self._update = f'UPDATE "{name}" SET r = ?, x = ? WHERE k = ? AND r = ?'  # noqa: S608

    def now_ms(self) -> int:
        return self._clock()

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        return await _in_chunks(keys, _READS, self._read)

    async def change(self, changes: Sequence[RecordChange]) -> list[ChangeAnswer]:
        written = [change for change in changes if change.after is not None]
        done = iter(await _in_chunks(written, _STATEMENTS, self._write))
        if len(written) == len(changes):
            return [*done]
        removed = [change for change in changes if change.after is None]
        gone = iter(await _in_chunks(removed, 1, self._remove))
        return [next(gone if change.after is None else done) for change in changes]

    async def change_together(
        self, groups: Sequence[Sequence[RecordChange]]
    ) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
        if not self.has_transactions:
            return await change_in_turn(self, groups)
        return await _in_chunks(groups, 1, self._transact)

    async def scan(
        self, place: bytes, limit: int, *, consistent: bool = True
    ) -> tuple[list[VersionedRecord], bytes]:
        """Return about *limit* records from *place* on, and the next place; empty at the end."""
        asked: dict[str, Any] = {
            "TableName": self._name,
            "Limit": limit,
            "ConsistentRead": consistent,
        }
        if place:
            asked["ExclusiveStartKey"] = {"k": {"B": place}}
        page = _read(_page, await self.call("Scan", asked))
        following = page.last_evaluated_key
        return [_entry(item) for item in page.items], following.k.value if following else b""

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
        now_s = asyncio.get_running_loop().time
        ends, pause = now_s() + self._timeout_s, _PAUSE_S
        places = [_place(key) for key in keys]
        entries: dict[bytes, VersionedRecord] = {}
        unread: Sequence[bytes] = places
        while True:
            asked = {"Keys": [{"k": {"B": place}} for place in unread], "ConsistentRead": True}
            answer = await self.call("BatchGetItem", {"RequestItems": {self._name: asked}})
            found = _read(_found, answer)
            for items in found.responses.values():
                entries |= {item.k.value: _entry(item) for item in items}
            unread = [key.k.value for left in found.unprocessed_keys.values() for key in left.keys]
            if not unread or now_s() + pause > ends:
                break
            await asyncio.sleep(pause)
            pause *= 2
        unread_answers = dict.fromkeys(
            unread, NoAnswer("DynamoDB throttles: it did not read this key")
        )
        return [unread_answers.get(place) or entries.get(place) for place in places]

    async def _write(self, changes: Sequence[RecordChange]) -> list[ChangeAnswer]:
        soonest_ms = self._client.clock.local()
        statements: list[dict[str, Any]] = []
        entries: list[VersionedRecord] = []
        for change in changes:
            key, entry, ends = _written(change, soonest_ms)
            entries.append(entry)
            after = {"B": entry.version}
            if change.before is None:
                statements.append({"Statement": self._insert, "Parameters": (key, after, ends)})
            else:
                before = {"B": change.before.version}
                values = (after, ends, key, before)
                statements.append({"Statement": self._update, "Parameters": values})
        answer = await self.call("BatchExecuteStatement", {"Statements": statements})
        results = _read(_results, answer).responses
        if len(results) != len(changes):
            raise StoreUnavailable("DynamoDB answered for another number of statements")
        answers = [
            RecordChanged(entry) if result.error is UNSET else self._refused([result.error])
            for result, entry in zip(results, entries, strict=True)
        ]
        self.written += len(changes)
        return answers

    async def _remove(self, changes: Sequence[RecordChange]) -> list[ChangeAnswer]:
        """Remove one item; a statement would not report whether it existed."""
        (change,) = changes
        asked = {
            "TableName": self._name,
            "Key": {"k": {"B": _place(change.key)}},
            **_condition(change.before),
        }
        expected = ("ConditionalCheckFailedException", "TransactionConflictException")
        try:
            answer = await self.call("DeleteItem", asked, expected)
        except AwsError:
            return [_DIFFERS]
        _read(_an_object, answer)
        return [RecordChanged(None)]

    async def _transact(
        self, groups: Sequence[Sequence[RecordChange]]
    ) -> list[list[RecordChanged] | RecordDiffers | NoAnswer]:
        """
        Write one group.

        Without a ClientRequestToken: with it, DynamoDB would confirm a repeated request for ten
        minutes, even if the claim was taken over meanwhile. A repeated claim reads the item instead.
        """
        (group,) = groups
        soonest_ms = self._client.clock.local()
        written = [_written(change, soonest_ms) for change in group]
        puts = [
            {
                "TableName": self._name,
                "Item": {"k": key, "r": {"B": entry.version}, "x": ends},
                **_condition(change.before),
            }
            for change, (key, entry, ends) in zip(group, written, strict=True)
        ]
        asked = {"TransactItems": [{"Put": put} for put in puts]}
        try:
            answer = await self.call("TransactWriteItems", asked, ("TransactionCanceledException",))
        except AwsError as error:
            return [self._refused(_read(_cancelled, error.body).cancellation_reasons)]
        _read(_an_object, answer)  # another server's page does not confirm anything
        return [[RecordChanged(entry) for _, entry, _ in written]]

    def _refused(self, failures: Sequence[_StatementError]) -> RecordDiffers | NoAnswer:
        for failure in failures:
            if failure.code in _FINAL_CODES:
                raise StoreError(advice(failure.code, failure.message or "", self._name))
        codes = [failure.code for failure in failures if failure.code != "None"]
        if _CONFLICT_CODES.intersection(codes):
            return _DIFFERS
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


def _place(key: bytes) -> bytes:
    """
    Return the `k` of an item.

    A key that DynamoDB does not accept is replaced by its digest, and so is a key that looks like
    a digest. The record then contains the key.
    """
    if 0 < len(key) <= _LONGEST_KEY and not key.startswith(_DIGESTED):
        return key
    return _DIGESTED + sha256(key).digest()


def _entry(item: _Stored) -> VersionedRecord:
    place, version = item.k.value, item.r.value
    key = None if place.startswith(_DIGESTED) else place
    return VersionedRecord(decode_record(version, key), version)


def _written(
    change: RecordChange, soonest_ms: int
) -> tuple[dict[str, Any], VersionedRecord, dict[str, str]]:
    """Return the values of `k`, `r` (with the record that it means) and `x`."""
    place, record = _place(change.key), change.after
    assert isinstance(record, Record)  # noqa: S101 - removals are not written
    entry = VersionedRecord(record, encode_record(record, with_key=place is not change.key))
    # DynamoDB expires items by its own clock, whichever clock decides here; so never too early.
    ends = max(record.keep_until_ms, soonest_ms) // 1000 + _DAY_S
    return {"B": place}, entry, {"N": str(ends)}


def _condition(before: VersionedRecord | None) -> dict[str, Any]:
    if before is None:
        return {"ConditionExpression": "attribute_not_exists(k)"}
    values = {":r": {"B": before.version}}
    return {"ConditionExpression": "r = :r", "ExpressionAttributeValues": values}


def _read(decode: Callable[[bytes], _T], body: bytes) -> _T:
    try:
        return decode(body)
    except msgspec.ValidationError:
        raise StoreError(
            "the DynamoDB table has items that are not from oncebridge; use a separate table"
        ) from None
    except msgspec.DecodeError:
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
