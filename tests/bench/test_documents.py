"""The bench of documents read apart, on little: it runs, and compares the same arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from swarmnode.bench.micro import documents as bench
from swarmnode.model.documents import Documents


def test_every_length_is_measured_both_ways() -> None:
    found = bench.run(width=16, context=16, samples=2, repeats=1)
    assert [row["mean document"] for row in found["rows"]] == [4, 16, 128]
    assert all(row[what] > 0.0 for row in found["rows"] for what in row if what.endswith("ms"))


def test_the_mask_it_compares_with_is_the_same_attention() -> None:
    ids = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [1] * 7, [0] * 7])
    q, k, v = torch.randn(3, 3, 7, 2, 4, generator=torch.Generator().manual_seed(0))
    found = Documents.of(ids, bench.END)
    assert found is not None
    parts = [part.transpose(1, 2) for part in (q, k, v)]
    expected = F.scaled_dot_product_attention(*parts, attn_mask=bench._mask(ids)).transpose(1, 2)
    torch.testing.assert_close(found.attend(q, k, v), expected)
