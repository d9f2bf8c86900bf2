"""Rounds of more than two: whole nodes, transport in memory."""

import math

import numpy as np
import pytest

from swarmnode.ids import PeerId
from tests.support.village import Village, losses, manifest, village


def groups(v: Village, index: int) -> list[set[PeerId]]:
    """Whom person `index` met, round by round, where it met more than one."""
    events = v.people[index].quiet.events
    return [set(fields["peers"]) for event, fields in events if event == "exchange.group"]  # type: ignore[call-overload]


@pytest.mark.parametrize(("group", "most"), [(0, 4), (3, 2)])
async def test_groups_meet_and_the_swarm_learns(group: int, most: int) -> None:
    """Five replicas of the last stage: all of them, or cut into groups."""
    async with village(manifest(stages=2, codec="fp32", group=group), stages=(0, 1, 1, 1, 1, 1)) as v:
        last = range(1, 6)

        def met() -> bool:
            return all(any(len(one) == most for one in groups(v, i)) for i in (last if group == 0 else last[:1]))

        learnt = math.log(v.run.model.vocabulary) - 0.5
        await v.until(
            lambda: met() and min(losses(v)[-1:], default=9.0) < learnt,
            f"groups of {most + 1}, and below a guess at random",
        )
        assert max(len(one) for i in last for one in groups(v, i)) == most


async def test_members_that_came_make_the_round() -> None:
    """One of four dies without a word: the other three meet without it."""
    async with village(manifest(stages=2, codec="modular4", group=0), stages=(0, 1, 1, 1, 1)) as v:
        dead = v.people[4]
        await v.until(lambda: any(len(one) == 3 for one in groups(v, 1)), "all four met", 120)
        await dead.die()
        before = [len(groups(v, i)) for i in (1, 2, 3)]

        def goes_on() -> bool:
            since = [groups(v, i)[count:] for i, count in zip((1, 2, 3), before, strict=True)]
            return all(any(len(one) == 2 and dead.node.me not in one for one in mine) for mine in since)

        await v.until(goes_on, "rounds of three", 120)
        for person in v.people[1:4]:
            assert person.replica is not None and np.isfinite(person.replica.outer.phi.numpy()).all()
