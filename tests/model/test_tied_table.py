"""A tied model's table at both ends: the parts, and training beside one plain process."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.model.stage import StageReplica
from swarmnode.model.tied_table import TiedTable
from tests.support.tiny_model import TINY, manifest, mean_loss, plain_model, train_on

TIED = replace(TINY, tied=True)


def ends(count: int = 40) -> tuple[TiedTable, TiedTable]:
    start = torch.randn(count, generator=torch.Generator().manual_seed(1))
    first, last = (TiedTable(start.clone(), start.clone(), first=first) for first in (True, False))
    return first, last


def own(end: TiedTable) -> Tensor:
    return end.read(0, len(end)).clone()


def step(end: TiedTable, seed: int) -> Tensor:
    moved = 0.01 * torch.randn(len(end), generator=torch.Generator().manual_seed(seed))
    end.phi.add_(moved)
    end.theta.add_(moved)
    return moved


def meet(first: TiedTable, last: TiedTable) -> None:
    parts = own(first), own(last)
    last.take(parts[0])
    first.take(parts[1])


def test_both_ends_have_the_sum_of_all_steps_however_late_and_often_they_meet() -> None:
    first, last = ends()
    wanted = first.phi.clone()
    for seed in range(12):
        wanted += step(first, seed) + step(last, 100 + seed)
        if seed % 5 == 1:
            late = own(last)
        if seed == 8:
            first.take(late)  # an old part comes once more
        if seed % 3 == 2:
            meet(first, last)
            meet(first, last)
            torch.testing.assert_close(first.phi, wanted)
            torch.testing.assert_close(last.phi, wanted)
    torch.testing.assert_close(first.theta, first.phi)


def test_a_table_whose_parts_are_lost_is_divided_at_the_next_meeting() -> None:
    for lost in (0, 1):
        pair = ends()
        for seed in range(3):
            for end in pair:
                step(end, seed)
            meet(*pair)
        before = [end.phi.clone() for end in pair]
        pair[lost].begin(known=False)  # as the archive gives it
        assert not own(pair[lost]).any()
        step(pair[1 - lost], 7)
        meet(*pair)
        meet(*pair)
        for end, was in zip(pair, before, strict=True):
            assert (end.phi - was).norm() < 0.05 * was.norm()
        torch.testing.assert_close(*(end.phi for end in pair))


def test_both_lost_go_on_from_the_table_of_the_first() -> None:
    first, last = ends()
    step(first, 1)
    for end in (first, last):
        end.begin(known=False)
    for _ in range(2):
        meet(first, last)
    step(first, 2)
    meet(first, last)
    torch.testing.assert_close(first.phi, last.phi)


def test_averaging_with_replicas_that_met_others_keeps_the_mean_of_own_parts() -> None:
    first, last = ends()
    other = TiedTable(first.phi.clone(), first.theta.clone(), first=True)
    step(last, 5)
    step(first, 6)
    mean = (own(first) + own(other)) / 2
    first.take(own(last))  # and `other` does not
    middle = (first.phi + other.phi) / 2
    first.phi.copy_(middle)
    other.phi.copy_(middle)
    torch.testing.assert_close((own(first) + own(other)) / 2, mean)


def test_a_false_part_is_clipped_to_what_is_usual() -> None:
    first, last = ends()
    for seed in range(10):
        step(last, seed)
        meet(first, last)
    before = first.phi.clone()
    first.take(own(last) + 1e4)
    usual = 0.01 * len(first) ** 0.5
    assert (first.phi - before).norm() < 4.0 * usual


def test_misshapen_parts_are_refused() -> None:
    replica = TorchReplica(manifest(TIED), 0)
    count = TIED.vocabulary * TIED.width
    nan = torch.full((count,), torch.nan, dtype=torch.float16).view(torch.uint8).numpy().data
    for bad in (
        WireTensor("f32", (count,), bytes(4 * count)),
        WireTensor("f16", (count - 1,), bytes(2 * count - 2)),
        WireTensor("f16", (count,), bytes(2 * count - 2)),
        WireTensor("f16", (count,), nan),
    ):
        with pytest.raises(RemoteFault):
            replica.take_table(bad)
    replica.message(1)
    assert not replica.take_table(WireTensor("f16", (count,), bytes(2 * count)))  # a boundary is marked


def text(step: int) -> Tensor:
    """Counting by one of three steps, so that something can be learnt, [4, T + 1]."""
    chance = torch.Generator().manual_seed(step)
    begin = torch.randint(50, (4, 1), generator=chance)
    by = torch.randint(1, 4, (4, 1), generator=chance)
    return (begin + by * torch.arange(TIED.context + 1)) % 50


def test_three_stages_of_a_tied_model_learn_what_one_plain_process_does() -> None:
    run = manifest(TIED, 1, optimizer="adamw", learning_rate=1e-3)
    plain = [StageReplica(run, 0)]
    chain = [TorchReplica(replace(run, pipeline=replace(run.pipeline, stages=3)), stage) for stage in range(3)]
    stages = [replica.stage for replica in chain]
    for number in range(100):
        train_on(plain, text(number))
        train_on(stages, text(number))
        plain[0].step(4 * number)
        for replica in chain:
            replica.step(4 * number)
        if number % 10 == 9:
            for replica in chain:
                replica.message(number)
                replica.apply(number, 1.0, [])
            marks = [replica.mark() for replica in (chain[0], chain[-1])]
            parts = chain[0].table_part(), chain[-1].table_part()
            assert chain[-1].take_table(parts[0]) and chain[0].take_table(parts[1])
            taken = [replica.mark() for replica in (chain[0], chain[-1])]
            assert all(one != before for one, before in zip(taken, marks, strict=True)), "weights moved without a step"
    nets = [plain_model(of, torch.float32) for of in (plain, stages)]
    one, three = (sum(mean_loss(net, text(5000 + number)).item() for number in range(8)) / 8 for net in nets)
    assert three < one + 0.1 < 2.0, (one, three)
