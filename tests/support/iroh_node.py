"""A real transport over iroh."""

import importlib.util
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode_methods.iroh_transport import IrohTransport
from tests.support.transport_contract import RUN

NEEDS_IROH = pytest.mark.skipif(importlib.util.find_spec("iroh") is None, reason="iroh is not installed")


@asynccontextmanager
async def iroh_node(
    seed: int, run_id: RunId = RUN, listen: Sequence[str] = ("/ip4/127.0.0.1/udp/0",)
) -> AsyncIterator[IrohTransport]:
    transport = await IrohTransport.create(Path(), Identity.of_seed(bytes([seed] * 32)), run_id, listen)
    try:
        yield transport
    finally:
        await transport.close()
