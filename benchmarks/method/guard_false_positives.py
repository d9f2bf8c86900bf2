"""Cost of the guard without liars: the share of honest packets that it accepts whole.

`swarmnode bench attack --honest` prints it by inner optimizer, inner steps per round and number of replicas, early and
late in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.method.attack import AttackedBatch, village_text
from benchmarks.method.gossip import in_processes
from benchmarks.method.inner_optimizer import ADAMW, MUON
from benchmarks.method.replica_batch import ToySpec
from swarmnode.gossip import compression
from swarmnode.gossip.robust import CLIPPED
from swarmnode.ports import OuterReport, Packet

RESULTS = "honest.json"
RATES = {ADAMW: 4e-3, MUON: 16e-3}
ROUNDS_LEAST = 30  # the trend shows after about ten, and half of them are late

SMALL = replace(ToySpec(), width=32, ffn=88, context=32, batch=4, warmup=20, validation=32)
"""Noisier gradients than those of bench attack, at a tenth of the time: harder on the guard."""


@dataclass(frozen=True, slots=True)
class HonestRun:
    """Parameters of one training run; picklable, for worker processes."""

    optimizer: str
    inner_steps: int
    replicas: int
    codec: str
    seed: int
    steps: int = 200  # at least
    size: ToySpec = SMALL
    text: str | None = None


def settings(codec: str, seeds: int, text: str | None) -> list[HonestRun]:
    """Rounds of 1 to 50 inner steps among 8, and 2 to 16 replicas at rounds of 5, with AdamW and Muon."""
    cases = [(1, 8), (5, 8), (15, 8), (50, 8), (5, 2), (5, 4), (5, 16)]
    return [
        HonestRun(optimizer, steps, replicas, codec, seed, text=text)
        for seed in range(seeds)
        for optimizer in (ADAMW, MUON)
        for steps, replicas in cases
    ]


class HonestBatch(AttackedBatch):
    """Counts packets, and those accepted whole, in the first and in the second half of the rounds."""

    def __init__(self, setting: HonestRun) -> None:
        rounds = max(ROUNDS_LEAST, setting.steps // setting.inner_steps)
        size = replace(
            setting.size,
            replicas=setting.replicas,
            inner_steps=setting.inner_steps,
            rounds=rounds,
            optimizer=setting.optimizer,
            learning_rate=RATES[setting.optimizer],
            elsewhere=RATES[ADAMW],
        )
        text = village_text(setting.text)
        super().__init__(size, setting.seed, setting.codec, text, None, acceptance=CLIPPED)
        self.packets, self.whole = [0, 0], [0, 0]

    def step(
        self,
        replica: int,
        round_index: int,
        packets: Sequence[Packet],
        senders: Sequence[int],
        *,
        lone: bool = True,
    ) -> OuterReport:
        report = super().step(replica, round_index, packets, senders, lone=lone)
        late = 2 * round_index > self.size.rounds
        self.packets[late] += len(report.verdicts)
        self.whole[late] += sum(verdict.keep == 1.0 for verdict in report.verdicts)
        return report


def measure(setting: HonestRun) -> dict[str, Any]:
    """Run one row: share of honest packets accepted whole, and number of views that left out an honest replica."""
    torch.set_num_threads(1)
    replica_batch = HonestBatch(setting)
    for round_index in range(1, replica_batch.size.rounds + 1):
        replica_batch.learn(setting.inner_steps)
        replica_batch.round(round_index)
    return {
        "optimizer": setting.optimizer,
        "steps a round": setting.inner_steps,
        "replicas": setting.replicas,
        "seed": setting.seed,
        "packets": sum(replica_batch.packets),
        "whole, early": replica_batch.whole[0] / max(1, replica_batch.packets[0]),
        "whole, late": replica_batch.whole[1] / max(1, replica_batch.packets[1]),
        "left out": replica_batch.left_out_honest,
    }


def run(
    codec: str = "average/modular4",
    seeds: int = 1,
    text: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    jobs: int = 1,
    out: Path | None = None,
    wanted: Sequence[HonestRun] | None = None,
) -> dict[str, Any]:
    """{"codec", "whole", "left out", "honest": [a row a setting]}. With `out`, also OUT/honest.json after each."""
    compression.build()
    rows: list[dict[str, Any]] = []
    todo = settings(codec, seeds, text) if wanted is None else list(wanted)
    for row in in_processes(measure, todo, jobs):
        rows.append(row)
        say(f"{row['optimizer']}, {row['steps a round']} steps, {row['replicas']} replicas: {row['whole, late']:.4f}")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            given = [asdict(setting) for setting in todo[: len(rows)]]
            (out / RESULTS).write_text(json.dumps({"settings": given, "honest": rows}, indent=1))
    whole = sum(row["packets"] * (row["whole, early"] + row["whole, late"]) / 2 for row in rows)  # halves are alike
    return {
        "codec": codec,
        "whole": whole / max(1, sum(row["packets"] for row in rows)),
        "left out": sum(row["left out"] for row in rows),
        "honest": rows,
    }
