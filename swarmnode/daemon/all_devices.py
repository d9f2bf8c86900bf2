"""`join --device all`: one node for each accelerator of this machine, as child processes with homes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click


def device_arguments(arguments: Sequence[str], words: Sequence[str], device: str, home: Path, name: str) -> list[str]:
    """`arguments` of `join` for the node on `device`, without `words`: of options given twice the last one counts."""
    mark = device.replace(":", "-")
    kept = [one for one in arguments if one not in words]
    named = ["--name", f"{name} {mark}"] if name else []
    own = ["--device", device, "--home", str(home / mark), *named, "--metrics-port", "0"]
    return [*kept, *own, "-"] if words else [*kept, *own]


def join_each(commands: Sequence[Sequence[str]], invite: str) -> int:
    """Run `commands` until all have ended, each with `invite` on stdin; SIGTERM and SIGINT are passed on. Returns the
    first exit code that is not 0. A node that fails does not end the others."""
    nodes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for node in nodes:
            if node.poll() is None:
                node.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for command in commands:
            node = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            nodes.append(node)
            assert node.stdin is not None
            try:
                node.stdin.write(invite.encode() + b"\n")
                node.stdin.close()
            except BrokenPipeError:  # it has ended already; its exit code says why
                pass
        return next((code for code in map(_wait, nodes) if code), 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(node: subprocess.Popen[bytes]) -> int:
    code = node.wait()
    return 128 - code if code < 0 else code


def join_all(arguments: Sequence[str], words: Sequence[str], home: Path, name: str, invite: str) -> int:
    """Join with each accelerator, or with the CPU if there is none. Returns an exit code as `join_each`."""
    from swarmnode.model.device import devices

    names = devices()
    click.echo(f"one node each on {', '.join(names)}", err=True)
    node = [sys.executable, "-m", "swarmnode.cli.main", "join"]
    commands = [[*node, *device_arguments(arguments, words, device, home, name)] for device in names]
    return join_each(commands, invite)
