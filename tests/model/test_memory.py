"""The formulas for memory. What a tape holds is measured in test_stage."""

from __future__ import annotations

from dataclasses import replace

from swarmnode.manifest import PRESETS, LimitsSpec, Manifest, ModelSpec, PipelineSpec, RecoverySpec
from swarmnode.model import memory
from swarmnode.model.split import split
from swarmnode.recovery.snapshot import ITEMSIZE, SECTIONS, snapshot_nbytes


def needed(run: Manifest) -> list[int]:
    return [memory.replica_nbytes(run, part) for part in split(run.model, run.pipeline.stages)]


def test_a_state_is_what_a_snapshot_holds() -> None:
    assert (len(SECTIONS), ITEMSIZE) == (memory.STATE_FLATS, memory.ITEMSIZE)
    assert snapshot_nbytes(1000) == memory.SNAPSHOT_FLATS * memory.ITEMSIZE * 1000


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
        assert more - less == memory.ITEMSIZE * part.parameters


def test_a_snapshot_of_the_next_stage_is_kept_where_it_is_small_enough() -> None:
    run = PRESETS["demo"]
    parts = split(run.model, run.pipeline.stages)
    after = [snapshot_nbytes(parts[(part.stage + 1) % len(parts)].parameters) for part in parts]
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
