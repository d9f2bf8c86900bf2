"""The contract on the transport in memory and on the real one; on the directory in memory and on the DHT."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar

import pytest
import uvloop

from benchmarks.memory_network import MemoryDirectory, MemoryNetwork, MemoryTransport
from swarmnode.base.identity import Identity
from swarmnode.net.transport.call_directory import CallDirectory
from swarmnode.net.transport.directory import DhtDirectory
from swarmnode.net.transport.libp2p import Libp2pTransport
from tests.support.clock import WallClock
from tests.support.iroh_node import NEEDS_IROH, iroh_node
from tests.support.libp2p_node import node
from tests.support.transport_contract import RUN, Directories, DirectoryContract, Pair, TransportContract

pytestmark = pytest.mark.node  # some seconds


class TestMemoryTransport(TransportContract):
    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        network = MemoryNetwork()
        here, there = (MemoryTransport(network, Identity.of_seed(bytes([i] * 32)).peer_id, RUN) for i in (1, 2))
        yield Pair(here, there, there.close)


class TestLibp2pTransport(TransportContract):
    """`here` lives as long as the class, `there` until a test closes it: a p2pd takes .46 s of a core to start."""

    runner: ClassVar[asyncio.Runner]
    here: ClassVar[Libp2pTransport]
    there: ClassVar[Libp2pTransport | None] = None
    living: ClassVar[AsyncExitStack]

    @classmethod
    def setup_class(cls) -> None:
        cls.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        cls.living = AsyncExitStack()
        cls.here, _ = cls.runner.run(cls.living.enter_async_context(node()))

    @classmethod
    def teardown_class(cls) -> None:
        cls.runner.run(cls.living.aclose())
        cls.runner.close()

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        self.runner.run(main)

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        here = self.here
        kind = type(self)
        if (there := kind.there) is None:
            made, _ = await self.living.enter_async_context(node())
            kind.there = there = made
            await here.connect(there.peer_id, await there.addresses())
            here.start()
            there.start()
        here.traffic.clear()
        there.traffic.clear()

        async def close() -> None:
            kind.there = None
            await there.close()

        try:
            yield Pair(here, there, close)
        finally:
            for transport, method in itertools.product((here, there), ("ping", "process", "exchange")):
                with contextlib.suppress(KeyError):
                    transport.withdraw(method)


@NEEDS_IROH
class TestIrohTransport(TransportContract):
    def run(self, main: Coroutine[Any, Any, None]) -> None:
        uvloop.run(main)

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        async with iroh_node(1) as here, iroh_node(2) as there:
            await here.connect(there.peer_id, await there.addresses())
            here.start()
            there.start()
            yield Pair(here, there, there.close)


class TestMemoryDirectory(DirectoryContract):
    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def directories(self) -> AsyncIterator[Directories]:
        network = MemoryNetwork()
        clock = WallClock()
        here, there = (MemoryDirectory(network, RUN, clock) for _ in range(2))
        identities = (Identity.of_seed(bytes([1] * 32)), Identity.of_seed(bytes([2] * 32)))
        yield Directories(here, there, identities, clock.unix_s)


@NEEDS_IROH
class TestCallDirectory(DirectoryContract):
    def run(self, main: Coroutine[Any, Any, None]) -> None:
        uvloop.run(main)

    @asynccontextmanager
    async def directories(self) -> AsyncIterator[Directories]:
        identities = (Identity.of_seed(bytes([1] * 32)), Identity.of_seed(bytes([2] * 32)))
        async with iroh_node(1) as here, iroh_node(2) as there:
            first = await CallDirectory.create(here, [], RUN, 3, unix_s=time.time)
            meeting = [(here.peer_id, await here.addresses())]
            second = await CallDirectory.create(there, meeting, RUN, 3, unix_s=time.time)
            yield Directories(first, second, identities, time.time)
            await second.close()
            await first.close()


class TestDhtDirectory(DirectoryContract):
    def run(self, main: Coroutine[Any, Any, None]) -> None:
        uvloop.run(main)

    @asynccontextmanager
    async def directories(self) -> AsyncIterator[Directories]:
        async with node() as (here, mine), node() as (there, theirs):
            first = await DhtDirectory.create(here, [], RUN, 3, unix_s=time.time)
            second = await DhtDirectory.create(
                there, [(here.peer_id, await here.addresses())], RUN, 3, unix_s=time.time
            )
            yield Directories(first, second, (mine, theirs), time.time)
            await second.close()
            await first.close()
