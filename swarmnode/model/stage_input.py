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


class InputReader:
    """Reads what arrives at stage `part`. `boundary` is the coding of activations, which `device` decodes."""

    def __init__(self, manifest: Manifest, part: StageLayers, boundary: str, device: torch.device = CPU) -> None:
        self._part = part
        self._boundary = boundary
        self._device = device
        self._model = manifest.model
        self._document_end = manifest.data.document_end
        self._in_subspace = manifest.pipeline.boundary == "subspace"
        self.name = stage_name(part.stage)
        self.width = boundary_width(manifest)
        """Numbers per token between stages."""

    def read(self, x: WireTensor, tokens: WireTensor | None) -> StageInput:
        """The input. Without `tokens`, which activations need only for a subspace or separated documents, all targets
        count. Raises RemoteFault for a wrong dtype or shape, token ids out of range, NaN or Inf."""
        model = self._model
        end = self._document_end
        what = f"input of {self.name}"
        if self._part.has_embedding:
            ids = self._ids(x, what)
            return StageInput(ids, counted_targets(x, end), None, None if end is None else Documents.of(ids, end))
        decoded = decode_boundary(x, self._boundary, (None, model.context, self.width), what, self._device)
        if tokens is None:
            assert end is None and not self._in_subspace, "activations need their tokens beside them"
            return StageInput(decoded, decoded.shape[0] * model.context)
        ids = self._ids(tokens, f"tokens of {self.name}")
        self.check_samples(decoded.shape[0], ids)
        documents = None if end is None else Documents.of(ids, end)
        return StageInput(decoded, counted_targets(tokens, end), ids if self._in_subspace else None, documents)

    def _ids(self, tokens: WireTensor, what: str) -> Tensor:
        return decode_tokens(tokens, self._model.context, self._model.vocabulary, what)[0][:, :-1]

    def targets(self, tokens: WireTensor) -> Tensor:
        """The next tokens int64 [B, T], IGNORED where the loss does not count them. Raises RemoteFault as `read`."""
        model = self._model
        ids, counts = decode_tokens(tokens, model.context, model.vocabulary, "tokens of the loss")
        targets = ids[:, 1:].clone()
        if counts is not None:
            targets[~counts[:, 1:]] = IGNORED
        if self._document_end is not None:
            targets[ids[:, :-1] == self._document_end] = IGNORED
        return targets

    def check_samples(self, samples: int, kept: Tensor) -> None:
        """Raises RemoteFault unless `kept` has `samples` samples."""
        if samples != kept.shape[0]:
            raise RemoteFault(f"{self.name}: {samples} samples announced, {kept.shape[0]} sent")
