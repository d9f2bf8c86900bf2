"""In which precision a machine multiplies."""

from __future__ import annotations

import pytest

from swarmnode.model import device


def test_a_machine_is_measured() -> None:
    """Whatever it is, it is one of the two; nobody knows which is faster here."""
    assert 0.0 < device.bfloat16_speedup("cpu") < 1000.0
    assert device.autocasts("cpu") in (False, True)


@pytest.mark.parametrize(("speedup", "wanted"), [(0.2, False), (1.0, False), (1.4, False), (2.0, True)])
def test_bfloat16_has_to_be_clearly_faster(speedup: float, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "bfloat16_speedup", lambda where: speedup)
    assert device.autocasts("cpu", "auto") is wanted
    assert device.autocasts("cpu", "bf16") and not device.autocasts("cpu", "fp32")


def test_other_devices_are_not_tried() -> None:
    assert not device.autocasts("mps") and not device.autocasts("xpu:0")
