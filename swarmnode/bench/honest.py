"""What the guard takes from honest replicas: the share of their packets that is taken whole, where nobody lies.

`swarmnode bench attack --honest` prints it by inner optimizer, inner steps a round and replicas, early and late in
training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swarmnode.bench.attack import AttackedVillage, village_text
from swarmnode.bench.gossip import in_processes
from swarmnode.bench.inner import ADAMW, MUON
from swarmnode.bench.village import Size
from swarmnode.gossip.compression import kernel
from swarmnode.gossip.robust import GUARDED
from swarmnode.ports import OuterReport, Packet

RESULTS = "honest.json"
RATES = {ADAMW: 4e-3, MUON: 16e-3}
ROUNDS_LEAST = 30  # the course is known after ten or so, and half of them are late

SMALL = replace(Size(), width=32, ffn=88, context=32, batch=4, warmup=20, validation=32)
"""Noisier gradients than those of bench attack, at a tenth of the time: harder on the guard."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One training; all of it crosses to another process."""

    optimizer: str
    inner_steps: int
    replicas: int
    codec: str
    seed: int
    steps: int = 200  # at least
    size: Size = SMALL
    text: str | None = None


def settings(codec: str, seeds: int, text: str | None) -> list[Setting]:
    """Rounds of 1 to 50 inner steps among 8, and 2 to 16 replicas at rounds of 5, with AdamW and Muon."""
    cases = [(1, 8), (5, 8), (15, 8), (50, 8), (5, 2), (5, 4), (5, 16)]
    return [
        Setting(optimizer, steps, replicas, codec, seed, text=text)
        for seed in range(seeds)
        for optimizer in (ADAMW, MUON)
        for steps, replicas in cases
    ]


class HonestVillage(AttackedVillage):
    """Counts packets and those taken whole, in the first and in the second half of the rounds."""

    def __init__(self, setting: Setting) -> None:
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
        super().__init__(size, setting.seed, setting.codec, text, None, acceptance=GUARDED)
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


def measure(setting: Setting) -> dict[str, Any]:
    """One row: shares of honest packets taken whole, and views in which an honest replica was left out."""
    torch.set_num_threads(1)
    village = HonestVillage(setting)
    for round_index in range(1, village.size.rounds + 1):
        village.learn(setting.inner_steps)
        village.round(round_index)
    return {
        "optimizer": setting.optimizer,
        "steps a round": setting.inner_steps,
        "replicas": setting.replicas,
        "seed": setting.seed,
        "packets": sum(village.packets),
        "whole, early": village.whole[0] / max(1, village.packets[0]),
        "whole, late": village.whole[1] / max(1, village.packets[1]),
        "left out": village.left_out_honest,
    }


def run(
    codec: str = "average/modular4",
    seeds: int = 1,
    text: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    jobs: int = 1,
    out: Path | None = None,
    wanted: Sequence[Setting] | None = None,
) -> dict[str, Any]:
    """{"codec", "whole", "left out", "honest": [a row a setting]}. With `out`, also OUT/honest.json after each."""
    kernel.build()
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
