"""Asking before sending: who has nothing to do says yes, to as many as it can take."""

import asyncio
import random

import pytest

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import SMALL_CALL_S
from swarmnode.train.pipeline import next_hop
from swarmnode.train.pipeline.next_hop import HOLD_MAX_S, READY_AHEAD, ReservationClient, Reservations
from swarmnode.train.pipeline.route import Router
from tests.support.fake_telemetry import Quiet
from tests.support.records import member
from tests.support.village import RUN

pytestmark = pytest.mark.loop("virtual")

US = PeerId("us")
THEM = PeerId("them")


def asked(reservations: Reservations, peer: str, hold_s: float = 10.0) -> wire.Reserved:
    call = Call(wire.Request(reserve=wire.Reserve(hold_ms=int(1000 * hold_s))))
    return reservations.serve(PeerId(peer), call).header.reserved


async def test_a_reservation_counts_until_arrival_or_expiry() -> None:
    waiting = 0
    here = Reservations(lambda: waiting)
    granted = [asked(here, f"peer{n}").granted for n in range(READY_AHEAD + 3)]
    assert granted == [True] * (READY_AHEAD + 1) + [False] * 2
    here.on_arrival(PeerId("peer0"))
    waiting = 1
    assert not asked(here, "late").granted, "what came is work now"
    waiting = 0
    assert asked(here, "late") == wire.Reserved(granted=True, ahead=1)
    await asyncio.sleep(9.0)
    assert not asked(here, "later").granted
    await asyncio.sleep(1.5)
    assert asked(here, "later") == wire.Reserved(granted=True, ahead=0)


async def test_reservations_expire() -> None:
    here = Reservations(lambda: READY_AHEAD)
    assert asked(here, "peer", hold_s=1e6).granted
    await asyncio.sleep(HOLD_MAX_S - 1.0)
    assert not asked(here, "another").granted
    await asyncio.sleep(2.0)
    assert asked(here, "another").granted


def router(*speeds: float) -> Router:
    found = Router(random.Random(1), epsilon=0.0)
    found.update([member(f"peer{n}", samples_per_second=speed) for n, speed in enumerate(speeds)])
    return found


async def test_no_question_that_takes_long_against_the_work() -> None:
    network = MemoryNetwork()
    us, them = (MemoryTransport(network, peer, RUN) for peer in (US, THEM))
    delay_s = 0.0

    async def link(sender: PeerId, receiver: PeerId, nbytes: int) -> None:
        await asyncio.sleep(delay_s)

    async def answer(peer: PeerId, call: Call) -> Answer:
        return Answer(wire.Reply(reserved=wire.Reserved(granted=True)))

    network.link = link
    them.serve("reserve", answer, tensor_bytes_max=0)
    reserving = ReservationClient(RUN, us, Quiet())
    slow = router(0.1, 0.1)
    fast = router(2.0, 2.0)
    alone = router(0.1)
    assert reserving.worth_it(slow, PeerId("peer0"), 1)
    assert not reserving.worth_it(fast, PeerId("peer0"), 1)
    assert not reserving.worth_it(alone, PeerId("peer0"), 1)
    delay_s = 1.0
    for _ in range(100):
        assert await reserving.ask(THEM, 10.0) is None
    assert not reserving.worth_it(slow, PeerId("peer0"), 1), "two seconds for an answer, ten of work"


async def test_a_silent_peer_comes_after_all_others() -> None:
    network = MemoryNetwork()
    quiet = Quiet()
    us, them = (MemoryTransport(network, peer, RUN) for peer in (US, THEM))

    async def never(peer: PeerId, call: Call) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    them.serve("reserve", never, tensor_bytes_max=0)
    loop = asyncio.get_running_loop()
    for left_s, most_s in ((100.0, SMALL_CALL_S), (2.0, 2.0), (0.0, 0.0)):
        begun_s = loop.time()
        assert await ReservationClient(RUN, us, quiet).ask(THEM, left_s) == next_hop.UNHEARD_AHEAD
        assert loop.time() - begun_s <= most_s + 0.01
    assert quiet.total("swarmnode_reservations_total", outcome="unheard") == 3


def test_a_question_that_is_refused_costs_its_turn_nothing() -> None:
    found = router(1.0, 1.0)
    first, _ = found.choose(0.0, 4)
    assert first is not None
    before = found.runtime(first)
    found.refund(first, found.seconds(first, 4))
    second, _ = found.choose(0.0, 4, {first})
    assert second is not None and second != first
    assert found.choose(0.0, 4)[0] == first, "it is the next again"
    assert found.runtime(first) == pytest.approx(before)
