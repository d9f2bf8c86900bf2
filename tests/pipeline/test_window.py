"""The feeder's window settles where every stage is at work and little waits."""

from __future__ import annotations

import pytest

from swarmnode.pipeline.window import QUEUED_HIGH, Window


@pytest.mark.parametrize("knee", [1, 2, 4, 8])
def test_it_settles_a_little_above_the_knee(knee: int) -> None:
    """A pipeline that carries `knee` microbatches without queueing: more only wait."""
    window = Window(1.0, 64)
    sizes = []
    for _ in range(2000):
        window.completed(max(1.0, window.size / knee))
        sizes.append(window.size)
    settled = sizes[1000:]
    assert sorted(settled)[len(settled) // 10] >= knee, "but for the moments of a probe"
    assert max(settled) <= knee + QUEUED_HIGH + 2


def test_bounds_and_losses() -> None:
    window = Window(3.0, 4)
    for _ in range(100):
        window.completed(1.0)
    assert window.size == 4
    window.lost()
    assert window.size == 2
    for _ in range(10):
        window.lost()
    assert window.size == 1


def test_a_base_that_no_longer_holds_is_forgotten() -> None:
    window = Window(4.0, 64)
    window.completed(0.001)
    for _ in range(600):
        window.completed(1.0)
    assert window.size > 4, "after the path became slower for good, the window grows again"
