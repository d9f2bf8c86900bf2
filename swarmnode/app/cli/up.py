"""`swarmnode up [RUN]`: run a whole swarm on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from swarmnode.app.cli.option.param import CACHE, DURATION, FOLDER, LISTEN, STAGES_MAX, TRACK
from swarmnode.app.cli.output.console import paper

NODES_MAX = 256
COUNT = click.IntRange(min=1)


@click.command(short_help="start a whole swarm on this machine and train")
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--nodes", type=click.IntRange(1, NODES_MAX), default=6, help="Processes that train.")
@click.option("--stages", type=click.IntRange(1, STAGES_MAX), help="Stages of the model.  [default: the manifest's]")
@click.option("--for", "for_s", type=DURATION, help="Stop so long after all nodes are ready: 90s, 10m.")
@click.option("--rounds", type=COUNT, help="Stop when this round is reached.")
@click.option("--samples", type=COUNT, help="Stop when the run has trained so many samples.")
@click.option(
    "--kill",
    "kill_every_s",
    type=DURATION,
    metavar="EVERY",
    help="kill -9 a random node at this interval; a new one joins in its place. The last replica of a stage is spared.",
)
@click.option(
    "--dashboard/--no-dashboard",
    default=True,
    help="Show the run on a page at 127.0.0.1:7070, or at another free port if that is taken.",
)
@click.option(
    "--listen",
    type=LISTEN,
    help="Let other machines join, too, at this address: /ip4/0.0.0.0/tcp/4001. Prints the line for them.  [default: "
    "only this machine]",
)
@click.option(
    "--resume",
    metavar="URL",
    help="Resume from the newest checkpoint there: an earlier session's folder, a folder of checkpoints, s3://BUCKET/PREFIX."
    " Without RUN it is the same run; any --nodes and --stages will do.",
)
@click.option(
    "--checkpoints",
    default="",
    show_default=False,
    metavar="URL",
    help="Where to save checkpoints.  [default: in the session's folder]",
)
@click.option("--use-bucket", is_flag=True, help="Save in the manifest's bucket, with this user's keys.")
@click.option(
    "--data-root", type=FOLDER, help="Folder of the run's data set or tokenizer.  [default: RUN, if that is a folder]"
)
@click.option("--out", type=FOLDER, help="Folder of the exported model.  [default: model, in the session's folder]")
@CACHE
@TRACK
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout; progress goes to stderr.")
def command(run: Path | None, listen: str | None, as_json: bool, **options: Any) -> int:
    """Start a bootstrap and --nodes node processes of RUN on this machine, watch them train, stop, export the model.

    RUN is a folder made by `swarmnode init`, or a signed manifest; without it the demo's manifest is used in a new
    folder below runs/. Without --for, --rounds or --samples it trains until Ctrl-C, which ends everything in order; a
    second Ctrl-C kills everything at once.

    \b
    --json ends with: run, nodes, wall_s, samples, tokens, tokens_per_s, loss_validation_first,
    loss_validation_last, loss_train_last (nats per token), rounds, exchanges {paired, lone: outer steps
    of replicas, each partner counts its own}, microbatches {done, lost, retried, duplicate},
    staleness (gradients by how many inner steps old they were),
    samples_duplicate (of blocks two feeders finished), recoveries,
    bytes {pipeline, gossip, state, control: sent}, killed, stopped, exit_reasons by node, folder, model,
    failure, checkpoint (where it was saved last).
    """
    from rich.console import Console

    from swarmnode.app import api
    from swarmnode.app.local.swarm_view import PlainScreen, conclusion, screen_for

    screen = PlainScreen(sys.stderr) if as_json else screen_for(Console(), sys.stdout)
    if listen is not None:
        options |= {"listen": listen, "line_for_others": line_for_others}
    summary = api.up(run, screen=screen, **options)  # the options, by the names of its keywords
    if summary.failure:
        click.echo(f"swarmnode: {summary.failure}", err=True)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
    else:
        paper().print(conclusion(summary))
    return summary.exit_code


def line_for_others(signed: Path, home: Path) -> str:
    """The line with which other machines join the run `signed`, whose bootstrap is in `home`."""
    from swarmnode.app.cli.invite import EXPIRES_S, of_run
    from swarmnode.run.admission.invite import encode

    return f"other machines join with: swarmnode join {encode(of_run(signed, (), home, EXPIRES_S, 0))}"
