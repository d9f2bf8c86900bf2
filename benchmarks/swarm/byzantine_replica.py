"""A lying replica in the pipeline, for `bench attack --pipeline` (cli/byzantine_node.py runs it as a node).

It gives the same lies to audits. Its own weights stay honest, so that partners in a round get its real updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from swarmnode.machine.replica import TorchReplica
from swarmnode.model.boundary import decode_boundary, encode_boundary
from swarmnode.ports import LossResult, Tape, WireTensor


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


class ByzantineReplica(TorchReplica):
    """A replica that falsifies one in `every` answers. Each lie is a line of `log`: unix seconds."""

    lie = "flip"
    every = 1
    log: Path
    _answers = 0

    def _due(self) -> bool:
        self._answers += 1
        if self._answers % self.every or self.lie == HONEST:
            return False
        with self.log.open("a") as file:
            file.write(f"{time.time():.3f}\n")  # noqa: TID251  an attacker's own clock
        return True

    def _twisted(self, tensor: WireTensor, change: Callable[[Tensor], Tensor]) -> WireTensor:
        kind = self.stage.manifest.pipeline.boundary
        return encode_boundary(change(decode_boundary(tensor, kind, tensor.shape, "lie")), kind)

    def _answered(self, gradient: WireTensor | None) -> WireTensor | None:
        if gradient is None or self.lie in (FORWARD, LOSS, HONEST) or not self._due():
            return gradient
        name = [*LIES][self._answers // self.every % len(LIES)] if self.lie == SWITCHING else self.lie
        return self._twisted(gradient, LIES[name])

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        y, tape = super().forward(x, keep=keep, graph=graph, tokens=tokens, late=late)
        return (self._twisted(y, _noise) if self.lie == FORWARD and self._due() else y), tape

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        return self._answered(super().backward(tape, gradient, samples, accumulate=accumulate))

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        found = super().loss(x, tokens, samples, train=train, accumulate=accumulate)
        if self.lie == LOSS and self._due():
            return replace(found, loss_sum=0.1 * found.loss_sum)
        return replace(found, gradient=self._answered(found.gradient)) if train else found
