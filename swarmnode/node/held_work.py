"""The microbatches in work at one node: those of its stage's backlog, and those that it feeds."""

from __future__ import annotations

import asyncio

from swarmnode.pipeline.backlog import Backlog
from swarmnode.pipeline.feeder import Feeder

LOOK_S = 0.05  # guess: between two looks at a feeder that holds


class HeldWork:
    """Counts, stops and finishes the microbatches of one stage, or of a node that only feeds (`backlog` None)."""

    def __init__(self, backlog: Backlog | None, feeder: Feeder | None = None) -> None:
        self._backlog = backlog
        self._feeder = feeder
        self._refusing: str | None = None

    def feed_by(self, feeder: Feeder) -> None:
        """Include the microbatches of `feeder` from now on."""
        self._feeder = feeder
        if self._refusing is not None:
            feeder.hold(True)

    @property
    def seconds(self) -> float:
        """Smoothed seconds that a microbatch takes from here, there and back."""
        if self._backlog is not None:
            return self._backlog.seconds
        return 0.0 if self._feeder is None else self._feeder.seconds

    @property
    def held(self) -> int:
        """Microbatches in work here."""
        return len(self._backlog or ()) + (self._feeder.under_way if self._feeder is not None else 0)

    @property
    def finished(self) -> int:
        """Microbatches that came to their end here, ever."""
        here = 0 if self._backlog is None else self._backlog.finished
        return here + (self._feeder.returned if self._feeder is not None else 0)

    def refuse(self, reason: str) -> None:
        """Begin nothing new, for good."""
        self._refuse(reason)
        if self._feeder is not None:
            self._feeder.stop()

    def _refuse(self, reason: str | None) -> None:
        self._refusing = reason
        if self._backlog is not None:
            self._backlog.refuse(reason)

    def hold(self, reason: str | None) -> None:
        """Begin nothing new for `reason`; None: begin again."""
        self._refuse(reason)
        if self._feeder is not None:
            self._feeder.hold(reason is not None)

    async def finish(self) -> None:
        """After `refuse`: wait until nothing is held any more."""
        if self._feeder is not None:
            await self._feeder.drain()
        await self._emptied()

    async def emptied(self) -> None:
        """After `hold`: wait until nothing is held any more."""
        await self._emptied()
        while self._feeder is not None and self._feeder.under_way:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def _emptied(self) -> None:
        if self._backlog is not None:
            await self._backlog.empty()
