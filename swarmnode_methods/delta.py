"""Common part of codecs of pseudo-gradients: a residual at the sender keeps what was not sent.

    e <- decay e + D ;  send C(e) ;  e <- e - C(e)          error feedback: arXiv 1809.07599; decay: arXiv 2508.15706

so sent + residual = accumulated, and a lost residual costs little at decay 0.95. Unbiased codecs need none. They cannot
be used with NoLoCo: receivers need slow weights equal to the sender's (mean.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from swarmnode.base.ports import WireTensor
from swarmnode.train.gossip.compression.codec import Bytes, Codec, Done
from swarmnode_methods.tiles import one_tensor

DECAY = 0.95  # SparseLoCo, arXiv 2508.15706


class DeltaCodec(Codec):
    """A codec of pseudo-gradients in one wire tensor."""

    tensors: ClassVar[int] = 1
    of_delta: ClassVar[bool] = True

    feedback: ClassVar[bool]
    """Whether what was not sent is kept for the next message."""

    unit: ClassVar[int]
    """Elements coded together: reads begin at multiples of it."""

    def __init__(self) -> None:
        self.residual: torch.Tensor | None = None

    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        flat = flat.to("cpu", torch.float32)
        if not self.feedback:
            self.code(wire, flat, seed, done)
            return
        if self.residual is None or self.residual.numel() != flat.numel():
            self.residual = torch.zeros(flat.numel())
        self.code_on_top(wire, flat, self.residual, seed, done)

    def code_on_top(self, wire: Bytes, flat: torch.Tensor, residual: torch.Tensor, seed: int, done: Done) -> None:
        """e <- decay e + D, write the packet of e into `wire`, and subtract what is sent from e."""
        self.code(wire, residual.mul_(DECAY).add_(flat), seed, done)

    @torch.no_grad()
    def take_back(self, tensors: Sequence[WireTensor], flat: torch.Tensor) -> None:
        """e <- (e + C(e) - D) / decay, up to float32 rounding."""
        if not self.feedback:
            return
        assert self.residual is not None and self.residual.numel() == flat.numel(), "this is not the last message"
        sent = torch.empty_like(self.residual)
        flat = flat.to("cpu", torch.float32)
        self.read(tensors, 0, sent)
        self.residual.add_(sent).sub_(flat).div_(DECAY)

    def check(self, tensors: Sequence[WireTensor], parameters: int) -> None:
        nbytes = self.nbytes(parameters)
        self.inspect(one_tensor(tensors, self.name, parameters, nbytes, nbytes), parameters)

    @torch.no_grad()
    def read(
        self, tensors: Sequence[WireTensor], start: int, out: torch.Tensor, reference: torch.Tensor | None = None
    ) -> None:
        parameters = tensors[0].shape[0]
        assert start % self.unit == 0 and (out.numel() % self.unit == 0 or start + out.numel() == parameters)
        self.uncode_into(np.frombuffer(tensors[0].data, np.uint8), parameters, start, out)

    def uncode_into(self, data: Bytes, parameters: int, start: int, out: torch.Tensor) -> None:
        """Elements of inspected `data` from `start` on into `out`."""
        out.copy_(self.uncode(data, parameters, start, start + out.numel()))

    @abstractmethod
    def code(self, wire: Bytes, flat: torch.Tensor, seed: int, done: Done) -> None:
        """Write the packet of `flat` float32 [P] on the CPU into `wire`, as `write`. With `feedback`, `flat` is the
        residual, and what is sent is subtracted from it."""

    @abstractmethod
    def inspect(self, data: Bytes, parameters: int) -> None:
        """Raises RemoteFault unless `data`, of the right length, decodes to finite numbers."""

    @abstractmethod
    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of inspected `data`, float32."""
