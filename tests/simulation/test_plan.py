"""What a plan says of a stage's lines: bytes by the formulas of method and codec."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.gossip.outer.traffic import message_nbytes
from swarmnode.manifest import GossipSpec, Manifest
from swarmnode.manifest.gossip_compat import CODECS_OF, IN_GROUPS
from swarmnode.model.section import section_sizes
from swarmnode.simulation.fleet import MachineKind
from swarmnode.simulation.geography import Address
from swarmnode.simulation.plan import plan

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
