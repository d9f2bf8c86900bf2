"""Places of a donor: keys that cost nothing take turns with honest joiners, in virtual time."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarmnode.base.errors import Busy, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.donor import DonorLimits, SnapshotDonor
from swarmnode.keep.transfer.download import DonorClient, DownloadLimits
from swarmnode.keep.transfer.snapshot import Snapshot, StateSlice
from tests.support.download import ME, RUN, SIZES, A, B, C, Giver, Link, World, ask, ask_chunk, slow_chunks
from tests.support.fake_telemetry import Quiet

pytestmark = pytest.mark.loop("virtual")

D = PeerId("peerD")
ONE_PLACE = DonorLimits(downloads_max=1, puller_idle_s=25.0, refused_max_s=0.0, turn_share=0.04)
CHUNKS = 252
TURN_S = 252.0  # a tenth of that
ROUND_S = 20.0  # the donor trains on: its state is another one then


class Slow(Giver):
    """A node with a state of CHUNKS chunks: at the rate of a slow home it takes 42 minutes."""

    async def take(self, cut: StateSlice) -> Snapshot:
        taken = await super().take(cut)
        return Snapshot.of(taken.state, 1, taken.round_index, taken.progress, 2016 // CHUNKS)


async def holds(donor: SnapshotDonor, peer: PeerId, manner: str) -> None:
    """Hold a place of `donor` until it is lost. Raises Unavailable then."""
    offer = (await donor.offer(peer, ask())).header.snapshot
    match manner:
        case "the first chunk again and again":
            while True:
                await donor.chunk(peer, ask_chunk(offer.id, 0))
                await asyncio.sleep(7.0)
        case "one chunk after the other, each just in time":
            for index in itertools.cycle(range(CHUNKS)):
                await donor.chunk(peer, ask_chunk(offer.id, index))
                await asyncio.sleep(9.5)
        case "all but the last chunk, and offers for ever":
            for index in range(CHUNKS - 1):
                await donor.chunk(peer, ask_chunk(offer.id, index))
            while True:
                await donor.offer(peer, ask())
                await asyncio.sleep(5.0)
        case "offers alone":
            while True:
                await donor.offer(peer, ask())
                await asyncio.sleep(5.0)
        case "all of it again and again":
            for index in range(CHUNKS):
                await donor.chunk(peer, ask_chunk(offer.id, index))
                await asyncio.sleep(0.5)


MANNERS = (
    "the first chunk again and again",
    "one chunk after the other, each just in time",
    "all but the last chunk, and offers for ever",
    "offers alone",
    "all of it again and again",
)


async def attack(donor: SnapshotDonor, peer: PeerId, manner: str) -> None:
    while True:
        try:
            await holds(donor, peer, manner)
        except Unavailable:
            await asyncio.sleep(0.5)  # more often than honest peers ask


async def train(giver: Slow) -> None:
    while True:
        await asyncio.sleep(ROUND_S)
        giver.round_index += 1


@asynccontextmanager
async def attacked(giver: Slow, attackers: int, manner: str) -> AsyncIterator[None]:
    """The donor of `giver` trains and has been under attack for longer than a turn."""
    peers = [PeerId(f"evil{number}") for number in range(attackers)]
    tasks = [asyncio.create_task(attack(giver.donor, peer, manner)) for peer in peers]
    tasks.append(asyncio.create_task(train(giver)))
    await asyncio.sleep(300.0)
    try:
        yield
    finally:
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        giver.donor.close()


async def fetch(world: World, said: Quiet, me: PeerId = ME) -> tuple[State, wire.Snapshot]:
    return await DonorClient(Link(world, me), RUN, 1, SIZES, said).download(lambda: [A])


@pytest.mark.parametrize("attackers", [4, 8])
@pytest.mark.parametrize("manner", MANNERS)
async def test_keys_that_never_change_keep_nobody_out(manner: str, attackers: int) -> None:
    world = World()
    limits = DonorLimits()
    chunk_s = 8.0
    giver = Slow(world, A, 100)
    world.faults[A] = slow_chunks(chunk_s)
    async with attacked(giver, attackers, manner):
        begun = asyncio.get_running_loop().time()
        await fetch(world, Quiet())
        took_s = asyncio.get_running_loop().time() - begun
    alone_s = CHUNKS * chunk_s / DownloadLimits().parallel
    assert took_s < limits.refused_max_s + (1 + attackers / limits.downloads_max) * (alone_s + TURN_S)


async def test_more_slow_joiners_than_places_all_finish() -> None:
    """They take turns, and go on with the chunks they have, though the donor's state is another one by then."""
    world = World()
    said = Quiet()
    chunk_s = 9.0
    giver = Slow(world, A, 100, DonorLimits(refused_max_s=0.0))  # they share the line at once
    world.faults[A] = slow_chunks(chunk_s)
    training = asyncio.create_task(train(giver))
    joiners = [PeerId(f"slow{number}") for number in range(5)]
    async with asyncio.TaskGroup() as group:
        for joiner in joiners:
            group.create_task(fetch(world, said, joiner))
    training.cancel()
    alone_s = CHUNKS * chunk_s / DownloadLimits().parallel
    assert asyncio.get_running_loop().time() < 1.5 * alone_s * len(joiners) / DonorLimits().downloads_max
    lost = [str(fields["reason"]) for fields in said.all("state.failed")]
    assert lost and all("given to another" in reason or "not kept here any more" in reason for reason in lost)
    assert world.asked[A, "chunk"] < 1.1 * CHUNKS * len(joiners)


async def take(donor: SnapshotDonor, peer: PeerId, chunks: int) -> bytes:
    """Take an offer and ask for the first `chunks` chunks. Returns the snapshot's id."""
    offer = (await donor.offer(peer, ask())).header.snapshot
    for index in range(chunks):
        await donor.chunk(peer, ask_chunk(offer.id, index))
    return offer.id


async def waits(donor: SnapshotDonor, peer: PeerId, seconds: float, holder: PeerId, snapshot: bytes) -> None:
    """Ask for a place every two seconds, in vain, while `holder` asks for chunks of `snapshot`."""
    for _ in range(int(seconds / 2.0)):
        await donor.chunk(holder, ask_chunk(snapshot, 0))
        with pytest.raises(Busy, match="pull state here already"):
            await donor.offer(peer, ask())
        await asyncio.sleep(2.0)


async def test_a_place_is_kept_for_a_turn_and_longer_while_nobody_waits() -> None:
    donor = Slow(World(), A, 100, ONE_PLACE).donor
    snapshot = await take(donor, B, 5)
    for index in range(5, 20):  # far longer than a turn
        await asyncio.sleep(20.0)
        await donor.chunk(B, ask_chunk(snapshot, index))
    await waits(donor, C, ONE_PLACE.share_s, B, snapshot)
    snapshot = await take(donor, C, 1)
    with pytest.raises(Unavailable, match="given to another") as lost:
        await donor.chunk(B, ask_chunk(snapshot, 20))
    assert not isinstance(lost.value, Busy), "it waits for an offer, and counts no failure"
    await waits(donor, B, TURN_S, C, snapshot)
    await donor.offer(B, ask())


async def test_those_without_a_turn_come_first_then_those_that_wait_longest() -> None:
    donor = Slow(World(), A, 100, ONE_PLACE).donor
    came = list[PeerId]()
    await take(donor, B, CHUNKS)  # it has had all of it
    snapshot = await take(donor, C, 1)
    for peer in (B, ME, D):  # they come in this order
        await waits(donor, peer, 2.0, C, snapshot)
    while len(came) < 3:
        for peer in (B, D, ME):  # and ask in that one
            try:
                await take(donor, peer, CHUNKS)
                came.append(peer)
            except Busy:
                with pytest.raises(Unavailable):
                    await donor.chunk(peer, ask_chunk(snapshot, 1))
        await asyncio.sleep(2.0)
        if not came:
            await donor.chunk(C, ask_chunk(snapshot, 1))
    assert came[:3] == [ME, D, B]


async def test_a_bounded_number_of_refused_peers_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.base.remembered.REMEMBERED_MAX", 20)
    donor = Slow(World(), A, 100, ONE_PLACE).donor
    await take(donor, B, 1)
    for number in range(30):
        with pytest.raises(Busy):
            await donor.offer(PeerId(f"peer{number}"), ask())
    assert len(donor._places._refused) == 20


async def test_two_old_snapshots_keep_nobody_from_a_later_round() -> None:
    """Two keys that asked for a chunk of theirs now and then: a joiner got a state as old as their patience, and one
    that needed a later round none."""
    giver = Slow(World(), A, 100, DonorLimits(refused_max_s=0.0))
    tasks = [asyncio.create_task(train(giver))]
    for peer in (B, C):
        keeping = attack(giver.donor, peer, "one chunk after the other, each just in time")
        tasks.append(asyncio.create_task(keeping))
        await asyncio.sleep(30.0)
    with pytest.raises(Busy, match="2 snapshots are pulled"):
        await giver.donor.offer(D, ask(giver.round_index))
    await asyncio.sleep(TURN_S)
    offer = (await giver.donor.offer(D, ask())).header.snapshot
    assert offer.round >= giver.round_index - 1 and giver.donor.alive == 2
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
