"""An owner's amendment in a swarm under way: all replicas and a joiner go on with it from the same round."""

from __future__ import annotations

import dataclasses

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode import owner
from swarmnode.membership.access import AccessRules
from swarmnode.membership.admission import Admission
from swarmnode.membership.amendment import Amendments
from swarmnode.metrics import name
from tests.support.village import RUN, LoopClock, Villager, manifest, village

OWNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
RATE = 0.0005


def applied(person: Villager) -> list[tuple[object, object]]:
    events = [fields for event, fields in person.quiet.events if event == "amendment.applied"]
    return [(fields["amendment"], fields["round"]) for fields in events]


def met_after(person: Villager, round_index: int) -> bool:
    return any(e == "exchange.paired" and f["round"] > round_index for e, f in person.quiet.events)  # type: ignore[operator]


async def test_all_replicas_and_a_joiner_go_on_with_an_amendment_from_its_round() -> None:
    run = manifest(2, round_samples=64)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocabulary=256))  # as bytes need it
    run = dataclasses.replace(run, inner=dataclasses.replace(run.inner, decay="constant", replica_rate="same"))
    signed: Amendments = Amendments(run, RUN, owner.public_bytes(OWNER))

    def admission() -> Admission:
        known = Amendments(run, RUN, owner.public_bytes(OWNER))
        known.learn(signed.signed)
        return Admission(AccessRules(RUN, owner.public_bytes(OWNER), is_open=True), LoopClock(), None, known)

    async with village(run) as v:
        v.admission = admission
        for stage in (0, 0, 1, 1):
            v.add(stage)
        await v.until(lambda: all(p.node.served is not None and p.served.gossip.done > 1 for p in v.people), "rounds")
        before = {p.node.me: p.served.replica for p in v.people}
        # At least the peak: a step of more samples than inner_batch is longer by the root of it.
        assert all(p.quiet.gauges[name.LEARNING_RATE] >= run.inner.learning_rate for p in v.people)
        at = max(p.served.gossip.done for p in v.people) + 4
        signed.sign(OWNER, at, {"inner.learning_rate": RATE, "gossip.codec": "int8"})
        for person in v.people:
            known = person.node.ports.admission
            assert known is not None and known.amendments is not None
            known.amendments.learn(signed.signed)

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
        failed = [e for p in v.people for e, _ in p.quiet.events if e == "recovery.failed"]
        assert not failed, failed
