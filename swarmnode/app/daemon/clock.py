"""This process's clock: Unix time, counted on by a clock that nobody sets.

Records, passes and the directory live by wall clock time, so a node whose clock is set while it runs would lose its
swarm. So the time at the start is counted on by CLOCK_BOOTTIME, which also runs while the machine sleeps. Steps up to
STEP_S are followed at once: NTP makes them. A larger step of the machine's clock is followed if the peers' clocks are
nearer to it than to the count, or if no peer ever answered. Peers only decide between the two, so that no liar sets a
clock. A step that is not followed is told until the machine's clock is right again.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

from swarmnode.base.ports import Telemetry
from swarmnode.net.membership.record import CLOCK_SKEW_MAX_S

STEP_S = 1.0  # as chrony's `makestep 1.0 3`; ntpd steps by .128 s or more
_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS: CLOCK_MONOTONIC runs while it sleeps


class SystemClock:
    """ports.Clock of this machine. Goes on evenly whatever the machine's clock does, until `follow`."""

    def __init__(
        self,
        wall_s: Callable[[], float] = time.time,
        steady_s: Callable[[], float] = lambda: time.clock_gettime(_BOOT),
    ) -> None:
        self._wall_s = wall_s
        self._steady_s = steady_s
        self._ahead_s = wall_s() - steady_s()
        self.fault = ""  # the problem with the machine's clock, as told to its owner

    def unix_s(self) -> float:
        return self._steady_s() + self._ahead_s

    def step_s(self) -> float:
        """Seconds that the machine's clock is ahead of this one."""
        return self._wall_s() - self.unix_s()

    def follow(self) -> None:
        """Show what the machine's clock shows, and go on from there."""
        self._ahead_s = self._wall_s() - self._steady_s()


def judge(step_s: float, ahead_s: Sequence[float], met: bool) -> tuple[bool, str]:
    """Whether to follow the machine's clock, which is `step_s` ahead of the count, and the problem to tell, or "".

    `ahead_s`: how far peers' clocks are ahead of the count. `met`: whether a peer ever answered.
    """
    nearer = sum(abs(step_s - peer_s) < abs(peer_s) for peer_s in ahead_s)
    if abs(step_s) > STEP_S and (2 * nearer <= len(ahead_s) if ahead_s else met):
        way = "forward" if step_s > 0 else "back"
        by = f"this machine's clock went {way} {abs(step_s):.0f} s"
        return False, f"{by}; the node counts on from the time before: set the clock by NTP"
    off = sorted(step_s - peer_s for peer_s in ahead_s if abs(step_s - peer_s) > CLOCK_SKEW_MAX_S)
    if 2 * len(off) <= len(ahead_s):
        return True, ""
    off_s = statistics.median(off)
    way = "ahead of" if off_s > 0 else "behind"
    return True, f"this machine's clock is {abs(off_s):.0f} s {way} its peers' clocks: set it by NTP"


async def watch_clock(
    clock: SystemClock, ask: Callable[[], Awaitable[list[float]]], telemetry: Telemetry, period_s: float
) -> None:
    """Judge the machine's clock each `period_s`, and tell of what is wrong with it, until cancelled. `ask`: how far
    peers' clocks are ahead of ours."""
    met = False
    while True:
        await asyncio.sleep(period_s)
        ahead_s = await ask()
        met = met or bool(ahead_s)
        step_s = clock.step_s()
        follow, fault = judge(step_s, ahead_s, met)
        if follow:
            if abs(step_s) > STEP_S:
                telemetry.event("clock.followed", step_s=round(step_s, 1))
            clock.follow()
        if fault and not clock.fault:
            telemetry.event("clock.wrong", level="warning", reason=fault)
        elif clock.fault and not fault:
            telemetry.event("clock.right")
        clock.fault = fault
