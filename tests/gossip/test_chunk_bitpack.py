"""Packing by chunks against a twin that goes code by code."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.compression.modular_kernels import WIDTHS, pack, packed_nbytes, unpack


def sixes(codes: list[int]) -> bytes:
    part = len(codes) // 4
    last = codes[3 * part :]
    return bytes(codes[k * part + i] | (last[i] >> 2 * k & 3) << 6 for k in range(3) for i in range(part))


def twin(codes: list[int], bits: int) -> bytes:
    codes = [code % (1 << bits) for code in codes]
    if bits == 6:
        return sixes(codes)
    half = len(codes) // 2
    pairs = [a | b << bits for a, b in zip(codes[:half], codes[half:], strict=True)]
    return bytes(pairs) if bits == 4 else sixes(pairs)


@pytest.mark.parametrize("bits", WIDTHS)
@given(rows=st.integers(1, 9), seed=st.integers(0, 1000))
def test_twin_and_back(bits: int, rows: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 256, 64 * rows, np.uint8)
    packed = pack(codes, bits)
    assert packed.tobytes() == twin(codes.tolist(), bits) and packed.size == packed_nbytes(codes.size, bits)
    assert unpack(packed, bits).tolist() == [code % (1 << bits) for code in codes.tolist()]


def test_any_other_width_is_ours_to_mend() -> None:
    with pytest.raises(AssertionError, match="codes of 5 bits"):
        pack(np.zeros(64, np.uint8), 5)
