"""Attacks on gossip, with and without the guard: a quarter of the replicas lie, and know all that the others know.

`swarmnode bench attack` prints what each attack costs the honest replicas, in held-out nats over the clean run.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarmnode.bench.gossip import in_processes, measured_before, spec
from swarmnode.bench.lies import ATTACKS, LIARS
from swarmnode.bench.village import Size, Village, losses, read_text
from swarmnode.errors import UsageError
from swarmnode.gossip import compression
from swarmnode.gossip.compression import kernel
from swarmnode.gossip.distrust import PROVEN, Distrust
from swarmnode.gossip.outer import DeltaMean, Outer, outer
from swarmnode.gossip.outer.fragment import fragment
from swarmnode.gossip.robust import ALL, CLIPPED, GUARDED
from swarmnode.gossip.standing import Standings
from swarmnode.ids import PeerId
from swarmnode.ports import OuterReport, Packet, Verdict, WireTensor

RESULTS = "attack.json"
ROUND_S = 30.0  # guess: seconds a round takes where standings recover with time
ABSENT = "absent"  # no attack, and LIARS never meet anybody: what is left when a guard refuses all they say

PRESETS = {
    "quick": replace(Size(), batch=4, rounds=25),  # all attacks: 7 minutes on a busy core, measured
    "standard": Size(),
}


class AttackedVillage(Village):
    """A village in which LIARS send what `attack` says; a packet refused makes a lone step, unless another replica
    stands in for its sender."""

    def __init__(
        self,
        size: Size,
        seed: int,
        codec: str,
        text: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
        attack: str | None,
        *,
        acceptance: str,
        pairing: int = 0,
    ) -> None:
        if attack not in (None, ABSENT, *ATTACKS):
            raise UsageError(f"attack {attack!r}; there are {', '.join(ATTACKS)}")
        found = replace(spec(codec), acceptance=acceptance)
        super().__init__(size, seed, lambda theta: outer(found, theta), text, pairing=pairing)
        self.attack = attack
        self.liars = () if attack is None else LIARS
        for i, one in enumerate(self.outers):
            one.probe = functools.partial(self._change, i) if acceptance == GUARDED else None
        self.past: dict[int, list[Tensor]] = {}
        self.refused_lies = self.lies = self.refused_honest = self.honest_packets = 0
        self.standings = [Standings() for _ in range(size.replicas)]
        self.distrust = Distrust()  # what everybody heard
        self.met = [set[PeerId]() for _ in range(size.replicas)]  # whose word each replica hears
        self.left_out_honest = 0
        self._liar_of: dict[int, bool] = {}

    def _batch(self, replica: int) -> Tensor:
        tokens = super()._batch(replica)
        return 255 - tokens if self.attack == "label flip" and replica in self.liars else tokens

    def _change(self, replica: int, before: Tensor, after: Tensor) -> float:
        """What a node's own probe tells: nats per byte that the loss on this replica's text rises by."""
        draws = self._draws[replica].bit_generator
        state = draws.state  # so that whoever probes trains on the same text as who does not
        tokens = self._batch(replica).expand(2, -1, -1)
        draws.state = state
        with torch.no_grad():
            found = losses(self.size, torch.stack([before, after]), tokens)
        return float(found[1] - found[0])

    def round(self, round_index: int) -> None:
        """One boundary, with lies if there is an attack."""
        self._liar_of.clear()
        self.meet(round_index, () if self.attack == ABSENT else self.liars, self._lie)

    def view(self, replica: int, round_index: int) -> Sequence[int]:
        """All but those whose packets this replica, or most, refused lately; liars meet whoever meets them."""
        everybody = range(self.size.replicas)
        if self.attack == ABSENT:
            return [replica] if replica in self.liars else [i for i in everybody if i not in self.liars]
        if replica in self.liars:
            return everybody
        now_s = round_index * ROUND_S
        standings, names = self.standings[replica], self.names
        out = self.distrust.left_out({*names}, now_s, names[replica], self.met[replica])
        self.left_out_honest += any(names[i] in out for i in everybody if i not in self.liars)
        return [i for i in everybody if i == replica or (names[i] not in out and standings.meets(names[i], now_s)[0])]

    def _lie(self, round_index: int, liar: int, message: list[WireTensor]) -> list[WireTensor]:
        assert self.attack is not None
        if self.attack == "malformed":
            data = bytearray(message[0].data)
            draw = np.random.Generator(np.random.Philox(key=round_index))
            data[:] = draw.bytes(len(data)) if round_index % 2 else data[: len(data) // 2]
            said = [replace(message[0], data=bytes(data))]
        else:
            mine = self.outers[liar]
            flat = ATTACKS[self.attack](self, liar, round_index).contiguous()
            said = self._said(mine, flat, round_index)
        self._liar_of[id(said)] = True
        return said

    def _said(self, mine: Outer, flat: Tensor, round_index: int) -> list[WireTensor]:
        """The message of a liar that says it has the weights `flat`."""
        if not isinstance(mine, DeltaMean):
            return mine.codec.encode(flat, reference=mine.phi, seed=mine.seed("lie"))
        coder = compression.codec(mine.codec.name)  # without a residual: its own message is made already
        coder.at(round_index)
        said = coder.encode(flat - mine.phi, seed=mine.seed("lie"))
        return [*said, fragment(flat, round_index)] if mine.healing else said

    def against(self, peer: PeerId) -> int:
        return self.distrust.against(peer)

    def _to_ask(self, me: int, round_index: int, circle: Collection[int]) -> list[int]:
        """Liars leave it to others to learn from the honest."""
        return [] if me in self.liars else super()._to_ask(me, round_index, circle)

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
        if replica not in self.liars:
            self._judged(replica, round_index, packets, senders, report.verdicts)
        return report

    def _judged(
        self,
        replica: int,
        round_index: int,
        packets: Sequence[Packet],
        senders: Sequence[int],
        verdicts: Sequence[Verdict],
    ) -> None:
        """Count and tell what `replica` made of `packets`."""
        for packet, sender, verdict in zip(packets, senders, verdicts, strict=True):
            keep = verdict.keep
            lie = id(packet.tensors) in self._liar_of
            self.lies += lie
            self.honest_packets += not lie
            self.refused_lies += lie and keep == 0.0
            self.refused_honest += not lie and keep == 0.0
            me, other, now_s = self.names[replica], self.names[sender], round_index * ROUND_S
            self.distrust.heard(other, me, round_index, keep > 0.0, now_s, verdict.step)
            if self.attack == "slander":
                for liar in self.liars:
                    self.distrust.heard(me, self.names[liar], round_index, False, now_s, "misshapen")
            if verdict.step in PROVEN:
                self.standings[replica].refused(other, now_s)
            elif keep > 0.0:
                self.standings[replica].taken(other, now_s)
            if keep > 0.0:
                self.met[replica].add(other)


@dataclass(frozen=True, slots=True)
class Run:
    """One training under one attack; all of it crosses to another process."""

    size: Size
    attack: str | None
    codec: str
    acceptance: str
    seed: int = 0
    text: str | None = None
    pairing: int = 0


def measure(run: Run) -> dict[str, Any]:
    """Nats of the honest replicas, and what was refused."""
    torch.set_num_threads(1)
    size = run.size
    text, how = _text(run.text), run.acceptance
    village = AttackedVillage(size, run.seed, run.codec, text, run.attack, acceptance=how, pairing=run.pairing)
    for round_index in range(1, size.rounds + 1):
        village.learn(size.inner_steps)
        village.round(round_index)
    nats, _ = village.validate([i for i in range(size.replicas) if i not in LIARS])
    return {
        "attack": run.attack,
        "acceptance": run.acceptance,
        "seed": run.seed,
        "pairing": run.pairing,
        "nats": nats if math.isfinite(nats) else math.inf,
        "lies refused": village.refused_lies / max(village.lies, 1),
        "honest refused": village.refused_honest / max(village.honest_packets, 1),
        "honest left out": village.left_out_honest / (size.rounds * size.replicas),
    }


_text = functools.cache(read_text)


def village_text(path: str | None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """read_text, read once a process."""
    return _text(path)


def run(
    preset: str = "quick",
    attacks: Sequence[str] = tuple(ATTACKS),
    codec: str = "noloco/modular4",
    acceptances: Sequence[str] = (GUARDED, CLIPPED, ALL),
    seeds: int = 1,
    text: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    jobs: int = 1,
    out: Path | None = None,
    resume: bool = False,
    references: int = 1,
) -> dict[str, Any]:
    """{"reference": [...], "attacks": [a row each], "runs": [...]}: costs in nats, means and spread over seeds, over a
    run of the same seed without attack in which the liars are absent. A guard can do no better: their text is lost
    either way. Who meets whom is worth a hundredth of a nat in one run, and all rows share their reference's luck: it
    is the mean of `references` runs of the seed with other pairs. With `out`, also OUT/attack.json after each run; with
    `resume` what is there already, of the same size, codec and text, is not done again."""
    if preset not in PRESETS:
        raise UsageError(f"preset {preset!r}; there are {', '.join(PRESETS)}")
    if wrong := [attack for attack in attacks if attack not in ATTACKS]:
        raise UsageError(f"attack {wrong[0]!r}; there are {', '.join(ATTACKS)}")
    kernel.build()
    size = PRESETS[preset]
    same = {"size": asdict(size), "codec": codec, "text": text}
    found = list(measured_before(out / RESULTS, **same).get("runs", [])) if resume and out is not None else []
    done = {(row["attack"], row["acceptance"], row["seed"], row.get("pairing", 0)) for row in found}
    wanted: list[tuple[str | None, str]] = [(ABSENT, ALL), (None, ALL)]
    wanted += [(None, acceptance) for acceptance in acceptances if acceptance != ALL]
    wanted += [(attack, acceptance) for attack in attacks for acceptance in acceptances]
    order = [(attack, acceptance, seed, 0) for seed in range(seeds) for attack, acceptance in wanted]
    order += [(ABSENT, ALL, seed, pairing) for seed in range(seeds) for pairing in range(1, references)]
    todo = [Run(size, one[0], codec, one[1], one[2], text, one[3]) for one in order if one not in done]
    for row in in_processes(measure, todo, jobs):
        found.append(row)
        say(f"{row['attack'] or 'clean'}, {row['acceptance']}, seed {row['seed']}: {row['nats']:.4f} nats")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / RESULTS).write_text(json.dumps({**same, "runs": found}, indent=1))
    return {"codec": codec, "seeds": seeds, **tables(found, attacks, acceptances), "runs": found}


def tables(runs: Sequence[dict[str, Any]], attacks: Sequence[str], acceptances: Sequence[str]) -> dict[str, Any]:
    """{"reference": [...], "attacks": [...]} of `runs`, over the seeds that both sides of a difference have."""
    lives: dict[tuple[str | None, str, int], list[float]] = {}
    for life in runs:
        lives.setdefault((life["attack"], life["acceptance"], life["seed"]), []).append(life["nats"])
    nats = {one: statistics.fmean(found) for one, found in lives.items()}

    def over(attack: str | None, acceptance: str, base: str | None) -> list[float]:
        mine = [(seed, value) for (what, how, seed), value in nats.items() if (what, how) == (attack, acceptance)]
        return [value - nats[base, ALL, seed] for seed, value in mine if (base, ALL, seed) in nats]

    def mean(rows: Sequence[float]) -> float:
        return statistics.fmean(rows) if rows else math.nan

    def share(attack: str | None, acceptance: str, what: str) -> float:
        return mean([row[what] for row in runs if (row["attack"], row["acceptance"]) == (attack, acceptance)])

    references = [
        {"run": "liars absent", "nats": share(ABSENT, ALL, "nats"), "over believed": mean(over(ABSENT, ALL, None))},
        {"run": "all honest, believed", "nats": share(None, ALL, "nats"), "over believed": 0.0},
    ]
    for acceptance in acceptances:
        if acceptance != ALL:
            refused = share(None, acceptance, "honest refused")
            references.append(
                {
                    "run": f"all honest, {acceptance} ({refused:.1%} refused)",
                    "nats": share(None, acceptance, "nats"),
                    "over believed": mean(over(None, acceptance, None)),
                }
            )
    rows = []
    for attack in attacks:
        row: dict[str, Any] = {"attack": attack}
        for acceptance in acceptances:
            costs = over(attack, acceptance, ABSENT)
            row[f"cost, {acceptance}"] = mean(costs)
            row[f"spread, {acceptance}"] = statistics.stdev(costs) if len(costs) > 1 else math.nan
        if GUARDED in acceptances:
            row["lies refused"] = share(attack, GUARDED, "lies refused")
            row["honest refused"] = share(attack, GUARDED, "honest refused")
        rows.append(row)
    return {"reference": references, "attacks": rows}
