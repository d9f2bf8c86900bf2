"""A pretend accelerator of true sizes: shapes, dtypes and devices, no numbers and no memory.

`torch.device("pretend")` is PyTorch's slot for a backend in Python, with an autocast that lowers products to bfloat16
as CUDA's does. Inside `books()` every tensor is a fake one, and a ledger counts the bytes of live storages on the
pretend device and on the host. A stage of Llama 3 8B passes forward and backward in seconds.

It shows bytes and dtypes. It does not show numbers, streams, kernels or the allocator's fragmentation.
"""

import contextlib
import functools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarmnode.model import documents, moments

NAME = "pretend"
CACHES = (moments.codes, documents._window_mask)
"""Caches of tensors in the product: nothing real enters the books, and nothing made under them outlives them."""
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")


@functools.cache
def register() -> tuple[torch.library.Library, ...]:
    """Make the device known to this process. The libraries must stay alive, so the cache holds them."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = types.ModuleType(NAME)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
        "manual_seed_all": None,
        "get_rng_state": None,
        "set_rng_state": None,
    }
    for name, value in answers.items():
        setattr(module, name, lambda *args, value=value, **kwargs: value)
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    lowered = torch.library.Library("aten", "IMPL")
    for name, op in (("linear", torch.nn.functional.linear), ("matmul", torch.matmul)):
        lowered.impl(name, _in_half(op), "AutocastPrivateUse1")
    return rest, lowered


def _in_half(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`op` with float32 arguments cast to autocast's dtype."""
    own_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

    def lower(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.device.type == NAME:
            return value.to(torch.get_autocast_dtype(NAME))
        return value

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            return op(*map(lower, args), **{key: lower(value) for key, value in kwargs.items()})

    return kernel


@dataclass(slots=True)
class Account:
    """Bytes of live storages on one device, and the most there ever were."""

    now: int = 0
    peak: int = 0
    live: dict[int, int] = field(default_factory=dict)

    def take(self, storage: torch.UntypedStorage) -> None:
        """Count `storage`, until it is gone."""
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)

    def mark(self) -> int:
        """Begin a new peak; returns the bytes now."""
        self.peak = self.now
        return self.now


class Books(TorchDispatchMode):
    """The ledger. A number read from a fake tensor is `number`: norms, checks and losses go on with it."""

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()
        self.device = Account()
        self.host = Account()
        self.products: Counter[str] = Counter()  # matrix products by dtype
        self.widest = 0  # elements of the largest tensor made on the device
        self.crossings: list[tuple[str, int]] = []  # ("to" or "from" the device, bytes), one per copy
        self.reads = 0  # numbers read from the device
        self._number = number

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        given = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        if "_local_scalar_dense" in name:
            self.reads += given[0].device.type == NAME
            return self._number if given[0].is_floating_point() else int(self._number)
        out = func(*args, **(kwargs or {}))
        if name.startswith(PRODUCTS):
            self.products[str(given[-1].dtype)] += 1
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                self._record(name, given, made)
        return out

    def _record(self, name: str, given: list[torch.Tensor], made: torch.Tensor) -> None:
        there = made.device.type == NAME
        if "copy" in name and given and {one.device.type for one in (*given, made)} == {NAME, "cpu"}:
            self.crossings.append(("to" if there else "from", made.numel() * made.itemsize))
        if there:
            self.widest = max(self.widest, made.numel())
        if there or made.device.type == "cpu":
            (self.device if there else self.host).take(made.untyped_storage())


class FlashAttention(torch.autograd.Function):
    """The tensors that fused attention keeps for its backward, by shape."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention as CUDA's autocast runs it: in half precision, without a T x T matrix."""
    if torch.is_autocast_enabled(NAME):
        q, k, v = (one.to(torch.get_autocast_dtype(NAME)) for one in (q, k, v))
    assert {q.dtype, k.dtype, v.dtype} <= {torch.bfloat16, torch.float16}, "T x T attention: not in half precision"
    out: torch.Tensor = FlashAttention.apply(q, k, v)
    return out


@contextlib.contextmanager
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    """Fake tensors and their ledger, for the length of a block."""
    forget()
    try:
        with monkeypatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True), Books() as ledger:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _flash)
            yield ledger
    finally:
        forget()


def forget() -> None:
    """Clear the product's caches."""
    for kept in CACHES:
        kept.cache_clear()


register()  # while tests are collected: autograd counts the devices once, before its first backward
