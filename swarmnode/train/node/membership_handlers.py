"""Handlers that every member serves before it takes part in training: pings, the signed manifest, the access list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Compute, Priority, Replica, Telemetry, Transport, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.run.admission.admission import Admission
from swarmnode.run.manifest import Manifest, boundary_codes, boundary_nbytes, boundary_width
from swarmnode.train.pipeline.microbatch_size import SampleRates

PING_BYTES_MAX = 1024


BOUNDARY_DTYPE = {"bf16": "bf16", "subspace": "bf16", "fp32": "f32"}  # of the others, which are coded, f32
PROBES = 8  # the fastest counts, because other work may disturb a forward. Measured with six nodes that start together
# on two cores: four probes are as good as none
ENOUGH_S = 1.0  # guess: in forwards that take so long together, disturbances average out


class Probing(Protocol):
    """Makes a replica do one microbatch of so many samples forward on made-up data, to be timed."""

    def __call__(self, replica: Replica, manifest: Manifest, stage: int, samples: int) -> None: ...


async def probing(
    replica: Replica,
    manifest: Manifest,
    stage: int,
    probe: Probing,
    compute: Compute,
    telemetry: Telemetry,
    announce: Callable[[SampleRates], None],
) -> float:
    """Samples per second of this machine on its stage, at the best size: forward, and backward at about twice its cost.
    `announce` is told those of all sizes, as soon as they are known: the state may still be on its way."""
    loop = asyncio.get_running_loop()
    sizes = _sizes(manifest.inner.microbatch)
    seconds = dict[int, float]()
    started = loop.time()
    await compute.run(Priority.OUTER, 1, partial(probe, replica, manifest, stage, 1))  # the first is slower
    for samples in sizes * PROBES:  # by turns, so that no slow moment is one size's alone
        before_s = compute.worked_s  # the loop's clock is too coarse: uvloop's has whole milliseconds
        await compute.run(Priority.OUTER, samples, partial(probe, replica, manifest, stage, samples))
        seconds[samples] = min(seconds.get(samples, float("inf")), compute.worked_s - before_s)
        if loop.time() - started >= ENOUGH_S and len(seconds) >= min(2, len(sizes)):
            break
    rates = {samples: samples / max(1e-6, 3.0 * least_s) for samples, least_s in _undisturbed(seconds).items()}
    shown = ", ".join(f"{samples}: {rate:.3g}" for samples, rate in sorted(rates.items()))
    telemetry.event("node.probe", samples_per_second=round(max(rates.values()), 2), by_microbatch=shown)
    announce(SampleRates(rates))
    return SampleRates(rates).best


def _sizes(microbatch: int) -> list[int]:
    """The largest that may travel, one, and the powers of two between them, which a slow machine leaves out."""
    between = {1 << power for power in range(1, microbatch.bit_length())} - {microbatch}
    return list(dict.fromkeys((microbatch, 1, *sorted(between))))


def _undisturbed(seconds: Mapping[int, float]) -> dict[int, float]:
    """Seconds by size, lowered to what they can be at most: few samples take no longer than many, and many samples no
    longer than the same samples in smaller pieces."""
    return {
        samples: min(least_s * max(1, -(-samples // other)) for other, least_s in seconds.items())
        for samples in seconds
    }


def forward(replica: Replica, manifest: Manifest, stage: int, samples: int) -> None:
    """Do one forward of so many samples; the caller takes the time. Trains nothing."""
    model = manifest.model
    batch = samples
    ids = bytes(2) if manifest.data.document_end != 0 else b"\1\0"  # no document ends in it
    tokens = WireTensor("u16", (batch, model.context + 1), ids * (batch * (model.context + 1)))
    kind = boundary_codes(manifest.pipeline.boundary)[0]
    shape = (batch, model.context, boundary_width(manifest))
    blank = bytes(boundary_nbytes(kind, batch * model.context, shape[2]))  # zeros in every code
    codec = "raw" if kind in BOUNDARY_DTYPE else kind
    x = tokens if stage == 0 else WireTensor(BOUNDARY_DTYPE.get(kind, "f32"), shape, blank, codec)
    if stage == manifest.pipeline.stages - 1:
        replica.loss(x, tokens, batch, train=False)
    else:
        replica.forward(x, keep=False, tokens=tokens)


class MembershipHandlers:
    """Handlers of "ping", "manifest" and, where there is a door, "access_list"."""

    def __init__(
        self,
        signed: record_pb2.SignedManifest,
        admission: Admission | None = None,
        samples: Callable[[], int] = lambda: 0,
    ) -> None:
        """`samples` of the run, as far as this node knows from earlier."""
        self._signed = signed
        self._admission = admission
        self._samples = samples

    def serve(self, transport: Transport) -> None:
        """Register them."""
        transport.serve("ping", self.ping, tensor_bytes_max=0)
        transport.serve("manifest", self.manifest, tensor_bytes_max=0)
        if self._admission is not None:
            transport.serve("access_list", self.access_list, tensor_bytes_max=0)

    async def ping(self, peer: PeerId, call: Call) -> Answer:
        """Echo, and tell how far the run was known to be. Raises RemoteFault for a payload over PING_BYTES_MAX."""
        payload = call.header.ping.payload
        if len(payload) > PING_BYTES_MAX:
            raise RemoteFault(f"ping of {len(payload)} bytes; at most {PING_BYTES_MAX}")
        return Answer(wire.Reply(pong=wire.Pong(payload=payload, samples=self._samples())))

    async def manifest(self, peer: PeerId, call: Call) -> Answer:
        """The signed manifest of this run; the asker checks signature and hash."""
        signed = record_pb2.SignedManifest()
        signed.CopyFrom(self._signed)
        if self._admission is not None and self._admission.amendments is not None:
            del signed.amendments[:]
            signed.amendments.extend(self._admission.amendments.signed)
        return Answer(wire.Reply(manifest=signed))

    async def access_list(self, peer: PeerId, call: Call) -> Answer:
        """The owner's access list and amendments, as far as the asker has not them already. An asker that has more is
        asked in turn (access_list.py)."""
        assert self._admission is not None
        request = call.header.access_list
        known = self._admission.amendments
        parted = (
            known is not None and 0 < request.amendments == len(known.chain) and request.head not in (b"", known.head)
        )
        if known is not None and (
            request.amendments > len(known.chain) or parted or request.rivals > len(known.rivals)
        ):
            self._admission.ahead = peer
        return Answer(wire.Reply(access_list=self._admission.news(request)))
