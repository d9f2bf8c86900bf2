"""The exchange of packets between replicas as a state machine: no I/O, no clock, no asyncio.

An `Exchange` is one replica's side of its meeting with one partner in one round. The initiator (the lower peer id)
calls with its packet. The responder's packet travels back at the same time (ports.BOTH_WAYS), and its last byte leaves
once the initiator's packet is here whole. So the initiator has an answer only where the responder has its packet; its
commit then lets the responder use it.
`TRANSITIONS` is the whole protocol. `ExchangeMachine.handle` applies it and returns what its caller must do. The node
(exchange_driver.py) and the tests (tests/gossip/test_exchange_machine.py) drive the same machine.

Guarantees. No protocol makes two replicas agree over a network that may lose the last message (the two generals'
problem), so "both average or neither" holds up to the loss of the commit:

1. If the responder averages, the initiator does too, unless it stopped or died after it had sent its commit.
2. If the initiator averages and the responder does not, the initiator has counted the exchange as one-sided, unless the
   responder stopped or died after it had acknowledged. The converse does not hold: where only the acknowledgement was
   lost, both average and the exchange is counted too.
3. A packet counts once: an exchange takes one packet, and refuses a second call and a second commit.
   A call that is refused, or whose exchange ended while its packet came, gets no whole packet of ours.
4. Every exchange ends. The driver has an action under way for each open exchange, and the deadline ends the exchange
   whatever the partner does. A waiting call is for a round that this replica has not finished: it is answered at the
   boundary of that round, or at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from swarmnode.base.ids import PeerId, short
from swarmnode.base.ports import Packet
from swarmnode.base.remembered import Remembered
from swarmnode.net.membership.liveness import SMALL_CALL_S


class ExchangeState(Enum):
    """The states of an exchange."""

    CALLING = auto()  # initiator: our packet is on its way, the partner's has not arrived
    COMMITTING = auto()  # initiator: the partner's packet is here, our commit is not acknowledged
    EXPECTING = auto()  # responder: the partner has not called
    ANSWERED = auto()  # responder: the partner called and is sent our packet; its own is not here whole
    RECEIVED = auto()  # responder: the partner's packet is here, but it has not committed
    AVERAGED = auto()  # ended: the partner's packet goes into the outer step
    FAILED = auto()  # ended: the partner's packet is not used

    @property
    def ended(self) -> bool:
        return self in (ExchangeState.AVERAGED, ExchangeState.FAILED)


class ExchangeInput(Enum):
    """An event of an exchange, reported by the network or a timer."""

    CALLED = auto()  # the partner called: its packet is on its way
    PACKET = auto()  # the partner's packet is here: of its call at the responder, as the answer at the initiator
    CALL_FAILED = auto()  # our call was refused, or the partner could not be reached
    COMMIT = auto()  # the partner uses our packet
    ACKNOWLEDGED = auto()  # the partner has our commit
    COMMIT_FAILED = auto()  # no acknowledgement came: the partner may or may not have our commit
    DEADLINE = auto()  # the exchange reached its time limit
    SILENCE = auto()  # the partner did not call for as long as a round takes
    PARTNER_DEAD = auto()  # the partner answers no ping
    SUPERSEDED = auto()  # the partner calls for a later round
    STOPPED = auto()  # this replica ends its rounds


class ExchangeAction(Enum):
    """An action of the driver for an exchange, or for a call of the partner."""

    SEND_PACKET = auto()  # call the partner; then report PACKET, CALL_FAILED or DEADLINE
    AWAIT_PARTNER = auto()  # until END: report DEADLINE, SILENCE and PARTNER_DEAD
    SEND_COMMIT = auto()  # then report ACKNOWLEDGED or COMMIT_FAILED
    ANSWER = auto()  # answer the partner's call with our packet
    ACKNOWLEDGE = auto()  # answer the partner's commit
    REFUSE = auto()  # answer the partner's call or commit with a reason
    COUNT_ONESIDED = auto()  # the partner may not average
    REPORT_LOST = auto()  # the partner could not be reached
    END = auto()  # stop waiting for this exchange


_S = ExchangeState
_I = ExchangeInput
_A = ExchangeAction

TRANSITIONS: dict[tuple[ExchangeState, ExchangeInput], tuple[ExchangeState, tuple[ExchangeAction, ...]]] = {
    # initiator
    (_S.CALLING, _I.PACKET): (_S.COMMITTING, (_A.SEND_COMMIT,)),
    (_S.CALLING, _I.CALL_FAILED): (_S.FAILED, (_A.END,)),
    (_S.CALLING, _I.DEADLINE): (_S.FAILED, (_A.END,)),
    (_S.CALLING, _I.STOPPED): (_S.FAILED, (_A.END,)),
    # From here on the responder may average, so the initiator does too, even if its commit is lost.
    (_S.COMMITTING, _I.ACKNOWLEDGED): (_S.AVERAGED, (_A.END,)),
    (_S.COMMITTING, _I.COMMIT_FAILED): (_S.AVERAGED, (_A.COUNT_ONESIDED, _A.END)),
    (_S.COMMITTING, _I.DEADLINE): (_S.AVERAGED, (_A.COUNT_ONESIDED, _A.END)),
    (_S.COMMITTING, _I.STOPPED): (_S.FAILED, (_A.END,)),
    # responder
    (_S.EXPECTING, _I.CALLED): (_S.ANSWERED, (_A.ANSWER,)),
    (_S.EXPECTING, _I.DEADLINE): (_S.FAILED, (_A.END,)),
    (_S.EXPECTING, _I.SILENCE): (_S.FAILED, (_A.END,)),
    (_S.EXPECTING, _I.PARTNER_DEAD): (_S.FAILED, (_A.END,)),
    (_S.EXPECTING, _I.SUPERSEDED): (_S.FAILED, (_A.END,)),
    (_S.EXPECTING, _I.STOPPED): (_S.FAILED, (_A.END,)),
    (_S.ANSWERED, _I.PACKET): (_S.RECEIVED, ()),
    (_S.ANSWERED, _I.DEADLINE): (_S.FAILED, (_A.END,)),
    (_S.ANSWERED, _I.PARTNER_DEAD): (_S.FAILED, (_A.END,)),
    (_S.ANSWERED, _I.SUPERSEDED): (_S.FAILED, (_A.END,)),
    (_S.ANSWERED, _I.STOPPED): (_S.FAILED, (_A.END,)),
    (_S.RECEIVED, _I.COMMIT): (_S.AVERAGED, (_A.ACKNOWLEDGE, _A.END)),
    (_S.RECEIVED, _I.DEADLINE): (_S.FAILED, (_A.END,)),
    (_S.RECEIVED, _I.PARTNER_DEAD): (_S.FAILED, (_A.END,)),
    (_S.RECEIVED, _I.SUPERSEDED): (_S.FAILED, (_A.END,)),
    (_S.RECEIVED, _I.STOPPED): (_S.FAILED, (_A.END,)),
    # Any other pair changes nothing: a call or a commit is refused, a late report is ignored.
}


@dataclass(slots=True)
class Exchange:
    """One replica's side of its exchange with one partner in one round."""

    round_index: int
    partner: PeerId
    state: ExchangeState
    patience_s: float  # time limit for the partner's packet to become usable
    silence_s: float  # how long a responder waits for a call
    deadline: float  # in the driver's time; infinite once the exchange has ended
    packet: Packet | None = None  # the partner's
    reason: str = ""  # why it failed


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """Something that happened to the exchange with `peer` in a round.

    `call` is the driver's number for a partner's call that needs an answer. `reason` says why something failed.
    `lost`: the partner could not be reached."""

    kind: ExchangeInput
    peer: PeerId
    round_index: int
    call: int | None = None
    packet: Packet | None = None
    reason: str = ""
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RoundBegun:
    """Our packet of a round is ready for `partners`. An exchange may take `patience_s`, and a partner may take
    `silence_s` to call."""

    round_index: int
    partners: Sequence[PeerId]
    patience_s: float
    silence_s: float


@dataclass(frozen=True, slots=True)
class RoundStopped:
    """The driver stops waiting for the exchanges of the current round: all have ended, or the replica stops."""


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """The outer step of a round is done, or the replica was given the state after that round, which may be older
    than its own."""

    round_index: int


@dataclass(frozen=True, slots=True)
class CallerGone:
    """The caller no longer waits for the answer to this call."""

    call: int


MachineEvent = ExchangeEvent | RoundBegun | RoundStopped | RoundFinished | CallerGone


@dataclass(frozen=True, slots=True)
class ExchangeEffect:
    """One action for the driver, for the exchange with `peer` or, if `call` is given, for that call."""

    action: ExchangeAction
    peer: PeerId
    round_index: int
    call: int | None = None
    reason: str = ""


class ExchangeMachine:
    """All exchanges of one replica, those of one round at a time, and the calls that arrived before their round
    began here."""

    def __init__(self, me: PeerId, done: int, *, off_stride: Callable[[int], str], newest: Callable[[], int]) -> None:
        """`done`: the last round finished. `off_stride` returns why this replica skips a round, "" if it does not.
        `newest` returns the last round for which a call may wait here."""
        self._me = me
        self._off_stride = off_stride
        self._newest = newest
        self.done = done
        self.exchanges: dict[PeerId, Exchange] = {}  # of the round under way
        self.waiting: list[ExchangeEvent] = []  # calls for rounds that have not begun here
        # The round that each peer was in last, as its calls and refusals show.
        self.round_of = Remembered[PeerId, int]()

    def handle(self, event: MachineEvent, now: float) -> list[ExchangeEffect]:
        """Return the driver's actions for `event`, in order. `now` is in the driver's time."""
        match event:
            case ExchangeEvent():
                effects = [*self._happened(event, now)]
            case RoundBegun():
                effects = [*self._begin(event, now), *self._reconsider(now)]
            case RoundStopped():
                effects = [*self._stop(now)]
            case RoundFinished():
                assert not self.exchanges, "a round is finished while its exchanges are under way"
                self.done = event.round_index
                effects = [*self._reconsider(now)]
            case CallerGone():
                for gone in [call for call in self.waiting if call.call == event.call]:
                    self.waiting.remove(gone)
                    self.is_past(gone.peer, gone.round_index)  # it calls once a round
                effects = []
        self.check()
        return effects

    def _begin(self, event: RoundBegun, now: float) -> Iterator[ExchangeEffect]:
        assert not self.exchanges, "a replica is in the exchanges of one round at a time"
        assert event.round_index > self.done, f"round {event.round_index} after round {self.done}"
        for partner in event.partners:
            calls = partner > self._me
            state = ExchangeState.CALLING if calls else ExchangeState.EXPECTING
            timing = event.patience_s, event.silence_s, now + event.patience_s
            self.exchanges[partner] = Exchange(event.round_index, partner, state, *timing)
            action = ExchangeAction.SEND_PACKET if calls else ExchangeAction.AWAIT_PARTNER
            yield ExchangeEffect(action, partner, event.round_index)
            yield from self._supersede(self.exchanges[partner], now)

    def _stop(self, now: float) -> Iterator[ExchangeEffect]:
        for exchange in self.exchanges.values():
            stopped = ExchangeEvent(ExchangeInput.STOPPED, exchange.partner, exchange.round_index)
            yield from self._step(exchange, stopped, now)
        self.exchanges = {}

    def _reconsider(self, now: float) -> Iterator[ExchangeEffect]:
        """Handle the waiting calls again, in the order they arrived."""
        waiting = self.waiting
        self.waiting = []
        for call in waiting:
            yield from self._called(call, now)

    def _happened(self, event: ExchangeEvent, now: float) -> Iterator[ExchangeEffect]:
        exchange = self.exchanges.get(event.peer)
        if event.kind is ExchangeInput.CALLED:
            yield from self._called(event, now)
        elif exchange is not None and exchange.round_index == event.round_index:
            yield from self._step(exchange, event, now)
        elif event.call is not None:
            yield _refusal(event, NOT_OPEN.format(event.round_index))

    def _called(self, event: ExchangeEvent, now: float) -> Iterator[ExchangeEffect]:
        """Handle a partner's call, whose packet is on its way: answer it, refuse it, or let it wait for our boundary of
        that round."""
        peer = event.peer
        called = event.round_index
        self.round_of[peer] = called
        responding = [exchange for partner, exchange in self.exchanges.items() if partner < self._me]
        exchange = self.exchanges.get(peer) if peer < self._me else None
        if exchange is not None and exchange.round_index == called:
            yield from self._step(exchange, event, now)
        elif responding and responding[0].round_index == called:
            yield _refusal(event, f"paired with {short(responding[0].partner)} in round {called}: another view")
        elif called <= self.done:
            yield _refusal(event, f"round {called} is over here")
        elif reason := self._off_stride(called):
            yield _refusal(event, reason)
        else:
            if exchange is not None:
                yield from self._supersede(exchange, now)
            if called > (newest := self._newest()):
                yield _refusal(event, f"round {called} is beyond {newest}, the next one here")
            else:
                for older in [call for call in self.waiting if call.peer == peer]:
                    self.waiting.remove(older)
                    yield _refusal(older, f"you called for round {called} since")
                self.waiting.append(event)

    def is_past(self, peer: PeerId, round_index: int) -> None:
        """`peer` is through with a round."""
        self.round_of[peer] = max(round_index + 1, self.round_of.get(peer, 0))

    def _supersede(self, exchange: Exchange, now: float) -> Iterator[ExchangeEffect]:
        """Wait no more for a partner whose last call was for a later round."""
        if self.round_of.get(exchange.partner, 0) > exchange.round_index:
            superseded = ExchangeEvent(ExchangeInput.SUPERSEDED, exchange.partner, exchange.round_index)
            yield from self._step(exchange, superseded, now)

    def _step(self, exchange: Exchange, event: ExchangeEvent, now: float) -> Iterator[ExchangeEffect]:
        """Apply TRANSITIONS to one exchange."""
        peer = exchange.partner
        round_index = exchange.round_index
        transition = TRANSITIONS.get((exchange.state, event.kind))
        if transition is None:
            if event.call is not None:
                called = event.kind is ExchangeInput.CALLED
                yield _refusal(event, TAKEN if called else NOT_OPEN.format(round_index))
            return
        exchange.state, actions = transition
        if event.kind is ExchangeInput.PACKET:
            assert exchange.packet is None and event.packet is not None, "an exchange takes one packet"
            exchange.packet = event.packet
        if exchange.state is ExchangeState.COMMITTING:
            exchange.deadline = now + SMALL_CALL_S
        if exchange.state.ended:
            exchange.deadline = math.inf
        if exchange.state is ExchangeState.FAILED:
            exchange.packet = None
            exchange.reason = _reason(exchange, event)
            if event.kind is ExchangeInput.CALL_FAILED and not event.lost:  # it refused
                self.is_past(peer, round_index)
            if event.lost:
                yield ExchangeEffect(ExchangeAction.REPORT_LOST, peer, round_index)
        for action in actions:
            reason = event.reason if action is ExchangeAction.COUNT_ONESIDED else exchange.reason
            yield ExchangeEffect(action, peer, round_index, event.call, reason)

    def check(self) -> None:
        """Assert the invariants that hold after every event."""
        for partner, exchange in self.exchanges.items():
            assert exchange.partner == partner != self._me and exchange.round_index > self.done, exchange
            assert exchange.state.ended == math.isinf(exchange.deadline), f"no deadline: {exchange}"
            assert (exchange.packet is not None) == (exchange.state in WITH_PACKET), exchange
            assert (partner > self._me) or exchange.state not in INITIATOR, exchange
        for call in self.waiting:
            assert call.round_index > self.done, f"nothing will answer {call}"


INITIATOR = frozenset({ExchangeState.CALLING, ExchangeState.COMMITTING})
WITH_PACKET = frozenset({ExchangeState.COMMITTING, ExchangeState.RECEIVED, ExchangeState.AVERAGED})
TAKEN = "already in this exchange, or it is over"
NOT_OPEN = "no exchange of round {} with you is open here"


def _refusal(event: ExchangeEvent, reason: str) -> ExchangeEffect:
    return ExchangeEffect(ExchangeAction.REFUSE, event.peer, event.round_index, event.call, reason)


def _reason(exchange: Exchange, event: ExchangeEvent) -> str:
    """Return why the exchange failed, for the event that reports the round."""
    partner = f"partner {short(exchange.partner)}"
    match event.kind:
        case ExchangeInput.DEADLINE:
            return f"{partner} did not come within {exchange.patience_s:g} s"
        case ExchangeInput.SILENCE:
            return f"{partner}: it did not call within {exchange.silence_s:.3g} s, as long as a round takes"
        case ExchangeInput.SUPERSEDED:
            return f"{partner}: it gave the exchange up, or went on to a later round"
        case _:
            return f"{partner}: {event.reason}"
