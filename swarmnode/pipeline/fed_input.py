"""A feeder's input, as the checks of it see it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnode.ids import PeerId
from swarmnode.ports import WireTensor


@dataclass(frozen=True, slots=True)
class FeederInput:
    """A feeder's input: samples `first` to `first + samples`, their tokens, and the activations that `server` made of
    them at the first stage: the feeder itself, or the replica that took them on."""

    feeder: PeerId
    server: PeerId
    microbatch: bytes
    first: int
    samples: int
    tokens: WireTensor
    x: WireTensor


Read = Callable[[Sequence[int]], Awaitable[WireTensor]]
"""Tokens [B, T+1] of samples, from our own copy of the text. Raises DataError, LocalFault, Unavailable."""

WeighFeeder = Callable[[PeerId, FeederInput], Awaitable[WireTensor]]
"""The activations of a feeder's input, computed here with a given feeder's weights. Raises Unavailable, RemoteFault."""


def same_tokens(one: WireTensor, other: WireTensor) -> bool:
    """Whether two token tensors are equal."""
    return one.dtype == other.dtype and bytes(memoryview(one.data)) == bytes(memoryview(other.data))
