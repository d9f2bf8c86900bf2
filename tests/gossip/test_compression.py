"""Dense codecs: what travels is what was meant, and nothing else is believed."""

import pytest
import torch

from swarmnode.gossip.compression import codec
from swarmnode.gossip.compression.codec import BLOCK
from swarmnode.header import check_spec

CODECS = ("fp32", "bf16")
SIZES = (1, 7, BLOCK, BLOCK + 1, 2 * BLOCK + 5)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", SIZES)
def test_there_and_back(name: str, size: int) -> None:
    coder = codec(name)
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size))
    kept = flat.clone()
    tensors = coder.encode(flat)
    assert len(tensors) == coder.tensors
    assert sum(check_spec(tensor.spec(), coder.nbytes(size)) for tensor in tensors) == coder.nbytes(size)
    flat.fill_(7.0)  # what travels has its own memory
    out = torch.empty(size)
    codec(name).decode(tensors, out)
    if coder.lossy:
        assert ((out - kept).abs() <= kept.abs() * 2.0**-8).all()
        assert torch.equal(out, kept.bfloat16().float())  # to nearest, ties to even: torch's own rounding
    else:
        assert torch.equal(out, kept)


def test_bf16_ties_go_to_even() -> None:
    step = 2.0**-7
    tensors = codec("bf16").encode(torch.tensor([1 + step / 2, 1 + 3 * step / 2, -(1 + step / 2), 1 + step * 0.51]))
    out = torch.empty(4)
    codec("bf16").decode(tensors, out)
    assert out.tolist() == [1.0, 1 + 2 * step, -1.0, 1 + step]
