"""A real transport with a p2pd of its own."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.net.transport.key_file import create
from swarmnode.net.transport.libp2p import Libp2pTransport
from tests.support.transport_contract import RUN


@asynccontextmanager
async def node(run_id: RunId = RUN) -> AsyncIterator[tuple[Libp2pTransport, Identity]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "node.key"
        identity = create(path)
        transport = await Libp2pTransport.create(path, identity, run_id)
        try:
            yield transport, identity
        finally:
            await transport.close()


async def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds; the test's own bound ends it otherwise."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)
