"""The bench of a device, on the CPU and on little: it runs, and finds the CPU equal to itself."""

import pytest

from benchmarks.swarm import one_device
from swarmnode.app.bench import gpu
from swarmnode.base.errors import UsageError


def test_every_part_is_measured() -> None:
    found = gpu.run(device="cpu", small=True, times=1)
    sizes = [row["parameters / M"] for row in found["stages"]]
    assert sizes == sorted(sizes) and len(sizes) == len(gpu.LAYERS)
    for row in (*found["stages"], *found["codecs"]):
        # On the CPU nothing runs beside the device.
        assert all((value > 0.0) != ("beside it" in name) for name, value in row.items() if name != "codec"), row
    assert all(one["equal"] for one in found["equality"]), found["equality"]
    with pytest.raises(UsageError, match="use auto, cpu"):
        gpu.run(device="abacus")


def test_unequal_results_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gpu.equality("cpu", autocast=False)
    assert exact["relative difference"] == 0.0 and exact["equal"]
    assert 0.0 < gpu.equality("cpu", autocast=True)["relative difference"] < gpu.EQUAL[True]
    monkeypatch.setitem(gpu.EQUAL, True, 1e-9)
    assert not gpu.equality("cpu", autocast=True)["equal"]


def test_a_swarm_on_one_device_stands_beside_plain_pytorch() -> None:
    (row,) = one_device.run("cpu", small=True, boundaries=("subspace",), measure_s=2.0, plain_s=0.5)
    assert row["boundary"] == "subspace" and row["nodes"] == one_device.STAGES
    assert row["swarm tokens/s"] > 0.0 and row["plain tokens/s"] > 0.0
    assert row["swarm / plain"] == row["swarm tokens/s"] / row["plain tokens/s"]
