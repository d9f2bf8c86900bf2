"""What the directory costs its busiest node, in virtual time."""

import pytest

from benchmarks.swarm import directory

KBITS_MAX = 200.0


@pytest.mark.parametrize("nodes", [12, pytest.param(96, marks=pytest.mark.nightly)])
def test_no_node_of_a_hundred_is_busy_with_records(nodes: int) -> None:
    row = directory.run(nodes)
    assert not row["failures"], row
    assert row["busiest_kbits"] <= KBITS_MAX, row
