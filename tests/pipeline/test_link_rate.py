"""Announced limits: what a link leaves of a speed, and that nothing is sent to who will pause before it is done."""

import asyncio
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.run.manifest import boundary_codes, boundary_nbytes
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.train.pipeline.believed_rate import allowed_samples_per_s, link_samples_per_s, sample_nbytes
from swarmnode.train.pipeline.route import Router
from tests.support.records import member
from tests.support.village import manifest, village

pytestmark = pytest.mark.node  # some seconds

NOON = 1.75e9


@pytest.mark.parametrize("kind", ["bf16", "fp32", "int8", "int4", "int4_int2"])
def test_activations_arrive_at_the_next_stage_as_sent(kind: str) -> None:
    demo = PRESETS["demo"]
    four = dataclasses.replace(demo, pipeline=dataclasses.replace(demo.pipeline, stages=4, boundary=kind))
    sent, received = zip(*(sample_nbytes(four, stage) for stage in range(4)), strict=True)
    assert sum(sent) == sum(received) and sent[0] == received[3] and sent[3] == received[0]
    gradient = boundary_codes(kind)[1]
    assert sent[3] == boundary_nbytes(gradient, four.model.context, four.model.width), "the gradient alone"
    single = dataclasses.replace(demo, pipeline=dataclasses.replace(demo.pipeline, stages=1))
    assert sample_nbytes(single, 0) == (0, 0) and link_samples_per_s(single, 0, 1.0, 1.0) == float("inf")


@given(st.floats(0.01, 1e4), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 1))
def test_a_speed_is_only_ever_lowered_and_never_beyond_the_link(speed: float, up: int, down: int, stage: int) -> None:
    demo = PRESETS["tiny"]
    allowed = allowed_samples_per_s(demo, stage, speed, record_pb2.Allowance(up_bps=up, down_bps=down))
    assert allowed <= speed == allowed_samples_per_s(demo, stage, speed, None)
    sent, received = sample_nbytes(demo, stage)
    if up:
        assert 8 * sent * allowed <= up * 1.000001
    if down:
        assert 8 * received * allowed <= down * 1.000001
    if not up and not down:
        assert allowed == speed


def test_nothing_starts_with_who_pauses_before_it_would_be_done() -> None:
    router = Router(random.Random(1), epsilon=0.5)
    router.set_unix_ahead(NOON)
    soon = dataclasses.replace(member("a", samples_per_second=0.5), pauses_unix_s=int(NOON) + 100)
    router.update([soon, member("b"), member("c")])
    assert {router.choose(at / 10.0, 4)[0] for at in range(500)} == {"a", "b", "c"}, "there is time"
    assert {router.choose(92.5 + at / 100.0, 4)[0] for at in range(500)} == {"b", "c"}, "8 s of work, 7.5 s left"
    assert router.choose(95.0, 4, {PeerId("b"), PeerId("c")})[0] == "a", "better late than lost"
    router.learn(member("a", sequence=2))
    assert {router.choose(200.0, 4)[0] for _ in range(200)} == {"a", "b", "c"}, "the limit was lifted"


@pytest.mark.loop("village")
async def test_whole_nodes_expect_what_others_announce() -> None:
    async with village(manifest(stages=2)) as v:
        people = [v.add(number % 2) for number in range(3)]
        await v.until(lambda: v.total() > 50, "they train")
        presence = people[1].node.presence
        router = people[0].node.presence.routing.routers[1]
        assert router.pausing(0.0, 1) == []
        presence.own.note(allowance=record_pb2.Allowance(up_bps=8000, pauses_unix_s=1))
        presence.own.announce_change()
        now = asyncio.get_running_loop().time
        await v.until(lambda: router.pausing(now(), 1) == [people[1].node.me], "its feeder knows of the pause")
        told = people[0].node.presence.peer_table.member(people[1].node.me)
        assert told is not None and told.samples_per_second <= 1000 / sample_nbytes(v.run, 1)[0]
        presence.own.note(allowance=None)
        presence.own.announce_change()
        await v.until(lambda: router.pausing(now(), 1) == [], "and of its end")
        before = v.total()
        await v.until(lambda: v.total() > before, "the only replica of a stage is asked all the same")
        await v.leave()
