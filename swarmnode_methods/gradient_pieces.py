"""Rounds of `gradient` in which each member averages some pieces for all: a packet there, a packet back.

    draft    D cut into n pieces, C(D_p) each
    owner    M_p = w sum_j s_j C(D_j,p),  s_j by the lengths and targets of whole packets;  sends C(M_p)
    all      the inner step by C(M); the next packet begins with D - C(D), and D of the pieces that did not count
    owner    its next packet begins with (M_p - C(M_p)) / w too: error feedback of the second coding

The mean of a piece without a sender is zero in this step, and its gradient is in the next packets. A fragment of the
slow weights travels with each piece; its owner tells the members' middle (fragment.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import Data, DraftedPieces, GivenPiece, MeanPiece, OuterReport, Packet, Verdict
from swarmnode.base.work import TargetCount, Work
from swarmnode.train.gossip.compression import Codec
from swarmnode_methods.piece_coder import LENGTH_TOLERANCE, PieceCoder, Summed
from swarmnode_methods.share import shares_by_length


class MarkedGradient(Protocol):
    """The side of `gradient` (gradient.py) that pieces need: its boundary, its packet's content, its step."""

    phi: torch.Tensor
    codec: Codec
    round: int | None
    turns: int
    healing: bool
    stepping: bool
    norm: float
    work: Work

    @property
    def of(self) -> TargetsOf: ...
    @property
    def parameters(self) -> int: ...
    @property
    def heal_limit(self) -> float: ...
    def seed(self, what: str) -> int: ...
    def mark(self, round_index: int, *, whole: bool) -> torch.Tensor: ...
    def count(self, round_index: int) -> int: ...
    def room(self) -> torch.Tensor: ...
    def give(self, packed: torch.Tensor) -> None: ...
    def step(self, mean: torch.Tensor, round_index: int, report: OuterReport) -> None: ...
    def judge(self, own_weight: float, packet: Packet) -> Verdict: ...
    def inherit(self, packet: Packet, keep: float, usual: float) -> None: ...


class TargetsOf(Protocol):
    """The source of a gradient (gradient.py: GradientOf)."""

    targets_whole: TargetCount

    def give_work(self, work: Work) -> None: ...


class GradientPieces:
    """The pieces of one replica's `gradient`. Used on its compute thread alone."""

    def __init__(self, gradient: MarkedGradient) -> None:
        self._gradient = gradient
        self._own: list[Data] = []
        self._round = 0  # of these
        self._left: dict[int, torch.Tensor] = {}  # by piece that this replica averages: what its coding lost

    def coder(self, round_index: int) -> PieceCoder:
        """The coder of a round's pieces: rounds of some rows have fewer elements."""
        gradient = self._gradient
        return PieceCoder(gradient.count(round_index), gradient.parameters, gradient.codec, healing=gradient.healing)

    @torch.no_grad()
    def draft(self, round_index: int) -> DraftedPieces:
        """The gathered gradient in pieces."""
        gradient = self._gradient
        coder = self.coder(round_index)
        mine = gradient.mark(round_index, whole=gradient.turns == 1)
        self._left = {}
        self._round = round_index
        seed = gradient.seed("gradient")
        self._own = []
        for piece in range(coder.pieces):
            part = _part(coder, mine, piece)
            healed = coder.fragment(piece, round_index, gradient.phi)
            data = coder.code(piece, round_index, part.to("cpu", torch.float32), healed, seed)
            self._own.append(data)
            part.sub_(coder.read(piece, round_index, data).to(mine.device))
        gradient.give(mine)  # what the codec left
        lengths = [coder.length(piece, round_index, data) for piece, data in enumerate(self._own)]
        return DraftedPieces(self._own, lengths, gradient.work.targets)

    @torch.no_grad()
    def check(self, round_index: int, piece: int, data: Data, length: float | None) -> None:
        """Raises RemoteFault unless `data` can be this piece and, where given, has this length."""
        coder = self.coder(round_index)
        if not 0 <= piece < coder.pieces:
            raise RemoteFault(f"piece {piece}; there are {coder.pieces}")
        coder.check(piece, round_index, data)
        if length is None:
            return
        found = coder.length(piece, round_index, data)
        if not math.isclose(found, length, rel_tol=LENGTH_TOLERANCE, abs_tol=1e-30):
            raise RemoteFault(f"piece {piece} of length {found:.6g}, which its sender said is {length:.6g} long")

    @torch.no_grad()
    def mean(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece:
        """The mean of a piece; what its coding loses is kept until `apply`."""
        here = self._here(given)
        summed, coded = self._mean(round_index, piece, here)
        coder = self.coder(round_index)
        lost = summed.mean - coder.read(piece, round_index, coded)
        self._left[piece] = lost.div_(summed.whole)
        agreements = iter(coder.agreements(piece, round_index, here, summed))
        return MeanPiece(coded, [0.0 if one.data is None else next(agreements) for one in given])

    @torch.no_grad()
    def is_false(self, round_index: int, piece: int, given: Sequence[GivenPiece], said: Data) -> bool:
        """Whether `said` is not the mean of what is given."""
        summed, right = self._mean(round_index, piece, self._here(given))
        return self.coder(round_index).is_false(piece, round_index, said, right, summed)

    @staticmethod
    def _here(given: Sequence[GivenPiece]) -> list[tuple[Data, float, int, bool]]:
        """The pieces that are here: bytes, share, targets, and whether it counts. Shares are by the lengths of all."""
        shares = shares_by_length([one.length for one in given], [TargetCount(one.targets) for one in given])
        return [
            (one.data, share, one.targets, one.counts)
            for one, share in zip(given, shares, strict=True)
            if one.data is not None
        ]

    def _mean(
        self, round_index: int, piece: int, here: Sequence[tuple[Data, float, int, bool]]
    ) -> tuple[Summed, bytes]:
        coder = self.coder(round_index)
        summed = coder.sum(piece, round_index, here, self._gradient.of.targets_whole)
        return summed, coder.mean(piece, round_index, summed, [one[0] for one in here])

    @torch.no_grad()
    def apply(
        self,
        round_index: int,
        means: Sequence[Data | None],
        taken: Sequence[bool],
        final_deltas: Sequence[Packet],
    ) -> OuterReport:
        """The step by the `means` of all pieces. Ends the round."""
        gradient = self._gradient
        assert gradient.round == round_index, f"step of round {round_index}; the boundary marked is {gradient.round}"
        room = gradient.room()
        report = OuterReport(0, gradient.norm, 0.0)
        if any(mean is not None for mean in means):
            report.apart = self._heal(round_index, means)
            gradient.stepping = True
            self._read_all(means, room)
            gradient.step(room, round_index, report)
        counted = [ours and mean is not None for ours, mean in zip(taken, means, strict=True)]
        self._read_all([None if counts else own for own, counts in zip(self._own, counted, strict=True)], room)
        for piece, lost in self._left.items():
            if means[piece] is not None:
                _part(self.coder(round_index), room, piece).add_(lost.to(room.device))
        gradient.give(room)
        if 2 * sum(counted) < len(means):
            gradient.of.give_work(gradient.work)
        report.verdicts = self._inherit(final_deltas, report.delta_norm)
        gradient.stepping = False
        gradient.round = None
        return report

    def _read_all(self, pieces: Sequence[Data | None], out: torch.Tensor) -> None:
        """Set `out` to the checked `pieces` of this round; zeros where there is none."""
        out.zero_()
        coder = self.coder(self._round)
        for piece, data in enumerate(pieces):
            if data is not None:
                _part(coder, out, piece).copy_(coder.read(piece, self._round, data))

    def read_own(self, out: torch.Tensor) -> None:
        """Set `out` to the content of our own packet, of the marked round."""
        self._read_all(self._own, out)

    def _heal(self, round_index: int, means: Sequence[Data | None]) -> float | None:
        """Move this round's fragment of the slow weights to the members' middle, as far as two steps at most. Returns
        the estimated distance of all slow weights from there."""
        gradient = self._gradient
        if not gradient.healing:
            return None
        coder = self.coder(round_index)
        pulls = [
            coder.pull(piece, round_index, gradient.phi, mean) for piece, mean in enumerate(means) if mean is not None
        ]
        squares = sum(float(move.double().square().sum()) for _, move in pulls)
        seen = sum(len(move) for _, move in pulls)
        apart = math.sqrt(squares * gradient.parameters / seen)
        least = min(1.0, gradient.heal_limit / apart) if apart and gradient.heal_limit else float(not apart)
        for mine, move in pulls:
            mine.add_(move, alpha=least)
        return apart

    def _inherit(self, final_deltas: Sequence[Packet], usual: float) -> list[Verdict]:
        """Add what leaving replicas had gathered to the next packet."""
        gradient = self._gradient
        verdicts = [gradient.judge(1.0, packet) for packet in final_deltas]
        for packet, verdict in zip(final_deltas, verdicts, strict=True):
            if verdict.keep > 0.0:
                gradient.inherit(packet, verdict.keep, usual)
        return verdicts


def _part(coder: PieceCoder, flat: torch.Tensor, piece: int) -> torch.Tensor:
    """The view of a piece of a packet's content."""
    first, last = coder.span(piece)
    return flat[first:last]
