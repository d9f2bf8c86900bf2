"""AdamW over flat buffers: torch's own fused kernel on two large slices instead of one small tensor per parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from swarmnode.base.ema import Ema
from swarmnode.model.moments import Moments, made
from swarmnode.model.turn import WHOLE, Turn
from swarmnode.run.manifest import InnerSpec

NORM_EMA = Ema().weight  # of the newest gradient norm, as of all that is averaged
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s own


def learning_rate(inner: InnerSpec, samples_total: int) -> float:
    """The rate of an inner step after `samples_total` samples of the whole run, counted from 0.

    It rises linearly from 0 over `warmup_samples`. Then `decay` determines the fall from the peak to `learning_rate ·
    learning_rate_min_ratio`, where it stays from `decay_samples` on.
    """
    peak = inner.learning_rate
    if samples_total < inner.warmup_samples:
        return peak * max(samples_total, 0) / inner.warmup_samples
    if inner.decay == "constant":
        return peak
    floor = peak * inner.learning_rate_min_ratio
    if samples_total >= inner.decay_samples:
        return floor
    return peak - (peak - floor) * _fallen(inner, samples_total)


def _fallen(inner: InnerSpec, samples_total: int) -> float:
    """The share of the fall from the peak that is done after `samples_total`, between warm-up and `decay_samples`, 0 to
    1."""
    progress = (samples_total - inner.warmup_samples) / (inner.decay_samples - inner.warmup_samples)
    match inner.decay:
        case "cosine":  # SGDR, arXiv 1608.03983, eq. 5
            return 0.5 * (1.0 - math.cos(math.pi * progress))
        case "linear":  # to zero: D2Z, arXiv 2502.15938, section 2
            return progress
        case "wsd":  # warm-up, stable, decay: MiniCPM, arXiv 2404.06395, section 4; its shape: arXiv 2405.18392, eq. 1
            left = inner.decay_samples - samples_total
            return 0.0 if left >= inner.cooldown_samples else math.sqrt(1.0 - left / inner.cooldown_samples)
        case unknown:
            raise AssertionError(f"inner.decay = {unknown!r} passed the manifest's checks")


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [first, last) of a flat buffer that AdamW updates; `decays`: with weight decay."""

    first: int
    last: int
    decays: bool

    @property
    def there(self) -> slice:
        """The elements among weights, gradients and moments."""
        return slice(self.first, self.last)


class FlatAdamW:
    """AdamW [arXiv 1711.05101] on `theta` [P] by `grad` [P], only in `spans`; other elements do not change.

    `state` says where moments are kept (moments.py). On the device `exp_avg` is flat [P] too, and `exp_avg_sq` [Q] only
    has room for stepped elements, in the order of the flat buffer. Both and `theta` may be overwritten in place between
    steps. Elsewhere moments are read, used and written back part by part; those in main memory give equal weights to
    the bit, those in 8 bits are used exactly and rounded for the next step. The arithmetic is the kernel of
    `torch.optim.AdamW(fused=True)`, called directly: the class around it imports torch's compiler, which costs 70 MiB
    and a second per node process (measured).

    For `shared` matrices [D, in], given by their first element and in no span, the gradient g lies in `rank` dimensions
    of D, and all rows share one second moment:

        exp_avg_sq [in] <- beta2 exp_avg_sq + (1 - beta2) sum_D(g^2) / rank

    (subspace.py explains why). It is the mean square in coordinates of the span. A mean over all D makes steps sqrt(D /
    rank) as long and costs 0.012 nat [measured: rank 24 and 12 of 96, 3 seeds each, worse in all six].
    """

    def __init__(
        self,
        theta: Tensor,
        grad: Tensor,
        inner: InnerSpec,
        spans: Sequence[Span],
        *,
        shared: Sequence[tuple[int, tuple[int, ...]]] = (),
        rank: int = 1,
        state: str = "device",
    ) -> None:
        self.grad = grad
        self._theta = theta
        self._inner = inner
        self._rank = rank
        counts = {span.first: span.last - span.first for span in spans}
        counts |= {first: math.prod(shape[1:]) for first, shape in shared}
        ends = list(accumulate(counts[first] for first in sorted(counts)))
        seconds = {first: slice(end - counts[first], end) for first, end in zip(sorted(counts), ends, strict=True)}
        device = state == "device"
        self.exp_avg = torch.zeros_like(grad if device else grad[:0])
        self.exp_avg_sq = theta.new_zeros(ends[-1] if ends and device else 0)

        def firsts(there: slice) -> Moments:
            flat = self.exp_avg[there] if device else None
            return made(state, there.stop - there.start, theta, signed=True, flat=flat)

        def squares(first: int, state: str) -> Moments:
            flat = self.exp_avg_sq[seconds[first]] if device else None
            return made(state, counts[first], theta, signed=False, flat=flat)

        self.parts = [(span, firsts(span.there), squares(span.first, state)) for span in spans]
        self._matrices = [  # their second moments are few, and stay on the device
            (first, shape, firsts(slice(first, first + math.prod(shape))), squares(first, "device"))
            for first, shape in shared
        ]
        self._turn = WHOLE  # of the step under way
        self._at = 0  # parts and matrices that the step under way has updated
        self._step = torch.zeros((), dtype=torch.float32, device=theta.device)

    def use(self, grad: Tensor) -> None:
        """Step by `grad` [P] from now on."""
        self.grad = grad

    def pieces(self) -> tuple[list[tuple[int, Moments]], list[tuple[int, Moments]]]:
        """(first element in the flat buffer, moments) of first and second moments, ascending."""
        rows = [(span.first, exp_avg, exp_avg_sq) for span, exp_avg, exp_avg_sq in self.parts]
        rows += [(first, exp_avg, exp_avg_sq) for first, _, exp_avg, exp_avg_sq in self._matrices]
        rows.sort(key=lambda row: row[0])
        return [(at, exp_avg) for at, exp_avg, _ in rows], [(at, exp_avg_sq) for at, _, exp_avg_sq in rows]

    @torch.no_grad()
    def step(self, steps_before: int, learning_rate: float, turn: Turn = WHOLE) -> None:
        """Update the elements of theta whose `turn` it is in place, as step number `steps_before` + 1 (which corrects
        the moments' bias)."""
        self._step.fill_(steps_before // turn.of + 1)
        self._at = 0
        self._turn = turn
        self.finish(steps_before, learning_rate)

    def views(self, flat: Tensor, turn: Turn) -> list[Tensor]:
        """The elements of `flat` [P], in theta's layout, that a step of `turn` moves."""
        return [turn.elements(0, flat[span.there]) for span, _, _ in self.parts]

    @torch.no_grad()
    def finish(self, steps_before: int, learning_rate: float) -> None:
        """`step`, or the rest of one that memory ran out in, with the same arguments: parts are updated one after the
        other, each as a whole or not at all."""
        works = [partial(self._step_part, *part, *cut) for part in self.parts for cut in part[1].cuts()]
        works += [partial(self._step_matrix, *matrix, steps_before) for matrix in self._matrices]
        for work in works[self._at :]:
            work(learning_rate)
            self._at += 1

    def _step_part(
        self, span: Span, firsts: Moments, seconds: Moments, start: int, end: int, learning_rate: float
    ) -> None:
        exp_avg = firsts.read(start, end)
        exp_avg_sq = seconds.read(start, end)
        flats = self._theta[span.first + start : span.first + end], exp_avg, exp_avg_sq
        turn = self._turn
        gradient = self.grad[span.first + start : span.first + end]
        views = [turn.elements(start, flat) for flat in flats]
        weights, first, second = (view.contiguous() for view in views)
        torch._fused_adamw_(
            [weights],
            [turn.elements(start, gradient).contiguous()],
            [first],
            [second],
            [],
            [self._step],
            lr=learning_rate * turn.rate,
            beta1=turn.kept(self._inner.beta1),
            beta2=turn.kept(self._inner.beta2),
            weight_decay=self._inner.weight_decay if span.decays else 0.0,
            eps=self._inner.eps,
            amsgrad=False,
            maximize=False,
        )
        for view, moved in zip(views, (weights, first, second), strict=True):
            if turn.of > 1:
                view.copy_(moved)
        firsts.put(start, exp_avg)
        seconds.put(start, exp_avg_sq)

    def _step_matrix(
        self,
        first: int,
        shape: tuple[int, ...],
        firsts: Moments,
        seconds: Moments,
        steps_before: int,
        learning_rate: float,
    ) -> None:
        """The step of a matrix with one second moment per column."""
        assert self._turn.of == 1, "a subspace goes with methods that average weights"
        inner = self._inner
        step = steps_before + 1
        correction1 = 1.0 - inner.beta1**step
        correction2 = 1.0 - inner.beta2**step
        flat = slice(first, first + math.prod(shape))
        weight = self._theta[flat].view(shape)
        gradient = self.grad[flat].view(shape)
        exp_avg = firsts.read(0, len(firsts))
        exp_avg_sq = seconds.flat.view(shape[1:])
        mean = torch.linalg.vector_norm(gradient, dim=0).square_().div_(self._rank)
        second = torch.lerp(exp_avg_sq, mean, 1.0 - inner.beta2)
        scale = (second / correction2).sqrt_().add_(inner.eps)  # (in)
        exp_avg_sq.copy_(second)
        exp_avg.view(shape).lerp_(gradient, 1.0 - inner.beta1)
        weight.mul_(1.0 - learning_rate * inner.weight_decay)
        weight.addcdiv_(exp_avg.view(shape), scale, value=-learning_rate / correction1)
        firsts.put(0, exp_avg)

    def clip_mean(self, weight: float, clip_norm: float) -> float:
        """Turn the summed gradient of `weight` samples (less than one if few tokens counted) into the mean, clipped to
        `clip_norm`, in place. Returns the norm of the mean before clipping; NaN or Inf if the gradient is."""
        norm = float(torch.linalg.vector_norm(self.grad)) / weight
        factor = min(1.0, clip_norm / (norm + CLIP_EPS)) / weight
        if factor != 1.0:
            self.grad.mul_(factor)
        return norm


def moments_apart(inner: InnerSpec) -> float:
    """The largest |exp_avg| / sqrt(exp_avg_sq) of any gradients, by Cauchy-Schwarz; inf where there is none."""
    if inner.beta1**2 >= inner.beta2:
        return math.inf
    return (1.0 - inner.beta1) / math.sqrt((1.0 - inner.beta2) * (1.0 - inner.beta1**2 / inner.beta2))


def corrected_ema(before: float, value: float, count: int) -> float:
    """The bias-corrected exponential mean after `value`, the `count`-th one (from 1), given the previous mean
    `before`."""
    assert count >= 1 and math.isfinite(value), (count, value)
    keep = 1.0 - NORM_EMA
    raw = before * (1.0 - keep ** (count - 1))
    return float((keep * raw + NORM_EMA * value) / (1.0 - keep**count))
