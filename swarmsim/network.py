"""The internet between simulated nodes: shared bandwidth, latency, loss and cuts. Headers are serialised as on the real
wire, so that byte counts are exact. Calls are small state machines with one future and one task (the handler) each."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.app.planner.geography import RELAY_RATE, Address, Nat, rtt_s
from swarmnode.base.ids import PeerId
from swarmnode.base.uplink_scheduler import BULK_BYTES, UplinkScheduler
from swarmsim.link import LinkFlow, SimLink


@dataclass(frozen=True, slots=True)
class NetworkCut:
    """No message passes from a node of `senders` to one of `receivers`. A node in both is a bridge and never cut
    off."""

    senders: frozenset[str]
    receivers: frozenset[str]
    both_ways: bool = True

    def blocks(self, sender: str, receiver: str) -> bool:
        if self._one_way(sender, receiver):
            return True
        return self.both_ways and self._one_way(receiver, sender)

    def _one_way(self, sender: str, receiver: str) -> bool:
        a = sender in self.senders and sender not in self.receivers
        return a and receiver in self.receivers and receiver not in self.senders


class ReachabilityMap:
    """Which nodes can reach each other now."""

    def __init__(self) -> None:
        self.cuts: list[NetworkCut] = []
        self._called: dict[str, set[str]] = {}  # by nodes that cannot be dialled: the nodes they called

    def blocked(self, sender: str, receiver: str) -> bool:
        """Whether a message between the two gets lost now."""
        return any(cut.blocks(sender, receiver) for cut in self.cuts) if self.cuts else False

    def can_dial(self, sender: str, sender_nat: Nat, receiver: str, receiver_nat: Nat) -> bool:
        """Whether `sender` can open a stream to `receiver`; remembers the calls of unreachable nodes."""
        if receiver_nat is Nat.UNREACHABLE and sender not in self._called.get(receiver, ()):
            return False
        if sender_nat is Nat.UNREACHABLE:
            self._called.setdefault(sender, set()).add(receiver)
        return True

    def forget(self, label: str) -> None:
        """Drop the connections of `label`, which died."""
        self._called.pop(label, None)
        for called in self._called.values():
            called.discard(label)

    def heal(self, cut: NetworkCut) -> None:
        if cut in self.cuts:
            self.cuts.remove(cut)


FINE = 4  # guess: if one chunk of a state stands for a thousand, it is a quarter of a normal one


@dataclass(frozen=True, slots=True)
class Weather:
    """Random faults of messages. Rates are per message."""

    jitter: float = 0.1  # mean of the exponential extra latency, as a share of the latency
    breaks: float = 0.0  # the call's stream breaks while a message is in transit
    doubles: float = 0.0  # a request arrives twice
    silent: float = 0.0  # the stream hangs: nothing more arrives on it


class NetworkPort:
    """A node's network connection. A dead node's connection stays, and refuses or drops what arrives."""

    def __init__(self, label: str, peer: PeerId, address: Address, up: SimLink, down: SimLink) -> None:
        self.label = label
        self.peer = peer
        self.address = address
        self.up = up
        self.down = down
        self.scheduler = UplinkScheduler(carried=lambda: self.up.carried)
        self.alive = True
        self.silent = False  # dead without notice: callers learn it only from timeouts
        self.context = contextvars.copy_context()
        """The context in which arriving messages are handled; the world sets it to the process's own."""

    def __str__(self) -> str:
        return self.label


class SimMessage:
    """A message in transit; `drop` removes it from the links. `sent` is called when it has left the sender's
    uplink."""

    __slots__ = ("dropped", "flows", "latency_s", "left", "sent", "sent_at", "timer")

    def __init__(self, sent_at: float, latency_s: float, sent: Callable[[], None] | None) -> None:
        self.sent_at = sent_at
        self.sent = sent
        self.latency_s = latency_s
        self.flows: tuple[tuple[SimLink, LinkFlow], ...] = ()
        self.left = 0
        self.timer: asyncio.TimerHandle | None = None
        self.dropped = False

    def carried_s(self, now: float) -> float:
        """Transfer time on arrival, from its first byte to its last."""
        return max(0.0, now - self.sent_at - self.latency_s)

    def has_left(self) -> None:
        """Report that the sender's uplink is free."""
        if self.sent is not None:
            sent = self.sent
            self.sent = None
            sent()

    def drop(self) -> None:
        self.dropped = True
        self.has_left()
        for link, flow in self.flows:
            link.drop(flow)
        if self.timer is not None:
            self.timer.cancel()


class Network:
    """Carries messages between plugs."""

    def __init__(
        self,
        rng: random.Random,
        weather: Weather | None = None,
        *,
        scale: Mapping[str, float] | None = None,
    ) -> None:
        """`scale` multiplies the tensor bytes by method, for state that is kept small here but would be large."""
        self.loop = asyncio.get_running_loop()
        self.weather = weather or Weather()
        self.scale = scale or {}
        self.reach = ReachabilityMap()
        self.plugs: dict[PeerId, NetworkPort] = {}
        self.happened: Counter[str] = Counter()
        """Faults of messages so far, by kind."""
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()  # made from machine to machine, by method
        """Bytes sent by all nodes, by method."""
        self._rng = rng
        self.transports: dict[NetworkPort, Any] = {}  # of each plug; set by transport.py

    def plug(self, label: str, peer: PeerId, address: Address, up: float, down: float) -> NetworkPort:
        """A new connection with `up` and `down` in bytes per second. It replaces the peer's previous one."""
        plug = NetworkPort(label, peer, address, SimLink(self.loop, up), SimLink(self.loop, down))
        self.plugs[peer] = plug
        return plug

    def latency_s(self, sender: NetworkPort, receiver: NetworkPort) -> float:
        """A random one-way latency."""
        one_way = rtt_s(sender.address, receiver.address) / 2.0
        jitter = self.weather.jitter
        return one_way * (1.0 + jitter * self._rng.expovariate(1.0)) if jitter else one_way

    def happens(self, kind: str, rate: float) -> bool:
        if rate > 0.0 and self._rng.random() < rate:
            self.happened[kind] += 1
            return True
        return False

    def carry(
        self,
        sender: NetworkPort,
        receiver: NetworkPort,
        nbytes: int,
        arrive: Callable[[], None],
        sent: Callable[[], None] | None = None,
    ) -> SimMessage:
        """Move `nbytes`. `arrive` is called at the receiver unless the parcel is dropped; `sent` once in any case, when
        the sender's uplink is done with it. The caller checks for network cuts at both ends."""
        latency_s = self.latency_s(sender, receiver)
        parcel = SimMessage(self.loop.time(), latency_s, sent)
        up = sender.up
        down = receiver.down
        if nbytes <= BULK_BYTES:
            seconds = nbytes / up.rate + nbytes / down.rate + latency_s
            up.carried += nbytes
            down.carried += nbytes
            parcel.timer = self.loop.call_later(seconds, arrive, context=receiver.context)
            parcel.has_left()
            return parcel
        relayed = Nat.RELAYED in (sender.address.nat, receiver.address.nat)
        ready_at = self.loop.time() + (nbytes / RELAY_RATE if relayed else 0.0)

        def passed_up() -> None:
            parcel.has_left()
            passed()

        def passed() -> None:
            parcel.left -= 1
            if parcel.left == 0 and not parcel.dropped:
                rest_s = max(0.0, ready_at - self.loop.time())
                parcel.timer = self.loop.call_later(latency_s + rest_s, arrive, context=receiver.context)

        # Both links are busy with it at once: it has passed when the slower one is done.
        parcel.left = 2
        parcel.flows = ((up, up.send(nbytes, passed_up)), (down, down.send(nbytes, passed)))
        return parcel
