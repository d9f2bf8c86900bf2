"""Downloads of parts of a state and of another stage's backup, and politeness to donors."""

import asyncio
from collections.abc import Sequence

import pytest

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer
from swarmnode.keep.transfer.donor import SnapshotDonor
from swarmnode.keep.transfer.download import DonorClient, DownloadLimits
from swarmnode.keep.transfer.snapshot import SLOW, WHOLE, Snapshot, StateSlice
from swarmnode.net.membership.progress import to_message
from tests.support.download import CHUNK, ME, PARAMETERS, RUN, SIZES, A, B, Giver, Link, Next, World, same, state
from tests.support.fake_telemetry import Quiet

pytestmark = pytest.mark.loop("virtual")


async def fetch(
    world: World,
    donors: Sequence[PeerId],
    *,
    limits: DownloadLimits | None = None,
    cut: StateSlice = WHOLE,
    stage: int = 1,
) -> Snapshot:
    here = Link(world, ME), RUN, stage, SIZES, Quiet()
    client = DonorClient(*here, limits=limits or DownloadLimits(), cut=cut)
    found, offer = await client.download(lambda: donors)
    return Snapshot.of_offer(offer, found)


async def test_a_part_of_a_state_travels_alone() -> None:
    world = World()
    giver = Giver(world, A, 100)
    slow = await fetch(world, [A], cut=SLOW)
    assert list(slow.state.sections) == ["phi"] and slow.nbytes == 4 * PARAMETERS
    assert bytes(slow.state.sections["phi"]) == bytes(state(105).sections["phi"])
    piece = await fetch(world, [A], cut=StateSlice(("phi",), PARAMETERS - 10, 10))
    assert bytes(piece.state.sections["phi"]) == bytes(state(105).sections["phi"])[-40:]
    whole = await fetch(world, [A])
    assert same(whole.state, state(105)) and giver.taken == 1, "one copy of the state serves all parts"
    with pytest.raises(RemoteFault):
        StateSlice(("phi",), PARAMETERS - 5, 10).sizes(SIZES)


async def test_a_backup_of_another_stage_is_given() -> None:
    world = World()
    said = Quiet()
    kept = Snapshot.of(state(7), 2, 9, to_message({"feeder": 1}), CHUNK)
    giver = Giver(world, A, 100)
    donor = SnapshotDonor(RUN, 1, giver.take, giver.offload, said, kept=lambda stage: kept if stage == 2 else None)
    donor.serve(Link(world, A))
    found = await fetch(world, [A], stage=2)
    assert same(found.state, state(7)) and found.round_index == 9 and giver.taken == 0
    with pytest.raises(Unavailable):
        await fetch(world, [A], stage=3)


async def test_a_polite_download_rests() -> None:
    world = World()
    loop = asyncio.get_running_loop()
    Giver(world, A, 100)
    await fetch(world, [A])  # the snapshot is made
    taken = []
    for rest in (0.0, 1.0):
        begun = loop.time()
        await fetch(world, [A], limits=DownloadLimits(parallel=1, rest=rest))
        taken.append(loop.time() - begun)
    assert 1.8 * taken[0] < taken[1] < 2.2 * taken[0], "half of the time the donor's line is free"


async def test_a_dead_donor_is_not_waited_for() -> None:
    """It accepts the question and never answers it, nor a ping: seconds, not the minute an offer may take."""
    world = World()
    loop = asyncio.get_running_loop()
    Giver(world, B, 100)

    async def dead(method: str, serial: int, go: Next) -> Answer:
        await asyncio.sleep(1e6)
        raise AssertionError

    Giver(world, A, 100).donor.close()
    world.faults = {A: dead}
    world.handlers[A, "ping"] = world.handlers[A, "snapshot"]
    begun = loop.time()
    assert same((await fetch(world, [A, B])).state, state(105))
    assert loop.time() - begun < 10.0
