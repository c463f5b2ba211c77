"""
A bucket whose objects are changed with conditions only.

An object is created if there is none (`If-None-Match: *`), and replaced or removed if it is still
the version that was read (`If-Match`). The second of two workers is refused, and nothing is
written. `try_conditions` checks that the server obeys this: Amazon S3 does, but other servers may
accept the headers and ignore them.
"""

from collections.abc import Collection
from typing import Any, Final
from urllib.parse import unquote_plus

from msgspec import Struct

from oncebridge.aws.client import AwsClient, AwsError, ClientResponse, Unclear
from oncebridge.aws.xml import document
from oncebridge.errors import ConfigError

_MOST_LISTED: Final = 1000
_NO_ETAG: Final = '"00000000000000000000000000000000"'
"""The ETag of no object: no content with this hash is known."""

_LOST = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"})
"""Another worker has written it, is writing it, or has removed it. Reading again shows which."""


class StoredObject(Struct, frozen=True, gc=False):
    """An object as it was read."""

    body: bytes
    etag: str


class S3Bucket:
    """
    The objects under *prefix* in the bucket of *client*; names are relative to it.

    Errors are raised as in `oncebridge.aws.client`.
    """

    def __init__(self, client: AwsClient, prefix: str) -> None:
        self._client = client
        self._root = f"/{prefix}"
        self._prefix = prefix

    async def read(self, name: str) -> StoredObject | None:
        """Return an object; None if there is none."""
        answer = await self._request("GET", name, {"NoSuchKey"})
        return None if answer is None else StoredObject(answer.body, _etag(answer))

    async def write(self, name: str, body: bytes, before: str | None) -> str | None:
        """
        Replace the version *before*, or create the object if that is None.

        Return the new ETag; None if another version is there.
        """
        condition = ("if-none-match", "*") if before is None else ("if-match", before)
        answer = await self._request("PUT", name, _LOST, headers=[condition], body=body)
        return None if answer is None else _etag(answer)

    async def remove(self, name: str, etag: str) -> bool:
        """Remove the version *etag*; return False if it has changed."""
        condition = ("if-match", etag)
        return await self._request("DELETE", name, _LOST, headers=[condition]) is not None

    async def discard(self, name: str) -> None:
        """Remove an object without a condition; for objects that only this process uses."""
        await self._request("DELETE", name, ())

    async def _request(
        self, method: str, name: str, expected: Collection[str], **more: Any
    ) -> ClientResponse | None:
        """Return the response; None for an error with one of the *expected* codes."""
        try:
            return await self._client.request(method, self._root + name, **more)
        except AwsError as error:
            if error.code in expected:
                return None
            raise

    async def page(self, after: str, limit: int) -> tuple[list[str], str]:
        """Return about *limit* names that follow *after*, and the last if there are more; else ""."""
        query = [("list-type", "2"), ("max-keys", str(min(limit, _MOST_LISTED)))]
        query += [("encoding-type", "url")]  # XML cannot hold every name
        query += [("prefix", self._prefix)] if self._prefix else []
        query += [("start-after", self._prefix + after)] if after else []
        answer = await self._client.request("GET", query=query)
        listed = document(answer.body, "ListBucketResult")
        names = [one.findtext("{*}Key", "") for one in listed.findall("{*}Contents")]
        if listed.findtext("{*}EncodingType", "").strip() == "url":
            names = [unquote_plus(name) for name in names]
        is_truncated = listed.findtext("{*}IsTruncated", "").strip()
        if is_truncated not in ("true", "false"):
            raise Unclear("the response does not say whether the list of objects is complete")
        if not all(names) or (is_truncated == "true" and not names):
            raise Unclear("the response lists objects without their names")
        names = [name.removeprefix(self._prefix) for name in names]
        return names, names[-1] if is_truncated == "true" else ""

    async def keeps_versions(self) -> bool:
        """Return whether the bucket keeps old versions."""
        answer = await self._client.request("GET", query=[("versioning", "")])
        versioning = document(answer.body, "VersioningConfiguration")
        return versioning.findtext("{*}Status", "").strip() == "Enabled"


def _etag(answer: ClientResponse) -> str:
    etag = answer.headers.get(b"etag", b"").decode("latin-1")
    if not etag:
        raise ConfigError("", "the server sends no ETag of its objects, so no change can be safe")
    return etag


async def try_conditions(bucket: S3Bucket, name: str) -> bool:
    """
    Check with the object *name*, which no other process uses, that conditions are obeyed.

    Raise `ConfigError` if writes do not obey them. Return whether removals do: if not, a record
    is removed by replacing it with a marker.
    """
    if await bucket.read(name) is not None:
        raise ConfigError("", f"the server returns an object {name!r} that was never written")
    if await bucket.write(name, b"none", _NO_ETAG) is not None:
        raise ConfigError("", _IGNORED.format("If-Match"))  # where there is nothing to match
    etag = await bucket.write(name, b"first", None)
    if etag is None:
        raise ConfigError("", "the server refuses to create an object where there is none")
    for header, before in (("If-None-Match", None), ("If-Match", _NO_ETAG)):
        if await bucket.write(name, b"second", before) is not None:
            raise ConfigError("", _IGNORED.format(header))
    etag = await bucket.write(name, b"third", etag)
    if etag is None:
        raise ConfigError("", "the server refuses to replace an object that was just written")
    if await bucket.read(name) != StoredObject(b"third", etag):
        raise ConfigError("", "the server does not return what was just written")
    return await _obeys_conditional_removal(bucket, name, etag)


async def _obeys_conditional_removal(bucket: S3Bucket, name: str, etag: str) -> bool:
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


_IGNORED: Final = (
    "the server ignores {} when it writes, so two workers could claim the same event; use Amazon "
    "S3, or a newer version of the server"
)
