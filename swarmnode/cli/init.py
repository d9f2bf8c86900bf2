"""`swarmnode init DIR`: a new run."""

from __future__ import annotations

from pathlib import Path

import click

PRESETS = ("demo", "tiny", "small")


@click.command(short_help="make a new run")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(PRESETS), default="demo", show_default=True, help="Values to begin with.")
def command(folder: Path, preset: str) -> None:
    """Write DIR/manifest.toml, commented and ready to be edited, and DIR/owner.key, which signs it.

    Prints both paths. Nothing is overwritten. Then: swarmnode up DIR
    """
    from swarmnode import manifest

    for path in manifest.init(folder, manifest.PRESETS[preset]):
        click.echo(path)
