"""The running mean of weights: against the weighted mean written out, and as old as it says."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.model import running_mean
from swarmnode.model.running_mean import UPDATES, RunningMean, weight_of


@given(st.floats(0.01, 0.5), st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_twin(share: float, gaps: list[int]):
    mean = RunningMean(share)
    seen = []
    last = 0
    total = 50
    for gap in gaps:
        total += gap
        value = float(total % 17)
        mean.see(torch.full((3,), value), total)
        if not seen or (total - last) >= share * total / UPDATES:
            seen.append((total, value))
            last = total
    shares = [(a / b) ** (1.0 / share - 1.0) for (a, _), (b, _) in itertools.pairwise(seen)]
    expected = seen[0][1]
    for kept, (_, value) in zip(shares, seen[1:], strict=True):
        expected = kept * expected + (1.0 - kept) * value
    torch.testing.assert_close(mean.value, torch.full((3,), expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("share", "step"), [(0.02, 8), (0.07, 8), (0.07, 64), (0.2, 64), (0.5, 64)])
def test_its_weights_are_as_old_as_it_says_at_any_time(share: float, step: int):
    mean = RunningMean(share)
    for total in range(step, 20_001, step):
        mean.see(torch.tensor([float(total)]), total)
        if total in (8_000, 16_000):
            assert total - mean.value.item() == pytest.approx(share * total, rel=0.1)


@pytest.mark.parametrize("beside", [False, True])
def test_parts_of_large_weights_take_turns(beside: bool, monkeypatch: pytest.MonkeyPatch):
    """Each part follows the rule from its own last update on; none waits for ever."""
    monkeypatch.setattr(running_mean, "PART", 2)
    monkeypatch.setattr(running_mean, "CALLS", 3)
    mean = RunningMean(0.25, beside=beside)
    alone = [RunningMean(0.25) for _ in range(3)]
    for number, total in enumerate(range(100, 1100, 100)):
        weights = torch.arange(5.0) + total
        mean.see(weights, total)
        for part, one in enumerate(alone):
            if number == 0 or (number - 1) % 3 == part:
                one.see(weights[2 * part : 2 * part + 2], total)
        assert mean.value is not None
        assert mean.value.tolist() == [each for one in alone if one.value is not None for each in one.value.tolist()]
        assert mean.span == min(one.span for one in alone)


def test_nothing_is_counted_twice_and_nothing_backwards():
    mean = RunningMean(0.07)
    for total in (500, 1000, 1000, 900):
        mean.see(torch.tensor([float(total)]), total)
    value = mean.value.item()
    assert mean.span == 500
    mean.see(torch.tensor([1e9]), 1000)
    mean.see(torch.tensor([1e9]), 0)
    assert mean.value.item() == value


@given(st.floats(0.01, 0.5), st.integers(0, 10**9), st.integers(0, 10**9))
def test_weights_of_means(share: float, span: int, total: int):
    assert 0.0 < weight_of(share, min(span, total), total) <= 1.0
    assert weight_of(share, total, total) == 1.0
    assert weight_of(share, total + 64, total) == 1.0  # steps counted by rounds, ahead of the samples heard of
    assert weight_of(share, total // 2, total) >= weight_of(share, total // 4, total)
