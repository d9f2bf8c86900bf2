"""Eager updates: the others' packets may be a round late, the own one never is.

    phi_i <- phi_i + step( (D_i(t) + sum over j != i of C(D_j(t - 1))) / n )

[arXiv 2502.12996, eq. 4: overlapping communication with the whole next round.] An exchange then has a round's time, and
costs no waiting. Slow weights of members differ by what their packets of the last round differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.mean import DeltaMean, Share


class Eager(DeltaMean):
    """DiLoCo with everybody else's packets of the round before."""

    name: ClassVar[str] = "eager"

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float) -> None:
        super().__init__(theta, codec, alpha, beta)
        self._late: list[Share] = []

    def _shares(self, given: Sequence[Share]) -> list[Share]:
        late, self._late = self._late, [share for share in given if share.tensors is not self._own]
        members = [Share(1.0, self._own), *late]
        return [Share(1.0 / len(members), share.tensors, share.keep) for share in members]

    @torch.no_grad()
    def reset(self, phi: torch.Tensor, momentum: torch.Tensor) -> None:
        super().reset(phi, momentum)
        self._late = []
