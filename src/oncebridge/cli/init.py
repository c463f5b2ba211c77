"""`oncebridge init`: write a starter configuration."""

import os
from importlib.resources import files
from pathlib import Path

import click

from oncebridge.cli.command import examples, note, report_errors
from oncebridge.errors import ConfigError
from oncebridge.service.config import DEFAULT_FILE

KINDS = ("http", "worker", "lambda")
_NEXT = {
    "http": "oncebridge run -c {file}",
    "worker": "oncebridge template worker, then oncebridge run -c {file}",
    "lambda": "deploy it with your function; oncebridge template lambda prints the stack for it",
}


def starter(kind: str) -> str:
    """Return the text of a starter configuration."""
    return files("oncebridge.cli").joinpath("starters", f"{kind}.toml").read_text("utf-8")


@click.command(
    epilog=examples(
        "oncebridge init",
        "oncebridge init worker --output worker.toml",
        "oncebridge init http --output - | less",
    )
)
@click.argument("kind", type=click.Choice(KINDS), default="http")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default=DEFAULT_FILE,
    show_default=True,
    help="Where to write it; - is standard output.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@report_errors
def init(*, kind: str, output: str, force: bool) -> None:
    """
    Write a starter configuration, with comments.

    http receives events from API destinations or any other HTTP sender. worker reads an SQS
    queue or a Kinesis stream. lambda is for your own Lambda function.
    """
    text = starter(kind)
    if output == "-":
        click.echo(text, nl=False)
        return
    _write(Path(output), text, force=force)
    note(f"wrote {output}; next: {_NEXT[kind].format(file=output)}")


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError("", f"{path}: already exists; use --force to overwrite it") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        raise ConfigError("", f"{path}: {why}") from None
