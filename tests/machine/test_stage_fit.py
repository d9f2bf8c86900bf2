"""The stages that fit a machine, by the one formula that replicas, `join`, `doctor`, `plan` and `simulate` use."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.micro.memory import fit_rows, llama3
from swarmnode.app.machine.stage_fit import FreeMemory, MachineMemory, StageFit, first_alike, stage_fit
from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.app.planner.stage_memory import fit_of, memory_of, repeated
from swarmnode.model.memory_budget import CARD, CPU, ComputeMode, Passes, memory_need, passes_in, repeated_forwards
from swarmnode.model.split import split
from swarmnode.run.manifest import Manifest, ModelSpec, PipelineSpec

RUN = llama3("8B", 16)
INNER = 8
PARTS = split(RUN.model, 16)
SMALLEST = Passes(1, True)
PLENTY = 1 << 40


def on_card(nbytes: int) -> StageFit:
    return stage_fit(
        RUN, MachineMemory(FreeMemory(PLENTY, "host"), FreeMemory(nbytes, "card")), has_data=True, mode=CARD
    )


def test_a_card_that_holds_no_whole_microbatch_computes_it_in_passes() -> None:
    whole = memory_need(RUN, PARTS[INNER], CARD).device
    least = memory_need(RUN, PARTS[INNER], CARD, SMALLEST).device
    assert least < whole - 2e9
    assert on_card(PLENTY).passes[INNER] == Passes(4, False)
    fit = on_card(whole - 1)
    assert INNER not in fit.unable and fit.passes[INNER].samples < 4
    assert fit.needed[INNER].device < whole
    fit = on_card(least)
    assert INNER not in fit.unable and fit.passes[INNER] == SMALLEST
    assert INNER in on_card(least - 1).unable


@pytest.mark.parametrize("stage", [0, INNER, 15])
def test_smaller_passes_need_less(stage: int) -> None:
    """Of the last stage's single layer the inputs of layers are one more stream."""
    sizes = [Passes(4, False), Passes(2, False), Passes(1, False), Passes(1, True)]
    needs = [memory_need(RUN, PARTS[stage], CARD, passes).device for passes in sizes]
    assert all(after < 1.01 * before for before, after in itertools.pairwise(needs))
    assert needs[-1] < needs[0] - 5e8
    assert needs[0] == memory_need(RUN, PARTS[stage], CARD).device


def test_a_need_in_passes_is_never_above_what_is_free_unless_no_pass_fits() -> None:
    for nbytes in range(4_000_000_000, 24_000_000_000, 1_000_000_000):
        fit = on_card(nbytes)
        for stage, need in enumerate(fit.needed):
            assert (need.device <= nbytes) is (stage not in fit.unable)
            if need.device > nbytes:
                assert fit.passes[stage] == SMALLEST


def test_a_device_in_the_hosts_memory_computes_at_once() -> None:
    assert passes_in(RUN, PARTS[INNER], CPU, None) == Passes(4, False)
    assert passes_in(RUN, PARTS[INNER], CPU, 1) == Passes(4, False)


@pytest.mark.parametrize(
    ("passes", "last", "forwards"),
    [
        (Passes(4, False), False, 0),
        (Passes(2, False), False, 1),
        (Passes(2, False), True, 0),
        (Passes(1, True), True, 1),
    ],
)
def test_smaller_passes_do_forwards_again(passes: Passes, last: bool, forwards: int) -> None:
    assert repeated_forwards(passes, 4, last=last) == forwards


@pytest.mark.parametrize("mode", [CPU, CARD])
def test_a_stage_takes_the_need_of_one_like_it_only_if_it_is_alike(mode: ComputeMode) -> None:
    """Windows, experts and the state of the next stage, which a machine without a card keeps, differ by stage."""
    plain = ModelSpec(layers=7, width=64, heads=4, kv_heads=2, ffn=128, context=64)
    windows = replace(plain, sliding_window=16, sliding_layers=(0, 1, 2, 5))
    experts = replace(plain, experts=4, experts_active=2, expert_ffn=256, dense_layers=(0, 4))
    memory = MachineMemory(FreeMemory(PLENTY, "host"), FreeMemory(PLENTY, "card") if mode.separate else None)
    for model in (plain, windows, experts):
        for stages in range(1, 8):
            run = Manifest(model=model, pipeline=PipelineSpec(stages=stages))
            each = tuple(memory_need(run, part, mode) for part in split(model, stages))
            assert stage_fit(run, memory, has_data=True, mode=mode).needed == each
    assert first_alike(plain, split(plain, 7)) == [0, 1, 1, 1, 1, 5, 6]


def kind(memory_gb: float, host_gb: float = 32.0) -> MachineKind:
    return MachineKind("card", 1, 1e13, 1e7, 1e7, Address("eu", 0.0), memory_gb=memory_gb, host_gb=host_gb)


def test_a_simulated_machine_has_the_fit_of_a_real_one() -> None:
    for one in (kind(8.0), kind(12.0), kind(24.0)):
        memory = memory_of(one)
        fits = fit_of(RUN, one)
        assert fits == stage_fit(RUN, memory, has_data=True, mode=fits.mode)
    assert fit_of(RUN, kind(6.0)).unable == set(range(16))
    assert fit_of(RUN, kind(8.0)).unable == {0, 14, 15}
    assert not fit_of(RUN, kind(24.0)).unable
    assert repeated(RUN, kind(8.0), INNER) == 1
    assert repeated(RUN, kind(48.0), INNER) == 0


def test_llama_8b_fits_24_gb_cards_with_16_gb_of_ram() -> None:
    rows = [row for row in fit_rows() if row.size == "8B" and row.stages == 16 and row.card_gb == 24.0]
    assert [(row.host_gb, row.served) for row in rows] == [(16.0, 16), (32.0, 16)]


def test_a_run_of_less_state_fits_smaller_cards() -> None:
    """Adapters: Llama 3 8B on cards of 8 GB."""
    inner = replace(RUN.inner, optimizer="adamw", weight_decay=0.0)
    adapters = replace(RUN, training=replace(RUN.training, kind="adapters"), inner=inner)
    assert not fit_of(adapters, kind(8.0, 16.0)).unable
