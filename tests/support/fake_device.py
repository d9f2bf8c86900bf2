"""A device that is not there: arithmetic of the CPU, and the rules of an accelerator.

Most of what fails on a GPU and works on a CPU is not arithmetic: tensors of two devices in one operation, numpy's view
of memory it cannot reach, an address given to C. Here tensors on DEVICE hide CPU tensors, every operation of PyTorch
passes by (`torch_dispatch`), and what CUDA would refuse is refused. What this does not show: kernels that a device
lacks, their rounding, streams, memory, speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("lazy", 0)  # of the types that PyTorch knows one of those whose backward runs on any thread
ACROSS = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Elsewhere(torch.Tensor):
    """A tensor on DEVICE."""

    inner: torch.Tensor  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"numpy reaches no memory on {DEVICE}")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def data_ptr(self) -> int:
        raise AssertionError(f"an address on {DEVICE} means nothing to C")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """DEVICE, which exists on this thread within."""
    autocast = torch.autocast  # refuses device types that it does not know, also where it is not enabled

    def known(kind: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if kind == DEVICE.type else autocast(kind, *args, **kwargs)

    with monkeypatch.context() as patch, _Mode():
        patch.setattr(torch, "autocast", known)
        yield DEVICE


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    there = [one for one in tensors if isinstance(one, Elsewhere)]
    here = [one for one in tensors if not isinstance(one, Elsewhere) and one.dim() > 0]
    indexed = func in INDEXED and isinstance(args[0], Elsewhere)  # its indices may lie on the CPU
    if there and here and func not in ACROSS and not indexed:
        raise RuntimeError(f"{func}: tensors on {DEVICE} and on the CPU")
    device = kwargs.get("device")
    target = bool(there) if device is None else torch.device(device).type == DEVICE.type
    if func is torch.ops.aten.copy_.default:
        target = isinstance(args[0], Elsewhere)
    inner_kwargs = {**kwargs, "device": torch.device("cpu")} if device is not None and target else kwargs
    out = func(*tree_map(_inner, args), **tree_map(_inner, inner_kwargs))
    if not target:
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return out.clone() if func is torch.ops.aten._to_copy.default else out
    out = tree_map(lambda one: Elsewhere(one) if type(one) is torch.Tensor else one, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if there else out


def _inner(one: Any) -> Any:
    return one.inner if isinstance(one, Elsewhere) else one
