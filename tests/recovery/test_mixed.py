"""States of several donors: what takes long comes side by side, outlives its donors, and is blamed on nobody."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, State
from swarmnode.keep.recovery.neighbour_backup import GENTLE
from swarmnode.keep.transfer.download import DonorClient, DownloadLimits
from swarmnode.keep.transfer.snapshot import Snapshot, check_chunk
from tests.support.download import (
    CHUNK,
    CHUNKS,
    ME,
    RUN,
    SIZES,
    A,
    B,
    C,
    Link,
    Next,
    World,
    altered,
    flip,
    give,
    same,
    slow_chunks,
    state,
)
from tests.support.fake_telemetry import Quiet

pytestmark = pytest.mark.loop("virtual")

SLOW_S = 20.0  # a chunk; four at once: all takes 160 s from one


def pieces(found: State) -> list[bytes]:
    whole = b"".join(bytes(section) for section in found.sections.values())
    return [whole[at : at + CHUNK] for at in range(0, len(whole), CHUNK)]


def origins(found: State, *states: State) -> list[int]:
    """Which of `states` each chunk is of."""
    known = [pieces(one) for one in states]
    return [next(k for k, one in enumerate(known) if one[i] == piece) for i, piece in enumerate(pieces(found))]


async def pull(
    world: World,
    donors: list[PeerId],
    said: Quiet,
    limits: DownloadLimits | None = None,
    accept: Callable[[State], Awaitable[None]] | None = None,
) -> Snapshot:
    client = DonorClient(Link(world, ME), RUN, 1, SIZES, said, limits=limits or DownloadLimits())
    found, offer = await client.download(lambda: donors, accept=accept)
    assert offer.nbytes == sum(map(len, pieces(found))) and said.all("state.downloaded")[-1]["nbytes"] == offer.nbytes
    for index, piece in enumerate(pieces(found)):
        check_chunk(offer, index, piece)  # whoever is given it on can verify it
    return Snapshot.of_offer(offer, found)


async def test_chunks_of_a_slow_donor_outlive_it() -> None:
    world = World()
    said = Quiet()
    givers = give(world, 100, 200)
    givers[1].round_index = 7
    givers[1].donor.close()
    limits = DownloadLimits(sources=2)
    world.faults = {A: slow_chunks(SLOW_S, 20, RemoteFault("connection reset")), B: slow_chunks(SLOW_S)}
    # B comes only now: nobody was there to give side by side.
    donors = [A]
    task = asyncio.create_task(pull(world, donors, said, limits))
    while world.asked.get((A, "chunk"), 0) <= 20:
        await asyncio.sleep(1.0)
    donors.append(B)
    found = await task
    of = origins(found.state, state(105), state(207))
    assert of == [0] * 20 + [1] * (CHUNKS - 20), "nothing came twice"
    assert found.round_index == 5 and found.state.inner_steps == 105, "it is as old as its oldest part"
    assert world.asked[B, "chunk"] == CHUNKS - 20
    assert said.all("state.downloaded")[0]["donors"] == 2
    assert not said.total("swarmnode_peer_faults_total", kind="state")


async def test_a_long_download_uses_several_donors() -> None:
    taken = []
    for peers in ([A], [A, B, C]):
        world = World()
        said = Quiet()
        loop = asyncio.get_running_loop()
        give(world, *[100 * (1 + k) for k in range(len(peers))])
        world.faults = {peer: slow_chunks(SLOW_S) for peer in peers}
        begun = loop.time()
        found = await pull(world, list(peers), said)
        taken.append(loop.time() - begun)
        of = Counter(origins(found.state, *[state(100 * (1 + k) + 5) for k in range(len(peers))]))
        asked = sum(world.asked[peer, "chunk"] for peer in peers)
        assert asked == CHUNKS and sum(of.values()) == CHUNKS, "each chunk once"
        assert len(of) == len(peers) and len(said.all("state.beside")) == len(peers) - 1
    assert taken[0] > 160.0 and taken[1] < 130.0, "60 s alone, then twice as fast"


async def test_a_frozen_donor_keeps_what_it_gave_and_no_more() -> None:
    world = World()
    said = Quiet()
    give(world, 100, 200)
    world.faults = {A: slow_chunks(SLOW_S, 8)}
    found = await pull(world, [A, B], said)
    of = origins(found.state, state(105), state(205))
    assert of.count(0) == 8 and of.count(1) == CHUNKS - 8
    assert asyncio.get_running_loop().time() < 300.0
    assert not any(fields["lied"] for fields in said.all("state.failed"))


async def test_nothing_stays_of_one_that_lied_beside() -> None:
    world = World()
    said = Quiet()
    give(world, 100, 200)
    slow = slow_chunks(SLOW_S)

    async def lies(method: str, serial: int, go: Next) -> Answer:
        if method == "chunk" and serial > 5:
            return await altered(go, flip)
        return await slow(method, serial, go)

    world.faults = {A: slow, B: lies}
    found = await pull(world, [A, B], said)
    assert same(found.state, state(105)), "all of it of the honest one"
    assert [fields["peer"] for fields in said.all("state.failed")] == [B]
    assert said.total("swarmnode_peer_faults_total", kind="state") == 1


async def test_a_failing_helper_is_not_asked_repeatedly() -> None:
    world = World()
    said = Quiet()
    give(world, 100, 200)

    async def refuses(method: str, serial: int, go: Next) -> Answer:
        raise Unavailable("not now") if serial > 1 else RemoteFault("not now")

    world.faults = {A: slow_chunks(SLOW_S), B: refuses}
    found = await pull(world, [A, B], said)
    assert same(found.state, state(105))
    assert world.asked[B, "snapshot"] <= DownloadLimits().failures_max


async def test_a_mixed_state_that_is_not_believed_is_nobodys_lie() -> None:
    world = World()
    said = Quiet()
    give(world, 100, 200)
    world.faults = {A: slow_chunks(SLOW_S), B: slow_chunks(SLOW_S)}
    seen: list[set[int]] = []

    async def accept(found: State) -> None:
        seen.append(set(origins(found, state(105), state(205))))
        if len(seen) == 1:
            raise RemoteFault("state, section phi: not finite")

    found = await pull(world, [A, B], said, accept=accept)
    assert seen[0] == {0, 1} and len(seen[1]) == 1, "the next is of one alone"
    assert same(found.state, state(105)) or same(found.state, state(205))
    assert [fields["lied"] for fields in said.all("state.failed")] == [False]
    assert not said.total("swarmnode_peer_faults_total", kind="state")


async def test_a_download_without_haste_uses_one_donor() -> None:
    world = World()
    said = Quiet()
    give(world, 100, 200)
    world.faults = {A: slow_chunks(SLOW_S), B: slow_chunks(SLOW_S)}
    found = await pull(world, [A, B], said, replace(GENTLE, rest=0.0))
    assert same(found.state, state(105)) and (B, "snapshot") not in world.asked
