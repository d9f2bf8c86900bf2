"""Codes of 1 to 6 bits side by side in bytes, by whole tiles: no loop over elements, nothing allocated a tile.

A code of `bits` bits is cut into planes of 4, 2 or 1 bit (3 = 2 + 1, 6 = 4 + 2), low bits first, and each plane is
packed by itself: element 0 in the lowest bits of byte 0. Two neighbours become one byte by adding a shifted int16 view.
"""

from __future__ import annotations

import torch

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` codes; `count` is a multiple of 8."""
    return count // 8 * bits


class Packer:
    """Packs and unpacks up to `capacity` codes at a time on `device`, in buffers of its own."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._bytes = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(3)]
        self._pairs = [torch.empty(capacity // 2, dtype=torch.int16, device=device) for _ in range(2)]

    def pack(self, codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
        """`codes` uint8 [n], of which the low `bits` count, into `out` uint8 [n / 8 * bits] (any device)."""
        count, shift, at = codes.numel(), 0, 0
        for width in PLANES[bits]:
            plane = self._bytes[0][:count]
            if shift:
                torch.bitwise_right_shift(codes, shift, out=plane)
                plane.bitwise_and_((1 << width) - 1)
            else:
                torch.bitwise_and(codes, (1 << width) - 1, out=plane)
            end = at + count // 8 * width
            self._squeeze(plane, width, out[at:end])
            at, shift = end, shift + width

    def unpack(self, packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
        """The inverse: `packed` uint8 [n / 8 * bits] on this device into `out` uint8 [n]."""
        count, shift, at = out.numel(), 0, 0
        for width in PLANES[bits]:
            end = at + count // 8 * width
            if shift:
                plane = self._bytes[2][:count]
                self._spread(packed[at:end], width, plane)
                out.bitwise_or_(torch.bitwise_left_shift(plane, shift, out=plane))
            else:
                self._spread(packed[at:end], width, out)
            at, shift = end, shift + width

    def _squeeze(self, plane: torch.Tensor, width: int, out: torch.Tensor) -> None:
        source = 0
        while width < 8:
            pairs = plane.view(torch.int16)
            moved = torch.bitwise_right_shift(pairs, 8 - width, out=self._pairs[0][: pairs.numel()])
            pairs.bitwise_or_(moved)
            width *= 2
            source = 1 - source
            plane = out if width == 8 else self._bytes[source][: pairs.numel()]
            plane.copy_(pairs)  # the low byte of each pair

    def _spread(self, packed: torch.Tensor, width: int, out: torch.Tensor) -> None:
        held, source = 8, 0
        while held > width:
            held //= 2
            pairs = self._pairs[0][: packed.numel()]
            pairs.copy_(packed)
            moved = torch.bitwise_left_shift(pairs, 8 - held, out=self._pairs[1][: pairs.numel()])
            pairs.bitwise_or_(moved)
            mask = (1 << held) - 1
            last = held == width
            packed = out if last else self._bytes[source][: 2 * pairs.numel()]
            torch.bitwise_and(pairs, mask | mask << 8, out=packed.view(torch.int16))
            source = 1 - source
