"""The watchers of a daemon: each is told its status at once, when it changes, and at an interval."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable

from swarmnode.base.errors import Unavailable, UsageError
from swarmnode.base.wire.report_pb2 import StatusReply

WATCHERS_MAX = 16  # guess: panels and tools of one machine's owner
EVERY_S = 1.0
EVERY_MIN_S = 0.1
EVERY_MAX_S = 3600.0
LOOK_S = 1.0  # guess: a change that no event tells of is seen so late
GAP_S = 0.25  # derived: between two looks, however many events come: a status takes 1 ms, with a thousand peers 10
WRITE_S = 10.0  # guess: a watcher that takes nothing for so long is dropped


class TooManyWatchers(Unavailable):
    """There are WATCHERS_MAX already."""


class SlowReader(Unavailable):
    """A watcher takes nothing."""


async def write(sending: Awaitable[object]) -> None:
    """Wait until one message of a stream is on its way. Raises SlowReader."""
    try:
        async with asyncio.timeout(WRITE_S):
            await sending
    except TimeoutError:
        raise SlowReader(f"nothing was read for {WRITE_S:g} s") from None


class Watchers:
    """The watchers of one daemon, whose status `status` makes."""

    def __init__(self, status: Callable[[], StatusReply]) -> None:
        self._status = status
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = asyncio.Event()
        self._stopping = False
        self.count = 0

    def wake(self) -> None:
        """Have all look at once: something happened. From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ring)

    def stop(self) -> None:
        """Let all watches end."""
        self._stopping = True
        self._ring()

    def _ring(self) -> None:
        rung = self._rung
        self._rung = asyncio.Event()
        rung.set()

    async def ticks(self, period_s: float = LOOK_S) -> AsyncGenerator[None, None]:
        """A watch: one item at once, then one whenever there may be something new, at least every `period_s`, until
        `stop`. Raises TooManyWatchers."""
        if self.count >= WATCHERS_MAX:
            raise TooManyWatchers(f"{WATCHERS_MAX} watch this daemon already: end one of them")
        self.count += 1
        self._loop = asyncio.get_running_loop()
        try:
            while not self._stopping:
                rung = self._rung
                yield
                await asyncio.sleep(min(GAP_S, period_s))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, period_s - GAP_S)):
                        await rung.wait()
        finally:
            self.count -= 1

    async def watch(self, every_s: float) -> AsyncGenerator[StatusReply, None]:
        """The status now, whenever its `face` changes, and every `every_s` (0: EVERY_S), until `stop`.

        Raises UsageError for another interval, TooManyWatchers, and what `status` raises."""
        every_s = every_s or EVERY_S
        if not EVERY_MIN_S <= every_s <= EVERY_MAX_S:
            raise UsageError(f"every_s: from {EVERY_MIN_S:g} to {EVERY_MAX_S:g} seconds")
        seen = None
        told_s = -math.inf
        period_s = every_s / math.ceil(every_s / LOOK_S)
        async with contextlib.aclosing(self.ticks(period_s)) as ticks:
            async for _ in ticks:
                status = self._status()
                now_s = asyncio.get_running_loop().time()
                if face(status) == seen and now_s < told_s + every_s:
                    continue
                seen = face(status)
                told_s = now_s
                yield status


def face(status: StatusReply) -> object:
    """The part of a status that changes seldom and is told at once: not the numbers that flow."""
    limits = status.limits
    return (
        *(status.run_id, status.state, status.stage, status.stages, status.round, status.loss_validation_samples),
        *(status.trains_nothing, status.page, status.clock, status.least_version, tuple(status.amendments)),
        tuple(wait.cause for wait in status.waits),
        *(limits.running, limits.reason, sorted(limits.limits.items())),
        sorted((peer.peer_id, peer.stage, peer.state, peer.banned) for peer in status.peers),
    )
