"""What a replica's state is made of: flat sections, and how many elements each has in a run. No tensors.

    theta       [P]   fast weights
    phi         [P]   slow weights
    momentum    [P]   of the outer optimizer; missing where gossip.alpha is 0, which never reads it
    exp_avg     [P]   first moments
    exp_avg_sq  [Q]   second moments, of what AdamW steps alone and in the order of the flat buffer

P is every parameter of the stage. Muon's matrices, nearly all of a large stage, have no second moment. So a replica
with plain averaging and Muon keeps 12 bytes a parameter instead of 20, and sends 8 instead of 12.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto

from swarmnode.manifest import Manifest, constants
from swarmnode.model.split import TABLE, Part, Shapes, is_hidden_matrix, is_writer, parameter_shapes

SECTIONS = ("theta", "phi", "momentum", "exp_avg", "exp_avg_sq")
ITEMSIZE = 4  # float32
# Bytes an element of each section, as a snapshot carries it. Three fifths of what they are in memory: a joiner of a
# large model waits most of an hour for its state over a line at home. bfloat16 changes what it holds by 2^-8 at most.
PACKED_ITEMSIZE = {"theta": 2, "phi": 4, "momentum": 2, "exp_avg": 2, "exp_avg_sq": 2}

Sizes = Mapping[str, int]
"""Elements of each section, in the order of SECTIONS."""


class Stepped(Enum):
    """By what an inner step moves a parameter."""

    NOT = auto()  # frozen
    MUON = auto()
    ADAMW = auto()
    SHARED = auto()  # AdamW with one second moment for each column (optimizer.py)


def stepped(manifest: Manifest, name: str, shape: tuple[int, ...]) -> Stepped:
    """By what the run's optimizer moves the parameter `name`."""
    subspace = manifest.pipeline.boundary == "subspace"
    if subspace and name == TABLE:
        return Stepped.NOT
    if manifest.inner.optimizer == "muon" and is_hidden_matrix(name, shape):
        return Stepped.MUON
    return Stepped.SHARED if subspace and is_writer(name) else Stepped.ADAMW


def section_shapes(manifest: Manifest, part: Part) -> dict[str, Shapes]:
    """Of each section that a replica of `part` keeps, the parameters with elements in it and their shapes there, in the
    order in which they lie."""
    every = parameter_shapes(manifest.model, part)
    seconds: Shapes = {}
    for name, shape in every.items():
        by = stepped(manifest, name, shape)
        if by in (Stepped.ADAMW, Stepped.SHARED):
            seconds[name] = shape[1:] if by is Stepped.SHARED else shape
    found = {section: seconds if section == "exp_avg_sq" else every for section in SECTIONS}
    if constants(manifest.gossip).alpha == 0.0:
        del found["momentum"]
    return found


def section_sizes(manifest: Manifest, part: Part) -> dict[str, int]:
    """Elements of each section that a replica of `part` keeps: what any state of the run must have."""
    shapes = section_shapes(manifest, part)
    return {section: sum(map(math.prod, of.values())) for section, of in shapes.items()}


def state_nbytes(sizes: Sizes) -> int:
    """Bytes of a state in memory and in a checkpoint, all float32."""
    return ITEMSIZE * sum(sizes.values())


def snapshot_nbytes(sizes: Sizes) -> int:
    """Bytes of a state as it travels."""
    return sum(PACKED_ITEMSIZE[section] * count for section, count in sizes.items())
