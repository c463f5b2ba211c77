"""
`oncebridge template`: print infrastructure as code.

The templates are in `oncebridge.aws.templates`, and for other stores in the package of the store. Nothing
is read from AWS and nothing is created, so no account is needed.
"""

import os
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from oncebridge.aws.templates import rendering
from oncebridge.aws.templates.needs import needed
from oncebridge.aws.templates.policies import FORMATS, Known, policy
from oncebridge.aws.templates.policies import Format as PolicyFormat
from oncebridge.base.durations import parse_duration
from oncebridge.base.options import Text, did_you_mean
from oncebridge.base.secrets import is_at_aws, mask_address
from oncebridge.cli.command import examples, report_errors
from oncebridge.errors import ConfigError
from oncebridge.service.addresses import MigratesBySQL, StorePlace, as_table, scheme_of
from oncebridge.service.config import PREFIX


@click.group(
    epilog=examples(
        "oncebridge template lambda > oncebridge.yaml",
        "oncebridge template worker --format terraform > oncebridge/main.tf",
        "oncebridge template iam -c oncebridge.toml",
        "oncebridge template table --help",
    )
)
def template() -> None:
    """Print infrastructure as code: stacks, policies and tables."""


# --- stacks ---------------------------------------------------------------------------------

_format = click.option(
    "--format",
    "form",
    type=click.Choice(["cloudformation", "terraform"]),
    default="cloudformation",
    show_default=True,
    help="The output format.",
)
_name = click.option(
    "--name",
    default="oncebridge",
    show_default=True,
    help="The name of the queue, the table and the rest; a parameter can change it later.",
)


@template.command(
    "lambda",
    epilog=examples(
        "oncebridge template lambda > oncebridge.yaml",
        "oncebridge template lambda --name crm --format terraform > crm/main.tf",
    ),
)
@_format
@_name
@report_errors
def function(*, form: rendering.Format, name: str) -> None:
    """
    Print a stack: rule, queue, Lambda function, table, alarms.

    For events of Genesys Cloud on their partner event bus, or of any other bus. The code of
    the function is a zip file in a bucket; docs/deploy.md says how to build it.
    """
    click.echo(rendering.stack("lambda", name, format=form), nl=False)


@template.command(
    epilog=examples(
        "oncebridge template worker > oncebridge.yaml",
        "oncebridge template worker --format terraform > oncebridge/main.tf",
    )
)
@_format
@_name
@report_errors
def worker(*, form: rendering.Format, name: str) -> None:
    """
    Print a stack for `oncebridge run`: rule, queue, role, table, alarms.

    Its outputs are the values for the settings source, store and dead.
    """
    click.echo(rendering.stack("worker", name, format=form), nl=False)


# --- policies -------------------------------------------------------------------------------


@template.command(
    epilog=examples(
        "oncebridge template iam -c oncebridge.toml",
        "oncebridge template iam -c oncebridge.toml --format terraform --kms-key ARN",
        "oncebridge template iam --source sqs://genesys --store dynamodb://dedup",
    )
)
@click.option("-c", "--config", metavar="FILE", help="The configuration file.")
@click.option("--source", metavar="ADDRESS", help="Where events come from.")
@click.option("--store", metavar="ADDRESS", help="Where delivered events are remembered.")
@click.option("--sink", metavar="ADDRESS", help="Where events go.")
@click.option("--dead", metavar="ADDRESS", help="Where events go that cannot be delivered.")
@click.option("--region", default="", help="The Region of resources that are given by name only.")
@click.option("--account", default="", help="The account of resources that are given by name only.")
@click.option(
    "--kms-key",
    "keys",
    multiple=True,
    metavar="ARN",
    help="A KMS key that encrypts queues, streams or secrets (repeatable).",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="json",
    show_default=True,
    help="The output format.",
)
@report_errors
def iam(
    *,
    config: str | None,
    region: str,
    account: str,
    keys: tuple[str, ...],
    form: PolicyFormat,
    **places: str | None,
) -> None:
    """
    Print the least-privilege IAM policy for a configuration.

    Addresses and references (ssm:NAME, secretsmanager:NAME) are read from the file and the
    environment; flags override both. Nothing is read from AWS.
    """
    table = _read_config(config)
    for kind, address in places.items():
        if address is not None:
            _set_value(table, [kind], address)
    known = Known(region, account, keys)
    click.echo(policy(needed(table), format=form, known=known), nl=False)


def _read_config(config: str | None) -> dict[str, Any]:
    """Read a configuration file as it is, without resolving references."""
    named = config or os.environ.get(f"{PREFIX}CONFIG", "")
    table: dict[str, Any] = {}
    if is_at_aws(named):
        table["config"] = named  # all that is known is that it is read
        click.echo(f"oncebridge: the content of {named} is not read", err=True)
    elif named:
        try:
            table = tomllib.loads(Path(named).read_text(encoding="utf-8-sig"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(named, f"is not TOML: {error}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(named, f"cannot be read: {type(error).__name__}") from None
    for name, text in sorted(os.environ.items()):
        if name.startswith(PREFIX) and name != f"{PREFIX}CONFIG":
            _set_value(table, name.removeprefix(PREFIX).lower().split("__"), text)
    return table


def _set_value(table: dict[str, Any], path: list[str], text: str) -> None:
    *above, last = path
    for name in above:
        inner = as_table(table.get(name, {}))
        table[name] = inner = dict(inner) if isinstance(inner, dict) else {}
        table = inner
    old = table.get(last)
    # A new address keeps the options.
    table[last] = {**old, "url": text} if isinstance(old, dict) else text


# --- tables -----------------------------------------------------------------------------


class _StoreKind(Struct, frozen=True):
    """A kind of store that needs infrastructure of its own."""

    formats: tuple[str, ...]
    """The first is the default."""
    text: Callable[["_TableRequest"], str]


class _TableRequest(Struct, frozen=True):
    store: str
    """An address, or a kind of store."""
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
    help="cloudformation (the default) or terraform for AWS, sql for Postgres.",
)
@click.option(
    "--window",
    default="6d",
    show_default=True,
    metavar="DURATION",
    help="The longest window of your rules; nothing is removed earlier.",
)
@click.option("--name", help="Its name, if not the one in the address.")
@report_errors
def table(*, store: str, form: str | None, window: str, name: str | None) -> None:
    """
    Print the table (or bucket) that the store needs, with its expiry.

    Stores in Redis, SQLite and memory need none. `oncebridge migrate` creates the same, if it
    has the permissions.
    """
    kind = _store_kind(store)
    formats = _KINDS[kind].formats
    if form is None:
        form = formats[0]
    if form not in formats:
        raise ConfigError("--format", f"{form!r} is not for {kind}; allowed: {', '.join(formats)}")
    asked = _TableRequest(store, name, form, parse_duration(window, "--window"))
    click.echo(_KINDS[kind].text(asked).rstrip("\n"))


def _store_kind(store: str) -> str:
    """Return the kind of a store that is given by address or by kind."""
    scheme = scheme_of(store)
    if scheme in ("memory", "sqlite") or scheme.startswith("redis"):
        raise ConfigError("--store", f"a {scheme} store needs no table")
    kind = "postgres" if scheme == "postgresql" else scheme
    if kind not in _KINDS:
        raise ConfigError(
            "--store", f"is not a store that needs a table; {did_you_mean(kind, list(_KINDS))}"
        )
    return kind


def _aws_table(table: Callable[..., str]) -> Callable[[_TableRequest], str]:
    def text(asked: _TableRequest) -> str:
        name = asked.name or _name_in_address(asked.store) or "oncebridge"
        return table(name, format=asked.form, window=asked.window)

    return text


def _name_in_address(store: str) -> str:
    """Return the name in an address: of a table, by name or ARN, or BUCKET/PREFIX."""
    place = store.partition(":")[2].partition("?")[0].strip("/")
    if "@" in place:
        raise ConfigError(
            "--store", f"{mask_address(store)}: such an address cannot have credentials"
        )
    return place.rpartition("/")[2] if place.startswith("arn:") else place


def _postgres_table(asked: _TableRequest) -> str:
    url = asked.store if ":" in asked.store else "postgresql://localhost/oncebridge"
    options = {"table": asked.name} if asked.name else {}
    store = StorePlace.of(Text.of(url, "--store"), **options).opened
    assert isinstance(store, MigratesBySQL)  # noqa: S101 - our own store
    return store.migration_sql()


_KINDS = {
    "dynamodb": _StoreKind(("cloudformation", "terraform"), _aws_table(rendering.table)),
    "s3": _StoreKind(("cloudformation", "terraform"), _aws_table(rendering.bucket)),
    "postgres": _StoreKind(("sql",), _postgres_table),
}
