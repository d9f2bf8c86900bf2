"""A node's own saved stages: whole states in its home, written when it leaves or is warned, read when it starts.

RUN/round-000000012-stage-1/theta-00000.stage-1.k3VxA9Qp.safetensors ...    the files of a checkpoint
                            stage-1.json                                    written last: without it nothing is read
"""

from __future__ import annotations

from collections.abc import Collection

from swarmnode.errors import DataError, RemoteFault
from swarmnode.ids import PeerId
from swarmnode.membership.progress import FLOOR, Progress, to_message, to_samples
from swarmnode.ports import State, Store
from swarmnode.recovery import checkpoint as form
from swarmnode.recovery import checkpoint_io
from swarmnode.recovery.checkpoint import Checkpoint, Origin
from swarmnode.recovery.checkpoint_io import ReplicaHoldings, Shapes
from swarmnode.recovery.resumption import Resumption
from swarmnode.wire import record_pb2

KEPT = 3  # guess: saved stages that stay in a home, whatever stages they are of


class SavedStages:
    """The stages of one run in `store`, None: nothing is saved. `look` reads which there are, `save` writes another."""

    def __init__(self, store: Store | None, origin: Origin) -> None:
        self._store = store
        self._origin = origin
        self.found: list[Resumption] = []
        """Those found or saved, each a checkpoint of one stage, the one of most samples first."""

    def newest(self, stage: int) -> Resumption | None:
        """The one of `stage` with most samples; None without one."""
        return next((one for one in self.found if one.checkpoint.parts[0].stage == stage), None)

    def best(self, empty: Collection[int], unable: Collection[int]) -> int | None:
        """The stage saved last of those `empty`, which nobody serves, that this machine is not `unable` to serve."""
        stages = [one.checkpoint.parts[0].stage for one in self.found]
        return next((stage for stage in stages if stage in empty and stage not in unable), None)

    async def look(self) -> None:
        """Read the saved stages; half written, damaged and foreign ones are left out. Raises LocalFault."""
        self.found = []
        if self._store is None:
            return
        sizes = await self._store.names(f"{self._origin.run_id[: form.RUN_CHARACTERS]}/")
        for name in sizes:
            base, _, file = name.rpartition("/")
            if not (file.startswith("stage-") and base.endswith(f"-{file.removesuffix('.json')}")):
                continue
            try:
                part = form.part_of(await self._store.read(name) or b"", name)
                progress = Progress.from_wire(to_message(part.progress))
            except (DataError, RemoteFault):
                continue
            label = base.rpartition("/")[2]
            kept = Checkpoint(self._origin, label, part.round, progress.total, part.progress, (part,))
            if part.stage < self._origin.stages and form.missing(kept, sizes) is None:
                self.found.append(Resumption(self._store, f"{base}/", kept))
        self.found.sort(key=_age, reverse=True)

    async def save(
        self,
        state: State,
        shapes: Shapes,
        *,
        stage: int,
        round_index: int,
        peer: PeerId,
        progress: record_pb2.Progress,
        blocks: record_pb2.Blocks,
    ) -> None:
        """Write `state`, then delete all but the KEPT saved stages of most samples and this one: a run that began again
        never takes the place of what was trained before. Raises LocalFault; what was there stays."""
        if self._store is None:
            return
        told = to_samples(progress)
        if progress.total > Progress.from_wire(to_message(told)).total:  # samples whose feeders are not known here
            told[FLOOR] = progress.total
        holding = ReplicaHoldings(stage, round_index, peer, to_message(told), blocks)
        place = form.place(self._origin.run_id, f"{form.label(round_index)}-stage-{stage}")
        await checkpoint_io.save_stage(self._store, place, state, shapes, holding)
        await self.look()
        for old in self.found[KEPT:]:
            if old.base != f"{place}/":
                for name in sorted(await self._store.names(old.base), key=lambda name: not name.endswith(".json")):
                    await self._store.delete(name)


def _age(saved: Resumption) -> tuple[int, int, int]:
    part = saved.checkpoint.parts[0]
    return saved.checkpoint.samples, part.round, part.inner_steps
