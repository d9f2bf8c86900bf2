"""Microbatches whose text is not here yet: a feeder waits briefly, then sets them aside and trains other text.

If the only member with a chunk is gone, a feeder continues with the chunks that are available.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.metrics import name
from swarmnode.ports import Telemetry

PATIENCE_S = 5.0  # guess: a chunk of 4 MiB takes .7 s at 50 Mbit/s
ASIDE_MAX = 512  # guess: pieces set aside, a block or more of every group


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """A microbatch's samples, of one block."""

    block: int
    indices: tuple[int, ...]


class Fetched(Protocol):
    """The part of pipeline.feeder.Samples that fetches text."""

    def here(self, indices: Sequence[int]) -> bool: ...

    def fetch(self, indices: Sequence[int]) -> Awaitable[None]: ...

    def in_vain(self, indices: Sequence[int]) -> Awaitable[None]: ...


class TextWait:
    """Waits for text, for one feeder. `stop` ends all waiting."""

    def __init__(self, samples: Fetched, telemetry: Telemetry, changed: Callable[[], None]) -> None:
        """`changed` is called when text has arrived."""
        self._samples = samples
        self._telemetry = telemetry
        self._changed = changed
        self._aside: dict[SampleSpan, asyncio.Task[None]] = {}
        self._stopped = asyncio.Event()
        self.come: deque[SampleSpan] = deque()
        """Pieces set aside whose text has arrived."""

    async def at_hand(self, tasks: asyncio.TaskGroup, piece: SampleSpan) -> bool:
        """True if the text of `piece` is here, after a short wait unless no member serves it. False: `piece` is set
        aside until its text arrives."""
        if self._samples.here(piece.indices):
            return True
        loop = asyncio.get_running_loop()
        begun = loop.time()
        fetching = tasks.create_task(self._fetch(piece))
        ends = {tasks.create_task(self._stop())}
        full = len(self._aside) >= ASIDE_MAX
        if not full:
            ends.add(tasks.create_task(self._in_vain(piece)))
        patience_s = None if full else PATIENCE_S
        await asyncio.wait({fetching, *ends}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        self._telemetry.count(name.DATA_WAIT_SECONDS, loop.time() - begun)
        if fetching.done():
            fetching.result()
            return True
        self._aside[piece] = fetching
        if self._stopped.is_set():
            self.stop()
        else:
            fetching.add_done_callback(lambda _: self._came(piece))
        return False

    def stop(self) -> None:
        """Nobody waits any more."""
        self._stopped.set()
        for fetching in self._aside.values():
            fetching.cancel()
        self._aside.clear()

    def _came(self, piece: SampleSpan) -> None:
        if self._aside.pop(piece, None) is not None:
            self.come.append(piece)
            self._changed()

    async def _fetch(self, piece: SampleSpan) -> None:
        await self._samples.fetch(piece.indices)

    async def _in_vain(self, piece: SampleSpan) -> None:
        await self._samples.in_vain(piece.indices)

    async def _stop(self) -> None:
        await self._stopped.wait()
