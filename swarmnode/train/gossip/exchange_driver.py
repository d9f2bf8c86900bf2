"""Drives one replica's exchange machine: turns calls, answers and timeouts into its events, and does what it says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from swarmnode.base.errors import RemoteFault, Unavailable, cause_of
from swarmnode.base.ids import PeerId, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Packet
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import PING_TIMEOUT_S, SMALL_CALL_S, patiently
from swarmnode.net.membership.swarm import PAUSED, StageContext
from swarmnode.train.gossip.exchange_machine import (
    CallerGone,
    ExchangeAction,
    ExchangeEffect,
    ExchangeEvent,
    ExchangeInput,
    ExchangeMachine,
    ExchangeState,
    MachineEvent,
    RoundBegun,
    RoundFinished,
    RoundStopped,
)
from swarmnode.train.gossip.outgoing_packet import OutgoingPacket, packet_of, packets_s, reply_bytes_max, weight_of

PARTNER_PATIENCE_S = PING_TIMEOUT_S  # a partner that has not called by then is asked whether it lives
NETWORK = frozenset({ExchangeAction.SEND_PACKET, ExchangeAction.AWAIT_PARTNER, ExchangeAction.SEND_COMMIT})


class ExchangeDriver:
    """The exchanges of one replica with its partners, and the handlers of their calls."""

    def __init__(self, here: StageContext, machine: ExchangeMachine, lost: Callable[[PeerId], None]) -> None:
        """`lost` is told of partners that could not be reached."""
        self._here = here
        self._machine = machine
        self._lost = lost
        self._ours: OutgoingPacket | None = None  # of the round under way
        self._ends: dict[PeerId, asyncio.Future[None]] = {}  # of its exchanges
        self._reason = ""  # why the last of them that failed did
        self._begun = 0.0  # when it began, in the loop's time
        self.waited_s = 0.0  # of the last round: until the last partner that came was there, too
        self._calls: dict[int, asyncio.Future[Answer | str]] = {}  # not answered yet; str: why the call is refused
        self._calls_made = 0

    # ---- our own rounds

    async def meet(
        self,
        partners: Sequence[PeerId],
        ours: OutgoingPacket,
        patience_s: float,
        silence_s: float,
        not_awaited: Sequence[PeerId] = (),
    ) -> tuple[dict[PeerId, Packet], str]:
        """(the packets of those of `partners`, and of those `not_awaited`, that are to be averaged, in their order; why
        the last other one failed).

        Each exchange may take `patience_s`, and a partner may take `silence_s` to call. Those `not_awaited` take part
        if their packet is here before the `partners` are through.
        """
        loop = asyncio.get_running_loop()
        self._ours = ours
        self._reason = ""
        self._begun = loop.time()
        self.waited_s = 0.0
        everybody = [*partners, *not_awaited]
        self._ends = {partner: loop.create_future() for partner in everybody}
        try:
            effects = self._handle(RoundBegun(ours.round_index, everybody, patience_s, silence_s))
            exchanges = self._machine.exchanges
            if len(effects) == 1 and partners:
                await self._run(effects[0])
            else:
                async with asyncio.TaskGroup() as group:
                    tasks = {effect.peer: group.create_task(self._run(effect)) for effect in effects}
                    if awaited := [tasks[peer] for peer in partners if peer in tasks]:
                        await asyncio.wait(awaited)
                    # Those whose packet is here get the time to commit, and no more: they may never do.
                    if late := [tasks[peer] for peer in not_awaited if exchanges[peer].packet is not None]:
                        await asyncio.wait(late, timeout=SMALL_CALL_S + packets_s(ours.nbytes))
                    for task in tasks.values():
                        task.cancel()
            packets = {peer: one.packet for peer, one in exchanges.items() if one.state is ExchangeState.AVERAGED}
            return {one: packet for one, packet in packets.items() if packet is not None}, self._reason
        finally:
            self._handle(RoundStopped())
            self._ours = None

    def finished(self, round_index: int) -> None:
        """Report that the outer step of a round is done, or that a later state was taken over. Calls for the
        finished round are refused."""
        self._handle(RoundFinished(round_index))

    async def _run(self, effect: ExchangeEffect) -> None:
        """One exchange: what the machine wants of the network, step by step, until it has ended."""
        todo = [effect]
        while todo:
            (effect,) = todo
            event = await self._perform(effect)
            todo = [] if event is None else self._handle(event)
        assert self._machine.exchanges[effect.peer].state.ended, "an exchange was left behind"

    async def _perform(self, effect: ExchangeEffect) -> ExchangeEvent | None:
        """Perform a network action and return its outcome; None if the exchange has ended meanwhile."""
        match effect.action:
            case ExchangeAction.SEND_PACKET:
                return await self._send_packet(effect.peer)
            case ExchangeAction.SEND_COMMIT:
                return await self._send_commit(effect.peer)
            case _:
                return await self._await_partner(effect.peer)

    async def _send_packet(self, peer: PeerId) -> ExchangeEvent:
        exchange = self._machine.exchanges[peer]
        ours = self._ours
        assert ours is not None
        here = self._here
        request = wire.Exchange(round=ours.round_index, stage=here.stage, newcomer=ours.newcomer, samples=ours.samples)
        try:
            async with asyncio.timeout_at(exchange.deadline):
                answer = await here.transport.call(
                    peer,
                    Call(wire.Request(run_id=here.run_id, exchange=request), ours.tensors),
                    timeout_s=exchange.patience_s,
                    reply_bytes_max=reply_bytes_max(ours.nbytes),
                )
            packet = packet_of(answer, ours.round_index, peer)
            self._waited(answer.header.exchanged.held_s)
        except TimeoutError:
            return ExchangeEvent(ExchangeInput.DEADLINE, peer, ours.round_index)
        except (RemoteFault, Unavailable) as error:
            return _failed(ExchangeInput.CALL_FAILED, peer, ours.round_index, error)
        return ExchangeEvent(ExchangeInput.PACKET, peer, ours.round_index, packet=packet)

    async def _send_commit(self, peer: PeerId) -> ExchangeEvent:
        round_index = self._machine.exchanges[peer].round_index
        commit = wire.Request(run_id=self._here.run_id, commit=wire.Commit(round=round_index, apply=True))
        try:
            await self._here.transport.call(peer, Call(commit), timeout_s=SMALL_CALL_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable) as error:
            return _failed(ExchangeInput.COMMIT_FAILED, peer, round_index, error)
        return ExchangeEvent(ExchangeInput.ACKNOWLEDGED, peer, round_index)

    async def _await_partner(self, peer: PeerId) -> ExchangeEvent | None:
        """Until the exchange has ended by what the partner did; else what ends it."""
        exchange = self._machine.exchanges[peer]
        try:
            async with asyncio.timeout_at(exchange.deadline):
                await patiently(self._here.transport, self._here.run_id, peer, self._ended(peer), PARTNER_PATIENCE_S)
        except TimeoutError:
            return ExchangeEvent(ExchangeInput.DEADLINE, peer, exchange.round_index)
        except (RemoteFault, Unavailable) as error:
            return _failed(ExchangeInput.PARTNER_DEAD, peer, exchange.round_index, error)
        return None

    async def _ended(self, peer: PeerId) -> None:
        exchange = self._machine.exchanges[peer]
        loop = asyncio.get_running_loop()
        silence = ExchangeEvent(ExchangeInput.SILENCE, peer, exchange.round_index)
        timer = (
            loop.call_later(exchange.silence_s, self._handle, silence) if math.isfinite(exchange.silence_s) else None
        )
        period_s = self._here.manifest.limits.announce_period_s
        try:
            while not (await asyncio.wait([self._ends[peer]], timeout=period_s))[0]:
                if exchange.state is ExchangeState.EXPECTING and self._paused(peer):
                    event = ExchangeEvent(ExchangeInput.PARTNER_DEAD, peer, exchange.round_index, reason="it is paused")
                    self._handle(event)
        finally:
            if timer is not None:
                timer.cancel()

    def _paused(self, peer: PeerId) -> bool:
        """Whether `peer` has said that it is paused: it will not call."""
        members = self._here.swarm().stages[self._here.stage]
        return any(member.peer == peer and member.state == PAUSED for member in members)

    # ---- the partners' calls

    async def serve_exchange(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "exchange": our packet for the caller's. Waits until this replica has reached the round.
        Raises RemoteFault for another stage, and Unavailable where the two do not meet."""
        request = call.header.exchange
        if request.stage != self._here.stage:
            raise RemoteFault(
                f"exchange for {stage_name(request.stage)} sent to a replica of {stage_name(self._here.stage)}"
            )
        answer = await self._answer(ExchangeInput.CALLED, peer, request.round)
        answer.before_end = lambda: self._receive(peer, call)
        return answer

    async def _receive(self, peer: PeerId, call: Call) -> None:
        """The packet of a call that is being answered is taken once it is here. Raises Unavailable if its exchange has
        ended meanwhile: the partner is not to have ours then."""
        request = call.header.exchange
        packet = Packet(weight_of(request), request.samples, await call.whole(), sender=peer)
        self._handle(ExchangeEvent(ExchangeInput.PACKET, peer, request.round, packet=packet))
        exchange = self._machine.exchanges.get(peer)
        if exchange is None or exchange.packet is not packet:
            raise Unavailable(f"the exchange of round {request.round} ended before your packet was here")

    async def serve_commit(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "commit": the caller has our packet, so its own may be averaged here. Raises Unavailable
        where no such exchange is open, and RemoteFault for a commit to nothing, which no replica sends."""
        commit = call.header.commit
        if not commit.apply:
            raise RemoteFault("a commit that applies nothing")
        return await self._answer(ExchangeInput.COMMIT, peer, commit.round)

    async def _answer(self, kind: ExchangeInput, peer: PeerId, round_index: int) -> Answer:
        """The machine's answer to a call, maybe later. Raises Unavailable if it refuses the call."""
        self._calls_made += 1
        number = self._calls_made
        called_s = asyncio.get_running_loop().time()
        answer: asyncio.Future[Answer | str] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._handle(ExchangeEvent(kind, peer, round_index, number))
            response = await answer
        finally:
            if self._calls.pop(number, None) is not None:
                self._handle(CallerGone(number))
        if isinstance(response, str):
            raise Unavailable(response)
        if kind is ExchangeInput.CALLED:
            response.header.exchanged.held_s = max(0.0, self._begun - called_s)
            self._waited(called_s - self._begun)
        return response

    def _waited(self, seconds: float) -> None:
        """A partner came so long after this replica: until then packets need no line. By a partner's word no longer
        than the round has taken."""
        took_s = asyncio.get_running_loop().time() - self._begun
        self.waited_s = max(self.waited_s, min(seconds, took_s))

    # ---- effects

    def _handle(self, event: MachineEvent) -> list[ExchangeEffect]:
        """Do at once what the machine says about `event`; returns what takes the network."""
        effects = self._machine.handle(event, asyncio.get_running_loop().time())
        for effect in effects:
            if effect.action not in NETWORK:
                self._do(effect)
        return [effect for effect in effects if effect.action in NETWORK]

    def _do(self, effect: ExchangeEffect) -> None:
        match effect.action:
            case ExchangeAction.ANSWER:
                ours = self._ours
                assert ours is not None
                reply = wire.Exchanged(round=ours.round_index, newcomer=ours.newcomer, samples=ours.samples)
                self._reply(effect, Answer(wire.Reply(exchanged=reply), ours.tensors))
            case ExchangeAction.ACKNOWLEDGE:
                self._reply(effect, Answer(wire.Reply(committed=wire.Committed())))
            case ExchangeAction.REFUSE:
                self._reply(effect, effect.reason)
            case ExchangeAction.COUNT_ONESIDED:
                fields = {"round": effect.round_index, "peer": effect.peer, "reason": effect.reason}
                self._here.telemetry.count(name.ONESIDED_COMMITS)
                self._here.telemetry.event("exchange.onesided", level="warning", **fields)
            case ExchangeAction.REPORT_LOST:
                self._lost(effect.peer)
            case ExchangeAction.END:
                self._reason = effect.reason or self._reason
                if not (end := self._ends[effect.peer]).done():
                    end.set_result(None)

    def _reply(self, effect: ExchangeEffect, given: Answer | str) -> None:
        assert effect.call is not None
        answer = self._calls.pop(effect.call)
        if not answer.done():  # else the caller is gone
            answer.set_result(given)


def _failed(kind: ExchangeInput, peer: PeerId, round_index: int, error: Exception) -> ExchangeEvent:
    return ExchangeEvent(kind, peer, round_index, reason=cause_of(error), lost=isinstance(error, RemoteFault))
