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

HERE = Path(__file__).parent
CANNOT = 77


def in_lab(script: str, folder: Path, *tools: str) -> str:
    """The last line that `script`, a lab beside this file, prints when run on `folder` in a world of its own: users,
    network and processes too, so that no root is needed and nothing is left behind. Skips where that cannot be."""
    for tool in ("unshare", "ip", "nft", "sysctl", "mount", *tools):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install iproute2 nftables")
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    done = subprocess.run(
        [*unshare, "--mount-proc", sys.executable, str(HERE / script), str(folder)],
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
        cwd=HERE.parents[1],
    )
    if done.returncode == CANNOT or "unshare:" in done.stderr:
        pytest.skip(f"this kernel does not allow it: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.swarm
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
