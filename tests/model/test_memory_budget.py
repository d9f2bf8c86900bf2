"""The formulas for memory: against the books of true stages and passes of Llama 3 8B on a pretend device, and term by
term. What a tape holds is measured in test_stage."""

from dataclasses import replace

import pytest
import torch

from benchmarks.micro.memory import llama3
from swarmnode.model import memory_budget
from swarmnode.model import stage as layers_module
from swarmnode.model.memory_budget import CARD, Passes, memory_need
from swarmnode.model.section import ITEMSIZE, section_sizes, snapshot_nbytes
from swarmnode.model.split import split, stages_of
from swarmnode.model.stage import StageReplica
from swarmnode.model.stage_input import StageInput
from swarmnode.run.manifest import GossipSpec, LimitsSpec, Manifest, ModelSpec, PipelineSpec, RecoverySpec
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.pretend_device import NAME, books
from tests.support.stage_books import live

pytestmark = pytest.mark.node  # some seconds


def needed(run: Manifest) -> list[int]:
    return [memory_need(run, part).host for part in stages_of(run)]


@pytest.mark.parametrize("stage", [16, *(pytest.param(end, marks=pytest.mark.nightly) for end in (0, 31))])
def test_the_formula_of_a_card_is_within_15_percent_of_the_books(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3 8B in 32 stages; `python -m tests.support.stage_books` has all of 1B, 8B and 70B."""
    found = live(monkeypatch, llama3("8B", 32), stage)
    assert found.formula == pytest.approx(found.peak, rel=0.15)
    assert set(found.ledger.products) == {"torch.bfloat16"}, "every matrix is multiplied in half precision"
    if stage == 16:
        assert found.ledger.widest == found.parameters, "no T x T tensor, and nothing larger than the stage"


def test_a_card_needs_no_more_of_what_it_does_not_hold() -> None:
    """Fewer layers, fewer samples and a shared table change the need as they should."""
    inner, first, last = (
        memory_need(run, split(run.model, 8)[stage], CARD)
        for run, stage in ((llama3("8B", 8), 4), (llama3("8B", 8), 0), (llama3("8B", 8), 7))
    )
    assert inner.device < first.device
    assert last.device < inner.device, "it keeps no tape"
    small = llama3("8B", 8, microbatch=1)
    assert memory_need(small, split(small.model, 8)[4], CARD).device < inner.device
    subspace = llama3("8B", 8, boundary="subspace")
    more = memory_need(subspace, split(subspace.model, 8)[4], CARD).device - inner.device
    assert more == pytest.approx(4 * 128_256 * 4096, rel=0.01)


def test_absent_sections_take_no_memory() -> None:
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
    tape = 19 << 20  # as recipe.py says
    for less, more in list(zip(needed(few), needed(many), strict=True))[:-1]:
        assert abs(more - less - memory_budget.TAPES * tape) < tape / 2
    assert needed(few)[-1] == needed(many)[-1]  # the last stage keeps none


def test_a_running_mean_takes_a_flat() -> None:
    run = PRESETS["demo"]
    without = replace(run, inner=replace(run.inner, average_share=0.0))
    parts = stages_of(run)
    assert run.inner.average_share > 0.0
    for part, more, less in zip(parts, needed(run), needed(without), strict=True):
        assert more - less == ITEMSIZE * part.parameters


def test_a_snapshot_of_the_next_stage_is_kept_where_it_is_small_enough() -> None:
    run = PRESETS["demo"]
    parts = stages_of(run)
    after = [snapshot_nbytes(section_sizes(run, parts[(part.stage + 1) % len(parts)])) for part in parts]
    assert min(after) > 0
    for recovery in (RecoverySpec(keepers=0), RecoverySpec(snapshot_bytes_max=min(after) - 1)):
        less = needed(replace(run, recovery=recovery))
        assert [more - few for more, few in zip(needed(run), less, strict=True)] == after
    alone = replace(run, pipeline=PipelineSpec(stages=1))
    assert needed(alone) == needed(replace(alone, recovery=RecoverySpec(keepers=0)))


def test_a_subspace_puts_the_table_on_every_stage() -> None:
    pipeline = PipelineSpec(boundary="subspace", boundary_rank=16)
    small, large = (
        needed(Manifest(model=ModelSpec(vocabulary=v), pipeline=pipeline, recovery=RecoverySpec(keepers=0)))
        for v in (256, 1256)
    )
    assert large[1] - small[1] == 4 * 1000 * ModelSpec().width


COPIED_MAX = 2  # a pass: its input and the targets, or the gradient of its output


@pytest.mark.parametrize(
    ("stage", "budget", "passes", "most"),
    [
        (15, 0, Passes(1, True), 2.0e9),  # the last stage, with the head: at most 2 GB over its state
        pytest.param(15, None, Passes(4, False), 4.0e9, marks=pytest.mark.nightly),
        (8, 0, Passes(1, True), 1.5e9),
        pytest.param(8, 2_500_000_000, Passes(2, False), 2.5e9, marks=pytest.mark.nightly),
        (8, None, Passes(4, False), 5.5e9),
    ],
    ids=["last-least", "last-whole", "inner-least", "inner-by-sample", "inner-whole"],
)
def test_a_pass_takes_what_its_formula_says(
    stage: int, budget: int | None, passes: Passes, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks are near the formula and below `most`, no tensor exceeds a matrix, no number is read."""
    run = llama3("8B", 16)
    shape = (4, run.model.context, run.model.width)
    with books(monkeypatch) as ledger, monkeypatch.context() as patch:
        patch.setattr(layers_module, "initial", lambda model, seed, name, shape: torch.empty(shape))
        replica = StageReplica(run, stage, NAME, autocast=True)
        backprop = replica.backprop
        backprop.budget = budget
        replica.stash.refresh()  # passes read the working copy
        before = ledger.device.mark()
        ledger.widest = 0
        ledger.reads = 0
        ledger.crossings.clear()
        kept = StageInput(torch.zeros(shape, dtype=torch.bfloat16), shape[0] * shape[1])
        if replica.part.has_head:
            backprop.loss(kept, torch.zeros(shape[:2], dtype=torch.int64), 0.1, train=True, accumulate=True)
        else:
            backprop.backward(kept, torch.zeros(shape, dtype=torch.bfloat16), None, accumulate=True)
        peak = ledger.device.peak - before
        assert backprop.passes(4) == passes
    assert peak < most
    said = backprop.memory.pass_nbytes(passes.samples, passes.by_layer)
    assert 0.9 < peak / said < 1.1  # fake tensors make the result of a product with `out` twice: 0.27 GB of logits
    assert ledger.widest <= run.model.width * run.model.vocabulary
    assert ledger.reads == 0 and len(ledger.crossings) <= COPIED_MAX * shape[0] // passes.samples
