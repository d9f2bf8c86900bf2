"""Throughput of calls relative to a bare libp2p stream: tensors sent one way between two processes, with both ways of
sending alternating in one run over the same two p2pds. `python -m benchmarks.micro.transport` prints the table.

The bare stream is the cheapest possible transfer: hivemind's binary stream handler, an 8 byte length, the bytes in the
same frames, discarded by the receiver on arrival, and one byte back. Our calls check, allocate and keep them.

Beside it the transports that are installed here, one after the other between two processes: small calls alone and many
at once, large messages, and what both processes with their p2pds took of processors and memory.
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

import psutil
import uvloop
from hivemind.p2p import PeerID

from swarmnode.base import plugin
from swarmnode.base.errors import LocalFault, UsageError
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, Call, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport.key_file import create
from swarmnode.net.transport.kind import LIBP2P, open_transport
from swarmnode.net.transport.libp2p import Libp2pTransport
from swarmnode.net.transport.stream import FRAME_BYTES
from swarmnode.net.transport.stream_transport import StreamTransport

SIZES_MIB = (1, 4, 16, 64)
TARGET_RATIO = 0.7
SECONDS_PER_SIZE = 3.0  # both ways of sending together
ROUNDS_MIN = 5
AT_ONCE = 32  # small calls
SMALL_CALLS = 1500

_RUN = RunId("be" * 32)
_BARE = "swarmnode-bench-bare"
_MIB = 1 << 20
_START_TIMEOUT_S = 60.0


def run(sizes_mib: Sequence[int] = SIZES_MIB, seconds_per_size: float = SECONDS_PER_SIZE) -> dict[str, Any]:
    """{"sizes": [{"mib", "rounds", "bare_s", "ours_s", "bare_mb_per_s", "ours_mb_per_s", "ratio"}], "target_ratio",
    "kinds": [{"kind", "call_ms", "calls_per_s", "cpu_ms_per_call", "mb_per_s", "cpu_s_per_gb", "memory_mib"}]}.

    Seconds are medians of one message; `ratio` is bare seconds over ours: 1.0 means that our call costs nothing.
    `kinds`: `call_ms` the median of one small call at a time, `calls_per_s` and `cpu_ms_per_call` of AT_ONCE at a time,
    `mb_per_s` by size of the message in MiB; processors and memory of both processes and their p2pds.
    """
    result: dict[str, Any] = uvloop.run(_measure(sizes_mib, seconds_per_size))
    return result


async def _measure(sizes_mib: Sequence[int], seconds_per_size: float) -> dict[str, Any]:
    async with answering_process() as (peer, addresses), own_transport() as transport:
        assert isinstance(transport, Libp2pTransport)
        await transport.connect(peer, addresses)
        bare = await _BareClient.open(transport, peer)
        rows = [await _measure_size(transport, peer, bare, mib, seconds_per_size) for mib in sizes_mib]
        bare.close()
    measured = [await _measure_kind(LIBP2P, sizes_mib, seconds_per_size)]
    for kind in plugin.names(plugin.TRANSPORTS):
        with contextlib.suppress(UsageError):  # its library is not installed
            measured.append(await _measure_kind(kind, sizes_mib, seconds_per_size))
    return {"sizes": rows, "target_ratio": TARGET_RATIO, "kinds": measured}


async def _measure_kind(kind: str, sizes_mib: Sequence[int], seconds: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    ping = Call(wire.Request(ping=wire.Ping()))
    async with own_transport(kind=kind) as transport, answering_process(kind) as (peer, addresses):
        await transport.connect(peer, addresses)

        async def small(count: int) -> None:
            for _ in range(count):
                await transport.call(peer, ping, timeout_s=60, reply_bytes_max=0)

        await small(50)
        took = []
        for _ in range(SMALL_CALLS // 5):
            began = perf_counter()
            await small(1)
            took.append(perf_counter() - began)
        began = perf_counter()
        cpu_s = _cpu_s()
        await asyncio.gather(*(small(SMALL_CALLS // AT_ONCE) for _ in range(AT_ONCE)))
        calls = SMALL_CALLS // AT_ONCE * AT_ONCE
        calls_s = perf_counter() - began
        calls_cpu_s = _cpu_s() - cpu_s
        rates = dict[int, float]()
        sent = 0
        cpu_s = _cpu_s()
        for mib in sizes_mib:
            data = bytes(range(256)) * (mib * _MIB // 256)
            call = Call(wire.Request(process=wire.Process(samples=1)), [WireTensor("u8", (len(data),), data)])
            lasted = list[float]()
            end = loop.time() + seconds
            while len(lasted) < ROUNDS_MIN or loop.time() < end:
                began = perf_counter()
                await transport.call(peer, call, timeout_s=60, reply_bytes_max=0)
                lasted.append(perf_counter() - began)
                sent += len(data)
            rates[mib] = len(data) / 1e6 / statistics.median(lasted)
        return {
            "kind": kind,
            "call_ms": 1e3 * statistics.median(took),
            "calls_per_s": calls / calls_s,
            "cpu_ms_per_call": 1e3 * calls_cpu_s / calls,
            "mb_per_s": rates,
            "cpu_s_per_gb": (_cpu_s() - cpu_s) / sent * 1e9,
            "memory_mib": sum(process.memory_full_info().uss for process in _tree()) / _MIB,
        }


def _tree() -> list[psutil.Process]:
    """This process and all below it: the answering one, and the p2pd of each."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu_s() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _tree())


async def _measure_size(
    transport: Libp2pTransport, peer: PeerId, bare: _BareClient, mib: int, seconds: float
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    data = bytes(range(256)) * (mib * _MIB // 256)
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
async def own_transport(run_id: RunId = _RUN, *, kind: str = LIBP2P) -> AsyncIterator[StreamTransport]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.key"
        transport = await open_transport(kind, path, create(path), run_id, ["/ip4/127.0.0.1/tcp/0"])
        try:
            yield transport
        finally:
            await transport.close()


@asynccontextmanager
async def answering_process(kind: str = LIBP2P) -> AsyncIterator[tuple[PeerId, list[str]]]:
    """A second process that receives; it ends when its standard input does."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.micro.transport",
        "--serve",
        kind,
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


async def _serve(kind: str) -> None:
    async def swallow(peer: PeerId, call: Call) -> Answer:
        return Answer(wire.Reply())

    async with own_transport(kind=kind) as transport:
        transport.prefer(lambda peer: True)
        for method in ("process", "ping"):
            transport.serve(method, swallow, tensor_bytes_max=1 << 30)
        if isinstance(transport, Libp2pTransport):
            await transport.daemon.p2p.add_binary_stream_handler(_BARE, _bare_handler)
        transport.start()
        said = {"peer": transport.peer_id, "addresses": await transport.addresses()}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main(arguments: Sequence[str]) -> int:
    """0 when every size meets TARGET_RATIO."""
    if "--serve" in arguments:
        uvloop.run(_serve(arguments[-1]))
        return 0
    result = run()
    out = sys.stdout
    out.write(f"{'MiB':>5} {'rounds':>7} {'bare MB/s':>10} {'ours MB/s':>10} {'ratio':>6}\n")
    for row in result["sizes"]:
        out.write(
            f"{row['mib']:>5} {row['rounds']:>7} {row['bare_mb_per_s']:>10.0f} {row['ours_mb_per_s']:>10.0f} "
            f"{row['ratio']:>6.2f}\n"
        )
    for kind in result["kinds"]:
        rates = ", ".join(f"{rate:.0f} MB/s ({mib} MiB)" for mib, rate in kind["mb_per_s"].items())
        out.write(
            f"{kind['kind']}: a call {kind['call_ms']:.2f} ms, {AT_ONCE} at once {kind['calls_per_s']:.0f}/s at "
            f"{kind['cpu_ms_per_call']:.2f} ms of CPU; {rates}, {kind['cpu_s_per_gb']:.1f} s of CPU a GB; "
            f"{kind['memory_mib']:.0f} MiB in both processes\n"
        )
    return 0 if all(row["ratio"] >= TARGET_RATIO for row in result["sizes"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
