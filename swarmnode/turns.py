"""Turns on a node's line: messages of bulk go one after the other, not all at once.

Shared evenly, n transfers of one size all end when the last one does; in turns the first ends after an n-th of that,
and the mean after half. Who gets it begins earlier: a pipeline fills faster (simulated: home-8b, a fifth more in its
first twenty minutes; later as much as shared). And how long each waited for the line is known. Urgent answers go first:
they are gradients on their way back, which leave room behind them, as on the compute thread.

But one transfer alone may not fill the line: its receiver is slow or hangs, or a long way with losses holds a single
TCP connection down. So a turn is over, too, when the line should have been done with it by the most it was seen to
carry; now and then it is tried whether it carries more (BBR: Cardwell et al. 2016, whose pacing of packets this is for
whole messages). Until a line was seen busy for a while nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from swarmnode.errors import Unavailable

BULK_BYTES = 16 << 10  # guess: what fits into a congestion window passes beside the bulk, not behind it
SPAN_S = 5.0  # guess: buffers on the way swallow 4 MiB at once; at 50 Mbit/s that is 13 % of what passes in a span
GAINS = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0)  # BBR's cycle: try more, drain what that left, then cruise
WAIT_SHARE = 0.9  # guess: of its time that a call may wait for the line; what is left then is too short anyway
TURN_MAX_S = 30.0  # as transport/stream.py's STALL_S: a receiver that took nothing for so long is given up

_Waiting = tuple[asyncio.Future[None], int]  # bytes


class Turns:
    """Whose turn it is, in the order in which they came; any number may go on beside it whose turn is over."""

    def __init__(self, moved: Callable[[], int] | None = None) -> None:
        """`moved` tells the bytes that the line has carried. None: one transfer fills the line, always."""
        self._pace = None if moved is None else Pace(moved)
        self._under_way = 0
        self._over_at = 0.0  # when the newest turn is over at the latest
        self._urgent: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Messages whose turn has not come."""
        return len(self._urgent) + len(self._others)

    async def take(self, nbytes: int, timeout_s: float, *, urgent: bool = False) -> float:
        """Returns when `nbytes` may be sent, after how many seconds; then comes one `give`. What is small goes at once.
        Raises Unavailable after WAIT_SHARE of `timeout_s`."""
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
            if not waiter.cancelled():  # it came, and nobody takes it
                self.give(nbytes)
            if isinstance(end, TimeoutError):
                raise Unavailable(
                    f"our own line was busy for {WAIT_SHARE * timeout_s:.0f} s with what came before"
                ) from None
            raise
        return loop.time() - asked

    def give(self, nbytes: int) -> None:
        """`nbytes` that had a turn are sent, or given up."""
        if nbytes <= BULK_BYTES:
            return
        self._under_way -= 1
        assert self._under_way >= 0, "a turn given back twice"
        self._admit()

    @asynccontextmanager
    async def turn(self, nbytes: int, timeout_s: float) -> AsyncIterator[float]:
        """`take`, and `give` at the end; yields the seconds waited."""
        waited_s = await self.take(nbytes, timeout_s)
        try:
            yield waited_s
        finally:
            self.give(nbytes)

    def _is_free(self, now: float) -> bool:
        return not self._under_way or (self._pace is not None and self._over_at <= now)

    def _begin(self, nbytes: int, now: float) -> None:
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


class Pace:
    """How fast messages may follow one another on a line: by the most that it carried over a span in which it was never
    idle, of the last `len(GAINS)` spans."""

    def __init__(self, moved: Callable[[], int]) -> None:
        self._moved = moved
        self._since, self._before = 0.0, 0
        self._rates: deque[float] = deque(maxlen=len(GAINS))  # bytes a second
        self._spans = 0

    def begin(self, now: float) -> None:
        """The line was idle until now."""
        self._since, self._before = now, self._moved()

    def seconds(self, nbytes: int, now: float) -> float:
        """That the line needs for `nbytes` as far as is known; a bit less where it is tried whether it carries more."""
        if now - self._since >= SPAN_S:
            self._rates.append((self._moved() - self._before) / (now - self._since))
            self._spans += 1
            self.begin(now)
        if not self._rates:
            return 0.0
        return nbytes / max(1.0, max(self._rates) * GAINS[self._spans % len(GAINS)])
