"""Sparse packets: the k largest of each 4096 elements, with Elias-Fano coded places and, for each, a sign and one bit
of magnitude.

SparseLoCo [arXiv 2508.15706] sends 12-bit places and 2-bit values. Here a place costs 8 bits at k = 64 (6 % above the
entropy), and the two magnitudes of a chunk are the exact two-means of the sent values, which has a third of the error
of the paper's fixed bins at the same two bits (measured).

A chunk on the wire, l = log2(4096 / k), indices i_0 < i_1 < … ; bits fill bytes from the lowest on:

    k l bits    the low l bits of each index
    2 k bits    bit (i_j >> l) + j is one for each j, the others zero
    k bits      one where the value is negative
    k bits      one where the value has the greater magnitude
    4 bytes     the smaller and the greater magnitude, float16, little endian

k = 64: 48 + 16 + 8 + 8 + 4 = 84 bytes, 0.1641 bit a parameter. Example, k = 4 in a chunk of 16 (l = 2; bytes of 1, 1, ½
and ½ rounded up to whole ones), values 3 at place 1, -1 at 2, 1 at 9, -3 at 15: low bits 1, 2, 1, 3 = d9; ones at 0, 1,
4, 6 = 53; negative: 1 and 3 = 0a; greater: 0 and 3 = 09; 1.0 and 3.0 = 003c 0042. In total: d9530a09003c0042.

Selection is the numpy version of topk.c. A chosen element is one int64, its magnitude's bits above its place: whole
numbers are sorted and partitioned several times as fast as floats with an order beside them (measured: vectors of
integers, 0.1 us to sort 64).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from swarmnode.base.errors import RemoteFault
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode.train.gossip.compression.codec import TILE, Bytes, Done
from swarmnode_methods.delta import DECAY, DeltaCodec
from swarmnode_methods.kernel import kernels

Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

PLACE_BITS = 32
INFINITE = 0x7F800000  # the bits of infinity; NaN lies above
KERNELS = kernels(__file__, "topk.c", topk_encode="pfplllp", topk_decode="plllp")


class Selector:
    """Finds the `k` largest of each `chunk` elements, of up to `rows` chunks at a time, in its own buffers.

    The k largest lie in the k groups with the largest maxima, so only some 2 n / sqrt(n / k) elements are partitioned.
    A group is every `step`-th element, so that maxima are those of whole vectors.
    """

    def __init__(self, k: int, chunk: int, rows: int) -> None:
        self.k = k
        self.chunk = chunk
        self.layers = 1 << ((chunk // k).bit_length() - 1) // 2
        self.step = chunk // self.layers
        self._magnitude = np.empty((rows, chunk), np.int32)
        self._tops, self._parted = np.empty((2, rows, self.step), np.int32)
        self._reach = np.empty((rows, self.step), np.bool_)
        self._at = np.empty((rows, self.layers, k), np.int64)
        self._near, self._near_parted = np.empty((2, rows, self.layers * k), np.int32)
        self._taken = np.empty((rows, self.layers * k), np.bool_)
        self._layer_at = (np.arange(self.layers) * self.step)[:, None]
        self._row_at = (np.arange(rows) * (chunk - self.step))[:, None]

    def largest(self, rows: Floats) -> Keys:
        """int64 [C, k], ascending: magnitude and place of the k largest of each of `rows` [C, n]. Of equal ones the
        first are taken; NaN counts as infinity."""
        count = len(rows)
        k = self.k
        magnitude = np.bitwise_and(rows.view(np.int32), 0x7FFFFFFF, out=self._magnitude[:count])
        tops = self._tops[:count]
        parted = self._parted[:count]
        np.maximum.reduce(magnitude.reshape(count, self.layers, self.step), axis=1, out=tops)
        parted[:] = tops
        parted.partition(self.step - k, axis=1)
        reach = np.greater_equal(tops, parted[:, self.step - k, None], out=self._reach[:count])
        groups = np.flatnonzero(reach)
        if groups.size > count * k or int(parted[:, self.step - k :].max()) >= INFINITE:
            odd = (np.count_nonzero(reach, axis=1) > k) | (tops.max(axis=1) >= INFINITE)
            return self._apart(rows, odd)
        at = np.add(groups.reshape(count, 1, k) + self._row_at[:count, None], self._layer_at, out=self._at[:count])
        near = self._near[:count]
        parted = self._near_parted[:count]
        magnitude.reshape(-1).take(at, mode="clip", out=near.reshape(at.shape))  # clip: skips numpy's bounds check
        parted[:] = near
        parted.partition(near.shape[1] - k, axis=1)
        taken = np.greater_equal(near, parted[:, near.shape[1] - k, None], out=self._taken[:count])
        found = np.flatnonzero(taken)
        if found.size > count * k:
            return self._apart(rows, np.count_nonzero(taken, axis=1) > k)
        keys = near.reshape(-1).take(found).astype(np.int64)
        keys <<= PLACE_BITS
        keys |= at.reshape(-1).take(found) & (self.chunk - 1)
        keys = keys.reshape(count, k)
        keys.sort(axis=1)
        return keys

    def _apart(self, rows: Floats, odd: Flags) -> Keys:
        """`largest` for rows of which those in `odd` have several elements equal to the least one taken."""
        keys = np.empty((len(rows), self.k), np.int64)
        keys[odd] = self._of_equals(rows[odd])
        if not odd.all():
            keys[~odd] = self.largest(rows[~odd])
        return keys

    def _of_equals(self, rows: Floats) -> Keys:
        magnitude = np.minimum(rows.view(np.int32) & 0x7FFFFFFF, INFINITE).astype(np.int64)
        keys: Keys = (magnitude << PLACE_BITS) | np.arange(self.chunk - 1, -1, -1)  # the first is the greater
        keys.partition(self.chunk - self.k, axis=1)
        keys = keys[:, self.chunk - self.k :] ^ (self.chunk - 1)
        keys.sort(axis=1)
        return keys


def two_means(keys: Keys) -> tuple[Floats, Places]:
    """([C, 2], the mean of the smaller and of the greater magnitudes; [C], the index of the last smaller one) of each
    row of ascending `keys` [C, k], split at the least squared error: exact, by prefix sums."""
    k = keys.shape[1]
    sums = (keys >> PLACE_BITS).astype(np.int32).view(np.float32).astype(np.float64).cumsum(axis=1)
    counts = np.arange(1, k, dtype=np.float64)
    below = sums[:, :-1]
    total = sums[:, -1]
    above = total[:, None] - below
    above *= above
    above /= k - counts
    gain = below * below
    gain /= counts
    gain += above
    split = gain.argmax(axis=1)  # the first of equal gains
    least = sums[np.arange(len(keys)), split]
    means = np.empty((len(keys), 2), np.float32)
    means[:, 0] = least / (split + 1)
    means[:, 1] = (total - least) / (k - 1 - split)
    return means, split


CHUNK_ELEMENTS = 4096
GROUP = 64  # chunks at a time: 1 MiB of float32; measured: half as fast at 256, beyond the caches

Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Halves = npt.NDArray[np.float16]
Bits = npt.NDArray[np.bool_] | npt.NDArray[np.uint8] | Places
HALF_MOST = 65504.0  # the largest float16

WARM_UP = ((50, 512), (75, 256), (100, 128))  # guess, (until round, k): dense first, then sparser


def warm_k(round_index: int, final: int) -> int:
    """k of this round: 512 at first, `final` in the end."""
    for until, k in WARM_UP:
        if round_index <= until and k > final:
            return k
    return final


class TopK(DeltaCodec):
    """Sends `k` of each `chunk` elements; both are powers of two."""

    feedback: ClassVar[bool] = True
    library = KERNELS
    unit: ClassVar[int] = CHUNK_ELEMENTS
    k: int
    chunk: ClassVar[int] = CHUNK_ELEMENTS

    def __init__(self) -> None:
        super().__init__()
        self._selector: Selector | None = None
        self._kernel = KERNELS.best()

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

    def code(self, wire: Bytes, flat: torch.Tensor, seed: int, done: Done) -> None:
        self.code_on_top(wire, torch.zeros_like(flat), flat, seed, done)

    def code_on_top(self, wire: Bytes, flat: torch.Tensor, residual: torch.Tensor, seed: int, done: Done) -> None:
        """Process one group at a time, while it is in the caches; in C, which takes a chunk at a time, one tile."""
        fresh = flat.numpy()
        kept = residual.numpy()
        whole = flat.numel() // self.chunk
        out = self._rows(wire)
        nbytes = self.chunk_nbytes
        shape = (whole, self.chunk)
        rows = kept[: whole * self.chunk].reshape(shape)
        news = fresh[: whole * self.chunk].reshape(shape)
        group = GROUP if self._kernel is None else max(TILE // self.chunk, 1)
        for first in range(0, whole, group):
            last = min(first + group, whole)
            self._code_rows(news[first:last], rows[first:last], out[first:last])
            if last * self.chunk % TILE == 0:
                done(last * nbytes)
        if whole < len(out):
            filled, new = np.zeros((2, 1, self.chunk), np.float32)  # padded with zeros
            rest = kept[whole * self.chunk :]
            filled[0, : rest.size] = rest
            new[0, : rest.size] = fresh[whole * self.chunk :]
            self._code_rows(new, filled, out[whole:])
            rest[:] = filled[0, : rest.size]

    def _code_rows(self, fresh: Floats, rows: Floats, out: Rows) -> None:
        """`rows` <- DECAY rows + fresh, both [C, n]; write their packets to `out` [C, chunk_nbytes] and subtract them
        from `rows`."""
        if self._kernel is not None:
            x, e, wire = (array.ctypes.data for array in (fresh, rows, out))
            self._kernel.topk_encode(x, DECAY, e, len(rows), self.chunk, self.k, wire)
            return
        rows *= np.float32(DECAY)
        rows += fresh
        k = self.k
        count = len(rows)
        if self._selector is None or self._selector.k != k:
            self._selector = Selector(k, self.chunk, GROUP)
        keys = self._selector.largest(rows)
        means, split = two_means(keys)
        halves = means.clip(max=HALF_MOST).astype("<f2")
        # Ascending by place from now on; with each place a flag for the greater magnitude.
        words = (keys & (self.chunk - 1)) << 1
        words |= np.arange(k) > split[:, None]
        words.sort(axis=1)
        places = words >> 1
        greater = words & 1
        flat = places + np.arange(count)[:, None] * self.chunk
        values = rows.reshape(-1).take(flat)
        negative = values < 0
        self._write_rows(out, places, negative, greater, halves)
        rows.reshape(-1)[flat] = values - _signed(halves, greater, negative)

    def _write_rows(self, out: Rows, places: Places, negative: Any, greater: Any, halves: Any) -> None:
        """Lay out packets in `out` [C, chunk_nbytes]: `places` (Elias and Fano's low bits, then high bits), signs,
        which magnitude, all [C, k], and the two magnitudes `halves` [C, 2]."""
        k = self.k
        count = len(out)
        ones = np.zeros((count, 2 * k), np.uint8)
        ones.reshape(-1)[(places >> self._low_bits) + (np.arange(k) + np.arange(count)[:, None] * (2 * k))] = 1
        low, high, plane = self._parts()
        out[:, :low] = _side_by_side(places & ((1 << self._low_bits) - 1), self._low_bits)
        at = low
        for piece, size in ((ones, high), (negative, plane), (greater.astype(np.bool_), plane)):
            out[:, at : at + size] = np.packbits(piece, axis=1, bitorder="little")
            at += size
        out[:, at:] = halves.view(np.uint8).reshape(count, 4)

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

    def _places(self, rows: Rows) -> Places:
        low, high, _ = self._parts()
        count = len(rows)
        k = self.k
        width = self._low_bits
        ones = np.unpackbits(rows[:, low : low + high], axis=1, bitorder="little", count=2 * k)
        places = np.flatnonzero(ones).reshape(count, k)
        places -= np.arange(k) + np.arange(count)[:, None] * (2 * k)
        places <<= width
        places |= _one_by_one(rows[:, :low], k, width)
        return places

    def _sent(self, part: Rows) -> tuple[Places, Floats]:
        """(places in their chunk, values) of chunks of a packet, both [C, k]."""
        low, high, plane = self._parts()
        at = low + high
        negative = np.unpackbits(part[:, at : at + plane], axis=1, bitorder="little", count=self.k)
        greater = np.unpackbits(part[:, at + plane : at + 2 * plane], axis=1, bitorder="little", count=self.k)
        return self._places(part), _signed(part[:, -4:].copy().view("<f2"), greater, negative)

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
        for first in range(0, whole, GROUP):
            part = rows[first : min(first + GROUP, whole)]
            self._scatter(part, out[first * self.chunk : (first + len(part)) * self.chunk])
        if whole < len(rows):
            last = torch.empty(self.chunk)
            self._scatter(rows[whole:], last)
            out[whole * self.chunk :].copy_(last[: out.numel() - whole * self.chunk])

    def _scatter(self, part: Rows, out: torch.Tensor) -> None:
        """Write the content of chunks of a packet to `out`."""
        out.zero_()
        places, values = self._sent(part)
        places += np.arange(len(part))[:, None] * self.chunk
        if out.device.type == "cpu" and out.dtype == torch.float32:
            out.numpy()[places.reshape(-1)] = values.reshape(-1)
        else:
            found = torch.from_numpy(values).view(-1).to(out.device, out.dtype)
            out.scatter_(0, torch.from_numpy(places).view(-1).to(out.device), found)

    def uncode(self, data: Bytes, parameters: int, start: int, end: int) -> torch.Tensor:
        out = torch.empty(end - start)
        self.uncode_into(data, parameters, start, out)
        return out


def _signed(means: Halves, greater: Bits, negative: Bits) -> Floats:
    """The values that `means` [C, 2] and two bits for each, [C, k], represent."""
    table = np.empty((len(means), 4), np.float32)
    table[:, :2] = means
    np.negative(table[:, :2], out=table[:, 2:])
    which = negative.astype(np.int64)
    which <<= 1
    which += greater
    which += np.arange(0, 4 * len(means), 4)[:, None]
    found: Floats = table.reshape(-1).take(which)
    return found


def _side_by_side(codes: Places, width: int) -> Rows:
    """Codes [C, k] of `width` bits as bytes [C, ceil(k width / 8)], bits from the lowest on."""
    count, k = codes.shape
    if k % 8 or width > 8:
        bits = (codes[:, :, None] >> np.arange(width)).astype(np.uint8) & 1
        bytes_of: Rows = np.packbits(bits.reshape(count, -1), axis=1, bitorder="little")
        return bytes_of
    # eight codes fill `width` bytes; computed as a product for speed
    places = np.int64(1) << np.arange(0, 8 * width, width)
    eights = (codes.reshape(-1, 8) @ places).astype("<i8", copy=False).view(np.uint8)
    packed: Rows = eights.reshape(-1, 8)[:, :width].reshape(count, -1)
    return packed


def _one_by_one(data: Rows, k: int, width: int) -> Places:
    """The inverse: codes int64 [C, k]."""
    count = len(data)
    if k % 8 or width > 8:
        bits = np.unpackbits(data, axis=1, bitorder="little", count=k * width).reshape(count, k, width)
        codes: Places = (bits.astype(np.int64) << np.arange(width)).sum(2)
        return codes
    eights = np.zeros((count * k // 8, 8), np.uint8)
    eights[:, :width] = data.reshape(-1, width)
    codes = eights.view("<i8") >> np.arange(0, 8 * width, width)
    codes &= (1 << width) - 1
    return codes.reshape(count, k)


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
