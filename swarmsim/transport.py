"""ports.Transport on the simulated network. A call is a small state machine that holds only a future and the handler's
task, so that a thousand nodes fit."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from swarmnode.base import header as frame
from swarmnode.base.errors import Broken, LocalFault, PeerTimeout, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import BOTH_WAYS, Admit, Answer, Call, Handler, Telemetry, WireTensor
from swarmnode.base.uplink_scheduler import BULK_BYTES
from swarmnode.base.wire import call_pb2 as wire
from swarmsim.network import FINE, Network, NetworkPort, SimMessage

PREAMBLE_BYTES = 12  # as net/transport/frame.py's
PROMPT = frozenset({"ping", "reserve"})
"""Methods whose handlers never wait. They make up most calls and are answered without a task (8 % fewer events)."""
Forge = Callable[[str, wire.Request | wire.Reply, Sequence[WireTensor]], Sequence[WireTensor]]
"""A liar's change of the tensors it sends: (method, header, tensors) -> tensors."""
Reply = tuple[Answer, Callable[[], None] | None]
"""The answer, and a callback for when it has left our uplink."""


class SimCall:
    """A call between two nodes, from its first byte to its end."""

    __slots__ = (
        "answered",
        "arriving",
        "broken",
        "callee",
        "caller",
        "method",
        "nbytes",
        "parcel",
        "raw",
        "received_s",
        "reply",
        "task",
        "tensors",
        "timer",
    )

    def __init__(
        self,
        caller: SimTransport,
        callee: NetworkPort,
        method: str,
        raw: bytes,
        tensors: Sequence[WireTensor],
        nbytes: int,
        reply: asyncio.Future[tuple[bytes, Sequence[WireTensor]]] | None,
    ) -> None:
        self.caller = caller
        self.callee = callee
        self.method = method
        self.raw = raw
        self.tensors = tensors
        self.nbytes = nbytes
        self.reply = reply  # None: a request that arrived twice; its answer is dropped
        self.arriving: asyncio.Future[Sequence[WireTensor]] | None = None  # of BOTH_WAYS: the request's tensors
        self.parcel: SimMessage | None = None
        self.answered: SimMessage | None = None  # the answer in transit
        self.task: asyncio.Task[None] | None = None  # the handler's
        self.timer: asyncio.TimerHandle | None = None
        self.received_s = 0.0
        self.broken = ""  # "request" or "reply": this leg will break

    def twin(self) -> SimCall:
        """The same request, arriving a second time."""
        return SimCall(self.caller, self.callee, self.method, self.raw, self.tensors, self.nbytes, None)


class SimTransport:
    """A node's transport. `close` is the end of its process."""

    def __init__(self, network: Network, plug: NetworkPort, run_id: RunId, telemetry: Telemetry | None = None) -> None:
        self._network = network
        self._loop = network.loop
        self.plug = plug
        self._run_id = run_id
        self._telemetry = telemetry
        self._served: dict[str, tuple[Handler, int, Admit | None]] = {}
        self._serving: dict[SimCall, None] = {}
        self._traffic: Counter[tuple[str, str]] = Counter()
        self.forge: Forge | None = None
        self.deaf: set[str] = set()  # methods accepted and never answered
        self.acted: Callable[[str], None] = lambda what: None  # called if a call is made after the end
        network.transports[plug] = self

    @property
    def peer_id(self) -> PeerId:
        return self.plug.peer

    @property
    def serving(self) -> int:
        """Incoming calls in flight."""
        return len(self._serving)

    async def addresses(self) -> list[str]:
        return [f"/dns/{self.plug.label}/tcp/1"]

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        assert method in wire.Request.DESCRIPTOR.fields_by_name, f"{method!r} is not a method of wire.Request"
        assert method not in self._served, f"{method!r} is served already"
        self._served[method] = (handler, tensor_bytes_max, admit)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        plug = self._network.plugs.get(peer)
        if plug is None or not plug.alive:
            raise Unavailable(f"{short(peer)} cannot be reached")

    @property
    def line_queue(self) -> int:
        return self.plug.scheduler.waiting

    @property
    def line_bytes_per_s(self) -> float:
        return self.plug.scheduler.line_bytes_per_s

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        return dict(self._traffic)

    def close(self, *, silent: bool = False) -> None:
        """End the process. Its callers' streams are reset, unless `silent` (power cut): then they hear nothing."""
        self.plug.alive = False
        self.plug.silent = silent
        for conversation in list(self._serving):
            if conversation.task is not None:
                conversation.task.cancel()
            if not silent:
                self._reset(conversation, "died or disconnected")
        self._serving.clear()

    # ---- calling

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        """See ports.Transport."""
        method = call.header.WhichOneof("body")
        assert method is not None, "a call needs a body"
        if not self.plug.alive:
            self.acted(f"called {method} of {short(peer)}")
            raise LocalFault(f"{self.plug.label} is dead and calls {method}")
        tensors = call.tensors if self.forge is None else self.forge(method, call.header, call.tensors)
        # A message that stands for many gets the time of all of them (simulated: a model of 8 B, whose chunks are 1
        # GB).
        timeout_s *= max(1.0, self._stands_for(method) / FINE)
        waited_s = 0.0
        sent = None
        if (nbytes := self._turn_nbytes(method, tensors)) > BULK_BYTES:
            waited_s = await self.plug.scheduler.take(nbytes, timeout_s)
            sent = partial(self.plug.scheduler.give, nbytes)
        raw = frame.seal_request(call.header, tensors, self._run_id, timeout_s - waited_s)
        reply: asyncio.Future[Any] = self._loop.create_future()
        conversation = self._begin(peer, method, raw, tensors, reply, sent)
        timer = self._loop.call_later(timeout_s - waited_s, _expire, reply, peer, method, timeout_s)
        try:
            raw_reply, given = await reply
        except BaseException:
            if conversation is not None:
                self._give_up(conversation)
            raise
        finally:
            timer.cancel()
            if conversation is not None and conversation.parcel is not None:
                conversation.parcel.drop()  # refused while it was on its way
            # break the reference cycle of each failed call: the error's traceback holds this frame
            del reply, conversation
        answered = frame.open_reply(raw_reply)
        frame.check_tensors(answered.tensors, reply_bytes_max)
        frame.raise_for(peer, answered)
        return Answer(answered, copies(given), waited_s=waited_s)

    def _begin(
        self,
        peer: PeerId,
        method: str,
        raw: bytes,
        tensors: Sequence[WireTensor],
        reply: asyncio.Future[Any],
        sent: Callable[[], None] | None,
    ) -> SimCall | None:
        """Send the request; None if the peer is unknown. `sent` is called when it has left our uplink."""
        plug = self._network.plugs.get(peer)
        conversation = None
        if plug is None:
            _fail(reply, RemoteFault(f"{short(peer)} cannot be reached"))
        else:
            nbytes = PREAMBLE_BYTES + len(raw) + self._weigh(method, tensors)
            self._sent(method, nbytes)
            self._network.calls[method] += 1
            conversation = SimCall(self, plug, method, raw, tensors, nbytes, reply)
            if self._leaves(conversation, plug, reply):
                self._send(conversation, sent)
                return conversation
        if sent is not None:
            sent()
        return conversation

    def _leaves(self, conversation: SimCall, plug: NetworkPort, reply: asyncio.Future[Any]) -> bool:
        """Whether the request reaches the uplink, given the random faults."""
        network = self._network
        if network.reach.blocked(self.plug.label, plug.label) or (not plug.alive and plug.silent):
            return False  # lost in transit; the caller's timeout ends it
        if not plug.alive or not network.reach.can_dial(
            self.plug.label, self.plug.address.nat, plug.label, plug.address.nat
        ):
            round_trip_s = network.latency_s(self.plug, plug) + network.latency_s(plug, self.plug)
            self._loop.call_later(round_trip_s, _fail, reply, RemoteFault(f"{short(plug.peer)} cannot be reached"))
            return False
        weather = network.weather
        if network.happens("break", weather.breaks):
            conversation.broken = "request" if network.happens("break on the way there", 0.5) else "reply"
        if network.happens("silence", weather.silent):
            return False
        if network.happens("double", weather.doubles):
            self._send(conversation.twin())
        return True

    def _send(self, conversation: SimCall, sent: Callable[[], None] | None = None) -> None:
        other = self._network.transports.get(conversation.callee)
        network = self._network
        assert other is not None
        if conversation.method in BOTH_WAYS:
            conversation.arriving = self._loop.create_future()
            latency_s = network.latency_s(self.plug, conversation.callee)
            self._loop.call_later(latency_s, other._announced, conversation, context=conversation.callee.context)
        conversation.parcel = network.carry(
            self.plug, conversation.callee, conversation.nbytes, lambda: other._arrive(conversation), sent
        )

    def _sent(self, method: str, nbytes: int) -> None:
        self._traffic[method, "sent"] += nbytes
        self._network.sent[method] += nbytes

    def _weigh(self, method: str, tensors: Sequence[WireTensor]) -> int:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return math.ceil(nbytes * self._stands_for(method))

    def _turn_nbytes(self, method: str, tensors: Sequence[WireTensor]) -> int:
        """Bytes that must queue for the uplink. A message that stands for many skips the queue, as each of the many
        would only queue now and then."""
        return 0 if method in self._network.scale else sum(tensor.nbytes for tensor in tensors)

    def _stands_for(self, method: str) -> float:
        return self._network.scale.get(method, 1.0)

    def _give_up(self, conversation: SimCall) -> None:
        """The caller gives up: stop the transfer, and cancel the handler, as a reset stream does."""
        _drop(conversation)
        network = self._network
        callee = conversation.callee
        if conversation.task is None or network.reach.blocked(self.plug.label, callee.label) or self.plug.silent:
            return
        self._loop.call_later(network.latency_s(self.plug, callee), _cancel, conversation.task, context=callee.context)

    # ---- answering

    def _arrive(self, conversation: SimCall) -> None:
        """Handle a completely received request."""
        assert conversation.parcel is not None
        conversation.received_s = conversation.parcel.carried_s(self._loop.time())
        conversation.parcel = None  # break the reference cycle
        if not self._is_heard(conversation):
            return
        if conversation.broken == "request":
            self._reset(conversation, "broke the stream")
            return
        self._traffic[conversation.method, "received"] += conversation.nbytes
        if conversation.arriving is not None:
            if not conversation.arriving.done():
                conversation.arriving.set_result(copies(conversation.tensors))
            return
        if conversation.method in PROMPT and conversation.method not in self.deaf:
            self._reply(conversation, *_at_once(self._handled(conversation)))
            return
        self._serve(conversation)

    def _announced(self, conversation: SimCall) -> None:
        """Handle the header of a request whose tensors are on their way."""
        gave_up = conversation.reply is not None and conversation.reply.done()
        if not gave_up and self._is_heard(conversation):
            self._serve(conversation)

    def _is_heard(self, conversation: SimCall) -> bool:
        """Whether what arrives of a request reaches this process; tells the caller of a process that has ended."""
        network = self._network
        plug = self.plug
        if network.reach.blocked(conversation.caller.plug.label, plug.label) or (not plug.alive and plug.silent):
            return False
        if not plug.alive:
            self._reset(conversation, "died or disconnected")
        return plug.alive

    def _serve(self, conversation: SimCall) -> None:
        plug = self.plug
        self._serving[conversation] = None
        conversation.task = self._loop.create_task(self._answer(conversation), context=plug.context)

    async def _answer(self, conversation: SimCall) -> None:
        """Send back the handler's answer or refusal. Cancelled when the caller gives up."""
        try:
            answer, sent = await self._handled(conversation)
            end = None
            if answer.before_end is not None:
                end = self._loop.create_future()
            self._reply(conversation, answer, sent, end)
            if answer.before_end is not None and end is not None:
                await self._end(conversation, answer.before_end, end)
        finally:
            self._serving.pop(conversation, None)
            if conversation.timer is not None:
                conversation.timer.cancel()
            conversation.task = None

    async def _end(
        self, conversation: SimCall, before_end: Callable[[], Awaitable[None]], end: asyncio.Future[None]
    ) -> None:
        """Let the last byte of an answer go, which travels already, where `before_end` does."""
        try:
            await before_end()
        except Unavailable:
            self._reset(conversation, "gave the call up")
            return
        latency_s = self._network.latency_s(self.plug, conversation.caller.plug)
        self._loop.call_later(latency_s, _resolve, end, context=conversation.caller.plug.context)

    async def _handled(self, conversation: SimCall) -> Reply:
        """The handler's answer, or its refusal."""
        task = conversation.task
        method = conversation.method
        sent = None
        try:
            _, request = frame.open_request(conversation.raw, self._run_id)
            if task is not None:
                conversation.timer = self._loop.call_later(request.timeout_ms / 1000.0, task.cancel)
            served = self._served.get(method)
            if served is None:
                raise RemoteFault(f"method {method!r} is not served here")
            if method in self.deaf:
                await asyncio.Event().wait()
            handler, tensor_bytes_max, admit = served
            frame.check_tensors(request.tensors, tensor_bytes_max)
            if admit is not None:
                admit(conversation.caller.peer_id, request)
            tensors = () if conversation.arriving is not None else copies(conversation.tensors)
            done = await handler(
                conversation.caller.peer_id, Call(request, tensors, conversation.received_s, conversation.arriving)
            )
            if done.header.status == wire.STATUS_UNSPECIFIED:
                done.header.status = wire.STATUS_OK
            if (nbytes := self._turn_nbytes(method, done.tensors)) > BULK_BYTES:
                done.header.waited_s = await self.plug.scheduler.take(
                    nbytes, request.timeout_ms / 1000.0, urgent=done.urgent
                )
                sent = partial(self.plug.scheduler.give, nbytes)
        except (Unavailable, RemoteFault) as refusal:
            done = Answer(frame.reply_of(refusal))
        except Exception as error:  # noqa: BLE001  the border between a peer's call and the rest of this node
            if self._telemetry is not None:
                self._telemetry.event(
                    "call.failed", level="error", method=method, error=type(error).__name__, why=str(error)
                )
            done = Answer(wire.Reply(status=wire.STATUS_FAULT, reason=type(error).__name__))
        return done, sent

    def _reply(
        self,
        conversation: SimCall,
        answer: Answer,
        sent: Callable[[], None] | None,
        end: asyncio.Future[None] | None = None,
    ) -> None:
        """Send an answer, which the caller has once `end` is done, too."""
        header = answer.header
        tensors = answer.tensors
        if self.forge is not None and tensors:
            tensors = self.forge(conversation.method, header, tensors)
        raw = frame.seal_reply(header, tensors)
        nbytes = PREAMBLE_BYTES + len(raw) + self._weigh(conversation.method, tensors)
        self._sent(conversation.method, nbytes)
        caller = conversation.caller
        reply = conversation.reply
        network = self._network
        plug = self.plug
        if reply is None or not plug.alive or network.reach.blocked(plug.label, caller.plug.label):
            if sent is not None:
                sent()
            return

        def arrive() -> None:
            conversation.answered = None
            if end is None or end.done():
                take()
            else:
                end.add_done_callback(lambda _: take(), context=caller.plug.context)

        def take() -> None:
            if not reply.done() and caller.plug.alive and not network.reach.blocked(plug.label, caller.plug.label):
                caller._traffic[conversation.method, "received"] += nbytes
                reply.set_result((raw, tensors))

        if conversation.broken == "reply":
            self._reset(conversation, "broke the stream")
            if sent is not None:
                sent()
        else:
            conversation.answered = network.carry(plug, caller.plug, nbytes, arrive, sent)

    def _reset(self, conversation: SimCall, why: str) -> None:
        """Report the reset stream to the caller, one latency later."""
        if conversation.arriving is not None and conversation.task is not None:
            conversation.task.cancel()  # it may wait for what will not come
        caller = conversation.caller.plug
        network = self._network
        if conversation.reply is None or network.reach.blocked(self.plug.label, caller.label):
            return
        _drop(conversation)
        fault = Broken(f"{short(self.plug.peer)} {why} during {conversation.method}")
        self._loop.call_later(
            network.latency_s(self.plug, caller), _fail, conversation.reply, fault, context=caller.context
        )


def _drop(conversation: SimCall) -> None:
    """Stop what is in transit."""
    for parcel in (conversation.parcel, conversation.answered):
        if parcel is not None:
            parcel.drop()


def _resolve(end: asyncio.Future[None]) -> None:
    if not end.done():
        end.set_result(None)


def _at_once(handled: Coroutine[Any, Any, Reply]) -> Reply:
    """The result of a coroutine that never waits."""
    try:
        handled.send(None)
    except StopIteration as done:
        answer: Reply = done.value
        return answer
    raise AssertionError(f"a handler of {', '.join(sorted(PROMPT))} waits")


def _expire(reply: asyncio.Future[Any], peer: PeerId, method: str, timeout_s: float) -> None:
    if not reply.done():
        reply.set_exception(PeerTimeout(f"{short(peer)} did not answer {method} within {timeout_s:.1f} s"))


def _fail(reply: asyncio.Future[Any], fault: RemoteFault) -> None:
    if not reply.done():
        reply.set_exception(fault)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def copies(tensors: Sequence[WireTensor]) -> list[WireTensor]:
    """Copies in separate memory, as after a real transfer. Fake tensors (declared bytes over a repeated pattern) need
    no copy."""
    return [
        WireTensor(t.dtype, t.shape, memoryview(bytearray(t.data)), t.codec) if memoryview(t.data).contiguous else t
        for t in tensors
    ]
