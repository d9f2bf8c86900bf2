"""A node that lies: `python -m benchmarks.attack.lying_node LIE EVERY LOG ARGUMENTS...` is `swarmnode ARGUMENTS...`,
but that one in EVERY of its answers is false, as benchmarks/attack/lying_replica.py has it."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.attack.lying_replica import ALL, HONEST, STEER, LyingReplica, Steering
from swarmnode.app.cli import main as command_line
from swarmnode.app.daemon import process


def main(arguments: list[str]) -> int:
    """Run the node; returns its exit code."""
    lie, every, log, *rest = arguments
    if lie.startswith(STEER):
        Steering.of(lie)
    else:
        assert lie in (*ALL, HONEST), f"{lie!r} is none of {', '.join(ALL)}"
    LyingReplica.lie = lie
    LyingReplica.every = int(every)
    LyingReplica.log = Path(log)
    process.TorchReplica = LyingReplica  # type: ignore[attr-defined]
    return command_line.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
