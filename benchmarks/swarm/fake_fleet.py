"""Simulated nodes for a coordinator: real records, signatures and report calls, no training."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.memory_network import MemoryDirectory, MemoryNetwork, MemoryTransport
from swarmnode import __version__
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId, seeded
from swarmnode.base.metrics import name
from swarmnode.base.metrics.events import RecentEvents
from swarmnode.base.metrics.name import series
from swarmnode.base.wire import record_pb2, report_pb2
from swarmnode.net.membership.progress import to_message
from swarmnode.net.membership.receipt import WorkDone, sign_receipt
from swarmnode.net.membership.record import sign_record
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.report import Reporter

BEGINNING_UNIX_S = 1.75e9
LINKS_EACH = 6


class LoopClock:
    """ports.Clock that begins at a fixed date and runs with the loop; `ahead_s` is how wrong it is."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def unix_s(self) -> float:
        return BEGINNING_UNIX_S + asyncio.get_running_loop().time() + self.ahead_s


@dataclass(slots=True)
class FakeNode:
    """A simulated node for the dashboard. Changes of its fields change what it reports."""

    identity: Identity
    name: str
    stage: int
    transport: MemoryTransport
    recent: RecentEvents
    clock: LoopClock
    speed: float
    state: record_pb2.NodeState = record_pb2.NODE_STATE_TRAINING
    sequence: int = 0
    steps: int = 0
    fed: int = 0
    version: str = __version__
    counters: dict[str, float] = field(default_factory=dict)
    friends: list[FakeNode] = field(default_factory=list)
    loss: float = 0.0


class FakeFleet:
    """`nodes` people over the stages of `manifest`, on a network inside this process."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        nodes: int,
        *,
        seed: int = 0,
        samples: int = 0,
        idle: bool = False,
        teams: Sequence[str] = (),
    ) -> None:
        """`samples`: trained before. `idle`: nobody trains. `teams`: by stage, the team of its nodes."""
        self.manifest = manifest
        self.run_id = run_id
        self.network = MemoryNetwork()
        self.clock = LoopClock()
        self.round = samples // manifest.gossip.round_samples
        self.samples = samples
        self._idle = idle
        self._teams = teams
        self._before = samples // nodes
        self.cpu_s = 0.0  # spent here, to be subtracted from measurements in the same thread
        self._rng = seeded(seed, "crowd", nodes)
        self.directory = MemoryDirectory(self.network, run_id, self.clock)
        self.nodes = [self._fake_node(index) for index in range(nodes)]
        for fake_node in self.nodes:
            near = [other for other in self.nodes if abs(other.stage - fake_node.stage) <= 1 and other is not fake_node]
            fake_node.friends = self._rng.sample(near, min(LINKS_EACH, len(near)))

    def _fake_node(self, index: int) -> FakeNode:
        identity = Identity.of_seed(index.to_bytes(4, "big") * 8)
        transport = MemoryTransport(self.network, identity.peer_id, self.run_id)
        clock = LoopClock()
        fake_node = FakeNode(
            identity,
            f"{_NAMES[index % len(_NAMES)]}-{index // len(_NAMES)}" if index >= len(_NAMES) else _NAMES[index],
            index % self.manifest.pipeline.stages,
            transport,
            RecentEvents(clock),
            clock,
            speed=self._rng.uniform(4.0, 40.0),
            fed=self._before,
        )
        if fake_node.stage < len(self._teams):
            fake_node.name += f"@{self._teams[fake_node.stage]}"
        reporter = Reporter(
            lambda: self._facts(fake_node),
            fake_node.recent,
            1,
            lambda serial, most: self._receipts(fake_node, serial, most),
        )
        transport.serve("report", reporter.answer, tensor_bytes_max=0)
        return fake_node

    def record(self, fake_node: FakeNode, ttl_s: float) -> record_pb2.SignedRecord:
        """A fresh record of `fake_node`, signed."""
        begun = time.thread_time()
        fake_node.sequence += 1
        progress = to_message({fake_node.identity.peer_id: fake_node.fed} if fake_node.fed else {})
        record = record_pb2.Record(
            run_id=self.run_id,
            peer_id=fake_node.identity.peer_id,
            sequence=fake_node.sequence,
            expires_unix_ms=int((self.clock.unix_s() + ttl_s) * 1000) + fake_node.sequence,
            stage=fake_node.stage,
            state=fake_node.state,
            addresses=["/ip4/10.0.0.1/tcp/4001"],
            samples_per_second=fake_node.speed,
            queue=self._rng.randrange(6),
            round=self.round,
            joined_unix_ms=int(BEGINNING_UNIX_S * 1000),
            version=fake_node.version,
            progress=progress,
        )
        signed = sign_record(record, fake_node.identity)
        self.cpu_s += time.thread_time() - begun
        return signed

    async def announce(self, ttl_s: float = 15.0) -> None:
        """Publish a fresh record of each node whose transport is up."""
        for fake_node in self.nodes:
            if fake_node.identity.peer_id in self.network.nodes:
                await self.directory.announce(self.record(fake_node, ttl_s))

    def train(self, seconds: float) -> None:
        """Let all nodes work for `seconds`: counts grow, the loss falls, now and then a round ends."""
        begun = time.thread_time()
        for fake_node in self.nodes:
            if self._idle or fake_node.state != record_pb2.NODE_STATE_TRAINING:
                continue
            fake_node.steps += max(1, round(seconds * fake_node.speed / self.manifest.inner.inner_batch))
            if fake_node.stage == 0:
                fed = max(1, round(seconds * fake_node.speed))
                fake_node.fed += fed
                self.samples += fed
            noise = self._rng.gauss(0.0, 0.01)
            fake_node.loss = 1.6 + 4.2 * math.exp(-self.samples / 20_000) + noise
            self._count(fake_node, seconds)
        if self.samples // self.manifest.gossip.round_samples > self.round:
            self.round = self.samples // self.manifest.gossip.round_samples
            self._meet()
        self.cpu_s += time.thread_time() - begun

    def _meet(self) -> None:
        for fake_node in self.nodes:
            outcome = "lone" if self._rng.random() < 0.06 else "paired"
            self._grow(fake_node, series(name.EXCHANGES, outcome=outcome), 1.0)
            fake_node.recent(
                "info", f"exchange.{outcome}", {"round": self.round, "seconds": self._rng.uniform(0.05, 0.6)}
            )
        feeder = next(fake_node for fake_node in self.nodes if fake_node.stage == 0)
        loss = 1.62 + 4.2 * math.exp(-self.samples / 20_000)
        feeder.recent("info", "validation.done", {"loss": loss, "samples_total": self.samples})

    def _count(self, fake_node: FakeNode, seconds: float) -> None:
        self._grow(fake_node, name.INNER_STEPS, seconds * fake_node.speed / self.manifest.inner.inner_batch)
        self._grow(fake_node, series(name.COMPUTE_SECONDS, kind="forward"), 0.3 * seconds)
        self._grow(fake_node, series(name.COMPUTE_SECONDS, kind="backward"), 0.6 * seconds)
        for kind, rate in (("pipeline", 2e6), ("gossip", 5e4), ("control", 2e3)):
            self._grow(fake_node, series(name.LINK_BYTES, kind=kind, direction="sent"), seconds * rate)

    def _grow(self, fake_node: FakeNode, key: str, value: float) -> None:
        fake_node.counters[key] = fake_node.counters.get(key, 0.0) + value

    def _receipts(self, fake_node: FakeNode, serial: int, most: int) -> tuple[int, list[bytes]]:
        """Receipts for friends of other stages, whenever there was work since the last ones."""
        begun = time.thread_time()
        found = []
        now_s = int(self.clock.unix_s())
        for friend in fake_node.friends[:most] if fake_node.steps > serial else ():
            if friend.stage != fake_node.stage:
                done = WorkDone(fake_node.steps, fake_node.steps * self.manifest.inner.microbatch)
                identity = fake_node.identity.peer_id
                receipt = sign_receipt(friend.identity, self.run_id, identity, done, int(BEGINNING_UNIX_S), now_s)
                found.append(receipt.SerializeToString())
        self.cpu_s += time.thread_time() - begun
        return fake_node.steps, found

    def _facts(self, fake_node: FakeNode) -> report_pb2.Report:
        begun = time.thread_time()
        status = report_pb2.StatusReply(
            run_id=self.run_id,
            run_name=self.manifest.name,
            peer_id=fake_node.identity.peer_id,
            version=fake_node.version,
            stage=fake_node.stage,
            stages=self.manifest.pipeline.stages,
            state=fake_node.state,
            uptime_s=asyncio.get_running_loop().time(),
            samples_total=self.samples,
            round=self.round,
            loss_train=fake_node.loss,
            inner_steps=fake_node.steps,
            resident_nbytes=420_000_000,
            counters=fake_node.counters,
        )
        links = [
            report_pb2.LinkReport(
                peer_id=friend.identity.peer_id,
                sent_nbytes=fake_node.steps * 1000 * (1 + index),
                received_nbytes=fake_node.steps * 700 * (1 + index),
                latency_s=0.01 + 0.03 * abs(hash_free(fake_node.name) - hash_free(friend.name)),
                kind=report_pb2.LINK_KIND_RELAYED if (hash_free(friend.name) > 0.9) else report_pb2.LINK_KIND_DIRECT,
            )
            for index, friend in enumerate(fake_node.friends)
            if friend.identity.peer_id in self.network.nodes
        ]
        report = report_pb2.Report(
            unix_ms=int(fake_node.clock.unix_s() * 1000), name=fake_node.name, status=status, links=links
        )
        self.cpu_s += time.thread_time() - begun
        return report


def hash_free(text: str) -> float:
    """A number in [0, 1) that depends only on `text`."""
    return seeded("place", text).random()


_NAMES = (
    "amaranth", "birch", "clover", "dahlia", "elder", "fern", "gorse", "hazel", "iris", "juniper", "kelp", "larch",
    "mallow", "nettle", "oak", "poppy", "quince", "rowan", "sorrel", "thyme", "ulmus", "vetch", "willow", "yarrow",
)  # fmt: skip
