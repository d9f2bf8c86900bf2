"""Accuracy of rate limits and quotas. Two processes exchange tensors for half a minute under --max-up; bytes count when
the receiver has acknowledged them. Meanwhile another node approaches its quota, which is read and applied as in a
daemon. `swarmnode bench limit` prints the tables."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop

from swarmnode.bench.micro.transport import answering_process, own_transport
from swarmnode.ids import PeerId
from swarmnode.node.limits import Limits, SensorReading, decide
from swarmnode.node.regulator import PERIOD_S
from swarmnode.ports import Call, WireTensor
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.transport.throttle import OVERHEAD
from swarmnode.wire import call_pb2 as wire

MBIT = (5, 20, 100)
SECONDS = 30.0
CALLS_AT_ONCE = 3
TARGET = 0.05
QUOTA_MBIT, QUOTA_S, QUOTA_TARGET = 4, 400.0, 0.01  # a quota that lasts minutes: a day's lasts hours
_PIECE = 256 << 10
_NOON = 1.75e9 // 86_400 * 86_400 + 43_200


def run(seconds: float = SECONDS, quota_s: float = QUOTA_S) -> dict[str, Any]:
    """{"rates": [{"allowed_mbit", "payload_mbit", "charged_mbit", "off"}], "target", "quota": {"allowed_nbytes",
    "used_nbytes", "off"}, "quota_target"}. `payload` is what the calls carried, `charged` what that is on the wire by
    throttle.OVERHEAD; `off` is how far the former is from allowed, of the quota the latter."""
    result: dict[str, Any] = uvloop.run(_measure(seconds, quota_s))
    return result


async def _measure(seconds: float, quota_s: float) -> dict[str, Any]:
    async with answering_process() as (peer, addresses), own_transport() as transport, own_transport() as other:
        await transport.connect(peer, addresses)
        await other.connect(peer, addresses)
        async with asyncio.TaskGroup() as tasks:
            quota = tasks.create_task(_measure_quota(other, peer, quota_s))
            rows = [await _measure_rate(transport, peer, mbit, seconds) for mbit in MBIT]
        return {"rates": rows, "target": TARGET, "quota": quota.result(), "quota_target": QUOTA_TARGET}


async def _measure_quota(transport: Libp2pTransport, peer: PeerId, quota_s: float) -> dict[str, Any]:
    """Send until the node's own rule stops it; transfers in flight then finish, and count."""
    loop = asyncio.get_running_loop()
    limits = Limits(quota_nbytes=int(quota_s * QUOTA_MBIT * 1e6 / 8))
    transport.throttle.up.bps = QUOTA_MBIT * 1e6
    running = True

    async def send() -> None:
        while running:
            await _send(transport, peer)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLS_AT_ONCE):
            tasks.create_task(send())
        used, at = 0, loop.time()
        while running:
            await asyncio.sleep(PERIOD_S)
            before, began, used, at = used, at, transport.throttle.moved_nbytes, loop.time()
            rate = (used - before) / (at - began)
            running = decide(limits, SensorReading(_NOON, 0, used_nbytes=used, nbytes_per_s=rate)).running
    used = transport.throttle.moved_nbytes
    assert limits.quota_nbytes is not None
    return {"allowed_nbytes": limits.quota_nbytes, "used_nbytes": used, "off": used / limits.quota_nbytes - 1.0}


async def _send(transport: Libp2pTransport, peer: PeerId) -> None:
    call = Call(wire.Request(process=wire.Process(samples=1)), [WireTensor("u8", (_PIECE,), bytes(_PIECE))])
    await transport.call(peer, call, timeout_s=60, reply_bytes_max=0)  # the answer comes after all bytes have arrived


async def _measure_rate(transport: Libp2pTransport, peer: PeerId, mbit: int, seconds: float) -> dict[str, Any]:
    loop, passed = asyncio.get_running_loop(), 0
    transport.throttle.up.bps = mbit * 1e6
    begun = loop.time()

    async def send() -> None:
        nonlocal passed
        while loop.time() < begun + seconds:
            await _send(transport, peer)
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
