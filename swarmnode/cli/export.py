"""`swarmnode export RUN_DIR --out DIR`: saved stages become a model."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.errors import UsageError


@click.command(short_help="make a Hugging Face model of a run's saved stages")
@click.argument("folder", metavar="RUN_DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where the model goes.")
def command(folder: Path, out: Path) -> None:
    """Merge what the nodes of a run saved when they left (stage-*.safetensors anywhere below RUN_DIR) into one model
    that transformers' LlamaForCausalLM loads. Prints where it is.
    """
    click.echo(export_run(folder, out))


def export_run(folder: Path, out: Path) -> Path:
    """Merge the stages saved below `folder` into a model in `out`; returns `out`.

    Raises UsageError when the run's manifest or every saved stage is missing, and what the merge raises.
    """
    from swarmnode.manifest import MANIFEST_FILE, SIGNED_FILE, read_manifest, read_signed

    if (folder / SIGNED_FILE).is_file():
        _, manifest = read_signed(folder / SIGNED_FILE)
    elif (folder / MANIFEST_FILE).is_file():
        manifest = read_manifest(folder / MANIFEST_FILE)
    else:
        raise UsageError(f"{folder} has neither {SIGNED_FILE} nor {MANIFEST_FILE}: is it the folder of a run?")
    files = sorted(folder.rglob("stage-*.safetensors"))
    if not files:
        raise UsageError(f"no saved stage (stage-*.safetensors) below {folder}: nodes save theirs when they leave")
    from swarmnode.model.export import export

    export(files, manifest, out, tokenizer=_tokenizer(folder, manifest.data.tokenizer))
    return out


def _tokenizer(folder: Path, name: str) -> Path | None:
    """The tokenizer's file, relative to the run's folder: `folder`, or the one above for a session of `up`."""
    if name == "bytes":
        return None
    return next((base / name for base in (folder, folder.parent) if (base / name).is_file()), folder / name)
