"""`swarmnode bench learning`: learning of live swarms, against plain PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.cli.output.findings import show

if TYPE_CHECKING:
    from swarmnode.manifest import Manifest


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--preset", type=click.Choice(("tiny", "demo", "small")), default="demo", show_default=True, help="Without RUN."
)
@click.option("--replicas", default="1,2,4", show_default=True, help="Of each stage, a swarm for each number.")
@click.option("--samples", type=click.IntRange(512), help="Of each swarm.  [default: 2500; with --thorough 7500]")
@click.option("--seeds", type=click.IntRange(1, 100), default=1, show_default=True, help="Seeds, from the manifest's.")
@click.option("--thorough", is_flag=True, help="All settings of plain PyTorch: about two hours the first time.")
@click.option("--plain-only", is_flag=True, help="No swarm: fill the journal.")
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of plain runs, which are measured once.  [default: ~/.cache/swarmnode/bench-learning.jsonl]",
)
@click.option("--fresh", is_flag=True, help="Repeat plain runs that the journal already has.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/learning"), show_default=True, help="Results."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    run: Path | None,
    preset: str,
    replicas: str,
    samples: int | None,
    seeds: int,
    thorough: bool,
    plain_only: bool,
    journal: Path | None,
    fresh: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Learning efficiency of live swarms per sample and per second, against the best plain PyTorch with AdamW and with
    Muon. RUN is a folder of `swarmnode init` or a signed manifest. About five minutes; plain runs are kept in a
    journal. Writes OUT/learning.json and OUT/learning.html (the curves)."""
    from swarmnode.bench.swarm import learning as bench
    from swarmnode.daemon.clock import SystemClock
    from swarmnode.manifest import PRESETS

    numbers = () if plain_only else bench.replicas_of(replicas)
    manifest, base = (PRESETS[preset], None) if run is None else _read(run)
    extent = dataclasses.replace(bench.THOROUGH_EXTENT if thorough else bench.FAST_EXTENT, seeds=seeds)
    if samples is not None:
        extent = dataclasses.replace(extent, samples=samples)
    found = bench.run(
        *(manifest, numbers, extent, SystemClock(), lambda line: click.echo(line, err=True)),
        base=base,
        journal=journal,
        fresh=fresh,
        out=out,
    )
    show(found if as_json else bench.shown(found), as_json)
    if not as_json:
        click.echo(f"page: {out / bench.PAGE}")


def _read(run: Path) -> tuple[Manifest, Path]:
    """The manifest of `run`, and the base of its relative paths."""
    from swarmnode.manifest import MANIFEST_FILE, SIGNED_FILE, read_manifest, read_signed

    if not run.is_dir():
        return read_signed(run)[1], run.parent
    if (run / MANIFEST_FILE).exists():
        return read_manifest(run / MANIFEST_FILE), run
    return read_signed(run / SIGNED_FILE)[1], run
