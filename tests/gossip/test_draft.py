"""Packets are sent while they are written: what is below the watermark is final, for every codec and every method."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest
import torch

from swarmnode.errors import LocalFault
from swarmnode.gossip.compression import codec
from swarmnode.gossip.compression.codec import TILE, Bytes, Codec, Done
from swarmnode.gossip.exchange_driver import ExchangeDriver
from swarmnode.gossip.exchange_machine import ExchangeMachine
from swarmnode.gossip.outer import outer
from swarmnode.gossip.outgoing_packet import OutgoingPacket, while_written
from swarmnode.ids import PeerId
from swarmnode.machine.compute import ThreadCompute
from swarmnode.manifest import GossipSpec, Manifest
from swarmnode.ports import Answer, Call, Packet, Priority
from swarmnode.wire import call_pb2 as wire
from swarmnode_methods.int8 import Int8
from swarmnode_methods.noloco import NoLoCo
from tests.support.fake_telemetry import Quiet
from tests.support.libp2p_node import node, until
from tests.support.method_tables import CODECS, METHODS, NONE, without_c
from tests.support.stage_context import stage_context
from tests.support.transport_contract import RUN

PARAMETERS = 2 * TILE + 4096 + 777
AT_THE_END = ("powersgd",)  # nothing is final before everything is
PLAIN = ("e3m0", "ternary")  # written in plain operations alone


def weights(seed: int, parameters: int = PARAMETERS) -> torch.Tensor:
    return torch.randn(parameters, generator=torch.Generator().manual_seed(seed))


def flats(coder: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is coded, the slow weights)."""
    phi, delta = weights(1), 0.01 * weights(2)
    return (delta if coder.of_delta else phi + delta), phi


@pytest.mark.parametrize("extension", [True, False])
@pytest.mark.parametrize("name", CODECS)
def test_bytes_below_the_watermark_never_change(name: str, extension: bool) -> None:
    with contextlib.nullcontext() if extension else without_c(name):
        coder, twin = codec(name), codec(name)
    flat, phi = flats(coder)
    for seed in (3, 4):  # with a residual, or what else is kept
        told: list[tuple[int, bytes]] = []
        wire = np.full(coder.begin(flat), 0xEE, np.uint8)
        at = 0

        def done(nbytes: int, wire: Bytes = wire, told: list[tuple[int, bytes]] = told) -> None:
            nonlocal at
            told.append((at, bytes(wire[at:nbytes])))
            at = nbytes

        with torch.no_grad():
            coder.write(wire, flat, phi, seed, done)
        assert all(bytes(wire[begin : begin + len(said)]) == said for begin, said in told)
        assert bytes(wire) == bytes(twin.encode(flat, reference=phi, seed=seed)[0].data)
        if name in AT_THE_END:
            assert len(told) == 1
        else:
            assert len(told) >= 2 and len(told[0][1]) <= coder.nbytes(PARAMETERS) * 0.6, [len(said) for _, said in told]


@pytest.mark.parametrize("name", [name for name in CODECS if name not in (*AT_THE_END, *PLAIN)])
def test_nothing_is_allocated_for_a_tile_in_c(name: str) -> None:
    """Of tensors; what little is, is for the message. Plain operations take memory as they go."""
    coder = codec(name)
    flat, phi = flats(coder)
    wire = np.empty(coder.begin(flat), np.uint8)
    coder.encode(flat, reference=phi, seed=1)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        coder.write(wire, flat, phi, 2, lambda nbytes: None)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert taken < TILE, f"{taken} bytes"


class Sluggish(Int8):
    """Waits in the middle of its packet until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.breaks = False

    def write(self, wire: Bytes, flat: torch.Tensor, reference: torch.Tensor | None, seed: int, done: Done) -> None:
        def reached(nbytes: int) -> None:
            done(nbytes)
            assert self.go_on.wait(60), "nobody let it go on"
            if self.breaks:
                raise MemoryError("no room")

        super().write(wire, flat, reference, seed, reached)


@pytest.mark.live
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.loop("uvloop")
async def test_the_first_bytes_leave_before_the_packet_is_written(breaks: bool) -> None:
    """A real exchange, from the compute thread to the partner; the loop decides when the encoder goes on."""
    committed = 0

    async def exchange(peer: PeerId, call: Call) -> Answer:
        return Answer(wire.Reply(exchanged=wire.Exchanged(round=call.header.exchange.round)), call.tensors)

    async def commit(peer: PeerId, call: Call) -> Answer:
        nonlocal committed
        committed += 1
        return Answer(wire.Reply(committed=wire.Committed()))

    coder = Sluggish()
    coder.breaks = breaks
    slow = NoLoCo(weights(1), coder, 0.5, 0.7, 0.7)
    async with node() as (here, _), node() as (there, _):
        there.serve("exchange", exchange, tensor_bytes_max=1 << 30)
        there.serve("commit", commit, tensor_bytes_max=0)
        await here.connect(there.peer_id, await there.addresses())
        here.start()
        there.start()
        compute = ThreadCompute(Quiet())
        try:
            draft = await compute.run(Priority.OUTER, 0, lambda: slow.draft(1))
            assert not draft.complete

            async def let_go() -> None:
                await until(lambda: there.throttle.down.total_nbytes > TILE // 2)
                assert not draft.complete
                coder.go_on.set()

            # The lowest id of all: it is the one that calls.
            machine = ExchangeMachine(PeerId(""), 0, off_stride=lambda _: "", newest=lambda: 1)
            exchanges = ExchangeDriver(
                stage_context(Manifest(), 0, RUN, transport=here, telemetry=Quiet()), machine, lambda peer: None
            )

            async def meet() -> Packet:
                ours = OutgoingPacket(1, 1.0, 10, draft.tensors)
                found, _ = await while_written(draft, exchanges.meet([there.peer_id], ours, 60.0, 60.0))
                return found[there.peer_id]

            async with asyncio.TaskGroup() as group:
                group.create_task(let_go())
                if breaks:
                    with pytest.raises(ExceptionGroup) as caught:
                        await meet()
                    assert caught.value.subgroup(LocalFault) is not None
                    assert committed == 0
                    return
                packet = await meet()
        finally:
            coder.go_on.set()
            compute.close()
        assert committed == 1 and draft.complete
        expected = NoLoCo(weights(1), Int8(), 0.5, 0.7, 0.7).message(1)
        assert [bytes(t.data) for t in packet.tensors] == [bytes(t.data) for t in expected]


@pytest.mark.parametrize("method", [name for name in METHODS if name != NONE])
def test_a_draft_is_not_moved_by_what_is_learnt_before_it_is_written(method: str) -> None:
    """The boundary is marked at once: inner steps may come between it and the writing."""
    spec = GossipSpec(
        method=method,
        codec={"partial_average": "topk64", "noloco": "modular4", "average": "bf16", "desloc": "fp32"}.get(
            method, "e3m0"
        ),
        **({"group": 0} if method not in ("noloco", "average") else {}),  # type: ignore[arg-type]
    )
    one, other = (outer(spec, weights(1, 10_000), "somebody") for _ in range(2))
    for learner in (one, other):
        learner.theta.add_(weights(2, 10_000), alpha=0.01)
    draft = one.draft(1)
    one.theta.add_(1.0)
    drafted = draft.finish()
    assert draft.complete
    assert [bytes(t.data) for t in drafted] == [bytes(t.data) for t in other.message(1)]


def test_a_zero_is_sent_as_zero() -> None:
    for name in ("e3m0", "ternary"):
        coder, flat, out = codec(name), weights(1, 1000), torch.empty(1000)
        flat[::3] = 0.0
        coder.decode(coder.encode(flat, seed=1), out)
        assert not out[::3].any(), name
