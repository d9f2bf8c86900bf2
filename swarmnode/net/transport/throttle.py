"""Bandwidth limits set by the volunteer: bytes sent and received wait for their turn, in order of arrival.

Each piece reserves the next free time of its direction. Only BURST_S of idle time accumulates, so the rate holds over
any second. OVERHEAD accounts for the bytes that p2pd, Noise, yamux and TCP add.
"""

from __future__ import annotations

import asyncio

from swarmnode.base.token_bucket import TokenBucket
from swarmnode.net.membership.trust import STRANGERS_SHARE

# Derived: 12 + 18 bytes a frame of 64 KiB at most, 52 of 1,500 for TCP/IP, half of which loopback saves.
OVERHEAD = 1.03
BURST_S = 0.05
PIECE_S = 0.02  # duration of a piece at the rate: several streams take turns within a tenth of a second
# Shares of a day's quota; the second is that of the method of this name.
STRANGERS = "strangers"
CHUNKS = "data_chunk"
PIECE_BYTES_MIN = 2 << 10
PIECE_BYTES_MAX = 512 << 10


class Pacer:
    """A direction. `total_nbytes` counts all bytes, limited or not."""

    def __init__(self) -> None:
        self.total_nbytes = 0
        self._nbytes_per_s: float | None = None
        self._free_s = 0.0

    @property
    def bps(self) -> float | None:
        """Allowed bits per second; None for no limit."""
        return None if self._nbytes_per_s is None else self._nbytes_per_s * 8

    @bps.setter
    def bps(self, bps: float | None) -> None:
        self._nbytes_per_s = None if bps is None else bps / 8
        self._free_s = min(self._free_s, asyncio.get_running_loop().time() + BURST_S)

    @property
    def piece_nbytes(self) -> int:
        """Bytes to move at a time."""
        if self._nbytes_per_s is None:
            return PIECE_BYTES_MAX
        return int(min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, self._nbytes_per_s * PIECE_S)))

    async def spend(self, nbytes: int) -> None:
        """Wait until `nbytes` may pass."""
        if self._nbytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        begin = max(self._free_s, now - BURST_S)
        self._free_s = begin + nbytes * OVERHEAD / self._nbytes_per_s
        if begin > now:
            await asyncio.sleep(begin - now)


class RateThrottle:
    """Both directions of one transport."""

    def __init__(self) -> None:
        self.up = Pacer()
        self.down = Pacer()
        self._shares: dict[str, TokenBucket] = {}

    def share_quota(self, quota_nbytes: int | None) -> None:
        """Give STRANGERS_SHARE of a day's quota to peers that were not seen at work, and as much to chunks, which one
        member could take without end: half of it at once, half in the course of a day. None: there is no quota."""
        half = STRANGERS_SHARE * (quota_nbytes or 0) / 2.0
        if quota_nbytes is None:
            self._shares = {}
        elif {bucket.burst for bucket in self._shares.values()} != {half}:
            self._shares = {share: TokenBucket.full(half / 86_400.0, half) for share in (STRANGERS, CHUNKS)}

    def lasts(self, share: str, now_s: float) -> bool:
        """Whether this share of the quota, STRANGERS or CHUNKS, lasts."""
        return share not in self._shares or self._shares[share].fill(now_s) > 0.0

    def spend_share(self, share: str, nbytes: int, now_s: float) -> None:
        """Count bytes of calls and their answers."""
        if share in self._shares:
            self._shares[share].spend(now_s, OVERHEAD * nbytes)

    @property
    def moved_nbytes(self) -> int:
        """Bytes of calls in both directions, including the estimated overhead of p2pd and TCP."""
        return int(OVERHEAD * (self.up.total_nbytes + self.down.total_nbytes))
