"""What a small run has left behind, made without a swarm."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path

from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.checkpoint_io import ReplicaHoldings
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.model.export import stage_state_dict
from swarmnode.net.membership.progress import to_message
from swarmnode.run import manifest as manifests
from swarmnode.run.manifest import Manifest, PipelineSpec
from swarmnode.run.manifest.folder import SIGNED_FILE, init, sign_folder, write_signed
from tests.support.saved_stage import save_left
from tests.support.tiny_model import TINY, token_batch, train_on

AGE = 0.75  # a replica's running mean is so much of its last weights here

RUN = Manifest(
    name="left",
    model=replace(TINY, vocabulary=256),
    pipeline=PipelineSpec(stages=3, boundary="fp32", validation_samples=8, validation_every_samples=1),
)


def left_session(folder: Path) -> Path:
    """The folder of a session of the run in `folder`: a checkpoint, and what two replicas of each stage saved."""
    run = RUN
    init(folder, run)
    signed = sign_folder(folder)
    run_id = manifests.verify(signed, None)[1]
    place = folder / "up-1"
    place.mkdir()
    write_signed(place / SIGNED_FILE, signed)
    replicas = [TorchReplica(run, stage) for stage in range(3)]
    for peer in ("peerAAAA", "peerBBBB"):
        train_on([replica.stage for replica in replicas], token_batch(run.model, seed=len(peer) + ord(peer[-1])))
        for stage, replica in enumerate(replicas):
            replica.step(100)
            weights = stage_state_dict(replica.stage)
            mean = {name: AGE * value for name, value in weights.items()}
            save_left(place / peer, stage, weights, peer, run_id, rounds=4, samples=512, mean=mean, span=256)
    store = FolderStore(place / "checkpoints")
    origin = form.Origin.of(run, run_id, base64.b64encode(signed.SerializeToString()).decode())

    async def keep(round_index: int) -> None:
        for stage, replica in enumerate(replicas):
            progress = to_message({"peerBBBB": 128 * round_index})
            holding = ReplicaHoldings(stage, round_index, PeerId("peerBBBB"), progress, record_pb2.Blocks())
            where = form.place(run_id, form.label(round_index))
            await checkpoint_io.save_stage(
                store, where, replica.snapshot(), CheckpointOptions().shapes(run, stage), holding
            )
        assert await checkpoint_io.complete(store, origin, form.label(round_index)) is not None

    asyncio.run(keep(5))
    for replica in replicas:
        replica.stage.theta.mul_(3.0)
    asyncio.run(keep(3))
    return place
