"""How many bytes of tensors may be on their way in at once, in all and from one peer.

What counts is what has arrived, piece by piece, of messages that are not whole yet: an announcement holds nothing. One
peer has PEER_SHARE of the whole, so that fifteen others always find room beside it. A message that is larger alone than
this share passes by itself: one of a peer at a time, and all such messages together take half of the whole.
"""

from __future__ import annotations

from collections import Counter

from swarmnode.errors import Busy
from swarmnode.ids import PeerId

PEER_SHARE = 16  # issue 23: a sixteenth of the whole for one peer
LARGE_SHARE = 2  # guess: the other half is for messages that fit into a peer's share
RETRY_S = 0.1  # guess: a message of 1 MB at 100 Mbit/s


class Lease:
    """What has arrived of one message. `close` gives it back, once or more often."""

    __slots__ = ("_budget", "_nbytes", "_peer", "large")

    def __init__(self, budget: Budget, peer: PeerId, *, large: bool) -> None:
        self._budget = budget
        self._peer = peer
        self._nbytes = 0
        self.large = large

    def arrive(self, nbytes: int) -> None:
        """So many bytes more are about to come in. Raises Busy when there is no room for them."""
        self._budget.take(self._peer, nbytes, large=self.large)
        self._nbytes += nbytes

    def close(self) -> None:
        """The message is whole, or will never be."""
        self._budget.give(self._peer, self._nbytes, lease=self)
        self._nbytes = 0


class Budget:
    """Bytes of messages under way, by peer. One large message alone always fits: its method has a cap of its own."""

    def __init__(self, total_bytes_max: int) -> None:
        assert total_bytes_max >= PEER_SHARE
        self._total_bytes_max = total_bytes_max
        self._used: Counter[PeerId] = Counter()  # of messages that fit into a peer's share
        self._large: dict[PeerId, Lease] = {}
        self._large_nbytes = 0

    @property
    def used_bytes(self) -> int:
        """Of all messages under way."""
        return self._used.total() + self._large_nbytes

    @property
    def peer_bytes_max(self) -> int:
        """A peer's share."""
        return self._total_bytes_max // PEER_SHARE

    def admit(self, peer: PeerId, nbytes: int) -> Lease:
        """For a message of `nbytes`, of which nothing has arrived. Raises Busy when it would not find room now."""
        if nbytes <= self.peer_bytes_max:
            self._check(peer, nbytes)
            return Lease(self, peer, large=False)
        if peer in self._large:
            raise Busy("a large message of yours is on its way in already", RETRY_S)
        if self._large:
            self._check_large(nbytes)
        lease = self._large[peer] = Lease(self, peer, large=True)
        return lease

    def take(self, peer: PeerId, nbytes: int, *, large: bool) -> None:
        """Raises Busy when `nbytes` more find no room."""
        if large:
            if len(self._large) > 1:
                self._check_large(nbytes)
            self._large_nbytes += nbytes
        else:
            self._check(peer, nbytes)
            self._used[peer] += nbytes

    def give(self, peer: PeerId, nbytes: int, *, lease: Lease) -> None:
        """Give back what `lease` took."""
        if lease.large:
            self._large_nbytes -= nbytes
            if self._large.get(peer) is lease:
                del self._large[peer]
            return
        self._used[peer] -= nbytes
        assert self._used[peer] >= 0, "more given back than taken"
        if not self._used[peer]:
            del self._used[peer]

    def _check(self, peer: PeerId, nbytes: int) -> None:
        if (mine := self._used[peer]) + nbytes > self.peer_bytes_max:
            raise Busy(f"{mine} bytes of yours are on their way in, {self.peer_bytes_max} is a peer's share", RETRY_S)
        if self._used.total() + nbytes > self._total_bytes_max - min(self._large_nbytes, self._large_bytes_max):
            raise Busy(f"{self.used_bytes} bytes are on their way in already", RETRY_S)

    def _check_large(self, nbytes: int) -> None:
        if self._large_nbytes + nbytes > self._large_bytes_max:
            raise Busy(f"{self._large_nbytes} bytes of large messages are on their way in already", RETRY_S)

    @property
    def _large_bytes_max(self) -> int:
        return self._total_bytes_max // LARGE_SHARE
