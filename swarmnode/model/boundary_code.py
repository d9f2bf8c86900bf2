"""Coding of activations and their gradients between stages, by the manifest's `pipeline.boundary`.

    fp32, bf16   floats as they are
    int8         q = round(x / s), s = max|x| / 127 of a tile                   [arXiv 2110.02861, linear codes]
    int4, int2   the nearest of 16 or 4 levels for normal numbers to            [TAH-Quant, arXiv 2506.01352; levels:
                 H (S x) / s, s = the root mean square of the tile               Max, 1960]
    subspace     bf16, k numbers a token (subspace.py): the token's own row, the large part, is neither sent nor rounded

A tile is 64 neighbours of a token's vector, the last one filled up with zeros. So an outlier channel costs its own tile
only, and below 8 bits the Hadamard matrix H (orthonormal) spreads it over the tile, whose numbers then are about
normal. The signs S are others at each place of a sample, and part of the format: tokens that are alike have errors in
other directions, which do not add up in a step [measured: docs/measurements/boundary.md]. All round to the nearest,
without randomness: replicas with equal weights send equal codes. On the wire: the steps s of all tokens (bfloat16),
then the codes, a byte a number, or as many as a byte holds, the earlier ones in the high bits. The tensor's codec is
the code's name, its dtype "f32", its shape the decoded tensor's. With "int4_int2" activations go in int4, and their
gradients in int2 (`boundary_codes`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import seeded
from swarmnode.base.ports import WireTensor
from swarmnode.model.tensor import (
    DTYPES,
    check_finite,
    check_shape,
    decode_activation,
    encode,
    host_room,
    to_device,
    to_host,
)
from swarmnode.run.manifest import BOUNDARY_BLOCK, LOW_BITS, boundary_nbytes

CPU = torch.device("cpu")
LARGEST = 127.0
STEP_LEAST = 2.0**-100  # of a tile of zeros
RAW = {"fp32": "f32", "bf16": "bf16", "fp64": "f64", "subspace": "bf16"}
# Max, "Quantizing for minimum distortion", table 1, N = 16 and 4: those above zero
LEVELS = {4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733), 2: (0.4528, 1.510)}
CELLS = 512  # of 1: a number goes to its cell's level, a table that costs a thirtieth of a search (measured)
GRID = 8 * CELLS  # cells, from -4 to 4


def encode_boundary(tensor: Tensor, kind: str) -> WireTensor:
    """`tensor` [B, T, D] for a neighbouring stage, in code `kind`; in its own memory if it is coded."""
    if kind in RAW:
        return encode(tensor.detach().to(DTYPES[RAW[kind]]))
    x = tensor.detach()
    batch, length, width = x.shape
    wire = host_room(boundary_nbytes(kind, batch * length, width), x)
    wire_steps, wire_codes = _parts(wire, batch, length, width)
    for at, sample in enumerate(x):  # one by one, in memory that a processor's caches hold
        tiles = F.pad(sample.float(), (0, -width % BOUNDARY_BLOCK)).view(length, -1, BOUNDARY_BLOCK)
        steps, codes = _low_bits(tiles, LOW_BITS[kind]) if kind in LOW_BITS else _int8(tiles)
        wire_steps[at].copy_(steps.view(torch.uint8).view(length, -1))
        wire_codes[at].copy_(codes[:, : wire_codes.shape[2]])
    return WireTensor("f32", tuple(tensor.shape), wire.numpy().data.toreadonly(), kind)


def decode_boundary(
    wire: WireTensor, kind: str, shape: tuple[int | None, ...], what: str, device: torch.device = CPU
) -> Tensor:
    """Activations or their gradient [B, T, D] in main memory, checked to be finite and of `shape` (None: any positive
    size). Coded ones are decoded on `device` and become bfloat16, which is finer than the codes. Raises RemoteFault
    that names `what`."""
    if kind in RAW:
        return decode_activation(wire, RAW[kind], shape, what)
    if wire.codec != kind:
        raise RemoteFault(f"{what}: codec {wire.codec[:16]!r}; expected {kind}")
    check_shape(wire, ("f32",), shape, what)
    batch, length, width = wire.shape
    if wire.nbytes != (expected := boundary_nbytes(kind, batch * length, width)):
        raise RemoteFault(f"{what}: {wire.nbytes} bytes; expected {expected}")
    data = to_device(torch.frombuffer(wire.data, dtype=torch.uint8), device)
    found = torch.empty(wire.shape, dtype=torch.bfloat16, device=device)
    for at, (wire_steps, codes) in enumerate(zip(*_parts(data, batch, length, width), strict=True)):
        steps = wire_steps.clone().view(torch.bfloat16).float().unsqueeze(2)
        tiles = _of_low_bits(codes, steps, LOW_BITS[kind]) if kind in LOW_BITS else _of_int8(codes, steps)
        x = tiles.flatten(1)[:, :width]
        check_finite(x, what)
        found[at].copy_(x)
    return to_host(found)


def _parts(wire: Tensor, batch: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """The bytes of (the steps [B, T, 2 tiles], the codes [B, T, n]) of `wire` uint8."""
    cut = batch * length * 2 * -(-width // BOUNDARY_BLOCK)
    return wire[:cut].view(batch, length, -1), wire[cut:].view(batch, length, -1)


def _int8(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """(steps bfloat16 [T, tiles], codes uint8 [T, 64 tiles]) of a sample's `tiles` [T, tiles, 64]."""
    steps = (tiles.abs().amax(2) / LARGEST).clamp_(min=STEP_LEAST).to(torch.bfloat16)
    codes = (tiles / steps.float().unsqueeze(2)).clamp_(-LARGEST, LARGEST).round_()
    return steps, codes.to(torch.int8).view(torch.uint8).flatten(1)


def _of_int8(codes: Tensor, steps: Tensor) -> Tensor:
    """[T, tiles, 64] of a sample's codes [T, D] and steps [T, tiles, 1]."""
    numbers = codes.view(torch.int8).float()
    return F.pad(numbers, (0, -numbers.shape[1] % BOUNDARY_BLOCK)).view(*steps.shape[:2], BOUNDARY_BLOCK).mul_(steps)


def _low_bits(tiles: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(steps bfloat16 [T, tiles], codes uint8 [T, 8 bits tiles]) of a sample's `tiles` [T, tiles, 64]."""
    tables = _tables(bits, tiles.device)
    steps = tiles.square().mean(2).sqrt_().clamp_(min=STEP_LEAST).to(torch.bfloat16)
    turned = ((tiles * _signs(len(tiles), tiles.device)).view(-1, BOUNDARY_BLOCK) @ tables.turn).view(tiles.shape)
    cells = turned.mul_((CELLS / steps.float()).unsqueeze(2)).add_(GRID / 2)
    cells = cells.to(torch.int32).clamp_(0, GRID - 1)  # also of what is not finite: its step tells the receiver
    codes = tables.nearest.index_select(0, cells.view(-1)).view(len(tiles), -1, 8 // bits)
    packed = codes[..., 0]
    for at in range(1, 8 // bits):
        packed = (packed << bits) | codes[..., at]
    return steps, packed


def _of_low_bits(codes: Tensor, steps: Tensor, bits: int) -> Tensor:
    """[T, tiles, 64] of a sample's codes [T, 8 bits tiles] and steps [T, tiles, 1]."""
    tables = _tables(bits, codes.device)
    turned = tables.numbers.index_select(0, codes.reshape(-1).to(torch.int32)).view(*steps.shape[:2], BOUNDARY_BLOCK)
    tiles = (turned.mul_(steps).view(-1, BOUNDARY_BLOCK) @ tables.turn.T).view(turned.shape)
    return tiles.mul_(_signs(len(codes), codes.device))


@dataclass(frozen=True, slots=True)
class _Tables:
    """`turn`: H [64, 64]. `nearest` uint8 [GRID]: the code of a number in that cell of the grid. `numbers` [256, n]:
    those of a byte."""

    turn: Tensor
    nearest: Tensor
    numbers: Tensor


@functools.cache
def _tables(bits: int, device: torch.device) -> _Tables:
    matrix = torch.ones(1, 1)
    while len(matrix) < BOUNDARY_BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    above = torch.tensor(LEVELS[bits])
    levels = torch.cat([-above.flip(0), above])
    middles = (torch.arange(GRID) + 0.5 - GRID / 2) / CELLS
    nearest = torch.bucketize(middles, 0.5 * (levels[1:] + levels[:-1])).to(torch.uint8)
    numbers = torch.cartesian_prod(*[levels] * (8 // bits))
    turn = matrix / math.sqrt(BOUNDARY_BLOCK)
    return _Tables(turn.to(device), nearest.to(device), numbers.to(device))


@functools.lru_cache(maxsize=4)
def _signs(places: int, device: torch.device) -> Tensor:
    """S [places, 1, 64] of a sample's places."""
    drawn = seeded("boundary", "int4").randbytes(places * BOUNDARY_BLOCK // 8)
    signs = np.unpackbits(np.frombuffer(drawn, np.uint8)).astype(np.float32) * 2.0 - 1.0
    return torch.from_numpy(signs).view(places, 1, BOUNDARY_BLOCK).to(device)
