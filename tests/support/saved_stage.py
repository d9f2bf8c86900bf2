"""A stage as a node saves it in its home when it leaves, without the node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import State
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.checkpoint_io import ReplicaHoldings, SavedMean
from swarmnode.net.membership.progress import to_message

RUN = "r" * 64


def save_left(
    home: Path,
    stage: int,
    tensors: Mapping[str, Tensor],
    peer: str = "peerA",
    run_id: str = RUN,
    *,
    rounds: int = 3,
    samples: int = 1000,
    mean: Mapping[str, Tensor] | None = None,
    span: int = 0,
    left: bool = True,
) -> Path:
    """Save `tensors` and their running `mean` over `span` samples; return the folder of the stage's files."""
    holding = ReplicaHoldings(
        stage,
        rounds,
        PeerId(peer),
        to_message({PeerId(peer): samples}),
        record_pb2.Blocks(),
        run_id=run_id,
        left=left,
        mean=None if mean is None else SavedMean(_flat(mean), span),
    )
    shapes = {"theta": {name: tuple(tensor.shape) for name, tensor in tensors.items()}}
    place = form.place(run_id, f"{form.label(rounds)}-stage-{stage}")
    state = State({"theta": _flat(tensors)}, inner_steps=1, gradient_norm=1.0)
    asyncio.run(checkpoint_io.save_stage(FolderStore(home / "saved"), place, state, shapes, holding))
    return home / "saved" / place


def _flat(tensors: Mapping[str, Tensor]) -> memoryview:
    flat = np.concatenate([tensor.float().numpy().reshape(-1) for tensor in tensors.values()])
    return flat.data.cast("B")
