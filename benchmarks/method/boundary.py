"""The price of fewer bytes between stages in learning: plain PyTorch, without code of the pipeline.

`swarmnode bench boundary` trains a small Llama with Muon. At each boundary between two stages it codes what a pipeline
would send: activations there, their gradients back. A setting is [MAP+]THERE[:BACK], and BACK is THERE unless given:

    bf16, int8     as pipeline.boundary
    intN           a step for each 64 numbers of a token, 2^(N - 1) - 1 steps to the largest of them
    hadN           tiles of up to 64 numbers, their signs drawn once, times a Hadamard matrix; then the nearest of 2^N
                   levels for normal numbers, by the tile's root mean square [TAH-Quant, arXiv 2506.01352; Max, 1960]
    sdN            hadN of a token's numbers and of what the token before it lost: sums over tokens lose next to nothing
                   [error feedback along tokens, as a sigma-delta converter's]
    rdN            hadN with other signs for each place of a sample: the errors of tokens alike have other directions
    mcN            hadN, and for each sample the mean over its tokens of what was lost, in bf16, which the other stage
                   adds to every token: sums over tokens lose nothing
    aqN            hadN of the difference from what was decoded for the same sample the last time [AQ-SGD, 2206.01299];
                   the first time bf16
    frozenK        Z = (X - E[t]) U, X' = E[t] + Z U^T: U and the token table E frozen, writers kept in the span of U
                   [Protocol Models, 2506.01260: pipeline.boundary = "subspace"]
    learnedK       Z = (X - E1[t] P) A, X' = Z A^T + E2[t] P: A [D, K] orthonormal and learned, E1, E2 [V, K] learned, P
                   fixed and orthonormal. A <- polar(A - a polar(m)), m the mean of g - A sym(A^T g), a a tenth of
                   Muon's rate [MAPL, 2606.05484]
    anchorsK       X' = X - E1[t] P + E2[t] P: the tables of learnedK alone, and all numbers of a token
    residualK      Z = enc(X) + first K of X, X' = dec(Z) + Z padded with zeros; enc and dec of two layers with SiLU
                   between, trained with the rest [ResBM, 2604.11947]

Bytes are those of a token and boundary there and back, scales included.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.method.gossip import in_processes
from benchmarks.method.replica_batch import read_text
from benchmarks.swarm.plain_model import PlainLlama, PlainMuon, initialise
from swarmnode.base.errors import UsageError
from swarmnode.run.manifest import ModelSpec
from swarmnode.run.manifest.recipe import PRESETS

TILE = 64  # numbers of a token that share a scale
SCALE_LEAST = 2.0**-100  # of zeros
BASE = "bf16"
WARMUP = 40  # steps
COOLDOWN = 0.25  # of a run: the share in which the rate falls to zero
MOMENTUM = 0.9
DECAY = 0.1
PROJECTOR = 0.1  # MAPL: the projector's rate over Muon's
HELD_OUT = 64  # samples
SETTING = re.compile(
    r"(?:(?P<map>frozen|learned|anchors|residual)(?P<rank>\d+)\+)?(?P<there>bf16|int8|(?:int|had|rd|sd|mc|aq)[1-6])"
    r"(?::(?P<back>bf16|int8|(?:int|had|rd|sd|mc)[1-6]))?"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A parsed setting; `map` "" without one, of `rank` K."""

    map: str
    rank: int
    there: str
    back: str

    @staticmethod
    def of(text: str) -> Setting:
        """Raises UsageError."""
        found = SETTING.fullmatch(text)
        if found is None:
            raise UsageError(f"{text!r}: a setting is [MAP+]THERE[:BACK], such as int8, had3:had4 or learned96+had4")
        there = found["there"]
        back = found["back"] or there.replace("aq", "had")
        return Setting(found["map"] or "", int(found["rank"] or 0), there, back)

    def nbytes(self, width: int, context: int) -> float:
        """Bytes of a token and boundary there and back; of aqN without the first time."""
        count = width if self.map == "anchors" else self.rank or width
        return code_nbytes(self.there, count, context) + code_nbytes(self.back, count, context)


def bits_of(code: str) -> int:
    return {"bf16": 16}.get(code, int(code[-1]))


def code_nbytes(code: str, count: int, context: int) -> float:
    """Bytes of `count` numbers of a token, one of a sample of `context`."""
    if code == "bf16":
        return 2.0 * count
    scales = -(-count // TILE) if code.startswith("int") else count // tile_of(count)
    means = 2 * count / context if code.startswith("mc") else 0.0
    return count * bits_of(code) / 8 + 2 * scales + means


def tile_of(count: int) -> int:
    """The size of the tiles that hadN turns: a power of two."""
    return math.gcd(count, TILE)


@dataclass(frozen=True, slots=True)
class BoundaryRun:
    what: str
    stages: int
    layers: int
    width: int
    samples: int
    context: int
    steps: int
    rate: float
    seed: int
    epochs: int
    text: str | None
    cooldown: float = COOLDOWN

    @property
    def model(self) -> ModelSpec:
        """A byte model of this width, with heads of 32 and an FFN of 2.75 widths."""
        heads = max(1, self.width // 32)
        return replace(
            PRESETS["demo"].model,
            vocabulary=256,
            width=self.width,
            heads=heads,
            kv_heads=heads,
            ffn=self.width * 11 // 4,
            layers=self.layers,
            context=self.context,
        )


@cache
def normal_levels(bits: int) -> tuple[Tensor, Tensor]:
    """(the 2^bits levels of Max's quantiser for normal numbers, the thresholds between them), by Lloyd's iteration."""
    grid = torch.linspace(-6.0, 6.0, 24_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * grid.square())
    levels = torch.linspace(-2.5, 2.5, 1 << bits, dtype=torch.float64)
    for _ in range(300):
        cell = torch.bucketize(grid, 0.5 * (levels[1:] + levels[:-1]))
        mass = torch.zeros_like(levels).index_add_(0, cell, weight)
        levels = torch.zeros_like(levels).index_add_(0, cell, weight * grid) / mass
    return levels.float(), (0.5 * (levels[1:] + levels[:-1])).float()


@cache
def hadamard(size: int) -> Tensor:
    """[size, size], orthonormal, its columns' signs drawn once."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size)) * 2.0 - 1.0
    return signs.unsqueeze(1) * matrix / math.sqrt(size)


@cache
def place_signs(places: int, width: int) -> Tensor:
    """[places, width], drawn once."""
    drawn = torch.randint(0, 2, (places, width), generator=torch.Generator().manual_seed(width))
    return drawn * 2.0 - 1.0


def coded(x: Tensor, code: str) -> Tensor:
    """`x` [B, T, K] as the other stage decodes it."""
    if code == "bf16":
        return x.bfloat16().float()
    width = x.shape[2]
    bits = bits_of(code)
    if code.startswith("int"):
        most = 2 ** (bits - 1) - 1
        padded = F.pad(x, (0, -width % TILE)).view(*x.shape[:2], -1, TILE)
        step = (padded.abs().amax(3, keepdim=True) / most).clamp_(min=SCALE_LEAST).bfloat16().float()
        whole: Tensor = ((padded / step).round_().clamp_(-most, most) * step).flatten(2)
        return whole[..., :width]
    if code.startswith("sd"):
        return _along_tokens(x, f"had{bits}")
    if code.startswith("mc"):
        found = coded(x, f"had{bits}")
        return found + coded((x - found).mean(1, keepdim=True), "bf16")
    if code.startswith("rd"):
        signs = place_signs(x.shape[1], width)
        return signs * coded(signs * x, f"had{bits}")
    tile = tile_of(width)
    levels, middles = normal_levels(bits)
    turned = x.reshape(*x.shape[:2], -1, tile) @ hadamard(tile)
    scale = turned.square().mean(3, keepdim=True).sqrt_().clamp_(min=SCALE_LEAST).bfloat16().float()
    nearest = levels[torch.bucketize(turned / scale, middles)] * scale
    back: Tensor = (nearest @ hadamard(tile).T).flatten(2)
    return back


def _along_tokens(x: Tensor, code: str) -> Tensor:
    """`x` coded token by token, each with the error of the one before."""
    lost = torch.zeros_like(x[:, :1])
    found = []
    for token in torch.split(x, 1, dim=1):
        wanted = token + lost
        found.append(coded(wanted, code))
        lost = wanted - found[-1]
    return torch.cat(found, dim=1)


class _Through(torch.autograd.Function):
    """Codes activations on their way there, and their gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Tensor, back: str) -> Tensor:
        ctx.back = back
        return sent

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return coded(gradient, ctx.back), None, None


class Boundary(nn.Module):
    """The way between two stages, from the activations of one to those that the next works with."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self._sent: dict[int, Tensor] = {}  # of aqN: by sample, what was decoded last

    def forward(self, x: Tensor, tokens: Tensor, samples: Sequence[int]) -> Tensor:
        return self.send(x, samples)

    def send(self, x: Tensor, samples: Sequence[int]) -> Tensor:
        with torch.no_grad():
            code = self.setting.there
            sent = self._difference(x, samples, code) if code.startswith("aq") else coded(x, code)
        result: Tensor = _Through.apply(x, sent, self.setting.back)  # type: ignore[no-untyped-call]
        return result

    def _difference(self, x: Tensor, samples: Sequence[int], code: str) -> Tensor:
        rows = []
        for row, sample in zip(torch.split(x, 1), samples, strict=True):
            before = self._sent.get(sample)
            rows.append(coded(row, "bf16") if before is None else before + coded(row - before, code))
            if sample >= 0:  # not of a validation
                self._sent[sample] = rows[-1]
        return torch.cat(rows)


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    raw = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    found: Tensor = torch.linalg.qr(raw)[0]
    return found


class FrozenMap(Boundary):
    """K numbers of a token by U and the frozen table."""

    def __init__(self, setting: Setting, net: PlainLlama, seed: int) -> None:
        super().__init__(setting)
        self.table = net.embedding.weight.detach().clone()
        self.basis = orthonormal(self.table.shape[1], setting.rank, seed)

    def forward(self, x: Tensor, tokens: Tensor, samples: Sequence[int]) -> Tensor:
        own = self.table[tokens]
        return own + self.send((x - own) @ self.basis, samples) @ self.basis.T


class AnchorMap(Boundary):
    """All numbers of a token, between anchors of K numbers on both sides."""

    def __init__(self, setting: Setting, net: PlainLlama, seed: int) -> None:
        super().__init__(setting)
        table = net.embedding.weight.detach()
        self.span = orthonormal(table.shape[1], setting.rank, seed).T  # P
        self.here = nn.Parameter(table @ self.span.T)
        self.beyond = nn.Parameter(table @ self.span.T)

    def forward(self, x: Tensor, tokens: Tensor, samples: Sequence[int]) -> Tensor:
        return self.send(x - self.here[tokens] @ self.span, samples) + self.beyond[tokens] @ self.span


class LearnedMap(AnchorMap):
    """K numbers of a token by A and the anchors of both sides."""

    def __init__(self, setting: Setting, net: PlainLlama, seed: int) -> None:
        super().__init__(setting, net, seed)
        table = net.embedding.weight.detach()
        self.projector = nn.Parameter(orthonormal(table.shape[1], setting.rank, seed + 1))
        self._momentum = torch.zeros_like(self.projector)

    def forward(self, x: Tensor, tokens: Tensor, samples: Sequence[int]) -> Tensor:
        z = (x - self.here[tokens] @ self.span) @ self.projector
        return self.send(z, samples) @ self.projector.T + self.beyond[tokens] @ self.span

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """The Riemannian step of A."""
        a = self.projector
        gradient = a.grad
        assert gradient is not None
        inner = a.T @ gradient
        self._momentum.lerp_(gradient - a @ (0.5 * (inner + inner.T)), 1.0 - MOMENTUM)
        a.copy_(polar(a - rate * polar(self._momentum)))


def polar(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found: Tensor = left @ right
    return found


class ResidualMap(Boundary):
    """K numbers of a token by an encoder and a decoder beside the stream's own first K."""

    def __init__(self, setting: Setting, width: int) -> None:
        super().__init__(setting)
        rank = setting.rank
        encoded = nn.Linear(width, rank, bias=False)
        decoded = nn.Linear(width, width, bias=False)
        for last in (encoded, decoded):
            nn.init.zeros_(last.weight)  # it begins as the stream's own first K
        self.encode = nn.Sequential(nn.Linear(width, width, bias=False), nn.SiLU(), encoded)
        self.decode = nn.Sequential(nn.Linear(rank, width, bias=False), nn.SiLU(), decoded)

    def forward(self, x: Tensor, tokens: Tensor, samples: Sequence[int]) -> Tensor:
        z = self.send(self.encode(x) + x[..., : self.setting.rank], samples)
        found: Tensor = self.decode(z) + F.pad(z, (0, x.shape[2] - z.shape[2]))
        return found


def boundary(setting: Setting, net: PlainLlama, number: int, seed: int) -> Boundary:
    if setting.map == "frozen":
        return FrozenMap(setting, net, seed)  # the same everywhere
    if setting.map == "learned":
        return LearnedMap(setting, net, 1000 * seed + 2 * number)
    if setting.map == "anchors":
        return AnchorMap(setting, net, 1000 * seed + 2 * number)
    if setting.map == "residual":
        return ResidualMap(setting, net.embedding.embedding_dim)
    return Boundary(setting)


class Pipeline:
    """One process that trains what a pipeline of stages would."""

    def __init__(self, run: BoundaryRun) -> None:
        self.run = run
        torch.manual_seed(run.seed)
        self.net = PlainLlama(run.model)
        initialise(self.net, run.model, run.seed)
        setting = Setting.of(run.what)
        if setting.rank > run.width:
            raise UsageError(f"{run.what}: K is at most the width, {run.width}")
        cuts = [round(run.layers * stage / run.stages) for stage in range(1, run.stages)]
        self._cuts = {cut: boundary(setting, self.net, at, run.seed) for at, cut in enumerate(cuts)}
        self._anchored = [one for one in self._cuts.values() if isinstance(one, AnchorMap)]
        self._basis = next((one.basis for one in self._cuts.values() if isinstance(one, FrozenMap)), None)
        self._learned = [one for one in self._cuts.values() if isinstance(one, LearnedMap)]
        self._writers = [p for name, p in self.net.named_parameters() if name.endswith((".o.weight", ".down.weight"))]
        self._project(self._writers)
        hidden = [p for layer in self.net.layers for p in layer.parameters() if p.dim() == 2]
        hidden += [p for one in self._cuts.values() if isinstance(one, ResidualMap) for p in one.parameters()]
        elsewhere = [p for p in self.net.parameters() if not any(p is one for one in hidden)]
        if self._basis is not None:
            self.net.embedding.weight.requires_grad_(False)
            elsewhere = [p for p in elsewhere if p.requires_grad]
        elsewhere += [p for one in self._anchored for p in (one.here, one.beyond)]
        self._every = [*hidden, *elsewhere, *(one.projector for one in self._learned)]
        self._muon = PlainMuon(hidden, run.rate, MOMENTUM, DECAY, torch.float32)
        self._adamw = torch.optim.AdamW(elsewhere, run.rate, betas=(0.9, 0.95), weight_decay=DECAY)
        self.passed_by = range(0)  # layers that are left out
        self._train, held = read_text(run.text)
        self._chance = np.random.Generator(np.random.Philox(key=run.seed))
        self._starts = self._chance.integers(
            0, len(self._train) - run.context - 1, math.ceil(run.steps / run.epochs) * run.samples
        )
        at = np.linspace(0, len(held) - run.context - 1, HELD_OUT).astype(np.int64)
        self._held = _samples(held, at, run.context)

    @torch.no_grad()
    def _project(self, matrices: Sequence[Tensor]) -> None:
        if self._basis is not None:
            for one in matrices:
                one.copy_(self._basis @ (self._basis.T @ one))

    def loss(self, tokens: Tensor, samples: Sequence[int]) -> Tensor:
        """Nats of a byte of `tokens` [B, T + 1]."""
        x = self.net.embedding(tokens[:, :-1])
        for at, layer in enumerate(self.net.layers):
            if at in self._cuts:
                x = self._cuts[at](x, tokens[:, :-1], samples)
            if at not in self.passed_by:
                x = layer(x, self.net.cos, self.net.sin)
        logits = self.net.head(self.net.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def learn(
        self, look_every: int = 0, passed_by: Callable[[int], range] = lambda step: range(0)
    ) -> list[tuple[int, float]]:
        """Train, without the layers `passed_by` of each step, which do not move in it. Returns (step, nats of a
        held-out byte) after each `look_every` steps."""
        run = self.run
        looks = []
        for step in range(run.steps):
            self.passed_by = passed_by(step)
            first = step * run.samples % len(self._starts)
            numbers = range(first, first + run.samples)
            tokens = _samples(self._train, self._starts[first : first + run.samples], run.context)
            self.loss(tokens, numbers).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._every, 1.0)
            if self._basis is not None:
                self._project([one.grad for one in self._writers if one.grad is not None])
            left = (run.steps - step) / (run.steps * run.cooldown) if run.cooldown else 1.0
            rate = run.rate * min(1.0, (step + 1) / WARMUP, left)
            for optimizer in (self._muon, self._adamw):
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            for one in self._learned:
                one.step(PROJECTOR * rate)
            self._project(self._writers)
            for parameter in self._every:
                parameter.grad = None
            if look_every and (step + 1) % look_every == 0:
                looks.append((step + 1, self.nats()))
        self.passed_by = range(0)
        return looks

    @torch.no_grad()
    def nats(self) -> float:
        """Nats of a held-out byte, through the boundaries."""
        parts = [self.loss(part, [-1] * len(part)) for part in torch.split(self._held, 16)]
        return float(torch.stack(parts).mean())


def _samples(text: np.ndarray[Any, np.dtype[np.uint8]], starts: np.ndarray[Any, Any], context: int) -> Tensor:
    return torch.from_numpy(np.stack([text[at : at + context + 1] for at in starts]).astype(np.int64))


def measure(run: BoundaryRun) -> dict[str, Any]:
    torch.set_num_threads(1)
    one = Pipeline(run)
    one.learn()
    return {"what": run.what, "seed": run.seed, "nats": one.nats()}


def run(
    whats: Sequence[str],
    *,
    stages: int = 3,
    layers: int = 3,
    width: int = 192,
    samples: int = 4,
    context: int = 128,
    steps: int = 300,
    rate: float = 0.006,
    seeds: int = 1,
    epochs: int = 1,
    jobs: int = 1,
    text: str | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": [a row for each of `whats`], "runs": [...]}; bf16 is always measured. Raises UsageError."""
    if not 2 <= stages <= layers:
        raise UsageError(f"{stages} stages of {layers} layers: 2 to {layers} have boundaries between them")
    whats = [BASE, *(what for what in whats if what != BASE)]
    for what in whats:
        Setting.of(what)
    order = [
        BoundaryRun(what, stages, layers, width, samples, context, steps, rate, seed, epochs, text)
        for seed in range(seeds)
        for what in whats
    ]
    runs = []
    for found in in_processes(measure, order, jobs):
        runs.append(found)
        say(f"{found['what']}, seed {found['seed']}: {found['nats']:.4f} nats")
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(runs, indent=1))
    base = {one["seed"]: one["nats"] for one in runs if one["what"] == BASE}
    return {"rows": [_row(what, width, context, runs, base) for what in whats], "runs": runs}


def _row(what: str, width: int, context: int, runs: Sequence[dict[str, Any]], base: dict[int, float]) -> dict[str, Any]:
    mine = [one for one in runs if one["what"] == what]
    over = [one["nats"] - base[one["seed"]] for one in mine]
    nbytes = Setting.of(what).nbytes(width, context)
    return {
        "boundary": what,
        "bytes": nbytes,
        "of bf16": nbytes / (4 * width),
        "nats": statistics.fmean(one["nats"] for one in mine),
        "over bf16": statistics.fmean(over),
        "spread": statistics.stdev(over) if len(over) > 1 else math.nan,
    }
