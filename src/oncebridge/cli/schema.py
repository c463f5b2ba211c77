"""`oncebridge schema`: the reference of all settings."""

import json

import click

from oncebridge.cli.command import examples
from oncebridge.service.reference import json_schema
from oncebridge.service.reference import markdown as page


@click.command(
    epilog=examples(
        "oncebridge schema > oncebridge.schema.json",
        "oncebridge schema --markdown | less",
    )
)
@click.option("--markdown", is_flag=True, help="Print a Markdown page instead of JSON Schema.")
def schema(*, markdown: bool) -> None:
    """
    Print the reference of all settings, as JSON Schema or Markdown.

    An editor checks a configuration file as you type if its first line is

    \b
      #:schema ./oncebridge.schema.json
    """  # noqa: D301 - \b keeps the line as it is
    click.echo(page() if markdown else json.dumps(json_schema(), indent=2), nl=not markdown)
