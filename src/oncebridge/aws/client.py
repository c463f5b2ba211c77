"""
A thin client for one use of one AWS service.

botocore finds the endpoint and the credentials (`oncebridge.aws.account`); requests are signed
here and sent over our own connections. A call ends in one of these ways:

- the response of the service;
- `AwsError`: the service returned an error;
- `NotSent`: no part of the request can have reached the service;
- `Unclear`: it was sent, and no complete response arrived in time.

Nothing is retried, with one exception: if the credentials have expired, new ones are searched
for, and the refused request is sent once more with them.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from oncebridge.aws.account import Account, SampleCall, ServiceEndpoint
from oncebridge.aws.options import AwsOptions
from oncebridge.aws.signing import (
    AwsCredentials,
    AwsRequest,
    Pairs,
    Signer,
    encoded_path,
    encoded_query,
)
from oncebridge.aws.skewed_clock import SkewedClock
from oncebridge.aws.xml import first_texts
from oncebridge.errors import OncebridgeError
from oncebridge.http.client import Client, ClientResponse, NotSent, Unclear

__all__ = ["AwsClient", "AwsError", "ClientResponse", "NotSent", "SampleCall", "Unclear"]

_MAX_RESPONSE: Final = 20 << 20  # DynamoDB returns up to 16 MB at once
_MAX_MESSAGE: Final = 300

_EXPIRED = frozenset(
    {
        *("ExpiredToken", "ExpiredTokenException", "InvalidToken"),
        *("InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException"),
    }
)
"""The service does not accept these credentials (any more): nothing was done."""
_THROTTLED = frozenset(
    {
        "BandwidthLimitExceeded",
        "LimitExceededException",
        "PriorRequestNotComplete",
        "ProvisionedThroughputExceeded",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingError",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_DENIED = frozenset({"accessdenied", "authorizationerror", "notauthorized"})
_MISSING = frozenset({"nonexistentqueue", "notfound", "queuedoesnotexist", "resourcenotfound"})
_TRANSIENT = frozenset(
    {
        "ConditionalRequestConflict",
        "InternalError",
        "InternalServerError",
        "OperationAborted",
        "ReplicatedWriteConflictException",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "TransactionConflict",
        "TransactionConflictException",
        "TransactionInProgressException",
    }
)


class AwsError(OncebridgeError):
    """
    The service returned an error.

    *code* is the error code of the service, *retryable* is True if the same request may succeed
    later, and *body* is the complete response.
    """

    def __init__(self, status: int, code: str, message: str, body: bytes = b"") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.status = status
        self.code = code
        self.message = message
        self.body = body

    @property
    def retryable(self) -> bool:
        return (
            self.status >= 500
            or self.status == 429
            or self.code in _THROTTLED
            or self.code in _TRANSIENT
        )

    @property
    def is_throttling(self) -> bool:
        return self.status == 429 or self.code in _THROTTLED

    @property
    def is_denied(self) -> bool:
        """True if the caller is known and is not allowed to do this."""
        plain = self.plain_code
        is_denied = plain in _DENIED or plain.startswith("notauthorizedfor")
        return is_denied or self.code == "HTTP 403"

    @property
    def is_missing(self) -> bool:
        """True if the target does not exist."""
        return self.plain_code in _MISSING

    @property
    def plain_code(self) -> str:
        """The code in the form its spellings share: `KMS.DisabledException` is `kmsdisabled`."""
        code = self.code.removeprefix("AWS.SimpleQueueService.").replace(".", "")
        return code.removesuffix("Exception").lower()


class _JsonError(Struct):
    type_: str = msgspec.field(default="", name="__type")
    code: str = ""
    message: str = ""
    Message: str = ""


class AwsClient:
    """
    Call the service of *example*, at most *connections* times at once.

    The timeout of *options* limits a call, from waiting for a free connection to the last byte of
    the response. *options* override the environment, and *region* overrides *options*. A client
    belongs to the loop it is used in.
    """

    def __init__(
        self,
        example: SampleCall,
        options: AwsOptions,
        *,
        region: str | None = None,
        connections: int = 32,
        clock: SkewedClock | None = None,
    ) -> None:
        self.clock = clock or SkewedClock()
        self._account = Account(
            example,
            region=region or options.region,
            endpoint=options.endpoint,
            profile=options.profile,
        )
        self._timeout_s = options.timeout.total_seconds()
        self._connect_timeout = options.connect_timeout
        self._free = asyncio.Semaphore(connections)
        self._service: ServiceEndpoint | None = None
        self._http: Client
        self._has_http = False
        self._signer: Signer
        self._host = ""
        self._base = ""
        self._opening = asyncio.Lock()

    async def open(self) -> ServiceEndpoint:
        """Find the endpoint and the credentials; may be called again."""
        async with self._opening:
            if self._service is None:
                service = await self._account.service_endpoint()
                if not self._has_http:
                    self._connect_to(
                        service
                    )  # first: no credentials are found through an unusable proxy
                await self._account.credentials()
                self._service = service
        assert self._service is not None  # noqa: S101 - set just now
        return self._service

    def _connect_to(self, service: ServiceEndpoint) -> None:
        self._http = Client(
            service.url,
            headers=[("User-Agent", "oncebridge"), ("Accept-Encoding", "identity")],
            connect_timeout=self._connect_timeout,
            # Endpoints close connections that are idle for about 20 s.
            idle_time=timedelta(seconds=15),
            max_answer=_MAX_RESPONSE,
            allow_private=True,  # endpoints inside of a VPC are
            tls=service.tls(),
        )
        self._signer = Signer(service.signing_name, service.signing_region)
        self._host = self._http.target.host_header
        self._base = urlsplit(service.url).path.rstrip("/")
        self._has_http = True

    async def call(self, operation: str, body: bytes, *, within: timedelta | None = None) -> bytes:
        """
        Call an operation of a service that speaks JSON, with *body* as its input.

        *within* replaces the timeout, for a slow operation such as a long poll.
        """
        service = self._service or await self.open()
        headers = (
            ("content-type", f"application/x-amz-json-{service.json_version}"),
            ("x-amz-target", f"{service.target_prefix}.{operation}"),
        )
        request = AwsRequest("POST", f"{self._base}/", "", headers, body)
        timeout_s = self._timeout_s if within is None else within.total_seconds()
        return (await self._send(request, timeout_s)).body

    async def request(
        self,
        method: str,
        path: str = "",
        *,
        query: Pairs = (),
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
    ) -> ClientResponse:
        """
        Send a request to a service that speaks REST, such as S3.

        *path* (with its slash) and *query* are not encoded yet, and are relative to the URL of
        the example: for S3, that of the bucket. The names of *headers* are in lower case. Raise
        `AwsError` for a status of 300 and above.
        """
        if self._service is None:
            await self.open()
        where = self._base + encoded_path(path) or "/"
        request = AwsRequest(method, where, encoded_query(query), headers, body)
        return await self._send(request, self._timeout_s)

    async def aclose(self) -> None:
        """Close all connections; calls in progress end as `Unclear`. May be called again."""
        if self._service is not None:
            await self._http.aclose()
        self._account.close()

    # --- a call --------------------------------------------------------------------------

    async def _send(self, request: AwsRequest, timeout_s: float) -> ClientResponse:
        sent = False
        try:
            async with asyncio.timeout(timeout_s), self._free:
                credentials = await self._account.credentials()
                sent = True
                answer = await self._signed(request, credentials)
                if answer.status < 300:
                    return answer
                error = _error(answer)
                if error.code not in _EXPIRED:
                    raise error
                another = await self._account.renewed_credentials(credentials)
                if another == credentials:
                    raise error
                answer = await self._signed(request, another)
        except TimeoutError:
            if sent:
                raise Unclear(f"no answer within {timeout_s:g} s") from None
            raise NotSent(f"no free connection within {timeout_s:g} s") from None
        if answer.status >= 300:
            raise _error(answer)
        return answer

    async def _signed(self, request: AwsRequest, credentials: AwsCredentials) -> ClientResponse:
        clock = self.clock
        asked_ms = clock.local()
        headers = self._signer.sign(request, self._host, credentials, asked_ms + clock.offset_ms)
        where = f"{request.path}?{request.query}" if request.query else request.path
        answer = await self._http.request(request.method, where, request.body, headers)
        date = answer.headers.get(b"date")
        if date is not None:
            clock.note(date, asked_ms, clock.local())
        return answer


def _error(answer: ClientResponse) -> AwsError:
    is_xml = answer.body[:1] == b"<"
    code, message = first_texts(answer.body, "Code", "Message") if is_xml else _json(answer.body)
    named = answer.headers.get(b"x-amzn-errortype", b"").decode("latin-1")
    # The name may follow a namespace and a #, and may be followed by a colon and an address.
    code = (code or named).rpartition("#")[2].partition(":")[0] or f"HTTP {answer.status}"
    return AwsError(answer.status, code, message[:_MAX_MESSAGE], answer.body)


def _json(body: bytes) -> tuple[str, str]:
    try:
        error = msgspec.json.decode(body, type=_JsonError)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", ""
    return error.type_ or error.code, error.message or error.Message
