"""`swarmnode completion bash`: the shell completes verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="make the shell complete verbs and options")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL. In bash: eval "$(swarmnode completion bash)"; for good, put that line into
    ~/.bashrc (or ~/.zshrc), and for fish: swarmnode completion fish > ~/.config/fish/completions/swarmnode.fish"""
    from swarmnode.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "swarmnode", "_SWARMNODE_COMPLETE").source())
