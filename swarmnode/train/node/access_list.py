"""Keeps the owner's access list current: asks one peer now and then, and acts on a newer list."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarmnode.base import bounds
from swarmnode.base.errors import Forbidden, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Call, Telemetry, Transport
from swarmnode.base.wire import access_pb2
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.run.admission.access import AccessRules
from swarmnode.run.admission.admission import Admission

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
        before = _Known.of(admission)
        others = [peer for peer in peers() if peer != me]
        asked = [rng.choice(others)] if others else []
        if admission.ahead is not None:  # a peer that says that it knows more
            asked.append(admission.ahead)
            admission.ahead = None
        with _fault_told(admission, telemetry):
            if (own := here()) is not None:
                admission.learn(own)
        for peer in asked:
            with _fault_told(admission, telemetry):
                await ask(admission, transport, peer)
        _tell_news(before, admission, telemetry)
        if admission.rules != before.rules:
            for renew in admission.renewals:
                renew()
            changed()
        permit, reason = admission.judge_me(me)
        if not permit:
            return reason
        await asyncio.sleep(period_s)


@dataclass(frozen=True, slots=True)
class _Known:
    """The owner's words, as a node knows them at one moment."""

    signed: access_pb2.SignedAccessList | None
    rules: AccessRules
    amendments: tuple[access_pb2.SignedAmendment, ...]
    alarms: tuple[str, ...]

    @classmethod
    def of(cls, admission: Admission) -> _Known:
        amendments = () if admission.amendments is None else tuple(admission.amendments.signed)
        return cls(admission.signed, admission.rules, amendments, tuple(admission.alarms()))


@contextlib.contextmanager
def _fault_told(admission: Admission, telemetry: Telemetry) -> Iterator[None]:
    """Go on after a peer, or the owner's file, could not tell anything; a refusal may carry the owner's newest list."""
    try:
        yield
    except Forbidden as refusal:
        take_evidence(admission, refusal)
    except (RemoteFault, Unavailable) as error:
        telemetry.event("access_list.failed", level="debug", reason=str(error))


def _tell_news(before: _Known, admission: Admission, telemetry: Telemetry) -> None:
    """Log what the owner said since `before`."""
    amendments = admission.amendments
    if amendments is not None:
        for amendment in amendments.chain:
            if amendments.signed[amendment.serial - 1] not in before.amendments:
                telemetry.event("amendment.heard", amendment=amendment.serial, changes=amendments.text(amendment))
    for alarm in admission.alarms():
        if alarm not in before.alarms:
            telemetry.event("owner.forked", level="error", reason=alarm)
    if admission.signed is not before.signed:
        telemetry.event("access_list.changed", sequence=admission.rules.access_list.sequence)


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
