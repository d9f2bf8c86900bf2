"""Checks the header and the tensors of a microbatch against the manifest, before any arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import MICROBATCH_ID_BYTES, stage_name
from swarmnode.base.ports import WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.run.manifest import Manifest, boundary_width

TOKEN_DTYPES = ("u16", "u32")


def check_way(manifest: Manifest, stage: int, process: wire.Process) -> None:
    """Raises RemoteFault unless `process` is a microbatch that may be sent to a replica of `stage`."""
    stages = manifest.pipeline.stages
    if len(process.microbatch_id) != MICROBATCH_ID_BYTES:
        raise RemoteFault(f"microbatch id of {len(process.microbatch_id)} bytes; expected {MICROBATCH_ID_BYTES}")
    if len(process.itinerary) != stages or list(process.itinerary) != list(range(stages)):
        raise RemoteFault(f"an itinerary of {len(process.itinerary)} stages that is not 0 to {stages - 1} in order")
    if process.position != stage:
        raise RemoteFault(f"microbatch at position {process.position} sent to a replica of {stage_name(stage)}")
    if process.purpose not in (wire.PURPOSE_TRAIN, wire.PURPOSE_VALIDATE):
        raise RemoteFault(f"microbatch with unknown purpose {process.purpose}")


def check_samples(manifest: Manifest, samples: int, boundary_digest: bytes, own_digest: bytes) -> None:
    """Raises RemoteFault for a number of samples out of range, or activations in another subspace than ours."""
    if boundary_digest != own_digest:
        mine = own_digest.hex() or "none"
        theirs = boundary_digest.hex() or "none"
        raise RemoteFault(
            f"microbatch in the subspace {theirs}; here it is {mine}: one of us has another version of PyTorch"
        )
    if not 1 <= samples <= manifest.inner.microbatch:
        raise RemoteFault(f"microbatch of {samples} samples; 1 to {manifest.inner.microbatch} are allowed")


def check_inputs(manifest: Manifest, samples: int, tensors: Sequence[WireTensor]) -> tuple[WireTensor, WireTensor]:
    """(activations, tokens) of a request for `samples` samples. Raises RemoteFault for unexpected shapes."""
    if len(tensors) != 2:
        raise RemoteFault(f"microbatch with {len(tensors)} tensors; expected activations and tokens")
    check_activations(manifest, samples, tensors[0], "activations")
    return tensors[0], check_tokens(manifest, samples, tensors[1:])


def check_tokens(manifest: Manifest, samples: int, tensors: Sequence[WireTensor]) -> WireTensor:
    """The tokens of `samples` samples, the only one of `tensors`. Raises RemoteFault for unexpected shapes."""
    if len(tensors) != 1:
        raise RemoteFault(f"{len(tensors)} tensors; expected tokens alone")
    [tokens] = tensors
    due = (samples, manifest.model.context + 1)
    if tokens.shape != due or tokens.dtype not in TOKEN_DTYPES:
        raise RemoteFault(f"tokens {tokens.dtype}{list(tokens.shape)}; expected u16 or u32 {list(due)}")
    return tokens


def check_activations(manifest: Manifest, samples: int, tensor: WireTensor, what: str) -> None:
    """Raises RemoteFault unless `tensor` has the shape of activations between stages."""
    if tensor.shape != (due := (samples, manifest.model.context, boundary_width(manifest))):
        raise RemoteFault(f"{what} {list(tensor.shape)}; expected {list(due)}")
