"""`swarmnode completion bash`: shell completion of verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="print a shell completion script")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL. In bash: eval "$(swarmnode completion bash)". To keep it, put that line
    into ~/.bashrc (or ~/.zshrc); for fish: swarmnode completion fish > ~/.config/fish/completions/swarmnode.fish"""
    from swarmnode.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "swarmnode", "_SWARMNODE_COMPLETE").source())
