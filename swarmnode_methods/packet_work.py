"""The work behind a packet of gradients, as its last tensor: u8 [16], samples and targets as u64, little-endian."""

from __future__ import annotations

import struct

from swarmnode.base.bounds.table import SAMPLES_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import WireTensor
from swarmnode.base.work import Work

_COUNTS = struct.Struct("<QQ")
WORK_NBYTES = _COUNTS.size


def write_work(work: Work) -> WireTensor:
    """`work` as a tensor."""
    return WireTensor("u8", (WORK_NBYTES,), _COUNTS.pack(work.samples, work.targets))


def check_work(tensor: WireTensor, context: int) -> None:
    """Raises RemoteFault unless `tensor` is of `write_work`, and its samples of `context` tokens can have so many
    targets."""
    if (tensor.dtype, tuple(tensor.shape), len(tensor.data)) != ("u8", (WORK_NBYTES,), WORK_NBYTES):
        raise RemoteFault(f"a gradient's samples and targets as {tensor.dtype[:8]} {tuple(tensor.shape)[:4]}")
    samples, targets = _COUNTS.unpack(bytes(tensor.data))
    if samples > SAMPLES_MAX:
        raise RemoteFault(f"a gradient of {samples} samples; at most {SAMPLES_MAX}")
    if targets > samples * context:
        raise RemoteFault(f"a gradient of {targets} targets in {samples} samples of {context} tokens")


def read_work(tensor: WireTensor) -> Work:
    """The work of a checked `tensor`; its tokens are not stated."""
    samples, targets = _COUNTS.unpack(bytes(tensor.data))
    return Work.of(samples, 0, targets)
