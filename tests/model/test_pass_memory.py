"""The memory of passes on the pretend device: true stages of Llama 3 8B, four windows of 2,048 tokens."""

import pytest
import torch

from benchmarks.micro.memory import llama3
from swarmnode.model import stage as layers_module
from swarmnode.model.memory_budget import Passes
from swarmnode.model.stage import StageReplica
from swarmnode.model.stage_input import StageInput
from tests.support.pretend_device import NAME, books

pytestmark = pytest.mark.node  # some seconds

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
        before, ledger.widest, ledger.reads = ledger.device.mark(), 0, 0
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
