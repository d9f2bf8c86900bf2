"""The checkpoints of one run in a store, by label: a bucket's, a node's saved stages, an archive's folder."""

from __future__ import annotations

from swarmnode.base.ports import Store
from swarmnode.keep.recovery import checkpoint as form


class RunStore:
    """Checkpoints of a run in `store`. Methods raise LocalFault when the store refuses."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self._run_id = run_id

    def at(self, store: Store) -> RunStore:
        """The same run's checkpoints in another store."""
        return RunStore(store, self._run_id)

    def place(self, label: str) -> str:
        """The folder of a checkpoint's files in the store."""
        return form.place(self._run_id, label)

    async def labels(self) -> dict[str, dict[str, int]]:
        """Files of this run, with their bytes, by label."""
        labels: dict[str, dict[str, int]] = {}
        for path, nbytes in (await self.store.names(f"{self.place('')}")).items():
            parts = path.split("/")
            if len(parts) == 3:
                labels.setdefault(parts[1], {})[parts[2]] = nbytes
        return labels

    async def read(self, label: str, file: str) -> bytes:
        """The bytes of a checkpoint's file; none where it is not there."""
        return await self.store.read(f"{self.place(label)}/{file}") or b""

    async def write(self, label: str, file: str, data: bytes) -> None:
        """Write a file of a checkpoint."""
        await self.store.write(f"{self.place(label)}/{file}", [data])

    async def delete(self, label: str) -> None:
        """Delete a checkpoint. The file that makes it a checkpoint goes first, then those that make its stages whole: a
        reader never takes a part for the whole."""
        for file in sorted((await self.labels()).get(label, {}), key=_last):
            await self.store.delete(f"{self.place(label)}/{file}")


def _last(file: str) -> tuple[bool, bool, str]:
    return file != form.ROOT, not file.endswith(".json"), file
