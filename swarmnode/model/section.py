"""The flat sections of a replica's state, and their sizes in a run. No tensors.

    theta       [P]   fast weights
    phi         [P]   slow weights
    momentum    [P]   of the outer optimizer; missing where gossip.alpha is 0, which never reads it
    table       [V D] this end's part of a tied model's table; only where both ends train it (tied_table.py)
    exp_avg     [P]   first moments
    exp_avg_sq  [Q]   second moments of the elements stepped by AdamW, in the order of the flat buffer; missing where
                      there are none

P is every trained parameter of the stage (adapter.py). Muon's matrices, nearly all of a large stage, have no second
moment. So a replica with plain averaging and Muon keeps 12 bytes a parameter instead of 20, and sends 8 instead of 12.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from enum import Enum, auto

from swarmnode.model.adapter import trained_shapes
from swarmnode.model.architecture import Shapes
from swarmnode.model.split import HEAD, TABLE, StageLayers, is_hidden_matrix, is_writer
from swarmnode.run.manifest import Manifest, constants
from swarmnode.run.manifest.kind_compat import trains_both_ends

SECTIONS = ("theta", "phi", "momentum", "table", "exp_avg", "exp_avg_sq")
ITEMSIZE = 4  # float32
# Bytes per element of each section in a snapshot, three fifths of those in memory: a joiner of a large model waits most
# of an hour for its state over a home connection. bfloat16 changes values by 2^-8 at most.
PACKED_ITEMSIZE = {"theta": 2, "phi": 4, "momentum": 2, "table": 4, "exp_avg": 2, "exp_avg_sq": 2}

OPTIMIZER_STATES = ("device", "8bit", "host")
"""The values of `--optimizer-state` besides auto, in the order in which auto tries them (moments.py)."""

Sizes = Mapping[str, int]
"""Elements of each section, in the order of SECTIONS."""


def outer_sections(sizes: Sizes) -> tuple[str, ...]:
    """The sections that rounds move, of a state of `sizes`: all that a newcomer takes from another replica in most runs
    (keep/transfer/snapshot.py). Its fast weights begin equal to the slow ones, and its moments are its own."""
    return tuple(name for name in ("phi", "momentum", "table") if name in sizes)


class StepRule(Enum):
    """The method by which an inner step moves a parameter."""

    NOT = auto()  # frozen
    MUON = auto()
    ADAMW = auto()
    SHARED = auto()  # AdamW with one second moment for each column (optimizer.py)


def stepped(manifest: Manifest, name: str, shape: tuple[int, ...]) -> StepRule:
    """The method by which the run's optimizer moves the parameter `name`."""
    subspace = manifest.pipeline.boundary == "subspace"
    if subspace and name == TABLE:
        return StepRule.NOT
    if manifest.inner.optimizer == "muon" and is_hidden_matrix(name, shape):
        return StepRule.MUON
    return StepRule.SHARED if subspace and is_writer(name) else StepRule.ADAMW


def section_shapes(manifest: Manifest, part: StageLayers) -> dict[str, Shapes]:
    """For each section that a replica of `part` keeps: the parameters with elements in it and their shapes there, in
    order."""
    every = trained_shapes(manifest, part)
    seconds: Shapes = {}
    for name, shape in every.items():
        by = stepped(manifest, name, shape)
        if by in (StepRule.ADAMW, StepRule.SHARED):
            seconds[name] = shape[1:] if by is StepRule.SHARED else shape
    shapes = {section: seconds if section == "exp_avg_sq" else every for section in SECTIONS}
    if constants(manifest.gossip).alpha == 0.0:
        del shapes["momentum"]
    if not seconds:  # adapters stepped by Muon alone
        del shapes["exp_avg_sq"]
    shapes["table"] = tied_table(manifest, part)
    if not shapes["table"]:
        del shapes["table"]
    return shapes


def tied_table(manifest: Manifest, part: StageLayers) -> Shapes:
    """The shape of the part that an end of the pipeline has in a tied model's table, if both train it. The other end's
    has another name, so that a checkpoint cut into other stages gives each end its own."""
    if not trains_both_ends(manifest) or not (part.has_embedding or part.has_head):
        return {}
    return {TABLE if part.has_embedding else HEAD: (manifest.model.vocabulary, manifest.model.width)}


def section_sizes(manifest: Manifest, part: StageLayers) -> dict[str, int]:
    """Elements of each section that a replica of `part` keeps: required of any state of the run."""
    return dict(_sizes(manifest, part))


@functools.lru_cache(maxsize=1024)  # estimates of a whole fleet ask again and again
def _sizes(manifest: Manifest, part: StageLayers) -> tuple[tuple[str, int], ...]:
    shapes = section_shapes(manifest, part)
    return tuple((section, sum(map(math.prod, of.values()))) for section, of in shapes.items())


def state_nbytes(sizes: Sizes) -> int:
    """Bytes of a state in memory and in a checkpoint, all float32."""
    return ITEMSIZE * sum(sizes.values())


def snapshot_nbytes(sizes: Sizes) -> int:
    """Bytes of a state as sent."""
    return sum(PACKED_ITEMSIZE[section] * count for section, count in sizes.items())
