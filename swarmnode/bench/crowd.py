"""A crowd of made-up nodes for a coordinator to watch: real records, signatures and report calls, no training."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from swarmnode import __version__
from swarmnode.identity import Identity
from swarmnode.ids import RunId, seeded
from swarmnode.manifest import Manifest
from swarmnode.membership.progress import to_message
from swarmnode.membership.receipt import Done, sign_receipt
from swarmnode.membership.record import sign_record
from swarmnode.metrics import name
from swarmnode.metrics.name import series
from swarmnode.metrics.recent import Recent
from swarmnode.node.report import Reporter
from swarmnode.transport.memory import MemoryDirectory, MemoryNetwork, MemoryTransport
from swarmnode.wire import control_pb2, record_pb2, report_pb2

BEGINNING_UNIX_S = 1.75e9
LINKS_EACH = 6


class LoopClock:
    """ports.Clock that begins at a fixed date and runs with the loop; `ahead_s` is how wrong it is."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def unix_s(self) -> float:
        return BEGINNING_UNIX_S + asyncio.get_running_loop().time() + self.ahead_s


@dataclass(slots=True)
class Person:
    """One made-up node; change its fields to make something happen to it."""

    identity: Identity
    name: str
    stage: int
    transport: MemoryTransport
    recent: Recent
    clock: LoopClock
    speed: float
    state: record_pb2.NodeState = record_pb2.NODE_STATE_TRAINING
    sequence: int = 0
    steps: int = 0
    fed: int = 0
    version: str = __version__
    counters: dict[str, float] = field(default_factory=dict)
    friends: list[Person] = field(default_factory=list)
    loss: float = 0.0


class Crowd:
    """`nodes` people over the stages of `manifest`, on a network inside this process."""

    def __init__(self, manifest: Manifest, run_id: RunId, nodes: int, *, seed: int = 0) -> None:
        self.manifest = manifest
        self.run_id = run_id
        self.network = MemoryNetwork()
        self.clock = LoopClock()
        self.round = 0
        self.samples = 0
        self.cpu_s = 0.0  # spent here, for those who measure others in the same thread
        self._rng = seeded(seed, "crowd", nodes)
        self.directory = MemoryDirectory(self.network, run_id, self.clock)
        self.people = [self._person(index) for index in range(nodes)]
        for person in self.people:
            near = [other for other in self.people if abs(other.stage - person.stage) <= 1 and other is not person]
            person.friends = self._rng.sample(near, min(LINKS_EACH, len(near)))

    def _person(self, index: int) -> Person:
        identity = Identity.of_seed(index.to_bytes(4, "big") * 8)
        transport = MemoryTransport(self.network, identity.peer_id, self.run_id)
        clock = LoopClock()
        person = Person(
            identity,
            f"{_NAMES[index % len(_NAMES)]}-{index // len(_NAMES)}" if index >= len(_NAMES) else _NAMES[index],
            index % self.manifest.pipeline.stages,
            transport,
            Recent(clock),
            clock,
            speed=self._rng.uniform(4.0, 40.0),
        )
        reporter = Reporter(
            lambda: self._facts(person), person.recent, 1, lambda serial, most: self._receipts(person, serial, most)
        )
        transport.serve("report", reporter.answer, tensor_bytes_max=0)
        return person

    def record(self, person: Person, ttl_s: float) -> record_pb2.SignedRecord:
        """A fresh record of `person`, signed."""
        begun = time.thread_time()
        person.sequence += 1
        progress = to_message({person.identity.peer_id: person.fed} if person.fed else {})
        record = record_pb2.Record(
            run_id=self.run_id,
            peer_id=person.identity.peer_id,
            sequence=person.sequence,
            expires_unix_ms=int((self.clock.unix_s() + ttl_s) * 1000) + person.sequence,
            stage=person.stage,
            state=person.state,
            addresses=["/ip4/10.0.0.1/tcp/4001"],
            samples_per_second=person.speed,
            queue=self._rng.randrange(6),
            round=self.round,
            joined_unix_ms=int(BEGINNING_UNIX_S * 1000),
            version=person.version,
            progress=progress,
        )
        signed = sign_record(record, person.identity)
        self.cpu_s += time.thread_time() - begun
        return signed

    async def announce(self, ttl_s: float = 15.0) -> None:
        """Everybody whose transport is up publishes a fresh record."""
        for person in self.people:
            if person.identity.peer_id in self.network.nodes:
                await self.directory.announce(self.record(person, ttl_s))

    def train(self, seconds: float) -> None:
        """Everybody works for `seconds`: counts grow, the loss falls, now and then a round ends."""
        begun = time.thread_time()
        for person in self.people:
            if person.state != record_pb2.NODE_STATE_TRAINING:
                continue
            person.steps += max(1, round(seconds * person.speed / self.manifest.inner.inner_batch))
            if person.stage == 0:
                fed = max(1, round(seconds * person.speed))
                person.fed += fed
                self.samples += fed
            noise = self._rng.gauss(0.0, 0.01)
            person.loss = 1.6 + 4.2 * math.exp(-self.samples / 20_000) + noise
            self._count(person, seconds)
        if self.samples // self.manifest.gossip.round_samples > self.round:
            self.round = self.samples // self.manifest.gossip.round_samples
            self._meet()
        self.cpu_s += time.thread_time() - begun

    def _meet(self) -> None:
        for person in self.people:
            outcome = "lone" if self._rng.random() < 0.06 else "paired"
            self._grow(person, series(name.EXCHANGES, outcome=outcome), 1.0)
            person.recent("info", f"exchange.{outcome}", {"round": self.round, "seconds": self._rng.uniform(0.05, 0.6)})
        feeder = next(person for person in self.people if person.stage == 0)
        loss = 1.62 + 4.2 * math.exp(-self.samples / 20_000)
        feeder.recent("info", "validation.done", {"loss": loss, "samples_total": self.samples})

    def _count(self, person: Person, seconds: float) -> None:
        self._grow(person, name.INNER_STEPS, seconds * person.speed / self.manifest.inner.inner_batch)
        self._grow(person, series(name.COMPUTE_SECONDS, kind="forward"), 0.3 * seconds)
        self._grow(person, series(name.COMPUTE_SECONDS, kind="backward"), 0.6 * seconds)
        for kind, rate in (("pipeline", 2e6), ("gossip", 5e4), ("control", 2e3)):
            self._grow(person, series(name.LINK_BYTES, kind=kind, direction="sent"), seconds * rate)

    def _grow(self, person: Person, key: str, value: float) -> None:
        person.counters[key] = person.counters.get(key, 0.0) + value

    def _receipts(self, person: Person, serial: int, most: int) -> tuple[int, list[bytes]]:
        """What each friend of another stage has to thank for, whenever there was work since."""
        begun = time.thread_time()
        found, now_s = [], int(self.clock.unix_s())
        for friend in person.friends[:most] if person.steps > serial else ():
            if friend.stage != person.stage:
                done = Done(person.steps, person.steps * self.manifest.inner.microbatch)
                identity = person.identity.peer_id
                receipt = sign_receipt(friend.identity, self.run_id, identity, done, int(BEGINNING_UNIX_S), now_s)
                found.append(receipt.SerializeToString())
        self.cpu_s += time.thread_time() - begun
        return person.steps, found

    def _facts(self, person: Person) -> report_pb2.Report:
        begun = time.thread_time()
        status = control_pb2.StatusReply(
            run_id=self.run_id,
            run_name=self.manifest.name,
            peer_id=person.identity.peer_id,
            version=person.version,
            stage=person.stage,
            stages=self.manifest.pipeline.stages,
            state=person.state,
            uptime_s=asyncio.get_running_loop().time(),
            samples_total=self.samples,
            round=self.round,
            loss_train=person.loss,
            inner_steps=person.steps,
            resident_nbytes=420_000_000,
            counters=person.counters,
        )
        links = [
            report_pb2.LinkReport(
                peer_id=friend.identity.peer_id,
                sent_nbytes=person.steps * 1000 * (1 + index),
                received_nbytes=person.steps * 700 * (1 + index),
                latency_s=0.01 + 0.03 * abs(hash_free(person.name) - hash_free(friend.name)),
                kind=report_pb2.LINK_KIND_RELAYED if (hash_free(friend.name) > 0.9) else report_pb2.LINK_KIND_DIRECT,
            )
            for index, friend in enumerate(person.friends)
            if friend.identity.peer_id in self.network.nodes
        ]
        report = report_pb2.Report(
            unix_ms=int(person.clock.unix_s() * 1000), name=person.name, status=status, links=links
        )
        self.cpu_s += time.thread_time() - begun
        return report


def hash_free(text: str) -> float:
    """A number in [0, 1) that depends on `text` only."""
    return seeded("place", text).random()


_NAMES = (
    "amaranth", "birch", "clover", "dahlia", "elder", "fern", "gorse", "hazel", "iris", "juniper", "kelp", "larch",
    "mallow", "nettle", "oak", "poppy", "quince", "rowan", "sorrel", "thyme", "ulmus", "vetch", "willow", "yarrow",
)  # fmt: skip
