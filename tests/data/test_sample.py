"""Samples with a loss mask: in memory, as they travel, and how many targets of them count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.data.sample import IGNORED, SampleBatch, counted_targets
from swarmnode.errors import RemoteFault
from swarmnode.ports import WireTensor
from swarmsim.replica import fake

END = 3


def twin(tokens: list[list[int]], mask: list[list[bool]] | None, end: int | None) -> list[list[int]]:
    """Targets, one by one."""
    found = []
    for row, ids in enumerate(tokens):
        targets = []
        for at in range(1, len(ids)):
            counts = (mask is None or mask[row][at]) and (end is None or ids[at - 1] != end)
            targets.append(ids[at] if counts else IGNORED)
        found.append(targets)
    return found


@given(data=st.data(), samples=st.integers(1, 4), length=st.integers(2, 9), wide=st.booleans(), masked=st.booleans())
def test_targets_and_their_number_equal_a_dumb_twin(
    data: st.DataObject, samples: int, length: int, wide: bool, masked: bool
) -> None:
    row = st.lists(st.integers(0, 5), min_size=length, max_size=length)
    tokens = data.draw(st.lists(row, min_size=samples, max_size=samples))
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = data.draw(st.lists(flags, min_size=samples, max_size=samples)) if masked else None
    batch = SampleBatch(np.array(tokens, "<u4" if wide else "<u2"), None if mask is None else np.array(mask))
    wire = batch.to_wire()
    assert wire.shape == (samples, length) and wire.dtype == ("u32" if wide or masked else "u16")
    for end in (None, END):
        expected = twin(tokens, mask, end)
        assert batch.targets(end).tolist() == expected
        assert counted_targets(wire, end) == sum(target != IGNORED for targets in expected for target in targets)


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RemoteFault, match=r"tokens u32\[2, 5\] of 39 bytes"):
        counted_targets(WireTensor("u32", (2, 5), bytes(39)))


def test_declared_bytes_of_the_simulator_can_be_counted() -> None:
    tokens = fake("u16", (4, 9), 2, b"\1\0\3\0\5\0\7\0")
    assert counted_targets(tokens) == 32
    assert counted_targets(tokens, END) == 24
