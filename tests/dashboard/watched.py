"""A crowd and a dashboard that watches it: everything real but the network and the training."""

from __future__ import annotations

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

from swarmnode.bench.crowd import Crowd
from swarmnode.dashboard.start import Dashboard, Place, dashboard
from swarmnode.identity import Identity
from swarmnode.ids import RunId
from swarmnode.manifest import PRESETS, Manifest, sign
from swarmnode.transport.memory import MemoryTransport
from tests.pipeline.quiet import Quiet

RUN = RunId("ab" * 32)
TINY = PRESETS["tiny"]
BOUND_S = 60.0


@dataclass
class Watched:
    crowd: Crowd
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
            lambda: len(nodes) == len(self.crowd.people) and all(node.name for node in nodes.values()),
            "every node was heard and asked",
        )


@contextlib.asynccontextmanager
async def watched(
    crowd: Crowd, home: Path, *, public: bool = False, manifest: Manifest = TINY
) -> AsyncIterator[Watched]:
    quiet = Quiet()
    identity = Identity.of_seed(b"w" * 32)
    transport = MemoryTransport(crowd.network, identity.peer_id, RUN)
    async with dashboard(
        manifest,
        RUN,
        sign(manifest, Ed25519PrivateKey.from_private_bytes(b"o" * 32)),
        home,
        Place(public=public, join=("swarmnode join ADDRESS --run RUN",)),
        transport=transport,
        directory=crowd.directory,
        clock=crowd.clock,
        telemetry=quiet,
    ) as board:
        yield Watched(crowd, board, quiet)


DOCUMENT = json.loads((resources.files("swarmnode.dashboard") / "static" / "openapi.json").read_text())


def fits(body: object, schema: dict[str, Any]) -> None:
    """Raise when `body` is not what the document says."""
    whole = {**schema, "components": DOCUMENT["components"], "$schema": "https://json-schema.org/draft/2020-12/schema"}
    jsonschema.Draft202012Validator(whole).validate(body)
