"""
Read the state of an AWS account.

Only `Get…`, `List…`, `Describe…` and `Simulate…` can be called from here. A call that fails raises
`NotReadable`, with what it needs in words or as an IAM action; a missing resource raises
`NoSuchResource`. botocore makes the calls in threads, with short timeouts, and retries when
throttled.
"""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from shlex import quote
from typing import Any, Final

import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from msgspec import Struct

from oncebridge.aws.account import sdk_loader
from oncebridge.aws.client import AwsError
from oncebridge.aws.skewed_clock import SkewedClock
from oncebridge.base.clock import Clock

_log = logging.getLogger("oncebridge")

_READS: Final = re.compile(r"(Get|List|Describe|Simulate)[A-Z]\w*")
_PATIENCE: Final = Config(
    connect_timeout=3,
    read_timeout=5,
    retries={"mode": "standard", "total_max_attempts": 2},
    s3={"us_east_1_regional_endpoint": "regional"},
)
_AT_ONCE: Final = 8
_PAUSES_S: Final = (0.5, 1.5, 4.0)
"""Pauses between attempts when a service throttles."""
_ACTIONS: Final = {
    "s3:GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
}
"""Operations whose IAM action has another name."""
_ABSENT: Final = frozenset({"NoSuchBucket", "NoSuchEntity", "NoSuchLifecycleConfiguration"})
_STRANGERS: Final = frozenset(
    {
        *("AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId"),
        *("InvalidClientTokenId", "InvalidToken", "UnrecognizedClientException"),
    }
)
_BY_CLOCK: Final = frozenset(
    {
        *("InvalidSignatureException", "RequestExpired", "RequestTimeTooSkewed"),
        *("SignatureDoesNotMatch",),
    }
)
_TOKENS: Final = {"lambda": ("NextMarker", "Marker"), "iam": ("Marker", "Marker")}
"""The members for the next page, if not NextToken."""


class NotReadable(Exception):
    """It could not be read; *needs* says what is needed to read it."""

    def __init__(self, needs: str) -> None:
        super().__init__(needs)
        self.needs = needs


class _Busy(NotReadable):
    """The call was throttled, and can be retried."""


class NoSuchResource(Exception):
    """The resource does not exist."""


_HIDDEN: Final = "or you do not have access"
"""End of the message of SQS when a queue does not exist or may only be hidden from us."""


class AwsLocation(Struct, frozen=True):
    """Profile, Region and endpoint; None means that of the environment."""

    region: str | None = None
    profile: str | None = None
    endpoint: str | None = None
    service: str = ""
    """The service of the endpoint: others do not answer there."""


class AwsReader:
    """
    Reads from any service and Region of AWS.

    *clock* is this host's, which a test may set; `self.clock` has the time of the responses.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = SkewedClock(clock)
        self._services: dict[tuple[str, AwsLocation], AwsService] = {}
        self._sessions: dict[str | None, Any] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "oncebridge-check-aws")

    def at(self, service: str, where: AwsLocation) -> "AwsService":
        """Return the *service* there."""
        if service != where.service:
            where = AwsLocation(where.region, where.profile)
        key = service, where
        if key not in self._services:
            self._services[key] = AwsService(self, service, where)
        return self._services[key]

    def endpoints(self) -> list[str]:
        """Return the URLs of the services that were called."""
        return sorted({url for one in self._services.values() if (url := one.endpoint)})

    async def aclose(self) -> None:
        """Close all connections."""
        for service in self._services.values():
            await asyncio.to_thread(service.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run *work* in one of a few threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def session(self, profile: str | None) -> Any:
        """Return the session of a profile; it finds the credentials once."""
        if profile not in self._sessions:
            session = botocore.session.Session(profile=profile)
            session.register_component(
                "data_loader", sdk_loader(session.get_config_variable("data_path"))
            )
            session.set_default_client_config(_PATIENCE)  # roles are fetched by calls, too
            self._sessions[profile] = session
        return self._sessions[profile]


class AwsService:
    """One service in one Region."""

    def __init__(self, reader: AwsReader, name: str, where: AwsLocation) -> None:
        self.name = name
        self._reader = reader
        self._where = where
        self._client: Any = None
        self._answers: dict[str, asyncio.Task[Any]] = {}
        self._unavailable = ""
        """Why further calls would fail; empty if they may succeed."""
        self._asked = threading.local()
        self._making = threading.Lock()

    @property
    def endpoint(self) -> str:
        """The URL of the service; empty before the first call."""
        return "" if self._client is None else str(self._client.meta.endpoint_url)

    async def region(self) -> str:
        """Return which Region it is."""
        client = await self._in_thread("", self._made)
        return str(client.meta.region_name)

    async def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """
        Call an operation that reads, and return its response.

        Equal calls are made once.
        """
        if not _READS.fullmatch(operation):
            raise ValueError(f"{operation} does more than read")
        key = f"{operation} {sorted(arguments.items())}"
        if key not in self._answers:
            self._answers[key] = asyncio.ensure_future(self._ask(operation, arguments))
        answer: dict[str, Any] = await self._answers[key]
        return answer

    async def ask_all(self, operation: str, member: str, **arguments: Any) -> list[Any]:
        """Call an operation that lists, and return the *member* of all pages."""
        name, parameter = _TOKENS.get(self.name, ("NextToken", "NextToken"))
        found: list[Any] = []
        token: dict[str, Any] = {}
        seen: set[str] = set()
        while True:
            answer = await self.ask(operation, **arguments, **token)
            found += answer.get(member) or []
            following = answer.get(name)
            if not following:
                return found
            if following in seen:
                action = self._action(operation)
                raise NotReadable(f"a response to {action} that is not the same page again")
            seen.add(following)
            token = {parameter: following}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # --- asking ----------------------------------------------------------------------------

    async def _ask(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._unavailable:
            raise NotReadable(self._unavailable)
        action = self._action(operation)
        _log.debug("oncebridge.check_asks", extra={"action": action})
        for pause_s in (*_PAUSES_S, None):
            try:
                answer: dict[str, Any] = await self._in_thread(
                    action, lambda: self._call(operation, arguments)
                )
                return answer
            except _Busy:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError  # the last try returns or raises

    def _action(self, operation: str) -> str:
        """Return the IAM action of an operation."""
        action = f"{self.name}:{operation}"
        return _ACTIONS.get(action, action)

    def _call(self, operation: str, arguments: dict[str, Any]) -> Any:
        client = self._made()
        # The Python name, which differs from service to service in how words are split.
        names = client.meta.method_to_api_mapping
        method = next(name for name, api in names.items() if api == operation)
        return getattr(client, method)(**arguments)

    def _made(self) -> Any:
        with self._making:
            if self._client is None:
                session = self._reader.session(self._where.profile)
                # botocore knows the older name only; the other SDKs have this one
                region = session.get_config_variable("region") or os.environ.get("AWS_REGION")
                self._client = session.create_client(
                    self.name,
                    region_name=self._where.region or region,
                    endpoint_url=self._where.endpoint,
                )
                self._client.meta.events.register("before-send", self._note_sent)
                self._client.meta.events.register("response-received", self._note_answered)
            return self._client

    async def _in_thread(self, action: str, work: Callable[[], Any]) -> Any:
        """Run *work* in a thread; raise errors without botocore's texts, which may quote secrets."""
        try:
            return await self._reader.in_thread(work)
        except ClientError as error:
            raise self._refused(error.response, action) from None
        except ParamValidationError:
            raise NoSuchResource from None  # no resource can have that name
        except NoCredentialsError:
            self._unavailable = (
                "AWS credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        except ProfileNotFound:
            self._unavailable = f"an existing profile: {self._profile()} does not exist"
        except (SSOError, TokenRetrievalError):
            # The login has expired, or there was none.
            self._unavailable = f"a login: aws sso login --profile {self._profile()}"
        except NoRegionError:
            self._unavailable = "an AWS Region: set AWS_REGION, or region= in the address"
        except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is not a URL
            self._unavailable = f"a response of {self.name} ({type(error).__name__})"
        raise NotReadable(self._unavailable)

    def _profile(self) -> str:
        """Return the profile of the address or the environment, quoted for a shell."""
        named = self._where.profile or os.environ.get("AWS_PROFILE")
        return quote(named or os.environ.get("AWS_DEFAULT_PROFILE") or "default")

    def _refused(self, response: Any, action: str) -> Exception:
        details = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        error = AwsError(status, str(details.get("Code", "")), "")
        if error.code in _ABSENT or error.is_missing:
            is_hidden = _HIDDEN in str(details.get("Message", ""))
            return NotReadable(action) if is_hidden else NoSuchResource()
        if error.is_denied:
            return NotReadable(action)
        if error.code in _STRANGERS:
            self._unavailable = f"credentials that AWS accepts ({error.code})"
            return NotReadable(self._unavailable)
        if error.code in _BY_CLOCK:
            self._unavailable = (
                f"a signature that AWS accepts ({error.code}): "
                "check the secret key and this host's clock"
            )
            return NotReadable(self._unavailable)
        if error.is_throttling:
            return _Busy(f"{action} without throttling ({error.code}): try again later")
        return NotReadable(f"a response to {action} other than {error.code or status}")

    # --- the time, by the dates of the responses -----------------------------------------------

    def _note_sent(self, **_: Any) -> None:
        self._asked.at_ms = self._reader.clock.local()

    def _note_answered(self, response_dict: Any, **_: Any) -> None:
        headers = (response_dict or {}).get("headers", {})
        date = headers.get("date") or headers.get("Date")
        if date:
            clock = self._reader.clock
            clock.note(str(date).encode(), self._asked.at_ms, clock.local())
