"""The caller's side of an exchange: our packet for theirs, then the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId
from swarmnode.metrics import name
from swarmnode.ports import Call, Packet, Telemetry, Transport, WireTensor
from swarmnode.wire import call_pb2 as wire

COMMIT_TIMEOUT_S = 5.0  # guess: a commit is one small message
REPLY_SLACK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Message:
    """What this replica brings to one round."""

    round_index: int
    weight: float
    samples: int
    tensors: Sequence[WireTensor]


async def swap(
    transport: Transport,
    telemetry: Telemetry,
    run_id: RunId,
    stage: int,
    other: PeerId,
    ours: Message,
    timeout_s: float,
) -> Packet:
    """The packet of `other` for `ours`. Raises RemoteFault and Unavailable."""
    exchange = wire.Exchange(round=ours.round_index, stage=stage, newcomer=ours.weight == 0.0, samples=ours.samples)
    answer = await transport.call(
        other,
        Call(wire.Request(run_id=run_id, exchange=exchange), ours.tensors),
        timeout_s=timeout_s,
        reply_bytes_max=2 * sum(tensor.nbytes for tensor in ours.tensors)
        + REPLY_SLACK_BYTES,  # theirs may have more escapes
    )
    given = answer.header.exchanged
    if given.round != ours.round_index:
        raise RemoteFault(f"answered round {given.round} instead of {ours.round_index}")
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
    return Packet(weight_of(given), given.samples, answer.tensors)


def weight_of(said: wire.Exchange | wire.Exchanged) -> float:
    """A partner either counts (1) or is a newcomer (0)."""
    return 0.0 if said.newcomer else 1.0
