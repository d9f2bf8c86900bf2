"""A sample: `context` + 1 token ids, and a mask of the ids that the loss counts as targets.

Document starts are not stored: the run's end token ends each document, and the next one begins right behind it.

A loss mask travels in the highest bit of 32-bit ids. Fingerprints, signed statements and audits of the tokens of a
microbatch therefore cover it. Samples without a mask travel as plain ids of 16 or 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.base.errors import RemoteFault
from swarmnode.base.wire_tensor import WireTensor
from swarmnode.data.tokens import Tokens

UNCOUNTED = 1 << 31
"""A bit of a 32-bit id: the loss ignores this token as a target."""

IGNORED = -100
"""A target that does not count: the default ignore_index of PyTorch's cross_entropy."""

Flags = npt.NDArray[np.bool_]
DTYPES = {np.dtype("<u2"): "u16", np.dtype("<u4"): "u32"}


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """A batch of B samples: `tokens` [B, T + 1]. `loss_mask` [B, T + 1] is False at tokens that do not count as a
    target, such as padding or a prompt. None means that all count."""

    tokens: Tokens
    loss_mask: Flags | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def to_wire(self) -> WireTensor:
        """The tokens as u16 or u32 [B, T + 1]. A mask is packed into u32."""
        if self.loss_mask is None:
            packed = np.ascontiguousarray(self.tokens)
        else:
            packed = np.where(self.loss_mask, self.tokens, self.tokens.astype("<u4") | np.uint32(UNCOUNTED))
        return WireTensor(DTYPES[packed.dtype], packed.shape, packed.data.cast("B"))

    def targets(self, end_token: int | None = None) -> npt.NDArray[np.int64]:
        """The next tokens [B, T], IGNORED where the mask excludes them. With `end_token`, documents are separate: the
        first token of a document is IGNORED too, because nothing of that document precedes it."""
        targets = self.tokens[:, 1:].astype(np.int64)
        if self.loss_mask is not None:
            targets[~self.loss_mask[:, 1:]] = IGNORED
        if end_token is not None:
            targets[self.tokens[:, :-1] == end_token] = IGNORED
        return targets


def counted_targets(tokens: WireTensor, end_token: int | None = None) -> int:
    """The number of targets that the loss counts in `tokens` [B, T + 1] in wire form; see `SampleBatch.targets`. The
    caller has checked dtype and shape. Raises RemoteFault when the number of bytes does not match them."""
    samples, length = tokens.shape
    if tokens.dtype == "u16" and end_token is None:
        return samples * (length - 1)
    width = "<u2" if tokens.dtype == "u16" else "<u4"
    if tokens.nbytes != samples * length * np.dtype(width).itemsize:
        raise RemoteFault(f"tokens {tokens.dtype}{list(tokens.shape)} of {tokens.nbytes} bytes")
    packed = np.asarray(memoryview(tokens.data)).reshape(-1).view(width).reshape(samples, length)
    counts = np.ones((samples, length - 1), np.bool_)
    if width == "<u4":
        counts &= packed[:, 1:] < UNCOUNTED
        packed = packed & np.uint32(UNCOUNTED - 1)
    if end_token is not None:
        counts &= packed[:, :-1] != end_token
    return int(np.count_nonzero(counts))
