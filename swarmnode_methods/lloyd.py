"""Few bits by Lloyd's quantiser of gradients, for packets whose sender keeps what they drop.

    s    = max|x| of a block of 64, rounded up to bfloat16
    send sign(x) and the nearest of the levels L_b for |x| / s         D(b) = mean over blocks of |x - x'|^2 / |x|^2

| b | D | bytes a parameter |
| --- | --- | --- |
| 4 | .010 | .53 |
| 3 | .041 | .41 |
| 2 | .169 | .28 |

[Lloyd, "Least squares quantization in PCM", 1982.] The levels are the fixed points of his iteration for D on gradients
of the replica bench's network after 11, 31 and 61 steps, of 4 and of 16 samples [measured: 11,358 blocks]. Gradients
have heavy tails, one block in twenty an element of 5.5 times the root mean square: levels for normal numbers cut it
off, and D is .033, .075 and .188. E3M0, rounded randomly, has .066 in four bits. Nearest rounding has no exact mean, so
these codecs are for methods with error feedback of their own (gradient.py).

On the wire: low_bit.py. A code is sign * 2^(b - 1) + level.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode_methods.low_bit import LowBit

GRID = 4096  # shares that are told apart: a table of them costs a sixteenth of a search for the level (measured)


class Lloyd(LowBit):
    """Codes of `bits` bits of |x| over the block's largest; `levels` [2^(bits - 1)], ascending, are below 1."""

    levels: ClassVar[tuple[float, ...]]

    def __init__(self) -> None:
        super().__init__()
        up = torch.tensor(self.levels)
        middles = (torch.arange(GRID + 1) + 0.5) / GRID
        self._nearest = torch.bucketize(middles, 0.5 * (up[1:] + up[:-1])).to(torch.uint8)
        self._values = torch.cat([up, -up])

    def codes(self, share: torch.Tensor, negative: torch.Tensor, chance: torch.Tensor, out: torch.Tensor) -> None:
        cell = share.mul_(GRID).to(torch.int32).clamp_(0, GRID)  # of a number that is not finite: refused by its block
        torch.index_select(self._nearest, 0, cell, out=out)
        out.add_(negative, alpha=len(self.levels))

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return self._values.index_select(0, codes.to(torch.int32))


class Lloyd4(Lloyd):
    """0.53 bytes a parameter."""

    name = "lloyd4"
    bits = 4
    levels = (0.0247, 0.0937, 0.1821, 0.2877, 0.4088, 0.5528, 0.7327, 0.9684)


class Lloyd3(Lloyd):
    """0.41 bytes a parameter."""

    name = "lloyd3"
    bits = 3
    levels = (0.0495, 0.2295, 0.4771, 0.8557)


class Lloyd2(Lloyd):
    """0.28 bytes a parameter."""

    name = "lloyd2"
    bits = 2
    levels = (0.096, 0.568)
