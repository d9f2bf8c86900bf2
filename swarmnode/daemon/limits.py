"""Assemble a daemon's regulator: limits from its options, rates for its transport, load for its device, and a person's
pause from the home, where it outlives the process."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from swarmnode.atomic_file import atomic_write
from swarmnode.daemon.control_api import DaemonContext
from swarmnode.errors import LocalFault
from swarmnode.machine.compute import ThreadCompute
from swarmnode.machine.sensors import local_time
from swarmnode.node.limits import NOT_ASKED, AskedPause, Limits, LimitVerdict, change
from swarmnode.node.node import Node
from swarmnode.node.regulator import Regulator, Sense

PAUSE_FILE = "pause.json"


def make_regulator(process: DaemonContext, node: Node, compute: ThreadCompute, sense: Sense) -> Regulator:
    """A regulator of the limits in `options`; rates go to the transport, the load to `compute`."""
    throttle, path = process.transport.throttle, process.options.home / PAUSE_FILE

    def changed(limits: Limits) -> None:
        throttle.up.bps, throttle.down.bps = limits.max_up_bps, limits.max_down_bps
        throttle.share_quota(limits.quota_nbytes)
        compute.load = limits.max_load or 1.0

    return Regulator(
        change(Limits(), process.options.limits),
        sense,
        node.pause_control,
        node.presence,
        process.telemetry,
        changed,
        asked=read_pause(path),
        keep=lambda asked: write_pause(path, asked),
    )


def read_pause(path: Path) -> AskedPause:
    """The pause kept in `path`; none where it cannot be read."""
    try:
        kept = json.loads(path.read_text())
        until = math.inf if kept["until_unix_s"] is None else float(kept["until_unix_s"])
        return AskedPause(until, str(kept["reason"]))
    except (OSError, ValueError, TypeError, KeyError):
        return NOT_ASKED


def write_pause(path: Path, asked: AskedPause) -> None:
    """Keep `asked` over restarts. Raises LocalFault."""
    until = None if asked.until_unix_s == math.inf else asked.until_unix_s
    try:
        if asked == NOT_ASKED:
            path.unlink(missing_ok=True)
        else:
            atomic_write(path, json.dumps({"until_unix_s": until, "reason": asked.reason}).encode())
    except OSError as error:
        raise LocalFault(f"done, but a restart will not know of it: {path} cannot be written: {error}") from None


def tell_pause(verdict: LimitVerdict, now_unix_s: float) -> None:
    """Say on stderr why a node that starts does not train yet."""
    if verdict.running:
        return
    until = "" if verdict.until_unix_s is None else f"; until {local_time(verdict.until_unix_s - now_unix_s)}"
    click.echo(f"paused: {verdict.reason}{until} (`swarmnode resume` ends a pause or a snooze)", err=True)
