"""Slow links, and a network that falls in two halves and heals, with real packets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnode import manifest as manifests
from swarmnode.manifest import PRESETS

from .test_nat import in_lab


@pytest.mark.swarm
def test_a_partition_is_survived_and_healed(tmp_path: Path) -> None:
    manifests.init(tmp_path / "run", PRESETS["tiny"])
    told = json.loads(in_lab("wan_lab.py", tmp_path, "tc"))
    assert told["cut_s"] > 0 and told["healed_s"] > 0
