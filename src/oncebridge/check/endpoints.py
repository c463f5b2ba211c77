"""
Check the addresses of sources, sinks, store and dead letters.

Nothing is opened, and nothing is sent to a sink.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from oncebridge.aws.templates.needs import Resource, needed
from oncebridge.base.line_files import file_path
from oncebridge.check.finding import Checkup, Severity
from oncebridge.check.settings import is_service
from oncebridge.service.addresses import BackendAddress, scheme_of
from oncebridge.service.config import Route, Setup

_HTTP: Final = ("http", "https")
_MANY_WORKERS: Final = ("sqs", "kinesis")
_ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


def check_endpoints(setup: Setup, checkup: Checkup) -> None:
    """Check all addresses, and whether two of them are the same."""
    for route in setup.routes:
        if scheme_of(route.sink.url) in _HTTP:
            _check_http_sink(route, checkup)
    _check_loops(setup, checkup)
    _check_memory(setup, checkup)
    _check_spool(setup, checkup)
    _check_hosts(setup, checkup)


def _check_http_sink(route: Route, checkup: Checkup) -> None:
    from oncebridge.check.proxies import check_proxy  # noqa: PLC0415 - only for HTTP sinks
    from oncebridge.http.addresses import names_loopback  # noqa: PLC0415
    from oncebridge.http.target import HttpTarget  # noqa: PLC0415

    check_proxy(HttpTarget.parse(route.sink.url), checkup)
    subject = f"sink {route.sink}"
    parts = urlsplit(route.sink.url)
    is_plain = parts.scheme.lower() == "http" and not names_loopback(parts.hostname or "")
    if is_plain:
        checkup.report(
            "sink-plain",
            Severity.WARNING,
            subject,
            seen="events go over http://, unencrypted",
            why="Anyone on the network path can read and change events and credentials.",
            fix="Use https:// and remove allow_http.",
        )
    if getattr(route.sink.options, "idempotency_key", "quoted") == "off":
        checkup.report(
            "sink-no-key",
            Severity.WARNING,
            subject,
            seen='idempotency_key = "off"',
            why="A send whose response was lost is repeated. Without the key, the receiver cannot "
            "recognise it as a duplicate.",
            fix='Send the key, "quoted" or "bare" as the receiver expects it:\nidempotency_key = "bare"',
        )
    elif not is_plain:
        checkup.report_passed(subject, "encrypted, with an Idempotency-Key")


# --- loops ---------------------------------------------------------------------------------


def _check_loops(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    ends: list[tuple[str, BackendAddress]] = [("sink", route.sink) for route in setup.routes]
    ends.append(("dead letters", config.dead))
    found = False
    for source in config.source:
        for what, place in ends:
            if _is_same(source, place):
                found = True
                checkup.report(
                    "loop",
                    Severity.ERROR,
                    f"source {source}",
                    seen=f"the {what} {place} are the same place"
                    if what != "sink"
                    else f"the sink {place} is the same place",
                    why="Events that are sent there arrive again: as duplicates, or forever once their "
                    "window has ended or if a rule does not deduplicate them.",
                    fix="Use another address for one of the two.",
                )
    for route in setup.routes:
        if _is_same(route.sink, config.dead):
            found = True
            checkup.report(
                "dead-is-sink",
                Severity.ERROR,
                f"dead letters {config.dead}",
                seen=f"the sink {route.sink} is the same place",
                why="Dead letters are mixed with delivered events, and cannot be listed or replayed.",
                fix='Keep the dead letters in their own place:\ndead = "sqlite:oncebridge-dead.db"',
            )
    if not found:
        checkup.report_passed("addresses", "no loop: no sink is a source")


def _is_same(one: BackendAddress, other: BackendAddress) -> bool:
    scheme, second = scheme_of(one.url), scheme_of(other.url)
    if scheme in _HTTP and second in _HTTP:
        return _is_same_url(one.url, other.url)
    if scheme != second or scheme in ("-", "memory", "python"):
        return False
    if scheme in _MANY_WORKERS:
        return _is_same_on_aws(one, other)
    if scheme == "file":
        return Path(file_path(one.url)).absolute() == Path(file_path(other.url)).absolute()
    return one.url == other.url


def _is_same_url(source: str, sink: str) -> bool:
    """Return whether events sent to *sink* arrive at *source* on this host."""
    from oncebridge.http.addresses import names_loopback  # noqa: PLC0415 - only for HTTP sinks

    here, there = urlsplit(source), urlsplit(sink)
    if (here.port, here.path or "/") != (there.port or _PORTS[there.scheme], there.path or "/"):
        return False
    host, target = (here.hostname or "").lower(), (there.hostname or "").lower()
    is_local = names_loopback(host) or host in _ANYWHERE
    return host == target or (is_local and names_loopback(target))


_PORTS: Final = {"http": 80, "https": 443}


def _is_same_on_aws(one: BackendAddress, other: BackendAddress) -> bool:
    """Return whether two queues or streams may be one; an omitted account or Region may be equal."""
    first, second = _resource(one), _resource(other)
    if first.name != second.name or not _may_be_same(_region(one, first), _region(other, second)):
        return False
    if one.options.profile != other.options.profile:  # then it may be another account
        return bool(first.account) and first.account == second.account
    return _may_be_same(first.account, second.account) and _may_be_same(
        one.options.endpoint, other.options.endpoint
    )


def _may_be_same(mine: str | None, theirs: str | None) -> bool:
    return not (mine and theirs) or mine == theirs


def _resource(place: BackendAddress) -> Resource:
    """Return the resource of an address, given by name, URL or ARN."""
    (grant,) = needed({"sink": {"url": str(place.url)}})
    return grant.resource


def _region(place: BackendAddress, resource: Resource) -> str:
    """Return the Region as the SDK would find it, or an empty string."""
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]  # noqa: PLC0415 - only for AWS
    from botocore.session import Session  # type: ignore[import-untyped]  # noqa: PLC0415

    if resource.region or place.options.region:
        return resource.region or str(place.options.region)
    try:
        found = Session(profile=place.options.profile).get_config_variable("region")
    except BotoCoreError:
        found = None
    return found or os.environ.get("AWS_REGION", "")


# --- memory, spool, hosts -------------------------------------------------------------------------


def _check_memory(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    if not is_service(setup):
        return
    if scheme_of(config.store.url) == "memory":
        checkup.report(
            "memory-store",
            Severity.ERROR,
            "store memory:",
            seen="the store is in the memory of the process",
            why="It is empty after a restart or deployment, and for a second worker: every event that "
            "is redelivered is delivered again.",
            fix='Use a store on disk, or one that all workers share:\nstore = "sqlite:oncebridge.db"',
        )
    if scheme_of(config.dead.url) == "memory":
        checkup.report(
            "memory-dead",
            Severity.ERROR,
            "dead letters memory:",
            seen="the dead letters are in the memory of the process",
            why="Dead letters are acknowledged at their source. When the process ends, they are lost.",
            fix='Keep them on disk:\ndead = "sqlite:oncebridge-dead.db"',
        )


def _check_spool(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    if config.spool is None:
        return
    if not any(scheme_of(place.url) in _HTTP for place in config.source):
        checkup.report(
            "spool-unused",
            Severity.WARNING,
            f"spool {config.spool}",
            seen="spool is set, but there is no HTTP source",
            why="Only HTTP arrivals are spooled; a queue or a file keeps its own events.",
            fix="Remove spool.",
        )
        return
    same = [name for name, path in other_files(setup) if path == Path(config.spool).absolute()]
    if same:
        checkup.report(
            "spool-shared",
            Severity.WARNING,
            f"spool {config.spool}",
            seen=f"the {same[0]} is the same file",
            why="A spool is locked by one process. A second worker that uses the file as its store "
            "does not start.",
            fix='Use a separate file:\nspool = "oncebridge-spool.db"',
        )


def other_files(setup: Setup) -> Iterator[tuple[str, Path]]:
    """List the files of store, dead letters and sinks."""
    places: Sequence[tuple[str, BackendAddress]] = [
        ("store", setup.config.store),
        ("dead letters", setup.config.dead),
        *[("sink", route.sink) for route in setup.routes],
    ]
    for name, place in places:
        match scheme_of(place.url):
            case "sqlite":
                yield name, Path(place.url.partition(":")[2]).absolute()
            case "file":
                yield name, Path(file_path(place.url)).absolute()


def _check_hosts(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    schemes = {scheme_of(place.url) for place in config.source}
    if scheme_of(config.store.url) == "sqlite" and schemes.intersection(_MANY_WORKERS):
        checkup.report(
            "sqlite-one-host",
            Severity.NOTE,
            f"store {config.store}",
            seen=f"the store is a local file, but workers on any host can read the source "
            f"({', '.join(sorted(schemes))})",
            why="A worker on another host has its own file, and both deliver the same event.",
            fix="Run all workers on this host, or use a shared store: redis, postgresql, dynamodb.",
        )
