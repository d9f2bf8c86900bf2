"""The interface of outer optimizers: the messages at a round's boundary and the step made of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import digest64
from swarmnode.base.ports import (
    Data,
    DraftedPieces,
    GivenPiece,
    Guard,
    MeanPiece,
    OuterReport,
    Packet,
    PacketMeasures,
    StreamingMessage,
    Verdict,
    WireTensor,
)
from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.compression import Codec

WEIGHT_MAX = 1.0  # a newcomer has 0, all others 1


class PieceRounds(Protocol):
    """Rounds in which each member averages some pieces for all; see ports.StageRounds."""

    def draft(self, round_index: int) -> DraftedPieces: ...

    def check(self, round_index: int, piece: int, data: Data, length: float | None) -> None: ...

    def mean(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece: ...

    def is_false(self, round_index: int, piece: int, given: Sequence[GivenPiece], said: Data) -> bool: ...

    def apply(
        self, round_index: int, means: Sequence[Data | None], taken: Sequence[bool], final_deltas: Sequence[Packet]
    ) -> OuterReport: ...


class Outer(ABC):
    """The slow side of one replica: slow weights `phi` and `momentum`, flat like the fast weights `theta` [P]. With
    `alpha` 0 the momentum is not used and has shape [0].

    A round is `message` then `apply`, both on the compute thread; inner steps may move `theta` in between. `theta` is
    the replica's own live buffer, written in place; its storage must never be replaced.
    """

    name: ClassVar[str]
    """The manifest's name of the method."""

    slow_on_host: ClassVar[bool] = False
    """Whether slow weights, momentum and boundary lie in main memory where the fast weights lie on another device."""

    steps_early: ClassVar[bool] = False
    """Whether `draft` already moves the fast weights."""

    group_size: ClassVar[int | None]
    """Replicas that meet at a boundary, including this one; None: the whole stage."""

    averages_moments: ClassVar[bool] = False
    """Whether `attend` has an effect."""

    delayed = False
    """Whether the mean of a round is applied when the next step has been trained: fast weights look ahead of it."""

    healing = False
    """Whether each message carries a fragment of the slow weights, where it holds pseudo-gradients."""

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        """The method with a manifest's constants, over `theta` [P]. Raises ManifestError if they do not go together."""
        raise NotImplementedError(cls)

    def attend(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:  # noqa: B027  most have none
        """Average these moments [P] and [Q], too, from now on. They are live buffers written in place."""

    def delay(self) -> None:
        """Apply the mean of a round when the next step has been trained, from now on. Call it before anything else."""
        raise NotImplementedError(self.name)

    def attend_gradients(self, replica: Any) -> None:
        """Average the gradients of the TorchReplica `replica`, and take its inner steps, from now on."""
        raise NotImplementedError(self.name)

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float) -> None:
        """Begin with phi = theta and zero momentum."""
        assert theta.dim() == 1 and theta.is_contiguous() and theta.numel() > 0
        self.theta = theta.detach()  # shares memory, keeps no graph
        self.codec = codec
        self.remote = self.slow_on_host and theta.device.type not in ("cpu", "meta")
        self.phi = self.theta.to("cpu" if self.remote else theta.device, copy=True)
        self.alpha = alpha
        self.momentum = torch.zeros_like(self.phi if alpha else self.phi[:0])
        self.round: int | None = None  # of the marked boundary that is not yet applied
        self._square = self.phi.new_empty(())  # of a norm: nothing is allocated after an outer step's first write
        self.stepping = False  # while a round writes what can be neither undone nor written again
        self.guard: Guard | None = None  # judges packets; None: all that pass the codec's checks are accepted
        self.sender = ""  # the replica's peer id: replicas with different ids round differently

    def seed(self, what: str) -> int:
        """A 64-bit seed for rounding `what` at the marked boundary, different for all senders, rounds and buffers."""
        assert self.round is not None
        return digest64("rounding", self.sender, self.round, what)

    @property
    def parameters(self) -> int:
        return self.theta.numel()

    @property
    @abstractmethod
    def message_nbytes(self) -> int:
        """Most bytes of tensors in a message: the bound for receiving one."""

    def message(self, round_index: int) -> list[WireTensor]:
        """Mark the boundary of `round_index` and return the tensors that partners need, which own their memory. An
        earlier boundary that was never applied is dropped: its gain stays in theta and belongs to this one."""
        return list(self.draft(round_index).finish())

    def final_delta(self, round_index: int) -> list[WireTensor]:
        """Like `message`, but always of all weights, even if a round covers only a part. For packets marked as final
        deltas."""
        return self.message(round_index)

    @abstractmethod
    def draft(self, round_index: int) -> StreamingMessage:
        """Like `message`, with unwritten tensors: the boundary is marked. Call nothing else on this object until the
        draft is finished."""

    @property
    def in_pieces(self) -> PieceRounds:
        """The rounds of this method in which each member averages some pieces for all. Raises NotImplementedError where
        it has none."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def check(self, packet: Packet) -> None:
        """Raises RemoteFault if `packet` cannot come from a partner's `message` or is not finite."""

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        """The outer step of the boundary that `message` marked; theta's gain since is kept.

        Packets are judged one by one: a packet that fails `check` is refused as "misshapen", and the others count as if
        they had come alone. Without a packet of positive weight that the guard believes it is a lone step; with
        lone=False there is no step and the boundary stays marked.
        """
        self.prepare(packets)
        report = self.apply_slow(round_index, own_weight, packets, lone=lone)
        self.follow()
        return report

    @property
    def splits(self) -> bool:
        """Whether `apply_slow` may run beside the device of the fast weights, between `prepare` and `follow`."""
        return False

    def prepare(self, packets: Sequence[Packet]) -> None:  # noqa: B027  most need nothing
        """Read the fast weights that `apply_slow` needs beside the marked ones."""

    def follow(self) -> None:  # noqa: B027
        """Let fast weights on another device take the step of `apply_slow`."""

    @torch.no_grad()
    def apply_slow(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        """`apply` after `prepare`, but fast weights on another device than the slow ones take the step only in
        `follow`."""
        assert self.round == round_index, f"outer step of round {round_index}; the boundary marked is {self.round}"
        assert 0.0 <= own_weight <= WEIGHT_MAX, f"own weight {own_weight}"
        verdicts = [self._judge(own_weight, packet) for packet in packets]
        taken = [
            (packet, verdict.keep) for packet, verdict in zip(packets, verdicts, strict=True) if verdict.keep > 0.0
        ]
        report = OuterReport(0, 0.0, 0.0)
        if taken or lone:
            report = self._outer_step(own_weight, packets, taken)
        report.verdicts = verdicts
        return report

    def _outer_step(
        self, own_weight: float, packets: Sequence[Packet], taken: Sequence[tuple[Packet, float]]
    ) -> OuterReport:
        """Step with the packets `taken` of all `packets`, each with the share of its distance from ours that counts;
        alone if there is none. Ends the round. The report needs no verdicts."""
        raise NotImplementedError(self.name)

    @abstractmethod
    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> PacketMeasures:
        """The measures that the guard needs of a checked packet, in one pass of decoding. A newcomer has learned
        nothing to judge by."""

    def nbytes_of(self, round_index: int) -> int:
        """Bytes of tensors in the message of a round without earlier faults, by formula."""
        self.codec.at(round_index)
        return self.codec.least_nbytes(self.parameters)

    def _judge(self, own_weight: float, packet: Packet) -> Verdict:
        """The verdict on a packet."""
        try:
            self.check(packet)
        except RemoteFault as fault:
            return Verdict(0.0, "misshapen", str(fault))
        if packet.weight == 0.0:
            return Verdict(0.0, "newcomer", "a newcomer gives nothing")
        return self._judge_whole(own_weight, packet)

    def _judge_whole(self, own_weight: float, packet: Packet) -> Verdict:
        if self.guard is None:
            return Verdict(1.0, "accepted", "whatever is well-formed")
        return self.guard.judge(self.measure(packet, judged_by_own=own_weight > 0.0))

    @torch.no_grad()
    def reset(self, phi: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        """Adopt another replica's slow side (state was loaded), or a fresh momentum if None. Drops a marked
        boundary."""
        self.phi.copy_(phi)
        if momentum is None:
            self.momentum.zero_()
        else:
            assert momentum.shape == self.momentum.shape, f"momentum of {momentum.numel()} elements"
            self.momentum.copy_(momentum)
        self.round = None


def one_by_one(*drafts: StreamingMessage) -> StreamingMessage:
    """`drafts` as one message, written in order."""

    def write() -> None:
        for draft in drafts:
            draft.finish()

    return StreamingMessage([tensor for draft in drafts for tensor in draft.tensors], write)


def check_weight(weight: float) -> None:
    """Raises RemoteFault unless 0 <= weight <= WEIGHT_MAX."""
    if not (math.isfinite(weight) and 0.0 <= weight <= WEIGHT_MAX):
        raise RemoteFault(f"packet of weight {weight}; 0 to {WEIGHT_MAX} is allowed")
