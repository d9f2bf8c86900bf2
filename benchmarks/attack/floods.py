"""The cost of attacks on resources to a swarm that trains (`bench attack --attacks silent`): samples a second, and
processor time of the honest processes, with and without each attack of flooder.py, in turn.

Nodes and attackers are real processes on this machine. Nodes compute for a share LOAD of the time, so that processors
are left for both, and attackers run at the lowest priority. While they do not attack they use as much processor time
for nothing: what they use themselves is not the victims' loss (on two cores up to 14 % of the samples). The result also
tells the processor time that one message costs the honest, which is the same on a machine of one's own, and the share
of rounds in which a replica met another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attack.flooder import TTL_S, WAYS, Order
from benchmarks.swarm.harness import SwarmHarness, fleet_in, resting
from benchmarks.swarm.laws import read_log
from benchmarks.swarm.learning_swarm import FleetMeter
from swarmnode.app.local.child import environment
from swarmnode.app.local.fleet import Fleet
from swarmnode.base.errors import LocalFault, UsageError
from swarmnode.base.ports import Clock
from swarmnode.run.manifest import read_signed, verify
from swarmnode.run.manifest.folder import SIGNED_FILE
from swarmnode.run.manifest.recipe import PRESETS

NODES = 4
STAGES = 2
ATTACKERS = 2
LOAD = "25%"
SECONDS = 20.0
REPEATS = 3
RATE = 100.0  # guess: messages a second from one attacker to each node
WARM_SAMPLES = 400  # guess: nodes have measured each other, and examined newcomers, by then
WARM_MAX_S = 600.0  # guess: a machine on which others work
CALIBRATION_S = 10.0
FORGET_S = TTL_S + 5.0  # until the records of the last attack have expired everywhere
ANSWER_S = 120.0  # guess: a busy machine; an attacker imports hivemind and joins the DHT first


@dataclass(frozen=True, slots=True)
class RateWindow:
    """A stretch of time."""

    samples: int
    core_s: float
    seconds: float
    paired: int  # rounds of a replica with another one
    rounds: int
    messages: int = 0


def run(
    ways: Sequence[str],
    clock: Clock,
    say: Callable[[str], None],
    *,
    seconds: float = SECONDS,
    repeats: int = REPEATS,
    rate: float = RATE,
) -> dict[str, Any]:
    """{"attacks": [a row each]}: each of `ways` in `repeats` stretches of `seconds`, with as long a rest before each.
    Raises UsageError for an unknown way, LocalFault if a node dies."""
    if wrong := [way for way in ways if way not in WAYS]:
        raise UsageError(f"unknown attack {wrong[0]!r}: use one of {', '.join(WAYS)}")
    rows = []
    for way in ways:  # a fresh swarm each, so that none knows the attackers of before
        rows.append(asyncio.run(_one(way, clock, seconds, repeats, rate)))
        say(json.dumps(rows[-1]))
    return {"attacks": rows}


async def _one(way: str, clock: Clock, seconds: float, repeats: int, rate: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        demo = PRESETS["demo"]
        manifest = replace(demo, pipeline=replace(demo.pipeline, stages=STAGES))
        fleet = fleet_in(Path(folder), manifest, NODES, command=partial(resting, load=LOAD))
        swarm = SwarmHarness(fleet, bound_s=WARM_MAX_S)
        async with swarm.running():
            await swarm.progress(WARM_SAMPLES, "before the attack")
            meter = FleetMeter(fleet, clock)
            rest = list[RateWindow]()
            attack = list[RateWindow]()
            async with _attackers(way, fleet, Path(folder), rate) as attackers:
                await attackers.turn("on")  # to see how much processor time they need
                await asyncio.sleep(CALIBRATION_S)
                for _ in range(repeats):
                    await attackers.turn("off")
                    await asyncio.sleep(FORGET_S)
                    rest.append(await _window(fleet, meter, seconds))
                    before = await attackers.turn("on")
                    window = await _window(fleet, meter, seconds)
                    attack.append(replace(window, messages=await attackers.turn("sent") - before))
            if gone := [child for child in fleet.nodes if not child.alive]:
                raise LocalFault(f"{gone[0].name} ended under attack: {gone[0].reason}")
            return {"attack": way, **_row(rest, attack), **_harm(fleet)}


async def _window(fleet: Fleet, meter: FleetMeter, seconds: float) -> RateWindow:
    await fleet.poll()
    before = meter.read()
    met = _met(fleet)
    await asyncio.sleep(seconds)
    await fleet.poll()
    after = meter.read()
    met_then = _met(fleet)
    paired = met_then[0] - met[0]
    lone = met_then[1] - met[1]
    samples = after.samples - before.samples
    core_s = after.core_s - before.core_s
    seconds = after.unix_s - before.unix_s
    return RateWindow(samples, core_s, seconds, paired, paired + lone)


def _met(fleet: Fleet) -> tuple[int, int]:
    """(rounds of all replicas with another one, lone ones) so far."""
    events = [event["event"] for child in fleet.nodes for event in read_log(child.plan.home)]
    return events.count("exchange.paired"), events.count("exchange.lone")


def _row(rest: Sequence[RateWindow], attack: Sequence[RateWindow]) -> dict[str, Any]:
    """Rates without and with the attack, over all windows of each, and the cost of one message to the honest."""

    def rate(windows: Sequence[RateWindow]) -> float:
        return sum(one.samples for one in windows) / sum(one.seconds for one in windows)

    def cores(windows: Sequence[RateWindow]) -> float:
        return sum(one.core_s for one in windows) / sum(one.seconds for one in windows)

    def met(windows: Sequence[RateWindow]) -> float:
        return sum(one.paired for one in windows) / max(1, sum(one.rounds for one in windows))

    messages = sum(one.messages for one in attack)
    attacked_s = sum(one.seconds for one in attack)
    ratios = [a.samples / a.seconds / max(1e-9, r.samples / r.seconds) for a, r in zip(attack, rest, strict=True)]
    ratio = rate(attack) / rate(rest)
    return {
        "samples/s before": rate(rest),
        "during": rate(attack),
        "ratio": ratio,
        "ratio of each": [round(one, 3) for one in ratios],
        "rounds met before": met(rest),
        "rounds met during": met(attack),
        "cores before": cores(rest),
        "cores during": cores(attack),
        "messages/s": messages / attacked_s,
        # Beside what the samples of the attack's windows would have cost.
        "core ms a message": 1e3 * (cores(attack) - ratio * cores(rest)) * attacked_s / max(1, messages),
    }


def _harm(fleet: Fleet) -> dict[str, int]:
    """The number of times that honest nodes turned on each other, by the name of the event."""
    honest = {child.status.peer_id for child in fleet.nodes if child.status is not None}
    found = dict.fromkeys(("peer.excluded", "peer.left_out", "peer.banned"), 0)
    for child in fleet.nodes:
        for event in read_log(child.plan.home):
            if event["event"] in found and event["fields"].get("peer") in honest:
                found[event["event"]] += 1
    return {f"honest {name.removeprefix('peer.')}": count for name, count in found.items()}


class _Attackers:
    """The attackers' processes."""

    def __init__(self, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def say(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()

    async def turn(self, order: str) -> int:
        """Turn the attack "on" or "off"; returns the "sent" messages so far by all. Raises LocalFault if one died."""
        await self.say(order)
        return sum([int(json.loads(await self._line(process))["sent"]) for process in self._processes])

    async def _line(self, process: asyncio.subprocess.Process) -> bytes:
        assert process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            line = await process.stdout.readline()
        if not line:
            raise LocalFault("an attacker ended by itself")
        return line


@contextlib.asynccontextmanager
async def _attackers(way: str, fleet: Fleet, folder: Path, rate: float) -> AsyncIterator[_Attackers]:
    """ATTACKERS attackers of all nodes, which begin when they are told to."""
    signed, _ = read_signed(folder / SIGNED_FILE)
    targets = []
    for child in fleet.nodes:
        assert child.ready is not None and child.ready.stage is not None
        addresses = [address.rpartition("/p2p/")[0] or address for address in child.ready.addresses]
        targets.append((child.ready.peer_id, child.ready.stage, addresses))
    processes = []
    try:
        for number in range(ATTACKERS):
            home = folder / f"attacker-{number}"
            home.mkdir(mode=0o700)
            order = Order(verify(signed, None)[1], str(home), STAGES, rate, targets)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.attack.flooder", way),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment(),
                start_new_session=True,
            )
            processes.append(process)
            await _Attackers([process]).say(json.dumps(asdict(order)))
        yield _Attackers(processes)
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
