"""The owner amends a run under way: all replicas and a joiner go on with it from the same round. Where the stages are
cut anew all nodes save theirs, start again, and put the new ones together."""

import dataclasses
import statistics
from pathlib import Path

import numpy as np
import pytest

from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.base.metrics import name
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.keep.transfer.state_slices import APART_MAX
from swarmnode.train.node.notice import NoticeKind
from tests.support.village import Amending, Village, Villager, losses, manifest, told, village


def slow_weights(person: Villager) -> dict[str, np.ndarray]:
    """The slow weights of a replica by the whole model's names."""
    replica = person.served.replica
    stage = person.served.stage
    shapes = CheckpointOptions().shapes(person.node._manifest, stage)["phi"]
    flat = np.frombuffer(replica.snapshot().sections["phi"], "<f4")
    begin = 0
    named = {}
    for tensor, shape in shapes.items():
        count = int(np.prod(shape))
        named[tensor] = flat[begin : begin + count]
        begin += count
    return named


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(3, 2, marks=pytest.mark.nightly)])
async def test_all_nodes_go_on_in_another_number_of_stages(tmp_path: Path, before: int, after: int) -> None:
    run = manifest(before)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocabulary=256))  # as bytes need it

    def add(v: Village, stage: int | None, again: Villager | None = None) -> Villager:
        number = len(v.people) if again is None else v.people.index(again)
        v.saving = CheckpointOptions(home=FolderStore(tmp_path / str(number)))
        return v.add(stage, again=again)

    async with village(run) as v:
        owner = Amending(v)
        old = [add(v, min(number, before - 1)) for number in range(3)]
        await v.until(lambda: all(p.node.served is not None and p.served.gossip.done > 3 for p in old), "rounds")
        at = max(p.served.gossip.done for p in old) + 2
        owner.sign(at, {"pipeline.stages": after})
        await v.until(lambda: all(p.served.gossip.done >= at for p in old), "the last round in the old stages")
        assert not any(told(p, "amendment.applied") for p in old), "no replica is made for other stages meanwhile"
        was = {tensor: weights for person in old for tensor, weights in slow_weights(person).items()}
        for person in old:
            person.notices.leave("the run goes on in other stages", NoticeKind.STOP)
        for person in old:
            assert person.task is not None
            cut = (await person.task).cut  # a microbatch whose next stage has left is not waited for
            assert all(step.startswith("finish") for step in cut), cut
        loss = statistics.median(losses(v)[-4:])
        count = len(losses(v))
        samples = max(int(str(t["samples_total"])) for p in old for t in told(p, "state.saved"))

        v.run = owner.signed.newest
        v.cut = 1
        new = [add(v, None, again) for again in old]
        training = record_pb2.NODE_STATE_TRAINING
        await v.until(lambda: all(p.node.state == training for p in new), "all train in the new stages")
        now = {tensor: weights for person in new for tensor, weights in slow_weights(person).items()}
        moved = {key: float(np.linalg.norm(now[key] - was[key]) / np.linalg.norm(was[key])) for key in was}
        assert {p.node.stage for p in new} == set(range(after)) and now.keys() == was.keys()
        for person in new:
            assert [row["method"] for row in told(person, "recovery.done")] in (["pieces"], ["replica"])
            assert not told(person, "state.fresh")
        assert max(moved.values()) < APART_MAX, moved
        await v.until(lambda: len(losses(v)) >= count + 4, "held-out losses")
        later = losses(v)[count:]
        assert later[0] < loss + 0.02
        assert min(p.node.samples_total() for p in new) > samples
        joiner = v.add(after - 1)
        await v.until(lambda: joiner.node.state == training, "a joiner takes the new cut")
        assert told(joiner, "recovery.done")[0]["method"] == "replica"


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
