"""Nodes that join at once reserve their stages before they download, and take different ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from swarmnode.manifest import ModelSpec
from tests.support.village import TINY, Villager, manifest, told, village


def chosen(person: Villager) -> list[object]:
    return [fields["serves"] for fields in told(person, "stage.chosen")]


@pytest.mark.parametrize(("joiners", "stages"), [(3, 3), (6, 3), (12, 4)])
async def test_joiners_at_once_take_all_stages_evenly(joiners: int, stages: int) -> None:
    run = manifest(stages=stages)
    model: ModelSpec = replace(TINY, layers=stages)
    async with village(replace(run, model=model)) as v:
        people = [v.add(None) for _ in range(joiners)]
        await v.until(lambda: all(map(chosen, people)), "all have chosen")
        assert Counter(chosen(p)[0] for p in people) == dict.fromkeys(range(stages), joiners // stages)


async def test_one_that_joins_later_goes_where_nobody_is() -> None:
    async with village(manifest(stages=3)) as v:
        first = [v.add(None), v.add(None)]
        await v.until(lambda: all(map(chosen, first)), "two have chosen")
        later = v.add(None)
        await v.until(lambda: bool(chosen(later)), "the third has chosen")
        assert sorted(map(str, (chosen(p)[0] for p in [*first, later]))) == ["0", "1", "2"]
