"""What all checks of one visit to AWS share: the places, the answers, and where findings go."""

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
from oncebridge.service.addresses import Place, scheme_of
from oncebridge.service.config import PREFIX, Setup

_T = TypeVar("_T")

PAGE: Final = "docs/check-aws.md"


class AwsAddress(Struct, frozen=True):
    """One address of the configuration that is on AWS."""

    kind: str
    """What it is for: source, store, sink or dead."""
    scheme: str
    resource: Resource
    grants: tuple[Grant, ...]
    """What is done to it."""
    where: AwsLocation
    options: Any

    @property
    def name(self) -> str:
        """Its name, without what stands before it in an ARN."""
        if self.scheme in ("dynamodb", "events", "kinesis"):
            return self.resource.name.partition("/")[2]
        return self.resource.name


def aws_addresses(setup: Setup) -> list[AwsAddress]:
    """List what of the configuration is on AWS, each address once for each use."""
    config = setup.config
    places: list[tuple[str, Place]] = [("source", place) for place in config.source]
    places.append(("store", config.store))
    places += [("sink", route.sink) for route in setup.routes]
    places.append(("dead", config.dead))
    found: list[AwsAddress] = []
    for kind, place in places:
        address = _aws_address(kind, place) if scheme_of(place.url) in ON_AWS else None
        if address is not None and address not in found:
            found.append(address)
    return found


def _aws_address(kind: str, place: Place) -> AwsAddress | None:
    options = place.options
    table = {"url": str(place.url)}
    for name in ("region", "fan_out"):
        if getattr(options, name, None):
            table[name] = getattr(options, name)
    grants = needed({kind: table})
    if not grants:
        return None  # of another's making
    resource = grants[0].resource
    where = AwsLocation(
        resource.region or getattr(options, "region", None),
        getattr(options, "profile", None),
        getattr(options, "endpoint", None),
        scheme_of(place.url),
    )
    return AwsAddress(kind, scheme_of(place.url), resource, tuple(grants), where, options)


def secrets(setup: Setup) -> list[Grant]:
    """List what is done to fetch what the configuration has at AWS: secrets, or itself."""
    written: list[Any] = [text for name, text in os.environ.items() if name.startswith(PREFIX)]
    if is_at_aws(setup.file):
        written.append(setup.file)
    elif setup.file:
        written.append(tomllib.loads(Path(setup.file).read_text("utf-8-sig")))
    grants = needed({"written": written})
    return [grant for at, grant in enumerate(grants) if grant not in grants[:at]]


class AwsContext:
    """One look at an account, for one configuration."""

    def __init__(self, setup: Setup, checkup: Checkup, reader: AwsReader) -> None:
        self.setup = setup
        self.aws_addresses = aws_addresses(setup)
        self._reader = reader
        self._checkup = checkup
        self._told: set[tuple[str, ...]] = set()

    def at(self, service: str, where: AwsLocation) -> AwsService:
        """Return a service, to be asked."""
        return self._reader.at(service, where)

    async def look(self, subject: str, what: str, asked: Awaitable[_T]) -> _T | None:
        """Return the answer; where there is none, say so and give None. `NoSuchResource` goes through."""
        try:
            return await asked
        except NotReadable as unseen:
            self.report_not_checked(subject, what, unseen.needs)
            return None

    async def look_if_exists(self, subject: str, what: str, asked: Awaitable[_T]) -> _T | None:
        """Return the answer; None also where there is no such thing, which is then not told."""
        try:
            return await self.look(subject, what, asked)
        except NoSuchResource:
            return None

    async def run_all(self, works: Sequence[Callable[["AwsContext"], Awaitable[_T]]]) -> list[_T]:
        """
        Do several things at once, each as on a visit of its own.

        What they find is told in their order, and also if there is no time for all of it.
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
        """Add what another visit has found, as far as it is new."""
        for one in other.findings:
            self.report(
                one.code, one.severity, one.subject, seen=one.seen, why=one.why, fix=one.fix
            )
        for missed in other.not_checked:
            self.report_not_checked(missed.subject, missed.what, missed.needs)
        for passed in other.passed:
            self.report_passed(passed.subject, passed.what)

    # --- what came of it -----------------------------------------------------------------

    def report(
        self, code: str, severity: Severity, subject: str, *, seen: str, why: str, fix: str
    ) -> None:
        """Add a finding, which is explained under its code; the same one once."""
        if self._is_new(code, subject, seen):
            self._checkup.report(
                code, severity, subject, seen=seen, why=why, fix=fix, docs=f"{PAGE}#{code}"
            )

    def report_not_checked(self, subject: str, what: str, needs: str) -> None:
        """Add what could not be looked at, once."""
        if self._is_new("", subject, what, needs):
            self._checkup.report_not_checked(subject, what, needs)

    def report_passed(self, subject: str, what: str) -> None:
        """Add what is in order, once."""
        if self._is_new("fine", subject, what):
            self._checkup.report_passed(subject, what)

    def _is_new(self, *told: str) -> bool:
        if told in self._told:
            return False
        self._told.add(told)
        return True
