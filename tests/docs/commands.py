"""
The page of commands: what `--help` says, for each.

    python -m tests.docs.commands > docs/reference/commands.md
"""

import sys
from collections.abc import Iterator

import click
from click.testing import CliRunner

from oncebridge.cli.app import app

WIDTH = 100
_HEAD = """\
# Commands

What `oncebridge COMMAND --help` says. Settings that many commands share (`--store`, `--sink`, `--dead`, `-c`) are those of the
[configuration](../configuration.md); exit codes are [listed](../operating.md#start-and-stop) with the service.

`oncebridge completion` teaches your shell the names.
"""


def commands() -> Iterator[tuple[str, ...]]:
    """Name every command that does something, in order."""
    for name, command in sorted(app.commands.items()):
        loaded = command.load()
        if isinstance(loaded, click.Group):
            yield from ((name, below) for below in sorted(loaded.commands))
        else:
            yield (name,)


def help_of(words: tuple[str, ...]) -> str:
    """Give what *words* print when they are asked for help."""
    given = CliRunner().invoke(
        app,
        [*words, "--help"],
        prog_name="oncebridge",
        terminal_width=WIDTH,
        max_content_width=WIDTH,
    )
    assert given.exit_code == 0, given.output
    return given.output


def page() -> str:
    """Make the whole page."""
    parts = [_HEAD]
    for words in commands():
        name = " ".join(words)
        parts.append(f"## {name}\n\n```console\n$ oncebridge {name} --help\n{help_of(words)}```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
