"""When an archive copies the run, in virtual time: early and often, then every ten minutes, at once when asked."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swarmnode.app.machine.run_archive import RETRY_S, Archive, ArchivePlan
from swarmnode.base.errors import Unavailable
from swarmnode.keep.recovery.archive import ArchiveEntry, ArchiveNotes
from swarmnode.keep.recovery.checkpoint import Checkpoint
from swarmsim.virtual_time import run

MINUTE_S = 60.0
HOUR_S = 3600.0
NOON_S = 1.9e9


class Scheduled(Archive):
    """Notes when it copies. `trains_s`: the run trains from then on; `fails`: so many copies are refused first;
    `kept`: ages in seconds of the checkpoints that an earlier process left; `took_s`: a copy takes so long."""

    def __init__(
        self,
        *,
        trains_s: float = 0.0,
        fails: int = 0,
        kept: Sequence[float] = (),
        every_s: float = HOUR_S,
        took_s: float = 0.0,
    ):
        self.copied: list[float] = []
        self.fails = fails
        self.took_s = took_s

        async def trains() -> None:
            if asyncio.get_running_loop().time() - self.start_s < trains_s:
                raise Unavailable("nothing is trained yet")

        loop = asyncio.get_running_loop()
        self.start_s = loop.time()
        clock = SimpleNamespace(unix_s=lambda: NOON_S + loop.time() - self.start_s)
        sources: Any = SimpleNamespace(trains=trains, clock=clock, scratch=Path("none"))
        nothing: Any = None
        manifest: Any = SimpleNamespace(pipeline=SimpleNamespace(stages=1))
        origin: Any = SimpleNamespace(run_id="run")
        plan = ArchivePlan(Path("none"), every_s, 2)
        super().__init__(manifest, origin, plan, sources, nothing, nothing, nothing)
        for round_index, age_s in enumerate(sorted(kept, reverse=True)):
            self._add(round_index, NOON_S - age_s)

    def _add(self, round_index: int, unix_s: float) -> ArchiveEntry:
        label = f"round-{round_index:09d}"
        checkpoint = Checkpoint(self.origin, label, round_index, 64 * round_index, {}, ())
        entry = self.catalog.entries[label] = ArchiveEntry(checkpoint, ArchiveNotes(unix_s, 2.0, "archive"))
        return entry

    async def _tidy(self) -> None:
        pass

    async def once(self) -> ArchiveEntry:
        now_s = asyncio.get_running_loop().time() - self.start_s
        if self.fails:
            self.fails -= 1
            raise Unavailable("busy", 40.0)
        self.copied.append(round(now_s + self.took_s, 3))
        self._current_s = self.start_s + now_s
        await asyncio.sleep(self.took_s)
        return self._add(1000 + len(self.copied), NOON_S + now_s)


def copies(for_s: float, asks: Sequence[float] = (), **how: Any) -> list[float]:
    """Times of the copies within `for_s`, with somebody who asks at each of `asks`."""

    async def live() -> list[float]:
        archive = Scheduled(**how)

        async def ask() -> None:
            for at_s in asks:
                await asyncio.sleep(archive.start_s + at_s - asyncio.get_running_loop().time())
                archive.ask(MINUTE_S)
            await asyncio.Event().wait()

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(archive.run())
                tasks.create_task(ask())
        return archive.copied

    return run(live())


def minutes(found: Sequence[float]) -> list[float]:
    return [round(at_s / MINUTE_S, 2) for at_s in found]


def test_a_new_run_is_copied_after_2_5_10_minutes_then_every_ten() -> None:
    assert minutes(copies(55 * MINUTE_S)) == [2, 5, 10, 20, 30, 40, 50]


def test_copies_that_take_long_are_made_rarely_but_within_the_period_asked_for() -> None:
    assert minutes(copies(3.5 * HOUR_S, took_s=100.0)) == [3.67, 6.67, 11.67, 46.67, 81.67, 116.67, 151.67, 186.67]
    assert minutes(copies(3.5 * HOUR_S, took_s=400.0))[-2:] == [83.33, 150], "an hour after the one before ended"


def test_the_minutes_count_from_when_the_run_trains() -> None:
    assert minutes(copies(1.6 * HOUR_S, trains_s=HOUR_S)) == [62, 65, 70, 80, 90]


def test_a_restarted_archive_goes_on_where_its_checkpoints_say_it_was() -> None:
    assert minutes(copies(25 * MINUTE_S, kept=(4 * MINUTE_S, 80 * MINUTE_S))) == [6, 16]  # every ten, 4 minutes ago
    assert minutes(copies(HOUR_S, kept=(3 * HOUR_S,)))[:1] == [0]  # overdue: at once
    assert minutes(copies(20 * MINUTE_S, kept=(MINUTE_S,))) == [2, 7, 17]  # 3 minutes old when it was killed
    assert minutes(copies(10 * MINUTE_S, kept=(-HOUR_S,)))[:1] == [3]  # written by a clock that was ahead


def test_a_shorter_period_is_kept_from_the_beginning() -> None:
    assert copies(10.0, every_s=3.0) == [3.0, 6.0, 9.0]
    assert minutes(copies(21 * MINUTE_S, every_s=5 * MINUTE_S)) == [2, 5, 10, 15, 20]


def test_it_copies_at_once_when_asked_unless_it_has_just_done_so() -> None:
    assert minutes(copies(30.1 * MINUTE_S, asks=[15 * MINUTE_S, 15.5 * MINUTE_S])) == [2, 5, 10, 15, 25]
    assert minutes(copies(6 * MINUTE_S, asks=[90.0])) == [1.5, 5], "the copy after two minutes is not made again"


def test_repeated_requests_do_not_hurry_busy_donors() -> None:
    asks = [float(second) for second in range(10, 120)]
    assert copies(110.0, asks=asks, fails=2) == [10.0 + 2 * 40.0]
    assert RETRY_S < 40.0
