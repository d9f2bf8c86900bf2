"""A crowd and a dashboard that watches it: everything real but the network and the training."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.memory_network import MemoryTransport
from benchmarks.swarm.fake_fleet import BEGINNING_UNIX_S, FakeFleet, FakeNode
from swarmnode.app.dashboard.board import Board
from swarmnode.app.dashboard.start import Dashboard, PageAddress, dashboard
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import record_pb2, report_pb2
from swarmnode.net.membership.record import check_record
from swarmnode.run.manifest import Manifest, sign
from swarmnode.run.manifest.recipe import PRESETS
from tests.support.fake_telemetry import Quiet

RUN = RunId("ab" * 32)
TINY = PRESETS["tiny"]
BOUND_S = 150.0


@dataclass
class Watched:
    fake_fleet: FakeFleet
    board: Dashboard
    quiet: Quiet

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(BOUND_S):
                while not condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not within {BOUND_S:g} s: {what}") from None

    async def everybody_answered(self) -> None:
        nodes = self.board.live.board.nodes
        await self.until(
            lambda: len(nodes) == len(self.fake_fleet.nodes) and all(node.name for node in nodes.values()),
            "every node was heard and asked",
        )


@contextlib.asynccontextmanager
async def watched(
    fake_fleet: FakeFleet, home: Path, *, public: bool = False, manifest: Manifest = TINY
) -> AsyncIterator[Watched]:
    quiet = Quiet()
    identity = Identity.of_seed(b"w" * 32)
    transport = MemoryTransport(fake_fleet.network, identity.peer_id, RUN)
    async with dashboard(
        manifest,
        RUN,
        sign(manifest, Ed25519PrivateKey.from_private_bytes(b"o" * 32)),
        home,
        PageAddress(public=public, join=("swarmnode join ADDRESS --run RUN",), report=home),
        transport=transport,
        directory=fake_fleet.directory,
        clock=fake_fleet.clock,
        telemetry=quiet,
    ) as board:
        yield Watched(fake_fleet, board, quiet)


DOCUMENT = json.loads((resources.files("swarmnode.app.dashboard") / "static" / "openapi.json").read_text())


@contextlib.asynccontextmanager
async def watched_run(folder: Path, seconds: int) -> AsyncIterator[Watched]:
    """Four nodes that trained for `seconds` and announced it, and a dashboard that all of them answered."""
    fleet = FakeFleet(TINY, RUN, 4)
    for _ in range(seconds):
        fleet.train(1.0)
    await fleet.announce()
    async with watched(fleet, folder) as w:
        await w.everybody_answered()
        yield w


def fits(body: object, schema: dict[str, Any]) -> None:
    """Raise when `body` is not what the document says."""
    whole = {**schema, "components": DOCUMENT["components"], "$schema": "https://json-schema.org/draft/2020-12/schema"}
    jsonschema.Draft202012Validator(whole).validate(body)


NOW = BEGINNING_UNIX_S


def record(fake_fleet: FakeFleet, fake_node: FakeNode, **changed: object) -> record_pb2.Record:
    made = record_pb2.Record()
    made.CopyFrom(check_record(fake_fleet.record(fake_node, 15.0), run_id=RUN))
    for key, value in changed.items():
        setattr(made, key, value)
    return made


def report(serial: int = 0, event: str = "", level: str = "info", **fields: str) -> report_pb2.Report:
    made = report_pb2.Report(incarnation=1, unix_ms=int(NOW * 1000), name="ada", status=report_pb2.StatusReply())
    if event:
        made.events.append(
            report_pb2.EventReport(serial=serial, unix_ms=int(NOW * 1000), event=event, level=level, fields=fields)
        )
    return made


class Fixture:
    """A board that has heard one node."""

    def __init__(self) -> None:
        async def make() -> None:
            self.fake_fleet = FakeFleet(TINY, RUN, 2)
            self.fake_node = self.fake_fleet.nodes[0]
            self.board = Board(TINY, RUN)
            self.board.observe_record(
                record(self.fake_fleet, self.fake_node, expires_unix_ms=int((NOW + 15) * 1000)), NOW
            )

        asyncio.run(make())
        self.peer = PeerId(self.fake_node.identity.peer_id)

    def texts(self) -> list[str]:
        return [entry.text for entry in self.board.timeline]
