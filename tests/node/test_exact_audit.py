"""Where gradients are averaged before each step, an answer is checked by another replica's, made with equal weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from swarmnode.base.ports import WireTensor
from swarmnode.run.manifest import Manifest
from tests.node.test_audit import Liar, short_waits
from tests.node.test_pipeline_steps import run_of as numbered
from tests.support.village import Village, excluded, told, village

__all__ = ["short_waits"]


def run_of(stages: int = 3) -> Manifest:
    """With steps of so many samples that most answers are checked within theirs."""
    run = numbered(stages)
    inner = replace(run.inner, inner_batch=32, learning_rate=1e-4, muon_learning_rate=1e-4)
    pipeline = replace(run.pipeline, audit_share=0.5, window_max=8)
    return replace(run, inner=inner, pipeline=pipeline, gossip=replace(run.gossip, round_samples=32))


class Nudges(Liar):
    """Each of its gradients leads aside by a tenth of its length: less than other weights or late ones would."""

    def twisted(self, tensor: WireTensor) -> WireTensor:
        found = np.frombuffer(tensor.data, np.float32)
        aside = np.random.default_rng(7).standard_normal(found.size, np.float32)
        nudged = found + 0.1 * aside * np.linalg.norm(found) / np.linalg.norm(aside)
        return replace(tensor, data=nudged.astype(np.float32).tobytes())


def verdicts(here: Village) -> Counter[tuple[str, bool]]:
    """Checks by their outcome, and whether they were made with equal weights."""
    events = [event for person in here.people for event in told(person, "audit.done")]
    return Counter((str(event["outcome"]), "same weights" in str(event["reason"])) for event in events)


async def test_most_checks_are_made_with_equal_weights_and_every_honest_answer_is_right() -> None:
    async with village(run_of(), stages=(0, 0, 1, 1, 2, 2)) as here:
        await here.until(lambda: verdicts(here)["right", True] >= 20, "answers are right by equal weights")
        found = verdicts(here)
        assert not any(outcome in ("wrong", "undecided") for outcome, _ in found), found
        assert found["right", True] > found["right", False], found
        assert not any(excluded(person) for person in here.people)


@pytest.mark.parametrize("others", [(0, 0, 1, 1, 2, 2), (0, 1, 1, 1, 2)])
async def test_a_replica_that_nudges_its_gradients_is_excluded_and_nobody_else(others: Sequence[int]) -> None:
    async with village(run_of()) as here:
        liar = here.add(1, Nudges)
        for stage in others:
            here.add(stage)
        callers = [person for person, stage in zip(here.people[1:], others, strict=True) if stage == 0]
        await here.until(lambda: all(liar.node.me in excluded(one) for one in callers), "its callers exclude it")
        assert not any(excluded(person) - {liar.node.me} for person in here.people if person is not liar)
