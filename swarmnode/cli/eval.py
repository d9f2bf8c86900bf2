"""`swarmnode eval SOURCE`: held-out loss of the merged model and of each replica."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from swarmnode.cli.export import AVERAGE, DATA, KIND, LAST
from swarmnode.cli.option.param import FOLDER
from swarmnode.cli.output.progress import bar
from swarmnode.user_folders import default_cache


@click.command(short_help="held-out loss of the merged model and of each replica")
@click.argument("source", metavar="SOURCE")
@KIND
@LAST
@AVERAGE
@click.option("--samples", type=click.IntRange(1, 1 << 20), help="Held-out samples.  [default: the manifest's]")
@DATA
@click.option("--cache", type=FOLDER, help="Folder of tokens.  [default: ~/.cache/swarmnode]")
@click.option("--all", "everything", is_flag=True, help="Also measure what [evaluation] of the manifest lists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
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
    from swarmnode.local.evaluation import evaluate
    from swarmnode.local.model_source import WeightChoice, facts, gather
    from swarmnode.recovery.archive import Scores

    with bar("reading") as moved:
        weights = WeightChoice(last, checkpoints)
        model, folder = gather(source, kind, lambda text: click.echo(text, err=True), moved, weights)
    lists_of = Path(source).expanduser() if everything else None
    report = evaluate(model, data or folder, cache or default_cache(), samples, lists_of)
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
