"""The network examination for `doctor`: latency of a daemon's peers, and whether they can reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.ports import Call, Transport
from swarmnode.transport.capacity import best
from swarmnode.transport.reachability import ask, verdict
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import control_pb2

TIMEOUT_S = 12.0
PINGS = 3  # the first may open a stream: the fastest counts
HELPERS_MAX = 4
MEASURED_MAX = 2  # guess: of those that answer, the nearest: our own limit shows with any
MEASURE_S = 8.0


async def examine(transport: Transport, peers: Sequence[tuple[PeerId, int]]) -> control_pb2.ExamineReply:
    """Latency to each of `peers` (id, stage), and for those that answer, how they can reach us."""
    async with asyncio.TaskGroup() as tasks:
        exams = [tasks.create_task(_exam(transport, peer, stage)) for peer, stage in peers]
    reply = control_pb2.ExamineReply(peers=[exam.result() for exam in exams])
    near = sorted((exam for exam in reply.peers if not exam.fault), key=lambda exam: exam.latency_s)[:MEASURED_MAX]
    for exam in near:  # one after the other: concurrent ones would share the bandwidth
        capacity, _ = await best(transport, [PeerId(exam.peer_id)], MEASURE_S)
        if capacity is not None:
            exam.up_bps, exam.down_bps = capacity.up_bps, capacity.down_bps
    helpers = [PeerId(exam.peer_id) for exam in reply.peers if not exam.fault]
    reach, reply.reason = verdict(await ask(transport, helpers[:HELPERS_MAX]))
    reply.reach = str(reach)
    return reply


async def _exam(transport: Transport, peer: PeerId, stage: int) -> control_pb2.PeerExam:
    exam = control_pb2.PeerExam(peer_id=peer, stage=stage)
    loop, best = asyncio.get_running_loop(), float("inf")
    try:
        for _ in range(PINGS):
            begun = loop.time()
            await transport.call(peer, Call(wire.Request(ping=wire.Ping())), timeout_s=TIMEOUT_S, reply_bytes_max=0)
            best = min(best, loop.time() - begun)
    except (RemoteFault, Unavailable) as error:
        exam.fault = str(error)
        return exam
    exam.latency_s = best
    return exam
