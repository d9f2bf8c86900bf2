"""Activations as they travel: bounds, bytes, and whatever a peer may send instead."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import RemoteFault
from swarmnode.manifest import boundary_nbytes
from swarmnode.model.stage_input import decode_boundary, encode_boundary
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.ports import WireTensor

ERROR = 0.5 / 127 + 2**-8  # of a block's largest


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 5),
    width=st.sampled_from([2, 63, 64, 65, 192]),
    exponent=st.integers(-30, 16),
)
@settings(max_examples=30)
def test_error_is_bounded_and_bytes_are_the_formula(batch: int, length: int, width: int, exponent: int) -> None:
    x = normal((batch, length, width), exponent) * 2.0**exponent
    wire = encode_boundary(x, "int8")
    assert (wire.codec, wire.dtype, wire.shape) == ("int8", "f32", (batch, length, width))
    assert wire.nbytes == boundary_nbytes("int8", batch * length, width)
    out = decode_boundary(wire, "int8", (batch, length, width), "x").float()
    for start in range(0, width, 64):
        part = x[..., start : start + 64]
        got = out[..., start : start + 64]
        most = part.abs().amax(2, keepdim=True)
        assert ((got - part).abs() <= most * ERROR).all()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp64"])
def test_whole_numbers_travel_as_they_are(kind: str) -> None:
    x = normal((2, 3, 8)).to(torch.bfloat16)
    assert torch.equal(decode_boundary(encode_boundary(x, kind), kind, (2, 3, 8), "x").to(torch.bfloat16), x)


def test_layout_is_frozen() -> None:
    x = torch.tensor([127.0, -1.0, 0.0, 63.5]).view(1, 1, 4)
    assert bytes(encode_boundary(x, "int8").data).hex() == "803f" + "7fff0040"  # step 1.0; 127, -1, 0, 64 (to even)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: replace(w, codec="raw"),
        lambda w: replace(w, dtype="u8"),
        lambda w: replace(w, shape=(2, 3, 7)),
        lambda w: replace(w, shape=(6, 8)),
        lambda w: replace(w, shape=(2, 0, 8)),
        lambda w: replace(w, data=bytes(w.data)[:-1]),
        lambda w: replace(w, data=bytes(w.data) + b"\0"),
        lambda w: replace(w, data=b"\xc0\x7f" * 6 + bytes(w.data)[12:]),
        lambda w: replace(w, data=b"\x7f\x7f" * 6 + bytes(w.data)[12:]),
    ],
)
def test_malformed_activations_are_refused(spoil: object) -> None:
    wire = encode_boundary(normal((2, 3, 8)), "int8")
    with pytest.raises(RemoteFault, match="input of a test"):
        decode_boundary(spoil(wire), "int8", (None, 3, 8), "input of a test")  # type: ignore[operator]


@given(data=st.binary(min_size=60, max_size=60))
def test_any_bytes_are_refused_or_finite(data: bytes) -> None:
    try:
        out = decode_boundary(WireTensor("f32", (2, 3, 8), data, "int8"), "int8", (2, 3, 8), "x")
    except RemoteFault:
        return
    assert out.isfinite().all() and float(out.abs().max()) <= MAGNITUDE_MAX * 1.01
