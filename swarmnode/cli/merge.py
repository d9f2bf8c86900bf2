"""`swarmnode merge MODEL MODEL... --out DIR`: average models that began as one."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.errors import UsageError


def weights_of(text: str | None, count: int) -> list[float]:
    """The weights in `text`, numbers with commas between; without text all are 1. Raises UsageError."""
    try:
        return [1.0] * count if text is None else [float(each) for each in text.split(",")]
    except ValueError:
        raise UsageError(f"--weights {text}: give numbers with commas between, one for each model") from None


@click.command(short_help="average models that began as one")
@click.argument("models", metavar="MODEL MODEL...", nargs=-1, required=True, type=FOLDER)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the mean.")
@click.option("--weights", metavar="W,W,...", help="A weight for each model.  [default: all alike]")
def command(models: tuple[Path, ...], out: Path, weights: str | None) -> None:
    """Write the weighted mean of exported models (Hugging Face folders, safetensors, also sharded). All else in the
    folder is the first one's. Prints the folder.

    This is the last step of Branch-Train-Merge: start several runs with `init --from` the same model, each on its own
    part of the data, and merge their exports. The runs never meet. Models that did not begin as one give nonsense.
    """
    from swarmnode.model.model_merge import merge_models

    parameters = merge_models(out, models, weights_of(weights, len(models)))
    click.echo(f"{out}: the mean of {len(models)} models, {parameters} parameters")
