"""Which members are alive: all are pinged, or a sample of a large stage."""

import pytest

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, Call, Handler
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.liveness import PINGED_MAX, Pinger
from swarmnode.net.membership.swarm import Member, Swarm

RUN = RunId("ab" * 32)
ME = PeerId("me")


class Pinged:
    """Nodes by name; of those in `alive` each counts the pings it answers."""

    def __init__(self, alive: list[str]) -> None:
        self.network = MemoryNetwork()
        self.pings = list[str]()
        self.pinger = Pinger(MemoryTransport(self.network, ME, RUN), RUN)
        for peer in alive:
            MemoryTransport(self.network, PeerId(peer), RUN).serve("ping", self._handler(peer), tensor_bytes_max=0)

    def _handler(self, name: str) -> Handler:
        async def ping(peer: PeerId, call: Call) -> Answer:
            self.pings.append(name)
            return Answer(wire.Reply(pong=wire.Pong()))

        return ping


def stage_of(*peers: str) -> Swarm:
    state = record_pb2.NODE_STATE_TRAINING
    return Swarm.of(
        (
            Member(PeerId(peer), 0, state, 1, samples_per_second=1.0, queue=0, round_index=0, expires_unix_s=9.0)
            for peer in peers
        ),
        1,
    )


async def test_answering_peers_are_alive_and_beyond_a_bound_all_are() -> None:
    here = Pinged(["a", "c"])
    assert await here.pinger.answering([PeerId(p) for p in "abc"]) == {"a", "c"}
    many = [PeerId(f"x{number}") for number in range(PINGED_MAX + 2)]
    assert await here.pinger.answering(many) == {many[-2], many[-1]}, "none of the first answers"


@pytest.mark.parametrize("living", [4, 1])
async def test_a_sample_speaks_for_its_stage_only_while_half_of_it_lives(living: int) -> None:
    """Of eight members four are pinged; when most of these are dead, the other four are pinged, too."""

    peers = [f"p{number}" for number in range(8)]
    swarm = stage_of(*peers, ME)
    probe = Pinged(peers)
    assert await probe.pinger.answering_in(swarm, [0], 4) == set(peers), "and never this node itself"
    sample = list(probe.pings)
    assert len(sample) == 4
    rest = [peer for peer in peers if peer not in sample]
    here = Pinged([*sample[:living], rest[0]])
    alive = await here.pinger.answering_in(swarm, [0, 0], 4)
    assert alive == ({*sample, *rest} if living == 4 else {sample[0], rest[0]})
    assert len(here.pings) == (4 if living == 4 else 2)
