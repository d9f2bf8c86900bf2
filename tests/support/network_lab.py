"""Scripts in users, networks and processes of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LABS = Path(__file__).parents[1] / "live"

CANNOT = 77


def in_lab(script: str, folder: Path) -> str:
    """The last line that `script`, a lab of tests/live, prints when run on `folder` in a world of its own: users,
    network and processes too, so that no root is needed and nothing is left behind. Skips where that cannot be."""
    for tool in ("unshare", "ip", "nft", "sysctl", "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install iproute2 nftables")
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    done = subprocess.run(
        [*unshare, "--mount-proc", sys.executable, str(LABS / script), str(folder)],
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
        cwd=LABS.parents[1],
    )
    if done.returncode == CANNOT or "unshare:" in done.stderr:
        pytest.skip(f"this kernel does not allow it: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
