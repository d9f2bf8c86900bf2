"""Whole nodes in one process: real replicas and coroutines; transport and directory are in memory, and text is numbers
with a pattern.

Under `@pytest.mark.loop("village")`, the default in tests/node, they live in virtual time: each piece of arithmetic
takes about `PIECE_S`, however busy the machine is, and waiting costs nothing. In another loop each has a thread for it.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.memory_network import MemoryDirectory, MemoryNetwork, MemoryTransport
from swarmnode.app.machine.compute import ThreadCompute
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId, part_of, seeded, swarm_of
from swarmnode.base.parted_work import GivenEarly, Parts, run_whole
from swarmnode.base.ports import Priority, Replica, StreamingMessage, Tape, WireTensor
from swarmnode.base.wire import record_pb2
from swarmnode.data.base_index import BaseIndex
from swarmnode.data.index import Index
from swarmnode.keep.recovery.checkpoint_io import SavedMean
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.keep.transfer.chunk_set import SetPorts
from swarmnode.keep.transfer.donor import ArchiveBudget
from swarmnode.run import owner
from swarmnode.run.admission.access import AccessRules
from swarmnode.run.admission.admission import Admission
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.manifest import GossipSpec, InnerSpec, LimitsSpec, Manifest, ModelSpec, PipelineSpec, RecoverySpec
from swarmnode.train.node import membership_handlers
from swarmnode.train.node.drain import DrainReport
from swarmnode.train.node.limits import NodeRole
from swarmnode.train.node.membership_handlers import MembershipHandlers
from swarmnode.train.node.node import Node
from swarmnode.train.node.node_ports import NodePorts
from swarmnode.train.node.notice import NoticeKind, Notices
from swarmnode.train.node.served_stage import ServedStage
from swarmnode.train.node.shared_transport import SharedTransport
from swarmnode.train.node.span import SpanPorts
from swarmnode.train.pipeline.feeder import Samples
from swarmnode.train.pipeline.span import block_around, within
from swarmsim import sandbox
from swarmsim.machine import HASH_RATE, Meter, SimMachine
from swarmsim.virtual_time import VirtualLoop
from tests.support.fake_telemetry import Quiet

T = TypeVar("T")
PIECE_S = 0.02
RUN = RunId("cd" * 32)
TINY = ModelSpec(layers=3, width=32, heads=4, kv_heads=2, ffn=48, context=16, vocabulary=50)


def manifest(
    stages: int = 3,
    method: str = "noloco",
    window_max: int = 4,
    boundary: str = "fp32",
    boundary_rank: int = 0,
    **gossip: object,
) -> Manifest:
    return Manifest(
        seed=7,
        model=TINY,
        # Nobody moves: who of a few alike nodes does is chance, and tests of something else must not depend on it.
        pipeline=PipelineSpec(
            stages=stages,
            boundary=boundary,
            boundary_rank=boundary_rank,
            window_max=window_max,
            validation_samples=8,
            validation_every_samples=1,
            rebalance_period_s=0.0,
        ),
        inner=InnerSpec(microbatch=4, inner_batch=8, warmup_samples=16, decay_samples=100_000),
        gossip=GossipSpec(method=method, round_seconds_min=0.0, **{"round_samples": 128, "group": 2, **gossip}),  # type: ignore[arg-type]
        limits=LimitsSpec(
            announce_period_s=0.2,
            record_ttl_s=5.0,
            hop_timeout_min_s=1.0,
            microbatch_timeout_s=20.0,
            exchange_timeout_s=5.0,
        ),
    )


class VillageLoop(VirtualLoop):
    """Virtual time without the sandbox: a process or a file that somebody waits for takes no time in it."""

    def _run_until(self, main: asyncio.Task[Any]) -> None:
        sandbox.inside.discard(self._thread or 0)
        super()._run_until(main)

    def run_in_executor(self, executor: object, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        result = self.create_future()
        try:
            result.set_result(work(*args))
        except Exception as error:  # noqa: BLE001  handed to the waiter
            result.set_exception(error)
        return result


class VillageMachine(SimMachine):
    """ports.Compute in virtual time: real arithmetic, each piece of which takes about `PIECE_S`, or of whose samples
    each takes `sample_s`."""

    def __init__(self, seed: str, sample_s: float) -> None:
        self._sample_s = sample_s
        self._meter = Meter()
        self._meter.state_nbytes = PIECE_S * HASH_RATE
        super().__init__(1.0, 1.0, self._meter, seeded("village machine", seed), noise=0.5)

    async def run(self, priority: Priority, samples: int, work: Callable[[], T | Parts[T] | GivenEarly[T]]) -> T:
        def whole() -> T | GivenEarly[T]:
            self._meter.add(samples * self._sample_s)
            value = work()
            if isinstance(value, Generator):
                value = run_whole(value)
            if isinstance(value, StreamingMessage):
                with contextlib.suppress(Exception):  # whoever waits for its tensors gets the error
                    value.finish()
            return value

        return await super().run(priority, samples, whole)


class Numbers(Samples):
    """pipeline.feeder.Samples of a text with a pattern that can be learnt: sample i counts upwards from i."""

    def __init__(self, run: Manifest) -> None:
        self._context = run.model.context
        self._vocabulary = run.model.vocabulary
        self._step = run.inner.microbatch

    def tokens(self, indices: Sequence[int]) -> np.ndarray:
        first = np.asarray(indices)[:, None] * 7
        return ((first + np.arange(self._context + 1)[None, :]) % self._vocabulary).astype("<u2")

    def train(self, indices: Sequence[int]) -> WireTensor:
        tokens = self.tokens(indices)
        return WireTensor("u16", tokens.shape, tokens.tobytes())

    async def again(self, indices: Sequence[int]) -> WireTensor | None:
        return self.train(indices)

    def held_out(self) -> Sequence[WireTensor]:
        return [self.train(range(10_000, 10_000 + self._step))]


class Recording(TorchReplica):
    """Counts the gradients it adds; the laws are checked on these."""

    counted: int = 0

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        given = super().backward(tape, gradient, samples, accumulate=accumulate)
        self.counted += samples if accumulate else 0
        return given


class SendsNoise(Recording):
    """Its gradients are right; its activations are noise."""

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        y, tape = super().forward(x, keep=keep, graph=graph, tokens=tokens, late=late)
        honest = np.frombuffer(y.data, np.float32)
        drawn = np.random.default_rng(self.inner_steps).standard_normal(honest.size, np.float32)
        return replace(y, data=(drawn * honest.std()).tobytes()), tape


@dataclass
class Villager:
    node: Node
    transport: MemoryTransport
    quiet: Quiet
    identity: Identity
    notices: Notices = field(default_factory=Notices)
    task: asyncio.Task[DrainReport] | None = None
    saved: list[int] = field(default_factory=list)
    replica: Recording | None = None
    parts: "dict[int, Villager]" = field(default_factory=dict)  # of the machine's further stages

    @property
    def served(self) -> ServedStage:
        """The stage that the node serves. AssertionError while it serves none."""
        assert self.node.served is not None, "this node serves no stage"
        return self.node.served

    @property
    def fed(self) -> int:
        """Samples that it has fed, in its own book."""
        own = self.node.presence.progress.feeders.get(self.node.me, 0)
        return own + sum(part.fed for part in self.parts.values())

    async def die(self) -> None:
        """Gone without a word, as by SIGKILL."""
        assert self.task is not None
        await self.transport.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Village:
    """Use `async with village(run) as v`; nodes are stopped at the end, whatever happened."""

    def __init__(self, run: Manifest, text: type[Numbers] = Numbers) -> None:
        self.run = run
        self.text = text
        self.network = MemoryNetwork()
        self.people: list[Villager] = []
        self.liars = False  # some node signs falsely, and may be called a forger
        self.made: list[Recording] = []  # every replica there ever was
        self.samples: dict[PeerId, list[int]] = defaultdict(list)
        self.saving = CheckpointOptions()  # of those added from now on
        self.sample_s = 0.0  # the same: how long a sample keeps their device busy, in virtual time
        self.cut = 0  # the same: the amendment that cut the stages of `run` as they are
        self.owner = b""  # the same: the key whose warrants they honour
        self.admission: Callable[[], Admission] | None = None  # the same: a new one for each
        self._stack = contextlib.AsyncExitStack()

    def add(
        self,
        stage: int | None,
        kind: type[Recording] | None = None,
        unable: frozenset[int] = frozenset(),
        samples: Callable[[], Samples] | None = None,
        data: Callable[[Quiet], SetPorts[Index]] | None = None,
        base: Callable[[Quiet], SetPorts[BaseIndex]] | None = None,
        role: NodeRole = NodeRole.ANY,
        again: Villager | None = None,
        room: int = 1,
    ) -> Villager:
        """`again`: start with the key of this one, which has died, as a process that restarts at the same home.
        `room`: stages that this machine's memory holds."""
        identity = Identity.of_seed(bytes([len(self.people) + 1]) * 32) if again is None else again.identity
        quiet = Quiet()
        transport = MemoryTransport(self.network, identity.peer_id, RUN, telemetry=quiet)
        admission = None if self.admission is None else self.admission()
        MembershipHandlers(record_pb2.SignedManifest(), admission).serve(transport)
        virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
        compute = VillageMachine(identity.peer_id, self.sample_s) if virtual else ThreadCompute(quiet)
        self._stack.callback(compute.close)
        clock = LoopClock()
        saved: list[int] = []

        async def mean(left: Replica) -> SavedMean | None:
            assert isinstance(left, TorchReplica)
            saved.append(left.stage.part.stage)
            copied = None if left.average is None else left.average.copied()
            return None if copied is None else SavedMean(*copied)

        def replica(who: Identity, run: Manifest, stage: int) -> Replica:
            made = (kind or Recording)(run, stage)
            made.outer.sender = who.peer_id
            owner = villager if who is identity else villager.parts[part_of(who.peer_id) or 0]
            if stage == owner.node.stage:  # else it is to judge another's answer
                owner.replica = made
                self.made.append(made)
            return made

        def part(stage: int) -> Node:
            own = identity.part(stage)
            ports = replace(world, transport=shared.member(own.peer_id), identity=own)
            made = Node(self.run, RUN, replace(ports, replica=partial(replica, own)), self.cut)
            villager.parts[stage] = Villager(made, transport, quiet, own)
            return made

        def block(stage: int) -> range:
            stages = self.run.pipeline.stages
            return block_around(stage, stages, min(room, self.run.pipeline.span_max), lambda it: within(it, unable))

        shared = SharedTransport(transport)
        world = NodePorts(
            transport=shared.member(identity.peer_id),
            directory=MemoryDirectory(self.network, swarm_of(RUN, self.cut), clock),
            compute=compute,
            clock=clock,
            telemetry=quiet,
            identity=identity,
            replica=partial(replica, identity),
            samples=samples or (lambda: self.text(self.run)),
            probe=(lambda *_: None) if virtual else membership_handlers.forward,  # virtual time is the same anyway
            mean=mean,
            saving=self.saving,
            unable=unable,
            owner=self.owner,
            admission=admission,
            archiving=ArchiveBudget(rest_s=0.0, share=1.0, made_share=1.0),
            hashing=asyncio.to_thread,
            data=None if data is None else data(quiet),
            base=None if base is None else base(quiet),
            role=role,
        )
        villager = Villager(
            Node(self.run, RUN, world, self.cut, SpanPorts(block, part)), transport, quiet, identity, saved=saved
        )
        villager.task = asyncio.get_running_loop().create_task(villager.node.run(villager.notices, stage))
        self.people.append(villager)
        return villager

    async def leave(self) -> None:
        """Everybody leaves, feeders first."""
        living = [p for p in self.people if p.task is not None and not p.task.done()]
        for feeding in (True, False):
            group = [p for p in living if (p.node.stage in (0, None)) is feeding]
            for person in group:
                person.notices.leave("the test is over", NoticeKind.STOP)
            await asyncio.gather(*(p.task for p in group if p.task is not None))

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 150.0) -> None:
        """Wait for `condition`; AssertionError with `what` when it does not come, or when a node failed meanwhile."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    for person in self.people:
                        if person.task is not None and person.task.done() and not person.task.cancelled():
                            person.task.result()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            seen = "\n".join(f"{p.node.me[-8:]} stage {p.node.stage}: {p.quiet.events[-12:]}" for p in self.people)
            raise AssertionError(f"not within {timeout_s:g} s: {what}\n{seen}") from None

    async def fed(self, samples: int) -> None:
        """Wait until the village has trained on so many samples."""
        await self.until(lambda: self.total() >= samples, f"{samples} samples")

    async def heard(self, samples: int) -> None:
        """The same, and until every node knows it: a joiner hears of them."""
        await self.until(lambda: self.told() >= samples, f"{samples} samples that all know of")

    async def trains(self, samples: int, what: str, timeout_s: float = 150.0) -> None:
        """Wait for so many samples more; `what` says what that shows."""
        before = self.total()
        await self.until(lambda: self.total() >= before + samples, what, timeout_s)

    def forged(self) -> list[str]:
        """What nodes say of peers whose signatures they do not believe."""
        reasons = [str(fields.get("reason", "")) for p in self.people for _, fields in p.quiet.events]
        return [reason for reason in reasons if "is forged" in reason]

    def total(self) -> int:
        """Samples fed by everybody: each feeder's own entry, which nobody else may know yet."""
        return sum(person.fed for person in self.people)

    def told(self) -> int:
        """Samples that every living node tells of in its record. A joiner that hears of none takes the run for new."""
        living = [p.node for p in self.people if p.task is not None and not p.task.done()]
        records = [node.presence.peer_table.member(node.me) for node in living]
        return min(0 if record is None else record.total for record in records)


class LoopClock:
    """ports.Clock that begins at a fixed date and runs with the loop."""

    def unix_s(self) -> float:
        return 1.7e9 + asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def village(
    run: Manifest, text: type[Numbers] = Numbers, *, stages: Sequence[int] = ()
) -> AsyncIterator[Village]:
    """A village with a node at each of `stages`. At its end nodes are cancelled; who wants them to leave says so."""
    here = Village(run, text)
    try:
        for stage in stages:
            here.add(stage)
        yield here
        assert here.liars or not (said := here.forged()), f"honest nodes are called forgers: {said[:3]}"
    finally:
        for person in here.people:
            if person.task is not None and not person.task.done():
                person.task.cancel()
        await asyncio.gather(*(p.task for p in here.people if p.task is not None), return_exceptions=True)
        await here._stack.aclose()


__all__ = ["RUN", "Numbers", "Recording", "Village", "Villager", "manifest", "village"]


def losses(v: Village) -> list[float]:
    """Held-out losses in the order measured, whoever measured them."""
    found = [
        (fields["samples_total"], fields["loss"])
        for p in v.people
        for event, fields in p.quiet.events
        if event == "validation.done"
    ]
    return [float(loss) for _, loss in sorted(found)]  # type: ignore[arg-type]


OWNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


class Amending:
    """The owner of the run of `v`: whoever is added from now on takes its amendments up."""

    def __init__(self, v: Village) -> None:
        self.v = v
        self.begun = v.run
        self.signed = Amendments(v.run, RUN, owner.public_bytes(OWNER))
        v.admission = self.admission

    def admission(self) -> Admission:
        known = Amendments(self.begun, RUN, owner.public_bytes(OWNER))
        known.learn(self.signed.signed)
        return Admission(AccessRules(RUN, owner.public_bytes(OWNER), is_open=True), LoopClock(), None, known)

    def sign(self, round_index: int, changes: dict[str, Any]) -> None:
        """Amend the run from this round on; all who are here know it at once."""
        self.signed.sign(OWNER, round_index, changes)
        for person in self.v.people:
            admission = person.node.ports.admission
            assert admission is not None and admission.amendments is not None
            admission.amendments.learn(self.signed.signed)


def cause(error: BaseException) -> BaseException:
    """What a group of errors came of."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def told(person: Villager, event: str) -> list[dict[str, object]]:
    return [dict(fields) for name, fields in person.quiet.events if name == event]


def excluded(person: Villager) -> set[str]:
    return {str(fields["peer"]) for fields in told(person, "peer.excluded")}


async def lose(v: Village, stage: int) -> None:
    for person in v.people:
        if person.node.stage == stage and person.task is not None and not person.task.done():
            await person.die()


def with_recovery(run: Manifest, **fields: object) -> Manifest:
    return replace(run, recovery=replace(RecoverySpec(snapshot_seconds=0.0), **fields))  # type: ignore[arg-type]
