"""Measure the bandwidth between this node and a peer: a few timed calls of growing size in each direction.

The asker spends as many bytes as the answering peer. Each asker gets MEASURE_BURST_BYTES at once, all together
ALL_BYTES_PER_S; beyond that the answer is Busy. The result is the rate that training would have: the same streams and
encryption, and the node's own --max-up and --max-down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.base.errors import Busy, PeerTimeout, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, seeded, short
from swarmnode.base.ports import Answer, Call, Transport, WireTensor
from swarmnode.base.token_bucket import PeerBudget
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport.path_check import large_unanswered

SIZES = (0, 64 << 10, 256 << 10, 1 << 20)  # guess: from a connection of 1 Mbit/s (0.5 s for the second) to 1 Gbit/s
ENOUGH_S = 0.4  # guess: a transfer this long is conclusive; larger ones are skipped
TIMEOUT_S = 8.0
MEASURE_BURST_BYTES = 8 << 20  # three complete measurements by one peer
REFILL_BYTES_PER_S = (8 << 20) / 600.0  # and as much again every ten minutes
# Guess: 2 Mbit/s in the long run, for all askers.
ALL_BURST_BYTES = 32 << 20
ALL_BYTES_PER_S = 256 << 10
AT_ONCE_MAX = 2  # two concurrent measurements halve each other's result; further ones are refused


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A timed call: bytes carried in one direction, and the total time."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkCapacity:
    """Bandwidth of one link, in bits per second from us and to us."""

    up_bps: float
    down_bps: float


def rate_bps(transfers: Sequence[TimedTransfer]) -> float:
    """Bits per second of the largest transfer, minus the round trip (the fastest empty one). 0 if nothing was carried.

    At least half of the time counts as transfer. Otherwise jitter could make a link with a dominant round trip look
    infinitely fast.
    """
    round_trip_s = min((one.seconds for one in transfers if not one.nbytes), default=0.0)
    largest = max(transfers, key=lambda one: one.nbytes, default=TimedTransfer(0, 0.0))
    return 8.0 * largest.nbytes / max(largest.seconds - round_trip_s, largest.seconds / 2.0, 1e-6)


def noise() -> bytes:
    """Incompressible bytes of the largest tensor sent."""
    return seeded("capacity").randbytes(SIZES[-1])


@dataclass(slots=True)
class CapacityResponder:
    """Answers "measure": takes a tensor, and returns as many bytes as asked for."""

    _noise: bytes = field(default_factory=noise)
    _budget: PeerBudget = field(
        default_factory=lambda: PeerBudget(REFILL_BYTES_PER_S, MEASURE_BURST_BYTES, ALL_BYTES_PER_S, ALL_BURST_BYTES)
    )
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE_MAX))

    def serve(self, transport: Transport) -> None:
        """Register the handler."""
        transport.serve("measure", self.answer, tensor_bytes_max=SIZES[-1])

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "measure". Raises Busy (asked too often, or others measure now), RemoteFault (too much at
        once)."""
        wanted = call.header.measure.reply_nbytes
        if wanted > SIZES[-1]:
            raise RemoteFault(f"{wanted} bytes asked for; at most {SIZES[-1]} at once")
        cost = wanted + sum(tensor.nbytes for tensor in call.tensors)
        now = asyncio.get_running_loop().time()
        if self._slots.locked() or not self._budget.take(peer, now, cost):
            raise Busy("others are measuring now, or this peer measured a moment ago", 30.0)
        async with self._slots:
            await asyncio.sleep(0)  # yield to queued work: training takes precedence over measuring
            tensors = (WireTensor("u8", (wanted,), self._noise[:wanted]),) if wanted else ()
            return Answer(wire.Reply(measure=wire.Measured()), tensors)


async def measure(transport: Transport, peer: PeerId) -> LinkCapacity:
    """Time a few calls to the connected `peer`: at most 1.3 MiB each way. Raises Unavailable, RemoteFault."""
    payload = noise()
    up: list[TimedTransfer] = []
    down: list[TimedTransfer] = []
    for nbytes in SIZES:
        if not up or up[-1].seconds < ENOUGH_S:
            up.append(await _timed(transport, peer, payload[:nbytes], 0, up))
    for nbytes in SIZES:
        if not down or down[-1].seconds < ENOUGH_S:
            down.append(await _timed(transport, peer, b"", nbytes, down))
    return LinkCapacity(rate_bps(up), rate_bps(down))


async def best(transport: Transport, peers: Sequence[PeerId], limit_s: float) -> tuple[LinkCapacity | None, str]:
    """The best bandwidth each way among `peers`, measured one after the other within `limit_s`, and a description of
    its source.

    The peers share only our own access line, so the best result describes it. None with the reason if no peer answers.
    """
    capacities: list[LinkCapacity] = []
    reason = "no peer was available to measure with"
    try:
        async with asyncio.timeout(limit_s):
            for peer in peers:
                try:
                    capacities.append(await measure(transport, peer))
                except (RemoteFault, Unavailable) as error:
                    reason = str(error)
    except TimeoutError:
        reason = f"no measurement finished in {limit_s:.0f} s"
    if not capacities:
        return None, reason
    return LinkCapacity(
        max(one.up_bps for one in capacities), max(one.down_bps for one in capacities)
    ), f"with {len(capacities)} of {len(peers)} peers"


async def _timed(
    transport: Transport, peer: PeerId, sent: bytes, asked_nbytes: int, before: Sequence[TimedTransfer]
) -> TimedTransfer:
    """The transfer of `_once`. The error says how large it was if smaller ones were answered `before`."""
    try:
        return await _once(transport, peer, sent, asked_nbytes)
    except PeerTimeout:
        if not before:
            raise
        what = f"one with {len(sent)} bytes to {short(peer)} and {asked_nbytes} back"
        raise PeerTimeout(large_unanswered(what, before[0].seconds, TIMEOUT_S, "an empty call")) from None


async def _once(transport: Transport, peer: PeerId, sent: bytes, asked_nbytes: int) -> TimedTransfer:
    loop = asyncio.get_running_loop()
    tensors = (WireTensor("u8", (len(sent),), sent),) if sent else ()
    begun = loop.time()
    answer = await transport.call(
        peer,
        Call(wire.Request(measure=wire.Measure(reply_nbytes=asked_nbytes)), tensors),
        timeout_s=TIMEOUT_S,
        reply_bytes_max=SIZES[-1],
    )
    seconds = loop.time() - begun
    carried = sum(tensor.nbytes for tensor in answer.tensors)
    if carried != asked_nbytes:
        raise RemoteFault(f"received {carried} bytes; asked for {asked_nbytes}")
    return TimedTransfer(len(sent) + asked_nbytes, seconds)
