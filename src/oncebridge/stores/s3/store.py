"""
The store in an S3 bucket: one small object for each key. For teams without a database.

**What survives a crash:** everything; S3 answers when a write is on several devices.
**Whose clock:** this host's, put right by the dates of S3's answers. It may be wrong by
*max_skew*, so a claim is taken over only when its lease has been over for that long.
**What an outage does:** requests that fail or are slowed down are `NoAnswer` for their key;
nothing is lost, events are handed back.
**What it costs:** two writes for an event (about 10 US dollars for a million), one read for a
duplicate, each some tens of milliseconds. There are no batches on S3, so a batch is many
requests at once.

Every change is conditional: an object is created where there is none, and replaced as the
very version that was read, so of many workers one wins. `open` tries whether the server
heeds these conditions.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Annotated, ClassVar, Final, Literal, Self, TypeVar
from urllib.parse import parse_qsl, unquote

from msgspec.structs import replace

from oncebridge.aws.client import AwsClient, AwsError, Example, NotSent, Unclear
from oncebridge.aws.options import AwsStoreOptions
from oncebridge.aws.xml import first_texts
from oncebridge.base.clock import Clock, SystemDice, ms
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.stores.api import Claim, ClaimAnswer, NoAnswer, Record, Want
from oncebridge.stores.conditional import (
    Cell,
    Change,
    ChangeAnswer,
    Changed,
    CompareStore,
    Other,
    in_turn,
)
from oncebridge.stores.packed import packed, unpacked
from oncebridge.stores.s3.bucket import S3Bucket, tried
from oncebridge.stores.s3.lifecycle import expiries, write_expiry
from oncebridge.stores.s3.lifecycle_rule import PASSED_OVER, Expiry, days_of, rule_for
from oncebridge.stores.s3.names import checked_prefix

_T = TypeVar("_T")
_Item = TypeVar("_Item")

_log = logging.getLogger("oncebridge")

_LONGEST_NAME: Final = 256
_RECORD: Final = re.compile(r"(?:[0-9a-f]{2})+|sha256-[0-9a-f]{64}")
_PROBE: Final = "probe-"
_NOBODYS: Final = b"oncebridge vitals"
"""A key that nothing is kept under."""
_PAGE: Final = 1000
_WARN_EVERY_MS: Final = 60_000
_DAY_MS: Final = 86_400_000
_YEAR_MS: Final = 365 * _DAY_MS
_PADDED: Final = b"P"
_REMOVED: Final = b"-"
"""Not empty: lifecycle rules for objects of some sizes pass over empty ones."""
_FAILURES: Final = (AwsError, NotSent, Unclear, StoreError, ConfigError)
_WORTH_A_LOOK: Final = 0.074
"""
From this share of repeats on, reading before a claim is cheaper than a write that fails: a
write costs 12.5 times as much as a read, whether or not its condition holds.
"""
_LOOKED_BACK: Final = 200

_OTHER: Final = Other()
_GONE: Final = Changed(None)


class S3Options(AwsStoreOptions, frozen=True, kw_only=True):
    """What can be set about the S3 store."""

    connections: Annotated[
        int, Doc("How many requests may be under way at once.", "64", at_least=1)
    ] = 64
    look_first: Annotated[
        Literal["auto", "always", "never"],
        Doc(
            "Whether a claim reads before it writes: cheaper where more than one event in "
            "fourteen is a repeat, slower by one request for the others. `auto` goes by the "
            "repeats of late.",
            "auto",
        ),
    ] = "auto"
    expiry: Annotated[
        Literal["lifecycle", "sweep"],
        Doc(
            "Who removes old records: a lifecycle rule of the bucket, for free, or this store, "
            "which has to read them all (for servers without such rules).",
            "lifecycle",
        ),
    ] = "lifecycle"
    expire_after: Annotated[
        timedelta,
        Doc(
            "How long the lifecycle rule leaves records alone: the longest window and a day. "
            "`oncebridge migrate` makes the rule.",
            "7d",
        ),
    ] = timedelta(days=7)


class _Cells:
    """Objects as cells; see `oncebridge.stores.conditional.Cells`."""

    def __init__(self, bucket: S3Bucket, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self.removes_with_care = True
        """Else what is removed leaves an object behind that stands for nothing."""
        self.rule_ms: int | None = None
        """How long after its last write the bucket removes a record by itself."""
        self._has_warned = False

    def now_ms(self) -> int:
        return self._clock()

    async def read(self, keys: Sequence[bytes]) -> list[Cell | NoAnswer | None]:
        return await _at_once(self._read, keys)

    async def change(self, changes: Sequence[Change]) -> list[ChangeAnswer]:
        return await _at_once(self._change, changes)

    async def change_together(
        self, groups: Sequence[Sequence[Change]]
    ) -> list[list[Changed] | Other | NoAnswer]:
        return await in_turn(self, groups)

    async def read_names(self, names: Sequence[str]) -> list[Cell | NoAnswer | None]:
        """Read objects that a listing named."""
        return await _at_once(self._read_name, [name for name in names if _RECORD.fullmatch(name)])

    async def _read(self, key: bytes) -> Cell | NoAnswer | None:
        return await self._read_name(_name(key))

    async def _read_name(self, name: str) -> Cell | NoAnswer | None:
        try:
            found = await self._bucket.read(name)
            if found is None:
                return None
            return Cell(_record(found.body), found.etag)
        except _FAILURES as error:
            return NoAnswer(_reason(error))

    async def _change(self, change: Change) -> ChangeAnswer:
        try:
            if change.after is None:
                return await self._remove(change)
            name, body = _name(change.key), self._body(change.after)
            if change.before is None:
                etag = await self._bucket.create(name, body)
            else:
                etag = await self._bucket.replace(name, change.before.version, body)
        except _FAILURES as error:
            return NoAnswer(_reason(error))
        return _OTHER if etag is None else Changed(Cell(change.after, etag))

    async def _remove(self, change: Change) -> ChangeAnswer:
        if change.before is None:
            return _GONE
        name, etag = _name(change.key), change.before.version
        if self.removes_with_care:
            return _GONE if await self._bucket.remove(name, etag) else _OTHER
        left = await self._bucket.replace(name, etag, _REMOVED)
        return _OTHER if left is None else Changed(Cell(None, left))

    def _body(self, record: Record) -> bytes:
        body = packed(record)
        keep_ms = record.keep_until_ms - self._clock()
        if self.rule_ms is None or keep_ms <= self.rule_ms:
            return body
        if keep_ms < _YEAR_MS and record.fate is not None and not self._has_warned:
            self._has_warned = True
            extra = {"rule_days": self.rule_ms // _DAY_MS, "window_days": keep_ms // _DAY_MS + 1}
            _log.warning("oncebridge.s3_window_outlives_rule", extra=extra)
        return (_PADDED + len(body).to_bytes(4, "big") + body).ljust(PASSED_OVER, b"\0")


def _name(key: bytes) -> str:
    """Name the object of *key*. Keys are hashes, so names are spread evenly."""
    if 0 < len(key) <= _LONGEST_NAME:
        return key.hex()
    return f"sha256-{sha256(key).hexdigest()}"


def _record(body: bytes) -> Record | None:
    """Read the body of an object; None for what a removed record leaves behind."""
    if body == _REMOVED:
        return None
    if body[:1] == _PADDED:
        body = body[5 : 5 + int.from_bytes(body[1:5], "big")]
    return unpacked(body)


def _reason(error: Exception) -> str:
    return f"S3: {error}"


async def _at_once(ask: Callable[[_Item], Awaitable[_T]], items: Sequence[_Item]) -> list[_T]:
    """Ask for all items at once; the client lets as many through as it may."""
    if len(items) == 1:
        return [await ask(items[0])]
    return await asyncio.gather(*map(ask, items))


class S3Store(CompareStore):
    """
    Keep records in *bucket*, as objects whose names begin with *prefix*.

    *clock* is for tests: with it, nothing is corrected and there is no margin.
    """

    Options: ClassVar = S3Options

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        options: S3Options | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._options = options = options or S3Options()
        self._name = bucket
        self._prefix = checked_prefix(bucket, prefix)
        self._client = AwsClient(
            Example("s3", "head_bucket", {"Bucket": bucket}),
            region=options.region,
            endpoint=options.endpoint,
            profile=options.profile,
            timeout=options.timeout,
            connect_timeout=options.connect_timeout,
            connections=options.connections,
        )
        self._max_skew_ms = ms(options.max_skew)
        self._warned_ms = 0
        self._is_timed_by_s3 = clock is None
        self._clock = clock or self._time
        self._bucket = S3Bucket(self._client, self._prefix)
        self._objects = _Cells(self._bucket, self._clock)
        super().__init__(self._objects, margin_ms=0 if clock else self._max_skew_ms)
        self._opening = asyncio.Lock()
        self._is_open = False
        self._hand = ""
        self._repeats = _WORTH_A_LOOK
        """The share of claims, of late, that met something."""

    @classmethod
    def from_url(cls, url: str, options: S3Options | None = None) -> Self:
        """Open `s3://BUCKET`, `s3://BUCKET/PREFIX` or either with `?region=REGION`."""
        options = options or S3Options()
        place, _, asked = url.removeprefix("s3://").partition("?")
        if not url.startswith("s3://") or not place or place.startswith("/"):
            raise ConfigError("", f"{url!r}: an S3 store is s3://BUCKET/PREFIX")
        bucket, _, prefix = place.partition("/")
        if "@" in bucket:
            raise ConfigError("", "credentials are found as everywhere on AWS, not in the address")
        query = dict(parse_qsl(asked, keep_blank_values=True))
        region = query.pop("region", None)
        if query or "#" in url:
            raise ConfigError("", f"{url!r}: only ?region=REGION may follow the prefix")
        if region is not None:
            if options.region not in (None, region):
                raise ConfigError("region", f"the address says {region}")
            options = replace(options, region=region)
        try:
            return cls(bucket, unquote(prefix), options)
        except ConfigError as error:
            raise ConfigError("", f"{url!r}: {error.message}") from None

    async def open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._told(self._check())
                self._is_open = True

    async def claim(self, wants: Sequence[Want]) -> list[ClaimAnswer]:
        looks = self._options.look_first
        answers = await self._claim(
            wants,
            look=looks == "always" or (looks == "auto" and self._repeats >= _WORTH_A_LOOK),
        )
        if wants:
            share = sum(map(_met_something, answers)) / len(wants)
            self._repeats += min(len(wants) / _LOOKED_BACK, 1) * (share - self._repeats)
        return answers

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        cells, following = await self._walk(place.decode(), limit)
        return [cell.record for cell in cells if cell.record is not None], following.encode()

    async def purge(self, limit: int = 1000) -> int:
        """
        Look at the next *limit* records, and remove those past keeping.

        Only where it is not left to the bucket: every look costs.
        """
        if self._options.expiry == "lifecycle":
            return 0
        gone = 0
        for looks in range(limit, 0, -_PAGE):
            cells, self._hand = await self._walk(self._hand, min(looks, _PAGE))
            now = self._clock() - self._margin_ms
            past = [
                Change(cell.record.key, cell, None)
                for cell in cells
                if cell.record is not None and cell.record.keep_until_ms <= now
            ]
            gone += sum(type(answer) is Changed for answer in await self._objects.change(past))
            if not self._hand:
                break
        return gone

    async def now_ms(self) -> int:
        return self._clock()

    async def health(self) -> Mapping[str, int | None]:
        """
        Read an object that is not there; that it is not is an answer.

        How many there are only a listing could tell, which costs more than it is worth.
        """
        await self.peek([_NOBODYS])
        if self._is_timed_by_s3 and self._client.clock.error_ms is None:
            return {"clock_offset_ms": None}  # it never told its time
        return {}

    async def migrate(self) -> list[str]:
        """Make the bucket where there is none, and the lifecycle rule."""
        return await self._told(self._migrate())

    async def aclose(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _time(self) -> int:
        now = self._client.clock.now_ms()
        offset_ms = self._client.clock.offset_ms
        if abs(offset_ms) > self._max_skew_ms and now - self._warned_ms > _WARN_EVERY_MS:
            self._warned_ms = now
            extra = {"bucket": self._name, "offset_ms": offset_ms}
            _log.warning("oncebridge.s3_clock_is_off", extra=extra)
        return now

    # --- walking through the bucket -----------------------------------------------------

    async def _walk(self, after: str, limit: int) -> tuple[list[Cell], str]:
        """Read the next objects, and tell after which name to go on; none: the end."""
        try:
            page = await self._bucket.page(after, limit)
        except (AwsError, NotSent, Unclear) as error:
            raise StoreUnavailable(_reason(error)) from None
        cells: list[Cell] = []
        for cell in await self._objects.read_names(page.names):
            if isinstance(cell, NoAnswer):
                raise StoreUnavailable(cell.reason)
            if cell is not None:
                cells.append(cell)
        return cells, page.names[-1] if page.names and page.goes_on else ""

    # --- at the start -------------------------------------------------------------------

    async def _check(self) -> None:
        await self._client.open()
        probe = _PROBE + SystemDice().tokens(1)[0].hex()
        self._objects.removes_with_care = await tried(self._bucket, probe)
        self._check_clock()
        keeps_versions, rules = await asyncio.gather(
            self._bucket.keeps_versions(), expiries(self._client, self._prefix)
        )
        if keeps_versions:
            _log.warning(
                "oncebridge.s3_keeps_versions",
                extra={
                    "bucket": self._name,
                    "what": "every change leaves an old version behind that costs storage; turn "
                    "versioning off, or let a lifecycle rule remove noncurrent versions",
                },
            )
        if rules is not None:
            self._heed(rules)
            return
        # There may be one all the same, as `oncebridge migrate` makes it.
        self._objects.rule_ms = ms(timedelta(days=days_of(self._options.expire_after)))
        _log.warning(
            "oncebridge.s3_expiry_unknown",
            extra={
                "bucket": self._name,
                "what": "the lifecycle rules may not be read (s3:GetLifecycleConfiguration)",
            },
        )

    def _check_clock(self) -> None:
        if self._is_timed_by_s3 and not self._client.clock.check(self._max_skew_ms):
            _log.warning("oncebridge.s3_clock_unknown", extra={"bucket": self._name})

    def _heed(self, rules: Sequence[Expiry]) -> None:
        """See what the bucket removes by itself, and when."""
        wished = days_of(self._options.expire_after)
        for rule in rules:
            if not rule.removes_all:
                continue
            if rule.days < wished:
                raise ConfigError(
                    "",
                    f"the bucket's lifecycle rule {rule.id!r} removes records after {rule.days} "
                    f"days, so repeats would pass after that; expire_after asks for {wished} days: "
                    "change the rule, or expire_after if no window is longer",
                )
            _log.warning(
                "oncebridge.s3_rule_removes_all",
                extra={
                    "bucket": self._name,
                    "rule": rule.id,
                    "what": "it also removes what must stay longer, such as that a route is "
                    f"paused; limit it to objects smaller than {PASSED_OVER} bytes, as "
                    "`oncebridge migrate` does",
                },
            )
        if rules:
            self._objects.rule_ms = ms(timedelta(days=min(rule.days for rule in rules)))
        covering = [rule for rule in rules if self._prefix.startswith(rule.prefix)]
        if not covering and self._options.expiry == "lifecycle":
            _log.warning(
                "oncebridge.s3_without_expiry",
                extra={
                    "bucket": self._name,
                    "what": "no lifecycle rule removes old records, so they stay for ever; "
                    "`oncebridge migrate` makes one",
                },
            )

    async def _migrate(self) -> list[str]:
        place = await self._client.open()
        done: list[str] = []
        try:
            await self._client.request("HEAD")
        except AwsError as error:
            if error.status != 404:
                raise
            await self._client.request("PUT", body=_location(place.region))
            done.append(f"made the bucket {self._name} in {place.region}")
        if self._options.expiry == "lifecycle":
            rule = rule_for(self._prefix, self._options.expire_after)
            if await write_expiry(self._client, rule):
                done.append(f"made the rule {rule.id}: records go after {rule.days} days")
        return done

    async def _told(self, work: Awaitable[_T]) -> _T:
        """Say what to do about what goes wrong at the start."""
        try:
            return await work
        except ConfigError as error:
            raise ConfigError(error.where, f"s3://{self._name}: {error.message}") from None
        except (NotSent, Unclear) as error:
            raise StoreUnavailable(f"s3://{self._name}: {error}") from error
        except AwsError as error:
            if error.retryable and error.status != 501:
                raise StoreUnavailable(f"s3://{self._name}: {error}") from error
            raise ConfigError("", f"s3://{self._name}: {_advice(error)}") from error


def _met_something(answer: ClaimAnswer) -> bool:
    if isinstance(answer, Claim):
        return any(held.attempts > 1 for held in answer.held)
    return not isinstance(answer, NoAnswer)


def _location(region: str) -> bytes:
    if region == "us-east-1":
        return b""
    return (
        '<CreateBucketConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<LocationConstraint>{region}</LocationConstraint></CreateBucketConfiguration>"
    ).encode()


def _advice(error: AwsError) -> str:
    match error.code:
        case "NoSuchBucket":
            return "there is no such bucket; `oncebridge migrate` makes it"
        case "AuthorizationHeaderMalformed" | "PermanentRedirect" | "HTTP 301":
            (region,) = first_texts(error.body, "Region")
            where = f" ({region})" if region else ""
            return f"the bucket is in another Region{where}; put ?region= into the address"
        case "RequestTimeTooSkewed":
            return "this host's clock is minutes away from that of S3; set it (NTP, chrony)"
        case "NotImplemented":
            return "the server knows no conditional writes, which this store needs"
        case "AccessDenied" | "HTTP 403":
            return (
                f"{error}; it takes s3:GetObject, s3:PutObject and s3:DeleteObject on the objects, "
                "and s3:ListBucket on the bucket (else S3 does not tell what is missing)"
            )
        case _:
            return str(error)
