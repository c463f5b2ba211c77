"""
The S3 store: one small object per key in a bucket. For teams without a database.

**Durability:** everything; S3 confirms a write when it is on several devices.
**Clock:** this host's, corrected by the dates of S3's answers. It may be wrong by *max_skew*, so a
claim is taken over only when its lease has been over for that long.
**Outages:** the answer for keys whose requests fail or are throttled is `NoAnswer`. No event is
lost: events are returned to their source.
**Cost:** two writes per event (about 10 US dollars per million), one read per duplicate, each some
tens of milliseconds. S3 has no batches, so a batch is many requests at once.

Every change is conditional: an object is created if there is none, and replaced if it is still the
version that was read. So one of several workers wins. `open` checks that the server obeys these
conditions.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import repeat
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar
from urllib.parse import unquote

from msgspec.structs import replace

from oncebridge.aws.addresses import name_and_region
from oncebridge.aws.client import AwsClient, AwsError, NotSent, SampleCall, Unclear
from oncebridge.aws.options import AwsStoreOptions
from oncebridge.aws.s3_buckets import KEPT_SIZE, Expiry, checked_prefix, days_of, rule_for
from oncebridge.aws.xml import first_texts
from oncebridge.base.clock import Clock, SystemDice, ms
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError, StoreError, StoreUnavailable
from oncebridge.stores.api import (
    Claim,
    ClaimAnswer,
    ClaimAnswers,
    Column,
    Fate,
    NoAnswer,
    Portable,
    Record,
    Wants,
    answered,
    spread,
)
from oncebridge.stores.aws_time import AwsTime
from oncebridge.stores.conditional import (
    ConditionalBackend,
    ConditionalStore,
    Records,
    VersionedRecord,
)
from oncebridge.stores.record_encoding import FORM, check_form, decode_record, encode_records
from oncebridge.stores.s3.bucket import S3Bucket, try_conditions
from oncebridge.stores.s3.lifecycle import expiries, write_expiry

_T = TypeVar("_T")

_log = logging.getLogger("oncebridge")

_LONGEST_NAME: Final = 256
_RECORD: Final = re.compile(r"(?:[0-9a-f]{2})+|sha256-[0-9a-f]{64}")
_PROBE: Final = "probe-"
_FORM: Final = "form"
"""The object with the form of all records; too large for the lifecycle rule."""
_UNUSED_KEY: Final = b"oncebridge vitals"
"""A key that has no record."""
_PAGE: Final = 1000
_DAY_MS: Final = 86_400_000
_YEAR_MS: Final = 365 * _DAY_MS
_PADDED: Final = b"P"
_REMOVED: Final = b"-"
"""Not empty: lifecycle rules with a size do not apply to empty objects."""
_FAILURES: Final = (AwsError, NotSent, Unclear, StoreError, ConfigError)
_READ_FIRST_SHARE: Final = 0.074
"""
From this share of duplicates on, reading before a claim is cheaper than a write that fails: a
write costs 12.5 times as much as a read, whether or not its condition holds.
"""
_AVERAGED_OVER: Final = 200


class S3Options(AwsStoreOptions, frozen=True, kw_only=True):
    """Options of the S3 store."""

    connections: Annotated[
        int, Doc("How many requests may run at the same time.", "64", at_least=1)
    ] = 64
    look_first: Annotated[
        Literal["auto", "always", "never"],
        Doc(
            "Whether a claim reads before it writes: cheaper if more than one event in fourteen is "
            "a duplicate, but one more request for the others. `auto` decides by the recent share "
            "of duplicates.",
            "auto",
        ),
    ] = "auto"
    expiry: Annotated[
        Literal["lifecycle", "sweep"],
        Doc(
            "What removes old records: a lifecycle rule of the bucket, for free, or this store, "
            "which has to read them all (for servers without lifecycle rules).",
            "lifecycle",
        ),
    ] = "lifecycle"
    expire_after: Annotated[
        timedelta,
        Doc(
            "After how long the lifecycle rule removes records: the longest window plus a day. "
            "`oncebridge migrate` creates the rule.",
            "7d",
        ),
    ] = timedelta(days=7)


class _ObjectBackend(ConditionalBackend):
    """Records as objects."""

    def __init__(self, bucket: S3Bucket, time: AwsTime) -> None:
        self._bucket = bucket
        self.now_ms = time.now_ms
        self.has_conditional_removal = True
        """If False, a record is removed by replacing it with a marker (`_REMOVED`)."""
        self.rule_ms: int | None = None
        """How long after its last write the lifecycle rule removes a record; None: no rule."""
        self._has_warned = False

    async def read(self, keys: Sequence[bytes]) -> list[VersionedRecord | NoAnswer | None]:
        return await _at_once(self.read_object, map(_name, keys))

    async def write(self, records: Records, before: Column[str | None]) -> list[Any]:
        names, count = map(_name, records.keys), len(records)
        keeps, fates = spread(records.keep_until_ms, count), spread(records.fate, count)
        bodies = map(self._body, encode_records(records, records.keys), keeps, fates)
        return await _at_once(self._bucket.write, names, bodies, spread(before, count))

    async def remove(self, keys: Sequence[bytes], before: Sequence[str]) -> list[bool | NoAnswer]:
        names = map(_name, keys)
        if self.has_conditional_removal:
            return await _at_once(self._bucket.remove, names, before)
        marked = await _at_once(self._bucket.write, names, repeat(_REMOVED), before)
        return [one if isinstance(one, NoAnswer) else one is not None for one in marked]

    async def read_object(self, name: str) -> VersionedRecord | None:
        found = await self._bucket.read(name)
        return None if found is None else VersionedRecord(_record(found.body), found.etag)

    def _body(self, body: bytes, keep_until_ms: int, fate: Fate | None) -> bytes:
        keep_ms = keep_until_ms - self.now_ms()
        if self.rule_ms is None or keep_ms <= self.rule_ms:
            return body
        if keep_ms < _YEAR_MS and fate is not None and not self._has_warned:
            self._has_warned = True
            extra = {"rule_days": self.rule_ms // _DAY_MS, "window_days": keep_ms // _DAY_MS + 1}
            _log.warning("oncebridge.s3_window_outlives_rule", extra=extra)
        return (_PADDED + len(body).to_bytes(4, "big") + body).ljust(KEPT_SIZE, b"\0")


def _name(key: bytes) -> str:
    """Return the object name of *key*. Keys are hashes, so names are spread evenly."""
    if 0 < len(key) <= _LONGEST_NAME:
        return key.hex()
    return f"sha256-{sha256(key).hexdigest()}"


def _record(body: bytes) -> Record | None:
    """Return the record in the body of an object; None for the marker of a removed record."""
    if body == _REMOVED:
        return None
    if body[:1] == _PADDED:
        body = body[5 : 5 + int.from_bytes(body[1:5], "big")]
    return decode_record(body)


async def _at_once(
    ask: Callable[..., Awaitable[_T]], *columns: Iterable[Any]
) -> list[_T | NoAnswer]:
    """Make one request for each row of *columns*, all at once; the client limits how many run."""

    async def ask_one(*row: Any) -> _T | NoAnswer:
        try:
            return await ask(*row)
        except _FAILURES as error:
            return NoAnswer(f"S3: {error}")

    requests = [*map(ask_one, *columns)]
    if len(requests) == 1:
        return [await requests[0]]
    return await asyncio.gather(*requests)


class S3Store(ConditionalStore, Portable):
    """
    Keep records in *bucket*, as objects whose names begin with *prefix*.

    *clock* is for tests: it is used without correction, and without a margin.
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
            SampleCall("s3", "head_bucket", {"Bucket": bucket}),
            options,
            connections=options.connections,
        )
        self._time = AwsTime(self._client.clock, options, clock, "s3", {"bucket": bucket})
        self._bucket = S3Bucket(self._client, self._prefix)
        self._objects = _ObjectBackend(self._bucket, self._time)
        super().__init__(self._objects, margin_ms=self._time.margin_ms)
        self._opening = asyncio.Lock()
        self._is_open = False
        self._purge_from = ""
        self._duplicate_share = _READ_FIRST_SHARE
        """The recent share of claims that found a record."""

    @classmethod
    def from_url(cls, url: str, options: S3Options | None = None) -> Self:
        """Open `s3://BUCKET`, `s3://BUCKET/PREFIX` or either with `?region=REGION`."""
        options = options or S3Options()
        place, _, query = url.removeprefix("s3://").partition("?")
        bucket, _, prefix = place.partition("/")
        if "@" in bucket:
            raise ConfigError(
                "", "the address has credentials; use the AWS configuration or environment instead"
            )
        is_ours = url.startswith("s3://") and "#" not in url
        found = name_and_region(f"//{bucket}?{query}", options.region) if is_ours else None
        if found is None:
            raise ConfigError(
                "",
                f"{url!r}: the address of an S3 store is s3://BUCKET/PREFIX; only ?region=REGION "
                "may follow",
            )
        try:
            return cls(bucket, unquote(prefix), replace(options, region=found[1]))
        except ConfigError as error:
            raise ConfigError("", f"{url!r}: {error.message}") from None

    async def open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._explained(self._check())
                self._is_open = True

    async def claim(self, wants: Wants) -> ClaimAnswers:
        looks = self._options.look_first
        reads_first = looks == "auto" and self._duplicate_share >= _READ_FIRST_SHARE
        if reads_first or looks == "always":
            answers = await self._claim_known(wants)
        else:
            answers = await super().claim(wants)
        if answers.each:
            share = sum(map(_found_record, answers.each)) / len(answers)
            self._duplicate_share += min(len(answers) / _AVERAGED_OVER, 1) * (
                share - self._duplicate_share
            )
        return answers

    async def scan(self, place: bytes = b"", limit: int = 1000) -> tuple[list[Record], bytes]:
        entries, following = await self._read_page(place.decode(), limit)
        return [entry.record for entry in entries if entry.record is not None], following.encode()

    async def purge(self, limit: int = 1000) -> int:
        """
        Read the next *limit* records, and remove those past keeping.

        Does nothing if a lifecycle rule does this: every read costs money.
        """
        if self._options.expiry == "lifecycle":
            return 0
        gone = 0
        for looks in range(limit, 0, -_PAGE):
            entries, self._purge_from = await self._read_page(self._purge_from, min(looks, _PAGE))
            gone += await self._remove_past(entries)
            if not self._purge_from:
                break
        return gone

    async def health(self) -> Mapping[str, int | None]:
        """
        Check that S3 answers, by reading an object that does not exist.

        The number of records is not known: listing them would cost too much.
        """
        await self.peek([_UNUSED_KEY])
        return self._time.health()

    async def migrate(self) -> list[str]:
        """Create the bucket if there is none, and the lifecycle rule."""
        return await self._explained(self._migrate())

    async def aclose(self) -> None:
        await self._client.aclose()

    # --- listing ------------------------------------------------------------------------

    async def _read_page(self, after: str, limit: int) -> tuple[list[VersionedRecord], str]:
        """Return the next objects, and the name to continue after; empty at the end."""
        try:
            names, following = await self._bucket.page(after, limit)
        except (AwsError, NotSent, Unclear) as error:
            raise StoreUnavailable(f"S3: {error}") from None
        read = await _at_once(self._objects.read_object, filter(_RECORD.fullmatch, names))
        return [entry for entry in map(answered, read) if entry is not None], following

    # --- at the start -------------------------------------------------------------------

    async def _check(self) -> None:
        await self._client.open()
        probe = _PROBE + SystemDice().tokens(1)[0].hex()
        self._objects.has_conditional_removal = await try_conditions(self._bucket, probe)
        await self._check_form()
        self._time.check()
        keeps_versions, rules = await asyncio.gather(
            _if_allowed(self._bucket.keeps_versions()),
            _if_allowed(expiries(self._client, self._prefix)),
        )
        if keeps_versions:
            self._warn(
                "keeps_versions",
                "every change keeps an old version, which costs storage; turn versioning off, or "
                "add a lifecycle rule that removes noncurrent versions",
            )
        if rules is not None:
            self._note_rules(rules)
            return
        # There may be a rule nevertheless, such as that of `oncebridge migrate`.
        self._objects.rule_ms = ms(timedelta(days=days_of(self._options.expire_after)))
        self._warn(
            "expiry_unknown",
            "reading the lifecycle rules is not allowed; grant s3:GetLifecycleConfiguration",
        )

    def _warn(self, event: str, what: str, **more: str) -> None:
        _log.warning(f"oncebridge.s3_{event}", extra={"bucket": self._name, "what": what, **more})

    async def _check_form(self) -> None:
        """Check the form of the records in the bucket; write ours if it is new."""
        found = await self._bucket.read(_FORM)
        while found is None:
            await self._bucket.write(_FORM, FORM.ljust(KEPT_SIZE, b"\0"), None)
            found = await self._bucket.read(_FORM)
        check_form(found.body[: len(FORM)], "the bucket")

    def _note_rules(self, rules: Sequence[Expiry]) -> None:
        """Check which records the bucket's rules remove, and when."""
        wanted = days_of(self._options.expire_after)
        for rule in rules:
            if not rule.removes_all:
                continue
            if rule.days < wanted:
                raise ConfigError(
                    "",
                    f"the bucket's lifecycle rule {rule.id!r} removes records after {rule.days} "
                    f"days, so later duplicates would be delivered; expire_after is {wanted} days: "
                    "change the rule, or expire_after if no window is longer",
                )
            self._warn(
                "rule_removes_all",
                "it also removes records that must stay longer, such as paused routes; limit it "
                f"to objects smaller than {KEPT_SIZE} bytes, as `oncebridge migrate` does",
                rule=rule.id,
            )
        if rules:
            self._objects.rule_ms = ms(timedelta(days=min(rule.days for rule in rules)))
        covering = [rule for rule in rules if self._prefix.startswith(rule.prefix)]
        if not covering and self._options.expiry == "lifecycle":
            self._warn(
                "without_expiry",
                "no lifecycle rule removes old records, so they stay for ever; `oncebridge "
                "migrate` creates one",
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
            done.append(f"created the bucket {self._name} in {place.region}")
        if self._options.expiry == "lifecycle":
            rule = rule_for(self._prefix, self._options.expire_after)
            if await write_expiry(self._client, rule):
                done.append(f"created the rule {rule.id}: removes records after {rule.days} days")
        return done

    async def _explained(self, work: Awaitable[_T]) -> _T:
        """Do *work* of the start; raise errors that say what to do."""
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


def _found_record(answer: ClaimAnswer | int) -> bool:
    if isinstance(answer, Claim):
        return any(held.attempts > 1 for held in answer.held)
    return not isinstance(answer, int | NoAnswer)


async def _if_allowed(work: Awaitable[_T]) -> _T | None:
    """Return the result of *work*; None if it is not allowed."""
    try:
        return await work
    except AwsError as error:
        if error.retryable:
            raise
        return None


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
            return "there is no such bucket; create it with: oncebridge migrate"
        case "AuthorizationHeaderMalformed" | "PermanentRedirect" | "HTTP 301":
            (region,) = first_texts(error.body, "Region")
            where = f" ({region})" if region else ""
            return f"the bucket is in another Region{where}; add ?region= to the address"
        case "RequestTimeTooSkewed":
            return "this host's clock is off by minutes; synchronise it (NTP, chrony)"
        case "NotImplemented":
            return "the server does not support conditional writes, which this store needs"
        case "AccessDenied" | "HTTP 403":
            return (
                f"{error}; grant s3:GetObject, s3:PutObject and s3:DeleteObject on the objects, "
                "and s3:ListBucket on the bucket (without it S3 denies access to missing objects)"
            )
        case _:
            return str(error)
