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
from oncebridge.check.aws.account import Absent, Reader, Service, Unseen, Where
from oncebridge.check.finding import Checkup, Severity
from oncebridge.service.addresses import BackendAddress, scheme_of
from oncebridge.service.config import PREFIX, Setup

_T = TypeVar("_T")

PAGE: Final = "docs/check-aws.md"


class Spot(Struct, frozen=True):
    """One address of the configuration that is on AWS."""

    kind: str
    """What it is for: source, store, sink or dead."""
    scheme: str
    resource: Resource
    grants: tuple[Grant, ...]
    """What is done to it."""
    where: Where
    options: Any

    @property
    def name(self) -> str:
        """Its name, without what stands before it in an ARN."""
        if self.scheme in ("dynamodb", "events", "kinesis"):
            return self.resource.name.partition("/")[2]
        return self.resource.name


def spots(setup: Setup) -> list[Spot]:
    """List what of the configuration is on AWS, each address once for each use."""
    config = setup.config
    places: list[tuple[str, BackendAddress]] = [("source", place) for place in config.source]
    places.append(("store", config.store))
    places += [("sink", route.sink) for route in setup.routes]
    places.append(("dead", config.dead))
    found: list[Spot] = []
    for kind, place in places:
        spot = _spot(kind, place) if scheme_of(place.url) in ON_AWS else None
        if spot is not None and spot not in found:
            found.append(spot)
    return found


def _spot(kind: str, place: BackendAddress) -> Spot | None:
    options = place.options
    table = {"url": str(place.url)}
    for name in ("region", "fan_out"):
        if getattr(options, name, None):
            table[name] = getattr(options, name)
    grants = needed({kind: table})
    if not grants:
        return None  # of another's making
    resource = grants[0].resource
    where = Where(
        resource.region or getattr(options, "region", None),
        getattr(options, "profile", None),
        getattr(options, "endpoint", None),
        scheme_of(place.url),
    )
    return Spot(kind, scheme_of(place.url), resource, tuple(grants), where, options)


def secrets(setup: Setup) -> list[Grant]:
    """List what is done to fetch what the configuration has at AWS: secrets, or itself."""
    written: list[Any] = [text for name, text in os.environ.items() if name.startswith(PREFIX)]
    if is_at_aws(setup.file):
        written.append(setup.file)
    elif setup.file:
        written.append(tomllib.loads(Path(setup.file).read_text("utf-8-sig")))
    grants = needed({"written": written})
    return [grant for at, grant in enumerate(grants) if grant not in grants[:at]]


class Visit:
    """One look at an account, for one configuration."""

    def __init__(self, setup: Setup, checkup: Checkup, reader: Reader) -> None:
        self.setup = setup
        self.spots = spots(setup)
        self._reader = reader
        self._checkup = checkup
        self._told: set[tuple[str, ...]] = set()

    def at(self, service: str, where: Where) -> Service:
        """Return a service, to be asked."""
        return self._reader.at(service, where)

    async def look(self, subject: str, what: str, asked: Awaitable[_T]) -> _T | None:
        """Return the answer; where there is none, say so and give None. `Absent` goes through."""
        try:
            return await asked
        except Unseen as unseen:
            self.could_not(subject, what, unseen.needs)
            return None

    async def find_there(self, subject: str, what: str, asked: Awaitable[_T]) -> _T | None:
        """Return the answer; None also where there is no such thing, which is then not told."""
        try:
            return await self.look(subject, what, asked)
        except Absent:
            return None

    async def beside(self, works: Sequence[Callable[["Visit"], Awaitable[_T]]]) -> list[_T]:
        """
        Do several things at once, each as on a visit of its own.

        What they find is told in their order, and also if there is no time for all of it.
        """
        apart = [Checkup() for _ in works]
        tasks = [
            asyncio.ensure_future(work(Visit(self.setup, checkup, self._reader)))
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
            self.find(one.code, one.severity, one.subject, seen=one.seen, why=one.why, fix=one.fix)
        for blind in other.blind:
            self.could_not(blind.subject, blind.what, blind.needs)
        for passed in other.passed:
            self.fine(passed.subject, passed.what)

    # --- what came of it -----------------------------------------------------------------

    def find(
        self, code: str, severity: Severity, subject: str, *, seen: str, why: str, fix: str
    ) -> None:
        """Add a finding, which is explained under its code; the same one once."""
        if self._is_new(code, subject, seen):
            self._checkup.find(
                code, severity, subject, seen=seen, why=why, fix=fix, docs=f"{PAGE}#{code}"
            )

    def could_not(self, subject: str, what: str, needs: str) -> None:
        """Add what could not be looked at, once."""
        if self._is_new("", subject, what, needs):
            self._checkup.could_not(subject, what, needs)

    def fine(self, subject: str, what: str) -> None:
        """Add what is in order, once."""
        if self._is_new("fine", subject, what):
            self._checkup.fine(subject, what)

    def _is_new(self, *told: str) -> bool:
        if told in self._told:
            return False
        self._told.add(told)
        return True
