"""Dense codecs: what travels is what was meant, and nothing else is believed."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ManifestError, RemoteFault
from swarmnode.gossip.compression import codec
from swarmnode.gossip.compression.codec import BLOCK
from swarmnode.header import check_spec
from swarmnode.ports import WireTensor

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


@pytest.mark.parametrize("name", CODECS)
def test_any_range_into_any_buffer(name: str) -> None:
    coder = codec(name)
    flat = torch.randn(BLOCK + 50, generator=torch.Generator().manual_seed(0))
    tensors = coder.encode(flat)
    whole = torch.empty_like(flat)
    coder.decode(tensors, whole)
    coder.check(tensors, flat.numel())
    out = torch.empty(BLOCK + 9, dtype=torch.float64)
    coder.read(tensors, 41, out)
    assert torch.equal(out, whole[41:].double())
    # Bytes that lie at an odd address, as slices of a frame do.
    frame = b"x" + bytes(tensors[0].data)
    shifted = torch.empty_like(flat)
    coder.decode([replace(tensors[0], data=memoryview(frame)[1:])], shifted)
    assert torch.equal(shifted, whole)


def test_bf16_ties_go_to_even() -> None:
    step = 2.0**-7
    tensors = codec("bf16").encode(torch.tensor([1 + step / 2, 1 + 3 * step / 2, -(1 + step / 2), 1 + step * 0.51]))
    out = torch.empty(4)
    codec("bf16").decode(tensors, out)
    assert out.tolist() == [1.0, 1 + 2 * step, -1.0, 1 + step]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("where", [0, BLOCK - 1, BLOCK, BLOCK + 2])
def test_not_finite_is_refused_before_anything_is_written(name: str, value: float, where: int) -> None:
    flat = torch.zeros(BLOCK + 3)
    flat[where] = value
    out = torch.ones_like(flat)
    coder = codec(name)
    with pytest.raises(RemoteFault, match=f"{name} packet"):
        coder.decode(coder.encode(flat), out)
    assert torch.equal(out, torch.ones_like(flat))


def good(name: str, size: int = 6) -> WireTensor:
    return codec(name).encode(torch.ones(size))[0]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: [],
        lambda t: [t, t],
        lambda t: [replace(t, codec="topk")],
        lambda t: [replace(t, dtype="f16")],
        lambda t: [replace(t, dtype="u8")],
        lambda t: [replace(t, shape=(2, 3))],
        lambda t: [replace(t, shape=(7,))],
        lambda t: [replace(t, data=bytes(t.data)[:-1])],
        lambda t: [replace(t, data=bytes(t.data) + b"\0")],
        lambda t: [replace(t, data=b"")],
    ],
)
def test_wrong_format_is_refused(name: str, spoil: object) -> None:
    assert callable(spoil)
    with pytest.raises(RemoteFault, match=f"{name} packet of"):
        codec(name).check(spoil(good(name)), 6)


@given(st.binary(max_size=64), st.sampled_from(sorted(CODECS)))
def test_garbage_is_refused_or_finite(data: bytes, name: str) -> None:
    tensor = replace(good(name), data=data)
    out = torch.full((6,), 3.0)
    try:
        codec(name).decode([tensor], out)
    except RemoteFault:
        assert torch.equal(out, torch.full((6,), 3.0))
    else:
        assert len(data) == codec(name).nbytes(6) and torch.isfinite(out).all()


def test_unknown_codec_is_the_operators_error() -> None:
    with pytest.raises(ManifestError, match=r"'zip'.*fp32, bf16"):
        codec("zip")
