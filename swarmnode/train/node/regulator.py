"""Keeps a node within its volunteer's limits: reads the machine, decides (limits.py), pauses and resumes, and tells."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from swarmnode.base.errors import Unavailable
from swarmnode.base.ports import Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.train.node.limits import (
    DAY_S,
    NOT_ASKED,
    AskedPause,
    Limits,
    LimitVerdict,
    SensorReading,
    change,
    decide,
    may_give,
)
from swarmnode.train.node.pause import PauseControl
from swarmnode.train.node.presence import Presence

PERIOD_S = 1.0  # between readings: half of limits.QUOTA_AHEAD_S

Sense = Callable[[Limits], Awaitable[SensorReading]]
"""The machine now; what none of the limits asks for need not be measured."""


@dataclass(eq=False)
class Regulator:
    """`change`, `pause` and `resume` are what people ask for; `run` makes it so. `changed` is told the limits at once
    and whenever they change: for rates, which the transport keeps. `asked` is a person's pause from before a
    restart; `keep` is told each new one."""

    limits: Limits
    sense: Sense
    pause_control: PauseControl
    presence: Presence
    telemetry: Telemetry
    changed: Callable[[Limits], None] = lambda limits: None
    period_s: float = PERIOD_S
    asked: AskedPause = NOT_ASKED
    keep: Callable[[AskedPause], None] = lambda asked: None

    def __post_init__(self) -> None:
        self.reading: SensorReading | None = None
        self.verdict = LimitVerdict(True, None, "starting")
        self._now = asyncio.Event()
        self.told = set[str]()  # names of the limits that were changed since the start
        self._standing_back = False
        self.changed(self.limits)

    def change(self, changed: Mapping[str, str]) -> None:
        """Set or lift limits, as written on the command line. Raises ValueError, and changes nothing then."""
        self.limits = change(self.limits, changed)
        self.told |= changed.keys()
        self.changed(self.limits)
        self.telemetry.event("limits.changed", changed=dict(changed))
        self._now.set()

    def pause(self, for_s: float, reason: str) -> None:
        """Pause for so long; 0: until `resume`. Raises Unavailable before the machine was read for the first time."""
        if self.reading is None:
            raise Unavailable("this node is still starting: ask again in some seconds")
        self._ask(AskedPause(self.reading.unix_s + for_s if for_s > 0 else math.inf, reason))

    def resume(self) -> None:
        """Take back a person's pause. Limits still hold."""
        self._ask(NOT_ASKED)

    def _ask(self, asked: AskedPause) -> None:
        self.asked = asked
        if self.reading is not None:
            self._decide(self.reading)
        self.keep(asked)

    def stand_back(self) -> None:
        """Leave the node as it is from now on: it is finishing."""
        self._standing_back = True

    async def run(self) -> None:
        """Read, decide and act, until cancelled."""
        while True:
            self._now.clear()
            await self.once()
            try:
                async with asyncio.timeout(self.period_s):
                    await self._now.wait()
            except TimeoutError:
                pass

    async def once(self) -> None:
        """Take one reading and act on it."""
        await self.look()
        if self._standing_back:
            return
        await self.pause_control.apply(self.verdict.running, self.verdict.reason)

    async def look(self) -> None:
        """Take one reading and decide, as for an answer on limits that were just changed."""
        reading = await self.sense(self.limits)
        self._decide(dataclasses.replace(reading, running=self.verdict.running))

    def _decide(self, reading: SensorReading) -> None:
        before = self.verdict
        self.reading = dataclasses.replace(reading, asked=self.asked)
        self.verdict = decide(self.limits, self.reading)
        granted = allowance(self.limits, self.verdict, reading.unix_s)
        self.presence.note_of_machine(allowance=granted, gives=may_give(self.limits, reading))
        if self.verdict.running != before.running:
            self.telemetry.event("limits.verdict", running=self.verdict.running, reason=self.verdict.reason)
            self._now.set()


def allowance(limits: Limits, verdict: LimitVerdict, now_unix_s: float) -> record_pb2.Allowance | None:
    """The limits and the next pause or resumption to announce to other nodes; None without any."""
    until = verdict.until_unix_s
    known = int(until) if until is not None and now_unix_s < until < now_unix_s + 400 * DAY_S else 0
    granted = record_pb2.Allowance(
        up_bps=int(limits.max_up_bps or 0),
        down_bps=int(limits.max_down_bps or 0),
        pauses_unix_s=known if verdict.running else 0,
        resumes_unix_s=0 if verdict.running else known,
    )
    return granted if granted.ByteSize() else None
