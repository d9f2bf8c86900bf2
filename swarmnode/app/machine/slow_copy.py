"""A replica's slow weights in a file, chunk by chunk, and how far two of them lie apart."""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from swarmnode.base.atomic_file import write_errors
from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.recovery.checkpoint import Checkpoint
from swarmnode.keep.recovery.tensorfile import ITEMSIZE
from swarmnode.keep.transfer.download import Chunk, DonorClient, DownloadLimits
from swarmnode.keep.transfer.snapshot import chunk_span

LIMITS = DownloadLimits(waited_for=False)  # Busy tells when to come again


@dataclass(slots=True)
class SlowCopy:
    """Chunks of the snapshot `offer` made by `peer`, each verified against its hash, at their places in a file."""

    peer: PeerId
    offer: wire.Snapshot
    path: Path
    have: set[int] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        return len(self.have) == len(self.offer.hashes)

    async def pull(self, donor: DonorClient, indices: Iterable[int]) -> None:
        """Pull those of the chunks `indices` that are missing. Raises DiskFull, and errors as
        DonorClient.chunk."""
        missing = deque(index for index in indices if index not in self.have)

        def put(peer: PeerId, offer: wire.Snapshot, index: int, data: Chunk) -> None:
            self._write(index, data)

        work = partial(donor.pull, self.peer, self.offer, missing, put)
        await gather_or_cancel([work] * min(LIMITS.beside, len(missing)))

    def _write(self, index: int, data: Chunk) -> None:
        start, _ = chunk_span(self.offer, index)
        with write_errors(self.path, self.offer.nbytes):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                rest = memoryview(data)
                while rest.nbytes:
                    count = os.pwrite(descriptor, rest, start)
                    rest = rest[count:]
                    start += count
            finally:
                os.close(descriptor)
        self.have.add(index)

    def chunk(self, index: int) -> np.ndarray:
        """Elements of chunk `index`, float32."""
        start, end = chunk_span(self.offer, index)
        with open(self.path, "rb") as file:
            return np.frombuffer(os.pread(file.fileno(), end - start, start), "<f4")

    def state(self) -> State:
        """The whole state, memory-mapped without reading: only section "phi"."""
        with open(self.path, "rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), self.offer.nbytes, access=mmap.ACCESS_READ))
        return State(
            {"phi": whole}, self.offer.inner_steps, self.offer.gradient_norm, self.offer.bump_steps, packed=True
        )

    def drop(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


def distance(one: SlowCopy, other: SlowCopy) -> float:
    """The distance of two copies, over the chunks that both have, relative to the longer one (as
    recovery/second.apart); inf if not finite. Blocks: reads both files."""
    if one.offer.chunk_nbytes != other.offer.chunk_nbytes:
        return math.inf
    return _apart((one.chunk(index), other.chunk(index)) for index in sorted(one.have & other.have))


def distance_to(copy: SlowCopy, before: Callable[[int, int], np.ndarray]) -> float:
    """Like `distance`, to the previously taken copy, whose elements [first, last) `before` returns."""
    spans = ((index, chunk_span(copy.offer, index)) for index in sorted(copy.have))
    return _apart((copy.chunk(index), before(start // ITEMSIZE, end // ITEMSIZE)) for index, (start, end) in spans)


def saved_elements(folder: Path, checkpoint: Checkpoint, stage: int, first: int, last: int) -> np.ndarray:
    """Elements [first, last) of the slow weights of `stage` in a checkpoint whose files are in `folder`. Raises OSError
    if they cannot be read."""
    begin = 0
    parts = list[np.ndarray]()
    for file in (file for file in checkpoint.parts[stage].files if file.section == "phi"):
        count = sum(map(math.prod, file.tensors.values()))
        low = max(first, begin)
        high = min(last, begin + count)
        if low < high:
            data = file.nbytes - ITEMSIZE * count  # offset of the elements, after the header
            where = data + ITEMSIZE * (low - begin)
            parts.append(np.fromfile(folder / file.name, "<f4", high - low, offset=where))
        begin += count
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _apart(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    ones = others = apart = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for one, other in pairs:
            if len(one) != len(other):
                return math.inf
            a = one.astype(np.float64)
            b = other.astype(np.float64)
            ones += float(a @ a)
            others += float(b @ b)
            apart += float((a - b) @ (a - b))
    if not math.isfinite(ones + others + apart):
        return math.inf
    return math.sqrt(apart / max(ones, others)) if max(ones, others) > 0.0 else 0.0
