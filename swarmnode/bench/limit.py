"""How closely a node keeps its rates: tensors sent for half a minute between two processes under --max-up, counted
when the other side has answered that it has them. `swarmnode bench limit` prints the table."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from swarmnode.bench.transport import _server, _transport
from swarmnode.ids import PeerId
from swarmnode.ports import Call, WireTensor
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.transport.throttle import OVERHEAD
from swarmnode.wire import call_pb2 as wire

MBIT = (5, 20, 100)
SECONDS = 30.0
CALLS_AT_ONCE = 3
TARGET = 0.05
_PIECE = 256 << 10


def run(seconds: float = SECONDS) -> dict[str, Any]:
    """{"rates": [{"allowed_mbit", "payload_mbit", "charged_mbit", "off"}], "target"}. `payload` is what the calls
    carried, `charged` what that is on the wire by throttle.OVERHEAD; `off` is how far the former is from allowed."""
    result: dict[str, Any] = uvloop.run(_measure(seconds))
    return result


async def _measure(seconds: float) -> dict[str, Any]:
    async with _server() as (peer, addresses), _transport() as transport:
        await transport.connect(peer, addresses)
        rows = [await _measure_rate(transport, peer, mbit, seconds) for mbit in MBIT]
    return {"rates": rows, "target": TARGET}


async def _measure_rate(transport: Libp2pTransport, peer: PeerId, mbit: int, seconds: float) -> dict[str, Any]:
    loop, data, passed = asyncio.get_running_loop(), bytes(_PIECE), 0
    transport.throttle.up.bps = mbit * 1e6
    begun = loop.time()

    async def send() -> None:
        nonlocal passed
        while loop.time() < begun + seconds:
            call = Call(wire.Request(process=wire.Process(samples=1)), [WireTensor("u8", (_PIECE,), data)])
            await transport.call(peer, call, timeout_s=60, reply_bytes_max=0)  # answered when all of it has arrived
            passed += _PIECE

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLS_AT_ONCE):
            tasks.create_task(send())
    took_s = loop.time() - begun
    payload = passed * 8 / took_s / 1e6
    return {
        "allowed_mbit": mbit,
        "payload_mbit": payload,
        "charged_mbit": payload * OVERHEAD,
        "off": payload / mbit - 1.0,
    }
