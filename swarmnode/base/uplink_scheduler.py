"""The queue of a node's uplink: bulk messages are sent one after the other, not all at once.

n equal transfers that share the uplink evenly all end together. Sent in turn, the first ends after an n-th of that time
and the mean after half, so receivers begin earlier and the pipeline fills faster (simulated: home-8b, a fifth more in
its first twenty minutes; later as much as shared). The queueing time of each message is known, too. Urgent messages go
first: they are gradients on their way back, and they free slots behind them, as on the compute thread.

A single transfer may not fill the uplink: its receiver may be slow or hang, or a long lossy path may slow the one TCP
connection. So a turn also ends once the uplink should have sent the message, at the highest rate it was seen to carry.
Sometimes a higher rate is probed (BBR, Cardwell et al. 2016, applied to whole messages instead of packets). Nobody
waits before the uplink has been busy for one span.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swarmnode.base.errors import Unavailable

# What fits into a congestion window (RFC 6928: ten segments) is sent beside the bulk, not behind it.
BULK_BYTES = 16 << 10
SLOWEST_BYTES_PER_S = (1 << 20) / 40.0  # guess: 210 kbit/s, what is left of a home's uplink while it trains
SPAN_S = 5.0  # guess: buffers on the path take 4 MiB at once; at 50 Mbit/s that is 13 % of what passes in a span
GAINS = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0)  # BBR's cycle: probe for more, drain the excess, then cruise
WAIT_SHARE = 0.9  # guess: share of a call's timeout that it may queue; the rest would be too short to send it anyway
TURN_MAX_S = 30.0  # as net/transport/stream.py's STALL_S: a receiver that takes nothing for so long is given up

MEASURED_BYTES = 16 << 20  # guess: four times what buffers on the path take at once
LINE_FADE = 0.98  # guess: of the line's rate, a measurement: another network is noticed within 50

_Waiting = tuple[asyncio.Future[None], int]  # bytes


class UplinkScheduler:
    """A first-come-first-served queue. A message whose turn has ended may go on beside the next one."""

    def __init__(self, moved: Callable[[], int] | None = None, carried: Callable[[], int] | None = None) -> None:
        """`moved` returns the bytes the uplink has carried. None: one transfer always fills the uplink, and `carried`
        returns them."""
        self._pace = None if moved is None else LinkPace(moved)
        self._carried = moved or carried or (lambda: 0)
        self._busy = 0.0, 0  # when the uplink was last idle, and what it had carried until then
        self.line_bytes_per_s = 0.0
        """The most that the uplink carried while it was busy with MEASURED_BYTES or more; 0 before that."""
        self._under_way = 0
        self._over_at = 0.0  # latest end of the newest turn
        self._urgent: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Messages that wait for their turn."""
        return len(self._urgent) + len(self._others)

    async def take(self, nbytes: int, timeout_s: float, *, urgent: bool = False) -> float:
        """Wait until `nbytes` may be sent; return the seconds waited. Every `take` needs one `give`. Small messages
        never wait. Raises Unavailable after WAIT_SHARE of `timeout_s`."""
        if nbytes <= BULK_BYTES:
            return 0.0
        loop = asyncio.get_running_loop()
        asked = loop.time()
        if self._is_free(asked) and not self._others and not self._urgent:
            self._begin(nbytes, asked)
            return 0.0
        waiter = loop.create_future()
        (self._urgent if urgent else self._others).append((waiter, nbytes))
        self._admit()
        try:
            async with asyncio.timeout(WAIT_SHARE * timeout_s):
                await waiter
        except (TimeoutError, asyncio.CancelledError) as end:
            if not waiter.cancelled():  # the turn came, but nobody takes it
                self.give(nbytes)
            if isinstance(end, TimeoutError):
                raise Unavailable(
                    f"our own uplink was busy for {WAIT_SHARE * timeout_s:.0f} s with earlier messages"
                ) from None
            raise
        return loop.time() - asked

    def give(self, nbytes: int) -> None:
        """End the turn of a message of `nbytes`: it was sent or given up."""
        if nbytes <= BULK_BYTES:
            return
        self._under_way -= 1
        assert self._under_way >= 0, "a turn given back twice"
        if not self._under_way:
            self._measure(asyncio.get_running_loop().time())
        self._admit()

    def _measure(self, now: float) -> None:
        """The uplink is idle: note the rate at which it was busy."""
        since, before = self._busy
        nbytes = self._carried() - before
        if nbytes >= MEASURED_BYTES and now > since:
            self.line_bytes_per_s = max(LINE_FADE * self.line_bytes_per_s, nbytes / (now - since))

    @asynccontextmanager
    async def turn(self, nbytes: int, timeout_s: float) -> AsyncIterator[float]:
        """`take` on entry and `give` on exit; yields the seconds waited."""
        waited_s = await self.take(nbytes, timeout_s)
        try:
            yield waited_s
        finally:
            self.give(nbytes)

    def _is_free(self, now: float) -> bool:
        return not self._under_way or (self._pace is not None and self._over_at <= now)

    def _begin(self, nbytes: int, now: float) -> None:
        if not self._under_way:
            self._busy = now, self._carried()
        if self._pace is not None:
            if not self._under_way:
                self._pace.begin(now)
            self._over_at = now + min(TURN_MAX_S, self._pace.seconds(nbytes, now))
        self._under_way += 1

    def _admit(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while (queue := self._urgent or self._others) and self._is_free(now):
            waiter, nbytes = queue.popleft()
            if not waiter.done():
                self._begin(nbytes, now)
                waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if queue and self._pace is not None:
            self._timer = loop.call_at(self._over_at, self._admit)


class LinkPace:
    """The interval between messages on an uplink, from the highest rate of the last `len(GAINS)` spans in which it was
    never idle."""

    def __init__(self, moved: Callable[[], int]) -> None:
        self._moved = moved
        self._since = 0.0
        self._before = 0
        self._rates: deque[float] = deque(maxlen=len(GAINS))  # bytes a second
        self._spans = 0

    def begin(self, now: float) -> None:
        """Restart measuring: the uplink was idle until now."""
        self._since = now
        self._before = self._moved()

    def seconds(self, nbytes: int, now: float) -> float:
        """Seconds the uplink needs for `nbytes` at the known rate; slightly fewer while a higher rate is probed."""
        if now - self._since >= SPAN_S:
            self._rates.append((self._moved() - self._before) / (now - self._since))
            self._spans += 1
            self.begin(now)
        if not self._rates:
            return 0.0
        return nbytes / max(1.0, max(self._rates) * GAINS[self._spans % len(GAINS)])
