"""
Whose credentials, which Region, which endpoint: botocore knows.

It reads the environment, profiles, containers and the instance's metadata, and may ask
other services, so all of it happens in threads and never on the loop.
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

from oncebridge.aws.signing import Identity
from oncebridge.errors import ConfigError
from oncebridge.http.client import NotSent

_T = TypeVar("_T")

_LOOK_EVERY_S: Final = 5.0
_AT_LEAST_S: Final = 10
"""Credentials that end sooner are not used any more."""

_PATIENCE: Final = Config(
    connect_timeout=2, read_timeout=5, retries={"mode": "standard", "total_max_attempts": 2}
)

_FOR_A_HUMAN = (
    *(ConfigNotFound, ConfigParseError, InvalidConfigError, NoCredentialsError, NoRegionError),
    *(PartialCredentialsError, ProfileNotFound, UnknownServiceError),
)


class Example(Struct, frozen=True):
    """A call as the SDK would make it, from which is learned where such calls go."""

    service: str
    operation: str
    arguments: dict[str, Any]


class Place(Struct, frozen=True):
    """Where calls go, and how they are signed."""

    url: str
    region: str
    signing_name: str
    signing_region: str
    target_prefix: str
    """Of the JSON protocol; empty where a service has another one."""
    json_version: str
    ca_bundle: str
    """A file of certificates to trust, where the configuration names one."""

    def tls(self) -> ssl.SSLContext | None:
        """Return what certificates are checked by; None leaves it to the system."""
        if not self.ca_bundle:
            return None
        context = ssl.create_default_context(cafile=self.ca_bundle)
        context.set_alpn_protocols(["http/1.1"])
        return context


class Account:
    """
    What botocore finds out about one use of one service.

    What a human must put right raises `ConfigError`, what may be better in a moment `NotSent`.
    """

    def __init__(
        self,
        example: Example,
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
        self._credentials: Any = None
        self._identity: Identity | None = None
        self._looked_at = 0.0
        self._fetching: asyncio.Task[Identity] | None = None

    async def place(self) -> Place:
        """Find out where calls go."""
        return await _in_thread(self._place)

    async def region(self) -> str:
        """Find out the Region alone, which takes a tenth of the time."""
        return await _in_thread(self._find_region)

    async def identity(self) -> Identity:
        """Return credentials that last; usually at once."""
        now = asyncio.get_running_loop().time()
        if self._identity is not None and now - self._looked_at < _LOOK_EVERY_S:
            return self._identity
        if self._identity is None or self._ends_within(_AT_LEAST_S):
            return await self._fetched()
        self._looked_at = now
        if self._ends_within(None):  # as early as botocore likes to have them renewed
            self._fetch()
        return self._identity

    async def other_identity(self, refused: Identity) -> Identity:
        """Look everywhere again, because *refused* was not accepted any more."""
        if self._identity == refused:
            self._session = self._credentials = self._identity = None
            self._fetching = None
        return await self._fetched()

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._fetching is not None:
            self._fetching.cancel()

    # --- on the loop ---------------------------------------------------------------------

    def _ends_within(self, seconds: int | None) -> bool:
        refresh_needed = getattr(self._credentials, "refresh_needed", None)
        return refresh_needed is not None and refresh_needed(seconds)

    async def _fetched(self) -> Identity:
        if self._identity is not None and not self._ends_within(_AT_LEAST_S):
            return self._identity
        # Shielded: others wait for the same, and the thread cannot be stopped anyway.
        return await asyncio.shield(self._fetch())

    def _fetch(self) -> "asyncio.Task[Identity]":
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.ensure_future(_in_thread(self._find))
            self._fetching.add_done_callback(self._take)
        return self._fetching

    def _take(self, fetched: "asyncio.Task[Identity]") -> None:
        if fetched.cancelled() or fetched.exception() is not None:
            return  # who waits for it is told; others go on with what they have
        found = fetched.result()
        if found != self._identity:  # the same ones stay the same object, for the signer
            self._identity = found

    # --- in a thread ---------------------------------------------------------------------

    def _opened(self) -> Any:
        """Return the session; it finds the credentials once, for places as for signatures."""
        if self._session is None:
            session = botocore.session.Session(profile=self._profile)
            path = session.get_config_variable("data_path")
            session.register_component("data_loader", _loader(path))
            session.set_default_client_config(_PATIENCE)  # roles are fetched by calls, too
            self._session = session
        return self._session

    def _find(self) -> Identity:
        self._credentials = credentials = self._opened().get_credentials()
        if credentials is None:
            raise NoCredentialsError
        frozen = credentials.get_frozen_credentials()
        return Identity(frozen.access_key, frozen.secret_key, frozen.token or "")

    def _find_region(self) -> str:
        found = self._region or _region(self._opened())
        if found is None:
            raise NoRegionError
        return found

    def _place(self) -> Place:
        example = self._example
        session = self._opened()
        client = session.create_client(
            example.service,
            region_name=self._region or _region(session),
            endpoint_url=self._endpoint,
            config=Config(s3={"us_east_1_regional_endpoint": "regional"}),
        )
        client.meta.events.register("before-sign", _look)
        try:
            getattr(client, example.operation)(**example.arguments)
        except _Seen as seen:
            request, version = seen.args
        finally:
            client.close()
        if version not in ("v4", "s3v4"):
            raise ConfigError("", f"requests signed with {version} are not supported")
        signing = request.context.get("signing") or {}
        model = client.meta.service_model
        return Place(
            url=request.url,
            region=client.meta.region_name,
            signing_name=signing.get("signing_name") or model.signing_name,
            signing_region=signing.get("region") or client.meta.region_name,
            target_prefix=model.metadata.get("targetPrefix", ""),
            json_version=model.metadata.get("jsonVersion", ""),
            ca_bundle=session.get_config_variable("ca_bundle") or "",
        )


@cache
def _loader(path: str | None) -> Any:
    """Return what reads the descriptions of services; they are large, so they are read once."""
    return create_loader(path)


def _region(session: Any) -> str | None:
    # botocore knows the older name only; what runs on AWS, and the other SDKs, set this one
    found: str | None = session.get_config_variable("region")
    return found or os.environ.get("AWS_REGION")


class _Seen(Exception):
    """Carries out of botocore the request it was about to sign."""


def _look(request: Any, signature_version: str, **_: Any) -> None:
    raise _Seen(request, signature_version)


async def _in_thread(work: Callable[[], _T]) -> _T:
    try:
        return await asyncio.to_thread(work)
    except _FOR_A_HUMAN as error:
        raise ConfigError("", _advice(error)) from None
    except (BotoCoreError, ClientError) as error:
        # Its text may quote what a metadata service or a credential process said.
        raise NotSent(f"no AWS credentials now ({type(error).__name__})") from None


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
