"""Exchange machines against each other over a network that loses, delays, doubles and reorders messages, while replicas
die at any step. The laws of exchange_machine.py are checked after every event."""

import copy
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Packet
from swarmnode.train.gossip.exchange_machine import (
    INITIATOR,
    TRANSITIONS,
    CallerGone,
    Exchange,
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

PEERS = [PeerId(name) for name in "abc"]
PATIENCE_S = 10.0
SILENCE_S = 7.0
FIRST = ExchangeState.CALLING, ExchangeState.EXPECTING
REPORTS: dict[ExchangeAction | None, set[ExchangeInput]] = {
    ExchangeAction.SEND_PACKET: {ExchangeInput.PACKET, ExchangeInput.CALL_FAILED, ExchangeInput.DEADLINE},
    ExchangeAction.SEND_COMMIT: {ExchangeInput.ACKNOWLEDGED, ExchangeInput.COMMIT_FAILED, ExchangeInput.DEADLINE},
    ExchangeAction.AWAIT_PARTNER: {ExchangeInput.DEADLINE, ExchangeInput.PARTNER_DEAD},
}
"""What the driver reports, once, of what it does (exchange_driver.py)."""
MAY_AVERAGE = ExchangeState.COMMITTING, ExchangeState.AVERAGED


def after(state: ExchangeState, *inputs: ExchangeInput) -> ExchangeState:
    for one in inputs:
        state = TRANSITIONS.get((state, one), (state, ()))[0]
    return state


@pytest.mark.parametrize("state", ExchangeState)
def test_every_state_can_be_reached_and_only_the_ends_have_no_way_on(state: ExchangeState) -> None:
    reached = {*FIRST}
    for _ in ExchangeState:
        reached |= {target for (source, _), (target, _) in TRANSITIONS.items() if source in reached}
    assert state in reached
    onward = {kind: target for (source, kind), (target, _) in TRANSITIONS.items() if source is state}
    assert bool(onward) != state.ended
    for kind in (ExchangeInput.DEADLINE, ExchangeInput.STOPPED):
        assert state.ended or onward[kind].ended, "time alone ends an exchange, and so does the replica"


def test_a_partner_that_went_on_is_not_waited_for() -> None:
    called = after(ExchangeState.EXPECTING, ExchangeInput.CALLED)
    assert after(called, ExchangeInput.SUPERSEDED) is ExchangeState.FAILED
    assert after(called, ExchangeInput.PACKET, ExchangeInput.SUPERSEDED) is ExchangeState.FAILED
    assert after(called, ExchangeInput.COMMIT) is called, "what is not here whole is not used"
    assert after(ExchangeState.EXPECTING, ExchangeInput.SUPERSEDED) is ExchangeState.FAILED
    assert after(ExchangeState.AVERAGED, ExchangeInput.SUPERSEDED) is ExchangeState.AVERAGED


@pytest.mark.parametrize(
    ("caller", "round_index", "reason"),
    [("b", 4, "paired with a in round 4"), ("a", 2, "over here"), ("a", 5, "odd"), ("a", 8, "beyond 6"), ("b", 6, "")],
)
def test_a_call_that_cannot_be_met_is_refused_at_once(caller: str, round_index: int, reason: str) -> None:
    machine = ExchangeMachine(PEERS[2], 2, off_stride=lambda number: "odd" * (number % 2), newest=lambda: 6)
    machine.handle(RoundBegun(4, PEERS[:1], PATIENCE_S, SILENCE_S), 0.0)
    called = ExchangeEvent(ExchangeInput.CALLED, PeerId(caller), round_index, 1)
    said = [one for one in machine.handle(called, 1.0) if one.call == 1]
    assert [one.action for one in said] == [ExchangeAction.REFUSE] * bool(reason)
    assert not said or reason in said[0].reason
    assert len(machine.waiting) == (not said)


def test_a_partner_that_called_for_a_later_round_is_not_waited_for() -> None:
    """Its call was refused as one for a round too far off; a joiner waited two steps for it, and all for the joiner."""
    machine = ExchangeMachine(PEERS[2], 2, off_stride=lambda number: "", newest=lambda: 3)
    called = ExchangeEvent(ExchangeInput.CALLED, PEERS[0], 4, 1)
    (refused,) = machine.handle(called, 0.0)
    assert refused.action is ExchangeAction.REFUSE and "beyond 3" in refused.reason
    said = machine.handle(RoundBegun(3, PEERS[:2], PATIENCE_S, SILENCE_S), 1.0)
    assert [one.peer for one in said if one.action is ExchangeAction.END] == [PEERS[0]]
    assert machine.exchanges[PEERS[1]].state is ExchangeState.EXPECTING


def test_a_caller_that_gave_a_round_up_is_not_waited_for_in_it() -> None:
    """It went on while we trained. Who waited for it was late in the next round, too."""
    machine = ExchangeMachine(PEERS[2], 2, off_stride=lambda number: "", newest=lambda: 3)
    machine.handle(ExchangeEvent(ExchangeInput.CALLED, PEERS[0], 3, 1), 0.0)
    machine.handle(CallerGone(1), 0.5)
    said = machine.handle(RoundBegun(3, PEERS[:2], PATIENCE_S, SILENCE_S), 1.0)
    assert [one.peer for one in said if one.action is ExchangeAction.END] == [PEERS[0]]


@dataclass
class Message:
    """A call (`reply_to` None) or the answer to one."""

    source: int
    target: int
    round_index: int
    action: ExchangeAction
    packet: Packet | None = None
    reply_to: "Message | None" = None
    life: int = 0  # of the replica that sends the call


@dataclass
class Record:
    """What is known of one side of an exchange, also after its replica's death."""

    exchange: Exchange
    packet: Packet  # its own
    last: ExchangeState  # before its replica stopped or died
    under_way: ExchangeAction | None = None  # what the driver does for it
    onesided: bool = False


@dataclass
class Replica:
    machine: ExchangeMachine
    life: int = 0
    alive: bool = True
    packet: Packet | None = None  # of the round under way
    records: list[Record] = field(default_factory=list)


class Exchanges(RuleBasedStateMachine):
    """Replicas in rounds, the network between them, and what becomes of every packet."""

    count = 3

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.newest = 1
        self.network: list[Message] = []
        self.sent: list[Message] = []  # all that ever was on it
        self.calls: dict[int, Message] = {}  # delivered, and not answered yet
        self.coming: list[Message] = []  # answers that travel while the packet of their call comes
        self.serial = 0
        self.replicas: list[Replica] = []

    @initialize(strides=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=3, max_size=3))
    def births(self, strides: list[int]) -> None:
        self.strides = strides
        self.replicas = [Replica(self.machine(index, 0)) for index in range(self.count)]

    def machine(self, index: int, done: int) -> ExchangeMachine:
        stride = self.strides[index]
        return ExchangeMachine(
            PEERS[index],
            done,
            off_stride=lambda number: "" if number % stride == 0 else "not here",
            newest=lambda: self.newest + 1,
        )

    def handle(self, index: int, event: MachineEvent) -> None:
        replica = self.replicas[index]
        records = self.current(index)
        states = [record.exchange.state for record in records]
        for record in records:
            reports = isinstance(event, ExchangeEvent) and event.kind in REPORTS.get(record.under_way, ())
            if reports and (event.peer, event.round_index) == (record.exchange.partner, record.exchange.round_index):
                record.under_way = None
        for effect in replica.machine.handle(event, self.now):
            self.carry_out(index, effect, records)
        for record, before in zip(records, states, strict=True):
            state = record.exchange.state
            assert not before.ended or state is before, "the end of an exchange is final"
            assert state.ended == (record.under_way is None), "the driver waits for something, until the end"
            if isinstance(event, RoundStopped):
                assert state.ended
            else:
                record.last = state

    def current(self, index: int) -> list[Record]:
        exchanges = self.replicas[index].machine.exchanges.values()
        return [record for record in self.replicas[index].records if any(record.exchange is one for one in exchanges)]

    def carry_out(self, index: int, effect: ExchangeEffect, records: list[Record]) -> None:
        record = next((one for one in records if one.exchange.partner == effect.peer), None)
        replica = self.replicas[index]
        other = PEERS.index(effect.peer)
        message = Message(index, other, effect.round_index, effect.action, replica.packet, life=replica.life)
        match effect.action:
            case ExchangeAction.SEND_PACKET | ExchangeAction.SEND_COMMIT:
                assert record is not None and record.under_way is None
                record.under_way = effect.action
                self.send(message)
            case ExchangeAction.AWAIT_PARTNER:
                assert record is not None and record.under_way is None
                record.under_way = effect.action
            case ExchangeAction.END:
                assert record is not None
                record.under_way = None
            case ExchangeAction.ANSWER | ExchangeAction.ACKNOWLEDGE | ExchangeAction.REFUSE:
                assert effect.call is not None
                message.reply_to = self.calls.pop(effect.call)  # a call is answered once
                assert effect.action is not ExchangeAction.REFUSE or effect.reason, "a refusal says why"
                if effect.action is ExchangeAction.ANSWER:
                    self.coming.append(message)
                else:
                    self.send(message)
            case ExchangeAction.COUNT_ONESIDED:
                assert record is not None and not record.onesided, "counted once"
                record.onesided = True

    def send(self, message: Message) -> None:
        self.network.append(message)
        self.sent.append(message)

    # ---- what replicas do

    def pick(self, data: st.DataObject, choices: list[int]) -> int:
        return data.draw(st.sampled_from(choices))

    def idle(self) -> list[int]:
        return [i for i, one in enumerate(self.replicas) if one.alive and not one.machine.exchanges]

    def alive(self) -> list[int]:
        return [i for i, one in enumerate(self.replicas) if one.alive]

    def open(self) -> list[tuple[int, Exchange]]:
        return [
            (i, one) for i in self.alive() for one in self.replicas[i].machine.exchanges.values() if not one.state.ended
        ]

    @precondition(lambda self: self.idle())
    @rule()
    def all_begin(self) -> None:
        """Samples come, and all replicas that are between rounds begin the next one, with the same view."""
        self.newest += 1
        for index in self.idle():
            self.begin(index, [PEERS[i] for i in self.alive() if i != index], PATIENCE_S)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), patience_s=st.sampled_from([PATIENCE_S, 3.0]))
    def one_begins(self, data: st.DataObject, patience_s: float) -> None:
        """A replica is early or late, or sees others than they see themselves."""
        index = self.pick(data, self.idle())
        others = data.draw(st.lists(st.sampled_from([one for one in PEERS[: self.count] if one != PEERS[index]])))
        self.begin(index, list(dict.fromkeys(others)), patience_s)

    def begin(self, index: int, others: list[PeerId], patience_s: float) -> None:
        replica = self.replicas[index]
        stride = self.strides[index]
        due = self.newest // stride * stride
        if due <= replica.machine.done:
            return
        self.serial += 1
        replica.packet = Packet(1.0, self.serial, [], sender=PEERS[index])
        # The machine may at once answer calls that waited, so the records are made before its effects are carried out.
        effects = replica.machine.handle(RoundBegun(due, others, patience_s, SILENCE_S), self.now)
        for exchange in replica.machine.exchanges.values():
            replica.records.append(Record(exchange, replica.packet, exchange.state))
        for effect in effects:
            self.carry_out(index, effect, self.current(index))

    @precondition(lambda self: self.finishable())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """All exchanges of a round have ended: the outer step."""
        index = self.pick(data, self.finishable())
        due = next(iter(self.replicas[index].machine.exchanges.values())).round_index
        self.handle(index, RoundStopped())
        self.handle(index, RoundFinished(due))

    def finishable(self) -> list[int]:
        machines = [(i, self.replicas[i].machine.exchanges.values()) for i in self.alive()]
        return [i for i, exchanges in machines if exchanges and all(one.state.ended for one in exchanges)]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), rare=st.sampled_from([False, False, True]))
    def restore(self, data: st.DataObject, rare: bool) -> None:
        """After a pause, or after a lone step: a state of a later round."""
        if not rare:
            return
        index = self.pick(data, self.idle())
        self.handle(index, RoundFinished(max(self.replicas[index].machine.done, self.newest)))

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(data=st.data(), stops=st.booleans(), rare=st.sampled_from([False, False, True]))
    def die(self, data: st.DataObject, stops: bool, rare: bool) -> None:
        if not rare:
            return
        index = self.pick(data, self.alive())
        if stops:
            self.handle(index, RoundStopped())
        self.replicas[index].alive = False
        self.calls = {number: call for number, call in self.calls.items() if call.target != index}

    @precondition(lambda self: len(self.alive()) < self.count)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """Under the same name, with a state of somebody else."""
        index = self.pick(data, [i for i in range(self.count) if i not in self.alive()])
        replica = self.replicas[index]
        replica.machine = self.machine(index, self.newest)
        replica.life += 1
        replica.alive = True

    # ---- what the network and time do

    @precondition(lambda self: self.network)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        """Messages arrive in the order they were sent, and so does what comes of them."""
        for _ in range(min(count, len(self.network))):
            self.arrives(self.network.pop(0))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def deliver_any(self, data: st.DataObject) -> None:
        """A message overtakes others."""
        self.arrives(self.network.pop(self.pick(data, [*range(len(self.network))])))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        """A message of any time is doubled: it may be of another round."""
        self.arrives(data.draw(st.sampled_from(self.sent[-24:])))

    def arrives(self, message: Message) -> None:
        target = self.replicas[message.target]
        peer = PEERS[message.source]
        if not target.alive or (message.reply_to is not None and message.reply_to.life != target.life):
            return
        if message.reply_to is None:
            self.serial += 1
            self.calls[self.serial] = message
            called = message.action is ExchangeAction.SEND_PACKET
            kind = ExchangeInput.CALLED if called else ExchangeInput.COMMIT
            self.handle(message.target, ExchangeEvent(kind, peer, message.round_index, self.serial))
            return
        calling = message.reply_to.action is ExchangeAction.SEND_PACKET
        match message.action:
            case ExchangeAction.ANSWER:
                kind = ExchangeInput.PACKET
            case ExchangeAction.ACKNOWLEDGE:
                kind = ExchangeInput.ACKNOWLEDGED
            case _:
                kind = ExchangeInput.CALL_FAILED if calling else ExchangeInput.COMMIT_FAILED
        packet = message.packet if kind is ExchangeInput.PACKET else None
        asked = message.reply_to.round_index
        self.handle(message.target, ExchangeEvent(kind, peer, asked, packet=packet, reason="refused"))

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), breaks=st.sampled_from([False, False, False, True]))
    def comes_whole(self, data: st.DataObject, breaks: bool) -> None:
        """The packet of an answered call is here, so the answer's last byte leaves; or the caller's stream breaks."""
        answer = self.coming.pop(self.pick(data, [*range(len(self.coming))]))
        if not breaks:
            self.packet_comes(answer)

    def packet_comes(self, answer: Message) -> None:
        call = answer.reply_to
        replica = self.replicas[answer.source]
        assert call is not None
        if not replica.alive or replica.life != answer.life:
            return
        caller = PEERS[call.source]
        self.handle(answer.source, ExchangeEvent(ExchangeInput.PACKET, caller, call.round_index, packet=call.packet))
        exchange = replica.machine.exchanges.get(caller)
        if exchange is not None and exchange.packet is call.packet:  # else the caller gets no answer
            self.send(answer)

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A call or its answer is lost, and the caller learns it, or does not."""
        message = self.network.pop(self.pick(data, [*range(len(self.network))]))
        call = message.reply_to or message
        caller = self.replicas[call.source]
        if data.draw(st.booleans()) and caller.alive and caller.life == call.life:
            calling = call.action is ExchangeAction.SEND_PACKET
            kind = ExchangeInput.CALL_FAILED if calling else ExchangeInput.COMMIT_FAILED
            lost = ExchangeEvent(kind, PEERS[call.target], call.round_index, reason="lost", lost=True)
            self.handle(call.source, lost)

    @precondition(lambda self: self.open())
    @rule(data=st.data(), how=st.sampled_from(["deadline", "deadline", "silence", "dead", "unreachable"]))
    def fail(self, data: st.DataObject, how: str) -> None:
        """Time passes, or the transport reports a fault, rightly or not."""
        open_ = self.open()
        index, exchange = open_[self.pick(data, [*range(len(open_))])]
        calling = exchange.state is ExchangeState.CALLING
        kind = {
            "deadline": ExchangeInput.DEADLINE,
            "silence": ExchangeInput.SILENCE,
            "dead": ExchangeInput.PARTNER_DEAD,
            "unreachable": ExchangeInput.CALL_FAILED if calling else ExchangeInput.COMMIT_FAILED,
        }[how]
        if how == "deadline":
            self.now = max(self.now, exchange.deadline)
        lost = how in ("dead", "unreachable")
        before = exchange.state
        self.handle(index, ExchangeEvent(kind, exchange.partner, exchange.round_index, reason=how, lost=lost))
        responds = before not in INITIATOR
        told = {"silence": before is ExchangeState.EXPECTING, "dead": responds, "unreachable": not responds}
        assert exchange.state.ended or not told.get(how, True), "nobody waits for what cannot come"

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def caller_goes(self, data: st.DataObject) -> None:
        number = self.pick(data, [*self.calls])
        message = self.calls.pop(number)
        self.handle(message.target, CallerGone(number))

    # ---- laws

    @invariant()
    def both_average_or_neither_unless_the_commit_was_lost(self) -> None:
        sides = {
            (i, record.packet.samples, record.exchange.partner): record
            for i, replica in enumerate(self.replicas)
            for record in replica.records
        }
        for (i, serial, partner), record in sides.items():
            if record.exchange.state is not ExchangeState.AVERAGED:
                continue
            assert record.exchange.packet is not None and record.exchange.packet.sender == partner
            other = sides[PEERS.index(partner), record.exchange.packet.samples, PEERS[i]]
            assert other.exchange.round_index == record.exchange.round_index, "packets of one round"
            if partner > PEERS[i]:  # this is the initiator
                got = other.exchange.packet
                both = other.exchange.state is ExchangeState.AVERAGED and got is not None and got.samples == serial
                assert both or record.onesided, "a one-sided exchange is counted"
            else:
                assert other.last in MAY_AVERAGE, "nobody averages before the initiator is bound to"

    @invariant()
    def a_packet_counts_once(self) -> None:
        for replica in self.replicas:
            averaged = [r for r in replica.records if r.exchange.state is ExchangeState.AVERAGED]
            taken = [r.exchange.packet.samples for r in averaged if r.exchange.packet is not None]
            assert len(taken) == len({*taken}) == len(averaged)

    @invariant()
    def something_can_always_happen(self) -> None:
        """Time alone ends every exchange, and the end of a round answers every call that waits."""
        for index in self.alive():
            machine = copy.copy(self.replicas[index].machine)
            machine.exchanges = copy.deepcopy(machine.exchanges)
            machine.waiting = list(machine.waiting)
            here = {number for number, call in self.calls.items() if call.target == index}
            assert here == {call.call for call in machine.waiting}, "a call is answered, or waits"
            for exchange in [*machine.exchanges.values()]:
                if not exchange.state.ended:
                    assert math.isfinite(exchange.deadline)
                    late = ExchangeEvent(ExchangeInput.DEADLINE, exchange.partner, exchange.round_index)
                    assert machine.handle(late, exchange.deadline)[-1].action is ExchangeAction.END
            assert all(exchange.state.ended for exchange in machine.exchanges.values())
            assert not machine.handle(RoundStopped(), self.now)
            effects = machine.handle(RoundFinished(self.newest + 1), self.now)
            assert {effect.call for effect in effects} == here and not machine.waiting


class Pair(Exchanges):
    count = 2


def test_without_faults_all_average_with_all() -> None:
    """Also where calls come before the boundary that they wait for."""
    for world_of in (Pair, Exchanges):
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            world = world_of()
            world.births([1, 1, 1])
            world.newest = 2
            for index in [one for one in order if one < world.count]:
                world.begin(index, [PEERS[i] for i in range(world.count) if i != index], PATIENCE_S)
                while world.network or world.coming:
                    while world.network:
                        world.deliver(1)
                    if world.coming:
                        world.packet_comes(world.coming.pop(0))
            records = [record for replica in world.replicas for record in replica.records]
            assert len(records) == world.count * (world.count - 1)
            assert all(one.exchange.state is ExchangeState.AVERAGED and not one.onesided for one in records)
            for index in range(world.count):
                world.handle(index, RoundStopped())
                world.handle(index, RoundFinished(2))
            assert not world.calls and all(not replica.machine.waiting for replica in world.replicas)


TestThree = Exchanges.TestCase
TestTwo = Pair.TestCase
TestThree.settings = TestTwo.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
