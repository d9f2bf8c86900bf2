"""How late gradients may be: what a feeder keeps under way, and when a replica puts off its step."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.judge import Trusting
from swarmnode.run.manifest import GossipSpec, InnerSpec, Manifest, PipelineSpec
from swarmnode.train.pipeline.microbatch_size import (
    PendingGradients,
    averaged,
    label,
    replica_batch,
    sizes_of,
    window_limit,
)
from swarmnode.train.pipeline.next_hop import LATE_FACTOR, MicrobatchResult
from swarmnode.train.pipeline.stage_worker import HopInput, StageWorker
from tests.support.fake_telemetry import Quiet
from tests.support.hop_chain import Served, chain
from tests.support.stage_context import stage_context
from tests.support.tiny_model import manifest as tiny_manifest
from tests.support.tiny_model import token_batch, token_wire


def run(microbatch: int = 8, batch: int = 16, batch_max: int = 0, steps: int = 1, least: int = 1) -> Manifest:
    inner = InnerSpec(microbatch=microbatch, replica_batch_min=least, inner_batch=batch, inner_batch_max=batch_max)
    return Manifest(inner=inner, pipeline=PipelineSpec(staleness_max=steps))


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    microbatch=st.sampled_from([1, 2, 4, 8]),
    batches=st.integers(1, 8),
    steps=st.integers(0, 4),
)
def test_all_feeders_together_stay_within_the_staleness(
    sizes: list[int], microbatch: int, batches: int, steps: int
) -> None:
    manifest = run(microbatch, microbatch * batches, steps=steps)
    fewest = max(1, min(sizes))
    travels = sizes_of(manifest, max(sizes))[0]
    limit, reason = window_limit(manifest, sizes, sizes[0], travels)
    in_flight = limit * travels * max(1, sizes[0])
    bound = max(1, steps) * fewest * replica_batch(manifest, microbatch * batches, fewest)
    assert limit >= 1 and reason and 1 <= travels <= microbatch
    assert limit == 1 or in_flight <= bound
    assert (limit + 1) * travels * max(1, sizes[0]) > bound


def test_a_larger_batch_allows_more_under_way() -> None:
    assert window_limit(run(), [2, 2, 2], 2, 8)[0] == 1
    assert window_limit(run(batch_max=128), [2, 2, 2], 2, 8)[0] == 8
    assert window_limit(run(), [2, 2, 2], 2, 2)[0] == 4


def test_more_replicas_step_on_less_each() -> None:
    manifest = run(batch=8, least=2)
    assert [replica_batch(manifest, 8, replicas) for replicas in (0, 1, 2, 3, 4, 5, 99)] == [8, 8, 4, 3, 2, 2, 2]


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({}, [1, 1, 2, 3, 4, 4]),
        ({"group": 2}, [1, 1, 2, 2, 2, 2]),
        ({"group": 0}, [1, 1, 2, 3, 4, 4]),
        ({"method": "none"}, [1] * 6),
    ],
)
def test_the_rate_grows_with_the_replicas_that_a_round_averages(fields: dict[str, Any], counted: list[int]) -> None:
    manifest = replace(run(), gossip=GossipSpec(**fields))
    assert [averaged(manifest, replicas) for replicas in (0, 1, 2, 3, 4, 99)] == counted
    same = replace(manifest, inner=replace(manifest.inner, replica_rate="same"))
    assert averaged(same, 4) == 1


def test_a_step_waits_for_gradients_that_it_would_make_too_old() -> None:
    pending = PendingGradients(staleness_max=1)
    first = pending.opened(5, 0.0)
    assert first.age(6) == 1 and not pending.put_off(5, 0.1)  # one step may come between
    assert pending.put_off(6, 0.1)  # two may not
    second = pending.opened(6, 0.2)
    pending.closed(first, 0.3)
    pending.closed(first, 99.0)
    assert not pending.put_off(6, 0.4)
    assert pending.put_off(7, 0.4)
    second.drop()
    assert not pending.put_off(7, 0.4)


def test_steps_do_not_wait_for_a_straggler() -> None:
    pending = PendingGradients(staleness_max=0)
    pending.closed(pending.opened(0, 0.0), 1.0)  # one second is usual
    pending.opened(0, 10.0)
    assert pending.put_off(0, 10.0 + 0.9 * LATE_FACTOR)
    assert not pending.put_off(0, 10.0 + 1.1 * LATE_FACTOR)


def test_labels_cover_every_age() -> None:
    assert [label(age) for age in (0, 1, 2, 3, 4, 99)] == [*name.STALENESS, name.STALENESS[-1]]


async def settled(people: list[Served], wanted: list[int]) -> None:
    """Wait for each one's inner steps: an answer leaves before the step that it makes due."""
    async with asyncio.timeout(60.0):
        while [person.replica.inner_steps for person in people] != wanted:
            await asyncio.sleep(0.001)


async def test_a_replica_puts_off_its_step_while_an_older_gradient_is_on_its_way() -> None:
    """Eight microbatches of four samples, inner batches of eight: four steps everywhere. With a gradient outstanding
    that was begun long ago, the same eight make no step until twice the batch has come together."""
    async with chain(0, 1, 2) as (_, people):
        middle = people[1]
        now_s = asyncio.get_running_loop().time()
        for serial in range(1, 9):
            await people[0].feed(serial=serial)
        await settled(people, [4, 4, 4])
        waited_for = middle.hop.worker.pending.opened(3, now_s + 1e6)
        await people[0].feed(serial=9)
        await people[0].feed(serial=10)
        await settled(people, [5, 4, 5])
        waited_for.drop()
        await people[0].feed(serial=11)
        await settled([middle], [5])
        assert middle.replica.accumulated == 0


def test_a_gradient_that_is_too_old_is_passed_on_and_not_added() -> None:
    """While the last stage works, the first replica takes two steps with other microbatches."""
    run = tiny_manifest(stages=2)
    quiet = Quiet()
    first, last = (TorchReplica(run, stage) for stage in range(2))
    tokens = token_wire(token_batch(run.model))
    process = wire.Process(samples=4, purpose=wire.PURPOSE_TRAIN, itinerary=range(2))
    hop = HopInput(process, tokens, tokens)
    here = stage_context(run, 0, "", replica=first, telemetry=quiet)
    worker = StageWorker(here, lambda: 0.0, Trusting())
    for late, added in ((2, 0), (0, 4)):
        y, pending = worker.forward(hop)
        assert pending is not None and worker.pending.nbytes > 0
        loss = last.loss(y, tokens, 4, train=True)
        first.stage.inner_steps += late
        answer = MicrobatchResult(
            loss.gradient, loss.loss_sum, loss.tokens, peer=PeerId("b" * 52), report=wire.Processed()
        )
        result = worker.backward(y, answer, pending, hop)
        assert result.step is None and first.accumulated == added and worker.pending.nbytes == 0
