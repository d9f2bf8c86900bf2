"""Fragments of the weights that are averaged in turn; each has blocks from every part of the model.

A flat buffer is cut into blocks of 64 elements. Of each F consecutive blocks every fragment gets one:

    fragment k of F:  block g F + (k - g) mod F  for g = 0, 1, 2 ...          round E is about fragment E mod F

The shift by one in each group keeps fragments mixed if the model repeats every F blocks. Without it queries, keys and
values in rows of 3 x 64 would each be one fragment. F is odd, so that replicas that meet only at every second or fourth
round (gossip/round.py) reach all fragments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.gossip.compression.codec import BLOCK_ELEMENTS

UNIT = BLOCK_ELEMENTS  # elements that share a step in the codecs


@dataclass(frozen=True, slots=True)
class Fragment:
    """Fragment `number` of `of` fragments of flat buffers of `parameters` elements. With `of` = 1 it is the whole
    buffer."""

    parameters: int
    number: int
    of: int

    @property
    def whole(self) -> bool:
        return self.of == 1

    @property
    def count(self) -> int:
        """Its elements; 0 if there are fewer blocks than fragments."""
        if self.whole:
            return self.parameters
        groups, rest = divmod(self.parameters, UNIT * self.of)
        # position of its block in the last group, which may be cut off
        before = (self.number - groups) % self.of * UNIT
        return groups * UNIT + min(max(rest - before, 0), UNIT)

    def get(self, flat: Tensor, start: int, end: int, room: Tensor) -> Tensor:
        """Elements [start, end) of the fragment of `flat` [P]: a view if it is whole, else a copy in `room`. `start`
        and `end` are multiples of UNIT; `end` may also be `count`."""
        if self.whole:
            return flat[start:end]
        found, (rows, full, tail) = room[: end - start], self._at(flat, start, end)
        torch.index_select(full, 0, rows, out=found[: rows.numel() * UNIT].view(-1, UNIT))
        found[rows.numel() * UNIT :].copy_(tail)
        return found

    def put(self, flat: Tensor, start: int, end: int, values: Tensor) -> None:
        """Write the changed result of `get` back to `flat`."""
        if self.whole:
            return
        rows, full, tail = self._at(flat, start, end)
        full.index_copy_(0, rows, values[: rows.numel() * UNIT].view(-1, UNIT))
        tail.copy_(values[rows.numel() * UNIT :])

    def _at(self, flat: Tensor, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """(numbers of the whole blocks in [start, end); all whole blocks of `flat` [n, 64]; the rest of the last,
        partial block, if included)."""
        assert start % UNIT == 0, f"a fragment is read from its element {start}, inside a block"
        whole = self.parameters // UNIT
        group = torch.arange(start // UNIT, start // UNIT + (end - start) // UNIT, device=flat.device)
        rows = group * self.of + torch.remainder(self.number - group, self.of)
        cut = (end - start) % UNIT
        return rows, flat[: whole * UNIT].view(whole, UNIT), flat[self.parameters - cut :]


def fragments(parameters: int, of: int) -> list[Fragment]:
    """All fragments, by number."""
    return [Fragment(parameters, number, of) for number in range(of)]
