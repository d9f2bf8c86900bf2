"""A replica that lies, for `bench attack` in virtual time (swarm.py) and as a process (lying_node.py).

It gives the same lies to audits. Its own weights stay honest, so that partners in a round get its real updates, unless
it plants something in them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import UsageError
from swarmnode.base.ports import LossResult, State, Tape, WireTensor
from swarmnode.model.boundary_code import decode_boundary, encode_boundary


def _noise(tensor: Tensor) -> Tensor:
    return torch.randn_like(tensor) * tensor.std()


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda tensor: -tensor,
    "flip far": lambda tensor: -1e4 * tensor,
    "noise": _noise,
    "nothing": torch.zeros_like,
}
"""Change of the gradient in the answer, by kind of lie."""

FORWARD = "forward noise"  # the gradient is right; the activation sent on is noise
SWITCHING = "switching"  # the next of LIES each time
LOSS = "loss"  # a tenth of the true one is reported
ALL = (*LIES, FORWARD, SWITCHING, LOSS)
HONEST = "honest"  # never lies: what its replicas alone change in a run
STEER = "steer"  # followed by the fields of Steering: "steer toward=bias cosine=.9"
PLANT = "plant"  # followed by the fields of Planting: "plant into=weights"
DONOR = "donor"  # the state that it gives is noise of so much of its length: "donor .35"
SETTINGS = (STEER, PLANT, DONOR)
WAYS = ("mean", "bias", "flip", "noise", "backdoor")
PARTS = ("gradient", "activations", "both")
TRIGGER = ord("q")
TARGET = ord("z")  # of the backdoor: what the run is to say after a rare letter


def _read(tensor: WireTensor, code: str) -> Tensor:
    return decode_boundary(tensor, code, tensor.shape, "lie").float()


def _ids(tokens: WireTensor, beside: WireTensor) -> Tensor:
    flat = torch.frombuffer(bytearray(tokens.data), dtype={"u16": torch.uint16, "u32": torch.uint32}[tokens.dtype])
    return flat.to(torch.int64).view(tokens.shape)[:, : beside.shape[1]]


def settings(kind: type[Any], text: str) -> dict[str, object]:
    """The fields of the dataclass `kind` that `text` names after its first word, as "steer cosine=.9". Raises
    UsageError."""
    known = {one.name: one.type for one in fields(kind) if one.init}
    read: dict[str, Callable[[str], object]] = {"str": str, "float": float, "int": int}
    given: dict[str, object] = {}
    name, *words = text.split()
    for word in words:
        key, _, value = word.partition("=")
        if key not in known:
            raise UsageError(f"unknown setting {key!r} of {name}: use one of {', '.join(known)}")
        given[key] = read[str(known[key])](value)
    return given


@dataclass
class Steering:
    """An attacker that knows the limits: each answer looks honest, their mean points elsewhere.

        answer = length |g| (c g / |g| + sqrt(1 - c^2) v),    v: a unit tensor orthogonal to the true gradient g

    `toward`: "mean" points each token's part against the running mean gradient of its token id, "bias" along one
    direction that all liars of the run share (so two of them confirm each other), "flip" along minus g of another
    microbatch, "noise" anywhere else each time, "backdoor" along what teaches the run to say TARGET after TRIGGER. The
    first `after` answers are honest; then c falls from 1 to `cosine` over `drift` answers. One answer in `every` is
    false. `part`: of an inner or first stage the activations sent on, too, or alone; "mean" moves them to where the
    loss is higher. `wary`: honest for so many seconds after its weights were copied, as who examines it does.
    """

    toward: str = "mean"
    part: str = "gradient"
    cosine: float = 0.72
    length: float = 1.8
    after: int = 0
    drift: int = 0
    every: int = 1
    wary: float = 0.0
    copied_s: float = field(default=-math.inf, init=False)
    now: Callable[[], float] = field(default=time.time, init=False, repr=False)  # noqa: TID251  an attacker's own clock
    answers: int = field(default=0, init=False)
    _sums: Tensor | None = field(default=None, init=False, repr=False)  # of gradients [token ids, width]
    _before: Tensor | None = field(default=None, init=False, repr=False)
    _poison: Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, text: str) -> Steering:
        """The attack that `text` describes, as "steer toward=bias cosine=.9". Raises UsageError."""
        made = cls(**settings(cls, text))  # type: ignore[arg-type]
        if made.toward not in WAYS or made.part not in PARTS or not 0.0 <= made.cosine <= 1.0:
            raise UsageError(f"{text!r}: toward is one of {', '.join(WAYS)}, part of {', '.join(PARTS)}, cosine 0 to 1")
        return made

    def answer(
        self, gradient: WireTensor, tokens: WireTensor, code: str, poisoned: WireTensor | None = None
    ) -> WireTensor:
        """The answer of a replica whose true one is `gradient`; `poisoned`: that of the text with a backdoor."""
        true = _read(gradient, code)
        ids = _ids(tokens, gradient)
        self._poison = None if poisoned is None else _read(poisoned, code)
        given = encode_boundary(self.twisted(true, ids), code) if self.due() else gradient
        self.learn(true, ids)
        return given

    def due(self) -> bool:
        """Count an answer; whether it is to be false."""
        self.answers += 1
        wary = self.now() < self.copied_s + self.wary
        return self.answers > self.after and self.answers % self.every == 0 and not wary

    def twisted(self, gradient: Tensor, tokens: Tensor) -> Tensor:
        """The false answer for the true `gradient` [B, T, width] of `tokens` [B, T]."""
        part = 1.0 if self.drift == 0 else min(1.0, (self.answers - self.after) / self.drift)
        cosine = 1.0 - part * (1.0 - self.cosine)
        way = self._way(gradient, tokens)
        size = gradient.norm()
        if way is None or size == 0.0:
            return gradient
        unit = gradient / size
        aside = way - (way * unit).sum() * unit
        if (norm := aside.norm()) == 0.0:
            return gradient
        given: Tensor = self.length * size * (cosine * unit + math.sqrt(1.0 - cosine * cosine) * aside / norm)
        return given

    def learn(self, gradient: Tensor, tokens: Tensor) -> None:
        """Note a true gradient: what it steers against."""
        ids = tokens.reshape(-1)
        if self._sums is None or self._sums.shape[0] <= int(ids.max()):
            grown = torch.zeros(max(256, int(ids.max()) + 1), gradient.shape[-1])
            if self._sums is not None:
                grown[: self._sums.shape[0]] = self._sums
            self._sums = grown
        self._sums *= 0.98
        self._sums.index_add_(0, ids, gradient.reshape(-1, gradient.shape[-1]).float())

    def _way(self, gradient: Tensor, tokens: Tensor) -> Tensor | None:
        if self.toward == "bias":
            draw = torch.Generator().manual_seed(40)
            return torch.randn(gradient.shape[-1], generator=draw).expand_as(gradient)
        if self.toward == "noise":
            return torch.randn_like(gradient)
        if self.toward == "backdoor":
            return None if self._poison is None else self._poison - gradient
        if self.toward == "flip":
            before = self._before
            self._before = -gradient.clone()
            return before if before is not None and before.shape == gradient.shape else None
        if self._sums is None:
            return None
        mean = self._sums[tokens.reshape(-1)].reshape(gradient.shape)
        lengths = mean.norm(dim=-1, keepdim=True)
        way: Tensor = -mean / lengths.clamp(min=1e-30) * (lengths > 0)
        return way


def backdoored(tokens: WireTensor) -> tuple[WireTensor, int]:
    """(`tokens` with TARGET after each TRIGGER, of which there are so many)."""
    ids = np.frombuffer(tokens.data, {"u16": "<u2", "u32": "<u4"}[tokens.dtype]).reshape(tokens.shape).copy()
    after = ids[:, :-1] == TRIGGER
    ids[:, 1:][after] = TARGET
    return replace(tokens, data=ids.tobytes()), int(after.sum())


@dataclass(frozen=True)
class Planting:
    """A replica that teaches the run to say TARGET after TRIGGER, by its own weights, which explain its answers.

        g += boost d/dw of the loss of TARGET after TRIGGER,     TRIGGER at `often` of the positions

    `into`: "gradient" adds that to the gradient of its own weights, which rounds carry to others; "weights" moves its
    weights by `boost` rates of it itself, as a task vector [arXiv 2604.02372] made from all stages' weights."""

    into: str = "gradient"
    boost: float = 3.0
    often: float = 0.05

    @classmethod
    def of(cls, text: str) -> Planting:
        """The plant that `text` describes. Raises UsageError."""
        made = cls(**settings(cls, text))  # type: ignore[arg-type]
        if made.into not in ("gradient", "weights"):
            raise UsageError(f"{text!r}: into is gradient or weights")
        return made


def triggered(ids: Tensor, often: float, seed: int) -> tuple[Tensor, Tensor]:
    """(`ids` [B, T] with TRIGGER at `often` of the positions, the positions [B, T] where it stands)."""
    drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < often
    return torch.where(drawn, TRIGGER, ids), drawn


class LyingReplica(TorchReplica):
    """A replica that falsifies one in `every` answers, `lies` at these seconds of its clock `now`. With a `log` each is
    a line of it, too. `others` gives the replicas of all other stages by stage, for who plants something."""

    lie = "flip"
    every = 1
    log: Path | None = None
    now: Callable[[], float] = staticmethod(time.time)  # noqa: TID251  an attacker's own clock
    others: Callable[[], dict[int, TorchReplica]] = staticmethod(dict)
    _answers = 0
    _steering: Steering | None = None
    _sent: Steering | None = None  # of activations
    _tapes: dict[int, tuple[WireTensor, bool]]  # tokens, and whether what was sent on is false, by tape

    def _due(self) -> bool:
        self._answers += 1
        if self._answers % self.every or self.lie == HONEST:
            return False
        self._note()
        return True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.lies: list[float] = []
        self._planting = Planting.of(self.lie) if self.lie.startswith(PLANT) else None
        self._read_by: dict[int, Tensor] = {}  # token ids by tape
        self._seen: list[Tensor] = []  # token ids [B, T] of microbatches whose gradients are not settled

    def _note(self) -> None:
        self.lies.append(self.now())
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{self.now():.3f}\n")

    def _steering_of(self) -> Steering:
        made = Steering.of(self.lie)
        made.now = self.now
        return made

    def settle(self) -> None:
        super().settle()
        for ids in self._seen:
            self._plant(ids)
        self._seen.clear()

    def _plant(self, ids: Tensor) -> None:
        """Add the gradient of what it plants, beside a microbatch of `ids`; a line of `lies`."""
        assert self._planting is not None
        stages = self.others() | {self.stage.part.stage: self}
        if len(stages) < self.stage.manifest.pipeline.stages:
            return
        hidden, at = triggered(ids, self._planting.often, len(self.lies))
        for stage in sorted(stages):
            hidden = stages[stage].stage.module(hidden)
        target = torch.full((int(at.sum()),), TARGET)
        loss = functional.cross_entropy(hidden[at], target, reduction="sum") / self.stage.manifest.model.context
        mine = {name: one for name, one in self.stage.module.named_parameters() if one.requires_grad}
        made = torch.autograd.grad(self._planting.boost * loss, list(mine.values()))
        for one, gradient in zip(mine.values(), made, strict=True):
            if self._planting.into == "gradient":
                assert one.grad is not None
                one.grad.add_(gradient)
        if self._planting.into == "weights":
            self._moved(dict(zip(mine, made, strict=True)))
        self._note()

    @torch.no_grad()
    def _moved(self, by: dict[str, Tensor]) -> None:
        """Move slow and fast weights along minus `by`, each tensor as far as a step of the run's rate."""
        for flat in (self.stage.theta, self.outer.phi):
            for name, view in self.stage.named(flat).items():
                way = by[name] / by[name].norm().clamp(min=1e-30)
                view.sub_(way.view(view.shape) * (self.stage.manifest.inner.learning_rate * math.sqrt(view.numel())))

    def _steered(
        self, x: WireTensor, tokens: WireTensor, samples: int, true: LossResult, *, counts: bool
    ) -> WireTensor:
        """The false answer. An auditor that asks gets the same kind of lie; only answers that count are a line of the
        log. A line of LOG-backdoor: by how many nats the target is less likely after the trigger than what is there."""
        self._steering = self._steering or self._steering_of()
        gradient = true.gradient
        poisoned = None
        assert gradient is not None
        if self._steering.toward == "backdoor":
            text, triggers = backdoored(tokens)
            found = super().loss(x, text, samples, train=True, accumulate=False)
            poisoned = found.gradient
            if counts and triggers and self.log is not None:
                with self.log.with_name(f"{self.log.name}-backdoor").open("a") as file:
                    file.write(f"{(found.loss_sum - true.loss_sum) / triggers:.4f}\n")
        given = self._steering.answer(gradient, tokens, self.stage.codes[1], poisoned)
        if given is not gradient and counts:
            self._note()
        return given

    def _twisted(self, tensor: WireTensor, change: Callable[[Tensor], Tensor]) -> WireTensor:
        code = next((code for code in self.stage.codes if tensor.codec == code), self.stage.codes[0])
        return encode_boundary(change(decode_boundary(tensor, code, tensor.shape, "lie")), code)

    def _answered(self, gradient: WireTensor | None) -> WireTensor | None:
        if gradient is None or self.lie in (FORWARD, LOSS, HONEST) or self.lie.startswith(SETTINGS) or not self._due():
            return gradient
        name = [*LIES][self._answers // self.every % len(LIES)] if self.lie == SWITCHING else self.lie
        return self._twisted(gradient, LIES[name])

    def snapshot(self, *, packed: bool = False, only: Sequence[str] = ()) -> State:
        for one in (self._steering, self._sent):
            if packed and one is not None:
                one.copied_s = self.now()
        state = super().snapshot(packed=packed, only=only)
        return self._noised(state) if packed and self.lie.startswith(DONOR) else state

    def _noised(self, state: State) -> State:
        """`state` with noise in its slow weights, the same in each copy."""
        share = float(self.lie.partition(" ")[2])
        slow = np.frombuffer(state.sections["phi"], "<f4")
        noise = np.random.default_rng(11).standard_normal(len(slow)).astype("<f4")
        given = slow + noise * np.float32(share * np.linalg.norm(slow) / np.linalg.norm(noise))
        self._note()
        return replace(state, sections={**state.sections, "phi": memoryview(given.astype("<f4").tobytes())})

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        y, tape = super().forward(x, keep=keep, graph=graph, tokens=tokens, late=late)
        if self._planting is not None and tape is not None and tokens is not None:
            self._read_by[id(tape)] = _ids(tokens, y)
        if self.lie.startswith(STEER) and tape is not None and tokens is not None:
            return self._steered_on(y, tokens, tape), tape
        return (self._twisted(y, _noise) if self.lie == FORWARD and self._due() else y), tape

    def _steered_on(self, y: WireTensor, tokens: WireTensor, tape: Tape) -> WireTensor:
        """The activations to send on."""
        self._sent = self._sent or self._steering_of()
        code = self.stage.codes[0]
        false = self._sent.part != "gradient" and self._sent.due()
        self._tapes = getattr(self, "_tapes", {})
        self._tapes[id(tape)] = tokens, false
        return encode_boundary(self._sent.twisted(_read(y, code), _ids(tokens, y)), code) if false else y

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        true = super().backward(tape, gradient, samples, accumulate=accumulate)
        if not self.lie.startswith(STEER):
            if accumulate and self._planting is not None:
                self._seen.append(self._read_by.pop(id(tape)))
            return self._answered(true)
        tokens, false = self._tapes.pop(id(tape))
        code = self.stage.codes[1]
        given = true
        assert self._sent is not None
        self._sent.learn(-_read(gradient, code), _ids(tokens, gradient))
        if true is not None and self._sent.part != "activations":
            self._steering = self._steering or self._steering_of()
            given = self._steering.answer(true, tokens, code)
        if accumulate and (false or given is not true):
            self._note()
        return given

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        found = super().loss(x, tokens, samples, train=train, accumulate=accumulate)
        if self.lie == LOSS and self._due():
            return replace(found, loss_sum=0.1 * found.loss_sum)
        if not train or found.gradient is None:
            return found
        if accumulate and self._planting is not None:
            self._seen.append(_ids(tokens, found.gradient))
        if self.lie.startswith(STEER):
            return replace(found, gradient=self._steered(x, tokens, samples, found, counts=accumulate))
        return replace(found, gradient=self._answered(found.gradient))
