"""
`oncebridge template`: infrastructure to deploy, ready to apply.

The texts are those of the stores, each beside the store that it is for. Nothing is asked and
nothing is made, so no account is needed.
"""

from collections.abc import Callable
from datetime import timedelta

import click
from msgspec import Struct

from oncebridge.aws import s3_templates, templates
from oncebridge.backends import MigratesBySQL, StorePlace, scheme_of
from oncebridge.cli.manners import examples
from oncebridge.cli.setup import told
from oncebridge.duration import parse_duration
from oncebridge.errors import ConfigError
from oncebridge.options import Text, did_you_mean
from oncebridge.secret import masked


@click.group(
    epilog=examples(
        "oncebridge template table --store dynamodb://genesys-dedup > table.yaml",
        "oncebridge template table --help",
    )
)
def template() -> None:
    """Print infrastructure to deploy, ready to apply."""


class _Kind(Struct, frozen=True):
    """A kind of store that needs infrastructure of its own."""

    formats: tuple[str, ...]
    """The first is what is printed where none is asked for."""
    text: Callable[["_Asked"], str]


class _Asked(Struct, frozen=True):
    store: str
    """An address, or the name of a kind."""
    name: str | None
    form: str
    window: timedelta


@template.command(
    epilog=examples(
        "oncebridge template table --store dynamodb://genesys-dedup > table.yaml",
        "oncebridge template table --store dynamodb --name dedup --format terraform",
        "oncebridge template table --store s3://acme-dedup/events --window 14d",
        "oncebridge template table --store postgres > table.sql",
    )
)
@click.option(
    "--store",
    default="dynamodb",
    show_default=True,
    metavar="ADDRESS|KIND",
    help="The address of the store, or just dynamodb, s3 or postgres.",
)
@click.option(
    "--format",
    "form",
    metavar="FORMAT",
    help="cloudformation or terraform for AWS, sql for Postgres; unless given, the first.",
)
@click.option(
    "--window",
    default="6d",
    show_default=True,
    metavar="DURATION",
    help="The longest window of your rules: nothing is removed sooner.",
)
@click.option("--name", help="What to call it; otherwise as the address says.")
@told
def table(*, store: str, form: str | None, window: str, name: str | None) -> None:
    """
    Print the table (or bucket) that the store needs, with its expiry.

    Stores in Redis, SQLite and memory need none. `oncebridge migrate` makes the same by
    itself, if it may.
    """
    kind = _kind(store)
    formats = _KINDS[kind].formats
    if form is None:
        form = formats[0]
    if form not in formats:
        raise ConfigError("--format", f"{form!r} is not for {kind}; allowed: {', '.join(formats)}")
    asked = _Asked(store, name, form, parse_duration(window, "--window"))
    click.echo(_KINDS[kind].text(asked).rstrip("\n"))


def _kind(store: str) -> str:
    """Name the kind of a store, which may stand there for its address."""
    scheme = scheme_of(store)
    if scheme in ("memory", "sqlite") or scheme.startswith("redis"):
        raise ConfigError("--store", f"a store of the kind {scheme} needs nothing made")
    kind = "postgres" if scheme == "postgresql" else scheme
    if kind not in _KINDS:
        raise ConfigError(
            "--store", f"is no store that needs a table; {did_you_mean(kind, list(_KINDS))}"
        )
    return kind


def _of_aws(table: Callable[..., str]) -> Callable[[_Asked], str]:
    def text(asked: _Asked) -> str:
        name = asked.name or _named(asked.store) or "oncebridge"
        return table(name, format=asked.form, window=asked.window)

    return text


def _named(store: str) -> str:
    """Find the name in an address: of a table, given by name or ARN, or BUCKET/PREFIX."""
    place = store.partition(":")[2].partition("?")[0].strip("/")
    if "@" in place:
        raise ConfigError("--store", f"{masked(store)}: such an address has no credentials")
    return place.rpartition("/")[2] if place.startswith("arn:") else place


def _of_postgres(asked: _Asked) -> str:
    url = asked.store if ":" in asked.store else "postgresql://localhost/oncebridge"
    options = {"table": asked.name} if asked.name else {}
    store = StorePlace.of(Text.of(url, "--store"), **options).opened
    assert isinstance(store, MigratesBySQL)  # noqa: S101 - it is ours
    return store.migration_sql()


_KINDS = {
    "dynamodb": _Kind(("cloudformation", "terraform"), _of_aws(templates.table)),
    "s3": _Kind(("cloudformation", "terraform"), _of_aws(s3_templates.table)),
    "postgres": _Kind(("sql",), _of_postgres),
}
