"""Options of a node process, in a folder of the test's own."""

from pathlib import Path

from swarmnode.app.daemon.options import NodeOptions


def options(folder: Path = Path(), **more: object) -> NodeOptions:
    """Of a node of some run, which nobody will start; `more` are other values."""
    at = {"home": folder / "home", "cache": folder / "cache", "listen": "/ip4/127.0.0.1/tcp/0", "metrics_port": 0}
    plain = {"run": "ab" * 32, "bootstrap": (), "stage": None, "name": "node", "bootstrap_only": False, "out": None}
    return NodeOptions(**(plain | at | more))  # type: ignore[arg-type]
