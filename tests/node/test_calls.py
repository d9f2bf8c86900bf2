"""The way of a microbatch stays short: whoever reads it, and each core that trains, goes all of it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES_MAX = 47
CALLS_MAX = 280
"""At a node, in a run whose answers are checked. With slack for a new feature: `python -m tests.support.calls` shows
where they are."""
BOUND_S = 240.0  # seven seconds on a quiet machine


def table() -> str:
    """What the counter prints. It has a process of its own: on a loaded machine a count beside other tests once stood
    still for a quarter of an hour, and no signal ended it."""
    command = [sys.executable, "-m", "tests.support.calls", "128"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=BOUND_S).stdout


def test_a_microbatch_takes_few_calls_of_few_modules() -> None:
    try:
        said = table()
    except subprocess.TimeoutExpired:
        said = table()
    found = re.match(r"(\d+) modules, \d+ functions, (\d+) calls", said)
    assert found is not None, said
    assert int(found[1]) <= MODULES_MAX, said
    assert int(found[2]) <= CALLS_MAX, said
