"""Keeping the owner's guest list current: ask somebody now and then, act on what is new."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from swarmnode.errors import Forbidden, RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.membership.door import Door
from swarmnode.ports import Call, Telemetry, Transport
from swarmnode.wire import access_pb2
from swarmnode.wire import call_pb2 as wire

PERIOD_S = 15.0  # guess: every node has heard of a ban after a few of these
TIMEOUT_S = 5.0


async def keep_guests(
    door: Door,
    transport: Transport,
    peers: Callable[[], Sequence[PeerId]],
    rng: random.Random,
    telemetry: Telemetry,
    changed: Callable[[], None],
    here: Callable[[], access_pb2.SignedGuestList | None] = lambda: None,
    period_s: float = PERIOD_S,
) -> str:
    """Ask one of `peers` each period for a newer list (`here`: the owner's own file), and call `changed` for it.

    Returns when this node itself may take part no longer: why. The ignorance of one peer costs one period.
    """
    me = transport.peer_id
    while True:
        known = door.rules.guests.sequence
        asked = [peer for peer in peers() if peer != me]
        try:
            if (own := here()) is not None:
                door.learn(own)
            if asked:
                await ask(door, transport, rng.choice(asked))
        except Forbidden as refusal:
            take_evidence(door, refusal)
        except (RemoteFault, Unavailable) as error:
            telemetry.event("guests.failed", level="debug", reason=str(error))
        if door.rules.guests.sequence > known:
            telemetry.event("guests.changed", sequence=door.rules.guests.sequence)
            changed()
        permit, reason = door.judge(me, door.mine)
        if not permit:
            return reason
        await asyncio.sleep(period_s)


def take_evidence(door: Door, refusal: Forbidden) -> None:
    """Learn what the owner says from a peer that refuses us; its own word alone moves nothing."""
    with contextlib.suppress(RemoteFault, DecodeError):
        door.learn(access_pb2.SignedGuestList.FromString(refusal.evidence))


async def ask(door: Door, transport: Transport, peer: PeerId) -> None:
    """Take in the guest list `peer` has, if it is newer. Raises RemoteFault and Unavailable as `call` does."""
    request = wire.GuestsRequest(sequence=door.rules.guests.sequence)
    answer = await transport.call(peer, Call(wire.Request(guests=request)), timeout_s=TIMEOUT_S, reply_bytes_max=0)
    if answer.header.guests.list:
        door.learn(answer.header.guests)
