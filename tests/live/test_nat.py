"""Nodes behind NATs take part: through relays where nothing gets in, directly where a port is open."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.run.manifest import TransportSpec
from swarmnode.run.manifest.folder import init
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.iroh_node import NEEDS_IROH
from tests.support.network_lab import in_lab


def test_nodes_behind_nats_train_together(tmp_path: Path) -> None:
    init(tmp_path / "run", PRESETS["tiny"])
    told = json.loads(in_lab("nat_lab.py", tmp_path))
    assert {name: fields["reach"] for name, fields in told["reach"].items()} == {
        "alice": "relayed",
        "bob": "relayed",
        "carol": "public",
    }
    assert any("/p2p-circuit/p2p/" in address for address in told["addresses"]["alice"])
    assert any(address.startswith("/ip4/81.0.4.2/tcp/4001/p2p/") for address in told["addresses"]["carol"])


@NEEDS_IROH
@pytest.mark.nightly
def test_over_iroh_nodes_with_an_open_port_train_and_others_are_told_to_open_one(tmp_path: Path) -> None:
    init(tmp_path / "run", replace(PRESETS["tiny"], transport=TransportSpec("iroh")))
    told = json.loads(in_lab("nat_lab.py", tmp_path))
    assert {name: fields["reach"] for name, fields in told["reach"].items()} == {
        "alice": "public",
        "bob": "private",
        "carol": "public",
    }
    assert "open a port" in told["reach"]["bob"]["says"]
    assert any(address.startswith("/ip4/81.0.4.2/udp/4001/p2p/") for address in told["addresses"]["carol"])
