"""How often a node looks who is there: often while many come, rarely once it knows all."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.memory_network import MemoryDirectory, MemoryNetwork
from swarmnode.base.identity import Identity
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import sign_record
from swarmnode.train.node.own_record import MemberPorts, StageObserver
from swarmnode.train.node.presence import Presence
from tests.support.fake_telemetry import Quiet
from tests.support.transport_contract import record_of
from tests.support.village import RUN, LoopClock, manifest

PERIOD_S = 300.0


class Counted(MemoryDirectory):
    """A directory that remembers when it was asked for what is new."""

    def __init__(self, clock: LoopClock) -> None:
        super().__init__(MemoryNetwork(), RUN, clock, ttl_max_s=4.0 * PERIOD_S)
        self.looks = list[float]()

    async def refresh(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        self.looks.append(asyncio.get_running_loop().time())
        return await self.lookups(stages)


async def test_a_node_looks_often_while_many_come_and_rarely_once_it_knows_all() -> None:
    limits = replace(manifest().limits, announce_period_s=PERIOD_S, record_ttl_s=4.0 * PERIOD_S)
    run = replace(manifest(stages=2), limits=limits)
    clock = LoopClock()
    directory = Counted(clock)
    ports = MemberPorts(run, RUN, directory, clock, Identity.of_seed(bytes([99]) * 32), Quiet())
    presence = Presence(ports, StageObserver)
    presence.attend(0, {1}, 1.0)

    async def one_comes(number: int) -> None:
        identity = Identity.of_seed(bytes([number]) * 32)
        record = record_of(identity, clock.unix_s(), stage=1, ttl_s=4.0 * PERIOD_S, run_id=RUN)
        assert (await directory.announce(sign_record(record, identity))).stored

    await one_comes(0)
    watching = asyncio.create_task(presence.watching([0, 1]))
    for number in range(1, 31):
        await one_comes(number)
        await asyncio.sleep(1.0)
    often = len(directory.looks)
    await asyncio.sleep(4.0 * PERIOD_S)
    watching.cancel()
    last = directory.looks[-1] - directory.looks[-2]
    assert len(presence.peer_table.present(1)) == 31
    assert often >= 5, "each look finds many that are new"
    assert len(directory.looks) - often <= 12 and last == PERIOD_S, "as often as records come"
