"""`swarmnode bench swarm|transport`: numbers of this machine."""

from __future__ import annotations

import click

from swarmnode.cli.duration import Duration


@click.group(short_help="measure this machine")
def command() -> None:
    """Measure this machine; each command prints what it measured and how."""


@command.command()
@click.option("--for", "for_s", type=Duration(), default="60s", show_default=True, help="Time of each measurement.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
def swarm(for_s: float, as_json: bool) -> int:
    """Tokens per second of a local swarm of 6 processes, against one plain PyTorch process that trains the same model
    with the same global batch on the same cores, and where the rest goes."""
    from swarmnode.bench import swarm as bench

    return bench.run(for_s=for_s, as_json=as_json)


@command.command()
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
def transport(as_json: bool) -> int:
    """Tensors of 1, 4, 16 and 64 MiB between two processes, against a bare libp2p stream of the same bytes."""
    from swarmnode.bench import transport as bench

    return bench.run(as_json=as_json)
