import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.model.tensor import DTYPES, MAGNITUDE_MAX, check_finite, decode, decode_tokens, encode


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2**32 - 1))
def test_there_and_back_is_bit_identical(name, shape, seed):
    dtype = DTYPES[name]
    raw = torch.randint(256, (math.prod(shape) * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    wire = WireTensor(name, tuple(shape), bytes(raw.tolist()))
    tensor = decode(wire)
    assert tensor.dtype == dtype and tensor.shape == torch.Size(shape)
    back = encode(tensor)
    assert (back.dtype, back.shape, bytes(back.data)) == (name, tuple(shape), bytes(wire.data))


def test_no_copy_of_contiguous_memory_either_way():
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    wire = encode(tensor)
    assert wire.nbytes == 12 and decode(wire).data_ptr() == tensor.data_ptr()
    assert torch.equal(decode(encode(tensor.T)), tensor.T)


def test_decoding_an_unaligned_slice_of_a_frame():
    values = torch.randn(64)
    frame = memoryview(b"x" + bytes(encode(values).data))[1:]
    assert torch.equal(decode(WireTensor("f32", (64,), frame)), values)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (WireTensor("c64", (1,), b"12345678"), "unknown dtype 'c64'"),
        (WireTensor("f32", (2,), b"1234"), "has 4 bytes; expected 8"),
        (WireTensor("f32", (1,), b"12345678"), "has 8 bytes; expected 4"),
        (WireTensor("f32", (-1, -2), b"12345678"), "bytes; expected"),
        (WireTensor("f32", (1,), b"1234", codec="topk"), "codec 'topk'"),
    ],
)
def test_misdescribed_bytes_are_refused(wire, reason):
    with pytest.raises(RemoteFault, match=reason):
        decode(wire)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2 * MAGNITUDE_MAX, -2 * MAGNITUDE_MAX])
@pytest.mark.parametrize("where", [0, 517, 999])
def test_one_bad_element_is_found(dtype, bad, where):
    tensor = torch.zeros(1000, dtype=dtype)
    check_finite(tensor, "t")
    tensor[where] = bad
    with pytest.raises(RemoteFault, match="what it is: not finite"):
        check_finite(tensor, "what it is")


def test_infinities_of_both_signs_do_not_cancel():
    with pytest.raises(RemoteFault):
        check_finite(torch.tensor([math.inf, -math.inf]), "t")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_tokens(dtype):
    ids = torch.tensor([[0, 1, 49], [49, 2, 3]])
    found, counts = decode_tokens(encode(ids.to(dtype)), 2, 50, "tokens")
    assert torch.equal(found, ids) and counts is None
    with pytest.raises(RemoteFault, match="tokens: token id 49 in a vocabulary of 49"):
        decode_tokens(encode(ids.to(dtype)), 2, 49, "tokens")
    with pytest.raises(RemoteFault, match=r"shape \[2, 3\]; expected \[any, 4\]"):
        decode_tokens(encode(ids.to(dtype)), 3, 50, "tokens")
    with pytest.raises(RemoteFault, match="dtype 'i64'; expected u16 or u32"):
        decode_tokens(encode(ids), 2, 50, "tokens")
