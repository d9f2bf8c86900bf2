"""PowerSGD [arXiv 1905.13727, algorithm 1]: the flat buffer as a nearly square matrix, sent as two thin factors.

    P = orthonormal(M Q') ;  Q = M^T P ;  send P and Q ;  decoded P Q^T      Q' the Q of the last message; residual as
                                                                             in delta.py

On the wire: P [rows, r] then Q [columns, r] in float32. 4 r (rows + columns) bytes: at a million parameters and r = 4,
0.032 bytes a parameter. The layers' own matrices would be better, but the flat buffer does not know them.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.model.tensor import MAGNITUDE_MAX, check_finite
from swarmnode.train.gossip.compression.codec import Bytes, Done
from swarmnode_methods.delta import DeltaCodec


class PowerSGD(DeltaCodec):
    """Rank 4 [guess]."""

    name = "powersgd"
    at_once = True
    feedback: ClassVar[bool] = True
    unit: ClassVar[int] = 1
    rank: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self._before: torch.Tensor | None = None

    @staticmethod
    def _shape(parameters: int) -> tuple[int, int]:
        rows = math.isqrt(parameters - 1) + 1 if parameters > 1 else 1
        return rows, -(-parameters // rows)

    def nbytes(self, parameters: int) -> int:
        return 4 * self.rank * sum(self._shape(parameters))

    def code(self, wire: Bytes, flat: torch.Tensor, seed: int, done: Done) -> None:
        rows, columns = self._shape(flat.numel())
        matrix = torch.zeros(rows * columns)
        matrix[: flat.numel()] = flat
        matrix = matrix.view(rows, columns)
        if self._before is None or len(self._before) != columns:
            self._before = torch.randn(columns, self.rank, generator=torch.Generator().manual_seed(seed >> 1))
        left = torch.linalg.qr(matrix @ self._before).Q
        if left.shape[1] < self.rank:  # a matrix smaller than the rank
            left = torch.cat([left, left.new_zeros(rows, self.rank - left.shape[1])], 1)
        self._before = matrix.T @ left
        right = self._before.clone()
        if float(right.norm()) == 0.0:
            self._before = None
        torch.cat([left.reshape(-1), right.view(-1)], out=torch.from_numpy(wire).view(torch.float32))
        done(wire.size)  # both factors need the whole matrix, so no byte is final before
        flat.sub_(self.uncode(wire, flat.numel(), 0, flat.numel()))

    def _factors(self, data: Bytes, parameters: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, _ = self._shape(parameters)
        both = torch.from_numpy(np.frombuffer(data.tobytes(), "<f4").copy()).view(-1, self.rank)
        return both[:rows], both[rows:]

    def inspect(self, data: Bytes, parameters: int) -> None:
        left, right = self._factors(data, parameters)
        check_finite(left, f"{self.name} packet, left factor")
        check_finite(right, f"{self.name} packet, right factor")
        if float(left.abs().max()) * float(right.abs().max()) * self.rank > MAGNITUDE_MAX:
            raise RemoteFault(f"{self.name} packet whose product is beyond {MAGNITUDE_MAX:g}")

    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        left, right = self._factors(data, parameters)
        columns = len(right)
        first = start // columns
        last = -(-end // columns)
        return (left[first:last] @ right.T).view(-1)[start - first * columns : end - first * columns]
