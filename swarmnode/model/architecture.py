"""The architecture of a model's layers: the decoder's own, or one of an installed package (docs/models.md).

A run names it in model.architecture. A package offers one by an entry point of the group `swarmnode.architectures`. Its
code is never fetched: who joins installs the package first. Token table, last norm, head and everything around the
layers stay swarmnode's.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from swarmnode.base.errors import ManifestError, cause_of
from swarmnode.run.manifest import ModelSpec

if TYPE_CHECKING:
    from torch import nn

DECODER = "decoder"
GROUP = "swarmnode.architectures"

Shapes = dict[str, tuple[int, ...]]


class Architecture(Protocol):
    """Layers of one's own. The same model and layer must give the same answers on every machine: they are the layout of
    the flat buffers that replicas exchange."""

    def layer_shapes(self, model: ModelSpec, layer: int) -> Shapes:
        """Shapes of the parameters of `layer` by their names in its module. Matrices [out, in] decay and are stepped by
        Muon; vectors [n] do not decay. They begin as model/initial.py says, by name and shape."""
        ...

    def layer_flops(self, model: ModelSpec, layer: int) -> float:
        """Forward FLOPs per token; stages are cut so that they cost the same."""
        ...

    def layer_nbytes(self, model: ModelSpec, layer: int, itemsize: int) -> int:
        """Bytes that autograd keeps of each token in `layer`, with numbers of `itemsize` bytes."""
        ...

    def layer(self, model: ModelSpec, layer: int) -> nn.Module:
        """The module of `layer`, made on the meta device: called with activations [B, T, D], the rotary tables cos and
        sin (decoder.rotate), and `by` (attention.Attend: separate documents), None for whole windows; returns
        activations. Its parameters are replaced by views of a flat buffer; it has no buffers."""
        ...


_known: dict[str, Architecture] = {}


def register(name: str, architecture: Architecture) -> None:
    """Make `architecture` known in this process, without an entry point."""
    _known[name] = architecture


def architecture_of(model: ModelSpec) -> Architecture | None:
    """The architecture that `model` names; None for the decoder's own. Raises ManifestError if no installed package has
    it, or several have."""
    name = model.architecture
    if name == DECODER:
        return None
    if name not in _known:
        entries = list(entry_points(group=GROUP, name=name))
        if len(entries) != 1:
            have = "no installed package has it" if not entries else f"{len(entries)} installed packages have it"
            raise ManifestError(f"model.architecture = {name!r}: {have}; install the one that the run's owner names")
        try:
            _known[name] = entries[0].load()()
        except Exception as error:
            raise ManifestError(
                f"model.architecture = {name!r}: {entries[0].value} cannot be loaded: {cause_of(error)}"
            ) from error
    return _known[name]
