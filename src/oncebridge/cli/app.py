"""
The command group `oncebridge`, and its table of commands.

The module of a command is imported when it is called: `--version`, `--help` and shell completion
do not wait for the engine and the drivers.
"""

from typing import Any

import click

from oncebridge import __version__
from oncebridge.cli import load


class LazyCommand(click.Command):
    """A command of the table: *name* in a module of this folder, *module* or of the same name."""

    def __init__(self, name: str, about: str, *, module: str | None = None) -> None:
        super().__init__(name, help=about)
        self._place = (module or name, name)

    def load(self) -> click.Command:
        """Return the command itself."""
        command: click.Command = load(*self._place)
        return command

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Return the context of the command itself, which click calls, or completes, from then on."""
        return self.load().make_context(info_name, args, parent, **extra)


_COMMANDS = [
    LazyCommand("run", "Run the service: receive events and deliver each one once."),
    LazyCommand("init", "Write a starter configuration, with comments."),
    LazyCommand(
        "migrate", "Create the tables, indexes and expiry rules that the store and the sinks need."
    ),
    LazyCommand("check", "Check the configuration and its environment for problems."),
    LazyCommand("audit", "Find the duplicates in recorded events, and their causes."),
    LazyCommand("explain", "Show what happened to an event and why, with all operator actions."),
    LazyCommand("forget", "Remove events from the store, so that the next copy is delivered."),
    LazyCommand("release", "Release events that are held by a worker that is gone."),
    LazyCommand("resend", "Send events again, although they were delivered."),
    LazyCommand("dead", "List, show, replay or drop dead letters."),
    LazyCommand("dashboard", "Run the dashboard for workers that run elsewhere."),
    LazyCommand("pause", "Pause delivery on all workers, on all routes or on some."),
    LazyCommand("resume", "Resume paused routes, all or some.", module="pause"),
    LazyCommand("copy", "Copy the records of one store to another."),
    LazyCommand("test", "Test the rules of a configuration with sample events."),
    LazyCommand("template", "Print infrastructure as code: stacks, policies and tables."),
    LazyCommand("schema", "Print the reference of all settings, as JSON Schema or Markdown."),
    LazyCommand("completion", "Print the completion script for your shell."),
    LazyCommand("demo", "Show what oncebridge does, with a simulated stream and a real service."),
    LazyCommand(
        "simulate",
        "Write a simulated Genesys Cloud stream, one event per line, to standard output.",
    ),
]
"""What `--help` of the program shows: the first sentence of the help of each command."""

_EPILOG = """\b
Exit codes:
  0    success
  1    needs attention: events are left, a test failed, or nothing was found
  2    invalid usage or configuration; nothing was started
  3    the store, a sink or a source could not be opened
  130  stopped at once by a second Ctrl-C

\b
Examples:
  oncebridge demo
  oncebridge init && oncebridge run -c oncebridge.toml"""


@click.group(
    commands=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.version_option(__version__, "-V", "--version", prog_name="oncebridge")
def app() -> None:
    """Every EventBridge event, delivered once."""
