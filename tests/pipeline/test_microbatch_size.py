"""How large microbatches are: predicted from what was measured, and the same samples are fed however they travel."""

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Priority, WireTensor
from swarmnode.net.membership.swarm import SERVING, Member, Swarm
from swarmnode.run.manifest import GossipSpec, InnerSpec, LimitsSpec, Manifest, PipelineSpec
from swarmnode.train.node.membership_handlers import probing
from swarmnode.train.pipeline.microbatch_size import (
    BETTER,
    PUT_OFF,
    REVIEW,
    Host,
    MicrobatchSizer,
    SampleRates,
    loopback,
    sizes_of,
    slowness,
    window_limit,
)
from tests.support import tiny_model
from tests.support.fake_telemetry import Quiet
from tests.support.village import Recording, manifest, village

CPU = SampleRates({1: 134.0, 2: 158.0, 4: 184.0, 8: 187.0})  # measured: the demo's inner stage on one thread
LARGE = SampleRates({1: 0.97, 2: 0.99, 4: 1.0})  # a sample keeps the device busy by itself


ME = PeerId("p0-0")


def swarm(*sizes: int, addresses: tuple[str, ...] = ("/ip4/81.0.1.2/tcp/4001",)) -> Swarm:
    members = [
        Member(PeerId(f"p{stage}-{index}"), stage, SERVING, 1, 1e12, 100.0, 0, 0, addresses, feeds=not stage)
        for stage, size in enumerate(sizes)
        for index in range(size)
    ]
    return Swarm.of(members, len(sizes))


def run(batch: int = 8, microbatch: int = 8, stages: int = 3, slots: int = 8) -> Manifest:
    return Manifest(
        inner=InnerSpec(microbatch=microbatch, inner_batch=batch),
        pipeline=PipelineSpec(stages=stages),
        limits=LimitsSpec(in_flight_max=slots),
    )


def sizing(manifest: Manifest, rates: SampleRates = LARGE, processors: float = math.inf) -> MicrobatchSizer:
    return MicrobatchSizer(manifest, ME, rates, lambda: 100.0, Host(lambda: processors))


@given(batch=st.integers(1, 300), microbatch=st.integers(1, 40), replicas=st.integers(0, 20))
def test_a_share_is_cut_evenly_into_what_may_travel(batch: int, microbatch: int, replicas: int) -> None:
    manifest = run(batch, microbatch)
    share = max(min(2, microbatch), -(-batch // max(1, replicas)))
    sizes = sizes_of(manifest, replicas)
    assert sizes[0] <= microbatch and sizes[-1] == 1 and sizes == sorted(set(sizes), reverse=True)
    for size in sizes:  # whole pieces of it hardly come to more than the share
        pieces = -(-share // size)
        assert share <= pieces * size < share + pieces


def test_six_machines_of_their_own_get_the_smallest_that_pays() -> None:
    here = swarm(2, 2, 2)
    assert sizing(run()).choose(here).samples == 1
    assert sizing(run(), CPU).choose(here).samples == 1  # a third slower by itself, and four times as many at work
    launched = SampleRates({samples: samples / (3.0 + samples) for samples in (1, 2, 4, 8)})  # mostly fixed cost
    assert sizing(run(), launched).choose(here).samples == 2


def test_nodes_that_share_processors_cut_no_more_than_those_can_work_on() -> None:
    here = swarm(2, 2, 2, addresses=("/ip4/127.0.0.1/tcp/4001",))
    assert loopback(here, ME) == 6 and loopback(swarm(2, 2, 2), ME) == 0
    assert loopback(swarm(1, addresses=("/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1")), ME) == 0
    assert loopback(here, PeerId("elsewhere")) == 0, "who announces a loopback address is not thereby on our machine"
    assert sizing(run(), CPU, processors=2).choose(here).samples == 4
    assert sizing(run(), CPU, processors=6).choose(here).samples == 1
    assert sizing(run(), CPU, processors=2).choose(swarm(2, 2, 2)).samples == 1


def test_microbatches_stay_whole_where_enough_are_in_flight() -> None:
    assert sizing(run(batch=256, slots=64), CPU).choose(swarm(2, 2, 2)).samples == 8


def test_a_numbered_step_is_cut_finer_as_nothing_fills_the_pipeline_behind_it() -> None:
    """Four feeders of sixteen samples each, three stages: in pieces of two a fifth of a step is filling and draining,
    in pieces of one a ninth."""
    plain = run(batch=64, microbatch=4, slots=64)
    steps = dataclasses.replace(plain, gossip=GossipSpec(method="gradient", codec="int8", group=0, round_samples=64))
    rates = SampleRates({1: 0.9, 2: 0.95, 4: 1.0})
    assert sizing(plain, rates).choose(swarm(4, 4, 4)).samples == 2
    assert sizing(steps, rates).choose(swarm(4, 4, 4)).samples == 1
    slow = SampleRates({1: 0.5, 2: 0.8, 4: 1.0})
    assert sizing(steps, slow).choose(swarm(4, 4, 4)).samples > 1, "small ones cost more a sample"


def test_lines_that_hold_all_there_may_be_in_flight_cut_nothing() -> None:
    """Where nearly all samples in flight are on the lines, machines idle however they are cut: small ones only cost."""
    near, far = (sizing(run(batch=24, slots=64), CPU) for _ in range(2))
    for _ in range(REVIEW):
        near.record_trip(6, 0.2, 0.0)
        far.record_trip(6, 5.0, 0.0)
    assert near.choose(swarm(2, 2, 2)).samples < far.choose(swarm(2, 2, 2)).samples == 6


def test_it_follows_the_swarm_and_says_why() -> None:
    chooser = sizing(run(batch=48, slots=64), CPU)
    few = chooser.choose(swarm(1, 1, 1))
    many = chooser.choose(swarm(8, 8, 8))
    assert few.samples > many.samples
    assert "samples/s predicted by size" in many.reason and "24 machines" in many.reason
    assert many.limit == window_limit(run(batch=48), (8, 8, 8), 8, many.samples)[0]


def test_a_size_hardly_better_does_not_take_over() -> None:
    """Measured times tremble: between two sizes that promise about the same the first chosen stays."""
    even = SampleRates({1: 1.0, 2: BETTER * 0.99, 4: 1.0, 8: 1.0})
    chooser = sizing(run(batch=256, slots=64), even)
    here = swarm(2, 2, 2)
    used = chooser.choose(here).samples
    for _ in range(20 * REVIEW):
        chooser.record_trip(used, 0.2, 0.1)
        assert chooser.choose(here).samples == used


def test_a_larger_size_that_is_as_good_comes_back() -> None:
    """While a feeder is alone, more of its microbatches are in flight and smaller ones pay; that passes."""
    flat = SampleRates({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
    chooser = sizing(run(), flat, processors=2)
    loop = ("/ip4/127.0.0.1/tcp/4001",)
    assert chooser.choose(swarm(2, 2, 2, addresses=loop)).samples == 4
    assert chooser.choose(swarm(1, 2, 2, addresses=loop)).samples < 4
    assert chooser.choose(swarm(2, 2, 2, addresses=loop)).samples == 4


def test_a_swarm_with_few_samples_in_flight_says_what_would_keep_its_machines_at_work() -> None:
    six = [(index % 3, 30.0) for index in range(6)]  # together 60 samples a second, one alone 10 or so
    assert slowness(run(), six, 50.0) is None
    found = slowness(run(), six, 20.0)
    assert found is not None and found[0] == "2 of 6 machines work at a time"
    assert "At most 8 samples are in flight; inner.inner_batch_max = 24" in found[1]
    assert slowness(run(), six, 20.0, at_once=2.0) is None, "they share two processors"
    alone = slowness(run(batch=64), six, 5.0)
    assert alone is not None and "one of its machines alone would do" in alone[0] and "plan --search" in alone[1]
    assert slowness(run(), six[:2], 1.0) is None, "a stage is empty"


class QuickDevice:
    """A device that needs far less than a millisecond, which is as fine as the loop's clock may be."""

    waiting = 0

    def __init__(self) -> None:
        self.worked_s = 0.0

    async def run(self, priority: Priority, samples: int, work: object) -> None:
        self.worked_s += 2e-5 + 1e-5 * samples


async def test_a_quick_device_is_measured_by_its_own_clock() -> None:
    run = tiny_model.manifest(stages=3)
    known = list[SampleRates]()
    await probing(None, run, 1, lambda *arguments: None, QuickDevice(), Quiet(), known.append)  # type: ignore[arg-type]
    rates = known[0]
    largest = max(rates.measured)
    assert largest == run.inner.microbatch > 1
    for samples, rate in rates.measured.items():
        assert rate == pytest.approx(samples / (3.0 * (2e-5 + 1e-5 * samples)))


SHARE = 4  # inner batches of eight, two replicas a stage
SAMPLE_S = 0.05  # far above a piece of work without samples: as of a large model, of which one keeps a device busy


class Sized(Recording):
    """Counts the gradients of each size, and samples between two inner steps."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.travelled: Counter[int] = Counter()
        self.stepped: list[int] = []

    def backward(self, tape: object, gradient: WireTensor, samples: int, **options: bool) -> WireTensor | None:
        self.travelled[samples] += options.get("accumulate", True)  # checks of others' work are not added
        return super().backward(tape, gradient, samples, **options)  # type: ignore[arg-type]

    def step(self, samples_total: int, batch: float = math.inf, averaged: int = 1) -> object:  # type: ignore[override]
        self.stepped.append(self.accumulated)
        return super().step(samples_total, batch)


@pytest.mark.node
@pytest.mark.loop("village")
async def test_six_nodes_with_devices_of_their_own_let_shares_travel_in_pieces() -> None:
    async with village(manifest()) as v:
        v.sample_s = SAMPLE_S
        for index in range(6):
            v.add(index % 3, Sized)
        # Choices made before all are there are for other shares.
        await v.until(lambda: all(sum(p.node.presence.peer_table.swarm().sizes) == 6 for p in v.people), "all know all")
        await v.trains(256, "256 samples")
        await v.leave()
        fed = v.total()
        for stage in (0, 1):
            replicas = [p.replica for p in v.people if p.node.stage == stage]
            travelled: Counter[int] = Counter()
            for replica in replicas:
                assert isinstance(replica, Sized)
                travelled += replica.travelled
                largest = max(SHARE + max(replica.travelled) - 1, int(PUT_OFF * 2 * SHARE))
                assert all(SHARE <= samples <= largest for samples in replica.stepped[4:]), replica.stepped
            assert sum(size * count for size, count in travelled.items()) == fed, "each gradient once"
            assert travelled[1] + travelled[2] > travelled[4], travelled
        said = [fields for p in v.people for event, fields in p.quiet.events if event == "feeder.window"]
        assert any(int(str(fields["microbatch"])) < SHARE for fields in said)
        assert all("samples/s predicted by size" in str(fields["reason"]) for fields in said)
