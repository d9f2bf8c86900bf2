"""`swarmnode init DIR`: make a new run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from swarmnode.manifest import Manifest, Recipe

KINDS = ("pretrain", "finetune", "adapters", "one_byte")
PRESETS = ("demo", "tiny", "small")
COUNT_MAX = 10**12
CONVERTED = "model"  # the folder that a GGUF file becomes, in the run's


@click.command(short_help="make a new run")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(PRESETS), default="demo", show_default=True, help="Initial values.")
@click.option(
    "--parameters", type=click.IntRange(1, COUNT_MAX), help="Approximate size of the model.  [default: the preset's]"
)
@click.option("--nodes", type=click.IntRange(1, 1 << 20), help="Nodes that will train.  [default: two a stage]")
@click.option(
    "--samples", type=click.IntRange(1, COUNT_MAX), help="Length of the run.  [default: the preset's decay_samples]"
)
@click.option("--data", "data", type=click.Path(file_okay=False, path_type=Path), help="A data set of `data make`.")
@click.option("--location", "locations", multiple=True, metavar="URL", help="Where its files can be had; repeatable.")
@click.option(
    "--from",
    "model",
    metavar="MODEL",
    help="Start from a pretrained model: a Hugging Face folder, a .gguf file, hf://USER/NAME[@REVISION] or"
    " https://HOST/FOLDER.",
)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="With --from: train all weights on text or on conversations, adapters alone, or all weights by forward passes"
    " that send one byte each.  [default: pretrain]",
)
@click.option(
    "--base-location", "base_locations", multiple=True, metavar="URL", help="Where its files can be had; repeatable."
)
@click.option(
    "--context", type=click.IntRange(1, 1 << 24), help="With --from: tokens of a sample.  [default: at most 512]"
)
@click.option(
    "--new-run", is_flag=True, help="In a folder that has a run: put its signed manifest aside; manifest.toml is kept."
)
@click.option("--untie", is_flag=True, help="With --from: train a tied model with a head of its own.")
def command(
    folder: Path,
    preset: str,
    parameters: int | None,
    nodes: int | None,
    samples: int | None,
    data: Path | None,
    locations: tuple[str, ...],
    model: str | None,
    kind: str | None,
    base_locations: tuple[str, ...],
    context: int | None,
    new_run: bool,
    untie: bool,
) -> None:
    """Write DIR/manifest.toml, commented and ready to edit, and DIR/owner.key, which signs it.

    With --parameters, --nodes or --samples the model, learning rate, batch and warm-up are fitted to them; the comments
    name the sources. Prints both paths. Nothing is overwritten. Next: swarmnode up DIR

    With --from the run goes on from a model's weights. Its files are read once, for their hashes; DIR/base leads to
    them. Machines that join fetch their own stage's part alone, from members or from the model's location.
    """
    from swarmnode import manifest
    from swarmnode.manifest.folder import MANIFEST_FILE, put_aside

    if new_run:
        manifest.read_manifest(folder / MANIFEST_FILE)  # what the next run would be signed with
        kept = put_aside(folder)
        click.echo(folder / MANIFEST_FILE if kept is None else f"{kept} (the run so far)")
        return
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST_FILE).exists():
        raise click.UsageError(f"{folder} holds other files: give a new folder for the run, its key is kept there")
    if kind == "finetune" and data is None:
        raise click.UsageError("--kind finetune needs --data OUT, documents of their own (swarmnode data make OUT)")
    preset_made = manifest.PRESETS[preset]
    if data is not None:
        from swarmnode.local.data_link import on_data_set

        preset_made = on_data_set(preset_made, data, locations)
    elif locations:
        raise click.UsageError("--location says where the files of --data can be had: give both")
    if model is not None:
        if parameters is not None:
            raise click.UsageError("--parameters sizes a new model, --from goes on from one that has its size")
        start = manifest.of_kind(preset_made, kind or KINDS[0])
        _from_model(folder, model, start, base_locations, data, context, nodes, samples, untie=untie)
        return
    if base_locations or context is not None or kind is not None or untie:
        raise click.UsageError("--kind, --base-location, --context and --untie belong to --from MODEL")
    made = manifest.Recipe(preset_made, {})
    if (parameters, nodes, samples) != (None, None, None):
        made = manifest.fit(made.manifest, parameters=parameters, nodes=nodes, samples=samples)
    _check_text(made.manifest, data)
    for path in manifest.init(folder, made.manifest, made.origins):
        click.echo(path)
    _link(folder, data)


def _check_text(made: Manifest, data: Path | None) -> None:
    """Raises DataError unless the data set has text enough for the run, which volunteers would find out otherwise."""
    if data is not None:
        from swarmnode.data.indexed import IndexedCorpus
        from swarmnode.local.data_link import index_of

        IndexedCorpus(made, index_of(data), lambda number: None)


def _link(folder: Path, data: Path | None) -> None:
    if data is not None:
        from swarmnode.local.data_link import link

        click.echo(link(folder, data))


def _from_model(
    folder: Path,
    model: str,
    start: Recipe,
    locations: tuple[str, ...],
    data: Path | None,
    context: int | None,
    nodes: int | None,
    samples: int | None,
    *,
    untie: bool,
) -> None:
    """Write the run that starts from `model`."""
    from swarmnode import manifest
    from swarmnode.cli.option.model_files import open_model
    from swarmnode.cli.output.progress import bar
    from swarmnode.local.pretrained import lay_out, pretrained
    from swarmnode.model.gguf_file import is_gguf, to_folder

    if is_gguf(model):
        converted = folder / CONVERTED
        to_folder(Path(model), converted)
        click.echo(converted)
        model = str(converted)
    with open_model(model) as opened, bar("hashing") as moved:
        made = pretrained(
            opened.files,
            start.manifest,
            name=opened.name,
            locations=(*opened.locations, *locations),
            data=data,
            context=context,
            nodes=nodes,
            samples=samples,
            report=moved,
            untie=untie,
        )
    _check_text(made.recipe.manifest, data)
    for path in manifest.init(folder, made.recipe.manifest, {**start.origins, **made.recipe.origins}):
        click.echo(path)
    click.echo(lay_out(folder, made))
    _link(folder, data)
