"""Attacks on gossip, with and without the guard: a quarter of the replicas lie, and know all that the others know.

`swarmnode bench attack` prints what each attack costs the honest replicas, in held-out nats over the clean run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarmnode.bench.gossip import spec
from swarmnode.bench.village import Size, Village, read_text
from swarmnode.errors import RemoteFault, UsageError
from swarmnode.gossip.compression import kernel
from swarmnode.gossip.outer import outer
from swarmnode.ports import Packet, WireTensor

LIARS = (2, 5)  # of 8
REPLAYED = 5  # rounds
ALIE_Z = 1.0  # standard deviations; guess, not the formula of arXiv 1902.06156
DRIP = 0.3  # of |D| a round, always the same way

PRESETS = {
    "quick": replace(Size(), batch=4, rounds=25),  # all attacks: 7 minutes on a busy core, measured
    "standard": Size(),
}


def _honest(village: AttackedVillage, of: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([of(i) for i in range(village.size.replicas) if i not in LIARS])


def _theta(village: AttackedVillage) -> Tensor:
    return _honest(village, lambda i: village.theta.detach()[i])


def _delta(village: AttackedVillage) -> Tensor:
    return _honest(village, lambda i: village.theta.detach()[i] - village.outers[i].phi)


Attack = Callable[["AttackedVillage", int, int], Tensor]
"""(village, liar, round) -> the weights the liar says it has."""


def sign_flip(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    phi = village.outers[liar].phi
    return phi - (village.theta.detach()[liar] - phi)


def scale(factor: float) -> Attack:
    def attack(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
        phi = village.outers[liar].phi
        return phi + factor * (village.theta.detach()[liar] - phi)

    return attack


def gaussian(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    phi = village.outers[liar].phi
    size = float(_delta(village).norm(dim=1).mean()) / math.sqrt(phi.numel())
    draw = torch.Generator().manual_seed(round_index * 1000 + liar)
    return phi + size * torch.randn(phi.shape, generator=draw)


def alie(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    """A Little Is Enough [arXiv 1902.06156]: the honest mean less as many deviations as hide."""
    theta = _theta(village)
    return theta.mean(0) - ALIE_Z * theta.std(0)


def inner_product(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    """Fall of Empires [arXiv 1903.03936]: the honest step, reversed and small enough to look harmless."""
    phi = _honest(village, lambda i: village.outers[i].phi)
    return phi.mean(0) - 0.5 * _delta(village).mean(0)


def zero(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    return village.outers[liar].phi.clone()


def replay(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    past = village.past.setdefault(liar, [])
    past.append(village.theta.detach()[liar].clone())
    del past[: -REPLAYED - 1]
    return past[0]


def mimic(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    """Always what replica 0 has, so that its text counts for three."""
    return village.theta.detach()[0].clone()


def slow_drip(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    theta = village.theta.detach()[liar]
    draw = torch.Generator().manual_seed(99)
    way = torch.randn(theta.shape, generator=draw)
    return theta + way * (DRIP * float((theta - village.outers[liar].phi).norm()) / float(way.norm()))


def not_finite(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    theta = village.theta.detach()[liar].clone()
    theta[:: 1 + round_index] = math.nan
    return theta


def honest(village: AttackedVillage, liar: int, round_index: int) -> Tensor:
    return village.theta.detach()[liar]


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
    "malformed": honest,  # and then bytes are changed
    "label flip": honest,  # of what it learned from reversed text
}


class AttackedVillage(Village):
    """A village in which LIARS send what `attack` says, and packets that are refused make a lone step."""

    def __init__(
        self,
        size: Size,
        seed: int,
        codec: str,
        text: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
        attack: str | None,
        *,
        guarded: bool,
    ) -> None:
        if attack is not None and attack not in ATTACKS:
            raise UsageError(f"attack {attack!r}; there are {', '.join(ATTACKS)}")
        found = replace(spec(codec), acceptance="guarded" if guarded else "all")
        super().__init__(size, seed, lambda theta: outer(found, theta), text)
        self.attack = attack
        self.past: dict[int, list[Tensor]] = {}
        self.refused_lies = self.lies = self.refused_honest = self.honest_packets = 0
        self._liar_of: dict[int, bool] = {}

    def _batch(self, replica: int) -> Tensor:
        tokens = super()._batch(replica)
        return 255 - tokens if self.attack == "label flip" and replica in LIARS else tokens

    def round(self, round_index: int) -> None:
        """One boundary, with lies if there is an attack."""
        self._liar_of.clear()
        self.meet(round_index, LIARS if self.attack else (), self._lie)

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
            said = mine.codec.encode(flat, reference=mine.phi, seed=mine.seed("lie"))
        self._liar_of[id(said)] = True
        return said

    def step(self, replica: int, round_index: int, packets: Sequence[Packet]) -> None:
        lies = [id(packet.tensors) in self._liar_of for packet in packets]
        try:
            verdicts = self.outers[replica].apply(round_index, 1.0, packets).verdicts
            keeps = [verdict.keep for verdict in verdicts]
        except RemoteFault:
            keeps = [0.0] * len(packets)
            super().step(replica, round_index, [])
        if replica in LIARS:
            return
        for lie, keep in zip(lies, keeps, strict=True):
            self.lies += lie
            self.honest_packets += not lie
            self.refused_lies += lie and keep == 0.0
            self.refused_honest += not lie and keep == 0.0


def measure(
    size: Size,
    attack: str | None,
    codec: str,
    text: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
    *,
    guarded: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """One training under one attack: nats of the honest replicas, and what was refused."""
    village = AttackedVillage(size, seed, codec, text, attack, guarded=guarded)
    for round_index in range(1, size.rounds + 1):
        village.learn(size.inner_steps)
        village.round(round_index)
    nats, _ = village.validate([i for i in range(size.replicas) if i not in LIARS])
    return {
        "nats": nats if math.isfinite(nats) else math.inf,
        "lies refused": village.refused_lies / max(village.lies, 1),
        "honest refused": village.refused_honest / max(village.honest_packets, 1),
    }


def run(
    preset: str = "quick",
    attacks: Sequence[str] = tuple(ATTACKS),
    codec: str = "noloco/modular4",
    undefended: bool = True,
    text: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"clean", "clean guarded", "attacks": [a row each]}: costs in nats over the clean run without a guard."""
    if preset not in PRESETS:
        raise UsageError(f"preset {preset!r}; there are {', '.join(PRESETS)}")
    kernel.build()
    torch.set_num_threads(1)
    size, data, rows = PRESETS[preset], read_text(text), []
    clean = measure(size, None, codec, data, guarded=False)["nats"]
    guarded_clean = measure(size, None, codec, data, guarded=True)
    say(f"clean: {clean:.4f} nats, guarded {guarded_clean['nats']:.4f}")
    for attack in attacks:
        with_guard = measure(size, attack, codec, data, guarded=True)
        without = measure(size, attack, codec, data, guarded=False)["nats"] if undefended else math.nan
        rows.append(
            {
                "attack": attack,
                "cost guarded": with_guard["nats"] - clean,
                "cost undefended": without - clean,
                "lies refused": with_guard["lies refused"],
                "honest refused": with_guard["honest refused"],
            }
        )
        say(f"{attack}: {rows[-1]['cost guarded']:+.4f} guarded, {rows[-1]['cost undefended']:+.4f} without")
    return {
        "clean nats": clean,
        "cost of the guard": guarded_clean["nats"] - clean,
        "honest refused without attack": guarded_clean["honest refused"],
        "codec": codec,
        "attacks": rows,
    }
