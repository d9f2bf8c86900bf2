"""The formulas for memory. What a tape holds is measured in test_stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.manifest import PRESETS, GossipSpec, LimitsSpec, Manifest, ModelSpec, PipelineSpec, RecoverySpec
from swarmnode.model import memory
from swarmnode.model.section import ITEMSIZE, section_sizes, snapshot_nbytes
from swarmnode.model.split import split


def needed(run: Manifest) -> list[int]:
    return [memory.replica_nbytes(run, part) for part in split(run.model, run.pipeline.stages)]


def test_what_a_state_does_not_have_takes_no_memory() -> None:
    """Muon's matrices one moment instead of two, plain averaging no outer momentum: of a large stage 8 bytes less a
    parameter, and 2 for half a snapshot."""
    model = ModelSpec(layers=4, width=1024, heads=8, kv_heads=2, ffn=4096, vocabulary=256)
    run = Manifest(model=model, pipeline=PipelineSpec(stages=4), recovery=RecoverySpec(keepers=0))
    small, large = (
        replace(run, inner=replace(run.inner, optimizer=optimizer), gossip=GossipSpec(method=method, codec="bf16"))
        for optimizer, method in (("muon", "average"), ("adamw", "noloco"))
    )
    part = split(model, 4)[1]
    assert (needed(large)[1] - needed(small)[1]) / part.parameters == pytest.approx(8 + 2, rel=1e-3)


def test_tapes_are_kept_while_there_is_room() -> None:
    few, many = (replace(PRESETS["demo"], limits=LimitsSpec(tape_bytes_max=nbytes)) for nbytes in (0, 1 << 40))
    tape = 19 << 20  # as preset.py says
    for less, more in list(zip(needed(few), needed(many), strict=True))[:-1]:
        assert abs(more - less - memory.TAPES * tape) < tape / 2
    assert needed(few)[-1] == needed(many)[-1]  # the last stage keeps none


def test_a_running_mean_takes_a_flat() -> None:
    run = PRESETS["demo"]
    without = replace(run, inner=replace(run.inner, average_share=0.0))
    parts = split(run.model, run.pipeline.stages)
    assert run.inner.average_share > 0.0
    for part, more, less in zip(parts, needed(run), needed(without), strict=True):
        assert more - less == ITEMSIZE * part.parameters


def test_a_snapshot_of_the_next_stage_is_kept_where_it_is_small_enough() -> None:
    run = PRESETS["demo"]
    parts = split(run.model, run.pipeline.stages)
    after = [snapshot_nbytes(section_sizes(run, parts[(part.stage + 1) % len(parts)])) for part in parts]
    assert min(after) > 0
    for recovery in (RecoverySpec(keepers=0), RecoverySpec(snapshot_bytes_max=min(after) - 1)):
        less = needed(replace(run, recovery=recovery))
        assert [more - few for more, few in zip(needed(run), less, strict=True)] == after
    alone = replace(run, pipeline=PipelineSpec(stages=1))
    assert needed(alone) == needed(replace(alone, recovery=RecoverySpec(keepers=0)))


def test_logits_of_a_large_vocabulary_count() -> None:
    model = ModelSpec(layers=4, width=256, heads=4, ffn=704, vocabulary=50_000, context=512)
    inner, last = needed(Manifest(model=model, pipeline=PipelineSpec(stages=2)))
    tokens = Manifest().inner.microbatch * model.context
    assert last > memory.LOGITS * 4 * tokens * model.vocabulary > inner


def test_a_subspace_puts_the_table_on_every_stage() -> None:
    pipeline = PipelineSpec(boundary="subspace", boundary_rank=16)
    small, large = (
        needed(Manifest(model=ModelSpec(vocabulary=v), pipeline=pipeline, recovery=RecoverySpec(keepers=0)))
        for v in (256, 1256)
    )
    assert large[1] - small[1] == 4 * 1000 * ModelSpec().width
