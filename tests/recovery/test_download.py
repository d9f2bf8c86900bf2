"""Downloads between nodes that lie, die and dawdle, in virtual time: no test here waits for a clock."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Answer, State
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.recovery.neighbour_backup import GENTLE
from swarmnode.keep.transfer.donor import DonorLimits, SnapshotDonor
from swarmnode.keep.transfer.download import DonorClient, DownloadLimits
from swarmnode.keep.transfer.snapshot import CHUNK_NBYTES, CHUNKS_AT_ONCE, Snapshot, StateSlice
from swarmnode.net.membership.progress import to_message
from tests.support.download import (
    CHUNKS,
    ME,
    RUN,
    SIZES,
    A,
    B,
    C,
    Giver,
    Link,
    Next,
    World,
    altered,
    ask,
    ask_chunk,
    flip,
    give,
    same,
    state,
)
from tests.support.fake_telemetry import Quiet
from tests.support.sections import PACKED_ITEMSIZE, SECTIONS

pytestmark = pytest.mark.loop("virtual")


async def fetch(
    world: World, donors: Sequence[PeerId], said: Quiet | None = None, *, me: PeerId = ME, round_min: int = 0
) -> tuple[State, wire.Snapshot]:
    client = DonorClient(Link(world, me), RUN, 1, SIZES, said or Quiet(), round_min=round_min)
    return await client.download(lambda: donors)


async def test_a_download() -> None:
    world = World()
    said = Quiet()
    giver = Giver(world, A, 100)
    found, offer = await fetch(world, [ME, A], said)
    assert same(found, state(105)) and found.inner_steps == 105 and found.gradient_norm == 0.25
    assert offer.round == 5 and offer.progress.samples[:] == [5000]
    assert world.asked == {(A, "snapshot"): 1, (A, "chunk"): CHUNKS}
    assert 1 < world.under_way_max <= DownloadLimits().parallel
    assert said.total("swarmnode_snapshot_bytes_total", direction="received") == 2016
    assert giver.said.total("swarmnode_snapshot_bytes_total", direction="sent") == 2016
    progress = [fields["chunks"] for fields in said.all("state.download")]
    assert progress == list(range(1, CHUNKS + 1))
    assert [name for name, _ in said.events if name != "state.download"] == ["state.donor", "state.downloaded"]


async def test_a_hashed_chunk_is_not_hashed_again() -> None:
    world = World()
    giver = Giver(world, A, 100)
    await fetch(world, [A])
    assert giver.offloaded == 1
    taken = giver.take
    giver.round_index = 6

    async def hashed(cut: StateSlice) -> Snapshot:
        snapshot = await taken(cut)
        snapshot.manifest()
        return snapshot

    giver.donor.close()
    giver.donor = SnapshotDonor(RUN, 1, hashed, giver.offload, giver.said)
    giver.donor.serve(Link(world, A))
    found, offer = await fetch(world, [A])
    assert same(found, state(106)) and offer.round == 6
    assert giver.offloaded == 1


async def test_a_broken_connection_is_gone_on_with() -> None:
    """Every tenth chunk fails. The donor's state moves on meanwhile; the snapshot begun is finished all the same."""
    world = World()
    said = Quiet()
    giver = Giver(world, A, 100, DonorLimits(fresh_s=0.0))

    async def flaky(method: str, serial: int, go: Next) -> Answer:
        if method == "chunk" and serial % 10 == 0:
            giver.round_index += 1
            await asyncio.sleep(0.001)  # chunks asked for at the same moment arrive before it breaks
            raise RemoteFault("stream reset")
        return await go()

    world.faults[A] = flaky
    found, offer = await fetch(world, [A], said)
    assert same(found, state(105)) and offer.round == 5
    assert giver.taken == 1 and world.asked[A, "snapshot"] == 1
    assert CHUNKS < world.asked[A, "chunk"] < 2 * CHUNKS
    assert said.all("state.failed")


async def test_busy_and_slow_chunks_are_asked_for_again() -> None:
    world = World()
    said = Quiet()
    Giver(world, A, 100)

    async def dawdle(method: str, serial: int, go: Next) -> Answer:
        if method == "chunk" and serial == 3:
            raise Busy("full", 1.5)
        if method == "chunk" and serial == 5:
            await asyncio.sleep(3600.0)
        return await go()

    world.faults[A] = dawdle
    found, _ = await fetch(world, [A], said)
    assert same(found, state(105)) and not said.all("state.failed")
    assert world.asked[A, "chunk"] == CHUNKS + 2


async def test_large_chunks_may_take_as_long_as_they_must() -> None:
    """A state of more than 16 GiB comes in chunks of more than a MiB, at the bytes a second that a MiB may have."""
    world = World()
    said = Quiet()
    giver = Giver(world, A, 100)
    parameters = CHUNK_NBYTES // 4

    async def take(cut: StateSlice) -> Snapshot:
        sections = {name: memoryview(bytes(size * parameters)) for name, size in PACKED_ITEMSIZE.items()}
        return Snapshot.of(State(sections, 1, 0.25, packed=True), 1, 5, to_message({}), 2 * CHUNK_NBYTES)

    async def slow(method: str, serial: int, go: Next) -> Answer:
        if method == "chunk":
            await asyncio.sleep(1.5 * DownloadLimits().chunk_timeout_s)
        return await go()

    giver.donor.close()
    giver.donor = SnapshotDonor(RUN, 1, take, giver.offload, giver.said)
    giver.donor.serve(Link(world, A))
    world.faults[A] = slow
    sizes = dict.fromkeys(SECTIONS, parameters)
    found, _ = await DonorClient(Link(world, ME), RUN, 1, sizes, said).download(lambda: [A])
    assert memoryview(found.sections["phi"]).nbytes == CHUNK_NBYTES
    assert world.asked[A, "chunk"] == 2 and not said.all("state.failed")


@pytest.mark.parametrize("manner", ["dies", "forgets", "busy for ever"])
async def test_another_donor_when_one_fails(manner: str) -> None:
    world = World()
    said = Quiet()
    givers = give(world, 100, 200)

    async def fail(method: str, serial: int, go: Next) -> Answer:
        if method == "chunk" and serial > 7:
            match manner:
                case "dies":
                    raise RemoteFault("connection reset")
                case "forgets":
                    givers[0].donor.close()
                    givers[0].round_index += 1
                case _:
                    raise Busy("full", 0.1)
        return await go()

    world.faults[A] = fail
    found, offer = await fetch(world, [A, B], said)
    assert same(found, state(205)) and offer.round == 5
    assert world.asked[A, "chunk"] < 40
    assert not any(fields["lied"] for fields in said.all("state.failed"))
    assert asyncio.get_running_loop().time() < 200.0


def shorten(answer: Answer) -> None:
    answer.tensors = [replace(answer.tensors[0], data=bytes(answer.tensors[0].data)[:-1])]


def drop(answer: Answer) -> None:
    answer.tensors = []


def misnumber(answer: Answer) -> None:
    answer.header.chunk.index += 1


def other_model(answer: Answer) -> None:
    answer.header.snapshot.elements[0] += 1


def huge(answer: Answer) -> None:
    answer.header.snapshot.nbytes = 2**62


def too_old(answer: Answer) -> None:
    answer.header.snapshot.round = 3


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("chunk", flip),
        ("chunk", shorten),
        ("chunk", drop),
        ("chunk", misnumber),
        ("snapshot", other_model),
        ("snapshot", huge),
        ("snapshot", too_old),
    ],
)
async def test_a_liar_is_not_asked_again(method: str, change: Callable[[Answer], None]) -> None:
    world = World()
    said = Quiet()
    givers = give(world, 100, 200)

    async def lie(called: str, serial: int, go: Next) -> Answer:
        if called == method and (called == "snapshot" or serial > 20):
            return await altered(go, change)
        return await go()

    world.faults[A] = lie
    found, _ = await fetch(world, [A, B], said, round_min=4)
    assert same(found, state(205))
    assert world.asked[A, "snapshot"] == 1
    assert [fields["lied"] for fields in said.all("state.failed")] == [True]
    assert said.total("swarmnode_peer_faults_total", kind="state") == 1
    for giver in givers:
        giver.donor.close()
    # With nobody else to ask it is given up, with one line that says why.
    with pytest.raises(Unavailable, match=r"no state for stage 2 after .* the last: .*peerA"):
        await fetch(world, [A], round_min=4)


async def test_a_state_that_is_not_accepted_is_a_lie() -> None:
    """Right hashes over numbers nobody can believe: the next donor is asked, also when it offers the same bytes."""
    world = World()
    said = Quiet()
    give(world, 100, 100, 200)
    seen: list[int] = []

    async def accept(found: State) -> None:
        seen.append(found.inner_steps)
        if found.inner_steps < 200:
            raise RemoteFault("state, section phi: not finite")

    found, _ = await DonorClient(Link(world, ME), RUN, 1, SIZES, said).download(lambda: [A, B, C], accept=accept)
    assert same(found, state(205)) and seen == [105, 105, 205]
    assert [fields["lied"] for fields in said.all("state.failed")] == [True, True]
    assert world.asked[B, "chunk"] == CHUNKS
    assert len(said.all("state.downloaded")) == 1


async def test_giving_up_is_bounded() -> None:
    world = World()
    said = Quiet()
    with pytest.raises(Unavailable, match="after 8 attempts; the last: nobody serves it"):
        await fetch(world, [], said)
    with pytest.raises(Unavailable, match=r"peerA is not there|peerB is not there"):
        await fetch(world, [A, B], said)
    assert world.asked == {(A, "snapshot"): 3, (B, "snapshot"): 3}
    assert asyncio.get_running_loop().time() < 120.0
    # A donor that gives a little each time, for ever another snapshot, comes to an end as well.
    giver = Giver(world, C, 100, DonorLimits(fresh_s=0.0))

    async def trickle(method: str, serial: int, go: Next) -> Answer:
        if method == "chunk" and serial % 12 == 0:
            giver.donor.close()
            giver.round_index += 1
        return await go()

    world.faults[C] = trickle
    with pytest.raises(Unavailable, match="after 100 attempts; .* not kept here any more"):
        await fetch(world, [C], said)


async def test_cancelling_leaves_nothing_behind() -> None:
    world = World()
    Giver(world, A, 100)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await fetch(world, [A])
    assert world.under_way == 0


async def test_one_snapshot_serves_newcomers_that_come_together() -> None:
    world = World()
    giver = Giver(world, A, 100)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fetch(world, [A], me=PeerId(f"new{i}"))) for i in range(4)]
    assert all(same(task.result()[0], state(105)) for task in tasks)
    assert giver.taken == 1 and giver.donor.alive == 1


async def test_at_most_two_snapshots_live_and_idle_ones_are_forgotten() -> None:
    limits = DonorLimits(idle_s=60.0, fresh_s=10.0)
    giver = Giver(World(), A, 100, limits)
    donor = giver.donor
    first = (await donor.offer(B, ask())).header.snapshot
    giver.round_index = 6
    assert (await donor.offer(C, ask())).header.snapshot.round == 5  # fresh enough
    assert (await donor.offer(C, ask(6))).header.snapshot.round == 6  # asked for by round
    giver.round_index = 7
    with pytest.raises(Busy, match="2 snapshots are pulled"):
        await donor.offer(ME, ask(7))
    await asyncio.sleep(9.0)
    await donor.chunk(B, ask_chunk(first.id, 0))
    await donor.offer(C, ask(6))
    await asyncio.sleep(2.0)
    assert (await donor.offer(ME, ask())).header.snapshot.round == 6  # not fresh, but both are being pulled
    await asyncio.sleep(11.0)  # nobody asks any more
    second = (await donor.offer(B, ask())).header.snapshot  # takes the place of the first
    assert second.round == 7 and donor.alive == 2 and giver.taken == 3
    with pytest.raises(Unavailable, match="not kept here any more"):
        await donor.chunk(B, ask_chunk(first.id, 0))
    await asyncio.sleep(50.0)
    assert donor.alive == 1
    await donor.chunk(B, ask_chunk(second.id, 31))  # asking keeps it alive
    await asyncio.sleep(50.0)
    assert donor.alive == 1
    await asyncio.sleep(61.0)
    assert donor.alive == 0
    assert (await donor.offer(B, ask())).header.snapshot.round == 7
    donor.close()
    assert donor.alive == 0


async def test_a_donor_refuses_what_is_wrong() -> None:
    giver = Giver(World(), A, 100)
    donor = giver.donor
    with pytest.raises(RemoteFault, match="of run"):
        await donor.offer(B, ask(run=RunId("00" * 32)))
    with pytest.raises(RemoteFault, match="stage 3 asked of a replica of stage 2"):
        await donor.offer(B, ask(stage=2))
    with pytest.raises(Unavailable, match="round 5 here; 9 was asked"):
        await donor.offer(B, ask(9))
    found = (await donor.offer(B, ask())).header.snapshot
    with pytest.raises(RemoteFault, match="chunk 32 asked of a snapshot of 32"):
        await donor.chunk(B, ask_chunk(found.id, CHUNKS))
    with pytest.raises(Unavailable, match="not kept"):
        await donor.chunk(B, ask_chunk(b"x" * 32, 0))


async def test_a_large_state_is_given_to_one_after_the_other() -> None:
    giver = Giver(World(), A, 100, DonorLimits(share_s=30.0, retry_max_s=60.0))
    found = (await giver.donor.offer(B, ask())).header.snapshot
    for index in range(CHUNKS_AT_ONCE + 3):
        await giver.donor.chunk(B, ask_chunk(found.id, index))
        await asyncio.sleep(1.0)
    # Three chunks came through in seven seconds, and 28 are still to come.
    await giver.donor.offer(B, ask())  # it goes on itself
    for _ in range(2):
        with pytest.raises(Busy, match="large state") as refusal:
            await giver.donor.offer(C, ask())
    assert refusal.value.retry_after_s == 60.0
    for index in range(CHUNKS_AT_ONCE + 3, CHUNKS - 8):
        await giver.donor.chunk(B, ask_chunk(found.id, index))
        await asyncio.sleep(1.0)
    await giver.donor.offer(C, ask())  # 12 at a second each
    giver.donor.close()

    limits = DonorLimits(refused_max_s=600.0, puller_idle_s=100.0, idle_s=200.0)
    giver = Giver(World(), A, 100, limits)
    found = (await giver.donor.offer(B, ask())).header.snapshot
    for index in range(7):  # one that pulls slowly keeps nobody out for ever
        await giver.donor.chunk(B, ask_chunk(found.id, index))
        await asyncio.sleep(90.0)
        with pytest.raises(Busy, match="large state"):
            await giver.donor.offer(C, ask())
    await giver.donor.chunk(B, ask_chunk(found.id, 7))
    await asyncio.sleep(90.0)
    await giver.donor.offer(C, ask())
    giver.donor.close()

    giver = Giver(World(), A, 100)
    await giver.donor.offer(B, ask(slowly=True))
    await giver.donor.chunk(B, ask_chunk((await giver.donor.offer(B, ask())).header.snapshot.id, 0))
    await asyncio.sleep(9.0)
    await giver.donor.offer(C, ask())  # a keeper takes a quarter of the line: nobody waits for it


async def test_one_of_the_newcomers_that_come_together_gets_a_large_state() -> None:
    """Nothing came through yet: by its size at the rate of a line at home. Who gets it beside another donor's waits for
    those who have no other."""
    giver = Giver(World(), A, 100, DonorLimits(line_nbytes=10.0, puller_idle_s=100.0))  # 200 s
    first, *others = await asyncio.gather(
        *[giver.donor.offer(peer, ask()) for peer in (B, C, ME)], return_exceptions=True
    )
    assert isinstance(first, Answer) and all(isinstance(other, Busy) for other in others)
    assert giver.taken == 1
    giver.donor.close()

    giver = Giver(World(), A, 100, DonorLimits(line_nbytes=10.0, puller_idle_s=100.0, downloads_max=2))
    await giver.donor.offer(B, ask(slowly=True))
    with pytest.raises(Busy, match="pull state here already"):
        await giver.donor.offer(C, ask(slowly=True))
    await giver.donor.offer(ME, ask())
    giver.donor.close()

    giver = Giver(World(), A, 100)  # a small one for all
    for peer in (B, C, ME):
        await giver.donor.offer(peer, ask())


async def test_a_joiner_waits_for_donors_that_give_to_others() -> None:
    world = World()
    said = Quiet()
    busy = True
    for peer, seed in ((A, 100), (B, 100)):
        Giver(world, peer, seed)

    async def refuses(method: str, serial: int, go: Next) -> Answer:
        if busy and method == "snapshot":
            raise Busy("another pulls a large state here", 60.0)
        return await go()

    world.faults = {A: refuses, B: refuses}
    task = asyncio.create_task(fetch(world, [A, B], said))
    await asyncio.sleep(3600.0)
    assert not task.done() and len(said.all("state.waiting")) == 1
    asked = world.asked[A, "snapshot"]
    assert 50 < asked == world.asked[B, "snapshot"] <= 60 * 1.2, "each once a minute"
    del world.faults[B]
    found, _ = await task
    assert same(found, state(105)) and not said.all("state.failed")

    world.faults = {A: refuses}  # who is refused goes to another at once
    begun = asyncio.get_running_loop().time()
    await fetch(world, [A, B])
    assert asyncio.get_running_loop().time() - begun < 2.0


async def test_waiting_for_donors_is_bounded() -> None:
    world = World()
    Giver(world, A, 100)

    async def refuses(method: str, serial: int, go: Next) -> Answer:
        raise Busy("another pulls a large state here", 60.0)

    world.faults = {A: refuses}
    loop = asyncio.get_running_loop()
    for limits, most_s in ((DownloadLimits(), 1.1 * DownloadLimits().busy_max_s), (GENTLE, 10.0)):
        begun = loop.time()
        with pytest.raises(Unavailable, match="another pulls"):
            await DonorClient(Link(world, ME), RUN, 1, SIZES, Quiet(), limits=limits).download(lambda: [A])
        assert loop.time() - begun < most_s


async def test_a_peer_without_chunks_keeps_no_place() -> None:
    giver = Giver(World(), A, 100, DonorLimits(downloads_max=1))
    with pytest.raises(Unavailable, match="9 was asked"):
        await giver.donor.offer(B, ask(9))
    with pytest.raises(Unavailable, match="not kept"):
        await giver.donor.chunk(B, ask_chunk(b"x" * 32, 0))
    await giver.donor.offer(C, ask())


async def test_a_caller_that_gives_up_does_not_spoil_the_next() -> None:
    giver = Giver(World(), A, 100)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await giver.donor.offer(B, ask())
    assert giver.taken == 0
    assert (await giver.donor.offer(B, ask())).header.snapshot.round == 5
