"""Cost of an exchange in a live swarm: bytes on the wire relative to the codec's formula, and device idleness.

Six node processes run three stages of two replicas. The bytes are those counted by the transport for rounds, including
headers and receipts, as logged by each round. A round's receipts follow it, so that they count in the next one; each
node's first round is left out. Compute idles during exchanges if the device works a smaller share of their time than of
the time between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swarmnode.bench.swarm import harness
from swarmnode.bench.swarm.harness import SwarmHarness
from swarmnode.bench.swarm.laws import read_log
from swarmnode.errors import LocalFault
from swarmnode.gossip.compression import KINDS
from swarmnode.gossip.outer import Outer, outer
from swarmnode.gossip.outer.desloc import DesLoc
from swarmnode.local.summary import count, totals
from swarmnode.manifest import PRESETS, Manifest, parse, template
from swarmnode.metrics import name
from swarmnode.model.section import section_sizes
from swarmnode.model.split import stages_of

NODES = 6
CODECS = tuple(kind.name for kind in KINDS)
METHODS = {"topk": "partial_average", "topk512": "partial_average", "topk64": "partial_average"}
"""Method for codecs of pseudo-gradients named without one; others use sparseloco."""

BYTES_TARGET = 0.02  # largest deviation from the formula
IDLE_TARGET = 0.05
EXCHANGE_BOUND_S = 10.0  # guess: per exchange, on a loaded machine with six in flight


def run(
    exchanges: int = 60,
    preset: str = "demo",
    codecs: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"swarms": [a row each], "target off", "target idle"}: a swarm for each of `codecs`, CODEC or METHOD/CODEC (none:
    the preset's own), over at least `exchanges` in pairs each."""
    manifest, rows = PRESETS[preset], []
    swarms = [manifest_of(manifest, which) for which in codecs] or [manifest]
    for each in swarms:
        with harness.swarm_of(each, NODES) as swarm:
            rows.append(report(each, asyncio.run(_measure(swarm, exchanges))))
        say(
            ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in rows[-1].items()
            )
        )
    return {"swarms": rows, "target off": BYTES_TARGET, "target idle": IDLE_TARGET}


def manifest_of(manifest: Manifest, which: str) -> Manifest:
    """`manifest` with CODEC or METHOD/CODEC. Raises ManifestError for what a manifest does not take."""
    method, _, name_of = which.rpartition("/")
    of_delta = any(kind.name == name_of and kind.of_delta for kind in KINDS)
    if not method:
        method = METHODS.get(name_of, "sparseloco") if of_delta else manifest.gossip.method
    group = 0 if method != manifest.gossip.method else manifest.gossip.group
    gossip = replace(manifest.gossip, method=method, codec=name_of, group=group)
    return parse(template(replace(manifest, gossip=gossip)), f"bench exchange {which}")


def report(manifest: Manifest, found: dict[str, Any]) -> dict[str, Any]:
    """A row of `run`: bytes sent and by the formula, the share of their time that the device works during exchanges and
    between them, how much less that is, and the first and the last loss; of {"paired": [(stage, fields of its event)],
    "lone": alike, "losses": [first and last of training, nats a token]}."""
    parts = stages_of(manifest)
    outers: dict[int, Outer] = {}
    for stage in {stage for stage, _ in found["paired"]}:
        flat = torch.zeros(parts[stage].parameters)
        outers[stage] = outer(manifest.gossip, flat)
        if isinstance(of_stage := outers[stage], DesLoc):
            of_stage.attend(flat, torch.zeros(section_sizes(manifest, parts[stage])["exp_avg_sq"]))
    formula = sum(outers[stage].nbytes_of(fields["round"]) for stage, fields in found["paired"])
    rounds = [fields for _, fields in found["paired"]]
    sent = sum(fields["sent_bytes"] for fields in rounds)
    share = {
        what: sum(fields[worked] for fields in rounds) / max(sum(fields[seconds] for fields in rounds), 1e-9)
        for what, worked, seconds in (("within", "worked_s", "seconds"), ("between", "between_worked_s", "between_s"))
    }
    return {
        "codec": f"{manifest.gossip.method}/{manifest.gossip.codec}",
        "pairs": len(rounds),
        "alone": len(found["lone"]),
        "sent MB": sent / 1e6,
        "formula": formula / 1e6,
        "off": sent / formula - 1.0,
        "works": share["within"],
        "between": share["between"],
        "idle": max(0.0, 1.0 - share["within"] / share["between"]),
        "loss": found["losses"][0],
        "last": found["losses"][1],
    }


async def _measure(swarm: SwarmHarness, exchanges: int) -> dict[str, Any]:
    """Input of `report`. All rounds of each node's log count, so that bytes and rounds are from the same ones."""
    fleet, losses = swarm.fleet, list[float]()

    def enough() -> bool:
        loss = totals(fleet.facts()).loss_train
        if loss is not None:
            losses.append(loss)
        return count(fleet.facts(), name.EXCHANGES, outcome="paired") >= exchanges + NODES

    swarm.bound_s += EXCHANGE_BOUND_S * exchanges
    async with swarm.running():
        await swarm.until(enough, f"{exchanges} exchanges")
        homes = [(child.stage, child.plan.home) for child in fleet.alive]
        read = [(stage, _events(home)[1:]) for stage, home in homes if stage is not None]
        found = [(stage, event, fields) for stage, events in read for event, fields in events]
    paired, lone = (
        [(stage, fields) for stage, event, fields in found if event == f"exchange.{outcome}"]
        for outcome in ("paired", "lone")
    )
    if not paired or not losses:
        raise LocalFault("no round in pairs in any log")
    return {"paired": paired, "lone": lone, "losses": [losses[0], losses[-1]]}


def _events(home: Path) -> list[tuple[str, dict[str, Any]]]:
    kinds = ("exchange.paired", "exchange.lone")
    return [(line["event"], line["fields"]) for line in read_log(home) if line["event"] in kinds]
