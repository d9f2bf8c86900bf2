"""The part of a machine that its user misses: a compilation beside a node at work, and beside the same node paused.

The compilation takes all cores (Python's byte compiler on a copy of the standard library's modules, a process a core).
Each pair is measured one right after the other, in turns of order, so that what else the machine does is in both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from swarmnode.app.local.child import Child, NodePlan, node_command
from swarmnode.app.local.spawn import NODE
from swarmnode.base.concurrency import processors
from swarmnode.base.errors import LocalFault
from swarmnode.base.user_folders import default_cache
from swarmnode.base.wire.record_pb2 import NODE_STATE_PAUSED, NODE_STATE_TRAINING
from swarmnode.run.manifest.folder import SIGNED_FILE, init, sign_folder
from swarmnode.run.manifest.recipe import PRESETS

LISTEN = "/ip4/127.0.0.1/tcp/0"
READY_S = 600.0
POLL_S = 0.2
MODULES_MAX = 120  # guess: some seconds of compiling, so that a process's start counts little


async def _command(*words: str) -> float:
    """Seconds that a command took. Raises LocalFault if it fails."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, error = await process.communicate()
    if process.returncode:
        raise LocalFault(f"{' '.join(words[:4])}: {error.decode(errors='replace')[-300:]}")
    return loop.time() - begun


async def _until(child: Child, condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(READY_S):
        while not condition():
            if not child.alive:
                raise LocalFault(f"the node ended before {what}; see {child.plan.home}")
            await child.poll()
            await asyncio.sleep(POLL_S)


def _is(child: Child, state: int) -> bool:
    return child.status is not None and child.status.state == state


def _works(child: Child) -> bool:
    status = child.status
    return _is(child, NODE_STATE_TRAINING) and status is not None and status.given_tokens_per_second > 0


def _processor_s(pid: int) -> float:
    """Processor seconds of a process and its children so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def _at(child: Child, verb: str) -> None:
    """Pause the node, or let it work again, and wait until it does."""
    await _command(*NODE, verb, "--home", str(child.plan.home))
    done = (lambda: _is(child, NODE_STATE_PAUSED)) if verb == "pause" else (lambda: _works(child))
    await _until(child, done, f"it took `{verb}`")


async def _idle(child: Child, seconds: float) -> float:
    """The share of one core that the paused node takes."""
    await _at(child, "pause")
    before = _processor_s(child.pid)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await asyncio.sleep(seconds)
    return (_processor_s(child.pid) - before) / (loop.time() - begun)


def _copied(sources: Path) -> None:
    sources.mkdir()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MODULES_MAX]:
        shutil.copyfile(module, sources / module.name)


async def _compared(folder: Path, child: Child, pairs: int) -> dict[str, Any]:
    """Compilations beside the node at work and paused, in turns."""
    sources = folder / "modules"
    _copied(sources)
    compiling = (sys.executable, "-m", "compileall", "-q", "-f", "-j", "0", str(sources))
    await _command(*compiling)  # the first reads the disk
    ratios = []
    alone = []
    for pair in range(pairs):
        took = dict[str, float]()
        for verb in ("pause", "resume") if pair % 2 == 0 else ("resume", "pause"):
            await _at(child, verb)
            took[verb] = await _command(*compiling)
        ratios.append(took["resume"] / took["pause"])
        alone.append(took["pause"])
    return {
        "compilation beside a paused node / s": median(alone),
        "ratio beside a working node, median": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "pairs": pairs,
    }


async def _measured(folder: Path, child: Child, pairs: int, idle_s: float) -> dict[str, Any]:
    compared = {"foreground": await _compared(folder, child, pairs)} if pairs else {}
    return {**compared, "paused node, share of a core": await _idle(child, idle_s), "seconds watched": idle_s}


async def _swarm(folder: Path, priority: str, pairs: int, idle_s: float) -> dict[str, Any]:
    manifest = PRESETS["demo"]
    manifest = dataclasses.replace(manifest, pipeline=dataclasses.replace(manifest.pipeline, stages=1))
    init(folder / "run", manifest)
    sign_folder(folder / "run")
    signed = folder / "run" / SIGNED_FILE
    meet = NodePlan("meet", folder / "meet", signed, default_cache(), bootstrap=True)
    children = [await Child.start(meet, node_command(meet))]
    try:
        await _until(children[0], lambda: children[0].ready is not None, "it was ready")
        assert children[0].ready is not None
        at = tuple(children[0].ready.addresses[:1])
        plan = NodePlan("node", folder / "node", signed, default_cache(), bootstraps=at)
        children.append(await Child.start(plan, [*node_command(plan), "--priority", priority], fork=False))
        await _until(children[1], lambda: _works(children[1]), "it worked")
        return await _measured(folder, children[1], pairs, idle_s)
    finally:
        for child in reversed(children):
            child.kill("measured")
            await child.wait(10.0)


def run(*, priority: str = "lowest", pairs: int = 5, idle_s: float = 60.0) -> dict[str, Any]:
    """Seconds and ratios of a compilation beside a working and a paused node, and what the paused one takes. Raises
    LocalFault."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-foreground-") as folder:
        found = asyncio.run(_swarm(Path(folder), priority, pairs, idle_s))
    return {**found, "priority": priority, "cores": processors(), "load of this machine": os.getloadavg()[0]}
