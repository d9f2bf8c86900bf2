"""A stage's checked input for a microbatch: token ids or activations, document boundaries, and counted targets.

Every stage gets the tokens of a microbatch beside its activations. So each finds by itself where documents begin and
how many targets count, and a replica that recomputes the hop with the same tensors finds the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import stage_name
from swarmnode.base.ports import WireTensor
from swarmnode.data.sample import IGNORED, counted_targets
from swarmnode.model.boundary_code import CPU, decode_boundary
from swarmnode.model.documents import Documents
from swarmnode.model.split import StageLayers
from swarmnode.model.tensor import decode_tokens
from swarmnode.run.manifest import Manifest, boundary_width


@dataclass(frozen=True, slots=True, eq=False)
class StageInput:
    """`x`: token ids [B, T], or activations [B, T, D] or [B, T, k]; these come with `tokens` [B, T] if the boundary
    is a subspace. `counted`: number of the microbatch's targets in the loss. `documents`: None if windows are read
    whole."""

    x: Tensor
    counted: int
    tokens: Tensor | None = None
    documents: Documents | None = None
    samples: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        nbytes = self.x.nbytes
        nbytes += 0 if self.tokens is None else self.tokens.nbytes
        nbytes += 0 if self.documents is None else self.documents.nbytes
        object.__setattr__(self, "samples", self.x.shape[0])
        object.__setattr__(self, "nbytes", nbytes)

    @property
    def filled(self) -> float | None:
        """See memory_budget.graph_nbytes: rows of the separated documents per position; None if not separated."""
        return None if self.documents is None else self.documents.rows.numel() / self.documents.positions.numel()

    def part(self, first: int, last: int) -> StageInput:
        """Samples [first, last) alone; `counted` is then that of none."""
        tokens = None if self.tokens is None else self.tokens[first:last]
        documents = None if self.documents is None else self.documents.part(first, last)
        return StageInput(self.x[first:last], 0, tokens, documents)


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
    what = stage_name(part.stage)
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
        raise RemoteFault(f"{stage_name(part.stage)}: {samples} samples announced, {kept.shape[0]} sent")


def _ids(manifest: Manifest, tokens: WireTensor, what: str) -> Tensor:
    return decode_tokens(tokens, manifest.model.context, manifest.model.vocabulary, what)[0][:, :-1]
