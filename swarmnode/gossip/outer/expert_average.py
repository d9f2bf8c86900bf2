"""Plain averaging where each replica trains some experts alone: sparse expert synchronization [SPES, arXiv 2602.11543].

With the members of a meeting that trained an element as its givers:

    theta <- mean over the givers of their theta;  elements that nobody there trained do not change

A packet holds what its sender trains (model/expert_share.py): the number of its block, then the codec's tensors of its
[G] elements. A replica that trains other experts takes a giver's. With a guard it takes them only so far as its own
experts could have moved in the rounds since it last got some of that block.

Every block should be trained by somebody. A replica begins with one by its peer id. Every PERIOD rounds it looks which
blocks its partners had. If some had none and its own had another replica, it moves there with even chance: its experts'
moments begin anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import codec
from swarmnode.gossip.outer.method import Outer, check_weight
from swarmnode.gossip.robust import PacketMeasures, guard
from swarmnode.ids import digest64
from swarmnode.manifest import GossipSpec
from swarmnode.model.expert_share import ExpertLayout
from swarmnode.ports import OuterReport, Packet, StreamingMessage, WireTensor

PERIOD = 16  # guess: rounds in which a replica hears of most others of a stage of some dozen
FOREIGN_CLIP = 4.0  # guess: experts move at most so many times as far in a round as those trained here
BLOCK_DTYPE = "u16"  # of a block's number in a packet


class ExpertAverage(Outer):
    """Averages `layout`'s shared elements among all members, and experts among those that train them. `block`: the
    experts trained here."""

    name: ClassVar[str] = "average"
    slow_on_host: ClassVar[bool] = True
    group_size: ClassVar[int | None] = 2

    def __init__(self, theta: torch.Tensor, gossip: GossipSpec, layout: ExpertLayout, sender: str) -> None:
        super().__init__(theta, codec(gossip.codec), 0.0)
        self.sender, self.guard = sender, guard(gossip.acceptance)
        self.block = digest64("experts", sender) % layout.blocks
        self._layout = layout
        self._heard: Counter[int] = Counter()  # blocks of partners since the last look
        self._rounds = 0  # since then
        self._got: dict[int, int] = {}  # by block, the last round in which its experts came
        slow = self.phi.device
        self._ours = torch.empty(layout.count, dtype=theta.dtype, device=slow)  # theta at the boundary
        self._theirs = torch.empty_like(self._ours)

    @property
    def message_nbytes(self) -> int:
        return 2 + self.codec.nbytes(self._layout.count)

    def nbytes_of(self, round_index: int) -> int:
        self.codec.at(round_index)
        return 2 + self.codec.least_nbytes(self._layout.count)

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        self.round = round_index
        for segment in self._layout.trained(self.block):
            self._ours[segment.there].copy_(self.theta[segment.first : segment.last])
        number = np.array([self.block], "<u2")
        drafted = self.codec.draft(self._ours, seed=self.seed("theta"))
        tensors = [WireTensor(BLOCK_DTYPE, (1,), number.view(np.uint8).data), *drafted.tensors]

        def write() -> None:
            drafted.finish()

        return StreamingMessage(tensors, write)

    def check(self, packet: Packet) -> None:
        check_weight(packet.weight)
        if not packet.tensors:
            raise RemoteFault("packet without tensors; expected the number of a block and weights")
        number, *weights = packet.tensors
        if (number.dtype, tuple(number.shape), number.codec or "raw", number.nbytes) != (BLOCK_DTYPE, (1,), "raw", 2):
            raise RemoteFault(f"packet begins with {number.dtype}{list(number.shape)}; expected the number of a block")
        if (block := _block_of(packet)) >= self._layout.blocks:
            raise RemoteFault(f"packet of experts' block {block}; there are {self._layout.blocks}")
        self.codec.check(weights, self._layout.count)

    @torch.no_grad()
    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> PacketMeasures:
        """Over the elements that both train: experts of others are nobody else's to judge."""
        both = self._layout.count if _block_of(packet) == self.block else self._layout.shared_count
        self.codec.read(packet.tensors[1:], 0, self._theirs)
        ours, slow = self._ours[:both], self._slow()[:both]
        gap, weights = self._theirs[:both] - ours, float(torch.linalg.vector_norm(slow))
        apart = float(torch.linalg.vector_norm(gap))
        if not judged_by_own:
            return PacketMeasures(0.0, apart, weights)
        own = ours - slow
        return PacketMeasures(float(torch.linalg.vector_norm(own)), apart, weights, gap_dot=float(torch.dot(own, gap)))

    def _slow(self) -> torch.Tensor:
        """The slow weights [G] of what is trained here, a copy."""
        found = torch.empty_like(self._ours)
        for segment in self._layout.trained(self.block):
            found[segment.there] = self.phi[segment.first : segment.last]
        return found

    @torch.no_grad()
    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        assert self.round == round_index, f"outer step of round {round_index}; the boundary marked is {self.round}"
        verdicts = [self._judge(own_weight, packet) for packet in packets]
        taken = [(packet, verdict.keep) for packet, verdict in zip(packets, verdicts, strict=True) if verdict.keep > 0]
        if not taken and not lone:
            return OuterReport(0, 0.0, 0.0, verdicts, None)
        slow = self._slow()
        delta_norm = float(torch.linalg.vector_norm(self._ours - slow))
        cut = self._layout.shared_count
        moved = float(torch.linalg.vector_norm(self._ours[cut:] - slow[cut:]))
        shared, experts = self._means(own_weight if taken else 1.0, taken, moved)
        steps = [shared - self._ours[: len(shared)]]
        if self.block in experts:
            steps.append(experts[self.block] - self._ours[len(shared) :])
        step = torch.cat(steps)
        step_norm = float(torch.linalg.vector_norm(self._ours[: len(step)] + step - slow[: len(step)]))
        self.stepping = True
        for segment in self._layout.trained(self.block):
            if segment.there.stop <= len(step):  # theta keeps its gain since the boundary
                self.theta[segment.first : segment.last].add_(step[segment.there].to(self.theta.device))
                there = slice(segment.first, segment.last)
                self.phi[there] = self._ours[segment.there] + step[segment.there]
        for block, values in experts.items():
            for segment in self._layout.experts[block] if block != self.block else ():
                given = values[segment.at - len(shared) :][: segment.last - segment.first]
                self.theta[segment.first : segment.last].copy_(given)
                self.phi[segment.first : segment.last] = given
        self.round, self.stepping = None, False
        self._choose(round_index, [_block_of(packet) for packet, _ in taken if packet.weight > 0.0])
        return OuterReport(len(taken) + (own_weight > 0.0 or not taken), delta_norm, step_norm, verdicts, None)

    def _means(
        self, own_weight: float, taken: Sequence[tuple[Packet, float]], moved: float
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """(the mean of the shared elements, those of each block that somebody here trains). `moved`: how far the
        experts trained here moved in this round."""
        cut = self._layout.shared_count
        total: dict[int, float] = {}
        sums: dict[int, torch.Tensor] = {}
        shared, weight_of_all = torch.zeros_like(self._ours[:cut]), 0.0
        for packet, keep in [(None, 1.0), *taken]:
            weight = own_weight if packet is None else packet.weight
            block = self.block if packet is None else _block_of(packet)
            if weight == 0.0:
                continue
            given = self._ours
            if packet is not None:
                self.codec.read(packet.tensors[1:], 0, given := self._theirs)
                both = len(given) if block == self.block else cut
                torch.lerp(self._ours[:both], given[:both], keep, out=given[:both])
                if block != self.block:
                    self._clip_foreign(block, given[cut:], moved)
            shared.add_(given[:cut], alpha=weight)
            weight_of_all += weight
            sums.setdefault(block, torch.zeros_like(given[cut:])).add_(given[cut:], alpha=weight)
            total[block] = total.get(block, 0.0) + weight
        return shared.div_(weight_of_all), {block: some.div_(total[block]) for block, some in sums.items()}

    def _clip_foreign(self, block: int, given: torch.Tensor, moved: float) -> None:
        """Bring experts `given` of another block, in place, as near to those held here as they can have come."""
        assert self.round is not None
        rounds = max(1, self.round - self._got.get(block, self.round - PERIOD))
        self._got[block] = self.round
        if self.guard is None or moved == 0.0:
            return
        held, cut = torch.empty_like(given), self._layout.shared_count
        for segment in self._layout.experts[block]:
            held[segment.at - cut :][: segment.last - segment.first] = self.theta[segment.first : segment.last]
        gap = float(torch.linalg.vector_norm(given - held))
        if (limit := FOREIGN_CLIP * moved * rounds) < gap:
            torch.lerp(held, given, limit / gap, out=given)

    def _tried(self, packet: Packet, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("gossip.acceptance guarded does not go with training.experts_trained")

    def _choose(self, round_index: int, blocks: Sequence[int]) -> None:
        """Move to a block that no partner trains, every PERIOD rounds with partners."""
        self._heard.update(blocks)
        self._rounds += bool(blocks)
        if self._rounds < PERIOD:
            return
        missing = [block for block in range(self._layout.blocks) if block != self.block and not self._heard[block]]
        lot = digest64("experts move", self.sender, round_index)
        if missing and self._heard[self.block] and lot % 2:
            self.block = missing[lot // 2 % len(missing)]
        self._heard.clear()
        self._rounds = 0


def _block_of(packet: Packet) -> int:
    """The block of a checked packet's sender."""
    return int(np.frombuffer(packet.tensors[0].data, "<u2")[0])


__all__ = ["PERIOD", "ExpertAverage"]
