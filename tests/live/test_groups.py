"""A real swarm whose stages meet as a whole and send sparse packets of D: it trains, and its replicas stay together."""

import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.swarm.harness import SwarmHarness, fleet_in, resting
from benchmarks.swarm.laws import read_log
from swarmnode.local.summary import count, totals
from swarmnode.manifest import PRESETS
from swarmnode.metrics import name

BOUND_S = 150.0


async def test_a_swarm_of_sparse_packets_trains_and_stays_together(tmp_path: Path) -> None:
    sparse = replace(PRESETS["tiny"].gossip, method="partial_average", codec="topk512", group=0)
    manifest = replace(PRESETS["tiny"], gossip=sparse)
    swarm = SwarmHarness(fleet_in(tmp_path, manifest, 4, command=resting, cache=tmp_path / "cache"), BOUND_S)
    seen: list[float] = []

    def enough() -> bool:
        facts = swarm.fleet.facts()
        loss = totals(facts).loss_train
        seen.extend([] if loss is None else [loss])
        return count(facts, name.EXCHANGES, outcome="paired") >= 24 and min(seen, default=9.0) < seen[0] - 0.5

    async with swarm.running():
        await swarm.until(enough, "24 outer steps with others, and half a nat learned")
    for child in swarm.fleet.nodes:
        rounds = [line["fields"] for line in read_log(child.plan.home) if line["event"] == "exchange.paired"]
        apart = [fields["apart"] for fields in rounds]
        learned = statistics.median(fields["delta_norm"] for fields in rounds)
        assert statistics.median(apart) < 2 * learned, (child.name, apart, learned)
