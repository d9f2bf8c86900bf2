"""A stage's checked input for a microbatch: token ids or activations, document boundaries, and counted targets.

Every stage gets the tokens of a microbatch beside its activations. So each finds by itself where documents begin and
how many targets count, and a replica that recomputes the hop with the same tensors finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.data.sample import IGNORED, counted_targets
from swarmnode.errors import RemoteFault
from swarmnode.manifest import BOUNDARY_BLOCK, Manifest, boundary_nbytes, boundary_width
from swarmnode.model.documents import Documents
from swarmnode.model.split import StageLayers
from swarmnode.model.tensor import (
    DTYPES,
    check_finite,
    check_shape,
    decode_activation,
    decode_tokens,
    encode,
    host_room,
    to_device,
    to_host,
)
from swarmnode.ports import WireTensor

# Coding of activations and their gradients between stages, by the manifest's `pipeline.boundary`: floats, or one byte
# each.
#
#     int8    q = round(x / s), s = max|x| / 127            [8-bit blockwise: arXiv 2110.02861, linear codes]
#
# with a step s (bfloat16) for every 64 neighbours in a token's vector, so that outlier channels only affect their own
# block. It rounds to the nearest, without randomness. On the wire: the steps of all tokens, then one byte per element,
# 1.03 a number; codec "int8", dtype "f32" and the shape of the decoded tensor. "subspace" (subspace.py) is bf16 with k
# numbers a token: the token's own row, the large part of the stream, is neither sent nor rounded.

CPU = torch.device("cpu")
LARGEST = 127.0
STEP_LEAST = 2.0**-100  # of a block of zeros
RAW = {"fp32": "f32", "bf16": "bf16", "fp64": "f64", "subspace": "bf16"}


def encode_boundary(tensor: Tensor, kind: str) -> WireTensor:
    """`tensor` [B, T, D] for a neighbouring stage; in its own memory if it is coded."""
    if kind in RAW:
        return encode(tensor.detach().to(DTYPES[RAW[kind]]))
    x = tensor.detach().float()
    rows = x.shape[0] * x.shape[1]
    width = x.shape[2]
    blocks = -(-width // BOUNDARY_BLOCK)
    x = F.pad(x.reshape(rows, width), (0, blocks * BOUNDARY_BLOCK - width)).view(rows, blocks, BOUNDARY_BLOCK)
    steps = (x.abs().amax(2) / LARGEST).clamp_(min=STEP_LEAST).to(torch.bfloat16)
    scaled = (x / steps.float().unsqueeze(2)).clamp_(-LARGEST, LARGEST).view(rows, -1)[:, :width]
    codes = scaled.round_().to(torch.int8)
    wire = host_room(boundary_nbytes(kind, rows, width), x)
    cut = 2 * rows * blocks
    wire[:cut].copy_(steps.view(torch.uint8).view(-1))
    wire[cut:].copy_(codes.contiguous().view(torch.uint8).view(-1))
    return WireTensor("f32", tuple(tensor.shape), wire.numpy().data.toreadonly(), kind)


def decode_boundary(
    wire: WireTensor, kind: str, shape: tuple[int | None, ...], what: str, device: torch.device = CPU
) -> Tensor:
    """Activations or their gradient [B, T, D] in main memory, checked to be finite and of `shape` (None: any positive
    size). Coded ones are decoded on `device` and become bfloat16, which is finer than the codes. Raises RemoteFault
    that names `what`."""
    if kind in RAW:
        return decode_activation(wire, RAW[kind], shape, what)
    if wire.codec != kind:
        raise RemoteFault(f"{what}: codec {wire.codec[:16]!r}; expected {kind}")
    check_shape(wire, ("f32",), shape, what)
    batch, length, width = wire.shape
    rows = batch * length
    blocks = -(-width // BOUNDARY_BLOCK)
    if wire.nbytes != (expected := boundary_nbytes(kind, rows, width)):
        raise RemoteFault(f"{what}: {wire.nbytes} bytes; expected {expected}")
    data = torch.frombuffer(wire.data, dtype=torch.uint8)
    data = to_device(data, device)
    cut = 2 * rows * blocks
    steps = data[:cut].clone().view(torch.bfloat16).view(rows, blocks, 1).float()
    codes = data[cut:].view(torch.int8).view(rows, width)
    x = F.pad(codes.float(), (0, blocks * BOUNDARY_BLOCK - width)).view(rows, blocks, BOUNDARY_BLOCK).mul_(steps)
    x = x.view(rows, -1)[:, :width].reshape(batch, length, width)
    check_finite(x, what)
    return to_host(x.to(torch.bfloat16))


@dataclass(frozen=True, slots=True, eq=False)
class StageInput:
    """`x`: token ids [B, T], or activations [B, T, D] or [B, T, k]; these come with `tokens` [B, T] if the boundary
    is a subspace. `counted`: number of the microbatch's targets in the loss. `documents`: None if windows are read
    whole."""

    x: Tensor
    counted: int
    tokens: Tensor | None = None
    documents: Documents | None = None

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def filled(self) -> float | None:
        """See memory_budget.graph_nbytes: rows of the separated documents per position; None if not separated."""
        return None if self.documents is None else self.documents.rows.numel() / self.documents.positions.numel()

    def part(self, first: int, last: int) -> StageInput:
        """Samples [first, last) alone; `counted` is then that of none."""
        tokens = None if self.tokens is None else self.tokens[first:last]
        documents = None if self.documents is None else self.documents.part(first, last)
        return StageInput(self.x[first:last], 0, tokens, documents)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.x, self.tokens, self.documents) if part is not None)


def read_input(
    manifest: Manifest,
    part: StageLayers,
    boundary: str,
    x: WireTensor,
    tokens: WireTensor | None,
    device: torch.device = CPU,
) -> StageInput:
    """The input of stage `part`; `boundary` is the coding of activations, which `device` decodes. Without `tokens`,
    which activations need only for a subspace or separated documents, all targets count. Raises RemoteFault for a wrong
    dtype or shape, token ids out of range, NaN or Inf."""
    model = manifest.model
    what = f"stage {part.stage}"
    end = manifest.data.document_end
    if part.has_embedding:
        ids = _ids(manifest, x, f"input of {what}")
        return StageInput(ids, counted_targets(x, end), None, None if end is None else Documents.of(ids, end))
    decoded = decode_boundary(x, boundary, (None, model.context, boundary_width(manifest)), f"input of {what}", device)
    in_subspace = manifest.pipeline.boundary == "subspace"
    if tokens is None:
        assert end is None and not in_subspace, "activations need their tokens beside them"
        return StageInput(decoded, decoded.shape[0] * model.context)
    ids = _ids(manifest, tokens, f"tokens of {what}")
    check_samples(part, decoded.shape[0], ids)
    documents = None if end is None else Documents.of(ids, end)
    return StageInput(decoded, counted_targets(tokens, end), ids if in_subspace else None, documents)


def read_targets(manifest: Manifest, tokens: WireTensor) -> Tensor:
    """The next tokens int64 [B, T], IGNORED where the loss does not count them. Raises RemoteFault as `read_input`."""
    model = manifest.model
    end = manifest.data.document_end
    ids, counts = decode_tokens(tokens, model.context, model.vocabulary, "tokens of the loss")
    targets = ids[:, 1:].clone()
    if counts is not None:
        targets[~counts[:, 1:]] = IGNORED
    if end is not None:
        targets[ids[:, :-1] == end] = IGNORED
    return targets


def check_samples(part: StageLayers, samples: int, kept: Tensor) -> None:
    """Raises RemoteFault unless `kept` has `samples` samples."""
    if samples != kept.shape[0]:
        raise RemoteFault(f"stage {part.stage}: {samples} samples announced, {kept.shape[0]} sent")


def _ids(manifest: Manifest, tokens: WireTensor, what: str) -> Tensor:
    return decode_tokens(tokens, manifest.model.context, manifest.model.vocabulary, what)[0][:, :-1]
