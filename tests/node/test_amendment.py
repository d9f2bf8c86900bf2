"""An owner's amendment in a swarm under way: all replicas and a joiner go on with it from the same round."""

import dataclasses

from swarmnode.metrics import name
from tests.support.village import Amending, Villager, manifest, told, village

RATE = 0.0005


def applied(person: Villager) -> list[tuple[object, object]]:
    return [(fields["amendment"], fields["round"]) for fields in told(person, "amendment.applied")]


def met_after(person: Villager, round_index: int) -> bool:
    return any(fields["round"] > round_index for fields in told(person, "exchange.paired"))  # type: ignore[operator]


async def test_all_replicas_and_a_joiner_go_on_with_an_amendment_from_its_round() -> None:
    run = manifest(2, round_samples=64)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocabulary=256))  # as bytes need it
    run = dataclasses.replace(run, inner=dataclasses.replace(run.inner, decay="constant", replica_rate="same"))
    async with village(run) as v:
        owner = Amending(v)
        for stage in (0, 0, 1, 1):
            v.add(stage)
        await v.until(lambda: all(p.node.served is not None and p.served.gossip.done > 1 for p in v.people), "rounds")
        before = {p.node.me: p.served.replica for p in v.people}
        # At least the peak: a step of more samples than inner_batch is longer by the root of it.
        assert all(p.quiet.gauges[name.LEARNING_RATE] >= run.inner.learning_rate for p in v.people)
        at = max(p.served.gossip.done for p in v.people) + 4
        owner.sign(at, {"inner.learning_rate": RATE, "gossip.codec": "int8"})
        await v.until(lambda: all(applied(p) for p in v.people), "all have taken it up")
        assert {tuple(applied(p)) for p in v.people} == {((1, at),)}, [applied(p) for p in v.people]
        await v.until(lambda: all(met_after(p, at + 1) for p in v.people), "they go on and meet in the new codec")
        for person in v.people:
            assert RATE <= person.quiet.gauges[name.LEARNING_RATE] < 2 * RATE
            assert person.served.replica is not before[person.node.me]
            assert person.served.replica.inner_steps > before[person.node.me].inner_steps, "the state was kept"

        joiner = v.add(1)
        await v.until(lambda: met_after(joiner, at), "a joiner meets the others")
        await v.until(lambda: RATE <= joiner.quiet.gauges.get(name.LEARNING_RATE, 0.0) < 2 * RATE, "the rate")
        assert [number for number, _ in applied(joiner)] == [1]
        assert not any(told(p, "recovery.failed") for p in v.people)
