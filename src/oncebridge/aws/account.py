"""
Credentials, Region and endpoint of an AWS service, found by botocore.

botocore reads the environment, profiles, containers and the instance's metadata, and may call
other services, so it runs in threads and never on the loop.
"""

import asyncio
import os
import ssl
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import (  # type: ignore[import-untyped]
    BotoCoreError,
    ClientError,
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    UnknownServiceError,
)
from botocore.loaders import create_loader  # type: ignore[import-untyped]
from msgspec import Struct

from oncebridge.aws.signing import AwsCredentials
from oncebridge.errors import ConfigError
from oncebridge.http.client import NotSent

_T = TypeVar("_T")

_CHECK_EVERY_S: Final = 5.0
_MIN_VALID_S: Final = 10
"""Credentials that expire sooner are not used any more."""

_TIMEOUTS: Final = Config(
    connect_timeout=2, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 2}
)

_CONFIG_PROBLEMS = (
    *(ConfigNotFound, ConfigParseError, InvalidConfigError, NoCredentialsError, NoRegionError),
    *(PartialCredentialsError, ProfileNotFound, UnknownServiceError),
)


class SampleCall(Struct, frozen=True):
    """A call as the SDK would make it; it shows to which URL such calls are sent."""

    service: str
    operation: str
    arguments: dict[str, Any]


class ServiceEndpoint(Struct, frozen=True):
    """The URL of a service, and how calls are signed."""

    url: str
    region: str
    signing_name: str
    signing_region: str
    target_prefix: str
    """For the JSON protocol; empty if the service has another one."""
    json_version: str
    ca_bundle: str
    """A file of certificates to trust, if the AWS configuration has one."""

    def tls(self) -> ssl.SSLContext | None:
        """Return the context for verifying certificates; None for the system's default."""
        if not self.ca_bundle:
            return None
        context = ssl.create_default_context(cafile=self.ca_bundle)
        context.set_alpn_protocols(["http/1.1"])
        return context


class Account:
    """
    The credentials and the endpoint for one use of one service.

    Raise `ConfigError` if the configuration has to be fixed, and `NotSent` if a retry may succeed.
    """

    def __init__(
        self,
        example: SampleCall,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        profile: str | None = None,
    ) -> None:
        self._example = example
        self._region = region
        self._endpoint = endpoint
        self._profile = profile
        self._session: Any = None
        self._provider: Any = None
        self._credentials: AwsCredentials | None = None
        self._checked_at = 0.0
        self._fetching: asyncio.Task[AwsCredentials] | None = None

    async def service_endpoint(self) -> ServiceEndpoint:
        """Return the endpoint of the service."""
        return await _in_thread(self._find_endpoint)

    async def region(self) -> str:
        """Return the Region only, which takes a tenth of the time."""
        return await _in_thread(self._find_region)

    async def credentials(self) -> AwsCredentials:
        """Return valid credentials; usually cached ones."""
        now = asyncio.get_running_loop().time()
        if self._credentials is not None and now - self._checked_at < _CHECK_EVERY_S:
            return self._credentials
        if self._credentials is None or self._expires_within(_MIN_VALID_S):
            return await self._fetched()
        self._checked_at = now
        if self._expires_within(None):  # botocore's own time for renewing them early
            self._fetch()
        return self._credentials

    async def renewed_credentials(self, refused: AwsCredentials) -> AwsCredentials:
        """Search for credentials again, because *refused* is not accepted any more."""
        if self._credentials == refused:
            self._session = self._provider = self._credentials = None
            self._fetching = None
        return await self._fetched()

    def close(self) -> None:
        """Cancel the search for credentials."""
        if self._fetching is not None:
            self._fetching.cancel()

    # --- on the loop ---------------------------------------------------------------------

    def _expires_within(self, seconds: int | None) -> bool:
        refresh_needed = getattr(self._provider, "refresh_needed", None)
        return refresh_needed is not None and refresh_needed(seconds)

    async def _fetched(self) -> AwsCredentials:
        if self._credentials is not None and not self._expires_within(_MIN_VALID_S):
            return self._credentials
        # Shielded: other callers wait for the same task, and the thread cannot be stopped.
        return await asyncio.shield(self._fetch())

    def _fetch(self) -> "asyncio.Task[AwsCredentials]":
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.ensure_future(_in_thread(self._find_credentials))
            self._fetching.add_done_callback(self._keep_fetched)
        return self._fetching

    def _keep_fetched(self, fetched: "asyncio.Task[AwsCredentials]") -> None:
        if fetched.cancelled() or fetched.exception() is not None:
            return  # its callers get the error; others continue with the old credentials
        found = fetched.result()
        if found != self._credentials:  # the same ones stay the same object, for the signer
            self._credentials = found

    # --- in a thread ---------------------------------------------------------------------

    def _botocore_session(self) -> Any:
        """Return the session; it finds the credentials once, for endpoints and signatures."""
        if self._session is None:
            session = botocore.session.Session(profile=self._profile)
            path = session.get_config_variable("data_path")
            session.register_component("data_loader", sdk_loader(path))
            session.set_default_client_config(_TIMEOUTS)  # roles are fetched by calls, too
            self._session = session
        return self._session

    def _find_credentials(self) -> AwsCredentials:
        self._provider = credentials = self._botocore_session().get_credentials()
        if credentials is None:
            raise NoCredentialsError
        frozen = credentials.get_frozen_credentials()
        return AwsCredentials(frozen.access_key, frozen.secret_key, frozen.token or "")

    def _find_region(self) -> str:
        found = self._region or _region(self._botocore_session())
        if found is None:
            raise NoRegionError
        return found

    def _find_endpoint(self) -> ServiceEndpoint:
        example = self._example
        session = self._botocore_session()
        client = session.create_client(
            example.service,
            region_name=self._region or _region(session),
            endpoint_url=self._endpoint,
            config=Config(s3={"us_east_1_regional_endpoint": "regional"}),
        )
        client.meta.events.register("before-sign", _stop_before_signing)
        try:
            getattr(client, example.operation)(**example.arguments)
        except _BeforeSigning as seen:
            request, version = seen.args
        finally:
            client.close()
        if version not in ("v4", "s3v4"):
            raise ConfigError("", f"requests signed with {version} are not supported")
        signing = request.context.get("signing") or {}
        model = client.meta.service_model
        return ServiceEndpoint(
            url=request.url,
            region=client.meta.region_name,
            signing_name=signing.get("signing_name") or model.signing_name,
            signing_region=signing.get("region") or client.meta.region_name,
            target_prefix=model.metadata.get("targetPrefix", ""),
            json_version=model.metadata.get("jsonVersion", ""),
            ca_bundle=session.get_config_variable("ca_bundle") or "",
        )


@cache
def sdk_loader(path: str | None) -> Any:
    """Return the loader of service descriptions; they are large, so they are read once."""
    return create_loader(path)


def _region(session: Any) -> str | None:
    # botocore reads only the older variable; Lambda, ECS and the other SDKs set AWS_REGION.
    found: str | None = session.get_config_variable("region")
    return found or os.environ.get("AWS_REGION")


class _BeforeSigning(Exception):
    """Raised inside botocore, with the request that it was about to sign."""


def _stop_before_signing(request: Any, signature_version: str, **_: Any) -> None:
    raise _BeforeSigning(request, signature_version)


async def _in_thread(work: Callable[[], _T]) -> _T:
    try:
        return await asyncio.to_thread(work)
    except _CONFIG_PROBLEMS as error:
        raise ConfigError("", _advice(error)) from None
    except (BotoCoreError, ClientError) as error:
        # Its text may quote the output of a metadata service or a credential process.
        raise NotSent(f"no AWS credentials at the moment ({type(error).__name__})") from None


def _advice(error: BotoCoreError) -> str:
    match error:
        case NoCredentialsError():
            return (
                "no AWS credentials were found; set AWS_PROFILE or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give this host, container or function a role"
            )
        case NoRegionError():
            return (
                "no AWS Region is set; set AWS_REGION, or the option region (iam_region for Redis)"
            )
        case _:
            return f"the AWS configuration cannot be used: {error}"
