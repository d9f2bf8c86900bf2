"""Packing against a twin that writes one bit at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.compression.modular_kernels import packed_nbytes
from swarmnode_methods.low_bit import PLANES, TilePacker

CPU = torch.device("cpu")


def twin(codes: list[int], bits: int) -> bytes:
    out, shift = b"", 0
    for width in PLANES[bits]:
        plane = sum((code >> shift & (1 << width) - 1) << i * width for i, code in enumerate(codes))
        out += plane.to_bytes(len(codes) * width // 8, "little")
        shift += width
    return out


@pytest.mark.parametrize("bits", PLANES)
@given(codes=st.lists(st.integers(0, 255), min_size=8, max_size=136).map(lambda c: c[: len(c) // 8 * 8]))
def test_twin_and_back(bits: int, codes: list[int]) -> None:
    packer, given_codes = TilePacker(136, CPU), torch.tensor(codes, dtype=torch.uint8)
    packed = torch.empty(packed_nbytes(len(codes), bits), dtype=torch.uint8)
    packer.pack(given_codes, bits, packed)
    assert packed.numpy().tobytes() == twin(codes, bits)
    assert given_codes.tolist() == codes  # what was given is not used up
    out = torch.empty(len(codes), dtype=torch.uint8)
    packer.unpack(packed, bits, out)
    assert out.tolist() == [code % (1 << bits) for code in codes]
