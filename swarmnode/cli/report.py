"""`swarmnode report`: bundle the logs of nodes on this machine into one file."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.user_folders import default_home

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(short_help="bundle the logs of this machine's nodes")
@click.argument("folders", metavar="[HOME]...", nargs=-1, type=FOLDER)
@click.option("--out", type=FILE, default=Path("swarmnode-report.tar.gz"), show_default=True, help="The file.")
@click.option("--reveal", is_flag=True, help="Keep addresses, names and paths: for your own use only.")
def command(folders: tuple[Path, ...], out: Path, reveal: bool) -> None:
    """Bundle the logs of the nodes in HOME (or in folders of HOME; default: this user's node), with versions of
    installed packages. Addresses, host and user names, paths of homes and secrets are replaced consistently; keys,
    weights and data are never included. Look into it before you send it:

      \b
        tar xzf swarmnode-report.tar.gz -O | less
        swarmnode replay swarmnode-report.tar.gz
    """
    from swarmnode.local import bundle

    hide = None if reveal else bundle.redactor()
    homes = bundle.homes(folders or (default_home("node"), default_home("bootstrap")))
    inside = bundle.write(out, homes, hide)
    hidden = "" if hide is None else f", {hide.hidden} addresses, names and secrets hidden"
    click.echo(f"{out}: {len(inside)} files of {len(homes)} nodes{hidden}", err=True)
    click.echo(str(out))
