"""A stage goes on without its replica, which comes back: the newer state counts, and an older one is never averaged
into it."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.run.manifest import Manifest
from tests.support.village import Village, Villager, manifest, told, village, with_recovery

BOUND_S = 120.0


def old_copies() -> Manifest:
    """A run whose neighbours keep the first copy for ever."""
    return with_recovery(manifest(stages=2), snapshot_seconds=86_400.0, snapshot_part=1.0)


def trains(person: Villager) -> bool:
    return person.node.state == record_pb2.NODE_STATE_TRAINING


@contextlib.contextmanager
def cut_off(v: Village, person: Villager) -> Iterator[None]:
    """`person` reaches nobody, and nobody reaches it."""
    me = person.node.me
    directory = person.node.ports.directory

    async def cut(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
        if me in (sender, receiver):
            raise RemoteFault("the cable is out")

    v.network.link = cut
    directory._fails = lambda: True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        v.network.link = None
        directory._fails = lambda: False  # type: ignore[attr-defined]


async def taken_over(v: Village, away: Villager, samples: int) -> Villager:
    """Another machine that takes the place of `away` and trains `samples`."""
    other = v.add(1)
    await v.until(lambda: bool(told(other, "recovery.done")) and trains(other), "the stage is taken over", BOUND_S)
    await v.trains(samples, "training goes on without it", BOUND_S)
    return other


def averaged(person: Villager, since: int) -> list[dict[str, object]]:
    return told(person, "exchange.paired")[since:]


async def test_the_newer_state_counts_where_a_stage_went_on_from_an_old_copy() -> None:
    async with village(old_copies(), stages=(0, 1)) as v:
        feeder, away = v.people
        await v.until(lambda: feeder.node.served is not None and feeder.served.backup.kept_round is not None, "a copy")
        await v.trains(1024, "it grows old", BOUND_S)
        with cut_off(v, away):
            other = await taken_over(v, away, 64)
        behind = int(str(told(other, "recovery.done")[0]["behind"]))
        assert behind >= 512, "the copy was old"
        await v.until(lambda: bool(told(other, "state.behind")), "the one in its place gives way", BOUND_S)
        assert told(away, "state.kept") and not told(away, "state.behind")
        await v.until(lambda: trains(other) and other.served.gossip.line == away.served.gossip.line, "one state")
        lost = away.served.gossip.line.lost
        assert 0 < lost < behind / 2, f"{lost} samples lost, {behind} where the old copy counts"
        await v.trains(256, "both go on", BOUND_S)
        await v.until(lambda: bool(averaged(other, 0)), "they meet", BOUND_S)


async def test_a_node_that_was_away_for_longer_than_the_copy_is_old_takes_the_newer_state() -> None:
    async with village(with_recovery(manifest(stages=2)), stages=(0, 1)) as v:
        feeder, away = v.people
        await v.until(lambda: feeder.node.served is not None and feeder.served.backup.kept_round is not None, "a copy")
        await v.trains(256, "training", BOUND_S)
        with cut_off(v, away):
            other = await taken_over(v, away, 768)
        assert int(str(told(other, "recovery.done")[0]["behind"])) < 256
        await v.until(lambda: bool(told(away, "state.behind")), "it takes the newer state", BOUND_S)
        assert not averaged(other, 0) and not averaged(away, 0), "its old one was averaged into nothing"
        await v.until(lambda: trains(away) and away.served.gossip.line == other.served.gossip.line, "one state")
        assert not told(other, "state.behind")
        await v.until(lambda: bool(averaged(other, 0)), "they meet", BOUND_S)


async def test_a_lone_replica_that_is_killed_comes_back_a_few_samples_behind() -> None:
    run = manifest(stages=2)
    run = replace(run, gossip=replace(run.gossip, round_samples=64))
    async with village(run, stages=(0, 1)) as v:
        victim = v.people[1]
        await v.trains(2048, "training", BOUND_S)
        at = v.total()
        await victim.die()
        again = v.add(1, again=victim)
        await v.until(lambda: bool(told(again, "recovery.done")), "it is back", BOUND_S)
        assert int(str(told(again, "recovery.done")[0]["behind"])) <= max(64, at // 20)


async def test_a_machine_that_slept_while_its_mates_trained_takes_their_state_before_it_meets_them() -> None:
    """A few rounds only: the rule for replicas that lag is of 16."""
    run = manifest(stages=2)
    run = replace(run, gossip=replace(run.gossip, round_samples=64))
    async with village(run, stages=(0, 1, 1)) as v:
        away = v.people[1]
        await v.until(lambda: all(map(trains, v.people)) and bool(averaged(away, 0)), "all train and meet", BOUND_S)
        met = len(averaged(away, 0))
        done = away.served.gossip.done
        with cut_off(v, away):
            await v.trains(6 * 64, "its mate trains on", BOUND_S)
            away.served.catch_up.watch._watch._told_s -= 1000.0  # as if its clock had gone on while it slept
            away.served.catch_up.watch.behind(done + 6)  # at once: records here are as old as the sleep
        await v.until(lambda: bool(told(away, "state.behind")), "it takes the newer state", BOUND_S)
        assert "slept" in str(told(away, "state.behind")[0]["reason"])
        assert len(averaged(away, 0)) == met, "its old one was averaged into nothing"
        await v.until(
            lambda: trains(away) and away.served.gossip.done > done + 4, "it goes on with the others", BOUND_S
        )
        await v.until(lambda: len(averaged(away, 0)) > met, "and meets them", BOUND_S)
