"""An environment of nothing but the wheel, outside the repository, beside what is installed here but us."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_wheel(folder: Path) -> Path:
    """The wheel of this checkout, in `folder`. Skips the test where what builds it cannot be fetched."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    if done.returncode and re.search(r"connection|resolve|No matching distribution", done.stderr, re.IGNORECASE):
        pytest.skip("no index here to fetch what builds it")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(wheel: Path, folder: Path) -> Path:
    """The folder of an environment's commands, with `wheel` installed."""
    venv.create(folder, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, timeout=150)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "bin"
