"""Asking before sending over real streams, four p2pds: a replica with work for minutes gets no microbatch."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.support.hop_chain import Served, occupied
from tests.support.libp2p_node import node
from tests.support.village import RUN

pytestmark = pytest.mark.node  # some seconds


@pytest.mark.loop("uvloop")
async def test_a_microbatch_goes_where_nothing_waits_over_real_streams() -> None:
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        transports = [(await stack.enter_async_context(node(RUN)))[0] for _ in range(4)]
        people = [Served(transport, stage, tasks) for transport, stage in zip(transports, (0, 1, 1, 2), strict=True)]
        for person in people:
            stack.callback(person.compute.close)
            for other in people:
                if other is not person:
                    await person.transport.connect(other.transport.peer_id, await other.transport.addresses())
            person.knows(*people)
        for transport in transports:
            transport.start()
        first, _ = people[0].routers[1].choose(0.0, 4)
        people[0].routers[1].update(())
        people[0].knows(*people)
        busy, idle = sorted(people[1:3], key=lambda person: person.transport.peer_id != first)
        async with occupied(busy, 2):
            carried = await people[0].feed(deadline_s=60.0)
            assert carried.path[0] == idle.transport.peer_id and carried.retries == 0
            asked = people[0].transport.bytes_by_method()["reserve", "sent"]
            assert 0 < asked < 1024, asked
            assert busy.transport.bytes_by_method().get(("process", "received"), 0) == 0
