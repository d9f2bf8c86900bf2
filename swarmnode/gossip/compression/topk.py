"""Sparse packets: the k largest of each 4096, their places Elias-Fano coded, sign and one bit of magnitude each.

SparseLoCo [arXiv 2508.15706] sends 12-bit places and 2-bit values; here a place costs 8 bits at k = 64 (6 % above the
entropy) and the two magnitudes of a chunk are the exact two-means of what it sends, a third of the error of its fixed
bins at the same two bits (design section 5, measured).

A chunk on the wire, l = log2(4096 / k), indices i_0 < i_1 < … ; bits fill bytes from the lowest on:

    k l bits    the low l bits of each index
    2 k bits    bit (i_j >> l) + j is one for each j, the others zero
    k bits      one where the value is negative
    k bits      one where the value has the greater magnitude
    4 bytes     the smaller and the greater magnitude, float16, little endian

k = 64: 48 + 16 + 8 + 8 + 4 = 84 bytes, 0.1641 bit a parameter. Example, k = 4 in a chunk of 16 (l = 2; bytes of 1, 1, ½
and ½ rounded up to whole ones), values 3 at place 1, -1 at 2, 1 at 9, -3 at 15: low bits 1, 2, 1, 3 = d9; ones at 0,
1, 4, 6 = 53; negative: 1 and 3 = 0a; greater: 0 and 3 = 09; 1.0 and 3.0 = 003c 0042. All of it: d9530a09003c0042.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression.delta import DeltaCodec
from swarmnode.gossip.compression.tiles import Bytes
from swarmnode.model.tensor import MAGNITUDE_MAX

CHUNK_ELEMENTS = 4096
GROUP = 256  # chunks at a time: 4 MiB of float32; guess
HALF_MOST = 65504.0  # the largest float16

WARM_UP = ((50, 512), (75, 256), (100, 128))  # until round, k: design section 5 (dense first, then thinner)


def warm_k(round_index: int, final: int) -> int:
    """k of this round: 512 at first, `final` in the end."""
    for until, k in WARM_UP:
        if round_index <= until and k > final:
            return k
    return final


class TopK(DeltaCodec):
    """`k` of each `chunk` elements; both powers of two."""

    feedback: ClassVar[bool] = True
    unit: ClassVar[int] = CHUNK_ELEMENTS
    k: int
    chunk: ClassVar[int] = CHUNK_ELEMENTS

    @property
    def _low_bits(self) -> int:
        return (self.chunk // self.k).bit_length() - 1

    def _parts(self) -> tuple[int, int, int]:
        """Bytes of low bits, of high bits, and of each of the two planes of values."""
        bits = (self.k * self._low_bits, 2 * self.k, self.k)
        return (-(-bits[0] // 8), -(-bits[1] // 8), -(-bits[2] // 8))

    @property
    def chunk_nbytes(self) -> int:
        low, high, plane = self._parts()
        return low + high + 2 * plane + 4

    def nbytes(self, parameters: int) -> int:
        return -(-parameters // self.chunk) * self.chunk_nbytes

    def code(self, flat: torch.Tensor, seed: int) -> Bytes:
        count = -(-flat.numel() // self.chunk)
        wire = np.zeros((count, self.chunk_nbytes), np.uint8)
        for first in range(0, count, GROUP):
            part = flat[first * self.chunk : (first + GROUP) * self.chunk]
            rows = -(-part.numel() // self.chunk)
            if part.numel() < rows * self.chunk:
                part = torch.cat([part, part.new_zeros(rows * self.chunk - part.numel())])
            self._code_rows(part.view(rows, self.chunk), wire[first : first + rows])
        return wire.reshape(-1)

    def _code_rows(self, rows: torch.Tensor, out: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        places = torch.topk(rows.abs(), self.k, dim=1, sorted=False).indices.sort(dim=1).values
        values = torch.gather(rows, 1, places)
        magnitude, order = values.abs().sort(dim=1)
        small, great, above = _two_means(magnitude)
        greater = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, above)
        index, k = places.numpy(), self.k
        low, high, plane = self._parts()
        bits = (index[:, :, None] >> np.arange(self._low_bits)) & 1
        ones = np.zeros((len(index), 2 * k), np.uint8)
        np.put_along_axis(ones, (index >> self._low_bits) + np.arange(k), 1, axis=1)
        at = 0
        for piece, size in (
            (bits.reshape(len(index), -1).astype(np.uint8), low),
            (ones, high),
            ((values < 0).numpy(), plane),
            (greater.numpy(), plane),
        ):
            out[:, at : at + size] = np.packbits(piece, axis=1, bitorder="little")
            at += size
        means = torch.stack([small, great], 1).clamp_(max=HALF_MOST).numpy().astype("<f2")
        out[:, at:] = means.view(np.uint8).reshape(len(index), 4)

    def _rows(self, data: Bytes) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        return data.reshape(-1, self.chunk_nbytes)

    def inspect(self, data: Bytes, parameters: int) -> None:
        rows = self._rows(data)
        for first in range(0, len(rows), GROUP):
            part = rows[first : first + GROUP]
            low, high, _ = self._parts()
            ones = np.unpackbits(part[:, low : low + high], axis=1, bitorder="little")
            if not (ones.sum(1) == self.k).all() or ones[:, 2 * self.k :].any():
                raise RemoteFault(f"{self.name} packet whose places are not {self.k} in a chunk")
            places = self._places(part)
            if (np.diff(places, axis=1) <= 0).any() or (places >= self.chunk).any():
                raise RemoteFault(f"{self.name} packet whose places do not ascend")
            means = part[:, -4:].copy().view("<f2").astype(np.float32)
            if not ((means >= 0) & (means <= min(MAGNITUDE_MAX, HALF_MOST))).all() or (means[:, 0] > means[:, 1]).any():
                raise RemoteFault(f"{self.name} packet with magnitudes that are not finite or not in order")

    def _places(
        self, rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        low, high, _ = self._parts()
        count, k, width = len(rows), self.k, self._low_bits
        ones = np.unpackbits(rows[:, low : low + high], axis=1, bitorder="little", count=2 * k)
        upper = np.nonzero(ones)[1].reshape(count, k) - np.arange(k)
        bits = np.unpackbits(rows[:, :low], axis=1, bitorder="little", count=k * width).reshape(count, k, width)
        lower = (bits.astype(np.int64) << np.arange(width)).sum(2)
        found: np.ndarray[tuple[int, int], np.dtype[np.int64]] = (upper << width) | lower
        return found

    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        rows = self._rows(data)[start // self.chunk : -(-end // self.chunk)]
        out = torch.zeros(len(rows), self.chunk)
        low, high, plane = self._parts()
        for first in range(0, len(rows), GROUP):
            part = rows[first : first + GROUP]
            at = low + high
            negative = np.unpackbits(part[:, at : at + plane], axis=1, bitorder="little", count=self.k)
            greater = np.unpackbits(part[:, at + plane : at + 2 * plane], axis=1, bitorder="little", count=self.k)
            means = part[:, -4:].copy().view("<f2").astype(np.float32)
            values = np.where(greater, means[:, 1:], means[:, :1]) * (1.0 - 2.0 * negative.astype(np.float32))
            places = torch.from_numpy(self._places(part))
            out[first : first + GROUP].scatter_(1, places, torch.from_numpy(values.astype(np.float32)))
        return out.view(-1)[: end - start]


def _two_means(magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean of the smaller, mean of the greater, whether each is greater) of each ascending row [C, k], split where
    the squared error is least: the exact two-means of numbers on a line, by prefix sums."""
    k = magnitude.shape[1]
    sums = magnitude.double().cumsum(1)
    counts = torch.arange(1, k, dtype=torch.float64)
    below, total = sums[:, :-1], sums[:, -1:]
    gain = below.square() / counts + (total - below).square() / (k - counts)
    split = gain.argmax(1, keepdim=True)  # elements 0 … split are the smaller
    small = below.gather(1, split).squeeze(1) / (split.squeeze(1) + 1)
    great = (total - below.gather(1, split)).squeeze(1) / (k - 1 - split.squeeze(1))
    return small.float(), great.float(), torch.arange(k) > split


class TopK64(TopK):
    """0.1641 bit a parameter."""

    name = "topk64"
    k = 64


class TopK512(TopK):
    """0.883 bit a parameter."""

    name = "topk512"
    k = 512


class TopKWarm(TopK):
    """512 of 4096 for 50 rounds, then 256 and 128 for 25 each, then 64."""

    name = "topk"
    k = 512

    def at(self, round_index: int) -> None:
        self.k = warm_k(round_index, TopK64.k)
