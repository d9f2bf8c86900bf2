"""Pack codes of 1 to 6 bits into bytes, whole tiles at once: no loop over elements, no allocation per tile.

A code of `bits` bits is cut into planes of 4, 2 or 1 bit (3 = 2 + 1, 6 = 4 + 2), low bits first, and each plane is
packed by itself: element 0 in the lowest bits of byte 0. Two neighbours become one byte by adding a shifted int16 view.
If alignment allows, four such pairs are shifted in one int64 (measured: half the time), as bits that move into a pair
from its neighbour land in positions that are not read.
"""

from __future__ import annotations

import torch

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}


class TilePacker:
    """Packs and unpacks up to `capacity` codes at a time on `device`, in its own buffers."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._bytes = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(3)]
        self._pairs = [torch.empty(capacity // 2, dtype=torch.int16, device=device) for _ in range(2)]

    def pack(self, codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
        """Pack the low `bits` of `codes` uint8 [n] into `out` uint8 [n / 8 * bits] (any device)."""
        count, shift, at = codes.numel(), 0, 0
        for width in PLANES[bits]:
            plane = self._bytes[0][:count]
            wide, source = _wide(plane), _wide(codes)
            if wide.dtype != source.dtype:
                wide, source = plane, codes
            mask = (1 << width) - 1
            mask = mask * 0x0101010101010101 if wide.dtype == torch.int64 else mask
            if shift:
                torch.bitwise_right_shift(source, shift, out=wide)
                source = wide
            torch.bitwise_and(source, mask, out=wide)
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
            wide = _wide(plane, pairs)
            moved = self._pairs[0].view(wide.dtype)[: wide.numel()]
            torch.bitwise_right_shift(wide, 8 - width, out=moved)
            wide.bitwise_or_(moved)
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
            last = held == width
            packed = out if last else self._bytes[source][: 2 * pairs.numel()]
            wide = pairs if _wide(packed) is packed else _wide(pairs)
            moved = torch.bitwise_left_shift(wide, 8 - held, out=self._pairs[1].view(wide.dtype)[: wide.numel()])
            wide.bitwise_or_(moved)
            mask = (1 << held) - 1
            mask = mask * 0x0101010101010101 if wide.dtype == torch.int64 else mask | mask << 8
            torch.bitwise_and(wide, mask, out=packed.view(wide.dtype))
            source = 1 - source


def _wide(plane: torch.Tensor, otherwise: torch.Tensor | None = None) -> torch.Tensor:
    """`plane` as int64 if its memory is aligned for that, else `otherwise` (None: itself)."""
    nbytes, size = plane.numel() * plane.element_size(), plane.element_size()
    if nbytes % 8 == 0 and plane.storage_offset() * size % 8 == 0 and plane.data_ptr() % 8 == 0:
        return plane.view(torch.int64)
    return plane if otherwise is None else otherwise
