"""The caller's side of an exchange: our packet for theirs, then the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, Packet, Telemetry, Transport, WireTensor
from swarmnode.wire import call_pb2 as wire

# Guess: 8 Mbit/s, what is left of a home's line where it trains. A stage of a model of 8 B has packets of 300 MB, for
# which the time of small ones will not do: who does not wait meets nobody (simulated: home-8b with the default limits,
# 200 lone steps of 256).
PACKETS_BYTES_PER_S = 1e6
COMMIT_TIMEOUT_S = 5.0  # guess: a commit is one small message
REPLY_SLACK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Message:
    """What this replica brings to one round."""

    round_index: int
    weight: float
    samples: int
    tensors: Sequence[WireTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def patience_s(self, timeout_s: float) -> float:
        """How long its exchange may take, where one of small packets may take `timeout_s`."""
        return timeout_s + 2 * self.nbytes / PACKETS_BYTES_PER_S


async def swap(
    transport: Transport,
    telemetry: Telemetry,
    run_id: RunId,
    stage: int,
    other: PeerId,
    ours: Message,
    timeout_s: float,
) -> Packet:
    """The packet of `other` for `ours`. Raises TimeoutError, RemoteFault and Unavailable.

    `timeout_s` is for the packets: when theirs is here `other` may apply ours, so that is not given up for a commit
    that takes long (simulated: simulate-1000, seed 0; one applied, and the other knew of nothing).
    """
    exchange = wire.Exchange(round=ours.round_index, stage=stage, newcomer=ours.weight == 0.0, samples=ours.samples)
    async with asyncio.timeout(timeout_s):
        answer = await transport.call(
            other,
            Call(wire.Request(run_id=run_id, exchange=exchange), ours.tensors),
            timeout_s=timeout_s,
            reply_bytes_max=reply_bytes_max(ours.nbytes),
        )
    theirs = packet_of(answer, ours.round_index, other)
    commit = wire.Commit(round=ours.round_index, apply=True)
    try:
        await transport.call(
            other,
            Call(wire.Request(run_id=run_id, commit=commit)),
            timeout_s=COMMIT_TIMEOUT_S,
            reply_bytes_max=0,
        )
    except (RemoteFault, Unavailable) as error:
        # Theirs is here and good; whether they apply ours is not known. One-sided commits are counted.
        telemetry.count(name.ONESIDED_COMMITS)
        telemetry.event("exchange.onesided", level="warning", round=ours.round_index, peer=other, reason=str(error))
    return theirs


def reply_bytes_max(nbytes: int) -> int:
    """Of an answer with the packet of a replica whose partner's takes `nbytes`: theirs may have more escapes."""
    return 2 * nbytes + REPLY_SLACK_BYTES


def packet_of(answer: Answer, round_index: int, peer: PeerId, *, standin: bool = False) -> Packet:
    """What `answer` gives. Raises RemoteFault when that is of another round than was asked for."""
    given = answer.header.exchanged
    if given.round != round_index:
        raise RemoteFault(f"answered round {given.round} instead of {round_index}")
    return Packet(weight_of(given), given.samples, answer.tensors, sender=peer, standin=standin)


def weight_of(said: wire.Exchange | wire.Exchanged) -> float:
    """A partner either counts (1) or is a newcomer (0)."""
    return 0.0 if said.newcomer else 1.0
