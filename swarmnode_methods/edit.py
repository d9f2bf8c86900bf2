"""EDiT's penalty: packets with large norms count less, outliers are dropped, and the mean is clipped.

    G_j = |C(D_j)| ;   dropped when (log G_j - mu) / sigma > Z, mu and sigma by EMA over what was taken
    w_j = exp(-G_j / mean G) / sum ;   D = sum w_j C(D_j) ;   D <- D min(1, CLIP / (|D| / mean G))

[arXiv 2412.07210, section 3.3; there norms are not divided by their mean, which ties the temperature to their size.]
Every member sees the same packets and so decides alike. If all are dropped the round changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.train.gossip.compression import Codec
from swarmnode_methods.mean import DeltaMean, WeightedPacket

Z = 3.0  # paper
EMA = 0.02  # paper
DEVIATION_LEAST = 0.2  # guess: of the logarithm
CLIP = 10.0  # paper, there of the norm itself
HISTORY_LEAST = 5  # guess: rounds before any packet is dropped


class EDiT(DeltaMean):
    """DiLoCo with penalised packets."""

    name: ClassVar[str] = "edit"

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float) -> None:
        super().__init__(theta, codec, alpha, beta)
        self._mu = 0.0
        self._variance = 0.0
        self._rounds = 0

    def _norm(self, share: WeightedPacket) -> float:
        squared = 0.0
        for start in range(0, self.parameters, self._block):
            theirs = self._theirs[: min(self._block, self.parameters - start)]
            self.codec.read(share.tensors, start, theirs)
            squared += torch.dot(theirs, theirs).item()
        return share.keep * math.sqrt(squared)

    def _shares(self, given: Sequence[WeightedPacket]) -> list[WeightedPacket]:
        norms = [max(self._norm(share), 1e-30) for share in given]
        kept = [(norm, share) for norm, share in zip(norms, given, strict=True) if self._usual(math.log(norm))]
        if not kept:
            return []
        self._remember([math.log(norm) for norm, _ in kept])
        mean = sum(norm for norm, _ in kept) / len(kept)
        raw = [share.weight * math.exp(-norm / mean) for norm, share in kept]
        loudest = sum(w / sum(raw) * norm for w, (norm, _) in zip(raw, kept, strict=True))  # at least |D|
        scale = min(1.0, CLIP * mean / loudest) / sum(raw)
        return [WeightedPacket(w * scale, share.tensors, share.keep) for w, (_, share) in zip(raw, kept, strict=True)]

    def _usual(self, value: float) -> bool:
        deviation = max(math.sqrt(self._variance), DEVIATION_LEAST)
        return self._rounds < HISTORY_LEAST or (value - self._mu) / deviation <= Z

    def _remember(self, values: Sequence[float]) -> None:
        self._rounds += 1
        for value in values:
            weight = max(EMA, 1.0 / (self._rounds * len(values)))
            moved = value - self._mu
            self._mu += weight * moved
            self._variance = (1.0 - weight) * (self._variance + weight * moved * moved)
