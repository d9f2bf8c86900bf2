"""Pack codes of 3, 4 or 6 bits by whole chunks: distant parts of a chunk share bytes, so that a few calls suffice.

n codes (n a multiple of 64) are cut into parts of equal length, and byte i of the result holds code i of several parts:

    4 bits   parts a b        n / 2 bytes      a | b << 4
    6 bits   parts a b c d    3 n / 4 bytes    a | d << 6, then b | d >> 2 << 6, then c | d >> 4 << 6 (of 8 bits)
    3 bits   parts a b        3 n / 8 bytes    a | b << 3, which are n / 2 codes of 6 bits

Packing neighbours, as in tile_bitpack.py, takes twice the time (measured), mostly to combine two bytes into one.
"""

from __future__ import annotations

import numpy as np

from swarmnode.gossip.compression.codec import Bytes

WIDTHS = (3, 4, 6)

_PLACES = np.array([[64], [16], [4]], np.uint8)  # positions of two bits of d in planes of 6 bits
_TOP = np.uint8(0xC0)


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes; `count` is a multiple of 8."""
    return count // 8 * bits


class ChunkPacker:
    """Packs and unpacks up to `capacity` codes at a time, in its own buffer."""

    def __init__(self, capacity: int, bits: int) -> None:
        assert bits in WIDTHS, f"codes of {bits} bits"
        self.bits = bits
        self._spare = np.empty(capacity, np.uint8)
        self._pairs = np.empty(capacity // 2, np.uint8)

    def pack(self, codes: Bytes, out: Bytes) -> None:
        """Pack the low `bits` of `codes` [n] into `out` [n / 8 * bits]. May overwrite `codes`."""
        if self.bits == 6:
            self._pack_six(codes, out)
            return
        half = codes.size // 2
        low, high, moved = codes[:half], codes[half:], self._spare[:half]
        into = out if self.bits == 4 else self._pairs[:half]
        np.bitwise_and(low, np.uint8((1 << self.bits) - 1), out=into)
        np.multiply(high, np.uint8(1 << self.bits), out=moved)
        np.bitwise_or(into, moved, out=into)
        if self.bits == 3:
            self._pack_six(into, out)

    def unpack(self, packed: Bytes, out: Bytes) -> None:
        """The inverse: `packed` [n / 8 * bits] into `out` [n]."""
        if self.bits == 6:
            self._unpack_six(packed, out)
            return
        half = out.size // 2
        if self.bits == 3:
            self._unpack_six(packed, self._pairs[:half])
            packed = self._pairs[:half]
        np.bitwise_and(packed, np.uint8((1 << self.bits) - 1), out=out[:half])
        np.right_shift(packed, np.uint8(self.bits), out=out[half:])

    def _pack_six(self, codes: Bytes, out: Bytes) -> None:
        part = codes.size // 4
        moved = self._spare[: 3 * part]
        np.multiply(codes[3 * part :], _PLACES, out=moved.reshape(3, part))
        np.bitwise_and(moved, _TOP, out=moved)
        np.bitwise_and(codes[: 3 * part], np.uint8(63), out=out)
        np.bitwise_or(out, moved, out=out)

    def _unpack_six(self, packed: Bytes, out: Bytes) -> None:
        part = out.size // 4
        np.bitwise_and(packed, np.uint8(63), out=out[: 3 * part])
        moved, last = self._spare[: 3 * part], out[3 * part :]
        np.right_shift(packed, np.uint8(6), out=moved)
        for plane, shift in ((1, 4), (2, 16)):
            more = moved[plane * part : (plane + 1) * part]
            np.multiply(more, np.uint8(shift), out=more)
        np.bitwise_or(moved[:part], moved[part : 2 * part], out=last)
        np.bitwise_or(last, moved[2 * part :], out=last)
