"""`oncebridge completion`: the shell completion script."""

import click
from click.shell_completion import get_completion_class

from oncebridge.cli.command import examples

_SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog=examples(
        'eval "$(oncebridge completion bash)"                 # in ~/.bashrc',
        'eval "$(oncebridge completion zsh)"                  # in ~/.zshrc',
        "oncebridge completion fish > ~/.config/fish/completions/oncebridge.fish",
    )
)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the completion script for your shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows all of them
    root = context.find_root()
    click.echo(kind(root.command, {}, "oncebridge", "_ONCEBRIDGE_COMPLETE").source())
