"""A small model with experts learns in two stages, and uses its experts."""

import pytest
import torch
import torch.nn.functional as F

from swarmnode.model.decoder import Experts, grouped


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="an older torch than the kernel")
def test_the_one_kernel_is_the_loop() -> None:
    torch.manual_seed(1)
    experts = Experts(4, 32, 16)
    counts = torch.tensor([5, 0, 9, 2])
    x = torch.randn(16, 32, requires_grad=True)
    expected = experts(x, counts)
    gates, ups, downs = (
        [getattr(expert, name).weight for expert in experts] for name in ("gate_proj", "up_proj", "down_proj")
    )
    found = grouped(F.silu(grouped(x, counts, gates)) * grouped(x, counts, ups), counts, downs)
    torch.testing.assert_close(found, expected)
    out = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, (x, *gates, *ups, *downs), out),
        torch.autograd.grad(expected, (x, *gates, *ups, *downs), out),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
