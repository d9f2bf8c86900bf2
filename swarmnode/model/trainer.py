"""The trainer of a replica: by gradients of the whole stage. Those by forward passes alone and of some experts are in
`swarmnode_methods/one_byte.py` and `expert_average.py`."""

from __future__ import annotations

from swarmnode.model.stage import StageReplica
from swarmnode.ports import LossResult, StepReport, WireTensor


class Trainer:
    """Trains `stage` by gradients. Subclasses train it another way, beside an outer side of their own."""

    def __init__(self, stage: StageReplica) -> None:
        self.stage = stage

    @property
    def waiting(self) -> int:
        """Samples that count for the next inner step."""
        return self.stage.accumulated

    def loss(self, x: WireTensor, tokens: WireTensor, samples: int, *, accumulate: bool) -> LossResult:
        """A training microbatch at the last stage, see ports.Replica.loss."""
        return self.stage.loss(x, tokens, samples, train=True, accumulate=accumulate)

    def step(self, samples_total: int, batch: float, averaged: int) -> StepReport:
        """An inner step, see ports.Replica.step."""
        return self.stage.step(samples_total, batch, averaged)

    def applied(self) -> None:
        """Weights moved in a round."""

    def loaded(self) -> None:
        """Weights came from elsewhere."""
