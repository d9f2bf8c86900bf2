"""Run what is too long for CI, and write down when each part passed last.

    python -m tests.soak SEED [PART ...]

Without parts all run, for some hours. `docs/measurements/soak.md` gets a row for each part that ran: commit, date,
seed, minutes and outcome. A part that fails keeps its row, and the others run all the same.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measurements" / "soak.md"
PYTEST = "python -m pytest -q -p no:cacheprovider -s"
ROW = re.compile(r"^\| `(\w+)` \|.*\|$", re.MULTILINE)
HEAD = """# Soak

`make soak` runs what is too long for CI, and writes this page: when each part ran last, and how it ended. `make soak
PARTS="fuzz storm" SEED=1000` runs some of them.

| part | what it does | commit | date | seed | minutes | ended |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One command of the soak; `{seed}` in it is the seed."""

    command: str
    does: str
    environment: Mapping[str, str]


PARTS: Mapping[str, Part] = {
    "kills": Part(
        "swarmnode up --nodes 6 --stages 3 --for 30m --kill 30s --out runs/soak",
        "six nodes for half an hour, one killed every 30 s",
        {},
    ),
    "chaos": Part("swarmnode bench chaos --runs 50 --seed {seed}", "50 lives under real faults", {}),
    "fuzz": Part("python -m tests.fuzz 1000000", "a million damaged inputs for each parser", {}),
    "weekend": Part(
        f"{PYTEST} tests/live/test_own_data.py tests/live/test_weekend.py --timeout 7200",
        "an own text, and a weekend of ten minutes, with real processes",
        {"SWARMNODE_SOAK": "1"},
    ),
    "outages": Part(
        f"{PYTEST} tests/live/test_meeting_point.py --timeout 1800",
        "a meeting point that is away for up to ten minutes",
        {"SWARMNODE_OUTAGES_S": "5 30 95 600"},
    ),
    "restarts": Part(
        f"{PYTEST} tests/node/test_same_home.py --timeout 1800", "50 restarts in one home", {"SWARMNODE_RESTARTS": "50"}
    ),
    "properties": Part(
        f"{PYTEST} -m unit --hypothesis-profile soak --timeout 3600 tests", "1,000 examples of each property", {}
    ),
    "storm": Part(
        "swarmnode simulate --scenario everything --seed {seed} --sweep 1h", "storms in virtual time for an hour", {}
    ),
    "days": Part("swarmnode simulate --scenario weekend --seed {seed}", "a weekend in virtual time", {}),
}


def commit() -> str:
    """The commit of the checkout; a `+` says that files were changed since."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return (head.stdout.strip() or "no git") + ("+" if changed.stdout.strip() else "")


def kept() -> dict[str, str]:
    """The rows of earlier runs, by part."""
    if not PAGE.exists():
        return {}
    return {found.group(1): found.group(0) for found in ROW.finditer(PAGE.read_text())}


def write(name: str, row: str) -> None:
    """Put the row of a part onto the page, in place of its last one."""
    rows = kept() | {name: row}
    lines = [rows.get(part, f"| `{part}` | {PARTS[part].does} | - | not run yet | - | - | - |") for part in PARTS]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


def run(name: str, seed: int) -> int:
    """Run one part; return its exit code."""
    part = PARTS[name]
    before = commit()
    day = datetime.date.today().isoformat()
    began = time.monotonic()
    bin_folder = Path(sys.executable).parent
    command = part.command.format(seed=seed).split()
    command[0] = str(bin_folder / command[0])
    print(f"soak: {name}: {part.command.format(seed=seed)}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **part.environment}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    minutes = (time.monotonic() - began) / 60
    ended = "passed" if code == 0 else f"**failed** (exit {code})"
    write(name, f"| `{name}` | {part.does} | {before} | {day} | {seed} | {minutes:.0f} | {ended} |")
    return code


def main(arguments: Sequence[str]) -> int:
    names = list(arguments[1:]) or list(PARTS)
    if not arguments or not arguments[0].isdecimal() or any(name not in PARTS for name in names):
        print(f"usage: python -m tests.soak SEED [{' '.join(PARTS)}]", file=sys.stderr)
        return 2
    codes = [run(name, int(arguments[0])) for name in names]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
