"""What every codec keeps: bytes by its formula, any part read alone, and nothing of a peer's bytes believed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import ManifestError, RemoteFault
from swarmnode.base.header import check_spec
from swarmnode.base.ports import WireTensor
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.compression.codec import CHUNK, TILE
from swarmnode_methods.modular import ESCAPE_NBYTES
from tests.support.fake_device import Elsewhere, elsewhere
from tests.support.method_tables import CODECS

pytestmark = pytest.mark.node  # some seconds

every_codec = pytest.mark.parametrize("name", sorted(CODECS))
SMALL = 4100  # a chunk of top-k, and a part of one
SPOIL: dict[str, Callable[[WireTensor], list[WireTensor]]] = {
    "none": lambda t: [],
    "two": lambda t: [t, t],
    "codec": lambda t: [replace(t, codec="other")],
    "dtype": lambda t: [replace(t, dtype="u8")],
    "dimensions": lambda t: [replace(t, shape=(2, SMALL // 2))],
    "size": lambda t: [replace(t, shape=(SMALL + 1,))],
    "cut": lambda t: [replace(t, data=bytes(t.data)[:-1])],
    "longer": lambda t: [replace(t, data=bytes(t.data) + b"\0")],
    "an escape more": lambda t: [replace(t, data=bytes(t.data) + bytes(ESCAPE_NBYTES))],
    "empty": lambda t: [replace(t, data=b"")],
}


def flats(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slow weights, the sender's fast ones, the receiver's fast ones), which are near each other."""
    draw = torch.Generator().manual_seed(size)
    phi, one, two = torch.randn(3, size, generator=draw)
    return phi, phi + 1e-3 * one, phi + 1e-3 * two


def decoded(name: str, tensors: list[WireTensor], ours: torch.Tensor) -> torch.Tensor | None:
    """What the packet says, or None where it is refused; then nothing was written."""
    out = torch.full_like(ours, 3.0)
    try:
        codec(name).decode(tensors, out, ours)
    except RemoteFault as error:
        assert f"{name} packet" in str(error) and torch.equal(out, torch.full_like(ours, 3.0))
        return None
    return out


def harmless(out: torch.Tensor | None) -> bool:
    return out is None or (bool(torch.isfinite(out).all()) and float(out.abs().max()) <= 2e6)


@every_codec
@pytest.mark.parametrize("size", [1, 65, SMALL])
def test_a_packet_has_the_bytes_of_its_formula_and_memory_of_its_own(name: str, size: int) -> None:
    phi, flat, ours = flats(size)
    kept = flat.clone()
    coder = codec(name)
    tensors = coder.encode(flat, reference=phi, seed=7)
    assert len(tensors) == coder.tensors
    assert check_spec(tensors[0].spec(), coder.nbytes(size)) <= coder.nbytes(size)
    sent = bytes(tensors[0].data)
    flat.fill_(7.0)
    assert bytes(tensors[0].data) == sent == bytes(codec(name).encode(kept, reference=phi, seed=7)[0].data)
    assert decoded(name, tensors, ours) is not None


@every_codec
def test_any_part_is_read_into_any_buffer_from_any_address(name: str) -> None:
    size = TILE + CHUNK + 70
    unit = 1 << 17
    phi, flat, ours = flats(size)
    coder = codec(name)
    tensors = coder.encode(flat, reference=phi, seed=3)
    whole = decoded(name, tensors, ours)
    assert whole is not None
    by_block = ((0, 64), (64, CHUNK + 128), (CHUNK - 64, CHUNK + 64), (TILE - 192, size))
    for start, end in (*(() if coder.of_delta else by_block), (0, 4096), (8192, 8192 + unit), (unit, size)):
        out = torch.empty(end - start, dtype=torch.float64)
        coder.read(tensors, start, out, ours[start:end].double())
        torch.testing.assert_close(out.float(), whole[start:end], rtol=1e-5, atol=1e-9)
    frame = b"x" + bytes(tensors[0].data)  # at an odd address, as slices of a frame are
    shifted = decoded(name, [replace(tensors[0], data=memoryview(frame)[1:])], ours)
    assert shifted is not None and torch.equal(shifted, whole)


@every_codec
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
@pytest.mark.parametrize("where", [0, CHUNK + 3])
def test_numbers_that_are_not_finite_are_refused_before_anything_is_written(
    name: str, value: float, where: int
) -> None:
    phi, flat, ours = flats(CHUNK + 5)
    flat[where] = value
    try:
        tensors = codec(name).encode(flat, reference=phi, seed=1)
    except RuntimeError:
        return  # our own arithmetic refused it
    out = decoded(name, tensors, ours)
    assert out is None or (CODECS[name].of_delta and harmless(out))


@every_codec
@pytest.mark.parametrize("spoil", SPOIL)
def test_another_format_is_refused(name: str, spoil: str) -> None:
    phi, flat, ours = flats(SMALL)
    tensor = codec(name).encode(flat, reference=phi, seed=1)[0]
    codec(name).check([tensor], SMALL)
    assert decoded(name, SPOIL[spoil](tensor), ours) is None


@every_codec
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=12),
    cut=st.integers(0, 2),
    escapes=st.booleans(),
)
def test_changed_bytes_are_refused_or_finite(
    name: str, changes: list[tuple[int, int]], cut: int, escapes: bool
) -> None:
    phi, flat, ours = flats(200)
    sender = codec(name)
    if escapes and sender.relative:
        sender.decode(codec(name).encode(flat, reference=phi), torch.empty(200), ours + 1)
    data = bytearray(sender.encode(flat, reference=phi, seed=1)[0].data)
    for where, value in changes:
        data[where % len(data)] = value
    out = decoded(name, [WireTensor("f32", (200,), bytes(data[: len(data) - cut]), name)], torch.zeros(200))
    assert harmless(out) and (out is None or cut == 0)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_dense_codecs_send_the_nearest_number_ties_to_even(name: str) -> None:
    step = 2.0**-7
    flat = torch.cat([flats(SMALL)[0], torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, 1 + step * 0.51])])
    out = decoded(name, codec(name).encode(flat), flat)
    assert out is not None and torch.equal(out, flat if name == "fp32" else flat.bfloat16().float())
    assert name == "fp32" or out[-4:].tolist() == [1.0, 1 + 2 * step, -1.0, 1 + step]


def test_an_unknown_codec_is_the_operators_error() -> None:
    with pytest.raises(ManifestError, match=r"'zip'.*fp32, bf16"):
        codec("zip")


PARAMETERS = TILE + 5_000  # a tile, and a part of one whose last block is not whole


@pytest.mark.parametrize("name", sorted(CODECS))
def test_packets_and_what_is_decoded_are_the_same_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(PARAMETERS, generator=generator)
    phi, ours = (theta + 0.01 * torch.randn(PARAMETERS, generator=generator) for _ in range(2))
    here, there, reader_here, reader_there = (codec(name) for _ in range(4))
    relative = here.relative
    for seed in (3, 4):  # the second packet has what was left of the first, or escapes
        expected = here.encode(theta, reference=phi if relative else None, seed=seed)
        decoded = torch.empty(PARAMETERS)
        reader_here.decode(expected, decoded, ours if relative else None)
        with elsewhere(monkeypatch) as device:
            reference, own = (phi.to(device), ours.to(device)) if relative else (None, None)
            found = there.encode(theta.to(device), reference=reference, seed=seed)
            out = torch.empty(PARAMETERS, device=device)
            reader_there.decode(found, out, own)
        assert [bytes(tensor.data) for tensor in found] == [bytes(tensor.data) for tensor in expected]
        assert isinstance(out, Elsewhere) and torch.equal(out.inner, decoded)
