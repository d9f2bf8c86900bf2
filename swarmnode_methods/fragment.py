"""A fragment of the slow weights sent with packets of D, so that weights that drifted apart become equal again.

    round r carries phi[i] for i mod F == r mod F, in bfloat16; F is 31 at first, 127 in the end
    med <- the median of all members' values, the own one rounded alike (of an even number: halfway between two)
    where the own rounded value is not med: phi_i <- med, and theta_i changes by as much

Packets of D only mean the same at all members if their slow weights are equal. In a live swarm a packet misses a
member's deadline, a newcomer's state is rounds old, or one guard refuses what another accepts. If all are equal nothing
changes, to the bit. A member that deviates is back after F rounds, whatever it missed, to half a percent of each weight
(bfloat16). The median is used instead of the mean, so that a member in the majority stays where it is and a stale or
lying minority moves nobody; of two values it is the mean. In sparse packets, where members send different coordinates,
a median has no meaning; here all send the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.model.tensor import check_finite, decode, encode

FRAGMENTS = 127  # odd: replicas that meet only at every 2^k-th round (train/gossip/round.py) reach all fragments
FRAGMENTS_FIRST = 31  # guess: replicas begin alone, one by one, in the rounds in which most is learned
FIRST_ROUNDS = 3 * FRAGMENTS_FIRST


def fragments(parameters: int, round_index: int) -> int:
    """F in round `round_index`."""
    return min(FRAGMENTS if round_index > FIRST_ROUNDS else FRAGMENTS_FIRST, parameters)


def part(flat: Tensor, round_index: int) -> Tensor:
    """The fragment of `round_index` of `flat` [P]: a view [ceil or floor of P / F]."""
    every = fragments(flat.numel(), round_index)
    return flat[round_index % every :: every]


def count(parameters: int, round_index: int) -> int:
    """Elements of that fragment."""
    every = fragments(parameters, round_index)
    return len(range(round_index % every, parameters, every))


def nbytes(parameters: int, round_index: int) -> int:
    return 2 * count(parameters, round_index)


def fragment(phi: Tensor, round_index: int) -> WireTensor:
    """The fragment as sent, in its own memory."""
    slow = part(phi, round_index)
    return encode(torch.empty(len(slow), dtype=torch.bfloat16).copy_(slow))


def check_fragment(given: WireTensor, parameters: int, round_index: int) -> None:
    """Raises RemoteFault unless `given` is a fragment of that round with finite numbers."""
    found = (given.codec or "raw", given.dtype, tuple(given.shape))
    expected = ("raw", "bf16", (count(parameters, round_index),))
    if found != expected:
        raise RemoteFault(f"fragment of slow weights of (codec, dtype, shape) {found}; expected {expected}")
    check_finite(decode(given), f"fragment of slow weights of round {round_index}")


def pull(mine: Tensor, given: Sequence[WireTensor], *, counts: bool) -> Tensor:
    """The change of `mine`, our values [C] of a fragment, that moves them to the median of `given` and, if `counts`, of
    our own values as sent."""
    sent = mine.to(torch.bfloat16)
    if all(tensor.data == encode(sent).data for tensor in given):
        return torch.zeros_like(mine)  # as nearly always; a sort takes twenty times as long
    values = [decode(tensor).to(mine.device, mine.dtype) for tensor in given]
    rounded = sent.to(mine.dtype)
    if counts:
        values.append(rounded)
    ordered = torch.stack(values).sort(dim=0).values
    low = ordered[(len(values) - 1) // 2]
    high = ordered[len(values) // 2]
    middle = low + 0.5 * (high - low)
    return torch.where(rounded == middle, 0.0, middle - mine)
