"""`swarmnode export SOURCE --out DIR` and `eval SOURCE`: a model of a run's saved state, and its held-out loss."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path

import click

from swarmnode.app.cli.option.param import CACHE, FOLDER
from swarmnode.app.cli.output.console import bar, note
from swarmnode.base.plugin import check_library
from swarmnode.base.user_folders import default_cache, default_home

KINDS = ("auto", "stages", "checkpoint")
KIND = click.option("--from", "kind", type=click.Choice(KINDS), default="auto", help="What to take.")
LAST = click.option("--last", is_flag=True, help="Use replicas' last weights, not their running mean.")
DATA = click.option(
    "--data",
    type=FOLDER,
    help="Folder of the run's data set or tokenizer.  [default: the run's folder; for a bucket: none]",
)
AVERAGE = click.option(
    "--average",
    "checkpoints",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=1,
    help="Use the mean of the newest N checkpoints.",
)


@click.command(short_help="make a Hugging Face model of a run's saved state")
@click.argument("source", metavar="SOURCE")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the model.")
@click.option(
    "--gguf", type=click.Path(dir_okay=False, path_type=Path), help="Write it as one file for llama.cpp, too."
)
@KIND
@LAST
@AVERAGE
@DATA
@click.option(
    "--warrant", type=click.Path(dir_okay=False, path_type=Path), help="Of an invite: the owner's permission to copy."
)
@click.option(
    "--home", type=FOLDER, help="Of an invite: this machine's own folder.  [default: ~/.local/share/swarmnode/archive]"
)
@click.option("--adapter", is_flag=True, help="Write the adapters alone, as peft loads them beside the base model.")
@click.option(
    "--push-to-hub",
    "hub",
    metavar="OWNER/NAME",
    help="Also push it as a revision of that model on the Hugging Face Hub, with its model card.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: str,
    out: Path | None,
    gguf: Path | None,
    kind: str,
    last: bool,
    checkpoints: int,
    data: Path | None,
    warrant: Path | None,
    home: Path | None,
    adapter: bool,
    hub: str | None,
    as_json: bool,
) -> None:
    """Merge SOURCE into one model that transformers' AutoModelForCausalLM and AutoTokenizer load. Prints its folder, or
    without --out the file of --gguf. Of a run with training.kind = "adapters" they are merged into the base model, or
    with --adapter written by themselves.

    SOURCE is the folder of a session or a run (files that its nodes saved when they left: replicas of a stage are
    averaged; if a stage is missing there, its newest checkpoint is used), or a checkpoint: a folder or
    s3://BUCKET/PREFIX, which a running swarm may still be writing. Of a session each replica's running mean of its
    weights is used (inner.average_share), which has a lower loss than its last weights while the learning rate is high;
    of checkpoints, --average N gives the same.

    SOURCE may also be an invite of a running swarm ("-" reads it from stdin): the slow weights of every stage are then
    copied from its nodes, compared, and exported at once. The run's owner decides who may, by a warrant for this
    machine (swarmnode archive RUN --allow PEER_ID). --data is then a folder with the run's tokenizer, if it has one.

    Where the coordinator of a run or `swarmnode archive` runs on this machine, SOURCE (the folder of the run, of the
    archive, or the home of that process) gives the model of now: it is copied at once unless the newest copy is a
    minute old. --from checkpoint takes the newest that is kept. stderr says which model was taken.

    --gguf FILE is float32 with the tokenizer in it, and needs the library gguf (pip install gguf); a model
    or a tokenizer that llama.cpp reads otherwise is refused with the reason. llama-quantize makes it smaller.

    --push-to-hub needs the library huggingface_hub and a token (`hf auth login`, or HF_TOKEN). A new repository is
    private; each push is one commit, tagged with its round. README.md in the folder is the model card.

    --json: model, gguf (if written), kind, run, round, samples, age_s, validation (null: nobody noted it), parameters,
    replicas, spread (of replicas around their mean before they are averaged, as a share of the weights).
    """
    from swarmnode.app.cli.option.invite import find_invite
    from swarmnode.app.local.evaluation import export_model

    if out is None and (gguf is None or adapter or hub is not None):
        wanted = "--adapter" if adapter else "--push-to-hub"
        raise click.UsageError("give --out or --gguf" if gguf is None else f"{wanted} needs --out")
    if adapter and gguf is not None:
        raise click.UsageError("--gguf is the whole model: leave out --adapter")
    if gguf is not None:
        check_library("gguf", "--gguf")
    if hub is not None:
        check_library("huggingface_hub", "--push-to-hub")
    with contextlib.ExitStack() as stack:
        if not Path(source).exists() and (invite := find_invite([source], None)) is not None:
            from swarmnode.app.daemon.launch import pull_checkpoint

            beside = (out or gguf or Path()).parent
            beside.mkdir(parents=True, exist_ok=True)
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".export-", dir=beside)))
            source = str(pull_checkpoint(invite, home or default_home("archive"), warrant, place, default_cache()))
            kind = "checkpoint"
        moved = stack.enter_context(bar("reading"))
        facts = export_model(source, out, kind, note, moved, last, checkpoints, data, adapter, gguf)
    if hub is not None and out is not None:
        from swarmnode.app.machine.hub import push_folder

        loss = facts["validation"]
        told = "" if loss is None else f", held-out loss {loss:.4f}"
        message = f"round {facts['round']}, {facts['samples']:,} samples{told}"
        facts["hub"] = push_folder(out, hub, f"round-{facts['round']}", message)
        note(f"pushed: {facts['hub']}")
    click.echo(json.dumps(facts) if as_json else facts["model"])


@click.command(short_help="held-out loss of the merged model and of each replica")
@click.argument("source", metavar="SOURCE")
@KIND
@LAST
@AVERAGE
@click.option("--samples", type=click.IntRange(1, 1 << 20), help="Held-out samples.  [default: the manifest's]")
@DATA
@CACHE
@click.option("--all", "everything", is_flag=True, help="Also measure what [evaluation] of the manifest lists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eval(  # noqa: A001  the verb's name
    source: str,
    kind: str,
    last: bool,
    checkpoints: int,
    samples: int | None,
    data: Path | None,
    cache: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Loss in nats per token on held-out text: of the mean of all replicas in SOURCE (as for `export`), and of each
    whole model made of single replicas, one per stage.

    --json: kind, run, round, samples, age_s, validation (as its archive noted it), tokens, merged {loss, perplexity},
    replicas [{replicas, loss}], spread (distance of replicas from their mean, as a share of the weights); with --all
    also scores [{name, metric, value}], continuations [{prompt, text}], failed [lines].
    """
    from swarmnode.app.local.evaluation import evaluate
    from swarmnode.app.local.model_source import WeightChoice, facts, gather
    from swarmnode.keep.recovery.archive import Scores

    with bar("reading") as moved:
        weights = WeightChoice(last, checkpoints)
        model, folder = gather(source, kind, note, moved, weights)
    report = evaluate(model, data or folder, cache or default_cache(), samples, lists=everything)
    if as_json:
        click.echo(json.dumps({**report.to_json(), **facts(model, time.time())}))
        return
    lists = report.lists or Scores()
    click.echo(f"{model.kind} of run {model.run_id[:16]}: round {model.round}, {model.samples} samples")
    click.echo(f"held out: {report.tokens} tokens")
    click.echo(f"merged   {report.merged:.4f} nats/token")
    for names, loss in report.replicas:
        click.echo(f"replica  {loss:.4f}  {names}")
    if report.replicas:
        click.echo(f"replicas are {100 * report.spread:.2f} % of the weights apart")
    for score in lists.scores:
        click.echo(f"{score.name}: {score.value:.4f} {score.metric}")
    for prompt, text in lists.continuations:
        click.echo(f"{prompt!r} goes on: {text!r}")
    for line in lists.failed:
        click.echo(f"not measured: {line}", err=True)
