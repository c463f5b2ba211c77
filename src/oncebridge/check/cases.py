"""
Test the user's rules with sample events.

A file of cases is TOML: each `[[test]]` names sample events and the result that the rules of a
configuration must have. Samples are files next to it, in any form that the service reads;
`file.ndjson#2` is the second event of a file, `file.ndjson` all of them.

    same      all of them are one event
    apart     each is a different event
    rule      the rule that matches each
    verdicts  the verdicts on *events*, processed one after the other by a real gateway

Failures name files, rules and paths, and never a value of an event.
"""

import tomllib
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from oncebridge.base.clock import ms, system_clock
from oncebridge.base.options import Doc, Problems, did_you_mean, read
from oncebridge.dead_letters.memory import MemoryDeadLetters
from oncebridge.engine.gateway import Gateway
from oncebridge.engine.router import RouteEntry, Router
from oncebridge.errors import ConfigError
from oncebridge.events.canonical import decode_canonical
from oncebridge.events.differences import differences
from oncebridge.events.event import Event, Unreadable
from oncebridge.events.framing import BadGzip, RecordReader
from oncebridge.events.key import scoped_source
from oncebridge.events.rules import RuleSet
from oncebridge.operate.identity import EventKey, Identities, RouteIdentity
from oncebridge.service.config import Route, Setup
from oncebridge.stores.memory import MemoryStore

Expected = Literal[
    "delivered", "duplicate", "stale", "unchanged", "conflict", "dead", "bypassed", "discarded"
]

_MOST_PATHS = 8


class CaseOptions(Struct, frozen=True, kw_only=True):
    """One test, as written in the file."""

    name: Annotated[str, Doc("Name of the test.", example="a resend is the same event")]
    same: Annotated[
        list[str] | None,
        Doc("Samples that are all one event.", example='["first.json", "resent.json"]'),
    ] = None
    apart: Annotated[
        list[str] | None,
        Doc("Samples that are all different events.", example='["monday.json", "tuesday.json"]'),
    ] = None
    events: Annotated[
        list[str] | None,
        Doc("Samples in the order in which they arrive.", example='["calls.ndjson"]'),
    ] = None
    verdicts: Annotated[
        list[Expected] | None,
        Doc("The verdict on each of the events.", example='["delivered", "duplicate"]'),
    ] = None
    gap: Annotated[
        timedelta | None,
        Doc("Time between one event and the next.", example="7d"),
    ] = None
    rule: Annotated[
        str | None, Doc("The rule that must match every sample of the test.", example="orders")
    ] = None
    route: Annotated[str | None, Doc("The route to test, if there are several.", example="crm")] = (
        None
    )


class CaseFile(Struct, frozen=True, kw_only=True):
    """A file of tests."""

    route: Annotated[str | None, Doc("The route of tests that name none.", example="crm")] = None
    test: Annotated[list[Any], Doc("The tests, a table each.")]


class Sample(Struct, frozen=True):
    """One event of a test."""

    name: str
    """As the test names it, with its number where there are several."""
    event: Event | Unreadable


class Case(Struct, frozen=True, kw_only=True):
    """One test, ready to run."""

    file: str
    name: str
    route: Route
    same: tuple[Sample, ...] = ()
    apart: tuple[Sample, ...] = ()
    events: tuple[Sample, ...] = ()
    verdicts: tuple[Expected, ...] = ()
    gap: timedelta = timedelta(0)
    rule: str | None = None


class CaseResult(Struct, frozen=True):
    """The result of a test; it passed if there are no *failures*."""

    case: Case
    failures: tuple[str, ...]


# --- reading ------------------------------------------------------------------------------


def load(files: Sequence[str | Path], setup: Setup) -> list[Case]:
    """Return the tests of *files*; raise all errors in them together."""
    problems = Problems("" if len(files) > 1 else str(files[0]))
    cases: list[Case] = []
    for file in files:
        own = Problems()
        cases += _cases(Path(file), setup, own)
        prefix = f"{file}: " if len(files) > 1 else ""
        problems.found += [
            ConfigError(f"{prefix}{problem.where}".removesuffix(": "), problem.message)
            for problem in own.found
        ]
    problems.check()
    return cases


def _cases(file: Path, setup: Setup, problems: Problems) -> list[Case]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.add("", f"cannot be read: {type(error).__name__}")
        return []
    except tomllib.TOMLDecodeError as error:
        problems.add("", f"is not TOML: {error}")
        return []
    written = read(CaseFile, table, "", problems)
    if written is None:
        return []
    if not written.test:
        problems.add("test", "contains no test; add a [[test]]")
    reader = _CaseReader(file, setup, written.route, problems)
    cases = []
    for at, table in enumerate(written.test):
        options = read(CaseOptions, table, f"test[{at}]", problems)
        case = reader.case(f"test[{at}]", options) if options is not None else None
        cases += [case] if case is not None else []
    return cases


class _CaseReader:
    """Reads the tests of *file*; errors go to *problems*."""

    def __init__(self, file: Path, setup: Setup, route: str | None, problems: Problems) -> None:
        self._file = file
        self._routes = {route.name: route for route in setup.routes}
        self._route_of_all = route
        self._samples = _Samples(file.parent, Identities(setup))
        self._problems = problems

    def case(self, where: str, options: CaseOptions) -> Case | None:
        before = len(self._problems.found)
        named = {name: getattr(options, name) for name in ("same", "apart", "events")}
        found = {
            name: tuple(self._samples.all(names, f"{where}.{name}", self._problems))
            for name, names in named.items()
            if names is not None
        }
        if len(self._problems.found) == before:
            # Counting makes sense only when all samples are there.
            self._check_counts(where, options, found)
        self._check_combinations(where, options)
        route = self._find_route(where, options.route or self._route_of_all)
        if route is not None and options.rule is not None:
            self._check_rule(where, options.rule, route)
        if route is None or len(self._problems.found) > before:
            return None
        return Case(
            file=str(self._file),
            name=options.name,
            route=route,
            same=found.get("same", ()),
            apart=found.get("apart", ()),
            events=found.get("events", ()),
            verdicts=tuple(options.verdicts or ()),
            gap=options.gap or timedelta(0),
            rule=options.rule,
        )

    def _check_counts(
        self, where: str, options: CaseOptions, found: Mapping[str, Sequence[Sample]]
    ) -> None:
        for name in ("same", "apart"):
            if name in found and len(found[name]) < 2:
                self._problems.add(f"{where}.{name}", "needs at least two events")
        if options.verdicts is not None and "events" in found:
            events, verdicts = len(found["events"]), len(options.verdicts)
            if events != verdicts:
                self._problems.add(
                    f"{where}.verdicts", f"has {verdicts} for {events} events; one for each"
                )

    def _check_combinations(self, where: str, options: CaseOptions) -> None:
        """Report settings that need another one."""
        add = self._problems.add
        if options.same is None and options.apart is None and options.events is None:
            add(where, "names no sample; set same, apart or events")
        if options.events is not None and options.verdicts is None and options.rule is None:
            add(f"{where}.events", "needs verdicts, or a rule")
        if options.verdicts is not None and options.events is None:
            add(f"{where}.verdicts", "needs events")
        if options.gap is not None and options.verdicts is None:
            add(f"{where}.gap", "needs verdicts")

    def _find_route(self, where: str, name: str | None) -> Route | None:
        names = list(self._routes)
        if name is None and len(names) == 1:
            return self._routes[names[0]]
        if name is None:
            self._problems.add(f"{where}.route", f"is missing; set it to one of {', '.join(names)}")
        elif name not in names:
            self._problems.add(
                f"{where}.route", f"{name!r} is not a route; {did_you_mean(name, names)}"
            )
        return self._routes.get(name) if name is not None else None

    def _check_rule(self, where: str, name: str, route: Route) -> None:
        known = [*(rule.name for rule in route.rules), "default"]
        if name not in known:
            self._problems.add(
                f"{where}.rule",
                f"{name!r} is not a rule of the configuration; {did_you_mean(name, known)}",
            )


class _Samples:
    """Reads sample events from files next to the tests, each file once."""

    def __init__(self, folder: Path, identities: Identities) -> None:
        self._folder = folder
        self._identities = identities
        self._read: dict[str, list[Event | Unreadable]] = {}

    def all(self, names: Sequence[str], where: str, problems: Problems) -> Iterator[Sample]:
        for at, name in enumerate(names):
            with problems.caught():
                yield from self._of(name, f"{where}[{at}]")

    def _of(self, name: str, where: str) -> list[Sample]:
        file, hashmark, number = name.rpartition("#")
        if not hashmark or (self._folder / name).exists():
            events = self._events(name, where)
            several = len(events) > 1
            return [
                Sample(f"{name}#{at}" if several else name, event)
                for at, event in enumerate(events, 1)
            ]
        events = self._events(file, where)
        if not number.isascii() or not number.isdecimal() or not 1 <= int(number) <= len(events):
            raise ConfigError(where, f"{name!r}: {file} has events #1 to #{len(events)}")
        return [Sample(name, events[int(number) - 1])]

    def _events(self, name: str, where: str) -> list[Event | Unreadable]:
        if name not in self._read:
            try:
                with (self._folder / name).open("rb") as file:
                    self._read[name] = [
                        self._identities.read(record) for record in RecordReader(file)
                    ]
            except OSError as error:
                raise ConfigError(where, f"{name!r} cannot be read: {error.strerror}") from None
            except BadGzip as error:
                raise ConfigError(where, f"{name!r} cannot be read: {error}") from None
        if not self._read[name]:
            raise ConfigError(where, f"{name!r} contains no event")
        return self._read[name]


# --- running ------------------------------------------------------------------------------


async def run(cases: Sequence[Case], setup: Setup) -> list[CaseResult]:
    """Run tests, each with its own store, and return their results."""
    identities = Identities(setup)
    return [
        CaseResult(case, tuple([line async for line in _run(case, identities)])) for case in cases
    ]


async def _run(case: Case, identities: Identities) -> AsyncIterator[str]:
    samples = {sample.name: sample for sample in (*case.same, *case.apart, *case.events)}
    known: dict[str, _IdentifiedSample] = {}
    elsewhere: set[str] = set()
    for sample in samples.values():
        if isinstance(sample.event, Unreadable):
            if not case.verdicts:
                yield f"{sample.name} is not an event: {sample.event.reason}: {sample.event.message}"
            continue
        identity = _identity(case.route, sample.event, identities)
        if identity is None:
            yield f"route {case.route.name!r} does not match {sample.name}"
            elsewhere.add(sample.name)
            continue
        known[sample.name] = _IdentifiedSample(sample.name, sample.event, identity)
        if case.rule is not None and identity.plan.rule.name != case.rule:
            yield f"{sample.name} matches rule {identity.plan.rule.name!r}, not {case.rule!r}"
    for line in _one_event([known[s.name] for s in case.same if s.name in known]):
        yield line
    for line in _all_apart([known[s.name] for s in case.apart if s.name in known]):
        yield line
    if case.verdicts:
        async for line in _verdicts(case, identities.file_rules, elsewhere):
            yield line


def _identity(route: Route, event: Event, identities: Identities) -> RouteIdentity | None:
    """Return the identity of *event* on *route*, or by a rule that discards unrouted events."""
    ways = identities.of(event)
    if ways:
        return next((way for way in ways if way.route.name == route.name), None)
    plan = identities.file_rules.discard_plan(event)
    return RouteIdentity(route, plan, ()) if plan is not None else None


class _IdentifiedSample(Struct, frozen=True, eq=False):
    """A sample with its identity."""

    name: str
    event: Event
    identity: RouteIdentity

    @property
    def parts(self) -> set[tuple[bytes, bytes]]:
        return {(known.key, known.part.hash) for known in self.identity.keys}

    def missing_key_reason(self) -> str:
        plan = self.identity.plan
        if plan.action == "deduplicate":
            return ""
        why = plan.message or f"rule {plan.rule.name!r} does not deduplicate it ({plan.action})"
        return f"{self.name} has no key: {why}"


def _one_event(samples: Sequence[_IdentifiedSample]) -> Iterator[str]:
    """Yield a failure for each sample that is not the same event as the first."""
    for sample in samples:
        if reason := sample.missing_key_reason():
            yield reason
            return
    left = list(samples[1:])
    met = set(samples[0].parts) if samples else set()
    while joined := [sample for sample in left if sample.parts & met]:
        for sample in joined:
            met |= sample.parts
        left = [sample for sample in left if sample not in joined]
    for sample in left:
        yield f"{samples[0].name} and {sample.name} are different events: {_difference_between(samples[0], sample)}"


def _all_apart(samples: Sequence[_IdentifiedSample]) -> Iterator[str]:
    for one, other in combinations(samples, 2):
        shared = one.parts & other.parts
        if shared:
            kinds = [k.kind for k in one.identity.keys if (k.key, k.part.hash) in shared]
            paths = differences(one.event.envelope, other.event.envelope)
            beside = f"they differ only in {_listed(paths)}" if paths else "they are equal"
            yield (
                f"{one.name} and {other.name} are the same event by their {' and '.join(kinds)}: "
                f"{beside}"
            )


def _difference_between(one: _IdentifiedSample, other: _IdentifiedSample) -> str:
    """Return why two samples are different events."""
    rules = one.identity.plan.rule.name, other.identity.plan.rule.name
    if rules[0] != rules[1]:
        return f"they match different rules, {rules[0]!r} and {rules[1]!r}"
    scope = one.identity.plan.rule.scope
    sources = {scoped_source(named.event.source, scope) for named in (one, other)}
    types = {named.event.detail_type for named in (one, other)}
    names = [
        name for name, found in (("source", sources), ("detail-type", types)) if len(found) > 1
    ]
    if names:
        return f"they differ in {_listed(names)}"
    first = {known.kind: known for known in one.identity.keys}
    second = {known.kind: known for known in other.identity.keys}
    if first.keys() != second.keys():
        return (
            f"one is identified by its {' and '.join(first)}, the other by its {' and '.join(second)}: "
            "a field that the key needs is missing or null"
        )
    return "; ".join(_key_difference(first[kind], second[kind], one, other) for kind in first)


def _key_difference(
    one: EventKey, other: EventKey, first: _IdentifiedSample, second: _IdentifiedSample
) -> str:
    if one.key == other.key:
        paths = differences(_counted(first, one.kind), _counted(second, one.kind), "detail")
        return f"the same {one.kind} with other content is a conflict ({_listed(paths)})"
    if one.kind == "id":
        return "their ids differ"
    mine, others = (_values(known) for known in (one, other))
    paths = (
        differences(mine, others)
        if one.kind != "fields"
        else [name for name in mine if mine[name] != others.get(name)]
    )
    if not paths:
        # Equal parts and different keys: replays may have their own namespace.
        return "one of them is a replay"
    whose = "their content differs" if one.kind == "content" else "they differ"
    return f"{whose} in {_listed(paths)}"


def _counted(named: _IdentifiedSample, kind: str) -> Any:
    """Return the part of the content that is compared next to a key of this *kind*."""
    rule = named.identity.plan.rule
    tiers = [tier for tier in rule.tiers if tier.key.kind.decode() == kind] or list(rule.tiers)
    return decode_canonical(rule.content_of(tiers[0]).body(named.event))


def _values(known: EventKey) -> Mapping[str, Any]:
    if known.kind == "content":
        return {"detail": decode_canonical(known.canonical)}
    return known.values


def _listed(paths: Sequence[str]) -> str:
    more = len(paths) - _MOST_PATHS
    return ", ".join(paths[:_MOST_PATHS]) + (f" and {more} more" if more > 0 else "")


async def _verdicts(case: Case, rules: RuleSet, elsewhere: Container[str]) -> AsyncIterator[str]:
    """
    Process the events with a real gateway, whose sink accepts everything.

    Samples named in *elsewhere* belong to other routes, and are skipped.
    """
    now_ms = began_ms = system_clock()

    def clock() -> int:
        return now_ms

    async def take(_event: Event) -> None:
        pass

    # Only the rules are tested: no rate limit, and no shadow mode.
    settings = replace(case.route.settings, mode="enforce", rate=None)
    dead = MemoryDeadLetters()
    async with Gateway(
        store=MemoryStore(clock=clock),
        sink=take,
        rules=case.route.rules,
        dead=dead,
        route=case.route.name,
        settings=settings,
        clock=clock,
    ) as gateway:
        way = RouteEntry(gateway, case.route.match)
        router = Router([way], dead=dead, rules=rules, settings=settings, clock=clock)
        for at, (sample, expected) in enumerate(zip(case.events, case.verdicts, strict=True), 1):
            now_ms = began_ms + (at - 1) * ms(case.gap)
            if sample.name in elsewhere:
                continue
            (answer,) = await router.process([sample.event])
            if answer.verdict != expected:
                why = f" ({answer.reason})" if answer.reason else ""
                yield (f"event {at}, {sample.name}, is {answer.verdict}{why}; expected {expected}")
