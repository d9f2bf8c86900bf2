"""What a plan says of a stage's lines: bytes by the formulas of method and codec, and of microbatches under way."""

from dataclasses import replace

import pytest

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address, Nat, rtt_s
from swarmnode.app.planner.plan import PIECE_TOKENS, Plan, plan
from swarmnode.model.section import section_sizes
from swarmnode.run.manifest import GossipSpec, InnerSpec, Manifest, PipelineSpec, boundary_nbytes
from swarmnode.train.gossip.outer.traffic import message_nbytes
from tests.support.method_tables import CODECS_OF, IN_GROUPS

REPLICAS = 4


def egress(gossip: GossipSpec) -> list[float]:
    """Bytes a second of a mean node of each stage, and the samples a second behind them."""
    kind = MachineKind("card", 3 * REPLICAS, flops=1e12, up=1e9, down=1e9, address=Address("eu", 0.0))
    found = plan(Manifest(gossip=gossip), [kind], 1e6)
    assert all(stage.replicas == REPLICAS for stage in found.stages)
    return [stage.egress / stage.samples_per_s * REPLICAS for stage in found.stages]


@pytest.mark.parametrize("method", sorted(CODECS_OF))
def test_the_bytes_of_every_method_and_codec_are_counted_as_often_as_they_are_sent(method: str) -> None:
    silent = egress(GossipSpec(method="none"))
    parts = plan(Manifest(), [], 1.0).stages
    sends = 0 if method == "none" else 1 if method in IN_GROUPS else REPLICAS - 1
    for coding in CODECS_OF[method]:
        spec = GossipSpec(method=method, codec=coding, group=2 if method in IN_GROUPS else 0)
        for part, before, after in zip(parts, silent, egress(spec), strict=True):
            seconds = section_sizes(Manifest(gossip=spec), part.part)["exp_avg_sq"]
            wanted = REPLICAS * sends * message_nbytes(spec, part.part.parameters, seconds) / spec.round_samples
            assert after - before == pytest.approx(wanted, rel=1e-6)


def test_the_whole_stage_sends_more_than_pairs() -> None:
    pairs, whole = (egress(replace(GossipSpec(method="average"), group=size)) for size in (2, 0))
    silent = egress(GossipSpec(method="none"))
    assert [w - s for w, s in zip(whole, silent, strict=True)] == pytest.approx(
        [3 * (p - s) for p, s in zip(pairs, silent, strict=True)]
    )


SHARE = 0.7
FAR = Address("asia", 0.05)
PAIR = Manifest(
    pipeline=PipelineSpec(stages=2),
    inner=InnerSpec(microbatch=4, inner_batch=4, replica_batch_min=4),
    limits=replace(Manifest().limits, in_flight_max=1),
)


def at(place: Address, count: int = 1) -> MachineKind:
    return MachineKind("far", count, flops=1e11, up=1e6, down=1e7, address=place)


def test_a_microbatch_in_flight_waits_for_distances_and_lines() -> None:
    """One at a time between two machines: a round trip is work, both ways, and their bytes."""
    found = plan(PAIR, [at(FAR), at(Address("eu", 0.01))], 1e6)
    model = PAIR.model
    work = sum(3.0 * stage.part.cost * (4 * model.context + PIECE_TOKENS) / (SHARE * 1e11) for stage in found.stages)
    sent = 2 * 4 * boundary_nbytes("bf16", model.context, model.width) / 1e6
    seconds = rtt_s(FAR, Address("eu", 0.01)) + work + sent
    assert found.limit_kind == "in flight"
    assert found.samples_per_s == pytest.approx(4 / seconds)


def test_more_in_flight_or_shorter_ways_are_faster_until_another_limit_binds() -> None:
    def run(batch: int, place: Address) -> Plan:
        inner = replace(PAIR.inner, inner_batch=batch)
        gossip = replace(PAIR.gossip, round_samples=1 << 16)
        return plan(Manifest(pipeline=PAIR.pipeline, inner=inner, gossip=gossip), [at(place, 8)], 1e6)

    rates = [run(batch, FAR).samples_per_s for batch in (16, 32, 64, 4096, 8192)]
    assert rates[0] < 0.8 * rates[1] and rates[1] <= rates[2] <= rates[3] == rates[4]
    assert run(1024, FAR).limit_kind == "uplink" and run(16, FAR).limit_kind == "in flight"
    near = run(16, Address("asia", 0.001))
    relayed = run(16, Address("asia", 0.05, Nat.RELAYED))
    assert relayed.samples_per_s < run(16, FAR).samples_per_s < near.samples_per_s


def test_a_run_of_one_stage_waits_for_no_line() -> None:
    assert plan(replace(PAIR, pipeline=PipelineSpec(stages=1)), [at(FAR)], 1e6).limit_kind == "arithmetic"
