"""A replica's packet for a round, the size limit of the answer, and the bytes that rounds send.

The weight of a replica's own packet in a round: 1, or 0 if it has nothing of its own to give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Packet, StreamingMessage, Transport, WireTensor
from swarmnode.base.wire import call_pb2 as wire


@dataclass(eq=False)
class RoundWeight:
    """The weight of one replica's packets.

    A newcomer's first round of each fragment of the weights counts nothing of its own, so that it starts from what the
    others have. A replica that has trained nothing since the last round of a fragment is idle: it takes what its
    partner learned. Averaged with the same weight, it would halve that (measured: `bench attack`, where a
    replica that its callers excluded still met the others of its stage, cost .04 to .06 nat after 5,000 samples).

    `least`: samples of half a round, which a newcomer that serves before it received one must have trained to count. It
    began from slow weights, and averaged with the same weight would halve what its partner learned.
    """

    fragments: int
    samples_here: Callable[[], int]
    newcomer: bool
    least: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self._received = set[int]()  # a newcomer's: fragments that had a round
        self._short: dict[int, int] = {}  # fragments without a round when it began to serve, and samples until then
        self._trained: dict[int, int] = {}  # samples trained here by the last round of each fragment

    def of(self, round_index: int) -> float:
        """0 for a newcomer, and where no sample was trained since the fragment's last round. Before its first round a
        replica that is no newcomer counts: its snapshot may hold what was learned."""
        fragment = round_index % self.fragments
        samples = self.samples_here()
        unheard = self.newcomer and fragment not in self._received
        few = fragment in self._short and samples - self._short[fragment] < self.least()
        return 0.0 if unheard or few or self._trained.get(fragment) == samples else 1.0

    def on_round_end(self, round_index: int, samples: int) -> None:
        """The round is over; its packet held what `samples` trained here came to.

        A lone step ends a newcomer's wait too: where rounds are slow, a newcomer that waited for a pair stood by for
        minutes (simulated: everything, seeds 102 and 104)."""
        fragment = round_index % self.fragments
        self._trained[fragment] = samples
        self._received.add(fragment)
        self._short.pop(fragment, None)
        if not self.newcomer or len(self._received) == self.fragments:
            self.restored(newcomer=False)

    def serve(self) -> None:
        """A newcomer begins to serve, whatever rounds it received."""
        if self.newcomer:
            self._short = dict.fromkeys({*range(self.fragments)} - self._received, self.samples_here())
        self.restored(newcomer=False)

    def restored(self, *, newcomer: bool) -> None:
        """The replica was given a state; a `newcomer` receives a round of each fragment first."""
        self.newcomer = newcomer
        self._received = set()


T = TypeVar("T")

# Guess: 8 Mbit/s, what is left of a home's line while it trains. A stage of an 8 B model has packets of 300 MB; with
# the time limit of small packets its replicas would never meet (simulated: home-8b with the default limits, 200 lone
# steps of 256).
PACKETS_BYTES_PER_S = 1e6
REPLY_SLACK_BYTES = 4096
METHODS = (
    "exchange",
    "commit",
    "packet_receipt",
    "fallback",
    "table",
    "butterfly",
)  # the calls that rounds are made of


@dataclass(frozen=True, slots=True)
class OutgoingPacket:
    """This replica's packet for one round."""

    round_index: int
    weight: float
    samples: int
    tensors: Sequence[WireTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def newcomer(self) -> bool:
        return self.weight == 0.0

    def patience_s(self, timeout_s: float) -> float:
        """Seconds that its exchange may take, if an exchange of small packets may take `timeout_s`."""
        return timeout_s + packets_s(self.nbytes)


def packets_s(nbytes: int) -> float:
    """Seconds that packets of `nbytes` may take, there and back."""
    return 2 * nbytes / PACKETS_BYTES_PER_S


class SentBytes:
    """Counts the bytes that the rounds of one replica send."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._before = 0

    def since_last(self) -> int:
        """Bytes sent since the last call; receipts are sent beside the round and may count in the next."""
        by_method = self._transport.bytes_by_method()
        before = self._before
        self._before = sum(by_method.get((method, "sent"), 0) for method in METHODS)
        return self._before - before


def reply_bytes_max(nbytes: int) -> int:
    """The limit of an answer with a partner's packet, where ours has `nbytes`: the partner's may have more escapes."""
    return 2 * nbytes + REPLY_SLACK_BYTES


def packet_of(answer: Answer, round_index: int, peer: PeerId, *, fallback: bool = False) -> Packet:
    """The packet in `answer`. Raises RemoteFault when it is of another round than was asked for."""
    exchanged = answer.header.exchanged
    if exchanged.round != round_index:
        raise RemoteFault(f"answered round {exchanged.round} instead of {round_index}")
    return Packet(weight_of(exchanged), exchanged.samples, answer.tensors, sender=peer, fallback=fallback)


def weight_of(header: wire.Exchange | wire.Exchanged) -> float:
    """A partner either counts (1) or is a newcomer (0)."""
    return 0.0 if header.newcomer else 1.0


async def while_written(draft: StreamingMessage, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which sends the tensors of `draft`; the draft is finished by then.

    An error while the draft is written cancels `work` and is raised in a group, as a LocalFault."""
    if draft.complete:
        return await work
    async with asyncio.TaskGroup() as group:
        group.create_task(draft.finished())
        return await work
