"""Few bits by the Lloyd-Max quantiser of a normal distribution, for packets whose sender keeps what they drop.

    s    = root mean square of a block of 64, rounded up to bfloat16
    send sign(x) and the nearest of the levels L_b for |x| / s           D(b) = the mean square error, over that of x

| b | D of normal numbers | bytes a parameter |
| --- | --- | --- |
| 4 | .0095 | .53 |
| 3 | .0345 | .41 |
| 2 | .1175 | .28 |

[Lloyd, "Least squares quantization in PCM", 1982; Max, "Quantizing for minimum distortion", 1960.] Rounding to the
nearest level has a seventh of the error of random rounding to E3M0 (4 bits, .07), but its mean is not exact. So these
codecs are for methods with error feedback of their own (gradient.py).

On the wire: bfloat16 scales of all blocks, then the codes, the last block padded with zeros. A code is sign * 2^(b - 1)
+ level. Three bits are two planes: the low two bits of all codes, then the high bits.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.gossip.compression.codec import Bytes
from swarmnode.model.tensor import MAGNITUDE_MAX
from swarmnode_methods.low_bit import LowBit
from swarmnode_methods.tiles import blocks, check_steps


class Lloyd(LowBit):
    """Codes of `bits` bits of |x| over the block's root mean square; `levels` [2^(bits - 1)], ascending."""

    levels: ClassVar[tuple[float, ...]]

    def __init__(self) -> None:
        super().__init__()
        self._levels_up = torch.tensor(self.levels)
        self._borders = 0.5 * (self._levels_up[1:] + self._levels_up[:-1])

    def scale(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        # In float64, so that every processor rounds to the same bfloat16.
        out.copy_(rows.to(torch.float64).square_().mean(1).sqrt_())

    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.bucketize(share, self._borders, out_int32=True))
        out.add_(negative, alpha=len(self.levels))

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._levels_up, -self._levels_up])[codes.long()]

    def inspect(self, data: Bytes, parameters: int) -> None:
        check_steps(data[: 2 * blocks(parameters)], MAGNITUDE_MAX / self.levels[-1], f"{self.name} packet")


class Lloyd4(Lloyd):
    """0.53 bytes a parameter."""

    name = "lloyd4"
    bits = 4
    levels = (0.128395, 0.388048, 0.656759, 0.94234, 1.256231, 1.618046, 2.069017, 2.73259)


class Lloyd3(Lloyd):
    """0.41 bytes a parameter."""

    name = "lloyd3"
    bits = 3
    levels = (0.245094, 0.756005, 1.343909, 2.151946)


class Lloyd2(Lloyd):
    """0.28 bytes a parameter."""

    name = "lloyd2"
    bits = 2
    levels = (0.45278, 1.510418)
