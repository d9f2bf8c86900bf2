"""The program of the fork server, which forks `swarmnode ARGUMENTS` on request (app/local/fork_server.py)."""

from __future__ import annotations

import sys

from swarmnode.app.cli import main as command_line
from swarmnode.app.local.fork_server import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], command_line.main, command_line.__file__))
