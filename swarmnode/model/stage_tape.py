"""A microbatch that a stage has in hand: between its forward and its backward, and as a probe of its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from swarmnode.model.stage_input import StageInput
from swarmnode.model.weight_stash import WeightVersion
from swarmnode.model.working_copy import WorkingVersion


@dataclass(slots=True, eq=False, weakref_slot=True)
class StageTape:
    """A forward's input as it arrived, the weights it used, and its graph while that is kept."""

    kept: StageInput
    output: Tensor | None
    leaf: Tensor | None
    weights: WeightVersion | WorkingVersion | None
    version: int
    graph_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + (self.graph_nbytes if self.output is not None else 0)


@dataclass(slots=True)
class QualityProbe:
    """A microbatch and a measure of a stage's output on it."""

    kept: StageInput
    wanted: Tensor  # the gradient of the output, or on the last stage the targets [B, T]
    weight: float  # samples that the counted targets amount to

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + self.wanted.nbytes
