"""Bound the tensor bytes being received at once, in total and per peer.

Bytes count when they arrive, as parts of incomplete messages; an announcement reserves nothing. One peer has PEER_SHARE
of the total, so fifteen others always find room beside it. A message larger than this share is admitted only alone for
its peer, and all such messages together get half of the total.
"""

from __future__ import annotations

from collections import Counter

from swarmnode.errors import Busy
from swarmnode.ids import PeerId

PEER_SHARE = 16  # guess: one peer's part is a sixteenth of the total
LARGE_SHARE = 2  # guess: the other half is for messages that fit into a peer's share
RETRY_S = 0.1  # derived: a message of 1 MB at 100 Mbit/s


class ByteLease:
    """The received bytes of one message. `close` frees them and may be called repeatedly."""

    __slots__ = ("_budget", "_nbytes", "_peer", "large")

    def __init__(self, budget: ByteBudget, peer: PeerId, *, large: bool) -> None:
        self._budget = budget
        self._peer = peer
        self._nbytes = 0
        self.large = large

    def arrive(self, nbytes: int) -> None:
        """Take `nbytes` that are about to arrive. Raises Busy if there is no room."""
        self._budget.take(self._peer, nbytes, large=self.large)
        self._nbytes += nbytes

    def close(self) -> None:
        """Free the bytes: the message is complete, or never will be."""
        self._budget.give(self._peer, self._nbytes, lease=self)
        self._nbytes = 0


class ByteBudget:
    """Bytes of messages being received, by peer. A single large message always fits: its method has its own cap."""

    def __init__(self, total_bytes_max: int) -> None:
        assert total_bytes_max >= PEER_SHARE
        self._total_bytes_max = total_bytes_max
        self._used: Counter[PeerId] = Counter()  # of messages that fit into a peer's share
        self._large: dict[PeerId, ByteLease] = {}
        self._large_nbytes = 0

    @property
    def used_bytes(self) -> int:
        """Received bytes of all incomplete messages."""
        return self._used.total() + self._large_nbytes

    @property
    def peer_bytes_max(self) -> int:
        """A peer's share."""
        return self._total_bytes_max // PEER_SHARE

    def admit(self, peer: PeerId, nbytes: int) -> ByteLease:
        """A lease for a message of `nbytes`, before any of it has arrived. Raises Busy if it has no room now."""
        if nbytes <= self.peer_bytes_max:
            self._check(peer, nbytes)
            return ByteLease(self, peer, large=False)
        if peer in self._large:
            raise Busy("a large message of yours is being received already", RETRY_S)
        if self._large:
            self._check_large(nbytes)
        lease = self._large[peer] = ByteLease(self, peer, large=True)
        return lease

    def take(self, peer: PeerId, nbytes: int, *, large: bool) -> None:
        """Raises Busy if there is no room for `nbytes` more."""
        if large:
            if len(self._large) > 1:
                self._check_large(nbytes)
            self._large_nbytes += nbytes
        else:
            self._check(peer, nbytes)
            self._used[peer] += nbytes

    def give(self, peer: PeerId, nbytes: int, *, lease: ByteLease) -> None:
        """Free the bytes that `lease` took."""
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
            raise Busy(f"{mine} bytes of yours are being received; a peer's share is {self.peer_bytes_max}", RETRY_S)
        if self._used.total() + nbytes > self._total_bytes_max - min(self._large_nbytes, self._large_bytes_max):
            raise Busy(f"{self.used_bytes} bytes are being received already", RETRY_S)

    def _check_large(self, nbytes: int) -> None:
        if self._large_nbytes + nbytes > self._large_bytes_max:
            raise Busy(f"{self._large_nbytes} bytes of large messages are being received already", RETRY_S)

    @property
    def _large_bytes_max(self) -> int:
        return self._total_bytes_max // LARGE_SHARE
