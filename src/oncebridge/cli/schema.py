"""`oncebridge schema`: every setting, for editors and for people."""

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
@click.option("--markdown", is_flag=True, help="A page for people instead.")
def schema(*, markdown: bool) -> None:
    """
    Describe every setting: JSON Schema, or a page for people.

    An editor checks a configuration while it is written when its first line is

    \b
      #:schema ./oncebridge.schema.json
    """  # noqa: D301 - \b keeps the line as it is
    click.echo(page() if markdown else json.dumps(json_schema(), indent=2), nl=not markdown)
