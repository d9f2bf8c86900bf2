"""Samples by number: all text in two epochs, the same on every machine; and with a loss mask, as they travel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.data.sample import IGNORED, SampleBatch, counted_targets
from swarmnode.data.sampler import Permutation, Sampler, Windows, spread
from swarmsim.replica import fake


@given(size=st.integers(1, 2**61), key=st.integers(0, 2**64 - 1), data=st.data())
@settings(max_examples=100, deadline=None)
def test_permutation_of_any_size_is_injective_and_elementwise(size: int, key: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=50))
    permutation = Permutation(size, key)
    image = permutation(np.array(values, dtype=np.int64))
    assert len(set(image.tolist())) == len(values)
    assert all(0 <= x < size for x in image.tolist())
    assert image.tolist() == [int(permutation(v)) for v in values]


def test_permutation_mixes() -> None:
    size = 10_000
    image = Permutation(size, 1)(np.arange(size))
    assert np.count_nonzero(image == np.arange(size)) < 10  # 1 expected
    steps = np.diff(image)
    assert np.count_nonzero(steps == 1) < 10
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.05
    assert not np.array_equal(image, Permutation(size, 2)(np.arange(size)))


@given(
    length=st.integers(0, 200),
    context=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_batches_equal_a_dumb_twin(length: int, context: int, seed: int, data: st.DataObject) -> None:
    tokens = np.arange(length, dtype=np.uint16)
    twin = [tokens[start : start + context + 1].tolist() for start in range(0, length - context, context)]
    rest = (length - 1) % context
    later = [tokens[start : start + context + 1].tolist() for start in range(rest, length - context, context)]
    windows = Windows(tokens, context)
    assert windows.count == len(twin)
    if not twin:
        with pytest.raises(ValueError, match="no window"):
            Sampler(windows, seed)
        return
    assert windows.gather(np.arange(len(twin))).tokens.tolist() == twin
    sampler = Sampler(windows, seed)
    epochs = 3
    everything = sampler.batch(range(epochs * len(twin))).tokens
    for epoch in range(epochs):
        seen = everything[epoch * len(twin) : (epoch + 1) * len(twin)].tolist()
        assert sorted(seen) == sorted(later if epoch % 2 else twin)
    assert set(everything[: 2 * len(twin)].ravel().tolist()) == set(range(length)), "two epochs read all of the text"
    asked = data.draw(st.lists(st.integers(0, epochs * len(twin) - 1), min_size=1, max_size=8))
    batch = sampler.batch(asked).tokens
    assert batch.shape == (len(asked), context + 1)
    assert batch.flags.c_contiguous and batch.dtype == np.uint16
    assert batch.tolist() == everything[asked].tolist()


@given(count=st.integers(0, 500), wanted=st.integers(1, 100))
def test_spread_is_even_and_distinct(count: int, wanted: int) -> None:
    found = spread(count, wanted).tolist()
    assert len(found) == min(count, wanted) == len(set(found))
    assert all(0 <= x < count for x in found)
    gaps = np.diff(found)
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


def test_the_order_of_samples_is_frozen() -> None:
    """A change of it is a change of every run."""
    sampler = Sampler(Windows(np.arange(100_001, dtype=np.uint32), 10), seed=7)
    found = sampler.batch([0, 1, 9_999, 10_000, 123_456]).tokens[:, 0].tolist()
    assert found == [94130, 55410, 97540, 49180, 20650]


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
