"""One byte a step: replicas share what they measured along random directions that everybody can draw ["Just One Byte
(per gradient)", arXiv 2306.10015; MeZO, arXiv 2305.17333].

    g  = (L(phi + eps z) - L(phi - eps z)) / (2 eps)     z = signs of the seed (peer, round, number of the step)
    b  = round(127 min(max(g / c, -1), 1))               one byte; c is inner.clip_norm
    phi <- phi - rate(round) c / 127 b z                 for every step of every member, in order of round and peer

A round's steps are all measured at the weights of the last round, as the paper does, so weights only move in rounds.
Directions of thousands of elements are nearly orthogonal: N steps from one point do what N steps in a row do.

Between measurements theta equals phi, to the bit: perturbed weights are written from phi, never by adding and
subtracting, which would leave rounding errors that differ between members. Members that heard the same bytes therefore
have the same bits. A packet repeats the sender's last rounds, and each is applied once: a member that missed a packet
applies it a round later, and then differs from the others by rounding alone. What is missed for longer stays missed:
members then differ by those steps, and what they measure is still right for weights so near.

A lying member's byte is one step of the length that everybody's are clipped to. It can say as many in a round as the
whole run measures there, and choose among SINCE_MAX sets of directions. Nobody measures them again, and a member that
tells others different bytes parts them: so train by bytes with invited members.

Directions are of +1 and -1, and every machine draws them alike, bit for bit, from a 64-bit seed. Their bits are
Philox4x64-10's [Salmon et al., SC 2011], keyed with (seed, number of the chunk): a counter-based generator of integers
alone, whose stream numpy promises not to change (NEP 19). Bit 0 of a word, little-endian, is the chunk's first sign.
Signs instead of normal numbers: SPSA asks for a bounded inverse moment, which normal numbers lack and signs have
[Spall, IEEE Trans. Autom. Control 37(3), 1992, section III], and no logarithm or cosine can differ between machines.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import codec
from swarmnode.gossip.outer.method import Outer, check_weight
from swarmnode.gossip.robust import PacketMeasures
from swarmnode.ids import digest64
from swarmnode.manifest import Manifest
from swarmnode.model.optimizer import learning_rate
from swarmnode.model.stage import StageReplica, Trainer
from swarmnode.ports import (
    LossResult,
    OuterReport,
    Packet,
    StepReport,
    StreamingMessage,
    Verdict,
    WireTensor,
)

CHUNK = 1 << 18  # elements; part of the protocol: another size draws other signs
WORD = 64  # bits


def signs(seed: int, chunk: int, count: int) -> Tensor:
    """The first `count` signs, +1.0 or -1.0, of chunk number `chunk`: float32 [count] on the CPU."""
    assert 0 < count <= CHUNK, count
    key = np.array([seed, chunk], np.uint64)
    words = np.random.Philox(key=key).random_raw(-(-count // WORD)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=count, bitorder="little")
    return torch.from_numpy(bits.astype(np.float32) * np.float32(2.0) - np.float32(1.0))


def chunks(elements: int) -> Iterator[tuple[int, int, int]]:
    """(number, first, last) of each chunk of a flat buffer."""
    for number, first in enumerate(range(0, elements, CHUNK)):
        yield number, first, min(first + CHUNK, elements)


@torch.no_grad()
def write_moved(flat: Tensor, steps: Sequence[tuple[int, float]], out: Tensor) -> None:
    """Set `out` [N] to `flat` [N] plus the sum of `length` times the signs of `seed` for the (seed, length) in `steps`,
    added one after the other in this order; `out` may be `flat`. Takes a chunk of memory, whatever N is."""
    for number, first, last in chunks(flat.numel()):
        here = out[first:last]
        if out is not flat:
            here.copy_(flat[first:last])
        for seed, length in steps:
            here.add_(signs(seed, number, last - first).to(here.device, here.dtype), alpha=length)


LEVELS = 127
STEPS_MAX = 4096  # guess: measurements in one round; later ones are dropped
ROUNDS_KEPT = 8  # guess: rounds that a packet repeats
HEADER = struct.Struct("<QQH")  # round, round before, bytes that follow
SINCE_MAX = 1024  # guess: rounds between two of a member; after longer it begins anew from others' weights
NUMBER_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class SharedSteps:
    """One replica's steps of one round: `said` [-127, 127] each, along the directions drawn from `since`, the sender's
    round before."""

    round: int
    since: int
    said: tuple[int, ...]


def encode_steps(rounds: Sequence[SharedSteps]) -> bytes:
    return b"".join(
        HEADER.pack(one.round, one.since, len(one.said)) + struct.pack(f"<{len(one.said)}b", *one.said)
        for one in rounds
    )


def decode_steps(data: bytes | bytearray | memoryview) -> list[SharedSteps]:
    """The rounds in a packet. Raises RemoteFault unless it has ROUNDS_KEPT at most, one after the other, each of
    STEPS_MAX bytes at most, measured in SINCE_MAX rounds at most."""
    steps: list[SharedSteps] = []
    at, view = 0, memoryview(data)
    while at < len(view):
        if len(steps) == ROUNDS_KEPT or len(view) - at < HEADER.size:
            raise RemoteFault(f"one_byte packet with {len(view) - at} bytes after {len(steps)} rounds")
        number, since, count = HEADER.unpack_from(view, at)
        at += HEADER.size
        if count > min(STEPS_MAX, len(view) - at):
            raise RemoteFault(f"one_byte packet with {count} steps in {len(view) - at} bytes; {STEPS_MAX} are allowed")
        if not since < number <= min(NUMBER_MAX, since + SINCE_MAX) or (steps and since < steps[-1].round):
            before = f"{since}, and round {steps[-1].round}" if steps else f"{since}"
            raise RemoteFault(f"one_byte packet with round {number} measured since {before}")
        lengths = struct.unpack_from(f"<{count}b", view, at)
        if min(lengths, default=0) < -LEVELS:
            raise RemoteFault(f"one_byte packet with the step {min(lengths)}; -{LEVELS} to {LEVELS} is allowed")
        at += count
        steps.append(SharedSteps(number, since, lengths))
    return steps


class OneByte(Outer):
    """The steps of a stage that is the whole model. `message_nbytes` does not depend on the model's size."""

    name: ClassVar[str] = "one_byte"
    group_size: ClassVar[int | None] = None

    def __init__(self, manifest: Manifest, theta: torch.Tensor, sender: str = "") -> None:
        super().__init__(theta, codec("fp32"), 0.0)
        self.sender = sender
        self._seed = manifest.seed
        self._inner = manifest.inner
        self._round_samples = manifest.gossip.round_samples
        self._eps = manifest.training.perturbation
        self._run_steps = -(-manifest.gossip.round_samples // manifest.inner.microbatch)  # of all members in a round
        self._restart(0)

    def _restart(self, done: int) -> None:
        self.done = done  # the last round applied, here or at the replica that gave the weights
        self._since = done
        self._measured: list[int] = []  # since the last boundary
        self._own: list[SharedSteps] = []
        self._heard: dict[str, int] = {}  # the last round applied of each sender; `_first` if it is missing
        self._first = done

    def begin(self, done: int) -> None:
        """The weights are those after round `done`: forget what was measured at others."""
        self._restart(done)
        self.theta.copy_(self.phi)

    @property
    def message_nbytes(self) -> int:
        return ROUNDS_KEPT * (HEADER.size + STEPS_MAX)

    # Measuring

    def direction(self, sender: str, since: int, number: int) -> int:
        """The seed of a direction."""
        return digest64("one byte", self._seed, sender, since, number)

    @contextlib.contextmanager
    def perturbed(self, sign: float) -> Iterator[None]:
        """Context in which theta is phi plus `sign` eps along the next direction."""
        seed = self.direction(self.sender, self._since, len(self._measured))
        try:
            write_moved(self.phi, [(seed, sign * self._eps)], self.theta)
            yield
        finally:
            self.theta.copy_(self.phi)

    def projected(self, plus: float, minus: float) -> float:
        """The slope along the direction, of the losses on both sides."""
        return (plus - minus) / (2.0 * self._eps)

    def measure_step(self, slope: float) -> None:
        """Record the slope along the next direction as one byte."""
        if len(self._measured) < STEPS_MAX:
            self._measured.append(round(LEVELS * min(max(slope / self._inner.clip_norm, -1.0), 1.0)))

    # A round

    def rate(self, round_index: int) -> float:
        """The learning rate of a round: by its number, equal at all members."""
        return learning_rate(self._inner, round_index * self._round_samples)

    def draft(self, round_index: int) -> StreamingMessage:
        self.round = round_index
        if round_index > self._since:  # else a second packet of the same round: it says no more than the first
            since, said = self._since, tuple(self._measured[: self._steps_max(self._since, round_index)])
            if round_index - since > SINCE_MAX:
                since, said = round_index - 1, ()
            self._own = [*self._own, SharedSteps(round_index, since, said)][-ROUNDS_KEPT:]
            self._since, self._measured = round_index, []
        data = encode_steps(self._own)
        return StreamingMessage([WireTensor("u8", (len(data),), data)])

    def _steps_max(self, since: int, round_index: int) -> int:
        """Most steps of one member: as many as the run's samples in these rounds make, and in one more, because counts
        of samples lag."""
        return min(STEPS_MAX, self._run_steps * (round_index - since + 1))

    def check(self, packet: Packet) -> None:
        check_weight(packet.weight)
        if len(packet.tensors) != 1 or packet.tensors[0].dtype != "u8" or packet.tensors[0].codec not in ("", "raw"):
            raise RemoteFault(f"one_byte packet of {len(packet.tensors)} tensors; it has one of bytes")
        if packet.tensors[0].nbytes > self.message_nbytes:
            raise RemoteFault(f"one_byte packet of {packet.tensors[0].nbytes} bytes; at most {self.message_nbytes}")
        for one in decode_steps(packet.tensors[0].data):
            if len(one.said) > (most := self._steps_max(one.since, one.round)):
                raise RemoteFault(f"one_byte packet with {len(one.said)} steps of rounds {one.since} to {one.round}; "
                                  f"{most} fit into their samples")  # fmt: skip

    def _judge(self, own_weight: float, packet: Packet) -> Verdict:
        try:
            self.check(packet)
        except RemoteFault as fault:
            return Verdict(0.0, "misshapen", str(fault))
        if packet.final_delta or not packet.sender:  # one member has it: all others would differ from it for good
            return Verdict(0.0, "newcomer", "the last bytes of a replica that left reach one member alone")
        return Verdict(1.0, "accepted", "each byte is one clipped step")

    def _outer_step(
        self, own_weight: float, packets: Sequence[Packet], taken: Sequence[tuple[Packet, float]]
    ) -> OuterReport:
        assert self.round is not None
        given = {packet.sender: decode_steps(packet.tensors[0].data) for packet, _ in taken}
        own, own_since = self._own, self._heard.get(self.sender, self._first)
        steps = self._steps_of({**given, self.sender: own}, self.round)
        write_moved(self.phi, steps, self.phi)
        self.theta.copy_(self.phi)
        self.done, self.round = max(self.done, self.round), None
        root = math.sqrt(self.parameters)
        mine = [self._length(one, said) for one in own if one.round > own_since for said in one.said]
        # Directions are nearly orthogonal: lengths add up as squares.
        delta, moved = math.hypot(*mine) * root, math.hypot(*(length for _, length in steps)) * root
        return OuterReport(1 + len(taken), delta, moved)

    def _steps_of(self, given: dict[str, list[SharedSteps]], round_index: int) -> list[tuple[int, float]]:
        """(seed, length) of the steps not applied yet, in order of round and sender; they count as applied."""
        fresh: list[tuple[int, str, SharedSteps]] = []
        for sender, rounds in given.items():
            last = self._heard.get(sender, self._first)
            new = [one for one in rounds if last < one.round <= round_index]
            fresh += [(one.round, sender, one) for one in new]
            if new:
                self._heard[sender] = new[-1].round
        steps = []
        for _, sender, one in sorted(fresh, key=lambda entry: entry[:2]):
            for number, length in enumerate(one.said):
                if length:
                    steps.append((self.direction(sender, one.since, number), -self._length(one, length)))
        return steps

    def _length(self, one: SharedSteps, said: int) -> float:
        return self.rate(one.round) * self._inner.clip_norm / LEVELS * said

    def nbytes_of(self, round_index: int) -> int:
        return self.message_nbytes

    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> PacketMeasures:
        raise NotImplementedError("bytes are clipped by their form, no guard measures them")


class ForwardTrainer(Trainer):
    """Measures slopes for `shared` with the model `stage`. An inner step moves no weight here: steps are taken in
    rounds."""

    def __init__(self, stage: StageReplica, shared: OneByte) -> None:
        super().__init__(stage)
        self.shared = shared
        self.slope = 0.0  # the newest, in nats a token
        self._waiting = 0

    @property
    def waiting(self) -> int:
        return self._waiting

    def loss(self, x: WireTensor, tokens: WireTensor, samples: int, *, accumulate: bool) -> LossResult:
        """The mean of the losses on both sides along one direction; with `accumulate` the slope becomes a step. Theta
        is restored, also where a pass fails."""
        pieces = []
        for sign in (1.0, -1.0):
            with self.shared.perturbed(sign):
                pieces.append(self.stage.loss(x, tokens, samples, train=False))
        plus, minus = pieces
        if accumulate and plus.tokens:
            self.slope = self.shared.projected(plus.loss_sum / plus.tokens, minus.loss_sum / minus.tokens)
            self.shared.measure_step(self.slope)
        self._waiting += samples if accumulate else 0
        return LossResult((plus.loss_sum + minus.loss_sum) / 2.0, plus.tokens, None)

    def step(self, samples_total: int, batch: float, averaged: int) -> StepReport:
        """The end of the replica's share of a batch: reports, and changes nothing."""
        samples, self._waiting = self._waiting, 0
        rate = self.shared.rate(self.shared.done + 1)
        return StepReport(self.stage.inner_steps, abs(self.slope), rate, samples)

    def applied(self) -> None:
        """The number of inner steps is that of the round."""
        self.stage.stepped_in_round(self.shared.done, abs(self.slope))

    def loaded(self) -> None:
        self._waiting = 0
        self.shared.begin(self.stage.inner_steps)


def trainer(stage: StageReplica, sender: str) -> tuple[OneByte, ForwardTrainer]:
    """The outer side and the trainer of the replica `sender` of `stage`."""
    shared = OneByte(stage.manifest, stage.theta.data, sender)
    return shared, ForwardTrainer(stage, shared)
