"""News of a death reaches the other callers of a stage; a false one costs a ping."""

import dataclasses
import math

import pytest

from swarmnode.base.errors import Unavailable
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2
from tests.support.village import RUN, Village, Villager, manifest, told, village

CALLERS = 6


def hears(person: Villager) -> list[str]:
    """Why this caller banned replicas."""
    return [str(fields["reason"]) for fields in told(person, "peer.banned")]


def knows_all(v: Village) -> bool:
    everybody = {person.node.me for person in v.people}
    return all(
        {member.peer for member in person.node.presence.peer_table.swarm().members()} == everybody
        for person in v.people
    )


async def test_callers_that_sent_nothing_hear_of_a_death() -> None:
    """One caller finds the replica dead, and no other has work there."""
    run = manifest(2)
    rare = dataclasses.replace(run.limits, announce_period_s=60.0, record_ttl_s=240.0)  # records tell of no death
    async with village(dataclasses.replace(run, limits=rare), stages=(0,) * CALLERS + (1, 1)) as v:
        await v.fed(32)
        await v.until(lambda: knows_all(v), "all know each other")
        dead = v.people[-1]
        *callers, _, _ = v.people
        for caller in callers[1:]:  # it is busy, as far as they know: else they find out for themselves
            caller.node.presence.routing.routers[1].delay(dead.node.me, math.inf)
        before = [caller.fed for caller in callers]
        await v.until(
            lambda: all(caller.fed >= fed + 32 for caller, fed in zip(callers, before, strict=True)),
            "what was on its way there is back",
        )
        await dead.die()
        await v.until(lambda: bool(hears(callers[0])), "one finds out")
        await v.until(lambda: all(hears(caller) for caller in callers), "the others hear of it")
        assert all("told of its silence" in reason for caller in callers[1:] for reason in hears(caller))


async def test_a_replica_that_gets_no_work_is_probed() -> None:
    run = manifest(2)
    rare = dataclasses.replace(run.limits, announce_period_s=60.0, record_ttl_s=240.0)
    async with village(dataclasses.replace(run, limits=rare), stages=(0, 1, 1)) as v:
        await v.fed(32)
        await v.until(lambda: knows_all(v), "all know each other")
        caller, _, dead = v.people
        caller.node.presence.routing.routers[1].delay(dead.node.me, math.inf)
        await dead.die()
        await v.until(lambda: bool(hears(caller)), "it is missed")


async def test_a_living_replica_that_is_called_silent_is_pinged_and_sent_work() -> None:
    async with village(manifest(2), stages=(0, 0, 1)) as v:
        await v.fed(32)
        liar, victim, named = v.people
        lie = Call(call_pb2.Request(run_id=RUN, silence=call_pb2.Silence(peer=named.node.me)))
        for _ in range(8):
            await liar.node.transport.call(victim.node.me, lie, timeout_s=2.0, reply_bytes_max=0)
        before = victim.fed
        await v.until(lambda: victim.fed >= before + 32, "it sends work on")
        assert not told(victim, "peer.banned")


async def test_who_serves_another_stage_is_not_heard() -> None:
    async with village(manifest(2), stages=(0, 0, 1)) as v:
        await v.fed(32)
        _, victim, other = v.people
        word = Call(call_pb2.Request(run_id=RUN, silence=call_pb2.Silence(peer=victim.node.me)))
        with pytest.raises(Unavailable):
            await other.node.transport.call(victim.node.me, word, timeout_s=2.0, reply_bytes_max=0)
