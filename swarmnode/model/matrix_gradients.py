"""Gradients of a stage's matrices, made after that of its input.

A stage's backward makes two things: the gradient of its input, which the stage before waits for, and those of its
weights, which nobody waits for before the step. They are apart here, as zero bubble pipelines have them [arXiv
2401.10241, section 2]: the first pass makes the input's gradient and notes what enters and leaves each matrix product

    y = x W^T:   dL/dx = dL/dy W   at once,   dL/dW = (dL/dy)^T x   later

in the products that autograd makes, so that the same bits are added. What is no matrix (norms, biases) is added in the
first pass. From the first pass to the end, dL/dy of each product is in memory beside its x.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True, eq=False)
class MatrixProduct:
    """A product of one forward. `gradient`: of its output, once a backward that waits for nothing else has passed."""

    weight: Tensor
    x: Tensor
    wanted: bool = False
    gradient: Tensor | None = None

    def see(self, gradient: Tensor) -> None:
        """The output has this gradient."""
        if self.wanted:
            self.gradient = gradient

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradient of the weight to what has come together in it."""
        assert self.gradient is not None and self.weight.grad is not None
        above = self.gradient.reshape(-1, self.gradient.shape[-1])
        below = self.x.reshape(-1, self.x.shape[-1]).to(above.dtype)
        self.weight.grad.add_(above.t().mm(below))


class MatrixGradients:
    """The matrix products of `module` in its forwards, and those whose gradients are left to be added."""

    def __init__(self, module: nn.Module, added: set[int]) -> None:
        """`added` gets the id of each weight whose gradient was added here."""
        self._added = added
        self._noting: list[MatrixProduct] | None = None
        self._left: deque[MatrixProduct] = deque()
        for part in module.modules():
            if type(part) is nn.Linear:
                part.register_forward_hook(self.note)

    def noted(self, work: Callable[[], Tensor]) -> tuple[Tensor, list[MatrixProduct]]:
        """(the value of the forward `work`, its products by a matrix of their own)."""
        products: list[MatrixProduct] = []
        self._noting = products
        try:
            value = work()
        finally:
            self._noting = None
        uses = Counter([id(product.weight) for product in products])
        return value, [product for product in products if uses[id(product.weight)] == 1]

    def note(self, module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        """Hook of a linear `module`, which has made `y` of the input `given`."""
        assert isinstance(module, nn.Linear)
        weight = module.weight
        if self._noting is not None and y.requires_grad and weight.requires_grad:
            self._noting.append(product := MatrixProduct(weight, given[0].detach()))
            y.register_hook(product.see)  # type: ignore[no-untyped-call]

    def leave(self, products: list[MatrixProduct]) -> None:
        """The next backward does not make the gradients of these `products`; `add` makes them later."""
        for product in products:
            product.wanted = True
        self._left.extend(products)

    def add(self) -> None:
        """Add what is left, one product after the other: where memory runs out, call it again for the rest."""
        while self._left:
            product = self._left[0]
            if product.gradient is not None:  # None: nothing of the loss depends on it
                product.add()
                self._added.add(id(product.weight))
            self._left.popleft()

    def drop(self) -> None:
        """Forget what is left."""
        self._left.clear()
