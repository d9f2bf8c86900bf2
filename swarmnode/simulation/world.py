"""The virtual world: nodes on simulated ports, a storm drawn from the seed, laws while it rages, progress after it."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from swarmnode.errors import DataError
from swarmnode.gossip import pairing
from swarmnode.ids import RunId, digest, seeded
from swarmnode.membership.record import remember
from swarmnode.metrics import name
from swarmnode.model.split import split
from swarmnode.node.saver import Resumption, Saving
from swarmnode.pipeline.feeder import Samples
from swarmnode.recovery import saving
from swarmnode.simulation import agenda, calm
from swarmnode.simulation.clock import OWNER, Deadlock, SerialTask, Standstill, VirtualLoop
from swarmnode.simulation.directory import Habits, Shelf
from swarmnode.simulation.fault import FAULTS
from swarmnode.simulation.fleet import Kind
from swarmnode.simulation.geography import Nat
from swarmnode.simulation.inhabitant import Inhabitant, SkewedClock
from swarmnode.simulation.law import Laws
from swarmnode.simulation.machine import Disk, Meter
from swarmnode.simulation.metered import Metered
from swarmnode.simulation.network import Network
from swarmnode.simulation.outcome import Outcome, Sample, Sums
from swarmnode.simulation.replica import FakeReplica, fake_sizes
from swarmnode.simulation.samples import FakeSamples
from swarmnode.simulation.scenario import FaultSpec, Scenario
from swarmnode.simulation.taken import Taken
from swarmnode.simulation.trace import Trace

RESTART_S = 30.0  # guess: a supervisor's pause after a process that gave up
ENDS_S = 600.0  # guess: of virtual time, in which whoever is killed is no more; a microbatch has less
AFTER_END_S = 1.0
SCANNED = 1000  # guess: in larger worlds not after each end all tasks are looked through: some nodes stand for all
SAMPLES, SAMPLE_MAX_S = 240, 60.0  # points of the report's curves, and between two of them
LOOKED_AT = 33  # guess: nodes a second that are looked at for them


class World:
    """One life. `await run()` in a VirtualLoop; see `simulate`."""

    def __init__(self, scenario: Scenario, seed: int, *, keep: bool = False) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "a world needs a VirtualLoop"
        self.loop = loop
        self.scenario = scenario
        self.seed = seed
        self.run_id = RunId(digest("simulation", seed).hex())
        self.trace = Trace(loop.time, keep=keep)
        self.laws = Laws(scenario.manifest.gossip.group)
        self.laws.notified = lambda: self._over.set()  # noqa: PLW0108  not there yet
        self.bug: BaseException | None = None
        chunk_scale = {"chunk": 1.0 / scenario.state_share}
        self.network = Network(seeded(seed, "network"), scenario.weather, scale=chunk_scale)
        self.shelf = Shelf(self.network, SkewedClock(loop), self.run_id, seeded(seed, "shelf"), scenario.directory)
        self.parts = split(scenario.manifest.model, scenario.manifest.pipeline.stages)
        remember(max(2048, 8 * scenario.nodes))
        pairing.remember(scenario.nodes)
        self.people: list[Inhabitant] = []
        self.taken: list[Taken] = []  # machines taken away, and what they had to lose
        self.struck: Counter[str] = Counter()
        self.bucket = Disk(1 << 42)
        self.resumption: Resumption | None = None
        self.resumed: list[int] = []  # samples of the checkpoints gone on from; 0: from nothing
        self.curve: list[Sample] = []
        self.flop_done = 0.0  # by lives that have ended
        self.validations: list[tuple[float, float, int]] = []  # (time, loss, samples of the run)
        self.storming = False
        self._calm = asyncio.Event()
        self._over = asyncio.Event()
        self._replicas = 0
        self._feeders = 0
        self.trace.listeners["exchange.onesided"] = self._onesided
        self.trace.listeners["peer.left_out"] = self.trace.listeners["peer.excluded"] = self._left_out
        self.trace.listeners["validation.done"] = self._validated
        self.trace.listeners["checkpoint.loaded"] = self._loaded

    # ---- what inhabitants ask of the world

    def samples(self) -> Samples:
        if self.scenario.tensors == "fake":
            self._feeders += 1
            return FakeSamples(self.scenario.manifest, self._feeders)
        from swarmnode.simulation import real

        manifest = self.scenario.manifest
        return real.text(manifest) if self.scenario.text == "data" else real.PatternSamples(manifest)

    def replica(self, stage: int, person: Inhabitant, meter: Meter) -> Metered:
        scenario, part = self.scenario, self.parts[stage]
        self._replicas += 1
        self.laws.owners[self._replicas] = person.label
        if scenario.tensors == "fake":
            rng = seeded(self.seed, "replica", self._replicas)
            inner = FakeReplica(scenario.manifest, part, self._replicas, self.laws, rng, scenario.state_share)
        else:
            from swarmnode.simulation.real import torch_replica

            inner = torch_replica(scenario.manifest, stage)  # type: ignore[assignment]
        return Metered(inner, scenario.manifest, part, meter, self.laws, self._replicas, scenario.work_factor)

    def ended(self, person: Inhabitant, why: str | None) -> None:
        """Its process has ended of itself: it left, or gave up (`why`) and is started again by its supervisor."""
        left = person.alive and why is None
        if person.alive:
            person.end()
        self.trace.say(person.label, "node.left" if left else "node.failed", {"world": True, "reason": why or ""})
        self.loop.call_later(AFTER_END_S, self._none_left, person, person.lives, context=self._context)
        if why is not None:
            self.struck["gave up"] += 1
            self._task(self.restart(person, RESTART_S))

    def _none_left(self, person: Inhabitant, life: int) -> None:
        """The law of structured concurrency: no task outlives its process."""
        if person.lives != life:
            return
        if person.number % max(1, len(self.people) // SCANNED):
            return
        self.laws.checks += 1
        for task in asyncio.all_tasks(self.loop):
            if isinstance(task, SerialTask) and task.context.get(OWNER) == person.label and not task.done():
                what = f"{person.label} has ended and {task.get_coro()} goes on"
                self.laws.breaks("no task outlives its process", what, person.label)

    def saving(self) -> Saving:
        """What a node that starts now is told about checkpoints."""
        if not self.scenario.checkpoints:
            return Saving()
        layout = None if self.scenario.tensors == "torch" else self._layout
        return Saving(self.bucket, self.resumption, layout=layout)

    def _layout(self, stage: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Each section of a fake state is one tensor of the elements it keeps here."""
        sizes = fake_sizes(self.scenario.manifest, self.parts[stage], self.scenario.state_share)
        return {section: {f"stage-{stage}": (count,)} for section, count in sizes.items()}

    async def resume(self, people: Sequence[Inhabitant]) -> None:
        """Start `people` again from the newest whole checkpoint on the shared disk, or from nothing."""
        try:
            base, checkpoint = saving.usable(await saving.find(self.bucket), "the shared disk")[0]
        except DataError as error:
            self.trace.say("world", "checkpoint.none", {"reason": str(error)})
            self.resumed.append(0)
        else:
            self.resumption = Resumption(self.bucket, base, checkpoint)
            self.resumed.append(checkpoint.samples)
        for person in people:
            if not person.alive and not person.gone and not self._over.is_set():
                person.start(person.stage if self.scenario.placement == "balanced" else None)

    # ---- what faults do

    def living(self) -> list[Inhabitant]:
        return [person for person in self.people if person.alive and not person.leaving]

    def victim(self, rng: random.Random) -> Inhabitant | None:
        living = self.living()
        return living[int(rng.random() * len(living))] if living else None

    def spares(self, victim: Inhabitant, also: Sequence[Inhabitant] = ()) -> bool:
        """Whether what is lost with it and with `also` can come back: its stage keeps a replica, or, where the run
        rebuilds stages, both stages beside it do (in a ring: the last keeps what is needed to rebuild the first). Only
        `stage_lost` strikes harder."""
        stage, stages = victim.stage, self.scenario.manifest.pipeline.stages
        if stage is None:
            return True
        others = [p for p in self.living() if p.training and p is not victim and p not in also]
        # Nobody can fetch a state from one that cannot be dialled (simulated: everything, seed 104).
        able = [p for p in others if p.kind.address.nat is not Nat.UNREACHABLE and not self.loop.frozen(p.label)]
        served = {person.stage for person in able}
        beside = {(stage - 1) % stages, (stage + 1) % stages}
        rebuilds = self.scenario.manifest.recovery.method != "none" and beside <= served - {stage}
        if stage not in served and not rebuilds:
            self.struck["spared"] += 1
            return False
        return True

    def say(self, event: str, *victims: Inhabitant, **fields: object) -> None:
        self.struck[event.removeprefix("fault.")] += max(1, len(victims))
        labels = ",".join(victim.label for victim in victims[:8])
        self.trace.say("world", event, {"nodes": labels, **fields})
        for victim in victims:
            self.trace.recent[victim.label].append(f"{self.loop.time():.6f} {victim.label} {event} {fields}")

    async def pass_s(self, seconds: float) -> None:
        """Time of a fault: `seconds`, or until the storm is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._calm.wait()
        except TimeoutError:
            pass

    def join(self, kind: Kind, stage: int | None = None) -> Inhabitant:
        person = Inhabitant(self, len(self.people), kind)
        self.people.append(person)
        person.start(stage)
        return person

    async def restart(self, person: Inhabitant, after_s: float) -> None:
        await self.pass_s(max(after_s, 2 * AFTER_END_S))
        await asyncio.sleep(2 * AFTER_END_S)
        if not person.alive and not person.gone and not self._over.is_set():
            person.start(person.stage if self.scenario.placement == "balanced" else None)

    async def replace(self, person: Inhabitant, after_s: float) -> None:
        person.gone = True
        await self.pass_s(after_s)
        if not self._over.is_set():
            self.join(person.kind)

    # ---- the course of things

    async def run(self) -> Outcome:
        """The whole life. Laws broken and demands not met are in the outcome."""
        begun = time.process_time()
        self._context = contextvars.copy_context()
        outcome = Outcome(self.scenario.name, self.seed, len(self.scenario.fleet) and self.scenario.nodes)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                life = tasks.create_task(self._course(outcome, begun))
                over = tasks.create_task(self._over.wait())
                await asyncio.wait({life, over}, return_when=asyncio.FIRST_COMPLETED)
                self._over.set()
                raise _Over
        except* _Over:
            pass
        await self._end()
        outcome.failures += [str(broken) for broken in self.laws.broken]
        outcome.involved = sorted({label for broken in self.laws.broken for label in broken.labels})
        outcome.cpu_s = time.process_time() - begun
        self._sum_up(outcome)
        return outcome

    def _task(self, work: object) -> None:
        if not self._over.is_set():
            self._tasks.create_task(work, context=self._context.copy())  # type: ignore[arg-type]
        else:
            work.close()  # type: ignore[attr-defined]

    async def _course(self, outcome: Outcome, begun_cpu_s: float) -> None:
        await self._gather()
        self._task(self._watch())
        self.storming = True
        async with asyncio.TaskGroup() as storm:
            faults = [storm.create_task(self._storm(kind, spec)) for kind, spec in sorted(self.scenario.faults.items())]
            await asyncio.sleep(self.scenario.seconds)
            self.storming = False
            self._calm.set()
            for task in faults:
                task.cancel()
        outcome.storm, outcome.storm_cpu_s = Sums.of(self), time.process_time() - begun_cpu_s
        self.network.weather = dataclasses.replace(self.network.weather, breaks=0.0, doubles=0.0, silent=0.0)
        self.shelf.habits = Habits(round_trip_s=self.shelf.habits.round_trip_s)
        await calm.demand(self, outcome)
        self.laws.settle()
        self._over.set()

    async def _gather(self) -> None:
        """The first nodes come, one after the other within `join_s`."""
        kinds = [kind for kind in self.scenario.fleet for _ in range(kind.count)]
        rng = seeded(self.seed, "gather")
        order = sorted(range(len(kinds)), key=lambda index: (rng.random(), index))
        stages = calm.balanced([kinds[index].flops for index in order], [part.cost for part in self.parts])
        for index, stage in zip(order, stages, strict=True):
            placed = stage if self.scenario.placement == "balanced" else None
            self.join(kinds[index], placed if kinds[index].stage is None else kinds[index].stage)
            await asyncio.sleep(self.scenario.join_s / len(kinds))

    async def _storm(self, kind: str, spec: FaultSpec) -> None:
        """Strikes of one kind, until cancelled."""
        rng, strike = seeded(self.seed, "fault", kind), FAULTS[kind]
        begun = self.loop.time()
        for moment in sorted(spec.at_s):
            self.loop.call_later(
                max(0.0, begun + moment - self.loop.time()),
                lambda: self._task(strike(self, spec, rng)) if self.storming else None,
                context=self._context,
            )
        while True:
            rate = (spec.per_hour + spec.per_node_hour * len(self.living())) / 3600.0
            if rate <= 0.0:
                await asyncio.sleep(60.0)
                continue
            await asyncio.sleep(rng.expovariate(rate))
            self._task(strike(self, spec, rng))

    async def _watch(self) -> None:
        """The curves of the report, and the laws of bounded queues."""
        period_s = max(1.0, min(SAMPLE_MAX_S, self.scenario.seconds / SAMPLES), self.scenario.nodes / LOOKED_AT)
        while True:
            for person in self.people:
                person.check()
            self.curve.append(Sample.of(self))
            await asyncio.sleep(period_s)

    async def _end(self) -> None:
        for person in self.people:
            if person.alive:
                person.kill(silent=True)
        tasks = {person.task: person.label for person in self.people if person.task is not None}
        _, alive = await asyncio.wait(tasks, timeout=ENDS_S) if tasks else (None, set())
        for label in sorted(tasks[task] for task in alive):
            self.laws.breaks("who is killed ends", f"{label} lives on", label)

    def _sum_up(self, outcome: Outcome) -> None:
        outcome.trace = self.trace.hash
        outcome.virtual_s = self.loop.time()
        outcome.callbacks = self.loop.callbacks
        outcome.events = self.trace.events
        outcome.laws_checked = self.laws.checks
        outcome.onesided, outcome.stoodin = self.laws.onesided, self.laws.stoodin
        outcome.doubled = self.laws.doubled
        outcome.struck = dict(sorted((self.struck + self.network.happened + self.shelf.happened).items()))
        outcome.curve = self.curve
        outcome.validations = self.validations
        outcome.real = self.scenario.tensors == "torch"
        outcome.total = Sums.of(self)
        outcome.nodes_ever = len(self.people)
        outcome.last_events = self.trace.last_of([*outcome.involved[:4], "world"])

    # ---- what it overhears

    def _onesided(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        self.laws.commit_unsure(label, int(str(fields["round"])))

    def _left_out(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        others = [person.label for person in self.people if person.identity.peer_id == fields["peer"]]
        self.laws.left_out(label, others[0], str(fields["reason"]))

    def _validated(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        self.validations.append((now, float(str(fields["loss"])), int(str(fields["samples_total"]))))

    def _loaded(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        self.laws.checks += 1
        given = self.resumption.checkpoint.samples if self.resumption is not None else None
        if fields["samples_total"] != given:
            what = f"{label} went on from {fields['samples_total']} samples, not from {given}"
            self.laws.breaks("all go on from one checkpoint", what, label)

    def stages_served(self) -> list[int]:
        """Nodes that train, by stage."""
        counts = [0] * len(self.parts)
        for person in self.people:
            if person.training and person.stage is not None:
                counts[person.stage] += 1
        return counts

    def samples_done(self) -> float:
        return self.trace.total(name.SAMPLES)


class _Over(Exception):
    pass


def simulate(
    scenario: Scenario, seed: int, *, keep: bool = False, look: Callable[[World], None] | None = None
) -> Outcome:
    """One life of `scenario` from `seed`. `look` sees the world at its end."""
    if scenario.tensors != "fake" and scenario.text == "data":
        from swarmnode.simulation import real

        real.text(scenario.manifest)  # files are read and tokenised outside of virtual time
    agenda.build()  # a second, once a machine; without a compiler Python does it, slower
    loop = VirtualLoop(seed)

    async def main() -> Outcome:
        world = World(scenario, seed, keep=keep)
        outcome = await world.run()
        if look is not None:
            look(world)
        return outcome

    begun = time.process_time()
    try:
        return loop.run(main())
    except (Deadlock, Standstill) as error:
        outcome = Outcome(scenario.name, seed, scenario.nodes)
        outcome.failures.append(f"{type(error).__name__}: {error}")
        outcome.virtual_s, outcome.cpu_s = loop.time(), time.process_time() - begun
        return outcome
    finally:
        loop.close()


__all__ = ["World", "simulate"]
