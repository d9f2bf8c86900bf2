"""Tensors to and from the wire, without a copy where none is needed, and checked before anything believes them.

Whatever arrives was written by a peer: its dtype, shape, range and finiteness are checked here, and trusted inside.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from swarmnode.errors import RemoteFault
from swarmnode.ports import DTYPE_BYTES, WireTensor

DTYPES = {
    "f64": torch.float64,
    "i64": torch.int64,
    "f32": torch.float32,
    "i32": torch.int32,
    "u32": torch.uint32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "u16": torch.uint16,
    "i8": torch.int8,
    "u8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
assert DTYPES.keys() == DTYPE_BYTES.keys()

MAGNITUDE_MAX = 1e6  # guess: outliers in trained LLaMAs reach 1e4; below it no square of ours overflows float32

with warnings.catch_warnings():
    # torch warns once a process that a read-only buffer could be written to through the tensor; here nothing does.
    warnings.simplefilter("ignore", UserWarning)
    torch.frombuffer(b"\0", dtype=torch.uint8)


def decode(wire: WireTensor) -> Tensor:
    """The tensor `wire` describes, on the CPU, sharing its bytes: they must not change while it is in use, and it must
    not be written to. Raises RemoteFault for an unknown dtype, a codec, or bytes that do not fit the shape."""
    dtype = DTYPES.get(wire.dtype)
    if dtype is None:
        raise RemoteFault(f"tensor of unknown dtype {wire.dtype[:16]!r}; known: {', '.join(DTYPES)}")
    if wire.codec not in ("", "raw"):
        raise RemoteFault(f"tensor with codec {wire.codec[:16]!r} where raw elements were expected")
    expected = math.prod(wire.shape) * DTYPE_BYTES[wire.dtype]
    if any(size < 0 for size in wire.shape) or wire.nbytes != expected:
        raise RemoteFault(f"tensor {wire.dtype}{list(wire.shape)} has {wire.nbytes} bytes where {expected} belong")
    if expected == 0:
        return torch.empty(wire.shape, dtype=dtype)
    return torch.frombuffer(wire.data, dtype=dtype).view(wire.shape)


def encode(tensor: Tensor) -> WireTensor:
    """`tensor` for the wire, sharing its memory when it is contiguous and on the CPU: do not write to it afterwards."""
    name = NAMES[tensor.dtype]
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return WireTensor(name, tuple(tensor.shape), data)


def check_finite(tensor: Tensor, what: str) -> None:
    """One pass over the elements (16 µs for 131 072, measured). Raises RemoteFault for NaN, Inf or a magnitude over
    MAGNITUDE_MAX."""
    if tensor.numel() == 0:
        return
    least, most = (float(bound) for bound in torch.aminmax(tensor))  # NaN wins in both, and compares false
    if not (least >= -MAGNITUDE_MAX and most <= MAGNITUDE_MAX):
        raise RemoteFault(f"{what}: not finite or beyond ±{MAGNITUDE_MAX:g} (least {least:g}, most {most:g})")


def check_shape(wire: WireTensor, dtypes: tuple[str, ...], shape: tuple[int | None, ...], what: str) -> None:
    """Raises RemoteFault unless `wire` has one of `dtypes` and `shape`, in which None is any positive size."""
    if wire.dtype not in dtypes:
        raise RemoteFault(f"{what}: dtype {wire.dtype[:16]!r} where {' or '.join(dtypes)} belongs")
    fits = len(wire.shape) == len(shape) and all(
        size == wanted or (wanted is None and size > 0) for size, wanted in zip(wire.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise RemoteFault(f"{what}: shape {list(wire.shape)[:8]} where [{wanted}] belongs")


def decode_activation(wire: WireTensor, dtype: str, shape: tuple[int | None, ...], what: str) -> Tensor:
    """Activations or their gradient, checked: of `dtype` and `shape` (None: any positive size) and finite.
    Raises RemoteFault that names `what`."""
    check_shape(wire, (dtype,), shape, what)
    tensor = decode(wire)
    check_finite(tensor, what)
    return tensor


def decode_tokens(wire: WireTensor, context: int, vocabulary: int, what: str) -> Tensor:
    """Token ids [B, context + 1] as int64, checked to be below `vocabulary`. Raises RemoteFault that names `what`."""
    check_shape(wire, ("u16", "u32"), (None, context + 1), what)
    tokens = decode(wire).to(torch.int64)
    if (most := int(tokens.max())) >= vocabulary:
        raise RemoteFault(f"{what}: token id {most} where the vocabulary has {vocabulary}")
    return tokens


def cosine(one: Tensor, other: Tensor) -> float:
    """Of two tensors of one shape, from -1 to 1; 1 of two that are zero, 0 where one is."""
    a, b = one.flatten().double(), other.flatten().double()
    norms = float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))
    if 0.0 in norms:
        return float(norms == (0.0, 0.0))
    return float(torch.dot(a, b)) / (norms[0] * norms[1])
