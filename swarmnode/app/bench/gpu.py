"""One table about a device: its speed, the precision chosen, and what a stage costs there in bytes and time.

A stage's microbatch goes through the whole path, from tensors in wire form to tensors in wire form. Beside it stand the
same layers alone, with their tensors on the device already, and as many layers of plain PyTorch (pytorch_model.py),
which share no code with them. It runs on a CPU, too, with small sizes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from swarmnode.app.bench.pytorch_model import PlainLayer, positions
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.parted_work import Parts, run_whole, timed
from swarmnode.base.ports import Packet
from swarmnode.model.boundary_code import encode_boundary
from swarmnode.model.device import autocasts, check_device, device_text, free_nbytes, half_dtype, use_device
from swarmnode.model.memory_budget import ComputeMode, microbatch_nbytes
from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import encode
from swarmnode.run.manifest import GossipSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec
from swarmnode.train.gossip.compression import codec

T = TypeVar("T")
LAYERS = (2, 4)  # 0.44 and 0.87 G parameters at width 4096
STATE_BYTES = 16  # a parameter, on the device, with a plain model of float32 beside it for the comparison
STATE_SHARE = 0.7  # of the free memory, for the largest stage
PARAMETERS_MAX = 2_000_000_000  # of the largest stage: more takes minutes of copies to main memory
EQUAL = {False: 1e-3, True: 3e-2}  # relative difference of losses from the CPU's in float32, without and with autocast
CODECS = ("modular4", "int8", "topk64")


def run(*, device: str, small: bool = False, times: int = 3) -> dict[str, Any]:
    """Measure `device`. `small`: a model of a few megabytes. Raises UsageError and HardwareFault for a bad device."""
    check_device(device)
    use_device(device)
    fast = autocasts(device)
    products = half_dtype(torch.device(device)) if fast else torch.float32
    size = 256 if small else 4096
    peak = 2.0 * size**3 / _best(_product(device, size, products), device, times)
    model = ModelSpec(width=64, heads=4, kv_heads=2, ffn=128, context=32) if small else _large()
    rows = [_stage(model, layers, device, fast, peak, times) for layers in _sizes(model, device, small)]
    return {
        "device": {
            "device": device_text(device),
            "matrix products": str(products).rpartition(".")[2],
            f"TFLOP/s of a product of {size}": peak / 1e12,
        },
        "stages": rows,
        "codecs": [_codec(name, device, 1 << 16 if small else 1 << 26, times) for name in CODECS],
        "equality": [equality(device, autocast=cast) for cast in sorted({False, fast})],
    }


def _large() -> ModelSpec:
    return ModelSpec(width=4096, heads=32, kv_heads=8, ffn=14336, context=2048, rope_theta=5e5)


def _sizes(model: ModelSpec, device: str, small: bool) -> Sequence[int]:
    """Layers of the stages measured: about 0.5 and 1 G parameters, and as many as fit."""
    free = free_nbytes(device)
    if small or free is None:
        return LAYERS[:1] if not small else LAYERS
    layer = 2 * model.width * (model.width + model.width // 4) + 3 * model.width * model.ffn
    most = min(int(STATE_SHARE * free / (STATE_BYTES * layer)), PARAMETERS_MAX // layer)
    return tuple(dict.fromkeys((*(one for one in LAYERS if one < most), max(1, most))))


def _product(device: str, size: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b


def _best(work: Callable[[], object], device: str, times: int) -> float:
    """Seconds that `work` takes at best; the first call warms up."""
    return min([_timed(work, device)[1] for _ in range(times + 1)][1:])


def _timed(work: Callable[[], T], device: str) -> tuple[T, float]:
    """(the value of `work`, the seconds it took)."""
    _wait(device)
    begun = time.perf_counter()
    value = work()
    _wait(device)
    return value, time.perf_counter() - begun


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _manifest(model: ModelSpec, layers: int) -> Manifest:
    """A run of three stages of `layers` layers each."""
    return Manifest(
        model=replace(model, layers=3 * layers),
        pipeline=PipelineSpec(stages=3, boundary="bf16"),
        inner=InnerSpec(microbatch=4, inner_batch=16, average_share=0.0),
        gossip=GossipSpec(codec="modular4"),
    )


def _stage(model: ModelSpec, layers: int, device: str, fast: bool, peak: float, times: int) -> dict[str, Any]:
    """A row: an inner stage of `layers` layers."""
    manifest = _manifest(model, layers)
    cuda = device.startswith("cuda")
    before = torch.cuda.memory_allocated(device) if cuda else 0
    replica = TorchReplica(manifest, 1, device, autocast=fast, sender="bench", draw=False)
    replica.stage.theta.data.normal_(0.0, 0.02)  # the seed's own take a minute for a thousand million (measured)
    replica.weights_placed()
    state = torch.cuda.memory_allocated(device) - before if cuda else 0
    stage = replica.stage
    samples = manifest.inner.microbatch
    wire = encode_boundary(torch.randn(samples, model.context, model.width), "bf16")

    def whole() -> None:
        stage.give_up()  # what the layers alone have counted
        _, tape = replica.forward(wire, keep=True)
        assert tape is not None
        replica.backward(tape, wire, samples)

    x = torch.randn(samples, model.context, model.width, device=device)
    plain = _plain(model, layers, device, fast, x, times)

    def bare() -> None:
        leaf = x.detach().requires_grad_()
        with torch.autocast(stage.device.type, half_dtype(stage.device), enabled=fast):
            y = stage.module.hidden(leaf)
        torch.autograd.backward(y, x)

    seconds = _best(whole, device, times)
    alone = _best(bare, device, times)
    flops = 3.0 * stage.part.cost * samples * model.context
    row: dict[str, Any] = {
        "parameters / M": replica.stage.parameters / 1e6,
        "ms a microbatch": 1e3 * seconds,
        "ms of the layers alone": 1e3 * alone,
        "ms of plain PyTorch": 1e3 * plain,
        "busy at most": alone / seconds,
        "MFU": flops / seconds / peak,
        "MFU of the layers alone": flops / alone / peak,
        "MFU of plain PyTorch": flops / plain / peak,
        "formula / GB over state": microbatch_nbytes(manifest, stage.part, ComputeMode(cuda, fast)) / 1e9,
    }
    if cuda:
        row |= _card(replica, whole, device, before + state) | {"bytes a parameter": state / replica.stage.parameters}
    replica.step(samples)  # the first makes room
    whole()
    row["ms of an inner step"] = 1e3 * _timed(lambda: replica.step(samples), device)[1]
    return row | _round(replica, samples, device)


def _round(replica: TorchReplica, samples: int, device: str) -> dict[str, float]:
    """The seconds for which a round, and a donor's copy of the state, stop the device, and those beside it."""
    replica.message(1)  # makes room for packets, once
    draft, stop = _timed(lambda: replica.draft(2), device)
    tensors, writing = _timed(draft.finish, device)
    packet = Packet(1.0, samples, tensors, sender="another")
    step_stop, step = _in_parts(lambda: replica.apply_in_parts(2, 1.0, [packet], lone=False), device)
    copy_stop, copy = _in_parts(lambda: replica.snapshot_in_parts(packed=True), device)
    if not draft.beside:
        stop += writing
        writing = 0.0
    return {
        "s that a round stops the device": stop + step_stop,
        "s of a round beside it": writing + step - step_stop,
        "s that a donor's copy stops it": copy_stop,
        "s of a copy beside it": copy - copy_stop,
    }


def _in_parts(work: Callable[[], T | Parts[T]], device: str) -> tuple[float, float]:
    """Seconds of `work` on the device's thread, and in all."""

    def now_s() -> float:
        _wait(device)
        return time.perf_counter()

    begun_s = now_s()
    value = work()
    if isinstance(value, Generator):
        (_, stopped), whole = _timed(lambda: run_whole(timed(value, now_s)), device)
        return stopped, whole
    return (now_s() - begun_s,) * 2


def _plain(model: ModelSpec, layers: int, device: str, fast: bool, x: torch.Tensor, times: int) -> float:
    """Seconds of forward and backward of `layers` layers of plain PyTorch over `x` [B, T, D]."""
    cos, sin = (table.to(device) for table in positions(model))
    with torch.device(device):
        stack = nn.ModuleList(PlainLayer(model) for _ in range(layers))

    def both() -> None:
        y = leaf = x.detach().requires_grad_()
        with torch.autocast(torch.device(device).type, half_dtype(torch.device(device)), enabled=fast):
            for layer in stack:
                y = layer(y, cos, sin)
        torch.autograd.backward(y, x)
        assert leaf.grad is not None

    return _best(both, device, times)


def _card(replica: TorchReplica, whole: Callable[[], None], device: str, state: int) -> dict[str, Any]:
    """Peak over the state, and how often the host waits for the device in a microbatch."""
    torch.cuda.reset_peak_memory_stats(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            whole()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {
        "peak / GB over state": (torch.cuda.max_memory_allocated(device) - state) / 1e9,
        "stops a microbatch": sum("synchroniz" in str(one.message) for one in caught),
    }


def _codec(name: str, device: str, elements: int, times: int) -> dict[str, Any]:
    """A row: GB of float32 a second that `name` codes and decodes."""
    coder = codec(name)
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(elements, generator=draw).to(device)
    phi = theta + 0.01
    reference = phi if coder.relative else None
    encoding = _best(lambda: coder.encode(theta, reference=reference, seed=1), device, times)
    packet = coder.encode(theta, reference=reference, seed=2)
    out = torch.empty_like(theta)
    decoding = _best(lambda: coder.decode(packet, out, reference), device, times)
    return {"codec": name, "encode GB/s": 4e-9 * elements / encoding, "decode GB/s": 4e-9 * elements / decoding}


def equality(device: str, *, autocast: bool) -> dict[str, Any]:
    """The greatest relative difference of twelve microbatches' losses and six steps' gradient norms from the CPU's in
    float32, and whether it is as small as rounding explains."""
    wanted = _losses("cpu", autocast=False)
    device_losses = _losses(device, autocast=autocast)
    apart = float(np.max(np.abs(device_losses - wanted) / np.abs(wanted)))
    return {
        "products": "16 bits" if autocast else "float32",
        "relative difference": apart,
        "equal": apart < EQUAL[autocast],
    }


def _losses(device: str, *, autocast: bool) -> np.ndarray:
    model = ModelSpec(layers=4, width=64, heads=4, kv_heads=2, ffn=128, context=32)
    run = Manifest(model=model, pipeline=PipelineSpec(stages=2), inner=InnerSpec(microbatch=4, inner_batch=8))
    first, last = (StageReplica(run, stage, device, autocast=autocast) for stage in range(2))
    draw = np.random.default_rng(1)
    losses = list[float]()
    for number in range(12):
        ids = draw.integers(0, model.vocabulary, (4, model.context + 1), dtype=np.int64)
        tokens = encode(torch.from_numpy(ids).to(torch.uint16))
        y, tape = first.forward(tokens, keep=True, graph=number % 3 > 0, tokens=tokens)
        result = last.loss(y, tokens, 4, train=True)
        assert tape is not None and result.gradient is not None
        first.backward(tape, result.gradient, 4)
        losses.append(result.loss_sum)
        if number % 2:
            losses += [stage.step(100 * number).gradient_norm for stage in (first, last)]
    return np.array(losses)
