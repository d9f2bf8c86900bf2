"""The course of one simulated life: nodes join, faults strike until the storm ends, then everything must recover."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from swarmnode.app.planner.plan import places
from swarmnode.base.errors import cause_of
from swarmnode.base.ids import seeded
from swarmnode.run.manifest.gossip_compat import meeting_steps, planned_meeting_steps
from swarmsim import event_queue, liveness_phase
from swarmsim.directory import DirectoryFaults
from swarmsim.fault import FAULTS
from swarmsim.outcome import CurvePoint, Outcome, RunTotals
from swarmsim.scenario import FaultSpec, Scenario
from swarmsim.virtual_time import Deadlock, Standstill, VirtualLoop
from swarmsim.world import World

ENDS_S = 600.0  # guess: virtual time until a killed node's tasks must have ended; a microbatch has less
SAMPLES = 240  # points of the report's curves
SAMPLE_MAX_S = 60.0  # their largest distance
LOOKED_AT = 33  # guess: nodes examined per second for them


class SimulatedLife:
    """A life of `world`. Use it once; see `simulate`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._curve: list[CurvePoint] = []
        self._storming = False

    async def run(self) -> Outcome:
        """Run the whole life. Broken laws and unmet demands are in the outcome."""
        begun = time.process_time()
        outcome = Outcome(
            self.world.scenario.name,
            self.world.seed,
            len(self.world.scenario.fleet) and self.world.scenario.nodes,
            context=self.world.scenario.manifest.model.context,
            meets_every_steps_planned=planned_meeting_steps(self.world.scenario.manifest),
            steps_of_a_sample=meeting_steps(self.world.scenario.manifest, 1),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self.world.open(tasks)
                life = tasks.create_task(self._course(outcome, begun))
                over = tasks.create_task(self.world.over.wait())
                await asyncio.wait({life, over}, return_when=asyncio.FIRST_COMPLETED)
                self.world.close()
                raise _Over
        except* _Over:
            pass
        await self._end()
        outcome.failures += [str(broken) for broken in self.world.laws.broken]
        outcome.involved = sorted({label for broken in self.world.laws.broken for label in broken.labels})
        outcome.cpu_s = time.process_time() - begun
        self._sum_up(outcome)
        return outcome

    async def _course(self, outcome: Outcome, begun_cpu_s: float) -> None:
        await self._gather()
        self.world.task(self._watch())
        self._storming = True
        async with asyncio.TaskGroup() as storm:
            faults = [
                storm.create_task(self._storm(kind, spec)) for kind, spec in sorted(self.world.scenario.faults.items())
            ]
            await asyncio.sleep(self.world.scenario.seconds)
            self._storming = False
            self.world.calm.set()
            for task in faults:
                task.cancel()
        outcome.storm = RunTotals.of(self.world)
        outcome.storm_cpu_s = time.process_time() - begun_cpu_s
        self.world.network.weather = dataclasses.replace(
            self.world.network.weather, breaks=0.0, doubles=0.0, silent=0.0
        )
        self.world.dht.faults = DirectoryFaults(round_trip_s=self.world.dht.faults.round_trip_s)
        await liveness_phase.demand(self.world, outcome)
        self.world.laws.settle()
        self.world.close()

    async def _gather(self) -> None:
        """Let the first nodes join, one after the other within `join_s`."""
        kinds = [kind for kind in self.world.scenario.fleet for _ in range(kind.count)]
        rng = seeded(self.world.seed, "gather")
        order = sorted(range(len(kinds)), key=lambda index: (rng.random(), index))
        stages, _ = places(self.world.scenario.manifest, [kinds[index] for index in order])
        for index, stage in zip(order, stages, strict=True):
            placed = stage if self.world.scenario.placement == "balanced" else None
            self.world.join(kinds[index], placed if kinds[index].stage is None else kinds[index].stage)
            await asyncio.sleep(self.world.scenario.join_s / len(kinds))

    async def _storm(self, kind: str, spec: FaultSpec) -> None:
        """Strike with one kind of fault until cancelled."""
        rng = seeded(self.world.seed, "fault", kind)
        strike = FAULTS[kind]
        begun = self.world.loop.time()
        for moment in sorted(spec.at_s):
            self.world.at(
                begun + moment, lambda: self.world.task(strike(self.world, spec, rng)) if self._storming else None
            )
        while True:
            rate = (spec.per_hour + spec.per_node_hour * len(self.world.living())) / 3600.0
            if rate <= 0.0:
                await asyncio.sleep(60.0)
                continue
            await asyncio.sleep(rng.expovariate(rate))
            self.world.task(strike(self.world, spec, rng))

    async def _watch(self) -> None:
        """Record the report's curves and check the laws of bounded queues."""
        period_s = max(
            1.0, min(SAMPLE_MAX_S, self.world.scenario.seconds / SAMPLES), self.world.scenario.nodes / LOOKED_AT
        )
        while True:
            for sim_node in self.world.nodes:
                sim_node.check()
            self.world.check_rounds()
            self._curve.append(CurvePoint.of(self.world))
            await asyncio.sleep(period_s)

    async def _end(self) -> None:
        for sim_node in self.world.nodes:
            if sim_node.alive:
                sim_node.kill(silent=True)
        tasks = {sim_node.task: sim_node.label for sim_node in self.world.nodes if sim_node.task is not None}
        _, alive = await asyncio.wait(tasks, timeout=ENDS_S) if tasks else (None, set())
        for label in sorted(tasks[task] for task in alive):
            self.world.laws.breaks("who is killed ends", f"{label} lives on", label)

    def _sum_up(self, outcome: Outcome) -> None:
        outcome.trace = self.world.trace.hash
        outcome.virtual_s = self.world.loop.time()
        outcome.callbacks = self.world.loop.callbacks
        outcome.events = self.world.trace.events
        outcome.laws_checked = self.world.laws.checks
        outcome.onesided = self.world.laws.onesided
        outcome.fallbacks = self.world.laws.fallbacks
        outcome.doubled = self.world.laws.doubled
        outcome.struck = dict(
            sorted((self.world.struck + self.world.network.happened + self.world.dht.happened).items())
        )
        outcome.directory = self.world.dht.moved_by_node()
        outcome.curve = self._curve
        outcome.validations = self.world.validations
        outcome.real = self.world.scenario.tensors == "torch"
        outcome.total = RunTotals.of(self.world)
        outcome.nodes_ever = len(self.world.nodes)
        outcome.last_events = self.world.trace.last_of([*outcome.involved[:4], "world"])


class _Over(Exception):
    pass


def simulate(
    scenario: Scenario, seed: int, *, keep: bool = False, look: Callable[[World], None] | None = None
) -> Outcome:
    """Run one life of `scenario` from `seed`. `look` is called with the world at its end."""
    if scenario.tensors != "fake" and scenario.text == "data":
        from swarmsim import real_training

        real_training.text(scenario.manifest)  # read and tokenise files outside of virtual time
    event_queue.build()  # takes a second, once per machine; without a compiler the slower Python version runs
    loop = VirtualLoop(seed)

    async def main() -> Outcome:
        world = World(scenario, seed, keep=keep)
        outcome = await SimulatedLife(world).run()
        if look is not None:
            look(world)
        return outcome

    begun = time.process_time()
    try:
        return loop.run(main())
    except (Deadlock, Standstill) as error:
        outcome = Outcome(scenario.name, seed, scenario.nodes)
        outcome.failures.append(f"{type(error).__name__}: {cause_of(error)}")
        outcome.virtual_s = loop.time()
        outcome.cpu_s = time.process_time() - begun
        return outcome
    finally:
        loop.close()
