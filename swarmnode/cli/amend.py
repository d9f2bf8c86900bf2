"""`swarmnode amend RUN FIELD=VALUE...`: change a run under way."""

from __future__ import annotations

import tomllib
from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.errors import UsageError
from swarmnode.user_folders import default_home

ROUND_MAX = 1 << 53


@click.command(short_help="change the run under way: rates, batch, codec, from a round on")
@click.argument("run", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("changes", metavar="[FIELD=VALUE]...", nargs=-1)
@click.option("--from-round", type=click.IntRange(0, ROUND_MAX), help="First round with it.  [default: a minute ahead]")
@click.option("--home", type=FOLDER, help="The coordinator's.  [default: ~/.local/share/swarmnode/coordinator]")
@click.option("--list", "lists", is_flag=True, help="Print the amendments so far.")
def command(run: Path, changes: tuple[str, ...], from_round: int | None, home: Path | None, lists: bool) -> None:
    """Change fields of RUN's manifest from a round on. RUN is a folder with its owner's key; manifest.toml stays as it
    is, and so do the run's id, invites and history.

    The coordinator or bootstrap that runs from this folder passes the change on within seconds. Each node checks the
    owner's signature, and takes it up when it has done that round; a joiner takes up all that came before.
    """
    from swarmnode import owner
    from swarmnode.cli.option.amendment import append, chain_of, round_ahead
    from swarmnode.errors import ManifestError
    from swarmnode.manifest import amended, sign_folder

    if lists:
        for line in chain_of(run).lines():
            click.echo(line)
        return
    if not changes:
        raise click.UsageError("give FIELD=VALUE, for example inner.muon_learning_rate=1e-3, or --list")
    values: dict[str, object] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise click.UsageError(f"{change[:60]!r}: give FIELD=VALUE, for example inner.muon_learning_rate=1e-3")
        values[name] = _value(text)
    key = owner.load_owner(run / owner.FILE_NAME)
    sign_folder(run)
    try:
        newest = chain_of(run).newest
        amended(newest, values)
    except ManifestError as error:
        raise UsageError(str(error)) from None
    if from_round is None:
        from_round = round_ahead(home or default_home("coordinator"), newest.gossip.round_samples)
    chain, made = append(run, key, from_round, values)
    click.echo(chain.text(made))


def _value(text: str) -> object:
    """`text` as TOML reads it; a bare word is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
