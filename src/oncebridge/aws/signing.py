"""
Sign requests with AWS Signature Version 4.

The signing key depends on the day, the Region and the service, so it is derived once a day.
A signature then needs one hash of the body, one of the request and one HMAC.
"""

import hmac
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import quote

from msgspec import Struct

_ALGORITHM = "AWS4-HMAC-SHA256"
Pairs = Iterable[tuple[str, str]]


class AwsCredentials(Struct, frozen=True):
    """The credentials that requests are signed with."""

    access_key: str
    secret_key: str
    token: str = ""
    """The session token; empty for the keys of a user."""

    def __repr__(self) -> str:
        return f"<AwsCredentials {self.access_key[:4]}…>"


class AwsRequest(Struct, frozen=True):
    """A request to sign and send."""

    method: str
    path: str
    """Encoded."""
    query: str
    """Encoded and sorted; without the question mark."""
    headers: Sequence[tuple[str, str]]
    """With names in lower case, and without `host`, which the HTTP client adds."""
    body: bytes


def encoded_path(path: str) -> str:
    """Percent-encode a path as the signature requires: all but letters, digits and ``-._~/``."""
    return quote(path, safe="/~")


def encoded_query(pairs: Pairs) -> str:
    """Return a query sorted and percent-encoded, for the request and its signature."""
    encoded = sorted((quote(name, safe="~"), quote(value, safe="~")) for name, value in pairs)
    return "&".join(f"{name}={value}" for name, value in encoded)


class Signer:
    """Signs requests to one *service* in one *region*."""

    def __init__(self, service: str, region: str) -> None:
        self._service = service
        self._region = region
        self._second = -1
        self._stamp = ""
        self._credentials: AwsCredentials | None = None
        self._scope = ""
        self._key = b""

    def sign(
        self, request: AwsRequest, host: str, credentials: AwsCredentials, now_ms: int
    ) -> list[tuple[str, str]]:
        """Return the headers of *request* with those of its signature."""
        self._update_key(credentials, now_ms // 1000)
        digest = sha256(request.body).hexdigest()
        sent = [*request.headers, ("x-amz-date", self._stamp), ("x-amz-content-sha256", digest)]
        if credentials.token:
            sent.append(("x-amz-security-token", credentials.token))
        signed = sorted([*sent, ("host", host)])
        names = ";".join([name for name, _ in signed])
        lines = "\n".join([f"{name}:{value}" for name, value in signed])
        # Services other than S3 require a doubly encoded path, but their paths need no encoding.
        start = f"{request.method}\n{request.path}\n{request.query}"
        signature = self._signature(f"{start}\n{lines}\n\n{names}\n{digest}")
        credential = f"Credential={credentials.access_key}/{self._scope}"
        proof = f"{_ALGORITHM} {credential}, SignedHeaders={names}, Signature={signature}"
        sent.append(("authorization", proof))
        return sent

    def presigned(
        self, host: str, asked: Pairs, credentials: AwsCredentials, now_ms: int, *, valid_s: int
    ) -> str:
        """Return a presigned URL, without its scheme, of a GET with the query *asked*."""
        self._update_key(credentials, now_ms // 1000)
        pairs = [
            *asked,
            ("X-Amz-Algorithm", _ALGORITHM),
            ("X-Amz-Credential", f"{credentials.access_key}/{self._scope}"),
            ("X-Amz-Date", self._stamp),
            ("X-Amz-Expires", str(valid_s)),
            ("X-Amz-SignedHeaders", "host"),
        ]
        if credentials.token:
            pairs.append(("X-Amz-Security-Token", credentials.token))
        query = encoded_query(pairs)
        digest = sha256(b"").hexdigest()
        signature = self._signature(f"GET\n/\n{query}\nhost:{host}\n\nhost\n{digest}")
        return f"{host}/?{query}&X-Amz-Signature={signature}"

    def _signature(self, canonical: str) -> str:
        hashed = sha256(canonical.encode()).hexdigest()
        to_sign = f"{_ALGORITHM}\n{self._stamp}\n{self._scope}\n{hashed}"
        return hmac.digest(self._key, to_sign.encode(), "sha256").hex()

    def _update_key(self, credentials: AwsCredentials, second: int) -> None:
        """Update the timestamp, and the key if the day or the credentials have changed."""
        if second == self._second and credentials is self._credentials:
            return
        self._second = second
        self._stamp = datetime.fromtimestamp(second, UTC).strftime("%Y%m%dT%H%M%SZ")
        day = self._stamp[:8]
        scope = f"{day}/{self._region}/{self._service}/aws4_request"
        if scope == self._scope and credentials is self._credentials:
            return
        self._scope = scope
        self._credentials = credentials
        key = f"AWS4{credentials.secret_key}".encode()
        for part in (day, self._region, self._service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        self._key = key
