"""The harness of bench gossip and bench attack at a size of seconds; and what the guard must refuse."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.attack import packets
from benchmarks.attack.packets import ATTACKS
from benchmarks.method import gossip
from benchmarks.method.gossip import ALONE, PARALLEL
from benchmarks.method.replica_batch import ToySpec, losses, shapes
from swarmnode.base.errors import UsageError

TINY = replace(
    ToySpec(),
    replicas=8,
    width=16,
    ffn=32,
    layers=1,
    context=16,
    batch=4,
    inner_steps=6,
    rounds=6,
    warmup=6,
    validation=32,
)
DRAW = np.random.Generator(np.random.Philox(key=1))
TEXT = (
    np.tile(DRAW.integers(32, 64, 97), 300).astype(np.uint8),
    np.tile(DRAW.integers(32, 64, 97), 30).astype(np.uint8),
)
BRIEF = replace(TINY, rounds=2, inner_steps=2)


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "read_text", lambda path: TEXT)
    monkeypatch.setattr(packets, "_text", lambda path: TEXT)


def test_replicas_in_a_batch_are_what_they_are_alone() -> None:
    """No replica's loss or gradient sees another's weights."""
    torch.manual_seed(0)
    parameters = sum(math.prod(shape) for shape in shapes(TINY))
    theta = (torch.randn(3, parameters) * 0.05).requires_grad_()
    tokens = torch.randint(0, 256, (3, 4, 17))
    together = losses(TINY, theta, tokens)
    (gradient,) = torch.autograd.grad(together.sum(), theta)
    for i in range(3):
        row = theta.detach()[i : i + 1].clone().requires_grad_()
        alone = losses(TINY, row, tokens[i : i + 1])
        torch.testing.assert_close(alone[0], together[i])
        (one,) = torch.autograd.grad(alone.sum(), row)
        torch.testing.assert_close(one[0], gradient[i], atol=1e-6, rtol=1e-4)


def test_bench_gossip_writes_a_table_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gossip.PRESETS, "quick", (TINY, 2))
    whats = (ALONE, PARALLEL, "noloco/fp32", "noloco/modular4")
    said: list[str] = []
    found = gossip.run("quick", whats, out=tmp_path, say=said.append)
    rows = {row["method"]: row for row in found["methods"]}
    assert list(rows) == list(whats) and len(said) == 8
    assert rows["alone"]["bytes/param/round"] == 0 and rows["noloco/fp32"]["over fp32"] == 0
    assert 4 <= rows["noloco/fp32"]["bytes/param/round"] < 4.5, "and what stood in for a packet refused"
    assert 0.54 < rows["noloco/modular4"]["bytes/param/round"] < 0.8
    assert all(row["nats"] < math.log(256) for row in rows.values())
    assert json.loads((tmp_path / "gossip.json").read_text())["preset"] == "quick"
    page = (tmp_path / "gossip.html").read_text()
    assert "<svg" in page and "noloco/modular4" in page and "http" not in page


@pytest.mark.parametrize("what", ["noloco", "noloco/zip", "gossip/fp32", "noloco/fp32@never", "noloco/fp32+alpha"])
def test_unknown_methods_are_refused_before_anything_is_trained(what: str) -> None:
    from swarmnode.base.errors import SwarmnodeError

    with pytest.raises(SwarmnodeError):
        gossip.run("quick", (ALONE, what))
    with pytest.raises(UsageError, match="preset"):
        gossip.run("huge")
    for wrong, says in (
        ("average/fp32+alpha=0.5", "no momentum"),
        ("alone+beta=1", "with names rate"),
        ("noloco/fp32+k=1", "k"),
    ):
        with pytest.raises(SwarmnodeError, match=says):
            gossip.run("quick", (wrong,))


@pytest.mark.parametrize("name", ["nan", "malformed"])
@pytest.mark.parametrize("coding", ["noloco/fp32", "noloco/modular4", "partial_average/topk512", "sparseloco/e3m0"])
def test_packets_against_the_rules_are_refused_at_once(name: str, coding: str) -> None:
    found = packets.measure(packets.AttackRun(TINY, name, coding, "clipped"))
    assert found["lies refused"] >= 0.9 and found["nats"] < math.log(256)


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_no_attack_keeps_honest_replicas_from_learning_or_makes_them_refuse_each_other(name: str) -> None:
    found = packets.measure(packets.AttackRun(BRIEF, name, "noloco/modular4", "clipped"))
    assert found["nats"] < math.log(256), "below a guess among 256 bytes"
    assert found["honest refused"] == found["honest left out"] == 0.0
