"""The interface of outer optimizers: what replicas send each other at a round's boundary and what they make of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import Codec
from swarmnode.gossip.course import Course, sampled
from swarmnode.gossip.robust import PROBE_EVERY, Guard, Measures
from swarmnode.ids import digest64
from swarmnode.ports import Draft, OuterReport, Packet, Verdict, WireTensor

WEIGHT_MAX = 1.0  # a newcomer has 0, everybody else 1


Probe = Callable[[torch.Tensor, torch.Tensor], float | None]
"""By how many nats the loss on text of our own is higher with the second weights than with the first, both [P]; None
when that cannot be said yet."""


class Outer(ABC):
    """The slow side of one replica: slow weights `phi` and `momentum`, flat like the fast weights `theta` [P]; with
    `alpha` 0 no step reads the momentum, and it is [0].

    A round is `message` then `apply`, both on the compute thread; inner steps may move `theta` in between. `theta` is
    the replica's own live buffer, written in place; its storage must never be replaced.
    """

    name: ClassVar[str]
    """As the manifest says it."""

    group_size: ClassVar[int | None]
    """Replicas that meet at a boundary, this one included; None: the whole stage."""

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float) -> None:
        """Begin with phi = theta and a momentum of zeros."""
        assert theta.dim() == 1 and theta.is_contiguous() and theta.numel() > 0
        self.theta = theta.detach()  # shares memory, keeps no graph
        self.codec = codec
        self.phi = self.theta.clone()
        self.alpha = alpha
        self.momentum = torch.zeros_like(self.theta if alpha else self.theta[:0])
        self.round: int | None = None  # of the boundary marked and not yet applied
        self.guard: Guard | None = None  # believes nobody at once; None: whatever passes the codec's checks
        self.probe: Probe | None = None  # asked about a partner's packet every few rounds
        self._courses: dict[int, Course] = {}  # by part of the weights, where the guard judges directions
        self.sender = ""  # whose messages these are; replicas round by different chance when it differs

    def seed(self, what: str) -> int:
        """64 bits for rounding `what` of the boundary marked: no two senders, rounds or buffers have the same."""
        assert self.round is not None
        return digest64("rounding", self.sender, self.round, what)

    @property
    def parameters(self) -> int:
        return self.theta.numel()

    @property
    @abstractmethod
    def message_nbytes(self) -> int:
        """Bytes of tensors in a message, at most: the bound for receiving one."""

    def message(self, round_index: int) -> list[WireTensor]:
        """Mark the boundary of `round_index` and return what partners need. The tensors own their memory. A boundary
        marked before and never applied is forgotten: its gain stays in theta and belongs to this one."""
        return list(self.draft(round_index).finish())

    def bequest(self, round_index: int) -> list[WireTensor]:
        """As `message`, of all that was learnt: where a round is about a part of the weights only, this is not. For a
        packet that says it is a bequest."""
        return self.message(round_index)

    @abstractmethod
    def draft(self, round_index: int) -> Draft:
        """As `message`, its tensors not written yet: the boundary is marked, and nothing else may be asked of this
        object until the draft is finished."""

    @abstractmethod
    def check(self, packet: Packet) -> None:
        """Raises RemoteFault when `packet` is not what a partner's `message` gives, or not finite."""

    @abstractmethod
    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        """The outer step of the boundary `message` marked; what theta gained since is kept. Packets are judged one by
        one: what `check` says of a packet is the verdict on that one alone, refused as "misshapen", and the others are
        taken as if they alone had come. Without packets of positive weight that the guard believes it is a lone step,
        or without `lone` none, and the boundary stays marked."""

    @abstractmethod
    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> Measures:
        """What the guard needs to know of a checked packet; one pass of decoding. A newcomer has learned nothing to
        judge by."""

    @abstractmethod
    def _tried(self, packet: Packet, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(fast weights at the boundary, their average with what is kept of the packet), both [P]."""

    def nbytes_of(self, round_index: int) -> int:
        """Bytes of tensors in the message of a round when nothing went wrong before: the formula."""
        self.codec.at(round_index)
        return self.codec.least_nbytes(self.parameters)

    def _judge(self, own_weight: float, packet: Packet) -> Verdict:
        """What to take of a packet."""
        try:
            self.check(packet)
        except RemoteFault as fault:
            return Verdict(0.0, "misshapen", str(fault))
        if packet.weight == 0.0:
            return Verdict(0.0, "newcomer", "a newcomer gives nothing")
        if self.guard is None:
            return Verdict(1.0, "accepted", "whatever is well-formed")
        assert self.round is not None
        return self.guard.judge(self.measure(packet, judged_by_own=own_weight > 0.0), packet.sender, self.round)

    def _course(self, number: int, count: int) -> Course:
        """Where part `number` of the slow weights, of `count` elements, has been going."""
        if number not in self._courses:
            at = sampled(count, self.sender, number)
            self._courses[number] = Course(at, torch.from_numpy(at).to(self.theta.device))
        return self._courses[number]

    def _moved(self, number: int, phi: torch.Tensor) -> None:
        """An outer step of part `number` is over, and left `phi`."""
        if self.guard is not None and self.guard.direction:
            self._course(number, len(phi)).moved(phi)

    def _probe_one(self, own_weight: float, packets: Sequence[Packet], verdicts: list[Verdict]) -> float | None:
        """Every few rounds, try what averaging with one of the packets we would take does to our loss; its verdict may
        change. Returns the change in nats."""
        believed = [i for i, verdict in enumerate(verdicts) if verdict.keep > 0.0]
        if self.guard is None or self.probe is None or own_weight == 0.0 or not believed:
            return None
        draw = self.seed("probe")
        if draw % PROBE_EVERY:
            return None
        which = believed[draw // PROBE_EVERY % len(believed)]
        change = self.probe(*self._tried(packets[which], verdicts[which].keep))
        if change is not None:
            found = self.guard.judge_loss(change)
            if found.keep == 0.0:
                verdicts[which] = found
        return change

    @torch.no_grad()
    def reset(self, phi: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        """Become another replica's slow side (state was loaded), without `momentum` a fresh one; a marked boundary is
        forgotten."""
        self.phi.copy_(phi)
        if momentum is None:
            self.momentum.zero_()
        else:
            assert momentum.shape == self.momentum.shape, f"momentum of {momentum.numel()} elements"
            self.momentum.copy_(momentum)
        self.round = None
        for course in self._courses.values():
            course.restart()


def one_by_one(*drafts: Draft) -> Draft:
    """`drafts` as one message, written in their order."""

    def write() -> None:
        for draft in drafts:
            draft.finish()

    return Draft([tensor for draft in drafts for tensor in draft.tensors], write)


def check_weight(weight: float) -> None:
    """Raises RemoteFault unless 0 <= weight <= WEIGHT_MAX."""
    if not (math.isfinite(weight) and 0.0 <= weight <= WEIGHT_MAX):
        raise RemoteFault(f"packet of weight {weight}; 0 to {WEIGHT_MAX} is allowed")
