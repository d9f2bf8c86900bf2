"""Time from a round's boundary to a delivered packet: streamed while it is encoded, as in exchanges, or encoded first
and then sent. The two alternate, between two processes over loopback.

Times include the work of a node: the compute thread marks the boundary and writes the packet; the receiver checks the
frame, allocates memory and answers. `encode_s` is the encoding alone in the second way. The greater of it and the time
to send bounds any way of sending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
import uvloop

from swarmnode.bench.micro.transport import answering_process, own_transport
from swarmnode.bench.swarm.dashboard import SilentTelemetry
from swarmnode.gossip.compression import codec, kernel
from swarmnode.gossip.outer.noloco import NoLoCo
from swarmnode.gossip.outgoing_packet import while_written
from swarmnode.ids import PeerId
from swarmnode.machine.compute import ThreadCompute
from swarmnode.ports import Call, Compute, Priority, Transport, WireTensor
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.wire import call_pb2 as wire

CODECS = ("int8", "modular4")
PARAMETERS = 50_000_000
ROUNDS = 15
SPREAD = 1e-3  # of the weights' own deviation: about the difference between replicas
TIMEOUT_S = 120.0


def run(
    names: Sequence[str] = CODECS,
    parameters: int = PARAMETERS,
    rounds: int = ROUNDS,
    *,
    extension: bool = True,
    up_bps: float | None = None,
) -> dict[str, Any]:
    """{"parameters", "extension", "up_bps", "codecs": [{"codec", "mb", "streamed_s", "encode_then_send_s", "encode_s",
    "ratio"}]}: the best of `rounds`, for a busy machine slows both; `ratio` is the seconds of encoding first over those
    of streaming. `up_bps` is a limit as by `--max-up`; without `extension`, numpy and torch alone."""
    if extension:
        extension = kernel.build()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = uvloop.run(_measure(names, parameters, rounds, extension, up_bps))
    return {"parameters": parameters, "extension": extension, "up_bps": up_bps, "codecs": rows}


async def _measure(
    names: Sequence[str], parameters: int, rounds: int, extension: bool, up_bps: float | None
) -> list[dict[str, Any]]:
    async with answering_process() as (peer, addresses), own_transport() as transport:
        await transport.connect(peer, addresses)
        transport.throttle.up.bps = up_bps
        compute = ThreadCompute(SilentTelemetry())
        try:
            return [await _one(transport, peer, compute, name, parameters, rounds, extension) for name in names]
        finally:
            compute.close()


async def _one(
    transport: Libp2pTransport,
    peer: PeerId,
    compute: Compute,
    name: str,
    parameters: int,
    rounds: int,
    extension: bool,
) -> dict[str, Any]:
    with nullcontext() if extension else kernel.unused():
        coder = codec(name)
    draw = torch.Generator().manual_seed(0)
    outer = NoLoCo(torch.randn(parameters, generator=draw), coder, 0.5, 0.7, 0.7)
    outer.theta.add_(torch.randn(parameters, generator=draw), alpha=SPREAD)
    took: dict[str, list[float]] = {"streamed": [], "encode_then_send": [], "encode": []}
    nbytes = 0

    async def streamed(number: int) -> None:
        began = perf_counter()
        draft = await compute.run(Priority.OUTER, 0, lambda: outer.draft(number))
        await while_written(draft, _send(transport, peer, draft.tensors))
        took["streamed"].append(perf_counter() - began)

    async def encoded_first(number: int) -> None:
        nonlocal nbytes
        began = perf_counter()
        tensors = await compute.run(Priority.OUTER, 0, lambda: outer.message(number))
        took["encode"].append(perf_counter() - began)
        await _send(transport, peer, tensors)
        took["encode_then_send"].append(perf_counter() - began)
        nbytes = sum(tensor.nbytes for tensor in tensors)

    for number in range(1, rounds + 2):
        for way in (streamed, encoded_first) if number % 2 else (encoded_first, streamed):
            await way(number)
    best = {f"{way}_s": min(seconds[1:]) for way, seconds in took.items()}  # the first warms up
    return {
        "codec": name,
        "mb": nbytes / 1e6,
        **best,
        "ratio": best["encode_then_send_s"] / best["streamed_s"],
    }


async def _send(transport: Transport, peer: PeerId, tensors: Sequence[WireTensor]) -> None:
    call = Call(wire.Request(process=wire.Process(samples=1)), tensors)
    async with asyncio.timeout(TIMEOUT_S):
        await transport.call(peer, call, timeout_s=TIMEOUT_S, reply_bytes_max=0)
