"""`swarmnode manifest`: read the manifest of a run."""

from __future__ import annotations

from pathlib import Path

import click

RUN = click.Path(exists=True, path_type=Path)


@click.group(short_help="read a run's manifest")
def command() -> None:
    """Show or explain a manifest. RUN is a run's folder, a manifest.toml or a signed manifest."""


@command.command(short_help="print it: all fields, or those that differ from the defaults")
@click.argument("run", metavar="RUN", type=RUN)
@click.option("--changed", is_flag=True, help="Only what differs from the defaults, a line each.")
def show(run: Path, changed: bool) -> None:
    """Print the manifest of RUN as TOML with every field and its comment."""
    from swarmnode.manifest import Manifest, manifest_at, template
    from swarmnode.manifest.text import difference

    manifest = manifest_at(run)
    click.echo("\n".join(difference(Manifest(), manifest)) if changed else template(manifest))


@command.command(short_help="what a field means")
@click.argument("names", metavar="FIELD...", nargs=-1, required=True)
def explain(names: tuple[str, ...]) -> None:
    """Print meaning, allowed values and default of each FIELD (inner.learning_rate, or a whole table: inner)."""
    from swarmnode.manifest.text import explained

    for name in names:
        click.echo(explained(name))
