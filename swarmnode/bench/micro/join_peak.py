"""Host memory of a donor and a joiner of a real stage over their steady states.

    swarmnode bench join-peak

A stage of 273 million parameters (1.1 GB of fast weights) gives its packed state, of 2.2 GB, chunk by chunk, and loads
it. Counted is memory that only this process can free (RssAnon): the states' files can be written out by the kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from swarmnode.large_buffer import large_buffer
from swarmnode.machine.replica import TorchReplica
from swarmnode.manifest import GossipSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec
from swarmnode.recovery.snapshot import Snapshot, assemble
from swarmnode.wire.record_pb2 import Progress

RUN = Manifest(
    model=ModelSpec(layers=12, width=2048, heads=16, kv_heads=4, ffn=5632, context=256, vocabulary=1024),
    pipeline=PipelineSpec(stages=2),
    inner=InnerSpec(average_share=0.0, inner_batch=1024),
    gossip=GossipSpec(group=2),
)
EVERY_S = 0.003


def anonymous_nbytes() -> int:
    """This process's memory that is in no file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def peak_over(work: Callable[[], None]) -> int:
    """The most bytes beyond those at the start while `work` runs."""
    base = peak = anonymous_nbytes()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(EVERY_S):
            peak = max(peak, anonymous_nbytes())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        work()
    finally:
        over.set()
        watching.join()
    return peak - base


def run() -> dict[str, float]:
    """Gigabytes of the stage and its packed state, and of both peaks over steady; seconds of both."""
    replica, made = TorchReplica(RUN, 0, draw=False), list[Snapshot]()
    for flat in (replica.stage.theta.data, replica.outer.phi, replica.stage.exp_avg, replica.stage.grad):
        flat.normal_(std=0.01)  # else their pages do not exist yet
    begun = time.perf_counter()
    donor = peak_over(lambda: made.append(Snapshot.of(replica.snapshot(packed=True), 0, 1, Progress())))
    given_s = time.perf_counter() - begun
    snapshot = made[0]
    offer = snapshot.manifest()

    def join() -> None:
        room = large_buffer(offer.nbytes)
        for index in range(snapshot.chunks):
            chunk = snapshot.chunk(index)
            start = index * snapshot.chunk_nbytes
            room[start : start + chunk.nbytes] = chunk
        replica.load(assemble(offer, room, verify=False))

    begun = time.perf_counter()
    joiner = peak_over(join)
    return {
        "weights_gb": 4 * replica.parameters / 1e9,
        "state_gb": offer.nbytes / 1e9,
        "donor_over_steady_gb": donor / 1e9,
        "donor_s": given_s,
        "joiner_over_steady_gb": joiner / 1e9,
        "joiner_s": time.perf_counter() - begun,
    }
