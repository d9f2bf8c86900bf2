"""NoLoCo: replicas meet in pairs, and no replica waits for all [arXiv 2506.10911, eq. 1-3; the sign of beta as in its
code]."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarmnode.base.errors import ManifestError, RemoteFault
from swarmnode.base.ports import OuterReport, Packet, PacketMeasures, StreamingMessage, WireTensor
from swarmnode.model.tensor import begin_to_host, copy_over, marked_now
from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.compression.codec import BLOCK_ELEMENTS
from swarmnode.train.gossip.outer.method import Outer, check_weight, one_by_one

BLOCK_CPU = 1 << 18  # elements; measured best of 2^12 .. 2^19: 8 M parameters in 19 ms (2^15: 29 ms, 2^12: 107 ms)
BLOCK_REMOTE = 1 << 22  # beside a card: measured on an H200's host, with 4 to 12 threads: half the time of 2^18
CROSSING_MAX = 8  # guess: of these blocks, 128 MB of page-locked memory, on their way to a card
BLOCK_DEVICE = 1 << 24  # guess: enough to fill an accelerator, 64 MiB of scratch

Share = tuple[float, float, Sequence[Sequence[WireTensor]]]
"""A packet in a mean: its weight, the share of its distance from ours that counts, and its tensors by buffer."""


# Fragments of the weights that are averaged in turn; each has blocks from every part of the model.
#
# A flat buffer is cut into blocks of 64 elements. Of each F consecutive blocks every fragment gets one:
#
#     fragment k of F:  block g F + (k - g) mod F  for g = 0, 1, 2 ...          round E is about fragment E mod F
#
# The shift by one in each group keeps fragments mixed if the model repeats every F blocks. Without it queries, keys and
# values in rows of 3 x 64 would each be one fragment. F is odd, so that replicas that meet only at every second or
# fourth round (train/gossip/round.py) reach all fragments.

UNIT = BLOCK_ELEMENTS  # elements that share a step in the codecs


@dataclass(frozen=True, slots=True)
class Fragment:
    """Fragment `number` of `of` fragments of flat buffers of `parameters` elements. With `of` = 1 it is the whole
    buffer."""

    parameters: int
    number: int
    of: int

    @property
    def whole(self) -> bool:
        return self.of == 1

    @property
    def count(self) -> int:
        """Its elements; 0 if there are fewer blocks than fragments."""
        if self.whole:
            return self.parameters
        groups, rest = divmod(self.parameters, UNIT * self.of)
        # position of its block in the last group, which may be cut off
        before = (self.number - groups) % self.of * UNIT
        return groups * UNIT + min(max(rest - before, 0), UNIT)

    def get(self, flat: Tensor, start: int, end: int, room: Tensor) -> Tensor:
        """Elements [start, end) of the fragment of `flat` [P]: a view if it is whole, else a copy in `room`. `start`
        and `end` are multiples of UNIT; `end` may also be `count`."""
        if self.whole:
            return flat[start:end]
        out = room[: end - start]
        rows, full, tail = self._at(flat, start, end)
        torch.index_select(full, 0, rows, out=out[: rows.numel() * UNIT].view(-1, UNIT))
        out[rows.numel() * UNIT :].copy_(tail)
        return out

    def put(self, flat: Tensor, start: int, end: int, values: Tensor) -> None:
        """Write the changed result of `get` back to `flat`."""
        if self.whole:
            return
        rows, full, tail = self._at(flat, start, end)
        full.index_copy_(0, rows, values[: rows.numel() * UNIT].view(-1, UNIT))
        tail.copy_(values[rows.numel() * UNIT :])

    def _at(self, flat: Tensor, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """(numbers of the whole blocks in [start, end); all whole blocks of `flat` [n, 64]; the rest of the last,
        partial block, if included)."""
        assert start % UNIT == 0, f"a fragment is read from its element {start}, inside a block"
        whole = self.parameters // UNIT
        group = torch.arange(start // UNIT, start // UNIT + (end - start) // UNIT, device=flat.device)
        rows = group * self.of + torch.remainder(self.number - group, self.of)
        cut = (end - start) % UNIT
        return rows, flat[: whole * UNIT].view(whole, UNIT), flat[self.parameters - cut :]


def fragments(parameters: int, of: int) -> list[Fragment]:
    """All fragments, by number."""
    return [Fragment(parameters, number, of) for number in range(of)]


def block_elements(outer: Outer) -> int:
    """Elements that an outer step works on at once, by where the slow weights lie."""
    if outer.remote:
        return BLOCK_REMOTE
    return BLOCK_CPU if outer.phi.device.type == "cpu" else BLOCK_DEVICE


@dataclass(frozen=True, slots=True)
class FragmentView:
    """A fragment at a boundary: its theta and phi there, [count] each; phi is the live buffer if the fragment is whole.
    `delta` is their difference, if it is sent."""

    fragment: Fragment
    codec: Codec
    boundary: torch.Tensor
    phi: torch.Tensor
    delta: torch.Tensor | None

    @property
    def count(self) -> int:
        return self.fragment.count


class NoLoCo(Outer):
    """With D_j = theta_j - phi_j at the boundary and weighted means over the members of weight > 0:

        m   <- alpha m + beta mean(D) + gamma (mean(phi) - phi)
        phi <- phi + m
        theta <- phi + (gain of theta since the boundary)

    If gamma == beta the two means combine to mean(theta) - phi, so only theta is sent (exact, half the bytes);
    otherwise D and phi. With a lossy codec the own part of every mean is exact and only the partners' parts have coding
    errors; in pairs the mean of m is then off by beta / 2 times the mean of their errors.

    A member of weight 0 receives and does not give: a newcomer takes only its partners' average, and its partners, if
    they get no other packet, take a lone step (n = 1: m <- alpha m + beta D).

    With F > 1 fragments (`of`) round E is about only one of them (Fragment), and the others do not change: a
    replica's D is its progress there in F rounds. Each fragment has its own codec, whose steps follow that fragment's
    spread. A final delta has all fragments: those that the round is not about are averaged only with it.
    """

    name: ClassVar[str] = "noloco"
    slow_on_host: ClassVar[bool] = True
    group_size: ClassVar[int | None] = 2

    in_halves: ClassVar[bool] = True
    """Whether `apply_slow` touches nothing on the device of the fast weights."""

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec, step.alpha, step.beta, step.gamma, fragments)

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float, gamma: float, of: int = 1) -> None:
        super().__init__(theta, codec, alpha)
        self.beta = beta
        self.gamma = gamma
        self._theta_alone = gamma == beta
        if codec.of_delta:
            raise ManifestError(f"gossip.codec {codec.name} sends pseudo-gradients; {self.name} needs weights")
        if codec.relative and not self._theta_alone:
            raise ManifestError(f"gossip.codec {codec.name} sends theta alone: gossip.gamma must equal gossip.beta")
        of = min(of, -(-self.parameters // UNIT) - 1 | 1)  # odd, and no fragment is empty
        self.fragments = fragments(self.parameters, of)
        self._codecs = [codec, *(codec.another() for _ in self.fragments[1:])]
        self._largest = max(fragment.count for fragment in self.fragments)
        slow = self.phi.device
        self._boundary = torch.empty(self._largest, dtype=theta.dtype, device=slow)  # theta at the boundary
        self._slow = self.phi if of == 1 else torch.empty_like(self._boundary)  # phi of the fragment
        self._delta = None if self._theta_alone else torch.empty_like(self._boundary)
        self._marked: FragmentView | None = None
        self._all: list[FragmentView] = []  # during `apply`: the packets' fragments, by number
        self._steps: list[FragmentView] = []  # remote: fragments whose boundary holds a step that theta has yet to take
        block = min(self._largest, block_elements(self))
        self._block = block
        self._scratch = [torch.empty(block, dtype=theta.dtype, device=slow) for _ in range(3)]
        self._rooms = [
            torch.empty(0 if whole else block, dtype=theta.dtype, device=slow)
            for whole in (of == 1, of == 1 and alpha != 0.0)
        ]
        # on the device of the fast weights, if slow ones are elsewhere
        self._there = [theta.new_empty(block if self.remote else 0) for _ in range(1 if of == 1 else 2)]

    @property
    def _buffers(self) -> int:
        return 1 if self._theta_alone else 2

    @property
    def message_nbytes(self) -> int:
        return self.codec.nbytes(self._largest) * self._buffers

    def nbytes_of(self, round_index: int) -> int:
        self.codec.at(round_index)
        return self.codec.least_nbytes(self._fragment(round_index).count) * self._buffers

    def _fragment(self, round_index: int) -> Fragment:
        """The fragment of a round."""
        return self.fragments[round_index % len(self.fragments)]

    def _mark(self, fragment: Fragment, *, anew: bool = False) -> FragmentView:
        """The current state of `fragment`; `anew`: in its own memory."""
        count = fragment.count
        rooms = [self._boundary, self._slow, self._delta]
        boundary, slow, delta = (None if x is None else torch.empty_like(x) if anew else x for x in rooms)
        assert boundary is not None and slow is not None
        boundary = boundary[:count]
        slow = slow[:count]
        self._read_theta(fragment, boundary)
        if fragment.whole:
            slow = self.phi
        else:
            fragment.get(self.phi, 0, count, slow)
        if delta is not None:
            delta = torch.sub(boundary, slow, out=delta[:count])
        return FragmentView(fragment, self._codecs[fragment.number], boundary, slow, delta)

    def _read_theta(self, fragment: Fragment, out: torch.Tensor) -> None:
        """Copy the fast weights of a fragment into `out`."""
        if not self.remote:
            given = fragment.get(self.theta, 0, fragment.count, out)
            if fragment.whole:
                out.copy_(given)
            return
        coming: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []  # where each goes, and what waits for it
        for start, end in self._blocks(fragment):
            theta = fragment.get(self.theta, start, end, self._there[0])
            coming.append((out[start:end], begin_to_host(theta)))
            if len(coming) > 1:  # while the next one crosses
                room, copy = coming.pop(0)
                room.copy_(copy())
        for room, copy in coming:
            room.copy_(copy())

    def _blocks(self, fragment: Fragment) -> Iterator[tuple[int, int]]:
        """[first, last) of the elements of a fragment that are worked on at once."""
        for start in range(0, fragment.count, self._block):
            yield start, min(start + self._block, fragment.count)

    @property
    def splits(self) -> bool:
        return self.remote and self.in_halves

    def prepare(self, packets: Sequence[Packet]) -> None:
        assert self._marked is not None
        self._all = self._every() if any(packet.final_delta for packet in packets) else [self._marked]

    @torch.no_grad()
    def follow(self) -> None:
        self.stepping = bool(self._steps)
        crossing = list[Callable[[], None]]()
        for part in self._steps:
            for start, end in self._blocks(part.fragment):
                theta = part.fragment.get(self.theta, start, end, self._there[-1])
                theta.add_(copy_over(part.boundary[start:end], self._there[0][: end - start]))
                part.fragment.put(self.theta, start, end, theta)
                crossing.append(marked_now(theta.device))
                if len(crossing) > CROSSING_MAX:
                    crossing.pop(0)()
        self._steps = []
        self.stepping = False

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        self.round = round_index
        self._marked = self._mark(self._fragment(round_index))
        return self._drafted(self._marked, "")

    def _drafted(self, part: FragmentView, seeded: str) -> StreamingMessage:
        if part.delta is None:
            return part.codec.draft(part.boundary, reference=part.phi, seed=self.seed(f"theta{seeded}"))
        return one_by_one(
            part.codec.draft(part.delta, seed=self.seed(f"delta{seeded}")),
            part.codec.draft(part.phi, seed=self.seed(f"phi{seeded}")),
        )

    @torch.no_grad()
    def final_delta(self, round_index: int) -> list[WireTensor]:
        if len(self.fragments) == 1:
            return self.message(round_index)
        tensors: list[WireTensor] = []
        self.round = round_index
        for fragment in self.fragments:
            tensors += self._drafted(self._mark(fragment), f" of fragment {fragment.number}").finish()
        self._marked = self._mark(self._fragment(round_index))
        return tensors

    def check(self, packet: Packet) -> None:
        check_weight(packet.weight)
        for part, tensors in self._said(packet):
            for some in tensors:
                part.codec.check(some, part.count)

    def _said(self, packet: Packet) -> list[tuple[FragmentView, list[Sequence[WireTensor]]]]:
        """Each fragment in `packet`, as at the boundary, with the packet's tensors for it by flat buffer, [theta] or
        [D, phi]; the codec's check catches a wrong number. Raises RemoteFault for a final delta with a wrong number of
        tensors."""
        assert self._marked is not None
        if not packet.final_delta or self._marked.fragment.whole:
            return [(self._marked, self._parts(packet.tensors))]
        parts = self._all
        each = self.codec.tensors * self._buffers
        if len(packet.tensors) != each * len(parts):
            raise RemoteFault(f"final delta of {len(packet.tensors)} tensors; expected {each * len(parts)}")
        cut = (packet.tensors[i * each : (i + 1) * each] for i in range(len(parts)))
        return [(part, self._parts(tensors)) for part, tensors in zip(parts, cut, strict=True)]

    def _parts(self, tensors: Sequence[WireTensor]) -> list[Sequence[WireTensor]]:
        """The wire tensors of one fragment by flat buffer."""
        if self._theta_alone:
            return [tensors]
        return [tensors[: self.codec.tensors], tensors[self.codec.tensors :]]

    def _every(self) -> list[FragmentView]:
        """All fragments: the marked one, and the current state of the others in their own memory."""
        assert self._marked is not None
        marked = self._marked.fragment
        return [self._marked if one == marked else self._mark(one, anew=True) for one in self.fragments]

    def _outer_step(
        self, own_weight: float, packets: Sequence[Packet], taken: Sequence[tuple[Packet, float]]
    ) -> OuterReport:
        shares: dict[int, list[Share]] = {}
        for packet, keep in taken:
            for part, tensors in self._said(packet):
                shares.setdefault(part.fragment.number, []).append((packet.weight, keep, tensors))
        squares = [0.0, 0.0]
        for part in self._all:
            givers = shares.get(part.fragment.number, [])
            if givers or part is self._marked:
                squares = [a + b for a, b in zip(squares, self._step_part(part, own_weight, givers), strict=True)]
        self._all = []
        self.round = None
        self.stepping = bool(self._steps)
        return OuterReport(
            members=len(taken) + (own_weight > 0.0 or not taken),
            delta_norm=math.sqrt(squares[0]),
            step_norm=math.sqrt(squares[1]),
        )

    def _step_part(self, part: FragmentView, own_weight: float, givers: Sequence[Share]) -> tuple[float, float]:
        """The outer step of one fragment with the packets for it; returns the squared norms of D and of m."""
        total = own_weight + sum(weight for weight, _, _ in givers)
        own_share = own_weight / total if givers else 1.0
        shares = [(weight / total, keep, tensors) for weight, keep, tensors in givers]
        delta_squared = step_squared = 0.0
        for start, _ in self._blocks(part.fragment):
            squares = self._step(part, start, own_share, shares)
            delta_squared += squares[0]
            step_squared += squares[1]
        if self.remote:
            self._steps.append(part)
        return delta_squared, step_squared

    def _read(
        self, part: FragmentView, tensors: Sequence[Sequence[WireTensor]], start: int, theirs: torch.Tensor
    ) -> None:
        """The partner's fast weights from element `start` of the fragment on."""
        part.codec.read(tensors[0], start, theirs, part.boundary[start : start + theirs.numel()])
        if len(tensors) == 2:
            phi = torch.empty_like(theirs)
            part.codec.read(tensors[1], start, phi)
            theirs.add_(phi)

    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> PacketMeasures:
        own = gap = weights = 0.0
        for part, tensors in self._said(packet):
            for start, end in self._blocks(part.fragment):
                phi = part.phi[start:end]
                boundary = part.boundary[start:end]
                delta, other, theirs = (scratch[: end - start] for scratch in self._scratch[:3])
                part.codec.read(tensors[0], start, theirs, boundary)
                if len(tensors) == 2:
                    part.codec.read(tensors[1], start, other)
                    theirs.add_(other)
                torch.sub(boundary, phi, out=delta)
                own += torch.dot(delta, delta).item()
                theirs.sub_(boundary)
                gap += torch.dot(theirs, theirs).item()
                weights += torch.dot(phi, phi).item()
        return PacketMeasures(math.sqrt(own) if judged_by_own else 0.0, math.sqrt(gap), math.sqrt(weights))

    def _step(self, part: FragmentView, start: int, own_share: float, shares: Sequence[Share]) -> tuple[float, float]:
        """The outer step of one block of a fragment's elements; returns the squared norms of D and of m."""
        end = min(start + self._block, part.count)
        mean, pull, theirs = (scratch[: end - start] for scratch in self._scratch)
        phi = part.phi[start:end]
        boundary = part.boundary[start:end]
        room, other_room = self._rooms
        torch.sub(boundary, phi, out=mean)
        delta_squared = torch.dot(mean, mean).item()
        if self.momentum.numel():
            m = part.fragment.get(self.momentum, start, end, other_room)
        else:
            m = other_room[: end - start].zero_()
        if not shares:
            self.stepping = True
            m.mul_(self.alpha).add_(mean, alpha=self.beta)
        elif self._theta_alone:
            torch.mul(boundary, own_share, out=mean)
            self._add(part, 0, start, mean, theirs, shares, boundary)
            self.stepping = True
            m.mul_(self.alpha).add_(mean.sub_(phi), alpha=self.beta)
        else:
            mean.mul_(own_share)
            assert part.delta is not None
            self._add(part, 0, start, mean, theirs, shares, part.delta[start:end])
            torch.mul(phi, own_share, out=pull)
            self._add(part, 1, start, pull, theirs, shares, phi)
            self.stepping = True
            m.mul_(self.alpha).add_(mean, alpha=self.beta).add_(pull.sub_(phi), alpha=self.gamma)
        changed = [(self.phi, phi), (self.momentum, m)]
        if self.remote:
            phi.add_(m)
            torch.sub(phi, boundary, out=boundary)
        else:
            theta = part.fragment.get(self.theta, start, end, room)
            theta.sub_(boundary)  # the gain
            phi.add_(m)
            theta.add_(phi)
            changed.append((self.theta, theta))
        for flat, values in changed:
            if flat.numel():
                part.fragment.put(flat, start, end, values)
        return delta_squared, torch.dot(m, m, out=self._square).item()

    def _add(
        self,
        part: FragmentView,
        which: int,
        start: int,
        mean: torch.Tensor,
        theirs: torch.Tensor,
        shares: Sequence[Share],
        ours: torch.Tensor,
    ) -> None:
        """Add buffer `which` of the decoded packets to `mean`; clipped ones are moved towards `ours`."""
        for share, keep, tensors in shares:
            part.codec.read(tensors[which], start, theirs, ours)
            if keep < 1.0:
                torch.lerp(ours, theirs, keep, out=theirs)
            mean.add_(theirs, alpha=share)


class Average(NoLoCo):
    """theta <- mean(theta): randomized pairwise gossip [Boyd et al., IEEE Trans. Inf. Theory 52(6), 2006]. It equals
    NoLoCo with alpha = 0 and beta = gamma = 1."""

    name: ClassVar[str] = "average"
    group_size: ClassVar[int | None] = 2

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec, fragments)

    def __init__(self, theta: torch.Tensor, codec: Codec, of: int = 1) -> None:
        super().__init__(theta, codec, 0.0, 1.0, 1.0, of)
