"""The virtual world: its nodes, network, disk and laws, and the operations of faults."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Nat
from swarmnode.app.planner.stage_memory import repeated
from swarmnode.base.errors import DataError
from swarmnode.base.ids import PeerId, RunId, digest, machine_of, seeded
from swarmnode.base.metrics import name
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.resumption import CheckpointOptions, Resumption
from swarmnode.model.split import stages_of
from swarmnode.net.membership.record import remember
from swarmnode.train.gossip import pairing
from swarmnode.train.pipeline.feeder import Samples
from swarmsim.directory import SimDht
from swarmsim.law import Laws
from swarmsim.learned import LearnedSamples
from swarmsim.machine import Disk, Meter
from swarmsim.metered_replica import MeteredReplica
from swarmsim.network import Network
from swarmsim.preemption_record import PreemptionRecord
from swarmsim.replica import FakeReplica, fake_sizes
from swarmsim.samples import FakeSamples
from swarmsim.scenario import Scenario
from swarmsim.sim_node import SimNode, SkewedClock
from swarmsim.trace import DecisionTrace
from swarmsim.virtual_time import OWNER, SerialTask, VirtualLoop

RESTART_S = 30.0  # guess: a supervisor's pause after a process that gave up
AFTER_END_S = 1.0
LOST_ROUNDS = 4  # guess: a replica that moves or takes a state drops what it learned since its last round
CUTS = {"partition", "one_way", "bridge"}  # what was learned is followed only in worlds with no other faults
SCANNED = 1000  # guess: in larger worlds all tasks are checked only after some nodes' ends


class World:
    """The nodes of one simulated life and all their surroundings. Needs a VirtualLoop (swarmsim/life.py runs it)."""

    def __init__(self, scenario: Scenario, seed: int, *, keep: bool = False) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "a world needs a VirtualLoop"
        self.loop = loop
        self.scenario = scenario
        self.seed = seed
        self.run_id = RunId(digest("simulation", seed).hex())
        self.trace = DecisionTrace(loop.time, keep=keep)
        self.laws = Laws(scenario.manifest.gossip.group)
        if scenario.tensors == "fake" and scenario.faults and scenario.faults.keys() <= CUTS:
            self.laws.learned = LearnedSamples()
        self.laws.notified = lambda: self.over.set()  # noqa: PLW0108  `over` does not exist yet
        self.bug: BaseException | None = None
        chunk_scale = {"chunk": 1.0 / scenario.state_share}
        self.network = Network(seeded(seed, "network"), scenario.weather, scale=chunk_scale)
        self.dht = SimDht(self.network, SkewedClock(loop), self.run_id, seeded(seed, "shelf"), scenario.directory)
        self.parts = stages_of(scenario.manifest)
        remember(max(2048, 8 * scenario.nodes))
        pairing.remember(scenario.nodes)
        self.nodes: list[SimNode] = []
        self.preempted: list[PreemptionRecord] = []  # preempted machines and their work at risk
        self.struck: Counter[str] = Counter()
        self.bucket = Disk(1 << 42)
        self.resumption: Resumption | None = None
        self.resumed: list[int] = []  # samples of the checkpoints used for a restart; 0: none
        self._forgotten = 0.0  # samples of the run when a restart had no checkpoint: no state of them is left anywhere
        self._trained_since = math.inf
        self.woke_s: dict[str, float] = {}  # when nodes that were stopped went on, by label
        self._looked_s = 0.0  # at the last look
        self._round_told_s = 0.0  # since a first round without a cut network
        self.flop_done = 0.0  # by lives that have ended
        self.validations: list[tuple[float, float, int]] = []  # (time, loss, samples of the run)
        self.calm = asyncio.Event()
        self.over = asyncio.Event()
        self._replicas = 0
        self._feeders = 0
        self.trace.listeners["exchange.onesided"] = self._onesided
        self.trace.listeners["peer.left_out"] = self.trace.listeners["peer.excluded"] = self._left_out
        self.trace.listeners["peer.banned"] = self._banned
        self.trace.listeners["validation.done"] = self._validated
        self.trace.listeners["checkpoint.loaded"] = self._loaded
        self.trace.listeners["state.fresh"] = self._fresh

    # ---- interface for nodes

    def samples(self) -> Samples:
        if self.scenario.tensors == "fake":
            self._feeders += 1
            return FakeSamples(self.scenario.manifest, self._feeders)
        from swarmsim import real_training

        manifest = self.scenario.manifest
        return real_training.text(manifest) if self.scenario.text == "data" else real_training.PatternSamples(manifest)

    def replica(self, stage: int, sim_node: SimNode, meter: Meter) -> MeteredReplica:
        scenario = self.scenario
        part = self.parts[stage]
        self._replicas += 1
        self.laws.owners[self._replicas] = sim_node.label
        if scenario.tensors == "fake":
            rng = seeded(self.seed, "replica", self._replicas)
            inner = FakeReplica(scenario.manifest, part, self._replicas, self.laws, rng, scenario.state_share)
        else:
            from swarmsim.real_training import torch_replica

            inner = torch_replica(scenario.manifest, stage)  # type: ignore[assignment]
        again = repeated(scenario.manifest, sim_node.kind, stage)
        return MeteredReplica(
            inner, scenario.manifest, part, meter, self.laws, self._replicas, scenario.work_factor, again
        )

    def ended(self, sim_node: SimNode, why: str | None) -> None:
        """A process ended by itself: it left, or it gave up (`why`) and its supervisor restarts it."""
        left = sim_node.alive and why is None
        if sim_node.alive:
            sim_node.end()
        self.trace.say(sim_node.label, "node.left" if left else "node.failed", {"world": True, "reason": why or ""})
        self.loop.call_later(AFTER_END_S, self._none_left, sim_node, sim_node.lives, context=self._context)
        if why is not None:
            self.struck["gave up"] += 1
            self.task(self.restart(sim_node, RESTART_S))

    def _none_left(self, sim_node: SimNode, life: int) -> None:
        """Check the law of structured concurrency: no task outlives its process."""
        if sim_node.lives != life:
            return
        if sim_node.number % max(1, len(self.nodes) // SCANNED):
            return
        self.laws.checks += 1
        for task in asyncio.all_tasks(self.loop):
            if isinstance(task, SerialTask) and task.context.get(OWNER) == sim_node.label and not task.done():
                what = f"{sim_node.label} has ended and {task.get_coro()} goes on"
                self.laws.breaks("no task outlives its process", what, sim_node.label)

    def saving(self, home: Disk) -> CheckpointOptions:
        """Checkpoint options of a node with the disk `home` that starts now."""
        layout = None if self.scenario.tensors == "torch" else self._layout
        if not self.scenario.checkpoints:
            return CheckpointOptions(layout=layout, home=home)
        return CheckpointOptions(self.bucket, self.resumption, layout=layout, home=home)

    def _layout(self, stage: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """The layout of a fake state: each section is one tensor of the elements kept here."""
        sizes = fake_sizes(self.scenario.manifest, self.parts[stage], self.scenario.state_share)
        return {section: {f"stage-{stage}": (count,)} for section, count in sizes.items()}

    async def resume(self, nodes: Sequence[SimNode]) -> None:
        """Restart `nodes` from the newest complete checkpoint on the shared disk, or from nothing."""
        try:
            base, checkpoint = checkpoint_io.usable(await checkpoint_io.find(self.bucket), "the shared disk")[0]
        except DataError as error:
            self.trace.say("world", "checkpoint.none", {"reason": str(error)})
            self.resumed.append(0)
            self._forgotten = self.samples_done()
            self._trained_since = math.inf
            self._round_told_s = 0.0
        else:
            self.resumption = Resumption(self.bucket, base, checkpoint)
            self.resumed.append(checkpoint.samples)
        self.begin(nodes)

    def begin(self, nodes: Sequence[SimNode]) -> None:
        """Start those of `nodes` that have ended."""
        for sim_node in nodes:
            if not sim_node.alive and not sim_node.gone and not self.over.is_set():
                sim_node.start(sim_node.stage if self.scenario.placement == "balanced" else None)

    # ---- interface for faults

    def living(self) -> list[SimNode]:
        return [sim_node for sim_node in self.nodes if sim_node.alive and not sim_node.leaving]

    def islands(self) -> list[set[str]]:
        """Machines that train, by label, parted where neither side has a record of the other."""
        living = {p.identity.peer_id: p for p in self.living() if p.training}
        parts = list[set[str]]()
        for p in living.values():
            assert p.node is not None
            here = p.node.presence.peer_table.swarm().members()
            machines = {machine_of(member.peer) for member in here}
            known = {p.label, *(living[machine].label for machine in machines if machine in living)}
            joined = [part for part in parts if part & known]
            parts = [part for part in parts if not part & known]
            parts.append(known.union(*joined))
        return parts

    def victim(self, rng: random.Random) -> SimNode | None:
        living = self.living()
        return living[int(rng.random() * len(living))] if living else None

    def spares(self, victim: SimNode, also: Sequence[SimNode] = ()) -> bool:
        """Whether the loss of `victim` and `also` can be recovered: its stage keeps a replica, or, if the run rebuilds
        stages, both neighbouring stages do (in a ring: the last keeps what is needed to rebuild the first). Only
        `stage_lost` strikes harder."""
        stages = self.scenario.manifest.pipeline.stages
        others = [p for p in self.living() if p.training and p is not victim and p not in also]
        # No node can fetch a state from one that cannot be dialled (simulated: everything, seed 104).
        able = [p for p in others if p.kind.address.nat is not Nat.UNREACHABLE and not self.loop.frozen(p.label)]
        served = {stage for sim_node in able for stage in sim_node.stages}
        own = [] if victim.stage is None else [victim.stage]
        for stage in {*own, *victim.stages} - served:
            beside = {(stage - 1) % stages, (stage + 1) % stages}
            if self.scenario.manifest.recovery.method == "none" or not beside <= served:
                self.struck["spared"] += 1
                return False
        return True

    def say(self, event: str, *victims: SimNode, **fields: object) -> None:
        self.struck[event.removeprefix("fault.")] += max(1, len(victims))
        labels = ",".join(victim.label for victim in victims[:8])
        self.trace.say("world", event, {"nodes": labels, **fields})
        for victim in victims:
            self.trace.recent[victim.label].append(f"{self.loop.time():.6f} {victim.label} {event} {fields}")

    async def pass_s(self, seconds: float) -> None:
        """Wait for `seconds`, or until the storm is over."""
        try:
            async with asyncio.timeout(seconds):
                await self.calm.wait()
        except TimeoutError:
            pass

    def join(self, kind: MachineKind, stage: int | None = None) -> SimNode:
        sim_node = SimNode(self, len(self.nodes), kind)
        self.nodes.append(sim_node)
        sim_node.start(stage)
        return sim_node

    async def restart(self, sim_node: SimNode, after_s: float) -> None:
        await self.pass_s(max(after_s, 2 * AFTER_END_S))
        await asyncio.sleep(2 * AFTER_END_S)
        if not sim_node.alive and not sim_node.gone and not self.over.is_set():
            sim_node.start(sim_node.stage if self.scenario.placement == "balanced" else None)

    async def replace(self, sim_node: SimNode, after_s: float) -> None:
        sim_node.gone = True
        await self.pass_s(after_s)
        if not self.over.is_set():
            self.join(sim_node.kind)

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Run faults and restarts in `tasks` from now on, until `close`."""
        self._context = contextvars.copy_context()
        self._tasks = tasks

    def close(self) -> None:
        """End the life: nothing more is started."""
        self.over.set()

    def task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the nodes."""
        if not self.over.is_set():
            self._tasks.create_task(work, context=self._context.copy())
        else:
            work.close()

    def at(self, moment: float, begin: Callable[[], None]) -> None:
        """Call `begin` at loop time `moment`."""
        self.loop.call_later(max(0.0, moment - self.loop.time()), begin, context=self._context)

    # ---- observed events

    def _onesided(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        self.laws.commit_unsure(label, int(str(fields["round"])))

    def _left_out(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        machine = machine_of(PeerId(str(fields["peer"])))
        others = [sim_node.label for sim_node in self.nodes if sim_node.identity.peer_id == machine]
        self.laws.left_out(label, others[0], str(fields["reason"]))

    def _banned(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        if "is forged" in str(fields["reason"]):
            self._left_out(now, label, event, fields)

    def _validated(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        self.validations.append((now, float(str(fields["loss"])), int(str(fields["samples_total"]))))

    def _fresh(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        # A joiner that looked before the first samples were announced begins rightly; so does one that knows of the run
        # in its first round, when nobody keeps a snapshot of a stage that died. A directory that fails or hides records
        # excuses nobody: members, contacts and homes know of the run.
        # It hears of the round's end in a record's lifetime, as a directory may hand out old ones, unless the network
        # is cut or it was stopped just now.
        trained = self.samples_done() - self._forgotten
        reason = str(fields["reason"])
        limits = self.scenario.manifest.limits
        stopped = now - self.woke_s.get(label, -math.inf) <= limits.record_ttl_s
        unheard = stopped or self._round_told_s <= limits.record_ttl_s
        if not (unheard and "has not finished a round" in reason) and now - self._trained_since > limits.record_ttl_s:
            self.laws.began(label, int(trained), reason)

    def check_rounds(self) -> None:
        """Note when training began, and for how long news of a first round can travel. Check that those who serve are
        at the run's round, unless the network is cut."""
        trained = self.samples_done() - self._forgotten
        now = self.loop.time()
        if trained > 0:
            self._trained_since = min(self._trained_since, now)
        if trained >= self.scenario.manifest.gossip.round_samples and not self.network.reach.cuts:
            self._round_told_s += now - self._looked_s
        self._looked_s = now
        rounds = {p.label: done for p in self.nodes if (done := p.round_done) is not None}
        newest = max((done for label, done in rounds.items() if label not in self.laws.excused), default=0)
        if not self.network.reach.cuts and rounds:
            most = self.scenario.manifest.recovery.snapshot_rounds_max
            self.laws.behind({label: newest - done for label, done in rounds.items()}, most)

    def check_learned(self) -> None:
        """Check that what is counted was learned, except what feeders are to train again, and a few rounds."""
        nodes = [p for p in self.nodes if p.training and p.node is not None]
        if not nodes:
            return
        counted = max(p.node.presence.progress.total for p in nodes if p.node is not None)
        owed = sum(node.presence.run_progress.owed for p in nodes for node in p.nodes)
        stages: dict[int, list[int]] = {}
        for p in nodes:
            for stage in p.stages:
                if stage in p.replicas:
                    stages.setdefault(stage, []).append(p.replicas[stage].number)
        self.laws.in_weights(counted - owed, stages, LOST_ROUNDS * self.scenario.manifest.gossip.round_samples)

    def _loaded(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        if str(fields["label"]).endswith(f"-stage-{fields['stage']}"):
            return  # a stage that the node saved in its own home (keep/recovery/resumption.py)
        self.laws.checks += 1
        given = self.resumption.checkpoint.samples if self.resumption is not None else 0
        if int(str(fields["samples_total"])) < given:  # a later one is the newest copy of a stage that was lost since
            what = f"{label} went on from {fields['samples_total']} samples, not from {given}"
            self.laws.breaks("all go on from one checkpoint", what, label)

    def stages_served(self) -> list[int]:
        """Training nodes, by stage."""
        counts = [0] * len(self.parts)
        for sim_node in self.nodes:
            for stage in sim_node.stages:
                counts[stage] += 1
        return counts

    def samples_done(self) -> float:
        return self.trace.total(name.SAMPLES)
