"""
What an AWS account says when it is asked, and asked only.

Nothing but `Get…`, `List…`, `Describe…` and `Simulate…` can be called from here. Whatever keeps
an answer from us is raised as `NotReadable`, with what it takes in words or as an IAM action; that
there is no such thing is `NoSuchResource`. botocore does the asking, in threads, with short time-outs,
and tries again where it is throttled.
"""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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
from botocore.loaders import create_loader  # type: ignore[import-untyped]
from msgspec import Struct

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
"""Between tries where a service is busy."""
_ACTIONS: Final = {
    "s3:GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
}
"""Where IAM calls an operation something else."""
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
"""How the next page is asked for, where it is not by NextToken."""


class NotReadable(Exception):
    """It could not be looked at; *needs* says what it takes."""

    def __init__(self, needs: str) -> None:
        super().__init__(needs)
        self.needs = needs


class _Busy(NotReadable):
    """It is throttled; in a moment it may not be."""


class NoSuchResource(Exception):
    """There is no such thing."""


_HIDDEN: Final = "or you do not have access"
"""So SQS ends what it says of a queue that is not there, where it may only be hidden from us."""


class AwsLocation(Struct, frozen=True):
    """Whose account, which Region, which endpoint; what is None is as the environment says."""

    region: str | None = None
    profile: str | None = None
    endpoint: str | None = None
    service: str = ""
    """Whose endpoint it is: others do not answer there."""


class AwsReader:
    """
    Ask AWS, whichever service and Region it takes.

    *clock* is this host's, as a test may set it; what the answers say of the time is in
    `self.clock`.
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
        """List the URLs of the services that were asked."""
        return sorted({url for one in self._services.values() if (url := one.endpoint)})

    async def aclose(self) -> None:
        """Close all connections."""
        for service in self._services.values():
            await asyncio.to_thread(service.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Do *work* in a thread, when one of the few there are is free."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def session(self, profile: str | None) -> Any:
        """Return the session of a profile; it finds the credentials once."""
        if profile not in self._sessions:
            session = botocore.session.Session(profile=profile)
            session.register_component(
                "data_loader", _loader(session.get_config_variable("data_path"))
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
        """Why there is no use in asking again."""
        self._asked = threading.local()
        self._making = threading.Lock()

    @property
    def endpoint(self) -> str:
        """The URL that is called; empty if nothing was asked yet."""
        return "" if self._client is None else str(self._client.meta.endpoint_url)

    async def region(self) -> str:
        """Return which Region it is."""
        client = await self._in_thread("", self._made)
        return str(client.meta.region_name)

    async def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """
        Call an operation that reads.

        The same question is asked once, however many want to know.
        """
        if not _READS.fullmatch(operation):
            raise ValueError(f"{operation} does more than read")
        key = f"{operation} {sorted(arguments.items())}"
        if key not in self._answers:
            self._answers[key] = asyncio.ensure_future(self._ask(operation, arguments))
        answer: dict[str, Any] = await self._answers[key]
        return answer

    async def ask_all(self, operation: str, member: str, **arguments: Any) -> list[Any]:
        """Call an operation that lists, page by page, and give the *member* of all pages."""
        told, wanted = _TOKENS.get(self.name, ("NextToken", "NextToken"))
        found: list[Any] = []
        token: dict[str, Any] = {}
        seen: set[str] = set()
        while True:
            answer = await self.ask(operation, **arguments, **token)
            found += answer.get(member) or []
            following = answer.get(told)
            if not following:
                return found
            if following in seen:
                action = self._action(operation)
                raise NotReadable(f"another answer to {action} than the same page again")
            seen.add(following)
            token = {wanted: following}

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
        """Return what IAM calls an operation."""
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
        """Do it in a thread; tell what goes wrong in our words, since botocore's may quote."""
        try:
            return await self._reader.in_thread(work)
        except ClientError as error:
            raise self._refused(error.response, action) from None
        except ParamValidationError:
            raise NoSuchResource from None  # such a thing cannot even have that name
        except NoCredentialsError:
            self._unavailable = (
                "AWS credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        except ProfileNotFound:
            self._unavailable = f"a profile that is there: there is no {self._profile()}"
        except (SSOError, TokenRetrievalError):
            # Of a login that is over, or that never was.
            self._unavailable = f"a login: aws sso login --profile {self._profile()}"
        except NoRegionError:
            self._unavailable = "an AWS Region: set AWS_REGION, or region= in the address"
        except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
            self._unavailable = f"an answer of {self.name} ({type(error).__name__})"
        raise NotReadable(self._unavailable)

    def _profile(self) -> str:
        """Name the profile; as it stands in an address, or in the environment."""
        named = self._where.profile or os.environ.get("AWS_PROFILE")
        return quote(named or os.environ.get("AWS_DEFAULT_PROFILE") or "default")

    def _refused(self, response: Any, action: str) -> Exception:
        told = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
        error = AwsError(status, str(told.get("Code", "")), "")
        if error.code in _ABSENT or error.is_missing:
            is_hidden = _HIDDEN in str(told.get("Message", ""))
            return NotReadable(action) if is_hidden else NoSuchResource()
        if error.is_denied:
            return NotReadable(action)
        if error.code in _STRANGERS:
            self._unavailable = f"credentials that AWS accepts ({error.code})"
            return NotReadable(self._unavailable)
        if error.code in _BY_CLOCK:
            self._unavailable = (
                f"a signature that AWS accepts ({error.code}): "
                "are the secret key and this host's clock right?"
            )
            return NotReadable(self._unavailable)
        if error.is_throttling:
            return _Busy(f"{action} without being throttled ({error.code}): try again later")
        return NotReadable(f"another answer to {action} than {error.code or status}")

    # --- the time, by the dates of the answers -----------------------------------------------

    def _note_sent(self, **_: Any) -> None:
        self._asked.at_ms = self._reader.clock.local()

    def _note_answered(self, response_dict: Any, **_: Any) -> None:
        headers = (response_dict or {}).get("headers", {})
        date = headers.get("date") or headers.get("Date")
        if date:
            clock = self._reader.clock
            clock.note(str(date).encode(), self._asked.at_ms, clock.local())


@cache
def _loader(path: str | None) -> Any:
    """Return what reads the descriptions of services; they are large, so they are read once."""
    return create_loader(path)
