"""The frozen subspace of a run must be the same on all machines."""

from __future__ import annotations

from swarmnode.errors import HardwareFault
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import SERVING
from swarmnode.node.presence import Presence
from swarmnode.ports import Compute, Priority, Replica


async def check_subspace(replica: Replica, manifest: Manifest, presence: Presence, compute: Compute) -> None:
    """Compute this machine's subspace and compare its digest with those in the records of nodes that train.

    Raises HardwareFault when all of them have another: activations would be noise to them. One liar keeps nobody away.
    """
    if manifest.pipeline.boundary != "subspace":
        return
    mine = await compute.run(Priority.OUTER, 0, replica.boundary_digest)
    presence.made_subspace(mine)
    training = [m for m in presence.peer_table.swarm().members() if m.state == SERVING and m.peer != presence.me]
    if training and all(member.boundary_digest != mine for member in training):
        theirs = training[0].boundary_digest.hex() or "none"
        raise HardwareFault(
            f"this machine makes the subspace {mine.hex()} where the {len(training)} nodes that train"
            f" have {theirs}: its PyTorch computes otherwise; install the version they use, then join again"
        )
