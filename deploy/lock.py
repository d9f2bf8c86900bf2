"""Writes requirements.txt and requirements-cpu.txt: every package that a node needs, each file of it by its SHA-256.

    python deploy/lock.py        (needs uv: pip install uv; asks PyPI for the hashes)

Versions are those of constraints.txt; a test compares. `pip install --require-hashes -r FILE` takes nothing else.
requirements.txt takes PyPI's torch, which brings CUDA on Linux (gigabytes). requirements-cpu.txt is the rest without
it: a build of torch for processors comes from PyTorch's own index, by a hash that whoever installs it gives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("s3", "build")
HEAD = "# Made by deploy/lock.py of pyproject.toml and constraints.txt: `make lock`. Do not edit.\n"
OURS = "nvidia-ml-py"  # reads a GPU's temperature


def main() -> int:
    """Write both files."""
    uv = shutil.which("uv")
    if uv is None:
        sys.stderr.write("uv is not here: pip install uv\n")
        return 1
    command = [uv, "pip", "compile", "pyproject.toml", "-c", "constraints.txt", "--generate-hashes", "--universal"]
    command += [word for extra in EXTRAS for word in ("--extra", extra)]
    command += ["--python-version", "3.11", "--no-annotate", "--no-header", "--no-config", "-q"]
    made = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    (ROOT / "requirements.txt").write_text(HEAD + made)
    (ROOT / "requirements-cpu.txt").write_text(HEAD + "".join(e for e in entries(made) if not of_cuda(e)))
    return 0


def entries(text: str) -> list[str]:
    """A requirements file's packages, each with the lines of its hashes."""
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        if line[:1].isalnum():
            found.append(line)
        elif found and not line.startswith("#"):
            found[-1] += line
    return found


def of_cuda(entry: str) -> bool:
    """Whether `entry` is torch, or what only its CUDA build needs."""
    name = entry.partition("==")[0]
    return name in ("torch", "triton") or (name.startswith(("nvidia-", "cuda-")) and name != OURS)


if __name__ == "__main__":
    sys.exit(main())
