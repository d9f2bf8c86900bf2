"""Many replicas of a small byte language model in one process, trained by the same batched matrix products.

The fast weights of R replicas are the rows of one tensor [R, P]. Each row is the buffer of a replica's own outer
optimizer, of the class used by nodes. Only the network is missing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.method.inner_optimizer import ADAMW, MUON, BatchOptimizer, MatrixRows
from swarmnode.base.ids import PeerId, RunId, digest, digest64
from swarmnode.base.ports import OuterReport, Packet, WireTensor
from swarmnode.base.work import Work
from swarmnode.data.source import demo_documents
from swarmnode.model.turn import WHOLE, Turn
from swarmnode.train.gossip.fallback_partner import fallback_order
from swarmnode.train.gossip.outer import Outer
from swarmnode.train.gossip.pairing import groups
from swarmnode_methods.desloc import DesLoc
from swarmnode_methods.gradient import Gradient, GradientOf
from swarmnode_methods.noloco import NoLoCo

TEXT_BYTES_MAX = 24 << 20
HELD_OUT = 13  # of 256 files, by hash
COSINE = "cosine"
FLAT = "flat"
WSD = "wsd"
COOLDOWN = 0.25  # of a run with WSD: the share in which the rate falls to zero


@dataclass(frozen=True, slots=True)
class ToySpec:
    """Size of the trained model and of the run. Default: 117 k parameters, about the least that still separates the
    methods."""

    replicas: int = 8
    width: int = 64
    heads: int = 2
    ffn: int = 176
    layers: int = 2
    context: int = 64
    batch: int = 8
    inner_steps: int = 15
    rounds: int = 40
    learning_rate: float = 4e-3
    warmup: int = 40
    validation: int = 256
    optimizer: str = ADAMW
    elsewhere: float = 0.0  # muon: AdamW's rate for other parameters than matrices, 0: learning_rate
    decay: str = COSINE
    beta1: float = 0.9  # of AdamW
    momentum: float = 0.95  # of Muon
    nesterov: bool = True  # of Muon
    group: int = 2  # replicas that meet, for methods that do not need the whole stage; 0: all
    lost: float = 0.0  # share of packets that miss one of their receivers


def read_text(path: str | None = None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """(training bytes, held-out bytes): of the file or the folder's .txt files at `path`, or of the demo corpus.
    Files are split by their hash; a single file by position."""
    root = Path(path) if path else None
    if root is not None and root.is_file():
        data = np.frombuffer(root.read_bytes()[:TEXT_BYTES_MAX], np.uint8)
        cut = len(data) - len(data) // 20
        return data[:cut], data[cut:]
    texts = (
        (text for _, text in demo_documents()) if root is None else map(Path.read_bytes, sorted(root.rglob("*.txt")))
    )
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for text in texts:
        parts[digest(text)[0] < HELD_OUT].append(text)
    train, held = (np.frombuffer(b"\n".join(parts[out])[:TEXT_BYTES_MAX], np.uint8) for out in (False, True))
    return train, held


def shapes(size: ToySpec) -> list[tuple[int, ...]]:
    """Shapes of one replica's parameters, in the order of its row. The embedding is also the output head."""
    d = size.width
    f = size.ffn
    layer = [(d,), (d, 3 * d), (d, d), (d,), (d, 2 * f), (f, d)]
    return [(256, d), (size.context, d), *(layer * size.layers), (d,)]


def matrices(size: ToySpec) -> list[MatrixRows]:
    """Matrices that Muon orthogonalises. Queries, keys, values, gate and up count as separate matrices."""
    found = []
    first = 0
    for i, shape in enumerate(shapes(size)):
        if len(shape) == 2 and i >= 2:
            columns = shape[1] // {1: 3, 4: 2}.get((i - 2) % 6, 1)  # of a layer's six, as `shapes` has them
            found += [MatrixRows(first + k, shape[0], columns, shape[1]) for k in range(0, shape[1], columns)]
        first += math.prod(shape)
    return found


def initial(size: ToySpec, seed: int) -> Tensor:
    """[P]: matrices normal by fan-in, norms one."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for i, shape in enumerate(shapes(size)):
        if len(shape) == 1:
            parts.append(torch.ones(shape))
        else:
            scale = (
                0.02 if i < 2 else 1 / math.sqrt(shape[0]) / (1 if i % 6 not in (4, 1) else math.sqrt(2 * size.layers))
            )
            parts.append(torch.randn(shape, generator=generator).mul_(scale).view(-1))
    return torch.cat([part.view(-1) for part in parts])


def losses(size: ToySpec, theta: Tensor, tokens: Tensor) -> Tensor:
    """Nats per token of each replica, [R], of `theta` [R, P] on `tokens` [R, B, T + 1]."""
    replicas = theta.shape[0]
    batch = tokens.shape[1]
    width = size.width
    length = tokens.shape[2] - 1
    wanted = shapes(size)
    flat = torch.split(theta, [math.prod(shape) for shape in wanted], dim=1)
    weights = iter([part.view(replicas, *shape) for part, shape in zip(flat, wanted, strict=True)])
    embedding = next(weights)
    position = next(weights)
    rows = tokens[:, :, :-1].reshape(replicas, -1)
    x = torch.gather(embedding, 1, rows.unsqueeze(2).expand(-1, -1, width))  # (R, B T, D)
    x = x + position[:, :length].repeat(1, batch, 1)
    for _ in range(size.layers):
        x = x + _attention(size, _norm(x, next(weights)), next(weights), next(weights), batch)
        gate, up = torch.bmm(_norm(x, next(weights)), next(weights)).chunk(2, dim=2)
        x = x + torch.bmm(F.silu(gate) * up, next(weights))
    logits = torch.bmm(_norm(x, next(weights)), embedding.transpose(1, 2))  # (R, B T, 256)
    targets = tokens[:, :, 1:].reshape(-1)
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="none").view(replicas, -1).mean(1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(2, keepdim=True) + 1e-5) * weight.unsqueeze(1)


def _attention(size: ToySpec, x: Tensor, projection: Tensor, output: Tensor, batch: int) -> Tensor:
    replicas, rows, width = x.shape
    shape = (replicas * batch, rows // batch, 3, size.heads, width // size.heads)
    query, key, value = torch.bmm(x, projection).view(shape).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return torch.bmm(mixed.transpose(1, 2).reshape(replicas, rows, width), output)


class RowGradient(GradientOf):
    """The gradient `gathered` [P] and the `step` of one row by its `optimizer`."""

    def __init__(
        self, gathered: Tensor, optimizer: BatchOptimizer, step: Callable[[BatchOptimizer, Tensor, Turn], None]
    ) -> None:
        self._gathered = gathered
        self._optimizer = optimizer
        self._step = step

    def take_work(self) -> Work:
        return Work.of(1, 1, 1)  # all replicas read as much

    def take(self, out: Tensor) -> None:
        out.copy_(self._gathered)
        self._gathered.zero_()

    def give(self, flat: Tensor) -> None:
        self._gathered.add_(flat)

    def views(self, flat: Tensor, turn: Turn) -> list[Tensor]:
        return self._optimizer.views(flat, turn)

    @property
    def momentum(self) -> Tensor:
        return self._optimizer.exp_avg[0]

    def step(self, mean: Tensor, round_index: int, turn: Turn) -> None:
        self._step(self._optimizer, mean.unsqueeze(0).clone(), turn)


Liar = Callable[[int, int, list[WireTensor]], list[WireTensor]]
"""(round, replica, honest message) -> the message sent instead."""


def _of_weights(outer: Outer) -> TypeGuard[NoLoCo]:
    """Whether its messages are weights alone: neither AdamW's moments nor pseudo-gradients."""
    return isinstance(outer, NoLoCo) and not isinstance(outer, DesLoc)


class ReplicaBatch:
    """R replicas that start alike, read different text, and meet as their outer optimizers say."""

    def __init__(
        self,
        size: ToySpec,
        seed: int,
        make: Callable[[Tensor], Outer] | None,
        text: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
        *,
        together: bool = False,
        pairing: int = 0,
    ) -> None:
        """`make` gives one replica's outer optimizer over its fast weights [P]; None: they never meet. `together`:
        synchronous data parallel, the gradient of each step averaged over all. `pairing`: with another, others meet."""
        self.size = size
        self.seed = seed
        self.together = together
        start = initial(size, seed)
        self.theta = start.repeat(size.replicas, 1).requires_grad_()
        self.parameters = start.numel()
        self.names = [PeerId(f"replica{i:03}") for i in range(size.replicas)]
        self.outers = [make(row) for row in self.theta.detach()] if make is not None else []
        for name, outer in zip(self.names, self.outers, strict=False):
            outer.sender = name
        self.run_id = RunId(digest("village", seed, *([pairing] if pairing else [])).hex())
        self._train, self._held = text
        self._draws = [np.random.Generator(np.random.Philox(key=digest64("text", seed, name))) for name in self.names]
        self._inner = self.optimizer(self.theta)
        averaging = [outer for outer in self.outers if isinstance(outer, Gradient)]
        self._gathered = torch.zeros(len(averaging), self.parameters)
        for i, outer in enumerate(averaging):
            outer.gather(RowGradient(self._gathered[i], self.optimizer(self.theta.detach()[i : i + 1]), self._step))
        self.steps = 0
        self.nbytes = 0  # sent by all replicas: a message counts as often as it is sent

    def optimizer(self, theta: Tensor) -> BatchOptimizer:
        """An inner optimizer of rows `theta` [R, P]."""
        size = self.size
        by_muon = matrices(size) if size.optimizer == MUON else []
        momenta = {"beta1": size.beta1, "momentum": size.momentum}
        return BatchOptimizer(theta, by_muon, **momenta, nesterov=size.nesterov)

    def _batch(self, replica: int) -> Tensor:
        length = self.size.context + 1
        starts = self._draws[replica].integers(0, len(self._train) - length, self.size.batch)
        return torch.from_numpy(np.stack([self._train[s : s + length] for s in starts]).astype(np.int64))

    def learn(self, steps: int) -> None:
        """Inner steps of every replica on its own text."""
        size = self.size
        for _ in range(steps):
            tokens = torch.stack([self._batch(i) for i in range(size.replicas)])
            (gradient,) = torch.autograd.grad(losses(size, self.theta, tokens).sum(), self.theta)
            if self.together:
                gradient.copy_(gradient.mean(0, keepdim=True).expand_as(gradient))
            self.steps += 1
            if len(self._gathered):
                self._gathered.add_(gradient)
                continue
            self._step(self._inner, gradient)
            self._attend()

    def _step(self, optimizer: BatchOptimizer, gradient: Tensor, turn: Turn = WHOLE) -> None:
        """Clip `gradient` [R, P] and step by it; it is overwritten."""
        norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((1.0 / (norms + 1e-6)).clamp_(max=1.0))
        size = self.size
        rate = self.warm_rate
        optimizer.step(gradient, rate, rate * (size.elsewhere or size.learning_rate) / size.learning_rate, turn)

    @property
    def rate(self) -> float:
        """The learning rate after the steps done so far, without its warm-up."""
        done = min(1.0, self.steps / (self.size.inner_steps * self.size.rounds))
        if self.size.decay == FLAT:
            return self.size.learning_rate
        if self.size.decay == WSD:
            return self.size.learning_rate * min(1.0, (1.0 - done) / COOLDOWN)
        return self.size.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))

    @property
    def warm_rate(self) -> float:
        """The learning rate after the steps done so far, with its warm-up."""
        return self.rate * min(1.0, self.steps / self.size.warmup)

    @property
    def spread(self) -> float:
        """Root mean square distance of a weight from its mean over replicas."""
        theta = self.theta.detach()
        return float((theta - theta.mean(0)).square().mean().sqrt())

    def _attend(self) -> None:
        """Attach AdamW's moments to methods that average them, once they exist."""
        for i, outer in enumerate(self.outers):
            if isinstance(outer, DesLoc) and not outer.attends:
                outer.attend(self._inner.exp_avg[i], self._inner.exp_avg_sq[i])

    def meet(self, round_index: int, liars: Sequence[int] = (), lie: Liar | None = None) -> None:
        """Mark the boundary of `round_index` at every replica, then run every outer step. Two replicas meet if each has
        the other in its group, by its own view of the members."""
        if not self.outers:
            return
        messages = []
        for i, outer in enumerate(self.outers):
            message = outer.message(round_index)
            messages.append(lie(round_index, i, message) if lie is not None and i in liars else message)
        size = self.outers[0].group_size and (self.size.group or None)
        circles = []
        for me, name in enumerate(self.names):
            members = [self.names[i] for i in self.view(me, round_index)]
            found = next(group for group in groups(self.run_id, 0, round_index, members, size) if name in group)
            circles.append({self.names.index(other) for other in found})
            self.nbytes += (len(found) - 1) * sum(tensor.nbytes for tensor in messages[me])
        given: set[int] = set()  # replicas that stood in for another one's partner
        for me, circle in enumerate(circles):
            others = [other for other in sorted(circle) if other != me and me in circles[other]]
            others = [other for other in others if not self._late(round_index, other, me)]
            packets = [Packet(1.0, 0, messages[other], sender=self.names[other]) for other in others]
            to_ask = self._to_ask(me, round_index, circle)
            if not self.step(me, round_index, packets, others, lone=not to_ask).believed and to_ask:
                self._ask(me, round_index, to_ask, messages, given)

    def _to_ask(self, me: int, round_index: int, circle: Collection[int]) -> list[int]:
        """Replicas that may stand in for absent partners of `me` in its `circle`, chosen as by live nodes."""
        if len(circle) < 2 or not _of_weights(self.outers[me]):
            return []
        candidates = {self.names[i] for i in self.view(me, round_index) if i not in circle}
        order, _ = fallback_order(self.run_id, 0, round_index, self.names[me], candidates)
        return [self.names.index(name) for name in order]

    def _ask(
        self, me: int, round_index: int, to_ask: Sequence[int], messages: Sequence[list[WireTensor]], given: set[int]
    ) -> None:
        """Outer step of a replica without a believed partner: with the packet of the first stand-in not yet in `given`,
        else alone."""
        for other in to_ask:
            if other in given or self._late(round_index, other, me):
                continue
            given.add(other)
            self.nbytes += sum(tensor.nbytes for tensor in messages[other])
            packet = Packet(1.0, 0, messages[other], sender=self.names[other], fallback=True)
            if self.step(me, round_index, [packet], [other], lone=False).believed:
                return
        self.step(me, round_index, [], [])

    def _late(self, round_index: int, giver: int, taker: int) -> bool:
        return digest64("late", self.seed, round_index, giver, taker) < self.size.lost * 2**64

    def view(self, replica: int, round_index: int) -> Sequence[int]:
        """Replicas that `replica` may meet, itself included; overridden in subclasses with distrust."""
        return range(self.size.replicas)

    def step(
        self,
        replica: int,
        round_index: int,
        packets: Sequence[Packet],
        senders: Sequence[int],
        *,
        lone: bool = True,
    ) -> OuterReport:
        """Outer step of one replica; with `lone` False, only if a packet is believed. Overridden in subclasses that
        track the senders of refused packets."""
        return self.outers[replica].apply(round_index, 1.0, packets, lone=lone)

    @functools.cached_property
    def _validation(self) -> Tensor:
        length = self.size.context + 1
        draw = np.random.Generator(np.random.Philox(key=7))
        starts = draw.integers(0, len(self._held) - length, self.size.validation)
        return torch.from_numpy(np.stack([self._held[s : s + length] for s in starts]).astype(np.int64))

    @torch.no_grad()
    def validate(self, replicas: Sequence[int] | None = None) -> tuple[float, float]:
        """(mean nats per held-out byte of the replicas, nats of their average), always on the same text. Without
        replicas the mean is NaN, and the average is over all."""
        rows = self.theta.detach()
        if replicas is not None and not replicas:
            merged = float(losses(self.size, rows.mean(0, keepdim=True), self._validation[None])[0])
            return math.nan, merged
        rows = rows if replicas is None else rows[list(replicas)]
        each = [float(losses(self.size, row[None], self._validation[None])[0]) for row in rows]
        merged = float(losses(self.size, rows.mean(0, keepdim=True), self._validation[None])[0])
        return sum(each) / len(each), merged
