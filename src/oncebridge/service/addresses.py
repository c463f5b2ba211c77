"""
From an address to the thing itself.

Stores, sinks, sources and dead letters are found by the scheme of their address, through
entry points, so that a third party adds one without a change here. A backend is a class
with `from_url(url)`; if it has options, they are a record declared as in `oncebridge.base.options`
under the class's name `Options`, and `from_url(url, options)` takes one. If it needs a table
or the like, it is one that `Migrates`.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from msgspec import Struct

from oncebridge.base.line_files import path_of
from oncebridge.base.options import (
    Problems,
    Text,
    did_you_mean,
    origin,
    read,
    schema,
    settings_of,
)
from oncebridge.base.secrets import Address, masked, resolve_address
from oncebridge.errors import ConfigError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,30}")


class NoOptions(Struct, frozen=True, kw_only=True):
    """Nothing can be set."""


@cache
def _schemes(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def backend(group: str, url: str, where: str, *, written: str) -> Any:
    """
    Find the class for *url*, and say what to do where there is none.

    *written* is what the configuration says, which may be no more than a reference.
    """
    scheme = scheme_of(url)
    point = _schemes(group).get(scheme)
    if point is None:
        allowed = sorted(_schemes(group))
        if url != written:  # what was looked up may be secret as a whole
            raise ConfigError(where, f"{written!r} names no address; allowed: {', '.join(allowed)}")
        if not _SCHEME.fullmatch(scheme):
            message = f"is no address; it starts with one of {', '.join(allowed)}"
            raise ConfigError(where, message)
        raise ConfigError(
            where, f"{scheme!r} is no kind of address here; {did_you_mean(scheme, allowed)}"
        )
    return _load(point, where, f"{scheme}: ")


def extension(group: str, name: str, where: str) -> Any:
    """Return what the entry point *name* of *group* names; *where* is the setting that needs it."""
    return _load(_schemes(group)[name], where)


def _load(point: EntryPoint, where: str, named: str = "") -> Any:
    try:
        return point.load()
    except ImportError as error:
        raise ConfigError(
            where,
            f"{named}needs a package that is not installed ({error.name or error}); "
            f"pip install '{_package(point)}'",
        ) from error


def _package(point: EntryPoint) -> str:
    name = point.dist.name if point.dist else "oncebridge"
    if name == "oncebridge" and not point.extras:
        return "oncebridge[service]"
    return f"{name}[{','.join(point.extras)}]" if point.extras else name


class BackendAddress(Struct, frozen=True):
    """One address of the configuration, with its options and what it opens."""

    url: Address
    opened: Any
    """The backend, made and not yet connected."""
    reference: str = ""
    """Where the address was looked up, if it was: then all of it may be secret, and change."""
    options: Any = None
    """The record of the backend's options, where it has any."""

    group: ClassVar[str]

    @classmethod
    def of(cls, url: str, **options: Any) -> Self:
        """Open an address in code, as the configuration would."""
        problems = Problems()
        place = cls.read_option({"url": url, **options}, "", problems)
        problems.check()
        assert place is not None  # noqa: S101 - or it was raised
        return place

    @classmethod
    def read_option(cls, value: Any, where: str, problems: Problems) -> Self | None:
        table = as_table(value)
        if not isinstance(table, Mapping) or not isinstance(table.get("url"), str):
            items = table.values() if isinstance(table, Mapping) and "url" not in table else ()
            place = next((item.origin for item in items if isinstance(item, Text)), where)
            raise ConfigError(place, "must be an address, or a table with url and options")
        given = Address(table["url"])
        place = origin(table["url"], where)
        url = Address(resolve_address(given, place))
        if "\0" in url:
            raise ConfigError(place, "an address cannot hold the character NUL")
        found = backend(cls.group, url, place, written=given)
        kind = getattr(found, "Options", None)
        rest = {name: item for name, item in table.items() if name != "url"}
        options = read(kind or NoOptions, rest, where, problems)
        if options is None:
            return None
        try:
            opened = found.from_url(url, options) if kind else found.from_url(url)
        except ConfigError as error:
            message = error.message.replace(repr(url), repr(given))  # as it was written
            if not error.where:
                raise ConfigError(place, message) from None
            under = f"{where}.{error.where}" if where else error.where
            raise ConfigError(origin(rest.get(error.where), under), message) from None
        return cls(url, opened, "" if url == given else given, options if kind else None)

    @classmethod
    def option_schema(cls) -> dict[str, Any]:
        properties: dict[str, Any] = {"url": {"type": "string", "minLength": 1}}
        for kind in cls.option_kinds().values():
            properties |= schema(kind)["properties"]
        table = {"type": "object", "properties": properties, "required": ["url"]}
        return {"anyOf": [{"type": "string", "minLength": 1}, table]}

    @classmethod
    def option_form(cls) -> str:
        return "address, or table with url and options"

    @classmethod
    def option_kinds(cls) -> dict[str, type[Struct]]:
        """List the options of every backend that is installed, by scheme."""
        kinds = {}
        for name, point in sorted(_schemes(cls.group).items()):
            try:
                kind = getattr(point.load(), "Options", None)
            except ImportError:
                continue
            if kind is not None and settings_of(kind):
                kinds[name] = kind
        return kinds

    def __str__(self) -> str:
        # Who keeps an address elsewhere may have a secret in its path, which nobody could tell.
        return self.reference or masked(self.url)


class SourcePlace(BackendAddress, frozen=True):
    """Where events come from."""

    group: ClassVar[str] = "oncebridge.sources"

    def __str__(self) -> str:
        # A source that listens has the port that it got. Its path is shown: the senders need it,
        # and it is no secret, as others are let in by api_keys and the like only.
        return self.reference or getattr(self.opened, "url", "") or masked(self.url)


class StorePlace(BackendAddress, frozen=True):
    """Where it is remembered what was passed on."""

    group: ClassVar[str] = "oncebridge.stores"


class SinkPlace(BackendAddress, frozen=True):
    """Where events go."""

    group: ClassVar[str] = "oncebridge.sinks"


class DeadPlace(BackendAddress, frozen=True):
    """Where events go that can never succeed."""

    group: ClassVar[str] = "oncebridge.dead_letters"


# --- what has to be there before a backend can be used --------------------------------------


@runtime_checkable
class Migrates(Protocol):
    """A store, a sink or dead letters that need something made first: a table, a rule."""

    async def migrate(self) -> list[str]:
        """
        Make what is missing, and tell each thing that was done; nothing, if all is there.

        It is called instead of `open`, on what was just made from its address; `aclose`
        follows. Safe to repeat, and safe beside workers that run.
        """
        ...


@runtime_checkable
class MigratesBySQL(Migrates, Protocol):
    """One that can be prepared by hand."""

    def migration_sql(self) -> str:
        """Return what `migrate` would run on an empty database; safe to run again."""
        ...


def as_table(value: Any) -> Any:
    """Take a bare address for a table that holds nothing else."""
    return {"url": value} if isinstance(value, str) else value


def scheme_of(url: str) -> str:
    """Name the scheme of an address; `-` is standard input or output."""
    return "-" if url == "-" else url.partition(":")[0].lower()


# --- whether a command can reach what the service uses --------------------------------------


def is_missing(place: BackendAddress) -> bool:
    """Return whether *place* is a file that does not exist yet, or is still empty."""
    match scheme_of(place.url):
        case "sqlite":
            path = Path(place.url.partition(":")[2])
        case "file":
            path = Path(path_of(place.url))
        case _:
            return False
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def is_out_of_reach(place: BackendAddress) -> bool:
    """Return whether *place* is in the memory of the running service."""
    return scheme_of(place.url) == "memory"


def refuse_memory(place: BackendAddress, what: str) -> None:
    """Raise `ConfigError` if *place* is in memory; *what* is the name of its setting."""
    if is_out_of_reach(place):
        raise ConfigError(
            what,
            f"{place} is inside the memory of the running service, and no other process can read it; "
            "use one on disk, such as sqlite:PATH",
        )
