"""A stranger that gives a state which is not the run's."""

from collections.abc import Callable

import numpy as np

from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2, record_pb2
from swarmnode.keep.transfer.donor import SnapshotDonor
from swarmnode.keep.transfer.snapshot import Snapshot, StateSlice
from swarmnode.run.manifest import Manifest
from tests.support.stranger import Stranger
from tests.support.village import RUN, Recording, Village

SOON = -5  # rounds after the run's present one


def giving(
    v: Village, stranger: Stranger, run: Manifest, stage: int, spoil: Callable[[np.ndarray], np.ndarray], at: int
) -> SnapshotDonor:
    """`stranger` serves a state of `stage`, its slow weights spoilt, as of round `at`: 0 is the run's present one, SOON
    some rounds later. Its fast weights and moments are always noise."""
    replica = Recording(run, stage)
    source = next((p.replica for p in v.people if p.node.stage == stage and p.replica is not None), None)
    state = (source or replica).snapshot(packed=True)
    phi = spoil(np.frombuffer(state.sections["phi"], "<f4").copy()).astype("<f4")
    sections = {**state.sections, "phi": memoryview(phi.tobytes())}
    for name in ("theta", "exp_avg"):  # bfloat16
        drawn = np.random.default_rng(2).standard_normal(memoryview(sections[name]).nbytes // 2).astype("<f4")
        sections[name] = memoryview((drawn.view("<u4") >> 16).astype("<u2").tobytes())
    false = State(sections, state.inner_steps, state.gradient_norm, packed=True)

    async def take(cut: StateSlice) -> Snapshot:
        total = max(p.node.samples_total() for p in v.people)
        now = total // run.gossip.round_samples
        offered = now - at if at < 0 else at or now
        told = total if at <= 0 else at * run.gossip.round_samples
        return Snapshot.of(false, stage, offered, record_pb2.Progress(total=told))

    async def hashed(work: Callable[[], call_pb2.Snapshot]) -> call_pb2.Snapshot:
        return work()

    donor = SnapshotDonor(RUN, stage, take, hashed, v.people[0].quiet)
    donor.serve(stranger.transport)
    return donor
