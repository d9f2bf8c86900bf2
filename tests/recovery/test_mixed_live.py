"""A state of several donors over real streams: the first donor gives up on the way."""

import asyncio
import hashlib
from contextlib import AsyncExitStack

import pytest

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId, digest
from swarmnode.membership.progress import to_message
from swarmnode.ports import Answer, Call, State
from swarmnode.transfer.donor import SnapshotDonor
from swarmnode.transfer.download import DonorClient, DownloadLimits
from swarmnode.transfer.snapshot import Snapshot, StateSlice, check_chunk, chunk_span
from swarmnode.transport.libp2p import Libp2pTransport
from tests.support.download import Said
from tests.support.libp2p_node import node
from tests.support.sections import PACKED_ITEMSIZE, SECTIONS
from tests.support.transport_contract import RUN, pong

pytestmark = [pytest.mark.node, pytest.mark.nightly]  # test_mixed.py has it in virtual time

PARAMETERS = 1 << 16
SIZES = dict.fromkeys(SECTIONS, PARAMETERS)
CHUNK = 1 << 13
CHUNKS = PARAMETERS * sum(PACKED_ITEMSIZE.values()) // CHUNK
GIVEN = 10  # chunks of each, before it waits for the others
LIMITS = DownloadLimits(alone_s=0.2)


def state(seed: int) -> State:
    return State(
        {name: memoryview(digest(seed, name) * (size * PARAMETERS // 32)) for name, size in PACKED_ITEMSIZE.items()},
        inner_steps=seed,
        gradient_norm=0.25,
        packed=True,
    )


class Giving:
    """A donor on a real transport; each waits until the others have given, and the first then gives up."""

    def __init__(self, transport: Libp2pTransport, seed: int) -> None:
        self.transport = transport
        self.seed = seed
        self.chunks = 0
        self.gives_up = False
        self.others: list[Giving] = []
        self.donor = SnapshotDonor(RUN, 1, self.take, asyncio.to_thread, Said())
        transport.serve("ping", pong, tensor_bytes_max=0)
        transport.serve("snapshot", self.donor.offer, tensor_bytes_max=0)
        transport.serve("chunk", self.chunk, tensor_bytes_max=0)

    async def take(self, cut: StateSlice) -> Snapshot:
        return Snapshot.of(state(self.seed), 1, self.seed, to_message({}), CHUNK)

    async def chunk(self, peer: PeerId, call: Call) -> Answer:
        self.chunks += 1
        if self.chunks > GIVEN:
            # One more than are asked for at once: the first of them is there, whatever ends now.
            while not all(other.chunks > LIMITS.beside for other in self.others):
                await asyncio.sleep(0.02)
            if self.gives_up:
                raise RemoteFault("its machine was taken away")
        return await self.donor.chunk(peer, call)


@pytest.mark.loop("uvloop")
async def test_a_state_of_several_over_real_streams() -> None:
    async with AsyncExitStack() as stack:
        (joiner, _), *nodes = [await stack.enter_async_context(node()) for _ in range(4)]
        givers = [Giving(transport, 1 + k) for k, (transport, _) in enumerate(nodes)]
        givers[0].gives_up = True
        for giver in givers:
            giver.others = [other for other in givers if other is not giver]
            await joiner.connect(giver.transport.peer_id, await giver.transport.addresses())
        for transport in (joiner, *[giver.transport for giver in givers]):
            transport.start()
        peers, said = [giver.transport.peer_id for giver in givers], Said()
        found, offer = await DonorClient(joiner, RUN, 1, SIZES, said, limits=LIMITS).download(lambda: peers)

        whole = b"".join(bytes(section) for section in found.sections.values())
        manifests = [Snapshot.of(state(1 + k), 1, 1 + k, to_message({}), CHUNK).manifest() for k in range(3)]
        of = set()
        for index in range(CHUNKS):
            start, end = chunk_span(offer, index)
            check_chunk(offer, index, whole[start:end])
            of.add(next(k for k, m in enumerate(manifests) if m.hashes[index] == offer.hashes[index]))
        assert of == {0, 1, 2} and offer.round == 1 and offer.id == hashlib.sha256(b"".join(offer.hashes)).digest()
        assert said.all("state.failed")[0]["peer"] == peers[0]
        assert sum(giver.chunks for giver in givers) < CHUNKS + 60, "nothing came twice but what was under way"
        for giver in givers:
            giver.donor.close()
