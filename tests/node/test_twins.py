"""Two processes with one key, as where a home was copied: the later one stands aside. A node that comes back to its
home is none, and what it promised before holds."""

import asyncio
from dataclasses import replace

import pytest

from swarmnode.base.errors import KeyInUse
from swarmnode.net.membership.record import check_record
from tests.support.village import RUN, Village, Villager, cause, manifest, told, village

BOUND_S = 60.0


async def stands_aside(v: Village, twin: Villager) -> KeyInUse:
    """What `twin` ends with. It is not of the village any more."""
    assert twin.task is not None
    v.people.remove(twin)
    async with asyncio.timeout(BOUND_S):
        await asyncio.wait({twin.task})
    error = cause(twin.task.exception() or AssertionError("it did not stand aside"))
    assert isinstance(error, KeyInUse), error
    return error


@pytest.mark.parametrize(("stage", "at"), [(0, 0), (0, 1)])
async def test_the_later_of_two_processes_with_one_key_stands_aside(stage: int, at: int) -> None:
    async with village(manifest(stages=2), stages=(stage, 1, 0)) as v:
        first = v.people[0]
        await v.fed(128)
        twin = v.add(at, again=first)
        error = await stands_aside(v, twin)
        assert error.exit_code == 2 and "delete node.key" in str(error)
        v.network.nodes[first.node.me] = first.transport  # the other one is gone
        await v.trains(256, "the first one goes on", BOUND_S)
        assert first.node.presence.own.twin is None
        assert told(first, "node.twin") and all(fields["stays"] for fields in told(first, "node.twin"))
        others = [p.node.presence.peer_table.member(first.node.me) for p in v.people if p is not first]
        began_s = first.node.presence.own.incarnation / 1000
        assert all(member is not None and member.joined_unix_s == began_s for member in others), "all know it again"


async def test_a_node_that_is_killed_and_back_at_once_is_no_twin() -> None:
    async with village(manifest(stages=2), stages=(0, 1, 1)) as v:
        victim = v.people[1]
        await v.fed(128)
        current = victim.node.presence.own.record()
        assert current is not None
        await victim.die()
        again = v.add(1, again=victim)
        for _ in range(40):  # somebody shows its last record, again and again
            again.node.presence.learn(current[1])
            await v.trains(8, "training", BOUND_S)
        assert not told(again, "node.twin") and again.node.presence.own.twin is None


async def test_a_restored_backup_takes_up_the_newest_state_of_others() -> None:
    """Its clock is behind, too: its records would count as older than those of its former life."""
    run = manifest(stages=2)
    run = replace(run, limits=replace(run.limits, record_ttl_s=60.0))
    async with village(run, stages=(0, 1)) as v:
        feeder = v.people[0]
        await v.fed(256)
        current = feeder.node.presence.own.record()
        assert current is not None
        record = check_record(current[1], run_id=RUN)
        await feeder.die()
        again = v.add(0, again=feeder)
        again.node.presence.own._sequence = 7
        feeds = lambda: again.node.served is not None and again.served.hop.samples >= 64  # noqa: E731
        await v.until(feeds, "it feeds", BOUND_S)
        last = v.people[1].node.presence.peer_table.member(feeder.node.me)
        assert last is not None and last.sequence > record.sequence, "others take its records"
        blocks = again.served.status().blocks
        assert blocks is not None and blocks.finished_below >= record.blocks.finished_below
        assert again.fed >= feeder.fed, "what it fed before counts"
