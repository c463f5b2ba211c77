"""
The DynamoDB store: records in a table, for workers on any number of hosts and in functions.

**Durability:** everything; DynamoDB confirms a write when it is in three places.
**Clock:** each worker's own, corrected by the `Date` of DynamoDB's answers. A claim is taken over
only *max_skew* after its end. A worker whose clock is off by more does not start.
**Outages:** a call without an answer within *timeout* raises `StoreUnavailable`; the answer for a
throttled item is `NoAnswer`. No event is lost: events are returned to their source.
**Cost:** two writes per event, and a write and a read per duplicate. 25 events share a request, and
the requests of a batch are sent at the same time.

The table is in one Region, or a global table with strong consistency. Eventually consistent
replicas are refused: two Regions could claim the same event.
"""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any, ClassVar, Final, Self

import msgspec
from msgspec import Struct

from oncebridge.aws.addresses import name_and_region
from oncebridge.aws.client import AwsClient, AwsError, NotSent, SampleCall, Unclear
from oncebridge.aws.options import AwsStoreOptions
from oncebridge.base.clock import Clock
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, OncebridgeError, StoreError, StoreUnavailable
from oncebridge.stores.api import Portable, Record
from oncebridge.stores.aws_time import AwsTime
from oncebridge.stores.conditional import ConditionalStore, Records
from oncebridge.stores.dynamodb.table import DynamoDBTable, advice, decoded

_log = logging.getLogger("oncebridge")

_NAME = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_ARN = re.compile(
    r"arn:aws[a-z-]*:dynamodb:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):table/(?P<table>[^/]+)"
)
_KEY: Final = [{"AttributeName": "k", "KeyType": "HASH"}]
_KEY_TYPE: Final = {"AttributeName": "k", "AttributeType": "B"}
_LONGEST_WAIT_S: Final = 120
_PROBE: Final = b"oncebridge probe"
_PAGE: Final = 1000
_COUNT_EVERY_S: Final = 600.0
_COUNT_WITHIN_S: Final = 1.0


class _Table(Struct, rename="pascal"):
    table_status: str
    key_schema: list[dict[str, str]]
    attribute_definitions: list[dict[str, str]]
    table_arn: str = ""
    replicas: list[Any] = []
    global_table_version: str = ""
    multi_region_consistency: str = ""
    item_count: Any = None  # only reported
    table_size_bytes: Any = None


class _TableDescription(Struct, rename="pascal"):
    table: _Table


class _TimeToLive(Struct, rename="pascal"):
    time_to_live_status: str = "DISABLED"
    attribute_name: str = ""


class _Expiry(Struct, rename="pascal"):
    time_to_live_description: _TimeToLive


class DynamoDBOptions(AwsStoreOptions, frozen=True, kw_only=True):
    """Options of the DynamoDB store."""

    connections: Annotated[
        int, Doc("How many requests may run at the same time.", "32", at_least=1)
    ] = 32


class DynamoDBStore(ConditionalStore, Portable):
    """
    Keep records in the DynamoDB table *table*, given by its name or its ARN.

    *clock* is for tests: it is used without correction, and without a margin.
    """

    Options: ClassVar = DynamoDBOptions

    def __init__(
        self, table: str, options: DynamoDBOptions | None = None, *, clock: Clock | None = None
    ) -> None:
        options = options or DynamoDBOptions()
        found = _ARN.fullmatch(table)
        name = found["table"] if found else table
        if not _NAME.fullmatch(name):
            raise ConfigError("", f"{table!r} is neither the name nor the ARN of a DynamoDB table")
        if found and options.region not in (None, found["region"]):
            raise ConfigError("region", f"the ARN of the table says {found['region']}")
        self._arn = table if found else ""
        self._name = name
        self._client = AwsClient(
            SampleCall("dynamodb", "describe_table", {"TableName": name}),
            options,
            region=found["region"] if found else None,
            connections=options.connections,
        )
        self._time = AwsTime(self._client.clock, options, clock, "dynamodb", {"table": name})
        self._table = DynamoDBTable(
            self._client, name, clock=self._time.now_ms, timeout_s=options.timeout.total_seconds()
        )
        self._expires = True
        self._is_open = False
        self._purge_from = b""
        self._to_read = 0
        self._counted: dict[str, int | None] = {}
        self._count_from_s = 0.0
        super().__init__(self._table, margin_ms=self._time.margin_ms)

    @classmethod
    def from_url(cls, url: str, options: DynamoDBOptions | None = None) -> Self:
        """Open `dynamodb://TABLE`, `dynamodb://TABLE?region=REGION` or `dynamodb:ARN`."""
        options = options or DynamoDBOptions()
        rest = url.removeprefix("dynamodb:")
        if rest == url or not rest.strip("/"):
            raise ConfigError(
                "", f"{url!r}: the address of a DynamoDB store is dynamodb://TABLE or dynamodb:ARN"
            )
        if not rest.startswith("//"):
            return cls(rest, options)
        found = name_and_region(rest, options.region)
        if found is None:
            raise ConfigError("", f"{url!r}: only ?region=REGION may follow the table")
        name, region = found
        return cls(name, msgspec.structs.replace(options, region=region))

    # --- opening -------------------------------------------------------------------------

    async def open(self) -> None:
        if self._is_open:
            return
        with _as_config_error():
            await self._client.open()
        table = await self._describe()
        if table is None:
            raise ConfigError("", advice("ResourceNotFound", "", self._name))
        self._check(table)
        if table.multi_region_consistency == "STRONG":
            # Such tables support neither transactions nor expiry.
            self._table.has_transactions = self._expires = False
        else:
            await self._check_expiry()
        self._time.check()
        with _as_config_error():
            await self._table.check_form()
            # There is no such item; it is about the permission.
            await self._table.write(Records([_PROBE]), [b"never"])
        self._is_open = True

    async def _describe(self) -> _Table | None:
        asked = {"TableName": self._name}
        try:
            with _as_config_error():
                answer = await self._table.call(
                    "DescribeTable", asked, ("ResourceNotFoundException",)
                )
        except AwsError:
            return None
        except ConfigError:
            self._time.check()  # a wrong clock may be why the signature was refused
            raise
        return decoded(_TableDescription, answer).table

    def _check(self, table: _Table) -> None:
        """Raise `ConfigError` if the table cannot be used."""
        name = self._name
        if self._arn and table.table_arn and self._arn != table.table_arn:
            raise ConfigError(
                "",
                f"the table {name} of these credentials is {table.table_arn}; for a table of "
                "another account use a profile that assumes a role there",
            )
        if table.table_status not in ("ACTIVE", "UPDATING"):
            raise StoreUnavailable(f"the DynamoDB table {name} is {table.table_status.lower()}")
        if table.key_schema != _KEY or _KEY_TYPE not in table.attribute_definitions:
            raise ConfigError(
                "",
                f"the DynamoDB table {name} is not a table of oncebridge: its only key must be k, "
                "of type binary; use another name and create it with: oncebridge migrate",
            )
        is_replicated = table.replicas or table.global_table_version == "2017.11.29"
        if is_replicated and table.multi_region_consistency != "STRONG":
            raise ConfigError(
                "",
                f"the DynamoDB table {name} is a global table with eventual consistency: two "
                "Regions could both deliver the same event. Use a table in one Region, or a "
                "global table with multi-Region strong consistency",
            )

    async def _check_expiry(self) -> None:
        try:
            expiry = await self._read_expiry()
        except StoreUnavailable:
            raise
        except StoreError as error:
            extra = {"table": self._name, "error": str(error)}
            _log.warning("oncebridge.dynamodb_expiry_unknown", extra=extra)
            return
        if expiry.attribute_name != "x" or not expiry.time_to_live_status.startswith("ENABL"):
            extra = {"table": self._name, "do": "oncebridge migrate"}
            _log.warning("oncebridge.dynamodb_without_expiry", extra=extra)

    async def _read_expiry(self) -> _TimeToLive:
        answer = await self._table.call("DescribeTimeToLive", {"TableName": self._name})
        return decoded(_Expiry, answer).time_to_live_description

    # --- state ---------------------------------------------------------------------------

    async def health(self) -> Mapping[str, int | None]:
        """
        Check that DynamoDB answers, and return the size that it reports for the table.

        DynamoDB counts items about every six hours, so the size is read every ten minutes only.
        None may mean that items were not counted yet.
        """
        await self.peek([_PROBE])
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._count_from_s:
            self._count_from_s = now_s + _COUNT_EVERY_S
            # Without an answer, records can be read and written nevertheless.
            with suppress(OncebridgeError, TimeoutError):
                async with asyncio.timeout(_COUNT_WITHIN_S):
                    table = await self._describe()
                if table is not None:
                    records, size = table.item_count or None, table.table_size_bytes or None
                    self._counted = {"records": records, "bytes": size}
        return {**self._counted, **self._time.health()}

    # --- all records ---------------------------------------------------------------------

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        entries, following = await self._table.scan(place, limit)
        return [entry.record for entry in entries if entry.record is not None], following

    async def purge(self, limit: int = 1000) -> int:
        """
        Remove records past keeping, if DynamoDB does not do this itself.

        Each call continues where the last one stopped, and reads more items than were added since,
        so that the number of expired records stays limited.
        """
        if self._expires:
            return 0
        self._to_read += self._table.written + limit
        self._table.written = 0
        gone = 0
        while self._to_read > 0 and gone < limit:
            page = min(self._to_read, _PAGE)
            # An item that has changed since is not removed, so a cheaper read is enough.
            entries, self._purge_from = await self._table.scan(
                self._purge_from, page, consistent=False
            )
            gone += await self._remove_past(entries)
            # Once round is enough.
            self._to_read = self._to_read - len(entries) if self._purge_from else 0
        return gone

    # --- creating the table --------------------------------------------------------------

    async def migrate(self) -> list[str]:
        """Create the table if there is none, and switch its expiry on; safe to repeat."""
        with _as_config_error():
            await self._client.open()
        done: list[str] = []
        if await self._describe() is None:
            asked = {
                "TableName": self._name,
                "AttributeDefinitions": [_KEY_TYPE],
                "KeySchema": _KEY,
                "BillingMode": "PAY_PER_REQUEST",
            }
            with _as_config_error(), suppress(AwsError):  # another process is creating it
                await self._table.call("CreateTable", asked, ("ResourceInUseException",))
            done.append(f"created the table {self._name}, billed on demand")
        table = await self._wait_until_active()
        self._check(table)
        if table.multi_region_consistency != "STRONG" and await self._switch_expiry_on():
            done.append(f"switched expiry on for the table {self._name}")
        return done

    async def _wait_until_active(self) -> _Table:
        now_s = asyncio.get_running_loop().time
        ends = now_s() + _LONGEST_WAIT_S
        while True:
            table = await self._describe()
            if table is not None and table.table_status == "ACTIVE":
                return table
            if now_s() > ends:
                raise StoreUnavailable(
                    f"the DynamoDB table {self._name} was not ready within {_LONGEST_WAIT_S} s; "
                    "run the command again"
                )
            await asyncio.sleep(0.5)

    async def _switch_expiry_on(self) -> bool:
        expiry = await self._read_expiry()
        if expiry.time_to_live_status.startswith("ENABL"):
            if expiry.attribute_name != "x":
                raise ConfigError(
                    "",
                    f"the table {self._name} expires items by {expiry.attribute_name}, not by x; "
                    "switch that off first, or use a separate table for oncebridge",
                )
            return False
        specification = {"Enabled": True, "AttributeName": "x"}
        asked = {"TableName": self._name, "TimeToLiveSpecification": specification}
        await self._table.call("UpdateTimeToLive", asked)
        return True

    # --- closing -------------------------------------------------------------------------

    async def aclose(self) -> None:
        self._is_open = False
        await self._client.aclose()


@contextmanager
def _as_config_error() -> Iterator[None]:
    """Raise `ConfigError` for what no retry solves."""
    try:
        yield
    except (NotSent, Unclear) as error:
        raise StoreUnavailable(f"DynamoDB: {error}") from None
    except StoreUnavailable:
        raise
    except StoreError as error:
        raise ConfigError("", str(error)) from error
