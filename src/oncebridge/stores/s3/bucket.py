"""
A bucket whose objects are changed only under conditions.

An object is created where there is none (`If-None-Match: *`), and replaced or removed as
the very version that was read (`If-Match`). Whoever comes second hears no, and nothing
was written. `try_conditions` finds out whether a bucket's server keeps to that: on AWS all do, but
there are servers that take the headers and heed none.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote_plus

from msgspec import Struct

from oncebridge.aws.client import Answer, AwsClient, AwsError, Unclear
from oncebridge.aws.xml import document
from oncebridge.errors import ConfigError

_MOST_LISTED: Final = 1000
_NO_ETAG: Final = '"00000000000000000000000000000000"'
"""Of no object: so far nobody knows what has this hash."""

_LOST = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"})
"""
Another was first, is at it just now, or has removed it. Reading again shows which.
"""


class StoredObject(Struct, frozen=True, gc=False):
    """An object as it was read."""

    body: bytes
    etag: str


class ObjectPage(Struct, frozen=True):
    """A part of the listing."""

    names: Sequence[str]
    goes_on: bool


class S3Bucket:
    """
    The objects under *prefix* in the bucket of *client*; names are relative to it.

    What the service refuses, and what does not reach it, raises as in `oncebridge.aws.client`.
    """

    def __init__(self, client: AwsClient, prefix: str) -> None:
        self._client = client
        self._root = f"/{prefix}"
        self._prefix = prefix

    async def read(self, name: str) -> StoredObject | None:
        """Read an object; None where there is none."""
        try:
            answer = await self._client.request("GET", self._root + name)
        except AwsError as error:
            if error.code == "NoSuchKey":
                return None
            raise
        return StoredObject(answer.body, _etag(answer))

    async def create(self, name: str, body: bytes) -> str | None:
        """Write a new object, and give its ETag; None where there is one already."""
        return await self._put(name, body, ("if-none-match", "*"))

    async def replace(self, name: str, etag: str, body: bytes) -> str | None:
        """Write over the version *etag*, and give the new ETag; None if it is not that any more."""
        return await self._put(name, body, ("if-match", etag))

    async def remove(self, name: str, etag: str) -> bool:
        """Remove the version *etag*; False if it is not that any more."""
        try:
            await self._client.request("DELETE", self._root + name, headers=[("if-match", etag)])
        except AwsError as error:
            if error.code in _LOST:
                return False
            raise
        return True

    async def discard(self, name: str) -> None:
        """Remove an object whatever it is; for what only we know of."""
        await self._client.request("DELETE", self._root + name)

    async def page(self, after: str, limit: int) -> ObjectPage:
        """List about *limit* names that follow *after*, in order."""
        query = [("list-type", "2"), ("max-keys", str(min(limit, _MOST_LISTED)))]
        query += [("encoding-type", "url")]  # XML cannot hold every name
        query += [("prefix", self._prefix)] if self._prefix else []
        query += [("start-after", self._prefix + after)] if after else []
        answer = await self._client.request("GET", query=query)
        listed = document(answer.body, "ListBucketResult")
        names = [one.findtext("{*}Key", "") for one in listed.findall("{*}Contents")]
        if listed.findtext("{*}EncodingType", "").strip() == "url":
            names = [unquote_plus(name) for name in names]
        goes_on = listed.findtext("{*}IsTruncated", "").strip()
        if goes_on not in ("true", "false"):
            raise Unclear("the answer does not tell whether the list of objects goes on")
        if not all(names) or (goes_on == "true" and not names):
            raise Unclear("the answer lists objects without their names")
        return ObjectPage([name.removeprefix(self._prefix) for name in names], goes_on == "true")

    async def keeps_versions(self) -> bool | None:
        """Return whether every change leaves the old version behind; None if that is not told."""
        try:
            answer = await self._client.request("GET", query=[("versioning", "")])
        except AwsError as error:
            if error.retryable:
                raise
            return None
        told = document(answer.body, "VersioningConfiguration")
        return told.findtext("{*}Status", "").strip() == "Enabled"

    async def _put(self, name: str, body: bytes, condition: tuple[str, str]) -> str | None:
        try:
            answer = await self._client.request(
                "PUT", self._root + name, headers=[condition], body=body
            )
        except AwsError as error:
            if error.code in _LOST:
                return None
            raise
        return _etag(answer)


def _etag(answer: Answer) -> str:
    etag = answer.headers.get(b"etag", b"").decode("latin-1")
    if not etag:
        raise ConfigError("", "the server names no ETag of its objects, so no change can be safe")
    return etag


async def try_conditions(bucket: S3Bucket, name: str) -> bool:
    """
    Try with the object *name*, which nobody else uses, whether conditions are heeded.

    Raise `ConfigError` where writes do not heed them. Tell whether removals do: where they
    do not, an object can only be replaced by one that stands for nothing.
    """
    if await bucket.read(name) is not None:
        raise ConfigError("", f"the server shows an object {name!r} that nobody wrote")
    if await bucket.replace(name, _NO_ETAG, b"none") is not None:
        raise ConfigError("", _UNHEEDED.format("If-Match"))  # where there is nothing to match
    etag = await bucket.create(name, b"first")
    if etag is None:
        raise ConfigError("", "the server refuses to create an object where there is none")
    if await bucket.create(name, b"second") is not None:
        raise ConfigError("", _UNHEEDED.format("If-None-Match"))
    if await bucket.replace(name, _NO_ETAG, b"second") is not None:
        raise ConfigError("", _UNHEEDED.format("If-Match"))
    etag = await bucket.replace(name, etag, b"third")
    if etag is None:
        raise ConfigError("", "the server refuses to replace an object that was just written")
    if await bucket.read(name) != StoredObject(b"third", etag):
        raise ConfigError("", "the server does not show what was just written")
    return await _heeds_conditional_removal(bucket, name, etag)


async def _heeds_conditional_removal(bucket: S3Bucket, name: str, etag: str) -> bool:
    try:
        if await bucket.remove(name, _NO_ETAG):
            return False
        if not await bucket.remove(name, etag):
            raise ConfigError("", "the server refuses to remove an object that was just written")
    except AwsError as error:
        if error.status != 501:
            raise
        await bucket.discard(name)
        return False
    return True


_UNHEEDED: Final = (
    "the server does not heed {} when it writes, so two workers would both win; "
    "Amazon S3 does, and newer versions of other servers"
)
