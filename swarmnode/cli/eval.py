"""`swarmnode eval SOURCE`: held-out loss of the merged model and of each replica."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.cli.export import AVERAGE, DATA, GOSSIP, KIND, LAST
from swarmnode.cli.options import FOLDER
from swarmnode.cli.progress import bar
from swarmnode.place import default_cache


@click.command(short_help="held-out loss of the merged model and of each replica")
@click.argument("source", metavar="SOURCE")
@KIND
@GOSSIP
@LAST
@AVERAGE
@click.option("--samples", type=click.IntRange(1, 1 << 20), help="Held-out samples.  [default: the manifest's]")
@DATA
@click.option("--cache", type=FOLDER, help="Folder of tokens.  [default: ~/.cache/swarmnode]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    source: str,
    kind: str,
    rounds: int,
    last: bool,
    checkpoints: int,
    samples: int | None,
    data: Path | None,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Loss in nats per token on text that is never trained on: of the mean of all replicas in SOURCE (as `export` takes
    it), and of each whole model that single replicas make, one of each stage; after --gossip-rounds meetings of them.

    --json: kind, run, round, samples, tokens, merged {loss, perplexity}, replicas [{replicas, loss}], spread (distance
    of replicas from their mean, as a share of the weights).
    """
    from swarmnode.local.gathered import Weights, gather
    from swarmnode.local.held_out import evaluate

    with bar("reading") as moved:
        weights = Weights(last, checkpoints)
        found, folder = gather(source, kind, lambda text: click.echo(text, err=True), moved, weights)
    if rounds:
        from swarmnode.local.mixing import mixed

        found = mixed(found, rounds)
    report = evaluate(found, data or folder, cache or default_cache(), samples)
    if as_json:
        click.echo(json.dumps(report.to_json()))
        return
    click.echo(f"{found.kind} of run {found.run_id[:16]}: round {found.round}, {found.samples} samples")
    click.echo(f"held out: {report.tokens} tokens")
    click.echo(f"merged   {report.merged:.4f} nats/token")
    for names, loss in report.replicas:
        click.echo(f"replica  {loss:.4f}  {names}")
    if report.replicas:
        click.echo(f"replicas are {100 * report.spread:.2f} % of the weights apart")
