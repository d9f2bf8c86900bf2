"""Runs a session of fake nodes: `drive.py FOLDER NODES FOR_S KILL_EVERY_S`; prints its summary as `up --json` does."""

import json
import sys
from pathlib import Path

from swarmnode.app.api import run_session
from swarmnode.app.local.child import NodePlan, node_command
from swarmnode.app.local.fleet import FleetPlan
from swarmnode.app.local.session import Conditions, Session
from swarmnode.app.local.swarm_view import PlainScreen

FAKE_NODE = Path(__file__).with_name("fake_node.py")


def fake_command(plan: NodePlan) -> list[str]:
    """The command line of a real node, run by the fake one."""
    real = node_command(plan)
    return [real[0], "-B", str(FAKE_NODE), *real[3:]]


def fake_plan(folder: Path, nodes: int, leave_timeout_s: float = 60.0) -> FleetPlan:
    return FleetPlan(
        folder=folder,
        manifest=folder / "manifest.signed",
        nodes=nodes,
        stages=2,
        cache=folder / "cache",
        command=fake_command,
        start_timeout_s=150.0,
        leave_timeout_s=leave_timeout_s,
    )


def main() -> int:
    folder = Path(sys.argv[1])
    nodes = int(sys.argv[2])
    for_s = float(sys.argv[3])
    kill_every_s = float(sys.argv[4])
    session = Session(
        fake_plan(folder, nodes),
        Conditions(for_s=for_s or None),
        PlainScreen(sys.stderr),
        run="ab" * 32,
        kill_every_s=kill_every_s or None,
    )
    try:
        summary = run_session(session)
    except KeyboardInterrupt:
        return 130
    print(json.dumps(summary.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
