"""Keeps a directory in touch: with its meeting points, and with peers of before once they are lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable, Unreachable
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2
from swarmnode.net.membership.liveness import AGAIN_S, SAMPLE, SMALL_CALL_S
from swarmnode.net.transport.contact import RETRY_FIXED_S, RETRY_MIN_S, Contact, Contacts, whom_to_try
from swarmnode.net.transport.path_check import knock
from swarmnode.net.transport.record_book import RPC_TIMEOUT_S
from swarmnode.net.transport.stream_transport import StreamTransport

JOIN_DELAY_S = 0.3
TOLD_EVERY = round(AGAIN_S / RETRY_FIXED_S)  # failures with a bootstrap for one event: derived, an event a minute
POINT_CHECK_S = 9.0  # guess: with two tries a meeting point that is away is told within half a minute
POINT_CHECK_MAX_S = 60.0  # guess: strangers' records put the next check off until then at most
POINT_CHECKS_PER_S = 20.0  # guess: at a meeting point, of all members together


def point_check_s(records: int) -> float:
    """Seconds between two looks of a node with so many `records` whether its meeting points still answer: members
    together ask a meeting point POINT_CHECKS_PER_S times a second, up to 1,200 of them."""
    return min(POINT_CHECK_MAX_S, max(POINT_CHECK_S, records / POINT_CHECKS_PER_S))


async def claimed_by(transport: StreamTransport, peer: PeerId) -> int | None:
    """Samples that the run has trained as `peer` knows; None if it does not answer."""
    try:
        ping = Call(call_pb2.Request(ping=call_pb2.Ping()))
        answer = await transport.call(peer, ping, timeout_s=RPC_TIMEOUT_S, reply_bytes_max=0)
    except (RemoteFault, Unavailable):
        return None
    return answer.header.pong.samples


class Neighbours(Protocol):
    """The peers that a directory asks."""

    @property
    def faults(self) -> tuple[type[Exception], ...]: ...  # of asking

    @property
    def records(self) -> int: ...  # that are known

    def here(self) -> set[PeerId]:
        """Peers that are in touch."""
        ...

    async def greet(self, peer: PeerId) -> bool:
        """Whether `peer` answers. Raises LocalFault if our clocks differ too much."""
        ...

    def answered(self, peer: PeerId) -> None:
        """`peer` answers again: it is asked like others."""
        ...

    def forget_silence(self) -> None:
        """All are asked like others."""
        ...

    async def look_around(self) -> None:
        """Learn what those that were reached last know: a part of the swarm that nobody here had heard of."""
        ...


class ContactKeeper:
    """Finds `neighbours` through the meeting points `bootstrap` and the `contacts`, and finds them again."""

    def __init__(
        self,
        transport: StreamTransport,
        bootstrap: Sequence[tuple[PeerId, Sequence[str]]],
        contacts: Contacts,
        neighbours: Neighbours,
        unix_s: Callable[[], float],
        event: Callable[..., None],
    ) -> None:
        """`event` logs its name, level and fields."""
        self._transport = transport
        self._bootstrap = bootstrap
        self._contacts = contacts
        for peer, addresses in bootstrap:
            contacts.tell(peer, addresses)
        self._neighbours = neighbours
        self._unix_s = unix_s
        self._event = event
        self._away = set[PeerId]()  # meeting points that were told to be away

    async def join(self, timeout_s: float) -> None:
        """Find others. Raises Unreachable if no bootstrap answers within `timeout_s`, LocalFault if this machine's
        clock is wrong. Without bootstraps it is enough to have asked the contacts."""
        if not self._bootstrap:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SMALL_CALL_S):  # then `keep_joined` goes on
                    await self._ask_bootstraps({})
            return
        reasons: dict[PeerId, str] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if await self._ask_bootstraps(reasons):
                        return
                    await asyncio.sleep(JOIN_DELAY_S)
        except TimeoutError:
            tried = "; ".join(f"{peer} at {', '.join(addresses)}" for peer, addresses in self._bootstrap)
            why = next(iter(reasons.values()), "no answer")
            raise Unreachable(
                f"no meeting point answers within {timeout_s:.0f} s (tried {tried}; last: {why}): "
                "is one running there, and does its firewall let the port in?"
            ) from None

    async def keep_joined(self) -> None:
        """Look for lost contacts: a partition may have healed, p2pd or all nodes restarted, or a swarm split in two."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while True:
            if loop.time() >= asked_s + point_check_s(self._neighbours.records):
                asked_s = loop.time()
                await self._ask_points()
            here = self._neighbours.here()
            if not here:
                await self.rejoin()
            elif await self.try_lost({}, here):
                await self._neighbours.look_around()
            for peer in self._away & self._neighbours.here():  # it called first
                self._tell_point(peer, True)
            await asyncio.sleep(RETRY_MIN_S)

    async def claimed(self, run_id: RunId) -> int:
        """The most samples of the run that bootstraps or contacts claim, or that this machine remembers. Raises
        Unavailable if none of them answers."""
        peers = dict.fromkeys([*(peer for peer, _ in self._bootstrap), *(p for p, _ in self._contacts.latest(SAMPLE))])
        totals = await asyncio.gather(*(claimed_by(self._transport, peer) for peer in peers))
        answers = [total for total in totals if total is not None]
        own = self._contacts.samples.get(run_id, 0)
        if peers and not answers and not own:
            raise Unavailable(f"none of the {len(peers)} machines known to this one answers")
        return max(own, *answers, 0)

    async def rejoin(self) -> None:
        """Ask the bootstraps again: those that did not answer may have been out of this node's reach."""
        self._neighbours.forget_silence()
        with contextlib.suppress(LocalFault):  # a wrong clock: the node reports it at its next start
            await self._ask_bootstraps({})

    async def _ask_bootstraps(self, reasons: dict[PeerId, str]) -> bool:
        """Contact bootstraps and former peers at once, and our neighbours through those that answer."""
        for peer, _ in self._bootstrap:  # they are due whatever was tried before
            self._contacts.known[peer].retry()
        met = await self.try_lost(reasons, here=set())  # who greeted us meanwhile is asked, too
        if met:
            await self._neighbours.look_around()
        return met

    async def _ask_points(self) -> None:
        """Ask the meeting points that were in touch whether they still are: `try_lost` tries the others again."""
        here = self._neighbours.here()
        points = [peer for peer, _ in self._bootstrap if peer in here]
        with contextlib.suppress(*self._neighbours.faults, LocalFault):  # a wrong clock: told at the next start
            await asyncio.gather(*map(self._neighbours.greet, points))

    async def try_lost(self, reasons: dict[PeerId, str], here: Collection[PeerId]) -> bool:
        """Dial contacts that are not `here`; return whether one answered. `reasons` gets why others did not."""
        now = self._unix_s()
        lost = whom_to_try(self._contacts.known, here, now)
        met = await asyncio.gather(*(self._meet(peer, self._contacts.known[peer], reasons) for peer in lost))
        for peer, answered in zip(lost, met, strict=True):
            self._contacts.record_try(peer, answered, now)
            if answered:
                self._neighbours.answered(peer)
            if answered and here:
                self._event("directory.merged", "info", peer=short(peer), here=len(here))
        return any(met)

    async def _meet(self, peer: PeerId, contact: Contact, reasons: dict[PeerId, str]) -> bool:
        # The contact may be forgotten by now.
        addresses = contact.addresses
        fixed = contact.fixed
        tries = contact.failures
        try:
            async with asyncio.timeout(None if fixed else SMALL_CALL_S):
                if fixed:
                    where, why = await knock(addresses)
                    if not where:
                        raise Unavailable(why)
                await self._transport.connect(peer, addresses)
                met = await self._neighbours.greet(peer)
        except TimeoutError:
            met = False
            reasons[peer] = f"no answer within {SMALL_CALL_S:.0f} s"
        except self._neighbours.faults as error:
            met = False
            why = str(error)
            reasons[peer] = reasons.get(peer, why) if "dial backoff" in why else why
        doubtful = not tries and peer not in reasons  # a busy machine, perhaps: it is asked once more
        told = peer in self._away and tries % TOLD_EVERY != 0
        if met or not (doubtful or told):
            self._tell_point(peer, met, reasons.get(peer, "no answer"))
        return met

    def _tell_point(self, peer: PeerId, met: bool, why: str = "") -> None:
        """Log whether `peer` answers, if it is a meeting point."""
        if all(peer != point for point, _ in self._bootstrap):
            return
        if met:
            self._away.discard(peer)
            self._event("bootstrap.connected", "info", peer=short(peer))
        else:
            self._away.add(peer)
            self._event("bootstrap.unreachable", "warning", peer=short(peer), why=why)
