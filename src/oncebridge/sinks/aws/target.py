"""The bus, topic or stream of an AWS sink: its address, its client, and the check at the start."""

import logging
import re
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from oncebridge.aws.addresses import name_and_region
from oncebridge.aws.client import AwsClient, AwsError, NotSent, SampleCall, Unclear
from oncebridge.aws.options import AwsOptions
from oncebridge.base.options import Doc
from oncebridge.errors import ConfigError
from oncebridge.sinks.api import Closed, Never
from oncebridge.sinks.aws.answers import answer_to

T = TypeVar("T")

_log = logging.getLogger("oncebridge")

_ARN = re.compile(
    r"arn:aws[a-z-]*:(?P<service>[a-z]+):(?P<region>[a-z0-9-]+):\d{12}:(?P<resource>.+)"
)
_CONNECTIONS: Final = 32


class AwsSinkOptions(AwsOptions, frozen=True, kw_only=True):
    """Options of every AWS sink."""

    concurrency: Annotated[
        int, Doc("How many batches may be sent at the same time.", "8", at_least=1)
    ] = 8


class AwsTarget(Struct, frozen=True):
    """The bus, topic or stream that a sink sends to."""

    name: str
    arn: str
    """Empty if the address has only the name."""
    region: str | None
    """None: taken from the AWS configuration."""

    @property
    def given(self) -> str:
        """The ARN if the address has one, otherwise the name."""
        return self.arn or self.name


class TargetKind(Struct, frozen=True):
    """A kind of target, and the form of its names and ARNs."""

    scheme: str
    word: str
    resource: str
    """The text before the name in an ARN."""
    name: str
    """A pattern that all names match."""

    def from_url(self, url: str, region: str | None) -> AwsTarget:
        """Read `SCHEME://NAME`, `SCHEME://NAME?region=REGION` or `SCHEME:ARN`."""
        rest = url.removeprefix(f"{self.scheme}:")
        if rest.startswith("arn:"):
            return self.from_arn(rest, region)
        found = name_and_region(rest, region) if rest != url else None
        if found is None:
            raise ConfigError("", f"{url!r} is not an address of {self._forms()}")
        name, own = found
        return AwsTarget(self._checked(name), "", own)

    def from_arn(self, arn: str, region: str | None) -> AwsTarget:
        """Read an ARN."""
        found = _ARN.fullmatch(arn)
        if (
            not found
            or found["service"] != self.scheme
            or not found["resource"].startswith(self.resource)
        ):
            raise ConfigError("", f"{arn!r} is not the ARN of {self._forms()}")
        if region not in (None, found["region"]):
            raise ConfigError("region", f"the ARN says {found['region']}")
        name = self._checked(found["resource"].removeprefix(self.resource))
        return AwsTarget(name, arn, found["region"])

    def _checked(self, name: str) -> str:
        if not re.fullmatch(self.name, name):
            raise ConfigError("", f"{name!r} is not the name of {self.word}")
        return name

    def _forms(self) -> str:
        arn = f"{self.scheme}:arn:aws:{self.scheme}:REGION:ACCOUNT:{self.resource}NAME"
        by_name = f"{self.scheme}://NAME or " if self.resource else ""
        return f"{self.word}; it is {by_name}{arn}"


def client_for(
    target: AwsTarget, options: AwsSinkOptions, service: str, operation: str, **arguments: Any
) -> AwsClient:
    """Return a client that sends requests as the SDK does for this operation."""
    return AwsClient(
        SampleCall(service, operation, arguments),
        options,
        region=target.region,
        connections=max(options.concurrency, _CONNECTIONS),
    )


def raise_or_log(error: AwsError | NotSent | Unclear, what: str) -> None:
    """
    Handle an *error* of the check at the start whether *what* exists.

    Raise `ConfigError` if an operator has to change something. Otherwise only log: the right to
    send does not include the right to describe, and an outage ends.
    """
    if isinstance(error, AwsError) and not error.is_denied:
        if error.is_missing:
            raise ConfigError("", f"there is no {what}; create it, or use another name") from None
        if isinstance(answer_to(error), Closed | Never):
            raise ConfigError("", f"{what} cannot be used: {error}") from None
    _log.info("oncebridge.sink_not_checked", extra={"target": what, "reason": str(error)})


def decode_answer(decode: Callable[[bytes], T], body: bytes) -> T:
    """Return the decoded answer; raise `Unclear` if it cannot be read."""
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unclear("the answer cannot be read") from None
