"""Attacks on gossip, with and without the guard. A quarter of the replicas lie, with full knowledge of the others.

`swarmnode bench attack` prints the cost of each attack to the honest replicas: held-out nats above the clean run.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.method.gossip import in_processes, measured_before, spec
from benchmarks.method.replica_batch import ReplicaBatch, ToySpec, read_text
from swarmnode.base.errors import UsageError
from swarmnode.base.ports import OuterReport, Packet, Verdict, WireTensor
from swarmnode.train.gossip import compression
from swarmnode.train.gossip.acceptance import PROVEN, Reputation
from swarmnode.train.gossip.outer import ALL, CLIPPED, Outer, outer
from swarmnode_methods.fragment import fragment
from swarmnode_methods.mean import DeltaMean

LIARS = (2, 5)  # of 8
REPLAYED = 5  # rounds
ALIE_Z = 1.0  # standard deviations; guess, not the formula of arXiv 1902.06156
DRIP = 0.3  # of |D| per round, always in the same direction


class AttackerView(Protocol):
    """State visible to an attacker: weights and outer optimizers of all replicas, and its own history."""

    size: ToySpec
    theta: Tensor
    outers: list[Outer]
    past: dict[int, list[Tensor]]


def _honest(view: AttackerView, of: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([of(i) for i in range(view.size.replicas) if i not in LIARS])


def _theta(view: AttackerView) -> Tensor:
    return _honest(view, lambda i: view.theta.detach()[i])


def _delta(view: AttackerView) -> Tensor:
    return _honest(view, lambda i: view.theta.detach()[i] - view.outers[i].phi)


Attack = Callable[[AttackerView, int, int], Tensor]
"""(view, liar, round) -> weights claimed by the liar."""


def sign_flip(view: AttackerView, liar: int, round_index: int) -> Tensor:
    phi = view.outers[liar].phi
    return phi - (view.theta.detach()[liar] - phi)


def scale(factor: float) -> Attack:
    def attack(view: AttackerView, liar: int, round_index: int) -> Tensor:
        phi = view.outers[liar].phi
        return phi + factor * (view.theta.detach()[liar] - phi)

    return attack


def gaussian(view: AttackerView, liar: int, round_index: int) -> Tensor:
    phi = view.outers[liar].phi
    size = float(_delta(view).norm(dim=1).mean()) / math.sqrt(phi.numel())
    draw = torch.Generator().manual_seed(round_index * 1000 + liar)
    return phi + size * torch.randn(phi.shape, generator=draw)


def alie(view: AttackerView, liar: int, round_index: int) -> Tensor:
    """A Little Is Enough [arXiv 1902.06156]: the honest mean minus as many deviations as remain unnoticed."""
    theta = _theta(view)
    return theta.mean(0) - ALIE_Z * theta.std(0)


def inner_product(view: AttackerView, liar: int, round_index: int) -> Tensor:
    """Fall of Empires [arXiv 1903.03936]: the honest step, reversed and small enough to look harmless."""
    phi = _honest(view, lambda i: view.outers[i].phi)
    return phi.mean(0) - 0.5 * _delta(view).mean(0)


def zero(view: AttackerView, liar: int, round_index: int) -> Tensor:
    return view.outers[liar].phi.clone()


def replay(view: AttackerView, liar: int, round_index: int) -> Tensor:
    past = view.past.setdefault(liar, [])
    past.append(view.theta.detach()[liar].clone())
    del past[: -REPLAYED - 1]
    return past[0]


def mimic(view: AttackerView, liar: int, round_index: int) -> Tensor:
    """The weights of replica 0, so that its text counts three times."""
    return view.theta.detach()[0].clone()


def slow_drip(view: AttackerView, liar: int, round_index: int) -> Tensor:
    theta = view.theta.detach()[liar]
    draw = torch.Generator().manual_seed(99)
    way = torch.randn(theta.shape, generator=draw)
    return theta + way * (DRIP * float((theta - view.outers[liar].phi).norm()) / float(way.norm()))


def not_finite(view: AttackerView, liar: int, round_index: int) -> Tensor:
    theta = view.theta.detach()[liar].clone()
    theta[:: 1 + round_index] = math.nan
    return theta


def honest(view: AttackerView, liar: int, round_index: int) -> Tensor:
    return view.theta.detach()[liar]


ATTACKS: dict[str, Attack] = {
    "sign flip": sign_flip,
    "scale 100": scale(100.0),
    "scale -100": scale(-100.0),
    "gaussian": gaussian,
    "alie": alie,
    "inner product": inner_product,
    "zero": zero,
    "replay": replay,
    "mimic": mimic,
    "slow drip": slow_drip,
    "nan": not_finite,
    "malformed": honest,  # then bytes are changed
    "label flip": honest,  # of weights trained on inverted text
}


RESULTS = "attack.json"
ROUND_S = 30.0  # guess: duration of a round, for the recovery of reputations
ABSENT = "absent"  # no attack, and LIARS never meet: the result of a guard that refuses all their packets

PRESETS = {
    "quick": replace(ToySpec(), batch=4, rounds=25),  # all attacks: 7 minutes on a busy core, measured
    "standard": ToySpec(),
}


class AttackedBatch(ReplicaBatch):
    """A batch of replicas in which LIARS send the packets of `attack`. After a refused packet the replica takes a lone
    step, unless a stand-in replaces the sender."""

    def __init__(
        self,
        size: ToySpec,
        seed: int,
        codec: str,
        text: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
        attack: str | None,
        *,
        acceptance: str,
        pairing: int = 0,
    ) -> None:
        if attack not in (None, ABSENT, *ATTACKS):
            raise UsageError(f"unknown attack {attack!r}: use one of {', '.join(ATTACKS)}")
        found = spec(codec, acceptance)
        super().__init__(size, seed, lambda theta: outer(found, theta), text, pairing=pairing)
        self.attack = attack
        self.liars = () if attack is None else LIARS
        self.past: dict[int, list[Tensor]] = {}
        self.refused_lies = self.lies = self.refused_honest = self.honest_packets = 0
        self.reputation = [Reputation() for _ in range(size.replicas)]
        self.left_out_honest = 0
        self._liar_of: dict[int, bool] = {}

    def _batch(self, replica: int) -> Tensor:
        tokens = super()._batch(replica)
        return 255 - tokens if self.attack == "label flip" and replica in self.liars else tokens

    def round(self, round_index: int) -> None:
        """Run one round, with lies if there is an attack."""
        self._liar_of.clear()
        self.meet(round_index, () if self.attack == ABSENT else self.liars, self._lie)

    def view(self, replica: int, round_index: int) -> Sequence[int]:
        """All replicas but those whose packets this replica, or most, refused lately. Liars meet any replica that meets
        them."""
        everybody = range(self.size.replicas)
        if self.attack == ABSENT:
            return [replica] if replica in self.liars else [i for i in everybody if i not in self.liars]
        if replica in self.liars:
            return everybody
        now_s = round_index * ROUND_S
        reputation = self.reputation[replica]
        names = self.names
        left_out = reputation.left_out(now_s)
        found = [i for i in everybody if i == replica or names[i] not in left_out]
        self.left_out_honest += not {*everybody} - {*self.liars} <= {*found}
        return found

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
        """Message of a liar that pretends to have the weights `flat`."""
        if not isinstance(mine, DeltaMean):
            return mine.codec.encode(flat, reference=mine.phi, seed=mine.seed("lie"))
        coder = compression.codec(mine.codec.name)  # without a residual: its own message is made already
        coder.at(round_index)
        said = coder.encode(flat - mine.phi, seed=mine.seed("lie"))
        return [*said, fragment(flat, round_index)] if mine.healing else said

    def _to_ask(self, me: int, round_index: int, circle: Collection[int]) -> list[int]:
        """No stand-ins for liars: they do not learn from the honest."""
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
        """Count and publish the verdicts of `replica` on `packets`."""
        for packet, sender, verdict in zip(packets, senders, verdicts, strict=True):
            keep = verdict.keep
            lie = id(packet.tensors) in self._liar_of
            self.lies += lie
            self.honest_packets += not lie
            self.refused_lies += lie and keep == 0.0
            self.refused_honest += not lie and keep == 0.0
            other = self.names[sender]
            now_s = round_index * ROUND_S
            if verdict.step in PROVEN:
                self.reputation[replica].record_broken_packet(other, now_s)
            elif keep > 0.0:
                self.reputation[replica].record_taken_packet(other)


@dataclass(frozen=True, slots=True)
class AttackRun:
    """Parameters of one training run under one attack; picklable, for worker processes."""

    size: ToySpec
    attack: str | None
    codec: str
    acceptance: str
    seed: int = 0
    text: str | None = None
    pairing: int = 0


def measure(run: AttackRun) -> dict[str, Any]:
    """Nats of the honest replicas, and shares of refused packets."""
    torch.set_num_threads(1)
    size = run.size
    text = _text(run.text)
    how = run.acceptance
    replica_batch = AttackedBatch(size, run.seed, run.codec, text, run.attack, acceptance=how, pairing=run.pairing)
    for round_index in range(1, size.rounds + 1):
        replica_batch.learn(size.inner_steps)
        replica_batch.round(round_index)
    nats, _ = replica_batch.validate([i for i in range(size.replicas) if i not in LIARS])
    return {
        "attack": run.attack,
        "acceptance": run.acceptance,
        "seed": run.seed,
        "pairing": run.pairing,
        "nats": nats if math.isfinite(nats) else math.inf,
        "lies refused": replica_batch.refused_lies / max(replica_batch.lies, 1),
        "honest refused": replica_batch.refused_honest / max(replica_batch.honest_packets, 1),
        "honest left out": replica_batch.left_out_honest / (size.rounds * size.replicas),
    }


_text = functools.cache(read_text)


def village_text(path: str | None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """`read_text`, cached once per process."""
    return _text(path)


def run(
    preset: str = "quick",
    attacks: Sequence[str] = tuple(ATTACKS),
    codec: str = "noloco/modular4",
    acceptances: Sequence[str] = (CLIPPED, ALL),
    seeds: int = 1,
    text: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    jobs: int = 1,
    out: Path | None = None,
    resume: bool = False,
    references: int = 1,
) -> dict[str, Any]:
    """{"reference": [...], "attacks": [a row each], "runs": [...]}: costs in nats, means and spread over seeds.

    A cost is relative to a run of the same seed without attack in which the liars are absent. No guard can do better,
    since the liars' text is lost either way. The pairing alone changes a run by about a hundredth of a nat, and all
    rows share their reference's luck; the reference is therefore the mean of `references` runs of the seed with
    different pairs. With `out`, also writes OUT/attack.json after each run. With `resume`, runs already there, of the
    same size, codec and text, are not repeated. Raises UsageError.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}: use one of {', '.join(PRESETS)}")
    if wrong := [attack for attack in attacks if attack not in ATTACKS]:
        raise UsageError(f"unknown attack {wrong[0]!r}: use one of {', '.join(ATTACKS)}")
    for acceptance in acceptances:
        spec(codec, acceptance)
    compression.build()
    size = PRESETS[preset]
    same = {"size": asdict(size), "codec": codec, "text": text}
    found = list(measured_before(out / RESULTS, **same).get("runs", [])) if resume and out is not None else []
    done = {(row["attack"], row["acceptance"], row["seed"], row.get("pairing", 0)) for row in found}
    wanted: list[tuple[str | None, str]] = [(ABSENT, ALL), (None, ALL)]
    wanted += [(None, acceptance) for acceptance in acceptances if acceptance != ALL]
    wanted += [(attack, acceptance) for attack in attacks for acceptance in acceptances]
    order = [(attack, acceptance, seed, 0) for seed in range(seeds) for attack, acceptance in wanted]
    order += [(ABSENT, ALL, seed, pairing) for seed in range(seeds) for pairing in range(1, references)]
    todo = [AttackRun(size, one[0], codec, one[1], one[2], text, one[3]) for one in order if one not in done]
    for row in in_processes(measure, todo, jobs):
        found.append(row)
        say(f"{row['attack'] or 'clean'}, {row['acceptance']}, seed {row['seed']}: {row['nats']:.4f} nats")
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / RESULTS).write_text(json.dumps({**same, "runs": found}, indent=1))
    return {"codec": codec, "seeds": seeds, **tables(found, attacks, acceptances), "runs": found}


def tables(runs: Sequence[dict[str, Any]], attacks: Sequence[str], acceptances: Sequence[str]) -> dict[str, Any]:
    """{"reference": [...], "attacks": [...]} of `runs`, over the seeds present on both sides of a difference."""
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
        if CLIPPED in acceptances:
            row["lies refused"] = share(attack, CLIPPED, "lies refused")
            row["honest refused"] = share(attack, CLIPPED, "honest refused")
        rows.append(row)
    return {"reference": references, "attacks": rows}
