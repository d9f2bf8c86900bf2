"""The internet between simulated nodes: bandwidth shared by flows, latency, loss, cuts; every header is serialised as
on the real wire, so that bytes are true. Calls are small state machines; one future and one task (the handler) each.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmnode.ids import PeerId
from swarmnode.simulation.geography import RELAY_RATE, Address, Nat, Reach, rtt_s
from swarmnode.simulation.link import Flow, Link
from swarmnode.turns import BULK_BYTES, Turns

FINE = 4  # guess: where a chunk of a state stands for a thousand, it is a fourth of a usual one


@dataclass(frozen=True, slots=True)
class Weather:
    """What every message may meet. Rates are per message; all 0 on a fine day."""

    jitter: float = 0.1  # mean of the exponential extra latency, as a share of the latency
    breaks: float = 0.0  # the stream of the call breaks while a message of it is under way
    doubles: float = 0.0  # a request arrives a second time
    silent: float = 0.0  # the stream hangs: nothing more is ever heard of it


class Plug:
    """Where a node is plugged in. A dead node's plug stays, and refuses or swallows what comes."""

    def __init__(self, label: str, peer: PeerId, address: Address, up: Link, down: Link) -> None:
        self.label = label
        self.peer = peer
        self.address = address
        self.up = up
        self.down = down
        self.turns = Turns()
        self.alive = True
        self.silent = False  # dead without a word: callers learn it from timeouts alone
        self.context = contextvars.copy_context()
        """In which what arrives here is taken in; the world puts the process's own context here."""

    def __str__(self) -> str:
        return self.label


class Parcel:
    """One message under way; `drop` takes it off the links. `sent` is called when the sender's line is done with it."""

    __slots__ = ("dropped", "flows", "latency_s", "left", "sent", "sent_at", "timer")

    def __init__(self, sent_at: float, latency_s: float, sent: Callable[[], None] | None) -> None:
        self.sent_at = sent_at
        self.sent = sent
        self.latency_s = latency_s
        self.flows: tuple[tuple[Link, Flow], ...] = ()
        self.left = 0
        self.timer: asyncio.TimerHandle | None = None
        self.dropped = False

    def carried_s(self, now: float) -> float:
        """As it arrives: how long the lines had it, from its first byte to its last."""
        return max(0.0, now - self.sent_at - self.latency_s)

    def has_left(self) -> None:
        """The sender's line is free."""
        if self.sent is not None:
            sent, self.sent = self.sent, None
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
        """`scale` multiplies the bytes of tensors by method: state that is kept small here but would be large."""
        self.loop = asyncio.get_running_loop()
        self.weather = weather or Weather()
        self.scale = scale or {}
        self.reach = Reach()
        self.plugs: dict[PeerId, Plug] = {}
        self.happened: Counter[str] = Counter()
        """Faults of messages so far, by kind."""
        self.sent: Counter[str] = Counter()
        """Bytes that all nodes ever sent, by method."""
        self._rng = rng
        self.transports: dict[Plug, Any] = {}  # of each plug; transport.py enters them

    def plug(self, label: str, peer: PeerId, address: Address, up: float, down: float) -> Plug:
        """A new socket in the wall, `up` and `down` in bytes per second. It replaces one of the same peer."""
        plug = Plug(label, peer, address, Link(self.loop, up), Link(self.loop, down))
        self.plugs[peer] = plug
        return plug

    def latency_s(self, sender: Plug, receiver: Plug) -> float:
        """One way, this time."""
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
        sender: Plug,
        receiver: Plug,
        nbytes: int,
        arrive: Callable[[], None],
        sent: Callable[[], None] | None = None,
    ) -> Parcel:
        """Move `nbytes`; `arrive` is called at the receiver's end unless the parcel is dropped, `sent` once in any case
        when the sender's line is done with it. Whether the way is cut is asked at both ends, by the caller."""
        latency_s = self.latency_s(sender, receiver)
        parcel = Parcel(self.loop.time(), latency_s, sent)
        up, down = sender.up, receiver.down
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

        # Both ends are busy with it at the same time: it is through when the slower one is.
        parcel.left = 2
        parcel.flows = ((up, up.send(nbytes, passed_up)), (down, down.send(nbytes, passed)))
        return parcel
