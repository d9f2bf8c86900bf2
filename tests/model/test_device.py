"""In which precision a machine multiplies, and which device it takes."""

import pytest
import torch
import torch.nn.functional as F

from swarmnode.base.errors import Busy, UsageError
from swarmnode.model import backprop, device
from tests.support.tiny_model import ascend, manifest, stages_of, token_batch, token_wire, train_on


@pytest.mark.parametrize(("speedup", "wanted"), [(0.2, False), (1.0, False), (1.4, False), (2.0, True)])
def test_bfloat16_has_to_be_clearly_faster_on_a_cpu(
    speedup: float, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "bfloat16_speedup", lambda where: speedup)
    assert device.autocasts("cpu", "auto") is wanted
    assert device.autocasts("cpu", "bf16") and not device.autocasts("cpu", "fp32")


def test_gpus_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "bfloat16_speedup", lambda where: 1.0)
    assert device.autocasts("cuda") and device.autocasts("cuda:1") and device.autocasts("xpu:0")
    assert not device.autocasts("mps") and not device.autocasts("cuda", "fp32")


@pytest.mark.parametrize(
    ("capability", "hip", "wanted"),
    [((7, 5), None, torch.float16), ((8, 0), None, torch.bfloat16), ((6, 0), "6.2", torch.bfloat16)],
)
def test_bfloat16_follows_the_capability(
    capability: tuple[int, int], hip: str | None, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert device.half_dtype(torch.device("cuda:0")) == wanted
    assert device.half_dtype(torch.device("cpu")) == device.half_dtype(torch.device("mps")) == torch.bfloat16


def test_auto_is_the_card_with_the_most_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.resolve_device("cpu") == "cpu" and device.resolve_device("auto") == device.devices()[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(device, "_unused_nbytes", lambda where: {"cuda:0": 5, "cuda:1": 9, "cuda:2": 7}[where])
    assert device.devices() == ("cuda:1", "cuda:2", "cuda:0")
    assert device.resolve_device("auto") == "cuda:1" and device.resolve_device("cuda:0") == "cuda:0"
    with pytest.raises(UsageError, match="use auto, cpu, cuda"):
        device.check_device("abacus")


def test_float16_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients like those of float32; what leaves its range costs a microbatch, or a step, and halves the scale."""
    monkeypatch.setattr(backprop, "half_dtype", lambda where: torch.float16)
    chain = stages_of(manifest(), autocast=True)
    exact = stages_of(manifest())
    tokens = token_batch()
    assert train_on(chain, tokens) == pytest.approx(train_on(exact, tokens), rel=0.01)
    for stage, other in zip(chain, exact, strict=True):
        assert stage.backprop.scale == 16.0
        assert F.cosine_similarity(stage.grad, other.grad, dim=0) > 0.999
        norms = [one.step(100).gradient_norm for one in (stage, other)]
        assert norms[0] == pytest.approx(norms[1], rel=0.01)
    last = chain[-1]
    inner = chain[1]
    x, tapes = ascend(chain, tokens)
    last.backprop.scale = 1e30
    with pytest.raises(Busy, match="float16's range"):
        last.loss(x, token_wire(tokens), 4, train=True)
    assert last.accumulated == 0 and not last.grad.any() and last.backprop.scale == 5e29
    last.backprop.scale = 16.0
    result = last.loss(x, token_wire(tokens), 4, train=True)
    assert result.gradient is not None
    inner.backward(tapes[1], result.gradient, 4)
    inner.grad[0] = float("inf")
    theta = inner.theta.clone()
    assert inner.step(200).learning_rate == 0.0 and inner.backprop.scale == 8.0
    assert torch.equal(inner.theta, theta) and not inner.grad.any() and inner.accumulated == 0
