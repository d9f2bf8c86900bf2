"""Codecs of pseudo-gradients: layouts to the byte, residuals, contraction; and the groups that use them."""

import hashlib
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch

from swarmnode.base.errors import ManifestError, RemoteFault
from swarmnode.base.ports import Packet, WireTensor
from swarmnode.train.gossip.compression import codec
from swarmnode_methods.delta import DECAY, DeltaCodec
from swarmnode_methods.partial_average import PartialAverage
from swarmnode_methods.topk import KERNELS, TopK

pytestmark = pytest.mark.node  # some seconds

NEAREST = ("lloyd4", "lloyd3", "lloyd2", "huffman")
NAMES = ("e3m0", "ternary", *NEAREST, "topk512", "topk64", "topk", "powersgd")
UNBIASED = ("e3m0", "ternary")
SIZES = (1, 64, 100, 4096, 4100, 140_000)


def heavy(size: int, seed: int = 0) -> torch.Tensor:
    """Numbers with heavy tails, as pseudo-gradients have."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=draw) * torch.randn(size, generator=draw).exp() * 1e-3


class Short(TopK):
    """The example of topk.py's docstring."""

    name = "short"
    k = 4
    chunk = 16
    unit = 16


def test_the_layout_of_topk_is_frozen() -> None:
    """A change here would make two versions misread each other: it needs a new codec name. Among these is a mean
    halfway between two of float16, once it is of float32."""
    chunks = torch.cat([heavy(4096, seed) for seed in (0, 793)])
    assert hashlib.sha256(bytes(codec("topk64").encode(chunks)[0].data)).hexdigest() == FROZEN


FROZEN = "17ca83a99d7423227b4fa1cdc67d43af36a950bee7e184f3e92e787e7f5f66ba"


@pytest.mark.parametrize("name", ["short", "topk64", "topk512"])
@pytest.mark.parametrize("size", [100, 66 * 4096 + 100])
@pytest.mark.parametrize(
    "make",
    [
        heavy,
        lambda size: heavy(size) * 1e9,  # beyond float16
        lambda size: heavy(size) * 1e-5,  # subnormal there
        lambda size: heavy(size).mul(100).round(),  # many alike, and zeros
        torch.zeros,
        lambda size: torch.arange(size) % 7 - 3.0,
        lambda size: heavy(size) * 2.0 ** -(torch.arange(size) // 4096 % 30),  # each chunk smaller than the last
    ],
)
def test_c_and_numpy_agree_to_the_bit(name: str, size: int, make: Callable[[int], torch.Tensor]) -> None:
    if not KERNELS.build():
        pytest.skip("no C compiler on this machine")

    def coder() -> DeltaCodec:
        return Short() if name == "short" else cast(DeltaCodec, codec(name))

    fast = coder()
    with KERNELS.unused():
        slow = coder()
    for _ in range(2):
        messages = [one.encode(make(size))[0] for one in (fast, slow)]
        assert bytes(messages[0].data) == bytes(messages[1].data)
        assert fast.residual is not None and slow.residual is not None and torch.equal(fast.residual, slow.residual)
        outs = [torch.empty(size), torch.empty(size)]
        for one, out in zip((fast, slow), outs, strict=True):
            one.decode([messages[0]], out)
        assert torch.equal(*outs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_sent_and_residual_are_what_was_accumulated(name: str, size: int) -> None:
    coder = codec(name)
    accumulated = torch.zeros(size)
    assert isinstance(coder, DeltaCodec)
    for seed in range(3):
        flat = heavy(size, seed)
        before = coder.residual.clone() if coder.residual is not None else torch.zeros(size)
        message = coder.encode(flat, seed=seed)
        out = torch.empty(size)
        codec(name).decode(message, out)
        if name in (*UNBIASED, *NEAREST):
            assert coder.residual is None
            continue
        accumulated = DECAY * before + flat
        assert coder.residual is not None
        torch.testing.assert_close(out + coder.residual, accumulated, rtol=1e-5, atol=1e-8)
        assert float(coder.residual.norm()) <= float(accumulated.norm()) * (1 + 1e-3)  # contractive


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_over_chance_is_exact(name: str) -> None:
    flat = heavy(640)
    total = torch.zeros(640)
    count = 400
    for seed in range(count):
        out = torch.empty(640)
        codec(name).decode(codec(name).encode(flat, seed=seed * 7919), out)
        total += out
    most = flat.view(-1, 64).abs().amax(1).repeat_interleave(64)
    deviation = most * (0.5 if name == "ternary" else 0.25) / math.sqrt(count)
    assert float(((total / count - flat).abs() / deviation).max()) < 6


@pytest.mark.parametrize(
    ("name", "error"), [("lloyd4", 0.009), ("lloyd3", 0.036), ("lloyd2", 0.145), ("huffman", 0.134)]
)
def test_nearest_levels_lose_little_of_normal_numbers(name: str, error: float) -> None:
    """Not much more than Max's quantisers for these (1960, table I): .0095, .0345 and .1175."""
    flat = torch.randn(64 * 2000, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(flat)
    codec(name).decode(codec(name).encode(flat), out)
    assert 0.8 * error < float((out - flat).square().mean()) < 1.2 * error
    outlier = torch.full((64,), 1e-3)
    outlier[7] = 1.0
    out = torch.empty_like(outlier)
    codec(name).decode(codec(name).encode(outlier), out)
    assert float(out[7]) > 0.5


def test_layouts_of_nearest_levels_are_frozen() -> None:
    """A change here would make two versions misread each other: it needs a new codec name."""
    found = {
        name: hashlib.sha256(bytes(codec(name).encode(heavy(300_001))[0].data)).hexdigest() for name in FROZEN_NEAREST
    }
    assert found == FROZEN_NEAREST


FROZEN_NEAREST = {
    "lloyd4": "d86762bc9400fe38cf17fcbad8ca00e0710dd5fb688c71c5c2d7ed3b22405f44",
    "lloyd3": "1c25f3a8df35df8ca2eb4b3811adce7befcfefe4a4d180ac4635a1b30da9011f",
    "lloyd2": "eb5e9f17d9a3f9849cd45ce8b541ed7b0a6ebd1bd977684c40a178dc8bd60f58",
}


def test_the_layout_of_huffman_is_read_from_any_stream() -> None:
    """Bytes of DEFLATE differ between builds of zlib, so that what is frozen is how they are read."""
    steps = bytes.fromhex("003f 803f")  # .5 and 1 in bfloat16
    codes = bytes.fromhex("9a" + "88" * 126 + "f7" + "81" + "88" * 127)  # 2, 1, zeros, -1, 7; -7, zeros
    expected = torch.zeros(300)
    expected[:2] = torch.tensor([1.0, 0.5])
    expected[254:257] = torch.tensor([-0.5, 3.5, -7.0])
    for level in (0, 9):
        stream = zlib.compressobj(level, zlib.DEFLATED, -15)
        short = stream.compress(codes) + stream.flush()
        for sent in (short, codes) if len(short) < len(codes) else (codes,):
            data = len(sent).to_bytes(4, "little") + steps + sent
            out = torch.empty(300)
            codec("huffman").decode([WireTensor("f32", (300,), data, "huffman")], out)
            assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "codes",
    [
        zlib.compress(b"\x88" * 256)[2:-4] + b"\0",  # something follows
        zlib.compress(b"\x88" * 255)[2:-4],  # an element is missing
        zlib.compress(b"\x88" * 1_000_000)[2:-4],  # a million come of a few
        b"\xff" * 100,  # no stream
    ],
)
def test_streams_of_other_lengths_are_refused(codes: bytes) -> None:
    data = len(codes).to_bytes(4, "little") + bytes.fromhex("003f 803f") + codes
    with pytest.raises(RemoteFault, match="huffman packet"):
        codec("huffman").check([WireTensor("f32", (300,), data, "huffman")], 300)
    with pytest.raises(RemoteFault, match="huffman packet"):
        codec("huffman").check([WireTensor("f32", (300,), data[:-1], "huffman")], 300)


def test_places_that_do_not_ascend_are_refused() -> None:
    message = codec("topk64").encode(heavy(4096))[0]
    data = bytearray(message.data)
    data[48:64] = b"\xff" * 8 + b"\0" * 8  # all in the first bucket, their low bits in any order
    with pytest.raises(RemoteFault, match="do not ascend"):
        codec("topk64").check([replace(message, data=bytes(data))], 4096)
    data[48] = 0
    with pytest.raises(RemoteFault, match="not 64 in a chunk"):
        codec("topk64").check([replace(message, data=bytes(data))], 4096)


@pytest.mark.parametrize("name", ["topk64", "topk512"])
def test_all_agree_on_what_anybody_sent_and_keep_the_rest(name: str) -> None:
    members = [PartialAverage(heavy(9000, 1), codec(name)) for _ in range(3)]
    for round_index in range(1, 4):
        for i, member in enumerate(members):
            member.theta.add_(heavy(9000, 10 * round_index + i))
        members[0].message(50)  # goes nowhere
        messages = [member.message(round_index) for member in members]
        decoded = torch.empty(3, 9000)
        for i, member in enumerate(members):
            member.codec.decode(messages[i], decoded[i])
        senders = decoded.ne(0).sum(0)
        mean = decoded.sum(0) / senders.clamp(min=1)
        assert 0 < int((senders > 0).sum()) < 9000
        gains = [heavy(9000, 100 + i) for i in range(3)]
        for i, member in enumerate(members):
            slow = member.phi + mean
            fast = torch.where(senders > 0, member.phi + mean, member.theta)
            member.theta.add_(gains[i])  # while the exchange runs
            member.apply(round_index, 1.0, [Packet(1.0, 0, m) for j, m in enumerate(messages) if j != i])
            assert float((member.phi - slow).abs().max()) < 1e-6
            assert float((member.theta - fast - gains[i]).abs().max()) < 1e-6
        assert torch.equal(members[0].phi, members[1].phi) and torch.equal(members[0].phi, members[2].phi)
    for other in ("int8", "powersgd"):
        with pytest.raises(ManifestError, match="chooses no coordinates"):
            PartialAverage(torch.zeros(8), codec(other))
