"""`swarmnode owner`: the keys that sign for a run."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.errors import ManifestError, UsageError

RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(short_help="which keys sign for the run: add one, or replace a lost one")
def command() -> None:
    """The keys that sign amendments, access lists, invites and archives of a run. Earlier invites go on working."""


@command.command()
@click.argument("path", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
def new(path: Path) -> None:
    """Make a key in FILE, for safe keeping or for a second owner, and print its public half, for `owner add`."""
    from swarmnode import owner

    click.echo(owner.public_bytes(owner.create_owner(path)).hex())


@command.command()
@click.argument("run", metavar="RUN", type=RUN)
@click.argument("key", metavar="NEWKEY")
def add(run: Path, key: str) -> None:
    """Let NEWKEY sign for RUN as well. NEWKEY: 64 hex digits, or a file of `owner new`.

    A key that is added and kept elsewhere replaces a lost one: copy it to RUN/owner.key, then say `owner rotate RUN`.
    """
    from swarmnode import owner
    from swarmnode.cli.option.amendment import append, chain_of

    mine = owner.load_owner(run / owner.FILE_NAME)
    try:
        raw = owner.public_bytes(owner.load_owner(Path(key))) if Path(key).is_file() else bytes.fromhex(key)
    except ValueError:
        raw = b""
    if len(raw) != 32:
        raise UsageError(f"{key[:80]!r} is neither 64 hex digits nor a file of `swarmnode owner new`")
    chain, made = append(run, mine, 0, {}, tuple(dict.fromkeys((*chain_of(run).owners, raw))))
    click.echo(chain.text(made))


@command.command()
@click.argument("run", metavar="RUN", type=RUN)
def rotate(run: Path) -> None:
    """Replace the keys of RUN by a new one, in RUN/owner.key. The present one is kept beside it, and signs no more."""
    import os

    from swarmnode import owner
    from swarmnode.cli.option.amendment import append, chain_of

    path = run / owner.FILE_NAME
    mine = owner.load_owner(path)
    if owner.public_bytes(mine) not in chain_of(run).owners:
        raise ManifestError(f"{path} is not the key of an owner in force: `swarmnode owner add` it first, with theirs")
    fresh, kept = run / f"{owner.FILE_NAME}.new", run / f"owner-{owner.public_bytes(mine).hex()[:12]}.key"
    key = owner.create_owner(fresh)
    chain, made = append(run, mine, 0, {}, (owner.public_bytes(key),))
    os.link(path, kept)
    os.replace(fresh, path)
    click.echo(chain.text(made))
