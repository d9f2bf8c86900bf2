"""Nodes behind NATs take part: through relays where nothing gets in, directly where a port is open."""

import json
from pathlib import Path

from swarmnode import manifest as manifests
from swarmnode.manifest import PRESETS
from tests.support.network_lab import in_lab


def test_nodes_behind_nats_train_together(tmp_path: Path) -> None:
    manifests.init(tmp_path / "run", PRESETS["tiny"])
    told = json.loads(in_lab("nat_lab.py", tmp_path))
    assert {name: fields["reach"] for name, fields in told["reach"].items()} == {
        "alice": "relayed",
        "bob": "relayed",
        "carol": "public",
    }
    assert any("/p2p-circuit/p2p/" in address for address in told["addresses"]["alice"])
    assert any(address.startswith("/ip4/81.0.4.2/tcp/4001/p2p/") for address in told["addresses"]["carol"])
