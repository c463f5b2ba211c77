"""
The configuration: a TOML file, overridden by the environment, overridden by flags.

`load` reads all three into one frozen `Config`, or raises all errors together, each with its
file and field, the value found and the values allowed. Each setting is declared once: here, in
`Settings`, in the rules, and in the options of a backend.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_origin

from msgspec import Struct, field
from msgspec.structs import replace

from oncebridge.base.clock import Clock, system_clock
from oncebridge.base.options import (
    Doc,
    Problems,
    Rate,
    Setting,
    Size,
    Text,
    did_you_mean,
    origin,
    read_values,
    settings_of,
)
from oncebridge.base.secrets import Secret, cache_aws_lookups, is_at_aws, resolve_at_aws
from oncebridge.engine.settings import DEFAULT_ROUTE, Settings
from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.events.access import AllowOptions, SenderAllowlist
from oncebridge.events.exact_float import read_decimal
from oncebridge.events.pattern import Pattern
from oncebridge.events.rule_options import RuleOptions
from oncebridge.events.rules import Rule, RuleSet
from oncebridge.service.addresses import (
    BackendAddress,
    DeadPlace,
    SinkPlace,
    SourcePlace,
    StorePlace,
    as_table,
    extension,
)
from oncebridge.service.dashboard_checks import dashboard_errors, exposure_error
from oncebridge.service.genesys_options import GenesysOptions

PREFIX = "ONCEBRIDGE_"
_FILE = "ONCEBRIDGE_CONFIG"
DEFAULT_FILE = "oncebridge.toml"
_DEEPEST = 100
MASKED = (
    *("ani", "dnis", "addressFrom", "addressTo", "addressOther", "addressSelf", "address"),
    *("phone", "phoneNumber", "mobile", "email", "emailAddress", "name", "firstName", "lastName"),
    *("displayName", "remoteParticipant", "participantName", "callbackUserName", "callerIdName"),
    *("callbackNumbers", "attributes", "transcripts", "transcript", "decoratedTranscript", "word"),
    *("text", "body", "subject", "message", "notes", "wrapupNotes", "comment", "comments"),
    *("password", "secret", "token", "authorization", "cookie", "apiKey", "x-api-key", "ssn"),
    *("dateOfBirth", "iban", "cardNumber"),
)
"""Names of members that may be personal data or secret."""
_LISTED = ("rules", "routes")
# Kubernetes sets these variables for a Service named oncebridge in the same namespace.
_KUBERNETES = re.compile(rf"{PREFIX}(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


class RouteOptions(Struct, frozen=True, kw_only=True):
    """One of several routes, with claims of its own."""

    name: Annotated[
        str, Doc("Its name, which separates its claims from those of other routes.", example="crm")
    ]
    sink: Annotated[
        SinkPlace, Doc("Where its events go.", example="https://crm.example.com/hooks/genesys")
    ]
    match: Annotated[
        dict[str, Any] | None,
        Doc(
            "Which events it takes, as an EventBridge event pattern; all by default.",
            example='{ detail-type = [{ prefix = "v2.detail" }] }',
        ),
    ] = None
    rules: Annotated[list[RuleOptions], Doc("Its own rules, tried before those of the file.")] = []
    mode: Annotated[
        Literal["enforce", "shadow"] | None,
        Doc("The mode of this route; by default that of the file."),
    ] = None
    order: Annotated[
        Literal["none", "entity"] | None,
        Doc("The order of this route; by default that of the file."),
    ] = None
    rate: Annotated[
        Rate | None, Doc("The rate of this route; by default that of the file.", example="100/s")
    ] = None
    sink_timeout: Annotated[
        timedelta | None,
        Doc("The timeout of this route; by default that of the file.", example="10s"),
    ] = None
    max_attempts: Annotated[
        int | None, Doc("The attempts on this route; by default those of the file.", example="8")
    ] = None


class Config(Settings, frozen=True, kw_only=True):
    """All settings."""

    source: Annotated[
        list[SourcePlace],
        Doc(
            "Where events come from; one address, or a list of several.",
            example="http://127.0.0.1:8080/events",
            or_one=True,
        ),
    ] = "http://127.0.0.1:8080/events"  # type: ignore[assignment] # read like any other value
    store: Annotated[
        StorePlace,
        Doc("Where delivered events are remembered.", example="sqlite:oncebridge.db"),
    ] = "sqlite:oncebridge.db"  # type: ignore[assignment]
    sink: Annotated[
        SinkPlace | None,
        Doc(
            "Where events go; without it, and without routes, to standard output.",
            example="https://crm.example.com/hooks/genesys",
        ),
    ] = None
    dead: Annotated[
        DeadPlace,
        Doc("Where events go that cannot be delivered.", example="sqlite:oncebridge-dead.db"),
    ] = "sqlite:oncebridge-dead.db"  # type: ignore[assignment]
    route: Annotated[
        str,
        Doc(
            "The name of the route, if there is only one. It is part of every key: under a new name, "
            "events delivered before are not recognised. Services with different sinks that share "
            "a store need different names.",
            example="crm",
        ),
    ] = DEFAULT_ROUTE
    preset: Annotated[
        Literal["none", "genesys"],
        Doc('"genesys" adds rules for Genesys Cloud events, after your own.'),
    ] = "none"
    genesys: Annotated[
        GenesysOptions, Doc("Settings of the preset and the verification for Genesys Cloud.")
    ] = GenesysOptions()
    verify: Annotated[
        Literal["none", "genesys"],
        Doc('"genesys" delivers only events whose conversation exists, by the API of Genesys.'),
    ] = "none"
    allow: Annotated[AllowOptions, Doc("Which senders are allowed.")] = AllowOptions()
    rules: Annotated[
        list[RuleOptions],
        Doc("What makes two events the same; the first rule that matches decides."),
    ] = field(default_factory=list)
    routes: Annotated[
        list[RouteOptions], Doc("Several routes; an event takes each route that it matches.")
    ] = field(default_factory=list)
    unrouted: Annotated[
        Literal["dead", "discard"],
        Doc(
            "What to do with an event that no route matches: keep it in the dead letters, or drop it. "
            "A rule of the file with `discard` drops it in any case."
        ),
    ] = "dead"
    spool: Annotated[
        str | None,
        Doc(
            "A file in which HTTP requests are kept until they are delivered; the sender gets 202 as "
            "soon as they are on disk.",
            example="spool.db",
        ),
    ] = None
    spool_max: Annotated[
        Size | None,
        Doc(
            "The size of the spool on disk; while it is full, the sender gets 503. By default, half "
            "of its disk.",
            example="1GiB",
        ),
    ] = None
    batch: Annotated[int, Doc("The most events in one batch.", at_least=1, at_most=10_000)] = 500
    grace: Annotated[
        timedelta,
        Doc("How long a shutdown may take to finish the work in progress.", example="25s"),
    ] = timedelta(seconds=25)
    health: Annotated[
        str | None,
        Doc(
            "The address that serves `/healthz` (the process runs) and `/readyz` (events can be "
            "delivered), without authentication. An HTTP source serves both, too.",
            example="http://0.0.0.0:8081",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        Doc(
            "The address that serves `/metrics` for Prometheus, without authentication. It may be the "
            "address of `health`. The dashboard serves it too, to users who are logged in.",
            example="http://0.0.0.0:9464",
        ),
    ] = None
    dashboard: Annotated[
        str | None,
        Doc(
            "The address of the dashboard; on an address other machines can reach, it needs "
            "`dashboard_token` or `dashboard_user_header`.",
            example="127.0.0.1:8081",
        ),
    ] = None
    dashboard_write: Annotated[
        bool, Doc("Allow users of the dashboard to replay and drop dead letters.")
    ] = False
    dashboard_payloads: Annotated[
        bool,
        Doc(
            "Keep payloads in the history and show them on the dashboard, with the members in `mask` "
            "hidden. Otherwise only their structure is shown."
        ),
    ] = False
    dashboard_token: Annotated[
        Secret | None, Doc("The token to log in with.", example="env:DASHBOARD_TOKEN")
    ] = None
    dashboard_user_header: Annotated[
        str | None,
        Doc(
            "The header in which a proxy that authenticates users sends the user name; trusted only "
            "from `dashboard_proxies`.",
            example="X-Forwarded-User",
        ),
    ] = None
    dashboard_proxies: Annotated[
        tuple[str, ...],
        Doc(
            "Addresses or networks of the proxies whose `X-Forwarded-…` headers and "
            "`dashboard_user_header` are trusted. None by default, not even this machine.",
            example='["10.0.0.0/8"]',
        ),
    ] = ()
    dashboard_hosts: Annotated[
        tuple[str, ...],
        Doc(
            "Further host names of the dashboard, as browsers send them.",
            example='["oncebridge.example.com"]',
        ),
    ] = ()
    mask: Annotated[
        tuple[str, ...],
        Doc(
            "Members of an event whose values are neither shown nor kept in the history, by name or "
            "by path.",
            example='["ani", "detail.eventBody.participants"]',
        ),
    ] = MASKED
    history: Annotated[
        Literal["auto", "off", "sample", "all"],
        Doc(
            "Which arrivals are kept in the store for the dashboard. `sample` keeps all of them at "
            "low traffic, and all copies of some events at high traffic. `auto` is `sample` if there "
            "is a dashboard, else `off`."
        ),
    ] = "auto"
    history_keep: Annotated[timedelta, Doc("How long the history is kept.", example="1d")] = (
        timedelta(days=1)
    )
    share_counts: Annotated[
        bool,
        Doc(
            "Write the counts of this worker to the store, so that the dashboard can add up all "
            "workers, also after a restart: every second with work, and on DynamoDB and S3 every ten "
            "seconds."
        ),
    ] = True
    audit: Annotated[
        str | None,
        Doc(
            "A file for the audit log of operator actions (forget, release, resend, replay, drop, "
            "pause, resume), one line each; the store keeps them, too.",
            example="oncebridge-audit.ndjson",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Doc(
            '"info" logs a line for each second with work, "debug" one for each event; payloads are '
            "never logged."
        ),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Doc('"auto" is text on a terminal and JSON elsewhere.'),
    ] = "auto"

    def settings(self, route: RouteOptions | None = None) -> Settings:
        """Return the settings of a gateway, with those of *route* in place of the file's."""
        names = Settings.__struct_fields__
        own = {name: getattr(self, name) for name in names}
        for name in names:
            if route is not None and getattr(route, name, None) is not None:
                own[name] = getattr(route, name)
        return Settings(**own)


class EventVerifier(Protocol):
    """Decides whether an event may be sent; `[genesys]` configures the one that there is."""

    def __init__(self, options: GenesysOptions) -> None: ...

    @staticmethod
    def check(options: GenesysOptions, settings: Settings) -> None:
        """Raise `ConfigError` if *options* do not fit a route's *settings*."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """How many deliveries were verified, by result."""
        ...

    def around(self, sink: Any, settings: Settings, clock: Clock) -> Any:
        """Return *sink*, with a verification before each delivery."""
        ...


class Route(Struct, frozen=True):
    """One route, ready to make a gateway of."""

    name: str
    sink: SinkPlace
    match: Pattern | None
    rules: tuple[Rule, ...]
    settings: Settings


class Setup(Struct, frozen=True):
    """A valid configuration, with its routes and rules."""

    config: Config
    routes: tuple[Route, ...]
    file: str
    verifier: EventVerifier | None = None
    """Verifies events before delivery, if configured."""
    rules: tuple[Rule, ...] = ()
    """The rules of the file: they apply on every route, and to events that no route matches."""

    def file_rules(self) -> RuleSet:
        """Return the rules of the file, compiled: they decide which unrouted events to discard."""
        return RuleSet(self.rules, namespace="")

    def sink_of(self, route: Route, other: Any = None, *, clock: Clock = system_clock) -> Any:
        """Return the sink of *route*, or an *other*, with verification if configured."""
        sink = route.sink.opened if other is None else other
        if self.verifier is None:
            return sink
        return self.verifier.around(sink, route.settings, clock)


def load(
    file: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    with_source: bool = True,
) -> Setup:
    """
    Read the configuration, or raise `ConfigErrors` with all errors.

    *file* is a TOML file, or a reference to a text at AWS (`ssm:NAME`, `secretsmanager:NAME`);
    by default the one that `ONCEBRIDGE_CONFIG` names, if any. *flags* are settings by their
    dotted names. Without *with_source*, the setting source is ignored: the caller brings the
    events.
    """
    environment = os.environ if environment is None else environment
    with cache_aws_lookups():
        named = str(file or environment.get(_FILE, ""))
        return _load(named, environment, flags or {}, with_source=with_source)


def _load(
    named: str, environment: Mapping[str, str], flags: Mapping[str, str], *, with_source: bool
) -> Setup:
    problems = Problems(named)
    table = _file(named, problems) if named else {}
    for setting in settings_of(Config):
        if _is_place(setting) and setting.default:
            table.setdefault(setting.name, setting.default)
    _apply_overrides(table, _from_environment(environment), problems)
    _apply_overrides(table, _from_flags(flags), problems)
    if not with_source:
        table["source"] = []
    values, flawed = read_values(Config, table, "", problems)
    # Invalid settings are left at their default, so that the rest can still be checked.
    sound = {n: value for n, value in values.items() if n in _LISTED or n not in flawed}
    routes, rules = _routes(Config(**sound), table, flawed, problems)
    verifier = None if "genesys" in flawed else _verifier(Config(**sound), routes, table, problems)
    _check_dashboard(Config(**sound), table, flawed, problems)
    problems.check()
    return Setup(Config(**values), routes, named, verifier, rules)


_TOO_LONG = "has a whole number of more than 64 bits, or an exponent of more than 18 digits"


def _file(named: str, problems: Problems) -> dict[str, Any]:
    text = ""
    with problems.caught():
        text = resolve_at_aws(named, "") if is_at_aws(named) else _text_of(Path(named))
    problems.check()
    table: dict[str, Any] = {}
    try:
        table = tomllib.loads(text, parse_float=read_decimal)  # a pattern needs exact numbers
        _check_bounds(table)
    except tomllib.TOMLDecodeError as error:
        problems.add("", f"is not TOML: {error}")
    except RecursionError:
        problems.add("", f"is nested more than {_DEEPEST} deep")
    except ValueError:  # Python reads no number of more than 4,300 digits
        problems.add("", _TOO_LONG)
    problems.check()
    return table


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        message = "no such file; `oncebridge init` writes a starter configuration"
        raise ConfigError("", message) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        raise ConfigError("", f"cannot be read: {type(error).__name__}") from None


def _check_bounds(table: dict[str, Any]) -> None:
    """Raise for numbers and nesting that TOML allows and the rest of the code does not."""
    level: list[Any] = [table]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict | list):
                inner += item.values() if isinstance(item, dict) else item
            elif isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise ValueError(item)
        level = inner
    if level:
        raise RecursionError


_Given = Iterator[tuple[list[str], Text]]


def _from_environment(environment: Mapping[str, str]) -> _Given:
    """Yield overrides: `ONCEBRIDGE_SINK__CONCURRENCY` is `sink.concurrency`."""
    for name, text in environment.items():
        if name.startswith(PREFIX) and name != _FILE and not _KUBERNETES.fullmatch(name):
            yield name.removeprefix(PREFIX).lower().split("__"), Text.of(text, name)


def _from_flags(flags: Mapping[str, str]) -> _Given:
    for name, text in flags.items():
        flag = f"--set {name}" if "." in name else f"--{name.replace('_', '-')}"
        yield name.split("."), Text.of(text, flag)


def _apply_overrides(table: dict[str, Any], given: _Given, problems: Problems) -> None:
    """Apply overrides to the table: addresses first, then their options."""
    for path, value in sorted(given, key=lambda one: len(one[0])):
        with problems.caught():
            _apply_override(table, path, value)


def _apply_override(table: dict[str, Any], path: list[str], value: Text) -> None:
    """Apply one override to the table; below an address, to its options."""
    *above, last = path
    top = {setting.name: setting for setting in settings_of(Config)}
    if path[0] not in top:
        is_variable = value.origin.startswith(PREFIX)
        names = [f"{PREFIX}{name.upper()}" if is_variable else name for name in top]
        name = value.origin if is_variable else path[0]
        raise ConfigError(value.origin, f"no such setting; {did_you_mean(name, names)}")
    if above and not _is_table(top[path[0]]):
        raise ConfigError(value.origin, f"{path[0]!r} has no options")
    at = table
    for name in above:
        inner = as_table(at.get(name, {}))
        if isinstance(inner, list):
            raise ConfigError(value.origin, f"{name!r} is a list in the file; set it there")
        at[name] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        at = inner
    if isinstance(at.get(last), Mapping) and "url" in at[last]:
        at[last] = {**at[last], "url": value}  # a new address keeps the options
    else:
        at[last] = value


def _is_table(setting: Setting) -> bool:
    kind = setting.kind
    return _is_place(setting) or (isinstance(kind, type) and issubclass(kind, Struct))


def _is_place(setting: Setting) -> bool:
    kinds = getattr(setting.kind, "__args__", (setting.kind,))
    return any(
        isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BackendAddress)
        for kind in kinds
    )


# --- checks across settings ----------------------------------------------------------------


def _routes(
    config: Config, table: Mapping[str, Any], flawed: set[str], problems: Problems
) -> tuple[tuple[Route, ...], tuple[Rule, ...]]:
    """
    Make the routes and the rules that all of them share; check settings against each other.

    Some settings may be *flawed*: an invalid rule or route is None here, and checks that would
    need it are skipped.
    """
    preset = _preset(config, problems)
    _check_names(table, preset, problems)
    guards = _guards(config, problems)
    common = _rules(config.rules, "rules", table.get("rules"), config, problems)
    common += [("", rule) for rule in preset]
    routes = []
    for at, route in enumerate(_route_options(config, table, flawed, problems)):
        place = f"routes[{at}]." if config.routes else ""
        written = table["routes"][at] if config.routes else {}
        if route is None:
            _check_match(written, place, problems)
            continue
        own = _rules(route.rules, f"{place}rules", written.get("rules"), config, problems)
        placed = [*own, *common]
        rules = (*guards, *(rule for _, rule in filter(None, placed)))
        match = None
        if route.match is not None:
            with problems.caught():
                match = Pattern.compile(route.match, f"{place}match")
        settings = config.settings(route)
        routes.append(Route(route.name, route.sink, match, rules, settings))
        if not flawed & _CHECKED:
            with problems.caught():
                _check_settings(settings, route, place, table)
        if settings.order == "entity":
            where = f"{place}order" if route.order else origin(table.get("order"), "order")
            is_known = None not in placed and not flawed & {"rules", "preset"}
            _check_order(where, placed, is_known=is_known, problems=problems)
    return tuple(routes), (*guards, *(rule for _, rule in filter(None, common)))


def _preset(config: Config, problems: Problems) -> list[Rule]:
    rules: list[Rule] = []
    if config.preset != "none":
        with problems.caught():
            make = extension("oncebridge.presets", config.preset, "preset")
            rules = make(config.genesys, window=config.window)
    return rules


def _guards(config: Config, problems: Problems) -> list[Rule]:
    """Return the rule that refuses senders that are not allowed, if any are refused."""
    if not config.allow.is_open:
        with problems.caught():
            return [Rule.for_refused_senders(SenderAllowlist(config.allow))]
    return []


def _route_options(
    config: Config, table: Mapping[str, Any], flawed: set[str], problems: Problems
) -> Sequence[RouteOptions | None]:
    """Return the routes of the file, or the only one, made of its sink."""
    if config.routes or "routes" in flawed:
        for name in ("sink", "route"):
            if name in table:
                place = origin(_address(table[name]), name)
                problems.add(place, "cannot be used with routes, which have a sink each; remove it")
        return config.routes
    if flawed & {"sink", "route"}:
        return ()
    sink = config.sink or SinkPlace.of("-")
    return [RouteOptions(name=config.route, sink=sink)]


def _verifier(
    config: Config, routes: Sequence[Route], table: Mapping[str, Any], problems: Problems
) -> EventVerifier | None:
    """Return the verifier, if one is configured."""
    if config.verify == "none":
        return None
    verifier: type[EventVerifier] | None = None
    with problems.caught():
        verifier = extension("oncebridge.verifiers", config.verify, "verify")
    if verifier is None:
        return None
    given = table.get("genesys", {})
    try:
        for route in routes:
            verifier.check(config.genesys, route.settings)
        return verifier(config.genesys)
    except ConfigErrors as errors:
        found: Sequence[ConfigError] = errors.problems
    except ConfigError as error:
        found = [error]
    for each in found:
        problems.add(origin(given.get(each.where), f"genesys.{each.where}"), each.message)
    return None


_CHECKED = {"lease", "sink_timeout", "commit_budget", "margin", "max_attempts", "breaker"}
_Placed = tuple[str, Rule]
"""A rule and its place in the file; empty if it is of a preset."""


def _rules(
    options: Sequence[RuleOptions | None],
    where: str,
    written: Any,
    config: Config,
    problems: Problems,
) -> list[_Placed | None]:
    rules: list[_Placed | None] = []
    for at, rule in enumerate(options):
        place = f"{where}[{at}]"
        rules.append(None)
        if rule is None:
            _check_match(written[at], f"{place}.", problems)
            continue
        with problems.caught():
            made = Rule(**rule.build(place, config.window, Problems()))
            _check_entity(made, place, problems)
            rules[at] = place, made
    return rules


def _check_match(written: Any, place: str, problems: Problems) -> None:
    """Check the pattern of a rule or route that is invalid elsewhere."""
    if isinstance(written, Mapping) and isinstance(written.get("match"), Mapping):
        with problems.caught():
            Pattern.compile(written["match"], f"{place}match")


def _check_names(table: Mapping[str, Any], preset: Sequence[Rule], problems: Problems) -> None:
    """Report names that are used twice, also of invalid rules and routes."""
    written = table.get("routes")
    routes = written if isinstance(written, list) else []
    _check_unique("routes", _names(routes, "routes"), problems)
    common = _names(table.get("rules"), "rules") + [("", rule.name) for rule in preset]
    for at, route in enumerate(routes or [{}]):
        own = route.get("rules") if isinstance(route, Mapping) else None
        _check_unique("rules", _names(own, f"routes[{at}].rules") + common, problems)


def _names(written: Any, where: str) -> list[tuple[str, str]]:
    return [
        (f"{where}[{at}].name", item["name"])
        for at, item in enumerate(written if isinstance(written, list) else [])
        if isinstance(item, Mapping) and isinstance(item.get("name"), str)
    ]


def _check_unique(what: str, named: list[tuple[str, str]], problems: Problems) -> None:
    seen: dict[str, str] = {}
    for place, name in named:
        if name in seen:
            whose = "" if place else ", one of them in the preset"
            problems.add(place or seen[name], f"two {what} are named {name!r}{whose}")
        seen.setdefault(name, place)


def _check_settings(
    settings: Settings, route: RouteOptions, place: str, table: Mapping[str, Any]
) -> None:
    try:
        settings.check()
    except ConfigError as error:
        name = error.where
        is_own = getattr(route, name, None) is not None
        where = f"{place}{name}" if is_own else origin(table.get(name), name)
        raise ConfigError(where, error.message) from None


def _check_order(
    where: str, rules: Sequence[_Placed | None], *, is_known: bool, problems: Problems
) -> None:
    """Report rules that do not fit order = "entity"."""
    for place, rule in filter(None, rules):
        _check_entity(rule, place, problems, ordered=True)
    if is_known and not any(rule.entity for _, rule in filter(None, rules)):
        problems.add(
            where,
            '"entity" needs a rule with an entity, such as entity = "detail.conversationId"',
        )


def _check_entity(rule: Rule, place: str, problems: Problems, *, ordered: bool = False) -> None:
    try:
        RuleSet([rule], namespace="", ordered=ordered)
    except ConfigError as error:
        problems.add(place or error.where, error.message)


def _check_dashboard(
    config: Config, table: Mapping[str, Any], flawed: set[str], problems: Problems
) -> None:
    found = [*dashboard_errors(config)]
    open_to_all = exposure_error(config)
    # The authentication may be set, and only be invalid.
    if open_to_all is not None and not flawed & {"dashboard_token", "dashboard_user_header"}:
        found.append(open_to_all)
    for error in found:
        name, bracket, rest = error.where.partition("[")
        problems.add(f"{origin(table.get(name), name)}{bracket}{rest}", error.message)


def _address(given: Any) -> Any:
    table = as_table(given)
    return table.get("url") if isinstance(table, Mapping) else None


def with_sink(setup: Setup, sink: SinkPlace) -> Setup:
    """Return the same setup with another sink on every route, under the same names."""
    return replace(setup, routes=tuple(replace(route, sink=sink) for route in setup.routes))
