"""An exchange that is nearly too late: both average or neither does, and where that cannot be it is counted."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.errors import PeerTimeout
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.metrics import name
from swarmnode.base.ports import EQUAL, Answer, Call, OuterReport, Packet, Verdict, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.gossip.outer_step import OuterStepResult
from swarmnode.train.gossip.outgoing_packet import OutgoingPacket
from swarmsim import virtual_time
from tests.support.fake_telemetry import Quiet
from tests.support.stage_context import stage_context
from tests.support.transport_contract import pong

RUN = RunId("ab" * 32)
TIMEOUT_S = 10.0
NBYTES = 4096
WHO = sorted([Identity.of_seed(bytes([n]) * 32) for n in range(1, 4)], key=lambda one: one.peer_id)
CALLER, RESPONDER, THIRD = [one.peer_id for one in WHO]


class Slow(MemoryTransport):
    """Commits take `commit_s` to the partner and back; one that is given up arrives nevertheless."""

    commit_s = 0.0, 0.0

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        there_s, back_s = self.commit_s if call.header.HasField("commit") else (0.0, 0.0)

        async def carried() -> Answer:
            await asyncio.sleep(there_s)
            answer = await super(Slow, self).call(peer, call, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max)
            await asyncio.sleep(back_s)
            return answer

        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(asyncio.ensure_future(carried()))
        except TimeoutError:
            raise PeerTimeout("too late") from None


class Party:
    """A replica in round 1, whose packet is ready once it is told to meet."""

    def __init__(
        self,
        network: MemoryNetwork,
        identity: Identity,
        *,
        round_s: float = 3600.0,
        commit_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.me = identity.peer_id
        self.quiet = Quiet()
        transport = Slow(network, self.me, RUN, telemetry=self.quiet)
        transport.commit_s = commit_s
        limits = replace(PRESETS["tiny"].limits, exchange_timeout_s=TIMEOUT_S)
        here = stage_context(
            replace(PRESETS["tiny"], limits=limits),
            1,
            RUN,
            transport=transport,
            compute=SimpleNamespace(worked_s=0.0),
            identity=identity,
            telemetry=self.quiet,
        )
        self.gossip = Gossip(here, lambda: 0, done=0, newcomer=False)
        for round_index in range(2):
            samples = round_index * PRESETS["tiny"].gossip.round_samples
            self.gossip.pace.boundary(round_index * round_s, samples, 0)
        transport.serve("ping", pong, tensor_bytes_max=0)
        transport.serve("exchange", self.gossip.exchanges.serve_exchange, tensor_bytes_max=1 << 20)
        transport.serve("commit", self.gossip.exchanges.serve_commit, tensor_bytes_max=0)

    async def meet(
        self, after_s: float, *others: PeerId, not_awaited: Sequence[PeerId] = ()
    ) -> tuple[dict[PeerId, Packet], str]:
        await asyncio.sleep(after_s)
        packet = WireTensor("u8", (NBYTES,), bytearray(self.me.encode()[-1:] * NBYTES))
        return await self.gossip._meet(others, OutgoingPacket(1, 1.0, 8, [packet]), not_awaited)

    @property
    def onesided(self) -> float:
        return self.quiet.total(name.ONESIDED_COMMITS)


def test_a_packet_counts_if_it_is_believed_and_not_ones_own() -> None:
    believed, own = (Verdict(1.0, "accepted", reason) for reason in ("within", EQUAL))
    for verdicts, gave in (([believed, Verdict(0.0, "norm", "")], 1), ([own], 0)):
        assert OuterStepResult([], OuterReport(1, 0.0, 0.0, verdicts), "", False).count_believed(2) == gave


def met(late_s: float, there_s: float, back_s: float = 0.0) -> tuple[bool, bool, float]:
    """(whether the caller has the responder's packet, the reverse, one-sided exchanges counted), where the responder
    begins so much after the caller, whose commit takes so long to it and back."""

    async def main() -> tuple[bool, bool, float]:
        here = MemoryNetwork()
        caller = Party(here, WHO[0], commit_s=(there_s, back_s))
        responder = Party(here, WHO[1])
        (ours, _), (theirs, _) = await asyncio.gather(caller.meet(0.0, RESPONDER), responder.meet(late_s, CALLER))
        for found, giver in ((ours, RESPONDER), (theirs, CALLER)):
            assert all(bytes(p.tensors[0].data) == giver.encode()[-1:] * NBYTES for p in found.values())
        return RESPONDER in ours, CALLER in theirs, caller.onesided

    return virtual_time.run(main())


def test_a_replica_with_its_partners_packet_keeps_it_while_it_commits() -> None:
    for late_s in (0.0, 9.0, 9.9):
        assert met(late_s, 0.5, 0.5) == (True, True, 0.0)
    assert met(TIMEOUT_S + 1.0, 0.5, 0.5) == (False, False, 0.0)


def test_a_commit_that_comes_too_late_is_refused_and_counted() -> None:
    for late_s in (0.0, 5.0):
        assert met(late_s, 3.0, 3.0) == (True, True, 1.0)  # only its answer came too late: the caller cannot know
        assert met(late_s, TIMEOUT_S + 1.0) == (True, False, 1.0)


def test_a_commit_of_the_last_moment_counts() -> None:
    """The word comes at the very time at which nobody waits for it any longer: whatever is first, both agree."""
    for seed in range(8):

        async def main() -> tuple[bool, bool]:
            here = MemoryNetwork()
            caller = Party(here, WHO[0], commit_s=(4.0, 0.0))
            responder = Party(here, WHO[1])
            theirs = asyncio.ensure_future(responder.meet(0.0, CALLER))
            await caller.meet(TIMEOUT_S - 4.0, RESPONDER)
            return CALLER in (await theirs)[0], caller.onesided == 0.0

        applied, told = virtual_time.run(main(), seed)
        assert applied == told


@pytest.mark.loop("virtual")
async def test_a_partner_no_longer_waited_for_is_told_so_while_others_are() -> None:
    """In a group of three: one calls when the next round is near, while another's commit is on its way."""
    here = MemoryNetwork()
    first = Party(here, WHO[0], commit_s=(4.0, 0.0))
    second = Party(here, WHO[1])
    third = Party(here, WHO[2], round_s=4.0)
    (found, _), (_, _), (late, why) = await asyncio.gather(
        third.meet(0.0, CALLER, RESPONDER), first.meet(3.0, THIRD), second.meet(6.0, THIRD)
    )
    assert found.keys() == {CALLER} and not late and "or it is over" in why
    assert first.onesided == second.onesided == 0.0


@pytest.mark.loop("virtual")
async def test_a_caller_that_is_gone_may_call_again() -> None:
    """Its first call waits for the other's boundary and is given up; only the second one is answered."""
    here = MemoryNetwork()
    caller = Party(here, WHO[0])
    responder = Party(here, WHO[1])
    packet = WireTensor("u8", (NBYTES,), bytearray(NBYTES))
    header = wire.Request(run_id=RUN, exchange=wire.Exchange(round=1, stage=1, samples=8))
    early = asyncio.ensure_future(responder.gossip.exchanges.serve_exchange(CALLER, Call(header, [packet])))
    await asyncio.sleep(1.0)
    early.cancel()
    (ours, _), (theirs, _) = await asyncio.gather(caller.meet(1.0, RESPONDER), responder.meet(2.0, CALLER))
    assert early.cancelled() and RESPONDER in ours and CALLER in theirs and caller.onesided == 0.0
    assert bytes(theirs[CALLER].tensors[0].data) == CALLER.encode()[-1:] * NBYTES


@pytest.mark.loop("virtual")
async def test_a_replica_that_stops_in_an_exchange_refuses_its_commit() -> None:
    here = MemoryNetwork()
    caller = Party(here, WHO[0], commit_s=(4.0, 0.0))
    responder = Party(here, WHO[1])
    meeting = asyncio.ensure_future(responder.meet(0.0, CALLER))
    ours = asyncio.ensure_future(caller.meet(0.0, RESPONDER))
    await asyncio.sleep(2.0)
    meeting.cancel()
    found, _ = await ours
    assert RESPONDER in found and caller.onesided == 1.0 and meeting.cancelled()


@pytest.mark.parametrize("at_s", [0.0, 3.0, 6.0])
@pytest.mark.loop("virtual")
async def test_a_late_member_takes_part_if_it_comes_in_time(at_s: float) -> None:
    """The second begins after 3 s; the third, which neither waits for, at `at_s`."""
    here = MemoryNetwork()
    first, second, third = [Party(here, who) for who in WHO]
    later = asyncio.ensure_future(third.meet(at_s, *[CALLER, RESPONDER] * (at_s < 6.0)))
    (one, _), (two, _) = await asyncio.gather(
        first.meet(0.0, RESPONDER, not_awaited=[THIRD]), second.meet(3.0, CALLER, not_awaited=[THIRD])
    )
    assert asyncio.get_running_loop().time() < 4.0, "nobody waits for one that is late"
    three, _ = await later
    assert (RESPONDER in one, CALLER in two) == (True, True)
    in_time = at_s < 6.0
    assert (THIRD in one, THIRD in two, [*three]) == (in_time, in_time, [CALLER, RESPONDER] * in_time)


@pytest.mark.loop("virtual")
async def test_a_late_member_cannot_hold_a_round_up_by_never_committing() -> None:
    party = Party(MemoryNetwork(), WHO[1])
    packet = WireTensor("u8", (NBYTES,), bytearray(NBYTES))
    call = Call(wire.Request(run_id=RUN, exchange=wire.Exchange(round=1, stage=1, samples=8)), [packet])
    met, answer = await asyncio.gather(
        party.meet(0.0, not_awaited=[CALLER]), party.gossip.exchanges.serve_exchange(CALLER, call)
    )
    assert answer.tensors and not met[0]
    assert asyncio.get_running_loop().time() < TIMEOUT_S
