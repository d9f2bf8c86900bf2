"""Throughput of calls relative to a bare libp2p stream: tensors sent one way between two processes, with both ways of
sending alternating in one run over the same two p2pds. `python -m swarmnode.bench.transport` prints the table.

The bare stream is the cheapest possible transfer: hivemind's binary stream handler, an 8 byte length, the bytes in the
same frames, discarded by the receiver on arrival, and one byte back. Our calls check, allocate and keep them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import uvloop
from hivemind.p2p import PeerID

from swarmnode.errors import LocalFault
from swarmnode.ids import PeerId, RunId
from swarmnode.ports import Answer, Call, WireTensor
from swarmnode.transport.key_file import create
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.transport.stream import FRAME_BYTES
from swarmnode.wire import call_pb2 as wire

SIZES_MIB = (1, 4, 16, 64)
TARGET_RATIO = 0.7
SECONDS_PER_SIZE = 3.0  # both ways of sending together
ROUNDS_MIN = 5

_RUN = RunId("be" * 32)
_BARE = "swarmnode-bench-bare"
_MIB = 1 << 20
_START_TIMEOUT_S = 60.0


def run(sizes_mib: Sequence[int] = SIZES_MIB, seconds_per_size: float = SECONDS_PER_SIZE) -> dict[str, Any]:
    """{"sizes": [{"mib", "rounds", "bare_s", "ours_s", "bare_mb_per_s", "ours_mb_per_s", "ratio"}], "target_ratio"}.

    Seconds are medians of one message; `ratio` is bare seconds over ours: 1.0 means that our call costs nothing.
    """
    result: dict[str, Any] = uvloop.run(_measure(sizes_mib, seconds_per_size))
    return result


async def _measure(sizes_mib: Sequence[int], seconds_per_size: float) -> dict[str, Any]:
    async with answering_process() as (peer, addresses), own_transport() as transport:
        await transport.connect(peer, addresses)
        bare = await _BareClient.open(transport, peer)
        rows = [await _measure_size(transport, peer, bare, mib, seconds_per_size) for mib in sizes_mib]
        bare.close()
    return {"sizes": rows, "target_ratio": TARGET_RATIO}


async def _measure_size(
    transport: Libp2pTransport, peer: PeerId, bare: _BareClient, mib: int, seconds: float
) -> dict[str, Any]:
    loop, data = asyncio.get_running_loop(), bytes(range(256)) * (mib * _MIB // 256)
    call = Call(wire.Request(process=wire.Process(samples=1)), [WireTensor("u8", (len(data),), data)])
    took: dict[str, list[float]] = {"bare": [], "ours": []}
    end = loop.time() + seconds
    while len(took["ours"]) < ROUNDS_MIN + 1 or loop.time() < end:
        began = perf_counter()  # the loop's own time has steps of a millisecond
        await bare.send(data)
        between = perf_counter()
        await transport.call(peer, call, timeout_s=60, reply_bytes_max=0)
        took["bare"].append(between - began)
        took["ours"].append(perf_counter() - between)
    bare_s, ours_s = (statistics.median(took[way][1:]) for way in ("bare", "ours"))  # the first of each warms up
    return {
        "mib": mib,
        "rounds": len(took["ours"]) - 1,
        "bare_s": bare_s,
        "ours_s": ours_s,
        "bare_mb_per_s": mib * _MIB / 1e6 / bare_s,
        "ours_mb_per_s": mib * _MIB / 1e6 / ours_s,
        "ratio": bare_s / ours_s,
    }


class _BareClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, transport: Libp2pTransport, peer: PeerId) -> _BareClient:
        _, reader, writer = await transport.daemon.p2p.call_binary_stream_handler(PeerID.from_base58(peer), _BARE)
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        self._writer.write(len(data).to_bytes(8, "big"))
        view = memoryview(data)
        for offset in range(0, len(data), FRAME_BYTES):
            self._writer.write(view[offset : offset + FRAME_BYTES])
            await self._writer.drain()
        await self._reader.readexactly(1)

    def close(self) -> None:
        self._writer.close()


async def _bare_handler(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            left = int.from_bytes(await reader.readexactly(8), "big")
            while left:
                left -= len(await reader.read(min(left, FRAME_BYTES)))
            writer.write(b"\1")
    writer.close()


@asynccontextmanager
async def own_transport(run_id: RunId = _RUN) -> AsyncIterator[Libp2pTransport]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.key"
        transport = await Libp2pTransport.create(path, create(path), run_id)
        try:
            yield transport
        finally:
            await transport.close()


@asynccontextmanager
async def answering_process() -> AsyncIterator[tuple[PeerId, list[str]]]:
    """A second process that receives; it ends when its standard input does."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "swarmnode.bench.transport",
        "--serve",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            line = await child.stdout.readline()
        if not line:
            raise LocalFault("the receiving process of the transport bench did not start")
        said = json.loads(line)
        yield PeerId(said["peer"]), said["addresses"]
    finally:
        child.stdin.close()
        await child.wait()


async def _serve() -> None:
    async def swallow(peer: PeerId, call: Call) -> Answer:
        return Answer(wire.Reply())

    async with own_transport() as transport:
        transport.serve("process", swallow, tensor_bytes_max=1 << 30)
        await transport.daemon.p2p.add_binary_stream_handler(_BARE, _bare_handler)
        transport.start()
        said = {"peer": transport.peer_id, "addresses": await transport.addresses()}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main(arguments: Sequence[str]) -> int:
    """0 when every size meets TARGET_RATIO."""
    if "--serve" in arguments:
        uvloop.run(_serve())
        return 0
    result = run()
    out = sys.stdout
    out.write(f"{'MiB':>5} {'rounds':>7} {'bare MB/s':>10} {'ours MB/s':>10} {'ratio':>6}\n")
    for row in result["sizes"]:
        out.write(
            f"{row['mib']:>5} {row['rounds']:>7} {row['bare_mb_per_s']:>10.0f} {row['ours_mb_per_s']:>10.0f} "
            f"{row['ratio']:>6.2f}\n"
        )
    return 0 if all(row["ratio"] >= TARGET_RATIO for row in result["sizes"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
