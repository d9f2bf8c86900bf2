"""Nodes behind NATs take part: through relays where nothing gets in, directly where a port is open."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode import manifest as manifests
from swarmnode.manifest import PRESETS

LAB = Path(__file__).with_name("nat_lab.py")
CANNOT = 77


@pytest.mark.swarm
@pytest.mark.timeout(400)
def test_nodes_behind_nats_train_together(tmp_path: Path) -> None:
    for tool in ("unshare", "ip", "nft", "sysctl", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install iproute2 nftables")
    manifests.init(tmp_path / "run", PRESETS["tiny"])
    # A whole world of its own, users and processes too: no root needed, nothing left behind.
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    done = subprocess.run(
        [*unshare, "--mount-proc", sys.executable, str(LAB), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        cwd=LAB.parents[2],
    )
    if done.returncode == CANNOT or "unshare:" in done.stderr:
        pytest.skip(f"this kernel does not allow it: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name: fields["reach"] for name, fields in told["reach"].items()} == {
        "alice": "relayed",
        "bob": "relayed",
        "carol": "public",
    }
    assert any("/p2p-circuit/p2p/" in address for address in told["addresses"]["alice"])
    assert any(address.startswith("/ip4/81.0.4.2/tcp/4001/p2p/") for address in told["addresses"]["carol"])
