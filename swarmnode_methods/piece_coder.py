"""A packet of a gradient cut into pieces, each coded by itself, and the mean of one piece over all members.

    piece p   elements [64 floor(p B / n), 64 floor((p + 1) B / n)) of E, of B = ceil(E / 64) blocks and n pieces
    bytes     the codec's bytes of these elements, then, where slow weights heal, their fragment in bfloat16
    mean      w sum_j s_j C(D_j)  over the members j whose piece came, in the order given, w = whole / sum_j s_j n_j

Sums are taken on the CPU, each product rounded before it is added (Codec.add_up): whoever adds the same pieces gets the
same bits, and can say that a mean is false.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import digest64
from swarmnode.base.ports import Data, WireTensor
from swarmnode.base.wire_tensor import ReadyWatermark
from swarmnode.model.tensor import decode
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.compression.codec import BLOCK_ELEMENTS
from swarmnode_methods import fragment

PIECES_MAX = 64  # derived: as many owners in a round; a list of their digests is 1 KiB, and a call has 64 tensors
PIECE_ELEMENTS_MIN = 256  # guess: a shorter piece is less than the words about it
LENGTH_TOLERANCE = 1e-3  # derived: float32 sums of a million squares, in any order, are closer
FALSE_ERRORS = 1.5  # guess: a mean this many of the codec's own errors away from the sum is false on any device


def wire_length(squares: float) -> float:
    """The length behind a sum of squares, as float32: what a list of lengths carries."""
    return float(np.float32(math.sqrt(squares)))


@dataclass(frozen=True, slots=True)
class Summed:
    """The mean of a piece before coding, and what the sum was multiplied by."""

    mean: Tensor
    whole: float


class PieceCoder:
    """Cuts, codes and sums the pieces of one replica's packets of `elements`, of a stage of `parameters`."""

    def __init__(self, elements: int, parameters: int, codec: Codec, *, healing: bool) -> None:
        assert codec.tensors == 1, "a piece is one tensor"
        self._elements = elements
        self._parameters = parameters
        self._codec = codec
        self._healing = healing
        self.pieces = max(1, min(PIECES_MAX, elements // PIECE_ELEMENTS_MIN))

    def span(self, piece: int) -> tuple[int, int]:
        """[first, last) of the elements of a piece."""
        return self._cut(piece, self._elements)

    def _cut(self, piece: int, elements: int) -> tuple[int, int]:
        assert 0 <= piece < self.pieces, f"piece {piece} of {self.pieces}"
        blocks = -(-elements // BLOCK_ELEMENTS)
        first = piece * blocks // self.pieces * BLOCK_ELEMENTS
        last = (piece + 1) * blocks // self.pieces * BLOCK_ELEMENTS
        return first, min(last, elements)

    def _weights(self, piece: int) -> tuple[int, int]:
        """[first, last) of the slow weights of which a fragment travels with a piece."""
        return self._cut(piece, self._parameters)

    def _fragment_nbytes(self, piece: int, round_index: int) -> int:
        first, last = self._weights(piece)
        return fragment.nbytes(last - first, round_index) if self._healing else 0

    def nbytes(self, piece: int, round_index: int) -> int:
        """Most bytes of a piece."""
        first, last = self.span(piece)
        self._codec.at(round_index)
        return self._codec.nbytes(last - first) + self._fragment_nbytes(piece, round_index)

    def code(self, piece: int, round_index: int, values: Tensor, healed: bytes, seed: int) -> bytes:
        """The bytes of a piece: its `values` [last - first], and the fragment `healed` of its slow weights."""
        self._codec.at(round_index)
        (tensor,) = self._codec.encode(values, seed=seed)
        return bytes(tensor.data) + healed

    def fragment(self, piece: int, round_index: int, phi: Tensor) -> bytes:
        """The fragment of the slow weights `phi` [P] that travels with a piece; empty where none heals."""
        if not self._healing:
            return b""
        first, last = self._weights(piece)
        return bytes(fragment.fragment(phi[first:last], round_index).data)

    def check(self, piece: int, round_index: int, data: Data) -> None:
        """Raises RemoteFault unless `data` can be of this piece, finite."""
        first, last = self.span(piece)
        nbytes = memoryview(data).nbytes
        if not self._fragment_nbytes(piece, round_index) < nbytes <= self.nbytes(piece, round_index):
            raise RemoteFault(f"piece {piece} of {nbytes} bytes; at most {self.nbytes(piece, round_index)} are due")
        self._codec.check([self._tensor(piece, round_index, data)], last - first)
        if self._healing:
            first, last = self._weights(piece)
            fragment.check_fragment(self._healed(piece, round_index, data), last - first, round_index)

    def read(self, piece: int, round_index: int, data: Data) -> Tensor:
        """The elements of a checked piece, float32 on the CPU."""
        first, last = self.span(piece)
        self._codec.at(round_index)
        out = torch.empty(last - first)
        self._codec.read([self._tensor(piece, round_index, data)], 0, out)
        return out

    def _tensor(self, piece: int, round_index: int, data: Data) -> WireTensor:
        first, last = self.span(piece)
        view = memoryview(data)
        coded = view[: view.nbytes - self._fragment_nbytes(piece, round_index)]
        whole = ReadyWatermark(coded.nbytes)
        whole.reach(coded.nbytes)
        return self._codec.tensor(last - first, coded, whole)

    def _healed(self, piece: int, round_index: int, data: Data) -> WireTensor:
        first, last = self._weights(piece)
        view = memoryview(data)
        count = fragment.count(last - first, round_index)
        return WireTensor("bf16", (count,), bytes(view[view.nbytes - 2 * count :]))  # a copy, which is aligned

    def length(self, piece: int, round_index: int, data: Data) -> float:
        """The length of a checked piece as it is read."""
        values = self.read(piece, round_index, data).double()
        return wire_length(float(values @ values))

    def sum(
        self, piece: int, round_index: int, given: Sequence[tuple[Data, float, int, bool]], whole_targets: int
    ) -> Summed:
        """The mean of checked pieces `given` as (bytes, share, targets, whether it counts), for `whole_targets` targets
        of a step."""
        first, last = self.span(piece)
        counted = sum(share * targets for _, share, targets, counts in given if counts)
        whole = whole_targets / (counted or whole_targets)  # no target counts: the gradient is zero
        here = [(self._tensor(piece, round_index, data), share) for data, share, _, counts in given if counts]
        total = torch.empty(last - first)
        self._codec.at(round_index)
        self._codec.add_up(
            [[tensor] for tensor, _ in here], [share * whole for _, share in here], total, torch.empty(last - first)
        )
        return Summed(total, whole)

    def agreements(
        self, piece: int, round_index: int, given: Sequence[tuple[Data, float, int, bool]], summed: Summed
    ) -> list[float]:
        """The part of each of `given` in common with another that counts, on average, in squares of a usual length."""
        total = summed.mean.numpy()
        common = list[float]()
        squares = list[float]()
        for data, share, _, counts in given:
            values = self.read(piece, round_index, data).numpy() * np.float32(share * summed.whole)
            squares.append(float(np.dot(values, values)))
            common.append(float(np.dot(values, total)) - counts * squares[-1])
        usual = median_low([square for square in squares if square] or [1.0])
        others = [max(1, sum(one[3] for one in given) - one[3]) for one in given]
        return [part / (usual * count) for part, count in zip(common, others, strict=True)]

    def middle(self, piece: int, round_index: int, given: Sequence[Data]) -> bytes:
        """The median of the fragments of checked pieces, rounded to bfloat16; empty where none heals."""
        if not self._healing:
            return b""
        values = [decode(self._healed(piece, round_index, data)).float() for data in given]
        ordered = torch.stack(values).add(0.0).sort(dim=0).values  # no zero is negative: bits do not depend on order
        low = ordered[(len(values) - 1) // 2]
        high = ordered[len(values) // 2]
        middle = (low + 0.5 * (high - low)).to(torch.bfloat16)
        return middle.view(torch.uint8).numpy().tobytes()

    def mean(self, piece: int, round_index: int, summed: Summed, given: Sequence[Data]) -> bytes:
        """The bytes of a mean: the same, whoever codes them."""
        seed = digest64("mean", round_index, piece)
        return self.code(piece, round_index, summed.mean, self.middle(piece, round_index, given), seed)

    def is_false(self, piece: int, round_index: int, said: Data, right: bytes, summed: Summed) -> bool:
        """Whether `said`, checked, is not the coded mean of `summed`, whose bytes here are `right`."""
        if bytes(said) == right:
            return False
        error = float((self.read(piece, round_index, right) - summed.mean).norm())
        apart = float((self.read(piece, round_index, said) - summed.mean).norm())
        if apart > FALSE_ERRORS * error + LENGTH_TOLERANCE * float(summed.mean.norm()):
            return True
        return self._healing and bytes(self._healed(piece, round_index, said).data) != bytes(
            self._healed(piece, round_index, right).data
        )

    def pull(self, piece: int, round_index: int, phi: Tensor, data: Data) -> tuple[Tensor, Tensor]:
        """(the view of the fragment of `phi` [P] in this piece, the change that moves it to the mean's)."""
        first, last = self._weights(piece)
        mine = fragment.part(phi[first:last], round_index)
        return mine, fragment.pull(mine, [self._healed(piece, round_index, data)], counts=False)
