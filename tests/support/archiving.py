"""An archive beside a village: the real one, over the village's network, for an owner of the test's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.memory_network import MemoryDirectory, MemoryTransport
from swarmnode.app.machine.archive_sources import ArchiveSources
from swarmnode.app.machine.run_archive import Archive, ArchivePlan, Evaluate, Measured
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import State, Store
from swarmnode.base.wire import access_pb2
from swarmnode.keep.recovery.checkpoint import Origin
from swarmnode.model.export import sharded_model_files
from swarmnode.run import owner as owner_key
from swarmnode.run.admission.access import sign_warrant
from tests.support.fake_telemetry import Quiet
from tests.support.village import RUN, LoopClock, Recording, Village, Villager, manifest

OWNER = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
OWNER_KEY = owner_key.public_bytes(OWNER)
MACHINE = Identity.of_seed(bytes([150]) * 32)
DAY_S = 86_400


@dataclass
class Kept:
    """An archive of `v` in `folder`."""

    archive: Archive
    sources: ArchiveSources
    quiet: Quiet
    folder: Path

    def told(self, event: str) -> list[dict[str, object]]:
        return [fields for name, fields in self.quiet.events if name == event]


def warrant(machine: PeerId = MACHINE.peer_id, signer: Ed25519PrivateKey = OWNER, days: int = 1) -> access_pb2.Warrant:
    return sign_warrant(signer, RUN, machine, int(LoopClock().unix_s()) + days * DAY_S)


def archive_of(
    v: Village,
    folder: Path,
    evaluate: Evaluate | None = None,
    shown: access_pb2.Warrant | None = None,
    push: Store | None = None,
    keep: int = 2,
    identity: Identity = MACHINE,
    hub: str = "",
) -> Kept:
    """A fresh archive, as its process makes one at each start."""
    quiet = Quiet()
    transport = MemoryTransport(v.network, identity.peer_id, RUN, telemetry=quiet)
    clock = LoopClock()
    directory = MemoryDirectory(v.network, RUN, clock)
    shown = warrant() if shown is None else shown
    sources = ArchiveSources(v.run, RUN, transport, directory, clock, quiet, shown, folder / "scratch")

    async def unmeasured(folder: Path, samples: int) -> Measured:
        return Measured(None, "")

    def files(where: Mapping[str, str], nbytes: int, about: Mapping[str, object]) -> Mapping[str, bytes]:
        return sharded_model_files(v.run, None, where, nbytes, about)

    plan = ArchivePlan(folder, 3600.0, keep, push=push, hub=hub, shard_nbytes=16 << 10)
    archive = Archive(v.run, Origin.of(v.run, RUN), plan, sources, evaluate or unmeasured, files, quiet)
    return Kept(archive, sources, quiet, folder)


RUN_OF = manifest(stages=2)


class Liar(Recording):
    """Trains like the others, but its slow weights are turned round for whoever copies them."""

    def snapshot(self, *, packed: bool = False, only: Sequence[str] = ()) -> State:
        state = super().snapshot(packed=packed, only=only)
        if not only:
            return state
        phi = -np.frombuffer(state.sections["phi"], "<f4")
        return replace(state, sections={"phi": memoryview(phi.astype("<f4").tobytes())})


async def trained(v: Village, stages: tuple[int, ...], liar: int | None = None, samples: int = 256) -> list[Villager]:
    v.owner = OWNER_KEY
    people = [v.add(stage, Liar if index == liar else None) for index, stage in enumerate(stages)]
    await v.until(lambda: all(p.node.served and p.served.parts.feeder for p in people if p.node.stage == 0), "feeders")
    await v.until(lambda: v.total() >= samples, "it trains")
    await v.until(lambda: all(p.node.state == 3 for p in people), "everybody serves")
    return people
