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
import numpy.typing as npt
import torch

from swarmnode.errors import RemoteFault
from swarmnode.gossip.compression import kernel
from swarmnode.gossip.compression.delta import DECAY, DeltaCodec
from swarmnode.gossip.compression.tiles import Bytes
from swarmnode.model.tensor import MAGNITUDE_MAX

CHUNK_ELEMENTS = 4096
GROUP = 64  # chunks at a time: 1 MiB of float32; measured: half as fast at 256, beyond the caches

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
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

    def __init__(self) -> None:
        super().__init__()
        self._magnitude = np.empty((GROUP, self.chunk), np.float32)
        self._kernel = kernel.load()

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
        return self.code_on_top(torch.zeros_like(flat), flat, seed)

    def code_on_top(self, flat: torch.Tensor, residual: torch.Tensor, seed: int) -> Bytes:
        """A group at a time, while it is in the caches."""
        fresh, kept, whole = flat.numpy(), residual.numpy(), flat.numel() // self.chunk
        wire = np.empty((-(-flat.numel() // self.chunk), self.chunk_nbytes), np.uint8)
        shape = (whole, self.chunk)
        rows, news = kept[: whole * self.chunk].reshape(shape), fresh[: whole * self.chunk].reshape(shape)
        for first in range(0, whole, GROUP):
            part = slice(first, min(first + GROUP, whole))
            self._code_rows(news[part], rows[part], wire[part])
        if whole < len(wire):
            last, new = np.zeros((2, 1, self.chunk), np.float32)  # filled up with zeros
            rest = kept[whole * self.chunk :]
            last[0, : rest.size], new[0, : rest.size] = rest, fresh[whole * self.chunk :]
            self._code_rows(new, last, wire[whole:])
            rest[:] = last[0, : rest.size]
        return wire.reshape(-1)

    def _code_rows(self, fresh: Floats, rows: Floats, out: Rows) -> None:
        """`rows` <- DECAY rows + fresh, both [C, n]; their packets to `out` [C, chunk_nbytes], taken from `rows`."""
        if self._kernel is not None:
            x, e, wire = (array.ctypes.data for array in (fresh, rows, out))
            self._kernel.topk_encode(x, DECAY, e, len(rows), self.chunk, self.k, wire)
            return
        rows *= np.float32(DECAY)
        rows += fresh
        k = self.k
        places = largest(rows, k, self._magnitude)
        values = np.take_along_axis(rows, places, axis=1)
        small, great, greater = _two_means(torch.from_numpy(np.abs(values)))
        means = np.stack([small, great], 1).clip(max=HALF_MOST).astype("<f2")
        negative = values < 0
        index = places.astype(np.uint16)
        low, high, plane = self._parts()
        bits = (index[:, :, None] >> np.arange(self._low_bits, dtype=np.uint16)).astype(np.uint8) & 1
        ones = np.zeros((len(rows), 2 * k), np.uint8)
        np.put_along_axis(ones, (places >> self._low_bits) + np.arange(k), 1, axis=1)
        at = 0
        for piece, size in ((bits.reshape(len(rows), -1), low), (ones, high), (negative, plane), (greater, plane)):
            out[:, at : at + size] = np.packbits(piece, axis=1, bitorder="little")
            at += size
        out[:, at:] = means.view(np.uint8).reshape(len(rows), 4)
        np.put_along_axis(rows, places, values - _signed(means, greater, negative), axis=1)

    def _rows(self, data: Bytes) -> Rows:
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

    def _places(self, rows: Rows) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        low, high, _ = self._parts()
        count, k, width = len(rows), self.k, self._low_bits
        ones = np.unpackbits(rows[:, low : low + high], axis=1, bitorder="little", count=2 * k)
        upper = np.nonzero(ones)[1].reshape(count, k) - np.arange(k)
        bits = np.unpackbits(rows[:, :low], axis=1, bitorder="little", count=k * width).reshape(count, k, width)
        lower = (bits.astype(np.int64) << np.arange(width)).sum(2)
        found: np.ndarray[tuple[int, int], np.dtype[np.int64]] = (upper << width) | lower
        return found

    def _sent(self, part: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """(places in their chunk, values) of chunks of a packet, both [C, k]."""
        low, high, plane = self._parts()
        at = low + high
        negative = np.unpackbits(part[:, at : at + plane], axis=1, bitorder="little", count=self.k)
        greater = np.unpackbits(part[:, at + plane : at + 2 * plane], axis=1, bitorder="little", count=self.k)
        means = part[:, -4:].copy().view("<f2")
        values = _signed(means, greater.view(np.bool_), negative.view(np.bool_))
        return torch.from_numpy(self._places(part)), torch.from_numpy(values)

    def uncode_into(self, data: Bytes, parameters: int, start: int, out: torch.Tensor) -> None:
        rows = self._rows(data)[start // self.chunk : -(-(start + out.numel()) // self.chunk)]
        whole = out.numel() // self.chunk
        if self._kernel is not None and out.device.type == "cpu" and out.dtype == torch.float32:
            self._kernel.topk_decode(rows.ctypes.data, whole, self.chunk, self.k, out.data_ptr())
            if whole < len(rows):
                filled = torch.empty(self.chunk)
                self._kernel.topk_decode(rows[whole:].ctypes.data, 1, self.chunk, self.k, filled.data_ptr())
                out[whole * self.chunk :].copy_(filled[: out.numel() - whole * self.chunk])
            return
        out.zero_()
        target = out[: whole * self.chunk].view(whole, self.chunk)
        for first in range(0, whole, GROUP):
            places, values = self._sent(rows[first : min(first + GROUP, whole)])
            target[first : first + GROUP].scatter_(1, places.to(out.device), values.to(out.device, out.dtype))
        if whole < len(rows):
            last = torch.zeros(1, self.chunk).scatter_(1, *self._sent(rows[whole:]))
            out[whole * self.chunk :].copy_(last.view(-1)[: out.numel() - whole * self.chunk])

    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        out = torch.empty(end - start)
        self.uncode_into(data, parameters, start, out)
        return out


def _signed(means: Halves, greater: Flags, negative: Flags) -> Floats:
    """The values that `means` [C, 2] and two bits for each, [C, k], stand for."""
    means = means.astype(np.float32)
    values: Floats = np.where(greater, means[:, 1:], means[:, :1])
    np.negative(values, out=values, where=negative)
    return values


def largest(rows: Floats, k: int, scratch: Floats | None = None) -> Places:
    """The places, ascending, int64 [C, k], of the k largest magnitudes in each of `rows` [C, n]; of equal ones, the
    first; what is not a number is largest.

    The k largest lie in the k groups with the largest maxima, so that only some 2 n / sqrt(n / k) elements are sorted
    out; a group is every `step`-th element, so that maxima are those of whole vectors.
    """
    count, n = rows.shape
    magnitude = np.abs(rows, out=None if scratch is None else scratch[:count])
    group = 1 << ((n // k).bit_length() - 1) // 2
    step = n // group
    wide = magnitude.reshape(count, group, step)
    tops = wide.max(axis=1)
    chosen = tops >= np.partition(tops, step - k, axis=1)[:, step - k, None]
    if np.count_nonzero(chosen) == count * k:
        groups = (np.flatnonzero(chosen) % step).reshape(count, k)
        at = (np.arange(count) * n)[:, None, None] + (np.arange(group) * step)[:, None] + groups[:, None, :]
        near = magnitude.reshape(-1).take(at.reshape(count, group * k), mode="clip")
        taken = near >= np.partition(near, (group - 1) * k, axis=1)[:, (group - 1) * k, None]
        if np.count_nonzero(taken) == count * k:
            layer, which = np.divmod((np.flatnonzero(taken) % (group * k)).reshape(count, k), k)
            places: Places = layer * step + np.take_along_axis(groups, which, axis=1)
            return places
    order = np.argsort(-np.nan_to_num(magnitude, nan=np.inf), axis=1, kind="stable")[:, :k]
    return np.sort(order, axis=1)


def _two_means(magnitude: torch.Tensor) -> tuple[Floats, Floats, Flags]:
    """(mean of the smaller, mean of the greater, whether each is greater) of each row [C, k], split where the squared
    error is least: the exact two-means of numbers on a line, by prefix sums of the sorted row."""
    k = magnitude.shape[1]
    magnitude, order = magnitude.sort(dim=1, stable=True)
    sums = magnitude.double().cumsum(1)
    counts = torch.arange(1, k, dtype=torch.float64)
    below, total = sums[:, :-1], sums[:, -1:]
    gain = below.square() / counts + (total - below).square() / (k - counts)
    split = torch.from_numpy(gain.numpy().argmax(1, keepdims=True))  # of equal gains the first; 0 … split are smaller
    small = below.gather(1, split).squeeze(1) / (split.squeeze(1) + 1)
    great = (total - below.gather(1, split)).squeeze(1) / (k - 1 - split.squeeze(1))
    greater = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, torch.arange(k) > split)
    return small.float().numpy(), great.float().numpy(), greater.numpy()


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
