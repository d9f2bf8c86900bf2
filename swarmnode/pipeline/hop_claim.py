"""A server's answer to one hop as an audit sees it: what was claimed, and what a recomputation gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId
from swarmnode.ports import WireTensor
from swarmnode.wire import call_pb2 as wire


class StepsContradicted(RemoteFault):
    """A peer gives weights that cannot be those it stated it had: it took too many or too few inner steps since."""


@dataclass(frozen=True, slots=True)
class HopClaim:
    """A server's answer to one hop: its statement and the tensors that the statement names. `came_s`: the event loop's
    time when it came; None if another caller got it. `coherence`: how far its gradient points one way."""

    statement: wire.Statement
    samples: int
    x: WireTensor
    tokens: WireTensor
    gradient: WireTensor
    came_s: float | None = None
    coherence: float = 0.0

    @property
    def server(self) -> PeerId:
        return PeerId(self.statement.server)

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.tokens.nbytes + self.gradient.nbytes

    def answer(self, sent: WireTensor | None) -> HopAnswer:
        """The claimed result; `sent` are the activations shown as sent on, None at the last stage. Only there the
        stated loss is the server's own."""
        return HopAnswer(self.gradient, sent, self.statement.loss_sum if sent is None else 0.0)


@dataclass(frozen=True, slots=True)
class HopAnswer:
    """Result of one hop: the gradient of x and the activations sent on; at the last stage the loss instead of
    activations. `apart`: inner steps between the weights of a recomputation and those it stands for."""

    gradient: WireTensor
    sent: WireTensor | None
    loss_sum: float
    statement: wire.Statement | None = None  # of a recomputed hop
    apart: int = 0

    @classmethod
    def of(cls, tensors: Sequence[WireTensor], loss_sum: float, statement: wire.Statement | None = None) -> HopAnswer:
        """The result of a recomputed hop after the first stage. `tensors`: the activations sent on, but at the last
        stage, and the gradient of x."""
        return cls(tensors[-1], tensors[0] if len(tensors) == 2 else None, loss_sum, statement)
