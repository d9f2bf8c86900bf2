"""A direction of a node's internet link: its transfers share the bandwidth evenly, as TCP flows would.

Processor sharing in virtual time (Kleinrock 1967; fair queueing's `V(t)`, Demers et al. 1989): each byte of every flow
costs one unit of V, which advances at rate / flows, so a flow of n bytes ends when V has grown by n. A change of the
rate or of the number of flows only changes the speed of V: O(log flows) per event, one timer per link.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable


class LinkFlow:
    """A transfer. `done` is called when its last byte has passed."""

    __slots__ = ("done", "ends_at", "nbytes")

    def __init__(self, nbytes: int, ends_at: float, done: Callable[[], None] | None) -> None:
        self.nbytes = nbytes
        self.ends_at = ends_at
        self.done = done


class SimLink:
    """A link of `rate` bytes per second that carries any number of concurrent flows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float) -> None:
        assert rate > 0, f"a link of {rate} bytes/s"
        self._loop = loop
        self._context = contextvars.copy_context()  # the world's context: a frozen process does not stop its links
        self._rate = rate
        self._virtual = 0.0  # bytes moved by each flow that was there all along
        self._at = 0.0  # loop time of `_virtual`
        self._flows: list[tuple[float, int, LinkFlow]] = []
        self._live = 0
        self._serial = 0
        self._timer: asyncio.TimerHandle | None = None
        self.carried = 0  # bytes, ever

    @property
    def flows(self) -> int:
        """Transfers in progress."""
        return self._live

    @property
    def rate(self) -> float:
        return self._rate

    def set_rate(self, rate: float) -> None:
        """Change the rate for all flows on the link."""
        assert rate > 0, f"a link of {rate} bytes/s"
        self._advance()
        self._rate = rate
        self._arm()

    def send(self, nbytes: int, done: Callable[[], None]) -> LinkFlow:
        """Start a transfer of `nbytes`."""
        self._advance()
        flow = LinkFlow(nbytes, self._virtual + nbytes, done)
        self._serial += 1
        self._live += 1
        heapq.heappush(self._flows, (flow.ends_at, self._serial, flow))
        self._arm()
        return flow

    def drop(self, flow: LinkFlow) -> None:
        """Cancel `flow`; the others become faster."""
        if flow.done is not None:
            self._advance()
            flow.done = None
            self._live -= 1
            self._arm()

    def _advance(self) -> None:
        now = self._loop.time()
        if self._live:
            self._virtual += (now - self._at) * self._rate / self._live
        elif not self._flows:
            self._virtual = 0.0  # keeps the numbers small, hence exact
        self._at = now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._flows and self._flows[0][2].done is None:
            heapq.heappop(self._flows)
        if self._flows:
            left_s = max(0.0, self._flows[0][0] - self._virtual) * self._live / self._rate
            self._timer = self._loop.call_later(left_s, self._first_ends, context=self._context)

    def _first_ends(self) -> None:
        self._timer = None
        self._advance()
        first = heapq.heappop(self._flows)[2]  # cancelled ones were removed when the timer was set
        self._virtual = max(self._virtual, first.ends_at)
        done = first.done
        first.done = None
        assert done is not None
        self._live -= 1
        self.carried += first.nbytes
        self._arm()
        done()
