"""A node that lies: `python -m swarmnode.cli.liar LIE EVERY LOG ARGUMENTS...` is `swarmnode ARGUMENTS...`, but that one
in EVERY of its answers is false, as bench/liar.py has it."""

from __future__ import annotations

import sys
from pathlib import Path

from swarmnode.bench.liar import ALL, Lying
from swarmnode.cli import daemon
from swarmnode.cli import main as command_line


def main(arguments: list[str]) -> int:
    """Run the node; returns its exit code."""
    lie, every, log, *rest = arguments
    assert lie in ALL, f"{lie!r} is none of {', '.join(ALL)}"
    Lying.lie, Lying.every, Lying.log = lie, int(every), Path(log)
    daemon.TorchReplica = Lying  # type: ignore[attr-defined]
    return command_line.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
