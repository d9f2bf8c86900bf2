"""The simulated transport and directory keep the contract of the real ones."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from swarmnode.app.planner.geography import Address
from swarmnode.base.identity import Identity
from swarmsim import virtual_time
from swarmsim.directory import DirectoryFaults, SimDht, SimDirectory
from swarmsim.network import Network, NetworkPort
from swarmsim.sim_node import SkewedClock
from swarmsim.transport import SimTransport
from tests.support.transport_contract import RUN, Directories, DirectoryContract, Pair, TransportContract

HOME = Address("local", 0.002)


def plugged(network: Network, number: int) -> tuple[NetworkPort, Identity]:
    identity = Identity.of_seed(bytes([number]) * 32)
    return network.plug(f"n{number}", identity.peer_id, HOME, 1e8, 1e8), identity


class TestSimTransport(TransportContract):
    def run(self, main: Coroutine[Any, Any, None]) -> None:
        virtual_time.run(main)  # type: ignore[arg-type]

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        network = Network(random.Random(1))
        here, there = (SimTransport(network, plugged(network, number)[0], RUN) for number in (1, 2))

        async def close_there() -> None:
            there.close()

        yield Pair(here, there, close_there)


class TestSimDirectory(DirectoryContract):
    def run(self, main: Coroutine[Any, Any, None]) -> None:
        virtual_time.run(main)  # type: ignore[arg-type]

    @asynccontextmanager
    async def directories(self) -> AsyncIterator[Directories]:
        network = Network(random.Random(1))
        wall = SkewedClock(asyncio.get_running_loop())
        dht = SimDht(network, wall, RUN, random.Random(2), DirectoryFaults())
        plug, me = plugged(network, 1)
        other_plug, other = plugged(network, 2)
        yield Directories(SimDirectory(dht, plug), SimDirectory(dht, other_plug), (me, other), wall.unix_s)
