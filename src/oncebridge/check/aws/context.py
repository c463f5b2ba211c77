"""What all checks on AWS share: the addresses, the responses, and where findings go."""

import asyncio
import os
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct

from oncebridge.aws.templates.needs import Grant, Resource, needed
from oncebridge.base.secrets import is_at_aws
from oncebridge.check.aws import ON_AWS
from oncebridge.check.aws.account import (
    AwsLocation,
    AwsReader,
    AwsService,
    NoSuchResource,
    NotReadable,
)
from oncebridge.check.finding import Checkup, Severity
from oncebridge.service.addresses import BackendAddress, scheme_of
from oncebridge.service.config import PREFIX, Setup

_T = TypeVar("_T")

PAGE: Final = "docs/check-aws.md"


class AwsAddress(Struct, frozen=True):
    """One address of the configuration that is on AWS."""

    kind: str
    """Its use: source, store, sink or dead."""
    scheme: str
    resource: Resource
    grants: tuple[Grant, ...]
    """The actions that oncebridge needs on it."""
    where: AwsLocation
    options: Any

    @property
    def name(self) -> str:
        """Its name, without the type before it in an ARN."""
        if self.scheme in ("dynamodb", "events", "kinesis"):
            return self.resource.name.partition("/")[2]
        return self.resource.name


def aws_addresses(setup: Setup) -> list[AwsAddress]:
    """Return the addresses of the configuration on AWS, each once for each use."""
    config = setup.config
    places: list[tuple[str, BackendAddress]] = [("source", place) for place in config.source]
    places.append(("store", config.store))
    places += [("sink", route.sink) for route in setup.routes]
    places.append(("dead", config.dead))
    found: list[AwsAddress] = []
    for kind, place in places:
        address = _aws_address(kind, place) if scheme_of(place.url) in ON_AWS else None
        if address is not None and address not in found:
            found.append(address)
    return found


def _aws_address(kind: str, place: BackendAddress) -> AwsAddress | None:
    options = place.options
    table = {"url": str(place.url)}
    for name in ("region", "fan_out"):
        if getattr(options, name, None):
            table[name] = getattr(options, name)
    grants = needed({kind: table})
    if not grants:
        return None  # a third-party backend
    resource = grants[0].resource
    where = AwsLocation(
        resource.region or getattr(options, "region", None),
        getattr(options, "profile", None),
        getattr(options, "endpoint", None),
        scheme_of(place.url),
    )
    return AwsAddress(kind, scheme_of(place.url), resource, tuple(grants), where, options)


def secrets(setup: Setup) -> list[Grant]:
    """Return the grants needed to read secrets, or the configuration itself, from AWS."""
    written: list[Any] = [text for name, text in os.environ.items() if name.startswith(PREFIX)]
    if is_at_aws(setup.file):
        written.append(setup.file)
    elif setup.file:
        written.append(tomllib.loads(Path(setup.file).read_text("utf-8-sig")))
    grants = needed({"written": written})
    return [grant for at, grant in enumerate(grants) if grant not in grants[:at]]


class AwsContext:
    """Calls AWS and collects results, for one configuration."""

    def __init__(self, setup: Setup, checkup: Checkup, reader: AwsReader) -> None:
        self.setup = setup
        self.aws_addresses = aws_addresses(setup)
        self._reader = reader
        self._checkup = checkup
        self._reported: set[tuple[str, ...]] = set()

    def at(self, service: str, where: AwsLocation) -> AwsService:
        """Return a client of a service."""
        return self._reader.at(service, where)

    async def look(self, subject: str, what: str, asked: Awaitable[_T]) -> _T | None:
        """Return the response; if it cannot be read, report that and return None. Raise `NoSuchResource`."""
        try:
            return await asked
        except NotReadable as unseen:
            self.report_not_checked(subject, what, unseen.needs)
            return None

    async def look_if_exists(self, subject: str, what: str, asked: Awaitable[_T]) -> _T | None:
        """Return the response; None, without a report, also if there is no such resource."""
        try:
            return await self.look(subject, what, asked)
        except NoSuchResource:
            return None

    async def run_all(self, works: Sequence[Callable[["AwsContext"], Awaitable[_T]]]) -> list[_T]:
        """
        Run several checks concurrently, each with a context of its own.

        Their results are added in order, also if time runs out.
        """
        apart = [Checkup() for _ in works]
        tasks = [
            asyncio.ensure_future(work(AwsContext(self.setup, checkup, self._reader)))
            for work, checkup in zip(works, apart, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            for checkup in apart:
                self._take(checkup)

    def _take(self, other: Checkup) -> None:
        """Add the results of another context that are new."""
        for one in other.findings:
            self.report(
                one.code, one.severity, one.subject, seen=one.seen, why=one.why, fix=one.fix
            )
        for missed in other.not_checked:
            self.report_not_checked(missed.subject, missed.what, missed.needs)
        for passed in other.passed:
            self.report_passed(passed.subject, passed.what)

    # --- results -----------------------------------------------------------------

    def report(
        self, code: str, severity: Severity, subject: str, *, seen: str, why: str, fix: str
    ) -> None:
        """Add a finding, once; its code is a heading of the page."""
        if self._is_new(code, subject, seen):
            self._checkup.report(
                code, severity, subject, seen=seen, why=why, fix=fix, docs=f"{PAGE}#{code}"
            )

    def report_not_checked(self, subject: str, what: str, needs: str) -> None:
        """Add something that could not be checked, once."""
        if self._is_new("", subject, what, needs):
            self._checkup.report_not_checked(subject, what, needs)

    def report_passed(self, subject: str, what: str) -> None:
        """Add something that was checked, without a finding, once."""
        if self._is_new("fine", subject, what):
            self._checkup.report_passed(subject, what)

    def _is_new(self, *result: str) -> bool:
        if result in self._reported:
            return False
        self._reported.add(result)
        return True
