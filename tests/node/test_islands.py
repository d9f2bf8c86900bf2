"""Two parts of one run meet again: the replica that is behind takes the others' state before it serves."""

import pytest

from swarmnode.node import served_stage
from swarmnode.wire import record_pb2
from tests.support.village import manifest as run_of
from tests.support.village import told, village


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.nightly)])
async def test_a_replica_that_is_rounds_behind_takes_the_state_before_a_round(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_stage, "APART_ROUNDS", 2)
    monkeypatch.setattr(served_stage, "BEHIND_S", 0.0)
    async with village(run_of(stages=2), stages=(0, 1, 0, 1, 0, 1)) as v:
        await v.until(
            lambda: all(p.node.state == record_pb2.NODE_STATE_TRAINING for p in v.people) and v.total() > 64,
            "everybody trains",
        )
        cut = next(person for person in v.people if person.node.stage == stage)
        gossip, rounds = cut.served.gossip, list[int]()
        cut.served.gossip._held = True  # no round reaches it, as on an island
        begun, restored = gossip._round, len(told(cut, "recovery.done"))

        async def watched(round_index: int) -> bool:
            rounds.append(len(told(cut, "recovery.done")) - restored)
            return await begun(round_index)

        gossip._round = watched  # type: ignore[method-assign]
        before = gossip.done
        await v.until(lambda: bool(told(cut, "state.behind")), "it is told that others are further")
        await v.until(lambda: len(told(cut, "recovery.done")) > restored, "it takes their state")
        (behind, *_) = told(cut, "state.behind")
        assert behind["ahead"] > before + 2  # type: ignore[operator]
        await v.until(lambda: cut.node.state == record_pb2.NODE_STATE_TRAINING, "it serves again")
        steps = cut.served.hop.inner_steps
        await v.until(lambda: cut.served.hop.inner_steps > steps + 1, "it works again")
        await v.until(lambda: bool(rounds), "it meets others again")
        assert rounds[0] > 0, "no round with weights that far behind"
