"""One entry restores a state, whatever its source, and its result says how."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from swarmnode.ports import State
from swarmnode.recovery.recovery_source import RecoverySource
from swarmnode.transfer.snapshot import Snapshot
from swarmnode.wire import record_pb2
from tests.support.village import Recording, manifest, village


async def test_a_state_fetched_before_is_used_unless_the_replica_refuses_it() -> None:
    run = manifest()

    async with village(run) as v:
        giver = [v.add(stage) for stage in range(3)][1]
        await v.until(lambda: v.told() >= 64, "it trains")
        node, source = v.add(1).node, giver.replica
        assert source is not None
        await v.until(lambda: node.state == record_pb2.NODE_STATE_TRAINING, "the joiner serves")
        good = source.snapshot(packed=True)
        phi = np.frombuffer(good.sections["phi"], "<f4").copy()
        phi[0] = np.nan
        bad = State({**good.sections, "phi": memoryview(phi.tobytes())}, good.inner_steps, 0.0, packed=True)
        kept = [Snapshot.of(state, 1, 7, record_pb2.Progress()) for state in (good, bad)]

        replica = Recording(run, 1)
        restored = await node.restorer.restore(replica, 1, fetched=kept[0])
        assert restored.source is RecoverySource.REPLICA and restored.round == 7 and restored.newcomer
        assert restored.snapshot is None, "the caller has it"
        assert bytes(replica.snapshot(packed=True).sections["phi"]) == bytes(good.sections["phi"])

        restored = await node.restorer.restore(replica, 1, fetched=kept[1])
        assert restored.source is RecoverySource.REPLICA and "alive" in restored.reason
        assert restored.snapshot is not None and restored.snapshot.stage == 1, "for others that pull the same"
        now = replica.snapshot(packed=True).sections["phi"]
        assert bytes(now) == bytes(restored.snapshot.state.sections["phi"])
        with pytest.raises(dataclasses.FrozenInstanceError):
            restored.round = 0  # type: ignore[misc]
        await v.leave()
