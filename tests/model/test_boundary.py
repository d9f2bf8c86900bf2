"""Activations as they travel: bounds, bytes, and whatever a peer may send instead."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.model.boundary_code import decode_boundary, encode_boundary
from swarmnode.model.tensor import MAGNITUDE_MAX, cosine
from swarmnode.run.manifest import boundary_codes, boundary_nbytes
from swarmnode.trust.verdict import AnswerSimilarity, exact_distance

ERROR = {
    "int8": 0.5 / 127 + 2**-8,
    "int4": 0.25,
    "int2": 0.6,
}  # of a block's largest; of its root mean square, of normal numbers


CODED = ("int8", "int4", "int2")


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
    for kind, nbytes in (
        ("int8", width + 2 * -(-width // 64)),
        ("int4", 34 * -(-width // 64)),
        ("int2", 18 * -(-width // 64)),
    ):
        wire = encode_boundary(x, kind)
        assert (wire.codec, wire.dtype, wire.shape) == (kind, "f32", (batch, length, width))
        assert wire.nbytes == boundary_nbytes(kind, batch * length, width) == batch * length * nbytes
        out = decode_boundary(wire, kind, (batch, length, width), "x").float()
        for start in range(0, width, 64):
            part = x[..., start : start + 64]
            lost = out[..., start : start + 64] - part
            if kind == "int8":
                assert (lost.abs() <= part.abs().amax(2, keepdim=True) * ERROR[kind]).all()
            elif part.shape[2] == 64:
                assert (lost.norm(dim=2) <= part.norm(dim=2) * ERROR[kind]).all()


@pytest.mark.parametrize(("kind", "error"), [("int4", 0.0095), ("int2", 0.1175)])
def test_few_bits_have_the_error_of_max_1960_and_spread_an_outlier(kind: str, error: float) -> None:
    x = normal((2, 512, 256))
    lost = [(decode_boundary(encode_boundary(x, kind), kind, x.shape, "x").float() - x).square()]
    assert float(lost[0].mean()) == pytest.approx(error, rel=0.05)
    x[..., 5] *= 100.0
    lost.append((decode_boundary(encode_boundary(x, kind), kind, x.shape, "x").float() - x).square())
    assert torch.equal(lost[0][..., 64:], lost[1][..., 64:])  # its own tile's alone
    assert float(lost[1][..., 6:64].mean()) < 2.0 * error * float(x[..., :64].square().mean())


def test_codes_are_those_of_a_sample_alone_and_of_any_batch() -> None:
    x = normal((3, 4, 192))
    for kind in CODED:
        whole = decode_boundary(encode_boundary(x, kind), kind, x.shape, "x")
        alone = torch.cat([decode_boundary(encode_boundary(one, kind), kind, one.shape, "x") for one in x.split(1)])
        assert torch.equal(whole, alone)


@pytest.mark.parametrize("apart", [0.006, 0.04])
@pytest.mark.parametrize("boundary", ["bf16", "int8", "int4", "int4_int2"])
def test_what_devices_differ_by_is_no_other_answer(boundary: str, apart: float) -> None:
    """An answer of the very weights stays one after the coding, and another answer stays another."""
    x = normal((2, 64, 128))
    noise = normal((2, 64, 128), seed=1)
    for code in boundary_codes(boundary):
        coded = [
            decode_boundary(encode_boundary(x + share * noise, code), code, x.shape, "x") for share in (0.0, apart, 0.3)
        ]
        near, far = (AnswerSimilarity(cosine(coded[0], one), exact=exact_distance(boundary)) for one in coded[1:])
        assert near.same and not far.same


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp64"])
def test_whole_numbers_travel_as_they_are(kind: str) -> None:
    x = normal((2, 3, 8)).to(torch.bfloat16)
    assert torch.equal(decode_boundary(encode_boundary(x, kind), kind, (2, 3, 8), "x").to(torch.bfloat16), x)


def test_equal_tokens_have_other_errors_at_other_places() -> None:
    """So that errors of a step do not add up."""
    x = normal((1, 1, 64)).expand(1, 256, 64)
    for kind, error in (("int4", 0.0095), ("int2", 0.1175)):
        lost = decode_boundary(encode_boundary(x, kind), kind, x.shape, "x").float() - x
        lost = lost + error * x  # levels of least error are so much short
        assert float(lost.sum(1).norm()) < 0.25 * float(lost.norm(dim=2).sum())


def test_layout_is_frozen() -> None:
    x = torch.tensor([127.0, -1.0, 0.0, 63.5]).view(1, 1, 4)
    assert bytes(encode_boundary(x, "int8").data).hex() == "803f" + "7fff0040"  # step 1.0; 127, -1, 0, 64 (to even)
    x = torch.arange(64.0).sub_(20.0).view(1, 1, 64)
    assert bytes(encode_boundary(x, "int4").data).hex() == (
        "ae41c84338a76c4ccea57677d639b4c83784499ad679b4c253a68b7929f47c34eccb"
    )
    assert bytes(encode_boundary(x, "int2").data).hex() == "ae41e02973f955d29e196ad68c49a62d70ff"


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
@pytest.mark.parametrize("kind", CODED)
def test_malformed_activations_are_refused(kind: str, spoil: object) -> None:
    wire = encode_boundary(normal((2, 3, 8)), kind)
    with pytest.raises(RemoteFault, match="input of a test"):
        decode_boundary(spoil(wire), kind, (None, 3, 8), "input of a test")  # type: ignore[operator]


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_refused_by_the_receiver(kind: str, wrong: float) -> None:
    x = normal((1, 2, 128))
    x[0, 1, 70] = wrong
    with pytest.raises(RemoteFault, match="not finite"):
        decode_boundary(encode_boundary(x, kind), kind, (1, 2, 128), "x")


@pytest.mark.parametrize("kind", CODED)
@given(data=st.binary(min_size=204, max_size=204))
def test_any_bytes_are_refused_or_finite(kind: str, data: bytes) -> None:
    data = data[: boundary_nbytes(kind, 6, 8)]
    try:
        out = decode_boundary(WireTensor("f32", (2, 3, 8), data, kind), kind, (2, 3, 8), "x")
    except RemoteFault:
        return
    assert out.isfinite().all() and float(out.abs().max()) <= MAGNITUDE_MAX * 1.01
