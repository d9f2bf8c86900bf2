"""Keeps the owner's access list current: asks one peer now and then, and acts on a newer list."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

from swarmnode import bounds
from swarmnode.errors import Forbidden, RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.membership.admission import Admission
from swarmnode.ports import Call, Telemetry, Transport
from swarmnode.wire import access_pb2
from swarmnode.wire import call_pb2 as wire

PERIOD_S = 15.0  # guess: every node has heard of a ban after a few of these
TIMEOUT_S = 5.0
TOLD_MAX = 16  # derived: of a thousand members whom each tells so many, one in 10^7 hears nothing (e^-16)


async def keep_access_list(
    admission: Admission,
    transport: Transport,
    peers: Callable[[], Sequence[PeerId]],
    rng: random.Random,
    telemetry: Telemetry,
    changed: Callable[[], None],
    here: Callable[[], access_pb2.SignedAccessList | None] = lambda: None,
    period_s: float = PERIOD_S,
) -> str:
    """Ask one random peer of `peers` each period for a newer access list, and call `changed` after an update.

    `here` reads the owner's own file. Returns the reason once this node itself may no longer take part. A peer without
    a newer list costs one period.
    """
    me = transport.peer_id
    while True:
        known = admission.signed
        rules = admission.rules
        amendments = admission.amendments
        heard = [] if amendments is None else list(amendments.signed)
        told = admission.alarms()
        others = [peer for peer in peers() if peer != me]
        ahead = admission.ahead
        admission.ahead = None
        # The owner's file, and a random peer as well: anybody may say that it is ahead.
        for peer in (None, *([rng.choice(others)] if others else []), *([] if ahead is None else [ahead])):
            try:
                if peer is not None:
                    await ask(admission, transport, peer)
                elif (own := here()) is not None:
                    admission.learn(own)
            except Forbidden as refusal:
                take_evidence(admission, refusal)
            except (RemoteFault, Unavailable) as error:
                telemetry.event("access_list.failed", level="debug", reason=str(error))
        for amendment in [] if amendments is None else list(amendments.chain):
            assert amendments is not None
            if amendments.signed[amendment.serial - 1] not in heard:
                telemetry.event("amendment.heard", amendment=amendment.serial, changes=amendments.text(amendment))
        for alarm in admission.alarms():
            if alarm not in told:
                telemetry.event("owner.forked", level="error", reason=alarm)
        if admission.signed is not known:
            telemetry.event("access_list.changed", sequence=admission.rules.access_list.sequence)
        if admission.rules != rules:
            for renew in admission.renewals:
                renew()
            changed()
        permit, reason = admission.judge_me(me)
        if not permit:
            return reason
        await asyncio.sleep(period_s)


def take_evidence(admission: Admission, refusal: Forbidden) -> None:
    """Take in the owner's signed list that a refusing peer sends as evidence. The peer's own word changes nothing."""
    with contextlib.suppress(RemoteFault):
        admission.learn(bounds.opened(access_pb2.SignedAccessList, refusal.evidence, "access list"))


async def tell(admission: Admission, transport: Transport, peers: Sequence[PeerId], rng: random.Random) -> None:
    """Let some of `peers` know that amendments are known here: those that have fewer ask for them, and tell others."""

    async def one(peer: PeerId) -> None:
        with contextlib.suppress(Forbidden, RemoteFault, Unavailable):
            await ask(admission, transport, peer)

    others = [peer for peer in peers if peer != transport.peer_id]
    await asyncio.gather(*map(one, rng.sample(others, min(TOLD_MAX, len(others)))))


async def ask(admission: Admission, transport: Transport, peer: PeerId) -> None:
    """Take in the access list `peer` has, if it is newer. Raises RemoteFault and Unavailable as `call` does."""
    call = Call(wire.Request(access_list=admission.asking()))
    answer = await transport.call(peer, call, timeout_s=TIMEOUT_S, reply_bytes_max=0)
    admission.learn(answer.header.access_list)
