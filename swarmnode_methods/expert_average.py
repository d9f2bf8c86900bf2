"""Plain averaging where each replica trains some experts alone: sparse expert synchronization [SPES, arXiv 2602.11543].

With the members of a meeting that trained an element as its givers:

    theta <- mean over the givers of their theta;  elements that nobody there trained do not change

A packet holds what its sender trains (model/expert_share.py): the number of its block, then the codec's tensors of its
[G] elements. A replica that trains other experts takes a giver's. With a guard it takes them only so far as its own
experts could have moved in the rounds since it last got some of that block.

Every block should be trained by somebody. A replica begins with one by its peer id. Every PERIOD rounds it counts, by
what its partners said in the last REMEMBERED rounds (fewer with few partners: the dead are forgotten sooner), who
trains each block. If its own has two replicas more than another, it may move there, with a chance that brings about as
many as are needed; its experts' moments begin anew.
A peer that names a block and does not train it counts as one replica: a block is trained as long as such peers are
fewer than the replicas of a block. [measured, in process: 16 replicas, 8 blocks: none untrained, with one liar none,
with two the block they name in .66 of the rounds; looking at the last 16 rounds alone left one untrained in .36.]
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from swarmnode.ema import Ema, EmaStart
from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import codec
from swarmnode.gossip.outer.method import Outer, check_weight, one_by_one
from swarmnode.gossip.outer.noloco import block_elements
from swarmnode.gossip.robust import FIRST_CLIP, PacketMeasures, guard
from swarmnode.ids import digest64
from swarmnode.manifest import GossipSpec
from swarmnode.model.expert_share import ExpertLayout, FlatSegment, overlaps
from swarmnode.model.stage import StageReplica, Trainer
from swarmnode.ports import OuterReport, Packet, StreamingMessage, WireTensor

PERIOD = 16  # guess: rounds in which a replica hears of most others of a stage of some dozen
REMEMBERED_EACH = 8  # guess: rounds for each partner remembered; in a small stage all are met more often
REMEMBERED = 128  # at most; measured: of 32 replicas with 16 blocks some block has none in .08 of rounds; with 64: .56
HEARD_MAX = 4096  # guess: partners remembered; those met longest ago are forgotten first
USUAL_EMA = 0.8  # guess: of the distance that the experts trained here move in a round
FOREIGN_CLIP = 4.0  # guess: experts move at most so many times as far in a round as those trained here
BLOCK_DTYPE = "u16"  # of a block's number in a packet


@dataclass(frozen=True, slots=True)
class Giver:
    """A believed packet: its weight, the share of its distance from ours that counts, its block, the codec's tensors,
    and the share that counts of experts trained there and not here."""

    weight: float
    keep: float
    block: int
    tensors: Sequence[WireTensor]
    foreign: float


class ExpertAverage(Outer):
    """Averages `layout`'s shared elements among all members, and experts among those that train them. `block`: the
    experts trained here. Works in spans of what a replica trains, [G], so that it takes no copies of the stage."""

    name: ClassVar[str] = "average"
    slow_on_host: ClassVar[bool] = True
    group_size: ClassVar[int | None] = 2

    def __init__(self, theta: torch.Tensor, gossip: GossipSpec, layout: ExpertLayout, sender: str, block: int) -> None:
        super().__init__(theta, codec(gossip.codec), 0.0)
        self.sender, self.guard = sender, guard(gossip.acceptance)
        self.block = block
        self._layout = layout
        self._heard: OrderedDict[str, tuple[int, int]] = OrderedDict()  # by partner its block, and in which round
        self._rounds = 0  # with partners, since the last look
        self._got: dict[int, int] = {}  # by block, the last round in which its experts came
        self._since: int | None = None  # the last round before these weights came here
        self._usual = Ema(USUAL_EMA, EmaStart.MEAN)  # distance that the experts trained here move in a round
        slow = self.phi.device
        self._ours = torch.empty(layout.count, dtype=theta.dtype, device=slow)  # theta at the boundary
        size = min(layout.count, block_elements(self))
        self._spans = [(start, min(start + size, layout.count)) for start in range(0, layout.count, size)]
        self._scratch = [torch.empty(size, dtype=theta.dtype, device=slow) for _ in range(3)]

    @property
    def message_nbytes(self) -> int:
        return 2 + self.codec.nbytes(self._layout.count)

    def nbytes_of(self, round_index: int) -> int:
        self.codec.at(round_index)
        return 2 + self.codec.least_nbytes(self._layout.count)

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        self.round = round_index
        if self._since is None:
            self._since = round_index - 1
        self._get(self.theta, self._trained, 0, self._ours)
        number = np.array([self.block], "<u2")
        message = StreamingMessage([WireTensor(BLOCK_DTYPE, (1,), number.view(np.uint8).data)])
        return one_by_one(message, self.codec.draft(self._ours, seed=self.seed("theta")))

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
        own = gap = weights = 0.0
        for start, end in self._spans:
            if (count := min(end, both) - start) <= 0:
                break
            self.codec.read(packet.tensors[1:], start, self._scratch[0][: end - start])  # in whole spans
            theirs, slow, delta = (scratch[:count] for scratch in self._scratch)
            self._get(self.phi, self._trained, start, slow)
            torch.sub(self._ours[start : start + count], slow, out=delta)
            theirs.sub_(self._ours[start : start + count])
            own += float(torch.dot(delta, delta))
            gap += float(torch.dot(theirs, theirs))
            weights += float(torch.dot(slow, slow))
        return PacketMeasures(math.sqrt(own) if judged_by_own else 0.0, math.sqrt(gap), math.sqrt(weights))

    def _outer_step(
        self, own_weight: float, packets: Sequence[Packet], taken: Sequence[tuple[Packet, float]]
    ) -> OuterReport:
        assert self.round is not None
        own = own_weight if taken else 1.0
        limit = self._foreign_limit() if self.guard is not None else math.inf
        givers = [
            Giver(packet.weight, keep, _block_of(packet), packet.tensors[1:], self._share_of_foreign(packet, limit))
            for packet, keep in taken
        ]
        foreign = {one.block: torch.empty_like(self._scratch[0]) for one in givers if one.block != self.block}
        squares = [self._step(start, end, own, givers, foreign) for start, end in self._spans]
        self._got |= dict.fromkeys(foreign, self.round)
        self._choose(self.round, {packet.sender: _block_of(packet) for packet, _ in taken})
        self.round, self.stepping = None, False
        delta_norm, step_norm = (math.sqrt(sum(column)) for column in zip(*squares, strict=True))
        return OuterReport(len(taken) + (own_weight > 0.0 or not taken), delta_norm, step_norm)

    def _step(
        self, start: int, end: int, own: float, givers: Sequence[Giver], foreign: dict[int, torch.Tensor]
    ) -> tuple[float, float]:
        """The outer step of elements [start, end) of what is trained here, and of the experts of others that lie there
        in their packets. `foreign`: room for these by block. Returns the squared norms of D and of the step."""
        count, cut = end - start, min(max(0, self._layout.shared_count - start), end - start)
        ours, (theirs, mean, slow) = self._ours[start:end], (scratch[:count] for scratch in self._scratch)
        torch.mul(ours, own, out=mean)
        weight_of = dict.fromkeys(foreign, 0.0) | {self.block: own}
        for room in foreign.values():
            room.zero_()
        for giver in givers:
            self.codec.read(giver.tensors, start, theirs)
            both = count if giver.block == self.block else cut
            torch.lerp(ours[:both], theirs[:both], giver.keep, out=theirs[:both])
            mean[:both].add_(theirs[:both], alpha=giver.weight)
            if both < count:
                self._get(self.theta, self._layout.experts[giver.block], start + cut, slow[cut:])
                torch.lerp(slow[cut:], theirs[cut:], giver.foreign, out=theirs[cut:])
                foreign[giver.block][cut:count].add_(theirs[cut:], alpha=giver.weight)
            weight_of[giver.block] += giver.weight
        mean[:cut].div_(own + sum(giver.weight for giver in givers))
        mean[cut:].copy_(ours[cut:]) if weight_of[self.block] == 0.0 else mean[cut:].div_(weight_of[self.block])
        self.stepping = True
        self._get(self.phi, self._trained, start, slow)
        delta = float(torch.sub(ours, slow, out=theirs).square_().sum())
        step = float(torch.sub(mean, slow, out=theirs).square_().sum())
        self._put(self.phi, self._trained, start, mean)
        mean.sub_(ours)
        for there, here in overlaps(self._trained, start, count):  # theta keeps its gain since the boundary
            self.theta[there].add_(mean[here].to(self.theta.device))
        for block, room in foreign.items():
            if cut < count and weight_of[block] > 0.0:
                room[cut:count].div_(weight_of[block])
                for flat in (self.phi, self.theta):
                    self._put(flat, self._layout.experts[block], start + cut, room[cut:count])
        return delta, step

    def _foreign_limit(self) -> float:
        """The distance that experts trained elsewhere may have moved in a round: by what those here moved in this one,
        or usually do; before they ever moved, by how long their weights are."""
        moved = weights = 0.0
        for start, end, cut in self._expert_spans():
            slow = self._scratch[0][: end - start]
            self._get(self.phi, self._trained, start, slow)
            moved += float((self._ours[start:end][cut:] - slow[cut:]).square_().sum())
            weights += float(slow[cut:].square().sum())
        if moved > 0.0:
            self._usual.add(math.sqrt(moved))
        usual = max(math.sqrt(moved), self._usual.value)
        return FOREIGN_CLIP * usual if usual > 0.0 else FIRST_CLIP * math.sqrt(weights)

    def _share_of_foreign(self, packet: Packet, limit: float) -> float:
        """The share of the distance from the experts held here to a packet's that is gone, if they are not trained
        here: up to `limit` for each round since they last came."""
        assert self.round is not None and self._since is not None
        block = _block_of(packet)
        if block == self.block or limit == math.inf:
            return 1.0
        square = 0.0
        for start, end, cut in self._expert_spans():
            theirs, held = (scratch[: end - start] for scratch in self._scratch[:2])
            self.codec.read(packet.tensors[1:], start, theirs)
            self._get(self.theta, self._layout.experts[block], start + cut, held[cut:])
            square += float((theirs[cut:] - held[cut:]).square_().sum())
        limit *= max(1, self.round - self._got.get(block, self._since))
        return limit / max(math.sqrt(square), limit) if square > 0.0 else 1.0

    def _expert_spans(self) -> Iterator[tuple[int, int, int]]:
        """(first, last, place of the first expert's element within) of the spans with experts."""
        for start, end in self._spans:
            if (cut := max(0, self._layout.shared_count - start)) < end - start:
                yield start, end, cut

    @property
    def _trained(self) -> Sequence[FlatSegment]:
        return self._layout.trained(self.block)

    def _get(self, flat: torch.Tensor, segments: Sequence[FlatSegment], start: int, out: torch.Tensor) -> None:
        """Elements from `start` on of `segments`, from `flat` [P]."""
        for there, here in overlaps(segments, start, len(out)):
            out[here].copy_(flat[there])

    def _put(self, flat: torch.Tensor, segments: Sequence[FlatSegment], start: int, values: torch.Tensor) -> None:
        """Write `values` where `_get` reads."""
        for there, here in overlaps(segments, start, len(values)):
            flat[there].copy_(values[here])

    def _choose(self, round_index: int, said: Mapping[str, int]) -> None:
        """Move to a block with fewer replicas, as far as known, if there is one: looked at every PERIOD rounds with
        partners. `said`: by the senders of this round's packets, the blocks they train."""
        for sender, block in said.items():
            self._heard[sender] = block, round_index
            self._heard.move_to_end(sender)
        kept = min(REMEMBERED, max(2 * PERIOD, REMEMBERED_EACH * (1 + len(self._heard))))
        while self._heard and (
            len(self._heard) > HEARD_MAX or next(iter(self._heard.values()))[1] <= round_index - kept
        ):
            self._heard.popitem(last=False)
        self._rounds += bool(said)
        if self._rounds < PERIOD:
            return
        self._rounds = 0
        of = Counter(block for block, _ in self._heard.values())
        here = 1 + of[self.block]
        least = min(of[block] for block in range(self._layout.blocks) if block != self.block)
        lot = digest64("experts move", self.sender, round_index)
        if here >= least + 2 and lot % here < max(1, (here - least) // 2):
            few = [block for block in range(self._layout.blocks) if block != self.block and of[block] == least]
            self._got[self.block] = round_index
            self.block = few[lot // HEARD_MAX % len(few)]

    @torch.no_grad()
    def reset(self, phi: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        super().reset(phi, momentum)
        self._got.clear()
        self._since = None


def _block_of(packet: Packet) -> int:
    """The block of a checked packet's sender."""
    return int(np.frombuffer(packet.tensors[0].data, "<u2")[0])


class ExpertTrainer(Trainer):
    """Trains the experts of `stage` that `shared` chose in the last round."""

    def __init__(self, stage: StageReplica, shared: ExpertAverage) -> None:
        super().__init__(stage)
        self._shared = shared

    def applied(self) -> None:
        if self._shared.block != self.stage.block:
            self.stage.train_experts(self._shared.block)


def trainer(stage: StageReplica, sender: str) -> tuple[ExpertAverage, ExpertTrainer]:
    """The outer side and the trainer of the replica `sender` of `stage`."""
    assert stage.layout is not None, "every replica trains all experts"
    shared = ExpertAverage(stage.theta.data, stage.manifest.gossip, stage.layout, sender, stage.block)
    return shared, ExpertTrainer(stage, shared)
