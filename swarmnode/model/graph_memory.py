"""The memory of a stage's graphs by formula, without tensors: of a tape, and at the peak of a pass."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.manifest import Manifest, boundary_width
from swarmnode.model.adapter import adapter_graph
from swarmnode.model.head_chunk import head_nbytes
from swarmnode.model.memory_estimate import FILLED, graph_nbytes
from swarmnode.model.split import StageLayers

HALF = 2  # bytes of a bfloat16 or float16 number


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Memory of `part` on a device of type `kind`, with weights of `itemsize` bytes."""

    manifest: Manifest
    part: StageLayers
    itemsize: int
    autocast: bool
    kind: str

    def tape_nbytes(self, samples: int, by_layer: bool, filled: float | None) -> int:
        """Bytes of the graph of a forward over `samples`. `filled`: as in `graph_nbytes`."""
        model, count = self.manifest.model, samples * self.manifest.model.context
        width = boundary_width(self.manifest)
        if by_layer:
            return count * self.itemsize * (model.width * len(self.part.layers) + width)
        sizes = model, self.part, count, width, self.itemsize, self.autocast, filled
        adapters = adapter_graph(self.manifest, self.part)
        return graph_nbytes(*sizes, fused=self.kind != "cpu", adapters=adapters)

    def pass_nbytes(self, samples: int, by_layer: bool) -> int:
        """Bytes of a forward and backward over `samples` at their peak: the graph, and what a layer's backward or the
        head holds beside it. By layer, the graph of the layer in work is made only then."""
        model, count = self.manifest.model, samples * self.manifest.model.context
        held = HALF if self.autocast else self.itemsize
        filled = None if self.manifest.data.document_end is None else FILLED
        layer = 3 * held * count * model.ffn + 2 * self.itemsize * count * model.width
        layer += (held + self.itemsize) * model.ffn * model.width  # the gradient of a matrix, before it is added
        if by_layer:
            layer += self.tape_nbytes(samples, False, filled) // max(1, len(self.part.layers))
        head = 0
        if self.part.has_head:
            head = head_nbytes(count, model.vocabulary, model.width, autocast=self.autocast, kind=self.kind)
        return self.tape_nbytes(samples, by_layer, filled) + max(layer, head)
