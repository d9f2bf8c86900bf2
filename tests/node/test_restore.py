"""One entry restores a state, whatever its source, and its result says how."""

import asyncio
import dataclasses

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.memory_network import MemoryTransport
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, State
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.recovery_source import RecoverySource
from swarmnode.keep.transfer.donor import SnapshotDonor
from swarmnode.keep.transfer.snapshot import Snapshot
from swarmnode.run.admission.access import sign_warrant
from swarmnode.run.owner import public_bytes
from tests.support.fake_telemetry import Quiet
from tests.support.village import RUN, Recording, manifest, village


async def test_a_state_fetched_before_is_used_unless_the_replica_refuses_it() -> None:
    run = manifest()

    async with village(run) as v:
        giver = [v.add(stage) for stage in range(3)][1]
        await v.heard(64)
        node = v.add(1).node
        source = giver.replica
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
        assert bytes(replica.snapshot(packed=True).sections["phi"]) == bytes(good.sections["phi"])

        restored = await node.restorer.restore(replica, 1, fetched=kept[1])
        assert restored.source is RecoverySource.REPLICA and "alive" in restored.reason
        assert np.isfinite(np.frombuffer(replica.snapshot(packed=True).sections["phi"], "<f4")).all()
        with pytest.raises(dataclasses.FrozenInstanceError):
            restored.round = 0  # type: ignore[misc]


async def test_only_archives_with_the_owners_warrant_are_asked_for_a_stage_the_latest_first() -> None:
    run = manifest()
    owner = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
    async with village(run) as v:
        v.owner = public_bytes(owner)
        node = v.add(0).node
        state = Recording(run, 1).snapshot(packed=True)
        pulled = list[PeerId]()

        def archive(number: int, round_index: int, signer: Ed25519PrivateKey | None) -> PeerId:
            """An archive of stage 1 as it was after a round, with a warrant of `signer`."""
            peer = Identity.of_seed(bytes([number] * 32)).peer_id
            transport = MemoryTransport(v.network, peer, RUN)
            kept = Snapshot.of(state, 1, round_index, record_pb2.Progress(total=1))
            donor = SnapshotDonor(RUN, run.pipeline.stages, None, asyncio.to_thread, Quiet(), kept=lambda stage: kept)  # type: ignore[arg-type]

            async def offer(caller: PeerId, call: Call) -> Answer:
                answer = await donor.offer(caller, call)
                if signer is not None:
                    answer.header.snapshot.warrant.CopyFrom(sign_warrant(signer, RUN, peer, 1 << 32))
                return answer

            async def chunk(caller: PeerId, call: Call) -> Answer:
                pulled.append(peer)
                return await donor.chunk(caller, call)

            transport.serve("snapshot", offer, tensor_bytes_max=0)
            transport.serve("chunk", chunk, tensor_bytes_max=0)
            return peer

        other = Ed25519PrivateKey.from_private_bytes(b"x" * 32)
        older = archive(201, 0, owner)
        newer = archive(202, 1, owner)
        archives = (archive(203, 1, None), older, archive(204, 1, other), newer)
        saving = dataclasses.replace(node.restorer.checkpoints, archives=archives)
        here = dataclasses.replace(node.restorer, checkpoints=saving)
        await here.fetcher(Recording(run, 1)).of_archives(1, archives, here.warranted)
        await here.fetcher(Recording(run, 1)).of_archives(1, archives[:3], here.warranted)
        assert pulled == [newer, older]
