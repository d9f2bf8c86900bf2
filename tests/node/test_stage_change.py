"""Whole nodes change their stage: the right one goes, with a verified state, and nothing is lost or counted twice."""

import asyncio
import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.memory_network import MemoryDirectory, MemoryTransport
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.membership_handlers import MembershipHandlers
from swarmnode.train.node.move_evidence import MoveEvidence
from swarmnode.train.node.notice import NoticeKind
from swarmnode.train.node.stage_change import StageRebalancer
from swarmnode.train.pipeline.believed_rate import bounded
from swarmnode.train.pipeline.rebalance import RebalanceRules, StageMove
from tests.support.records import record
from tests.support.village import RUN, LoopClock, Village, manifest, told, village


class CountedRounds:
    """As much of Gossip as a mover asks: the last round done, and when a later one is."""

    def __init__(self) -> None:
        self.done = 0
        self._advanced = asyncio.Event()

    def finish(self, round_index: int) -> None:
        self.done = round_index
        self._advanced.set()

    async def beyond(self, round_index: int) -> None:
        while self.done <= round_index:
            self._advanced.clear()
            await self._advanced.wait()


def moving_manifest(**pipeline: object) -> Manifest:
    run = manifest()
    given = {"rebalance_period_s": 1.0, "rebalance_ratio": 1.1, "min_keep": 1} | pipeline
    # Nobody dies: who is slow on a loaded machine is waited for, not asked twice, and so not counted twice.
    limits = dataclasses.replace(run.limits, hop_timeout_min_s=30.0, microbatch_timeout_s=60.0)
    spec = dataclasses.replace(run.pipeline, **given)  # type: ignore[arg-type]
    return dataclasses.replace(run, pipeline=spec, limits=limits)


def said(v: Village, event: str) -> list[tuple[int, dict[str, object]]]:
    return [(i, fields) for i, p in enumerate(v.people) for fields in told(p, event)]


async def test_a_node_moves_to_the_weakest_stage_and_serves_there() -> None:
    """Three replicas at stage 0, one at each other: one of the three goes, and trains where it came."""
    async with village(moving_manifest(), stages=(0, 0, 0, 0, 1, 2)) as v:
        await v.until(lambda: bool(said(v, "stage.moved")), "a move")
        index, fields = said(v, "stage.moved")[0]
        mover = v.people[index]
        assert fields["source"] == 0 and fields["target"] in (1, 2) and "is the slowest" in str(fields["reason"])
        await v.until(
            lambda: mover.node.stage == fields["target"] and mover.node.state == record_pb2.NODE_STATE_TRAINING,
            "it serves its new stage",
        )
        assert told(mover, "state.downloaded"), "it brought the state along"
        assert mover.served.parts.feeder is None, "it feeds no more"
        hop = mover.served.hop
        await v.until(lambda: hop is not None and hop.samples > 0, "it trains there")
        served = {p.node.stage for p in v.people}
        assert served == {0, 1, 2}
        await v.leave()
        # Whoever was told to go between two stages has nothing to save; all others save what they served.
        assert all(p.saved in ([], [p.node.stage]) for p in v.people)
        assert {stage for p in v.people for stage in p.saved} == {0, 1, 2}


async def test_no_move_when_stages_are_even_or_moves_are_off() -> None:
    off = moving_manifest(rebalance_period_s=0.0)
    async with village(off, stages=(0, 0, 0, 1, 2)) as v:
        await v.fed(256)
        assert not said(v, "stage.moving")


async def test_a_node_told_to_go_while_it_moves_leaves_cleanly() -> None:
    async with village(moving_manifest(), stages=(0, 0, 0, 0, 1, 2)) as v:
        await v.until(lambda: bool(said(v, "stage.moving")), "a node that moves")
        mover = v.people[said(v, "stage.moving")[0][0]]
        mover.notices.leave("told to go", NoticeKind.STOP)
        assert mover.task is not None
        await asyncio.wait_for(mover.task, 100)
        assert mover.node.state == record_pb2.NODE_STATE_LEFT
        await v.trains(128, "the others go on")


def rebalancer_of(
    run: Manifest, presence: Any, *, gossip: Any = None, samples_here: Callable[[], int] = lambda: 0
) -> StageRebalancer:
    """One that is asked for decisions, of a machine of 10 samples/s."""
    context: Any = SimpleNamespace(manifest=run, presence=presence, ports=SimpleNamespace(clock=LoopClock()))
    return StageRebalancer(context, None, gossip, random.Random(0), samples_here, lambda: 10.0, lambda: 0.0)  # type: ignore[arg-type]


ASKED_TWICE = ("microbatch.", "stage.moved", "peer.", "drain.cut", "node.state")


async def test_gradients_are_counted_once_across_a_move() -> None:
    """Every microbatch fed is counted by one replica of stage 1, wherever nodes went meanwhile. A mover that could not
    finish what it held (`cut`) leaves its replica behind, with what that had added: others do it again."""
    async with village(moving_manifest(), stages=(0, 1, 1, 1, 1, 2)) as v:
        counted = dict.fromkeys(range(3), 0)
        await v.until(lambda: bool(said(v, "stage.moved")), "a move")
        await v.trains(128, "progress after the move")
        await v.leave()
        fed = v.total()
        for replica in v.made:
            counted[replica.stage.part.stage] += replica.counted
        moves = [fields for _, fields in said(v, "stage.moved")]
        cut = sum(v.run.inner.microbatch * int(str(move["cut"])) for move in moves if move["source"] == 1)
        why = [(i, *row) for i, p in enumerate(v.people) for row in p.quiet.events if row[0].startswith(ASKED_TWICE)]
        # On a busy machine a gradient may come too many steps late to be added.
        late = int(v.run.inner.microbatch * sum(p.quiet.total(name.STALE_GRADIENTS) for p in v.people))
        assert fed - late <= counted[0] <= fed
        assert fed - late <= counted[1] <= fed + cut, f"of {fed} fed {counted[1]} were counted: {why}"


async def test_a_leaving_replica_asks_whether_another_stays() -> None:
    """Both replicas of a stage want to go to an empty one: who hears that of the other stays, and so of a dead one."""
    async with village(moving_manifest(rebalance_period_s=0.0)) as v:
        here = v.add(1)
        other = v.add(1)
        for stage in (0, 2):
            v.add(stage)
        training = record_pb2.NODE_STATE_TRAINING
        await v.until(lambda: {p.node.state for p in v.people} == {training}, "all train")
        node = here.node
        presence = other.node.presence
        await presence.announce()
        rebalancer = StageRebalancer(
            node._context,
            here.served.replica,
            here.served.gossip,
            random.Random(0),
            lambda: 0,
            lambda: 0.0,
            lambda: 0.0,
        )

        async def told(stays: bool) -> str:
            """The reason, once it says so: a record takes its time to get about."""
            async with asyncio.timeout(100):
                while (answer := await rebalancer._replaced(1))[0] != stays:
                    await asyncio.sleep(0.05)
            return answer[1]

        await told(True)
        presence.own.going_to(2)
        await presence.announce()
        assert "0 mean to stay" in await told(False), "the other goes, too"
        presence.own.going_to(None)
        await presence.announce()
        await told(True)
        await other.die()
        assert "0 of them answer" in await told(False)


@pytest.mark.parametrize(("rate", "waited_s"), [(70, 18.0), (5, 10.0)])
@pytest.mark.loop("virtual")
async def test_a_mover_waits_for_a_round_while_one_is_near(rate: int, waited_s: float) -> None:
    """Until now the run did 70 samples/s, and the next round is 1,192 away: at 5/s the weak stage cannot wait for it,
    which the mover sees after an announce period."""
    run = manifest(round_samples=4096)
    limits = dataclasses.replace(run.limits, announce_period_s=10.0)
    pipeline = dataclasses.replace(run.pipeline, rebalance_period_s=300.0)
    run = dataclasses.replace(run, limits=limits, pipeline=pipeline)

    loop = asyncio.get_running_loop()
    progress = SimpleNamespace(total=0)
    gossip = CountedRounds()
    rebalancer = rebalancer_of(run, SimpleNamespace(progress=progress), gossip=gossip)
    await asyncio.sleep(100.0)
    progress.total = 7000

    async def train() -> None:
        while True:
            await asyncio.sleep(1.0)
            progress.total += rate
            if gossip.done < progress.total // 4096 - 1:
                gossip.finish(gossip.done + 1)

    training = asyncio.ensure_future(train())
    begun_s = loop.time()
    await rebalancer._after_a_round()
    assert loop.time() - begun_s == pytest.approx(waited_s)
    training.cancel()


async def test_no_move_to_a_stage_that_does_not_fit() -> None:
    """A joiner without the run's files leaves the empty stage 0 to one that has them, and everybody knows why."""
    async with village(manifest(stages=2)) as v:
        first = v.add(None, unable=frozenset({0}))
        await v.until(lambda: first.node.stage is not None, "it chose")
        assert first.node.stage == 1
        second = v.add(0)
        await v.fed(64)
        (known,) = [m for m in second.node.presence.peer_table.swarm().stages[1] if m.peer == first.node.me]
        assert known.unable == {0}
        assert {replica.stage.part.stage for replica in v.made} == {0, 1} and len(v.made) == 2, "none was made to try"


async def test_a_flood_of_keys_stops_neither_rounds_nor_microbatches_and_moves_nobody() -> None:
    """Two replicas at each of two stages, and forty keys at each, which answer nothing and announce themselves anew
    all the time: as members they were nearly all partners of rounds, most first hops, and a reason to move."""
    run = dataclasses.replace(moving_manifest(stages=2), limits=manifest().limits)
    async with village(run, stages=(0, 0, 1, 1)) as v:
        await v.until(lambda: all(told(p, "exchange.paired") for p in v.people), "all have met")
        keys = [(Identity.of_seed(bytes([90, number] * 16)), number % 2) for number in range(80)]
        directory = MemoryDirectory(v.network, RUN, LoopClock())

        async def announcing() -> None:
            while True:
                for key, stage in keys:
                    await directory.announce(record(key, stage, speed=1e4))
                await asyncio.sleep(1.0)

        flood = asyncio.ensure_future(announcing())
        first = v.people[0].node.presence
        last = v.people[-1].node.presence
        await v.until(lambda: first.doubtful and last.doubtful, "they are found to do nothing")
        assert first.peer_table.swarm().sizes > (40, 40) and max(first.believed().sizes) <= 2
        marks = [len(p.quiet.events) for p in v.people]
        since = v.total()
        await v.until(lambda: v.total() >= since + 256, "training goes on")

        def met(at: int) -> tuple[int, int]:
            events = [e for e, _ in v.people[at].quiet.events[marks[at] :]]
            return events.count("exchange.paired"), events.count("exchange.lone")

        await v.until(lambda: all(sum(met(at)) >= 12 for at in range(4)), "rounds go on")
        paired = [met(at)[0] / sum(met(at)) for at in range(4)]
        assert sum(paired) / 4 > 0.4, paired
        assert not said(v, "stage.moving"), "nobody is pulled away"
        flood.cancel()


async def test_a_false_speed_pulls_no_honest_replica_away() -> None:
    """Two replicas at each stage, and at stage 1 a key that announces a billion samples a second, answers pings, and
    does nothing. Nobody leaves stage 1: it counts as four machines at most."""
    async with village(moving_manifest(rebalance_ratio=5.0), stages=(0, 0, 1, 1, 2, 2)) as v:
        await v.fed(512)
        liar = Identity.of_seed(bytes([97]) * 32)
        MembershipHandlers(record_pb2.SignedManifest()).serve(MemoryTransport(v.network, liar.peer_id, RUN))
        directory = MemoryDirectory(v.network, RUN, LoopClock())

        async def announcing() -> None:
            while True:
                assert (await directory.announce(record(liar, 1, speed=1e9))).stored
                await asyncio.sleep(0.5)

        lying = asyncio.ensure_future(announcing())
        books = [person.node.presence.peer_table for person in v.people[2:4]]
        await v.until(lambda: all(peer_table.member(liar.peer_id) is not None for peer_table in books), "it is known")
        since = v.total()
        before = len(said(v, "stage.moving"))
        await v.until(lambda: v.total() >= since + 256, "training goes on")
        pulled = [fields["reason"] for _, fields in said(v, "stage.moving")[before:] if fields["source"] == 1]
        assert not pulled, "pulled by a false speed"
        lying.cancel()


def evidence_of(
    run: Manifest,
    presence: Any,
    costs: tuple[float, ...] = (1.0, 1.0, 1.0),
    samples_here: Callable[[], int] = lambda: 0,
) -> MoveEvidence:
    """What a node of 10 samples a second, of `presence`, goes by before it moves."""
    rules = RebalanceRules(run.pipeline.rebalance_ratio, run.pipeline.min_keep)
    return MoveEvidence(run, presence, costs, rules, samples_here, lambda: 10.0)


@pytest.mark.parametrize(
    ("claimed", "trained", "agrees"),
    [(0.0, 0.2, True), (40.0, 0.2, False), (40.0, 0.05, True), (10.0, 0.2, True)],
    ids=["honest", "a false one", "idle", "half as much again"],
)
@pytest.mark.loop("virtual")
async def test_a_replica_leaves_a_stage_only_if_it_is_asked_for_as_little_as_is_announced(
    claimed: float, trained: float, agrees: bool
) -> None:
    """Two replicas of 10 samples a second each, one of which decides, and a third that says it does `claimed`. The run
    does 8 samples a second; of them this replica gets 4, two fifths of what it can do, or a tenth."""
    run = moving_manifest(rebalance_period_s=300.0)

    members = [
        Member(PeerId(f"peer{i}"), stage, record_pb2.NODE_STATE_TRAINING, 1, 1e12, speed, 0, 0)
        for i, (stage, speed) in enumerate([(0, 10.0), (1, 10.0), (1, 10.0), (1, claimed), (2, 10.0)])
        if speed
    ]
    swarm = Swarm.of(members, 3)
    progress = SimpleNamespace(total=100)
    here = [0]
    peer_table = SimpleNamespace(swarm=lambda: swarm, serving=lambda: swarm.sizes)
    presence: Any = SimpleNamespace(progress=progress, peer_table=peer_table, me=members[1].peer)
    costs = (1.0, 1.0, 1.0)
    evidence = evidence_of(run, presence, costs, lambda: here[0])
    known = bounded(swarm, costs)
    move = StageMove(members[1].peer, 1, 0, before=10.0, after=15.0, speed=10.0)
    found, reason = evidence.agrees(move, known)
    assert "too little was trained" in reason and found is bool(claimed), "three as fast as each other, or two"
    await asyncio.sleep(100.0)
    progress.total += 800
    here[0] += int(100.0 * 2 * 10.0 * trained)
    found, reason = evidence.agrees(move, known)
    assert found is agrees, reason
    found, reason = evidence.agrees(dataclasses.replace(move, before=30.0), known)
    assert not found and reason.startswith("the run does 8 samples/s"), "something else limits the run"
    assert evidence.agrees(dataclasses.replace(move, safety=True), known)[0], "a death that is not to be risked"
    assert evidence.agrees(dataclasses.replace(move, before=0.0), known)[0], "an empty stage"


@pytest.mark.parametrize(("doubtful", "before", "good"), [(False, 10.0, True), (True, 10.0, False), (True, 0.0, True)])
@pytest.mark.loop("virtual")
async def test_no_move_while_most_strangers_are_idle(doubtful: bool, before: float, good: bool) -> None:
    """But where a stage stands empty."""
    presence: Any = SimpleNamespace(progress=SimpleNamespace(total=0), doubtful=doubtful)
    evidence = evidence_of(moving_manifest(), presence)
    move = StageMove(PeerId("peer1"), 1, 0, before=before, after=15.0, speed=10.0)
    assert evidence.counts_workers(move)[0] is good


@pytest.mark.parametrize(
    ("at_work", "total", "before", "leaves"),
    [
        ((), 10_000, 10.0, False),
        (("peer2",), 10_000, 10.0, True),
        (("peer0",), 10_000, 10.0, False),
        ((), 100, 10.0, True),
        ((), 10_000, 0.0, True),
    ],
    ids=["idle keys beside it", "one of them works", "one of another stage", "no round yet", "a stage stands empty"],
)
@pytest.mark.loop("virtual")
async def test_keys_beside_the_last_replica_that_works_are_no_replacement(
    at_work: tuple[str, ...], total: int, before: float, leaves: bool
) -> None:
    """It moved to a stage in need, and its own stage was left to keys that only announce themselves."""
    run = moving_manifest()
    members = [
        Member(PeerId(f"peer{i}"), stage, record_pb2.NODE_STATE_TRAINING, 1, 1e12, 10.0, 0, 0)
        for i, stage in enumerate([0, 1, 1, 1, 1, 2])
    ]
    swarm = Swarm.of(members, 3)
    observed = SimpleNamespace(at_work={PeerId(name) for name in at_work})
    presence: Any = SimpleNamespace(
        progress=SimpleNamespace(total=total),
        peer_table=SimpleNamespace(swarm=lambda: swarm, serving=lambda: swarm.sizes),
        run_progress=SimpleNamespace(clock=SimpleNamespace(history=observed)),
        me=members[1].peer,
    )
    evidence = evidence_of(run, presence)
    move = StageMove(members[1].peer, 1, 0, before=before, after=15.0, speed=10.0, safety=True)
    assert evidence.leaves_workers(move)[0] is leaves
