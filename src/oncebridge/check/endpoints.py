"""
What is wrong with where events come from and go to, as far as the addresses say it.

Nothing is opened, and no sink is sent anything.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from oncebridge.aws.templates.needs import Resource, needed
from oncebridge.base.line_files import path_of
from oncebridge.check.finding import Checkup, Severity
from oncebridge.check.settings import is_service
from oncebridge.service.addresses import BackendAddress, scheme_of
from oncebridge.service.config import Route, Setup

_HTTP: Final = ("http", "https")
_MANY_WORKERS: Final = ("sqs", "kinesis")
_ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


def check_places(setup: Setup, checkup: Checkup) -> None:
    """Look at all addresses, and at what they have in common."""
    for route in setup.routes:
        if scheme_of(route.sink.url) in _HTTP:
            _check_http_sink(route, checkup)
    _check_loops(setup, checkup)
    _check_memory(setup, checkup)
    _check_spool(setup, checkup)
    _check_hosts(setup, checkup)


def _check_http_sink(route: Route, checkup: Checkup) -> None:
    from oncebridge.check.proxies import check_proxy  # noqa: PLC0415 - for those who have one
    from oncebridge.http.addresses import names_loopback  # noqa: PLC0415
    from oncebridge.http.target import Target  # noqa: PLC0415

    check_proxy(Target.parse(route.sink.url), checkup)
    subject = f"sink {route.sink}"
    parts = urlsplit(route.sink.url)
    is_plain = parts.scheme.lower() == "http" and not names_loopback(parts.hostname or "")
    if is_plain:
        checkup.find(
            "sink-plain",
            Severity.WARNING,
            subject,
            seen="events go over http://, unencrypted",
            why="Whoever sits between reads them, with what authorises them, and may change both.",
            fix="Use https:// and leave allow_http out.",
        )
    if getattr(route.sink.options, "idempotency_key", "quoted") == "off":
        checkup.find(
            "sink-no-key",
            Severity.WARNING,
            subject,
            seen='idempotency_key = "off"',
            why="A send whose answer was lost is sent again, and without the key the receiver "
            "cannot tell it from another event.",
            fix='Send the key, in quotes or bare as the receiver wants it:\nidempotency_key = "bare"',
        )
    elif not is_plain:
        checkup.fine(subject, "encrypted, with an Idempotency-Key")


# --- in circles ---------------------------------------------------------------------------------


def _check_loops(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    ends: list[tuple[str, BackendAddress]] = [("sink", route.sink) for route in setup.routes]
    ends.append(("dead letters", config.dead))
    found = False
    for source in config.source:
        for what, place in ends:
            if _is_same(source, place):
                found = True
                checkup.find(
                    "loop",
                    Severity.ERROR,
                    f"source {source}",
                    seen=f"the {what} {place} lead back to it"
                    if what != "sink"
                    else f"the sink {place} leads back to it",
                    why="What is sent there comes in again: as a duplicate at best, and for ever "
                    "once its window is over or where a rule lets it pass.",
                    fix="Name another place for one of the two.",
                )
    for route in setup.routes:
        if _is_same(route.sink, config.dead):
            found = True
            checkup.find(
                "dead-is-sink",
                Severity.ERROR,
                f"dead letters {config.dead}",
                seen=f"the sink {route.sink} is the same place",
                why="What was given up goes where everything else goes, and nobody can tell it "
                "apart or put it right.",
                fix='Keep the dead letters by themselves:\ndead = "sqlite:oncebridge-dead.db"',
            )
    if not found:
        checkup.fine("addresses", "nothing leads back to where it came from")


def _is_same(one: BackendAddress, other: BackendAddress) -> bool:
    scheme, second = scheme_of(one.url), scheme_of(other.url)
    if scheme in _HTTP and second in _HTTP:
        return _is_same_url(one.url, other.url)
    if scheme != second or scheme in ("-", "memory", "python"):
        return False
    if scheme in _MANY_WORKERS:
        return _is_same_on_aws(one, other)
    if scheme == "file":
        return Path(path_of(one.url)).absolute() == Path(path_of(other.url)).absolute()
    return one.url == other.url


def _is_same_url(source: str, sink: str) -> bool:
    """Return whether what is sent to *sink* arrives where *source* listens, on this host."""
    from oncebridge.http.addresses import names_loopback  # noqa: PLC0415 - for those who have one

    here, there = urlsplit(source), urlsplit(sink)
    if (here.port, here.path or "/") != (there.port or _PORTS[there.scheme], there.path or "/"):
        return False
    host, target = (here.hostname or "").lower(), (there.hostname or "").lower()
    is_local = names_loopback(host) or host in _ANYWHERE
    return host == target or (is_local and names_loopback(target))


_PORTS: Final = {"http": 80, "https": 443}


def _is_same_on_aws(one: BackendAddress, other: BackendAddress) -> bool:
    """Return whether two queues or streams are one; what an address leaves out may be the same."""
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
    """Read what an address names, whether by its name, its URL or its ARN."""
    (grant,) = needed({"sink": {"url": str(place.url)}})
    return grant.resource


def _region(place: BackendAddress, resource: Resource) -> str:
    """Name the Region, as the SDK would find it; nothing where it is not known."""
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]  # noqa: PLC0415 - for those who have one
    from botocore.session import Session  # type: ignore[import-untyped]  # noqa: PLC0415

    if resource.region or place.options.region:
        return resource.region or str(place.options.region)
    try:
        found = Session(profile=place.options.profile).get_config_variable("region")
    except BotoCoreError:
        found = None
    return found or os.environ.get("AWS_REGION", "")


# --- what does not last -------------------------------------------------------------------------


def _check_memory(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    if not is_service(setup):
        return
    if scheme_of(config.store.url) == "memory":
        checkup.find(
            "memory-store",
            Severity.ERROR,
            "store memory:",
            seen="what was passed on is remembered in the process itself",
            why="A restart, a deployment or a second worker knows nothing of it: every event that "
            "comes again is delivered again.",
            fix='Remember it on disk, or where all workers can ask:\nstore = "sqlite:oncebridge.db"',
        )
    if scheme_of(config.dead.url) == "memory":
        checkup.find(
            "memory-dead",
            Severity.ERROR,
            "dead letters memory:",
            seen="events that were given up are kept in the process itself",
            why="They have been acknowledged, and are lost for good when it ends.",
            fix='Keep them on disk:\ndead = "sqlite:oncebridge-dead.db"',
        )


def _check_spool(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    if config.spool is None:
        return
    if not any(scheme_of(place.url) in _HTTP for place in config.source):
        checkup.find(
            "spool-unused",
            Severity.WARNING,
            f"spool {config.spool}",
            seen="a spool, and no HTTP source",
            why="Only what arrives by HTTP is taken there; a queue or a file keeps its events "
            "itself.",
            fix="Leave spool out.",
        )
        return
    same = [name for name, path in other_files(setup) if path == Path(config.spool).absolute()]
    if same:
        checkup.find(
            "spool-shared",
            Severity.WARNING,
            f"spool {config.spool}",
            seen=f"the {same[0]} is the same file",
            why="The spool belongs to one process, which nobody else may share it with: a second "
            "worker that uses the file as its store does not start.",
            fix='Give it a file of its own:\nspool = "oncebridge-spool.db"',
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
                yield name, Path(path_of(place.url)).absolute()


def _check_hosts(setup: Setup, checkup: Checkup) -> None:
    config = setup.config
    schemes = {scheme_of(place.url) for place in config.source}
    if scheme_of(config.store.url) == "sqlite" and schemes.intersection(_MANY_WORKERS):
        checkup.find(
            "sqlite-one-host",
            Severity.NOTE,
            f"store {config.store}",
            seen=f"a file of this host, and a source ({', '.join(sorted(schemes))}) that workers on "
            "any host may read from",
            why="A worker elsewhere has a file of its own, and both deliver the same event.",
            fix="Run all workers on this host, or use a store that they share: redis, postgresql, "
            "dynamodb.",
        )
