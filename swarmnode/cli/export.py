"""`swarmnode export SOURCE --out DIR`: what is kept of a run becomes a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.cli.progress import bar

Note = Callable[[str], None]
KINDS = ("auto", "stages", "checkpoint")
KIND = click.option("--from", "kind", type=click.Choice(KINDS), default="auto", show_default=True, help="What to take.")
GOSSIP = click.option(
    "--gossip-rounds", "rounds", type=click.IntRange(0, 1000), default=0, help="First let the replicas meet so often."
)
LAST = click.option("--last", is_flag=True, help="Take replicas' last weights, not their running mean.")
DATA = click.option(
    "--data", type=FOLDER, help="The manifest's paths lie below it.  [default: the run's folder; of a bucket: none]"
)
AVERAGE = click.option(
    "--average",
    "checkpoints",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=1,
    help="Of checkpoints, the mean of the newest N.",
)


@click.command(short_help="make a Hugging Face model of what is kept of a run")
@click.argument("source", metavar="SOURCE")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where the model goes.")
@KIND
@GOSSIP
@LAST
@AVERAGE
@DATA
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: str, out: Path, kind: str, rounds: int, last: bool, checkpoints: int, data: Path | None, as_json: bool
) -> None:
    """Merge SOURCE into one model that transformers' AutoModelForCausalLM and AutoTokenizer load. Prints where it is.

    SOURCE is the folder of a session or a run (what its nodes saved when they left: replicas of a stage are averaged;
    when a stage is missing there, its newest checkpoint), or a checkpoint: a folder or s3://BUCKET/PREFIX, which a
    swarm that runs goes on writing. Of a session each replica's running mean of its weights is taken
    (inner.average_share), which has a lower loss than its last weights while the learning rate is high; of checkpoints,
    --average N gives the same. With --gossip-rounds the replicas of a stage first meet in pairs without training,
    by the run's own outer step: each comes closer to their mean. --json: model, kind, run, round, samples, parameters,
    replicas, gossip_rounds, spread (of replicas around their mean before they are averaged, as a share of the weights).
    """
    with bar("reading") as moved:
        found = export_model(
            source, out, kind, lambda text: click.echo(text, err=True), moved, rounds, last, checkpoints, data
        )
    click.echo(json.dumps(found) if as_json else found["model"])


def export_run(folder: Path, out: Path, note: Note = lambda text: None) -> Path:
    """Export what is kept in the folder of a session; returns `out`."""
    return Path(str(export_model(str(folder), out, "auto", note)["model"]))


def export_model(
    source: str,
    out: Path,
    kind: str,
    note: Note,
    moved: Callable[[int, int], None] = lambda done, of: None,
    rounds: int = 0,
    last: bool = False,
    checkpoints: int = 1,
    data: Path | None = None,
) -> dict[str, object]:
    """Merge `source` into a model in `out`, after `rounds` of gossip among its replicas; returns what --json prints.

    Raises UsageError when there is nothing to merge, and what the merge raises.
    """
    from swarmnode.local.gathered import Weights, gather
    from swarmnode.local.mixing import mixed
    from swarmnode.model.export import write_model
    from swarmnode.model.gather import merged, spread

    found, folder = gather(source, kind, note, moved, Weights(last, checkpoints))
    found = mixed(found, rounds) if rounds else found
    about = {
        "kind": found.kind,
        "run_id": found.run_id,
        "run_name": found.manifest.name,
        "round": found.round,
        "samples": found.samples,
        "replicas": found.replicas,
        "gossip_rounds": rounds,
        "spread": spread(found) if found.replicas > 1 else 0.0,
    }
    tokenizer = tokenizer_of(data or folder, found.manifest.data.tokenizer)
    parameters = write_model(merged(found), found.manifest, out, tokenizer, about)
    return {"model": str(out), "parameters": parameters, **about}


def tokenizer_of(folder: Path | None, name: str) -> Path | None:
    """The tokenizer's file, None for "bytes": below the run's folder as its manifest names it, or beside the model when
    that was exported before. Whatever else lies there is not taken for one.

    Raises NotPermitted when there is no folder or a link leads out of it, DataError when it is no tokenizer.
    """
    from swarmnode.data.root import DataRoot
    from swarmnode.data.tokens import open_tokenizer

    if name == "bytes":
        return None
    root, kept = DataRoot(folder), "tokenizer.json"
    name = kept if not root.find(name).is_file() and root.find(kept).is_file() else name
    open_tokenizer(name, root)
    return root.find(name)
