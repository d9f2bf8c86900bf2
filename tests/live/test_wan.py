"""Slow links, and a network that falls in two halves and heals, with real packets."""

import json
from pathlib import Path

import pytest

from swarmnode import manifest as manifests
from swarmnode.manifest import PRESETS
from tests.support.network_lab import in_lab

pytestmark = pytest.mark.nightly  # tests/simulation/test_partition.py has partitions in each push


def test_a_partition_is_survived_and_healed(tmp_path: Path) -> None:
    manifests.init(tmp_path / "run", PRESETS["tiny"])
    told = json.loads(in_lab("wan_lab.py", tmp_path, "tc"))
    # The lab itself waits for rounds on both sides of the cut, and for rounds across once it has healed.
    assert told["across"] == [], "no packet crosses the cut: replicas on both sides train apart"
    assert told["lost"] == [], "nobody gives up meanwhile"
