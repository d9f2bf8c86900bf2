"""The door to what judges states (judge.py): the check of one stage's states, or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from swarmnode.base.ids import PeerId
from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.download import DonorClient
from swarmnode.keep.transfer.snapshot import SLOW, StateSlice
from swarmnode.keep.transfer.state_slices import Apart
from swarmnode.net.membership.judge import judges
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import meets


class StateJudge(Protocol):
    """Here is a state: who confirms it? `totals` are the sample counts told by peers that confirmed the last."""

    totals: list[int]

    async def compare(self, state: State, offer: wire.Snapshot, givers: Collection[PeerId]) -> Sequence[object]:
        """Samples of peers that confirm the state that `givers` gave. Raises RemoteFault where others contradict it."""
        ...


def state_judge(
    manifest: Manifest,
    client: DonorClient,
    others: Callable[[], Sequence[PeerId]],
    apart: Apart,
    *,
    keepers: Callable[[], Sequence[PeerId]] = tuple,
    within: StateSlice = SLOW,
) -> StateJudge | None:
    """A check of states of `client`'s stage by replicas, `others`, and by `keepers` of snapshots. None where nobody is
    judged, and where replicas never meet: they differ without a fault."""
    if not judges(manifest) or not meets(manifest.gossip):
        return None
    from swarmnode.keep.recovery.state_check import StateCheck

    return StateCheck(client, others, apart, keepers=keepers, within=within)
