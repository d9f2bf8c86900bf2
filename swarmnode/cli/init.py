"""`swarmnode init DIR`: a new run."""

from __future__ import annotations

from pathlib import Path

import click

PRESETS = ("demo", "tiny", "small")
COUNT_MAX = 10**12


@click.command(short_help="make a new run")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(PRESETS), default="demo", show_default=True, help="Values to begin with.")
@click.option(
    "--parameters", type=click.IntRange(1, COUNT_MAX), help="Size of the model, about.  [default: the preset's]"
)
@click.option("--nodes", type=click.IntRange(1, 1 << 20), help="Nodes that will train.  [default: two a stage]")
@click.option(
    "--samples", type=click.IntRange(1, COUNT_MAX), help="Length of the run.  [default: the preset's decay_samples]"
)
def command(folder: Path, preset: str, parameters: int | None, nodes: int | None, samples: int | None) -> None:
    """Write DIR/manifest.toml, commented and ready to be edited, and DIR/owner.key, which signs it.

    With --parameters, --nodes or --samples the model, learning rate, batch and warm-up are fitted to them; the comments
    say from where. Prints both paths. Nothing is overwritten. Then: swarmnode up DIR
    """
    from swarmnode import manifest

    made = manifest.Fitted(manifest.PRESETS[preset], {})
    if (parameters, nodes, samples) != (None, None, None):
        made = manifest.fit(made.manifest, parameters=parameters, nodes=nodes, samples=samples)
    for path in manifest.init(folder, made.manifest, made.origins):
        click.echo(path)
