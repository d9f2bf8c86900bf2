"""How many bytes a second pass between us and a peer: a few timed calls of growing size, each way.

Whoever asks pays with the same bytes; whoever answers gives each asker MEASURE_BURST_BYTES at once, all together
ALL_BYTES_PER_S, and says Busy beyond. What is found is what training would have: the same streams, the same
encryption, a node's own --max-up and --max-down.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.errors import Busy, RemoteFault, Unavailable
from swarmnode.ids import PeerId, seeded
from swarmnode.ports import Answer, Call, Transport, WireTensor
from swarmnode.transport.knocking import Bucket
from swarmnode.wire import call_pb2 as wire

SIZES = (0, 64 << 10, 256 << 10, 1 << 20)  # guess: from a connection of 1 Mbit/s (0.5 s for the second) to 1 Gbit/s
ENOUGH_S = 0.4  # guess: a transfer that took so long says it; larger ones are spared
TIMEOUT_S = 8.0
MEASURE_BURST_BYTES = 8 << 20  # three whole measurements of one peer
REFILL_BYTES_PER_S = (8 << 20) / 600.0  # and the same again after ten minutes
ALL_BURST_BYTES, ALL_BYTES_PER_S = 32 << 20, 256 << 10  # guess: 2 Mbit/s in the long run, whoever asks
AT_ONCE_MAX = 2  # two that measure at the same time halve each other's result; more are sent away
ASKERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Transfer:
    """One timed call: what was carried in one direction, and how long it all took."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one link, bits a second from us and to us."""

    up_bps: float
    down_bps: float


def rate_bps(transfers: Sequence[Transfer]) -> float:
    """Bits a second, by the largest transfer, less the round trip (the quickest empty one). 0 when nothing was carried.

    At least half of the time counts as transfer: where the round trip is most of it, a jittery one could make any link
    infinitely fast.
    """
    round_trip_s = min((one.seconds for one in transfers if not one.nbytes), default=0.0)
    largest = max(transfers, key=lambda one: one.nbytes, default=Transfer(0, 0.0))
    return 8.0 * largest.nbytes / max(largest.seconds - round_trip_s, largest.seconds / 2.0, 1e-6)


def noise() -> bytes:
    """The largest tensor that is sent: no link can compress it."""
    return seeded("capacity").randbytes(SIZES[-1])


@dataclass(slots=True)
class Counterpart:
    """Answers "measure": takes what is sent, and sends as many bytes as asked for."""

    _noise: bytes = field(default_factory=noise)
    _askers: OrderedDict[PeerId, Bucket] = field(default_factory=OrderedDict)
    _all: Bucket | None = None
    _answering: int = 0

    def serve(self, transport: Transport) -> None:
        """Register."""
        transport.serve("measure", self.answer, tensor_bytes_max=SIZES[-1])

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Raises Busy (asked too often, or by others just now), RemoteFault (too much at once)."""
        wanted = call.header.measure.reply_nbytes
        if wanted > SIZES[-1]:
            raise RemoteFault(f"{wanted} bytes asked for; at most {SIZES[-1]} at once")
        cost = wanted + sum(tensor.nbytes for tensor in call.tensors)
        now = asyncio.get_running_loop().time()
        if self._answering >= AT_ONCE_MAX or not self._allowed(peer, cost, now):
            raise Busy("others measure now, or this peer did just before", 30.0)
        self._answering += 1
        try:
            await asyncio.sleep(0)  # let what is queued go first: training comes before measuring
            tensors = (WireTensor("u8", (wanted,), self._noise[:wanted]),) if wanted else ()
            return Answer(wire.Reply(measure=wire.Measured()), tensors)
        finally:
            self._answering -= 1

    def _allowed(self, peer: PeerId, cost: int, now_s: float) -> bool:
        everybody = self._all = self._all or Bucket(ALL_BYTES_PER_S, ALL_BURST_BYTES, ALL_BURST_BYTES, now_s)
        asker = self._askers.get(peer)
        if asker is None:
            asker = self._askers[peer] = Bucket(REFILL_BYTES_PER_S, MEASURE_BURST_BYTES, MEASURE_BURST_BYTES, now_s)
            if len(self._askers) > ASKERS_MAX:
                self._askers.popitem(last=False)
        return asker.take(now_s, cost) and everybody.take(now_s, cost)


async def measure(transport: Transport, peer: PeerId) -> Capacity:
    """Time a few calls to `peer`, which is connected; at most 1.3 MiB each way. Raises Unavailable, RemoteFault."""
    made = noise()
    up: list[Transfer] = []
    down: list[Transfer] = []
    for nbytes in SIZES:
        if not up or up[-1].seconds < ENOUGH_S:
            up.append(await _once(transport, peer, made[:nbytes], 0))
    for nbytes in SIZES:
        if not down or down[-1].seconds < ENOUGH_S:
            down.append(await _once(transport, peer, b"", nbytes))
    return Capacity(rate_bps(up), rate_bps(down))


async def best(transport: Transport, peers: Sequence[PeerId], limit_s: float) -> tuple[Capacity | None, str]:
    """The most that any of `peers` gets through each way within `limit_s`, one after the other, and of whom that is.

    Our own access is what they have in common, so the best of them tells it; None with the reason when none answers.
    """
    found: list[Capacity] = []
    reason = "nobody was there to measure with"
    try:
        async with asyncio.timeout(limit_s):
            for peer in peers:
                try:
                    found.append(await measure(transport, peer))
                except (RemoteFault, Unavailable) as error:
                    reason = str(error)
    except TimeoutError:
        reason = f"not one measurement was done in {limit_s:.0f} s"
    if not found:
        return None, reason
    return Capacity(
        max(one.up_bps for one in found), max(one.down_bps for one in found)
    ), f"with {len(found)} of {len(peers)} peers"


async def _once(transport: Transport, peer: PeerId, sent: bytes, asked_nbytes: int) -> Transfer:
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
        raise RemoteFault(f"{carried} bytes came where {asked_nbytes} were asked for")
    return Transfer(len(sent) + asked_nbytes, seconds)
