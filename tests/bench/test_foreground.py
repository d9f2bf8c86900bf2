"""`bench foreground` runs to its end: one pair of compilations beside a real node, and a moment of a paused one."""

import pytest

from swarmnode.app.bench import foreground


@pytest.mark.nightly
def test_a_node_at_work_and_a_paused_one_are_compared() -> None:
    found = foreground.run(priority="normal", pairs=1, idle_s=1.0)
    told = found["foreground"]
    assert told["least"] == told["most"] == told["ratio beside a working node, median"] > 0
    assert told["compilation beside a paused node / s"] > 0 and told["pairs"] == 1
    assert 0 <= found["paused node, share of a core"] < found["cores"]
