"""Replicas in a chain of real hops: whose gradient counts when a caller gives up, or a connection breaks."""

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.memory_network import MemoryNetwork
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import Broken, MicrobatchLost, RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Priority, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.swarm import Swarm
from swarmnode.train.pipeline.next_hop import FINISH_SHARE
from swarmnode.train.pipeline.route import Router
from swarmnode.trust.accusation import Accusations
from swarmnode.trust.auditor import Auditor
from swarmnode.trust.input_check import InputAuditor
from swarmnode.trust.recompute import RecomputeService
from swarmnode.trust.stage_judge import StageJudge
from tests.support.fake_telemetry import Quiet
from tests.support.hop_chain import STAGES, Served, chain, occupied
from tests.support.village import RUN, manifest

BULK = 1024  # bytes: a microbatch has more, a question whether to send it has not


def dying(network: MemoryNetwork, people: list[Served], then: Callable[[int], None]) -> list[Served]:
    """The first of `people` that a message is sent to dies before it has come, then `then` is called with the bytes of
    it. Who that was, once it is known."""
    first: list[Served] = []

    async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
        asked = [p for p in people if p.transport.peer_id == receiver]
        if asked and not first:
            first.extend(asked)
            await asked[0].transport.close()
            then(nbytes)

    network.link = link
    return first


def counted(people: list[Served]) -> list[int]:
    """Samples whose gradient each replica has added and not stepped with; four are less than an inner batch."""
    return [person.replica.accumulated for person in people]


async def counts(people: list[Served], wanted: list[int]) -> None:
    """Wait until so many are counted, whoever has them: an answer leaves before."""
    async with asyncio.timeout(60.0):
        while sorted(counted(people)) != wanted:
            await asyncio.sleep(0.001)


async def each_counts(people: list[Served], wanted: list[int]) -> None:
    """Wait until each of `people` counted what is `wanted` of it."""
    async with asyncio.timeout(60.0):
        while counted(people) != wanted:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("busy", "done"), [(1, [0, 0, 4]), (2, [0, 0, 0])])
async def test_a_gradient_nobody_waits_for_any_more_is_not_added(busy: int, done: list[int]) -> None:
    """Its turn on the busy device of stage 1 or 2 comes after the caller has given up: another replica does it."""
    async with chain(0, 1, 2) as (_, people):
        held = threading.Event()
        ongoing: list[asyncio.Future[None]] = []

        def occupy() -> None:
            async def piece() -> None:
                await people[busy].compute.run(Priority.OUTER, 0, lambda: held.wait(30.0) and None)

            ongoing.append(asyncio.ensure_future(piece()))

        if busy == 1:  # the forward is done when the gradient comes back
            people[2].answering = occupy
        else:
            occupy()
        feeding = asyncio.ensure_future(people[0].feed())
        while people[busy].compute.waiting < 2:
            await asyncio.sleep(0.001)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        while len(people[busy].backlog):
            await asyncio.sleep(0.001)
        held.set()
        await asyncio.gather(*ongoing)
        async with asyncio.timeout(60.0):
            while counted(people) != done:
                await asyncio.sleep(0.001)


async def test_a_gradient_that_is_being_added_is_added_once_whoever_waits() -> None:
    """The caller gives up while the device is at it: it is completed, and a repeat gets the answer."""
    async with chain(0, 1, 2) as (_, people):
        begun = threading.Event()
        held = threading.Event()
        loss = people[2].replica.loss

        def slowly(*args: object, **given: object) -> object:
            begun.set()
            held.wait(30.0)
            return loss(*args, **given)  # type: ignore[arg-type]

        people[2].replica.loss = slowly  # type: ignore[method-assign, assignment]
        feeding = asyncio.ensure_future(people[0].feed())
        await asyncio.to_thread(begun.wait, 30.0)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        held.set()
        await people[0].feed()
        async with asyncio.timeout(60.0):  # an answer leaves before its samples are counted
            while counted(people) != [4, 4, 4]:
                await asyncio.sleep(0.001)


async def test_a_living_peer_is_asked_again_after_a_broken_connection() -> None:
    """The answer is lost on its way, when its gradient has been added: the same replica gives it again, and no other
    adds its own."""
    async with chain(0, 1, 1, 2) as (network, people):
        broken: list[PeerId] = []

        async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
            mine = sender in (people[1].transport.peer_id, people[2].transport.peer_id)
            if mine and receiver == people[0].transport.peer_id and not broken:
                broken.append(sender)
                raise Broken("the stream was reset")

        network.link = link
        await people[0].feed()
        assert broken
        await counts(people, [0, 4, 4, 4])


async def test_a_thin_line_counts_against_whose_line_it_is() -> None:
    """From stage 1 to 2 a microbatch is long under way: that is not stage 2's work, but stage 1's."""
    async with chain(0, 1, 2) as (network, people):
        middle, last = (person.transport.peer_id for person in people[1:])
        slow_s = 0.5

        async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
            if (sender, receiver) == (middle, last):
                await asyncio.sleep(slow_s)

        network.link = link
        loop = asyncio.get_running_loop()
        begun = loop.time()
        carried = await people[0].feed()
        whole_s = loop.time() - begun
        middle_s, last_s = (people[n].routers[n + 1].expected_s((middle, last)[n], 4) for n in (0, 1))
        assert middle_s is not None and last_s is not None
        assert middle_s >= slow_s
        assert last_s <= whole_s - slow_s and carried.sent_s <= whole_s - slow_s


def lying(person: Served, **said: float) -> None:
    """Its answers say this of themselves from now on."""
    serve = person.hop.serve

    async def lie(peer: PeerId, call: Call) -> Answer:
        answer = await serve(peer, call)
        header = wire.Reply()
        header.CopyFrom(answer.header)
        for field, value in said.items():
            setattr(header.processed, field, value)
        return Answer(header, answer.tensors)

    person.hop.serve = lie  # type: ignore[method-assign]


async def feed_until_banned(feeder: Served, router: Router, liar: PeerId) -> None:
    """Feed until `router` has banned `liar`: a busy machine may need more than a second for an answer."""
    async with asyncio.timeout(50):
        while not router.banned(liar, asyncio.get_running_loop().time()):
            with pytest.raises(MicrobatchLost):
                await feeder.feed(deadline_s=1.0)


@pytest.mark.node  # each waits for a second
@pytest.mark.parametrize("said", [math.nan, math.inf, -math.inf, 1e300, 80_000.0])
async def test_times_that_cannot_be_do_not_stay_in_a_router(said: float) -> None:
    async with chain(0, 1, 2) as (_, people):
        lying(people[1], onward_s=said, received_s=said, queued_s=said)
        router = people[0].routers[1]
        liar = people[1].transport.peer_id
        if said != 80_000.0:  # no reply that says it is taken
            await feed_until_banned(people[0], router, liar)
            assert router.expected_s(liar, 4) is None and router.typical_s(4) == 0.0
            return
        carried = await people[0].feed()
        assert carried.queued_s < 60.0 and carried.sent_s < 60.0
        seconds = router.expected_s(liar, 4)
        assert seconds is not None and seconds < 60.0 and router.typical_s(4) < 60.0


@pytest.mark.node  # each waits for a second
@pytest.mark.parametrize(("loss", "tokens"), [(math.nan, None), (math.inf, None), (-1.0, None), (1.0, 1 << 40)])
async def test_a_loss_that_cannot_be_is_the_fault_of_who_tells_it(loss: float, tokens: int | None) -> None:
    async with chain(0, 1, 2) as (_, people):
        honest = 4 * manifest(STAGES).model.context
        lying(people[2], loss_sum=loss, tokens=tokens or honest)
        await feed_until_banned(people[0], people[1].routers[2], people[2].transport.peer_id)


async def test_no_retry_when_too_little_time_is_left() -> None:
    """The first replica dies; the way takes four times as long as there is time. What another did would be lost."""
    async with chain(0, 1, 1, 2) as (network, people):
        asked: list[PeerId] = []

        async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
            middle = [p.transport.peer_id for p in people[1:3]]
            if receiver in middle and receiver not in asked and nbytes > BULK:
                asked.append(receiver)
                await next(p for p in people if p.transport.peer_id == receiver).transport.close()
                raise Broken("the stream was reset")

        network.link = link
        people[0].next_hop.record_latency(1, 80.0)
        with pytest.raises(MicrobatchLost, match="no route to stage 2"):
            await people[0].feed(deadline_s=20.0)
        assert len(asked) == 1 and counted(people) == [0, 0, 0, 0]


async def test_a_microbatch_goes_where_nothing_waits() -> None:
    """Of two replicas of stage 1 one has work for minutes: it gets none of the microbatches and is charged none."""
    async with chain(0, 1, 1, 2) as (network, people):
        bulk = list[PeerId]()
        busy, idle = people[1:3]

        async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
            if nbytes > BULK:
                bulk.append(receiver)

        network.link = link
        async with occupied(busy, 2):
            for serial in range(2):
                # One that had an answer knows how fast these are: too fast for a question.
                people[0].routers[1] = Router(random.Random(serial), epsilon=0.0)
                people[0].knows(*people)
                before = people[0].routers[1].runtime(busy.transport.peer_id)
                await people[0].feed(serial=serial + 1)
                assert people[0].routers[1].runtime(busy.transport.peer_id) == pytest.approx(before)
        assert busy.transport.peer_id not in bulk and (busy.hop.samples, idle.hop.samples) == (0, 8)


async def test_the_first_replica_to_be_done_gets_it_where_all_are_busy() -> None:
    async with chain(0, 1, 1, 2) as (_, people):
        async with occupied(people[1], 5), occupied(people[2], 2):
            feeding = asyncio.ensure_future(people[0].feed())
            while people[2].compute.waiting < 3:
                await asyncio.sleep(0.001)
            assert people[1].compute.waiting == 5
        await feeding
        await each_counts(people[1:3], [0, 4])


async def test_an_unreachable_peer_is_banned_and_gets_no_work() -> None:
    async with chain(0, 1, 1, 2) as (network, people):

        def asks(nbytes: int) -> None:
            assert nbytes <= BULK, "a microbatch was sent to a replica nobody had asked"

        first = dying(network, people[1:3], asks)
        carried = await people[0].feed()
        await each_counts([first[0], next(p for p in people[1:3] if p not in first)], [0, 4])
        assert people[0].routers[1].banned(first[0].transport.peer_id, asyncio.get_running_loop().time())
        assert carried.retries == 0, "no time was lost by it"


async def test_a_peer_without_reservations_gets_the_microbatch() -> None:
    """A replica of a version from before it refuses the question, as wrong."""
    async with chain(0, 1, 1, 2) as (_, people):
        for person in people[1:]:
            del person.transport._served["reserve"]
        await people[0].feed()
        await counts(people, [0, 4, 4, 4])
        assert not any(people[0].routers[1].banned(p.transport.peer_id, 0.0) for p in people[1:3])


async def test_the_deadline_may_pass_while_replicas_are_asked() -> None:
    async with chain(0, 1, 1, 2) as (network, people):
        router = people[0].routers[1]
        before = [router.runtime(person.transport.peer_id) for person in people[1:3]]

        async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
            await asyncio.sleep(60.0)

        network.link = link
        with pytest.raises(MicrobatchLost, match="while replicas were asked"):
            await people[0].feed(deadline_s=0.5)
        after = [router.runtime(person.transport.peer_id) for person in people[1:3]]
        assert after == pytest.approx(before), "nobody is charged"


async def test_the_deadline_may_pass_before_a_microbatch_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, after the last look at the clock. The negative time left had ended the node."""

    def busy(router: Router, now: float, exclude: Collection[PeerId]) -> bool:
        time.sleep(0.3)
        return False

    async with chain(0, 1, 2) as (_, people):
        monkeypatch.setattr(Router, "able", busy)
        with pytest.raises(MicrobatchLost):
            await people[0].feed(deadline_s=0.2)


async def test_each_hop_leaves_the_one_before_a_part_of_a_tenth_of_the_time() -> None:
    async with chain(0, 1, 2) as (_, people):
        given: dict[int, float] = {}
        for person in people:
            serve = person.hop.serve

            async def noted(peer: PeerId, call: Call, stage: int = person.stage, serve: Any = serve) -> Answer:
                given[stage] = call.header.process.deadline_ms / 1000.0
                return await serve(peer, call)

            person.hop.serve = noted  # type: ignore[method-assign]
        await people[0].feed(deadline_s=1000.0)
        assert given[1] == pytest.approx(1000.0 * FINISH_SHARE**0.5, abs=10.0)
        assert given[2] == pytest.approx(given[1] * FINISH_SHARE, abs=10.0)


@pytest.mark.parametrize(("spare_nbytes", "again"), [(0, 2), (1 << 40, 0)])
async def test_a_replica_keeps_tapes_in_memory_of_its_own(
    spare_nbytes: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has no room for tapes (but for the first, whose size nobody knows yet); the device may have."""
    monkeypatch.setattr(TorchReplica, "spare_nbytes", spare_nbytes)
    run = manifest(STAGES)
    run = replace(run, limits=replace(run.limits, tape_bytes_max=0))

    async with chain(0, 1, 2, run=run) as (_, people):
        for serial in range(3):
            await people[0].feed(serial=serial)
        assert [person.replica.recomputed for person in people] == [again, again, 0]


async def no_text(indices: Sequence[int]) -> WireTensor:
    raise Unavailable("no text here")


def signing(people: list[Served], tasks: asyncio.TaskGroup) -> list[str]:
    """Each of `people` signs its answers and checks those to it; none is audited. Returns what they find false."""
    found: list[str] = []
    for number, person in enumerate(people):
        run = replace(person.run, pipeline=replace(person.run.pipeline, audit_share=0.0))
        auditor = Auditor(
            run,
            RUN,
            person.stage,
            Identity.of_seed(bytes([number + 1]) * 32),
            person.transport,
            person.replica,
            person.compute,
            lambda: Swarm.of((), STAGES),
            tasks,
            Quiet(),
            lambda peer, reason: found.append(reason),
            lambda *given: None,  # type: ignore[arg-type, return-value]
            random.Random(1),
        )
        recompute = RecomputeService(
            run, person.stage, person.replica, person.compute, person.replica.boundary_digest(), Quiet()
        )
        accusations = Accusations(auditor, person.stage, person.replica, person.compute)
        judge = StageJudge(person.replica, recompute, auditor, InputAuditor(auditor, no_text), accusations)
        person.hop.judge = judge
        person.hop.worker._judge = judge
        blame = person.next_hop.blame

        def noted(
            peer: PeerId,
            stage: int,
            fault: RemoteFault,
            lost_s: float = 0.0,
            blame: Any = blame,
            *,
            least_s: float = 0.0,
        ) -> None:
            found.append(str(fault))
            blame(peer, stage, fault, lost_s)

        person.next_hop.blame = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("alike", [True, False])
async def test_a_kept_answer_is_signed_for_each_caller(alike: bool) -> None:
    """The first replica of stage 1 dies as the last one answers it, and the second sends the microbatch again. With the
    same weights its input is the same: the kept answer is one to it too, in a statement of its own. Otherwise that
    answer is to something else, and nobody is at fault."""
    async with asyncio.TaskGroup() as tasks, chain(0, 1, 1, 2) as (network, people):
        false = signing(people, tasks)
        middle = {person.transport.peer_id: person for person in people[1:3]}
        answered: list[PeerId] = []

        async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
            if sender != people[3].transport.peer_id or receiver not in middle or nbytes < BULK:
                return
            answered.append(receiver)
            if len(answered) == 1:
                (other,) = (person for peer, person in middle.items() if peer != receiver)
                if not alike:
                    other.replica.stage.theta.mul_(1.5)
                await middle[receiver].transport.close()

        network.link = link
        if alike:
            await people[0].feed()
            assert len(set(answered)) == 2 and counted([people[3]]) == [4], "added once, and answered twice"
        else:
            with pytest.raises(MicrobatchLost):
                await people[0].feed(deadline_s=3.0)
            assert len(set(answered)) == 1
        assert not [reason for reason in false if "forged" in reason or "statement" in reason]
