"""Places of a donor: a bounded number of peers downloads at once, and they take turns where more want to.

A place belongs to a peer for a turn, and for longer while nobody waits for one. A turn lasts long enough for a slow but
honest home to get the share of a state that makes an attempt worth another, so a download that lost its place goes on
later with the chunks it has. When a turn is over, the place goes to the next that waits: first to those that had no
turn here in the last hour, and among equals to those that wait longest.

Only seconds count, because whatever else a peer shows costs it nothing: it may ask for one chunk for ever, or for all
but the last at once, and read none. Beside `n` keys that never change, an honest joiner waits for the line (`share`),
then for `n / downloads_max` turns at most, for one where they had theirs, and then has its part of the time. Endlessly
new keys are as many newcomers, each of which gets a turn. The membership alone bounds them: where the run has an access
list each costs a pass; in an open run they cost nothing, and a joiner depends on other donors.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from swarmnode.errors import Busy, Unavailable
from swarmnode.ids import PeerId
from swarmnode.recovery.snapshot import CHUNK_NBYTES, CHUNKS_AT_ONCE, Snapshot

T = TypeVar("T")

REMEMBERED_MAX = 1024  # guess: refused newcomers remembered, and peers that had a turn
HAD_S = 3600.0  # guess: so long those that had a turn come after those that had none
CLAIM = 3.0  # guess: multiples of the retry time it was told for which a refused peer is taken to wait


@dataclass(frozen=True, slots=True)
class DonorLimits:
    """Bounds of the cost of giving. All are guesses."""

    idle_s: float = 60.0  # without a request for so long, for each MiB of a chunk, a snapshot is forgotten
    fresh_s: float = 10.0  # a newcomer gets a snapshot made for another one up to so old
    downloads_max: int = 4  # peers that download at once
    chunk_nbytes: int = CHUNK_NBYTES
    puller_idle_s: float = 10.0  # a peer that has not asked for so long, for each MiB of a chunk, has given up
    busy_retry_s: float = 2.0
    line_nbytes: float = 1e7  # bytes a second that the uplink is taken to carry before it is measured
    share_s: float = 30.0  # a newcomer that would share the uplink for longer is refused; it takes no place sooner
    retry_max_s: float = 60.0  # at most until it asks again: another may have given up
    refused_max_s: float = 600.0  # then it shares: a slow download must not keep others out for ever
    turn_s: float = 60.0  # a place is kept for so long: after DownloadLimits.alone_s the client keeps its chunks
    turn_share: float = 0.1  # and for so much of the state at `puller_idle_s` a chunk: twice DownloadLimits.fruitful


@dataclass(slots=True)
class Puller:
    """A peer that downloads state here."""

    since_s: float  # loop time at which its turn began
    turn_s: float
    until_s: float  # it loses its place then, unless it asks again; once it has none: when it lost it
    hurries: bool = True  # it cannot work without the state
    chunks: int = 0  # chunks it has asked for
    of: int = 0  # chunks of the snapshot it downloads; 0: not made yet
    nbytes: int = 0  # of that snapshot
    begun_s: float = 0.0  # loop time of its first chunk request

    def left_s(self, now_s: float, line_nbytes: float) -> float:
        """Seconds until it has everything, at the rate so far."""
        through = self.chunks - CHUNKS_AT_ONCE
        if through > 0:
            return (self.of - through) * (now_s - self.begun_s) / through
        waits_s = now_s - self.begun_s if self.chunks else 0.0
        return max(self.nbytes / line_nbytes, waits_s * self.of / CHUNKS_AT_ONCE)


@dataclass(slots=True)
class _Refused:
    """A newcomer that was refused."""

    since_s: float  # loop time of the first refusal
    claims_s: float = float("-inf")  # until then it is taken to wait for a place


class DonorPlaces:
    """The places of one donor, by peer, and the peers that wait for one."""

    def __init__(self, limits: DonorLimits) -> None:
        self._limits = limits
        self._pulling: dict[PeerId, Puller] = {}
        self._refused: OrderedDict[PeerId, _Refused] = OrderedDict()
        self._had: OrderedDict[PeerId, Puller] = OrderedDict()  # peers that had a turn, and the last one of each

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._pulling

    def clear(self) -> None:
        """Take all places back."""
        self._pulling.clear()

    def leave(self, peer: PeerId) -> None:
        """End the turn of `peer`, if it has a place."""
        puller = self._pulling.pop(peer, None)
        if puller is not None:
            puller.until_s = min(puller.until_s, _now_s())
            if puller.chunks > CHUNKS_AT_ONCE or puller.until_s - puller.since_s >= self._limits.turn_s:
                _remember(self._had, peer, puller)  # not those that only took a sample

    def turn_s(self, part: Snapshot) -> float:
        """Seconds of a turn of a peer that downloads `part`."""
        chunks_s = part.chunks * self._limits.puller_idle_s * largeness(part)
        return max(self._limits.turn_s, self._limits.turn_share * chunks_s)

    def share(self, newcomer: PeerId) -> None:
        """Raise Busy when `newcomer` would share this node's uplink for long.

        When two large states are sent one after the other, the first arrives in half the time and the second no later;
        the second joiner then also has two donors to choose from.
        """
        now_s = self._leave_idle()
        others = [one for peer, one in self._pulling.items() if peer != newcomer and one.hurries]
        left_s = max([one.left_s(now_s, self._limits.line_nbytes) for one in others], default=0.0)
        if left_s > self._limits.share_s:
            refused = self._refuse(newcomer, now_s)
            if now_s - refused.since_s < self._limits.refused_max_s:
                raise Busy("another pulls a large state here", min(left_s, self._limits.retry_max_s))

    def admit(self, peer: PeerId, hurries: bool = True) -> None:
        """Give `peer`, which asks for a snapshot, a place for a turn. Raises Busy.

        One place is kept for peers that hurry, and only they take that of a peer whose turn is over.
        """
        now_s = self._leave_idle()
        if peer in self._pulling:
            return
        free = self._limits.downloads_max - (not hurries) - len(self._pulling)
        over = self._over(now_s) if hurries and self._waits_s(peer, now_s) >= self._limits.share_s else []
        if free + len(over) <= self._ahead(peer, now_s):
            if hurries:
                self._refuse(peer, now_s).claims_s = now_s + CLAIM * self._limits.busy_retry_s
            raise self._busy()
        if free <= 0:
            self.leave(over[0])
        self._enter(peer, now_s, hurries)

    def offered(self, peer: PeerId, part: Snapshot) -> None:
        """Renew the place of `peer`, which gets the offer of `part`."""
        self._refused.pop(peer, None)
        self._renew(self._pulling[peer], part)

    def asked(self, peer: PeerId, part: Snapshot) -> None:
        """Count a chunk of `part`, which `peer` asks for. With the last one it leaves: others begin.

        A peer without a place gets one that nobody waits for, or Busy is raised, or Unavailable when it lost its place
        before it had everything: it then waits for a new offer, and does not take the loss for a failure of this donor.
        """
        now_s = self._leave_idle()
        if peer not in self._pulling:
            if self._limits.downloads_max - len(self._pulling) <= self._ahead(peer, now_s):
                last = self._had.get(peer)
                if last is not None and last.chunks < last.of:
                    raise Unavailable("its place here was given to another", self._limits.busy_retry_s)
                raise self._busy()
            self._enter(peer, now_s)
        puller = self._pulling[peer]
        self._renew(puller, part)
        if not puller.chunks:
            puller.begun_s = now_s
        puller.chunks += 1
        if puller.chunks >= part.chunks:
            self.leave(peer)

    def _renew(self, puller: Puller, part: Snapshot) -> None:
        """Renew the place of `puller`, which downloads `part`. Larger chunks are asked for more rarely."""
        now_s, idle_s = _now_s(), self._limits.puller_idle_s * largeness(part)
        if not puller.of:  # the state was copied and hashed until now
            puller.since_s = now_s
        puller.until_s = now_s + idle_s
        puller.of, puller.nbytes = part.chunks, part.nbytes
        puller.turn_s = self.turn_s(part)

    def _enter(self, peer: PeerId, now_s: float, hurries: bool = True) -> None:
        # The state is copied and hashed before the first chunk.
        self._pulling[peer] = Puller(now_s, self._limits.turn_s, now_s + self._limits.idle_s, hurries)

    def _busy(self) -> Busy:
        return Busy(f"{len(self._pulling)} peers pull state here already", self._limits.busy_retry_s)

    def _refuse(self, peer: PeerId, now_s: float) -> _Refused:
        if peer not in self._refused:
            _remember(self._refused, peer, _Refused(now_s))
        return self._refused[peer]

    def _waits_s(self, peer: PeerId, now_s: float) -> float:
        return now_s - self._refused[peer].since_s if peer in self._refused else 0.0

    def _had_turn(self, peer: PeerId, now_s: float) -> bool:
        return peer in self._had and now_s - self._had[peer].until_s < HAD_S

    def _ahead(self, peer: PeerId, now_s: float) -> int:
        """Peers that wait for a place and come before `peer`."""

        def rank(one: PeerId) -> tuple[bool, float]:
            return self._had_turn(one, now_s), -self._waits_s(one, now_s)

        waiting = [one for one, refused in self._refused.items() if refused.claims_s > now_s]
        return sum(one not in self._pulling and rank(one) < rank(peer) for one in waiting)

    def _over(self, now_s: float) -> list[PeerId]:
        """Peers whose turn is over: first those that nobody waits for, then who had a turn before, then the longest."""
        over = {peer: one for peer, one in self._pulling.items() if one.of and now_s - one.since_s >= one.turn_s}
        return sorted(over, key=lambda p: (over[p].hurries, not self._had_turn(p, now_s), over[p].since_s))

    def _leave_idle(self) -> float:
        """Forget peers that have given up. Returns the loop time."""
        now_s = _now_s()
        for peer in [peer for peer, puller in self._pulling.items() if puller.until_s <= now_s]:
            self.leave(peer)
        return now_s


def _remember(known: OrderedDict[PeerId, T], peer: PeerId, fact: T) -> None:
    known[peer] = fact
    known.move_to_end(peer)
    if len(known) > REMEMBERED_MAX:
        known.popitem(last=False)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def largeness(snapshot: Snapshot) -> float:
    """The size of the chunks of `snapshot` in MiB, at least 1: the time between two requests grows with it."""
    return max(1.0, snapshot.chunk_nbytes / CHUNK_NBYTES)
