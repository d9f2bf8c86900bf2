"""Leaving without losing anything: held work, the last exchange, the state, in this order, within what time is left."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from swarmnode.errors import SwarmnodeError
from swarmnode.ids import PeerId, short
from swarmnode.node.notice import Notice, Notices
from swarmnode.node.presence import Presence
from swarmnode.ports import Telemetry
from swarmnode.wire import record_pb2

GOODBYE_S = 0.5  # guess: of the time left, for the record that says we are gone
PARTLY = 0.5  # guess: share of the time left that finishing what is held gets at least
GOODBYE_MAX_S = 5.0  # guess: a directory that stores nothing by then may learn of it by our record's end


class Step(enum.StrEnum):
    """What leaving is made of, in the order of design section 8."""

    FINISH = "finish"  # the microbatches held
    EXCHANGE = "exchange"  # what was learnt since the last round, given to another replica
    HANDOVER = "handover"  # the last replica's state, given to a successor
    SAVE = "save"  # the stage, on this machine's disk


@dataclass(frozen=True, slots=True)
class Task:
    """One step of this leaving: what it is expected to take, and the doing. `cut` says how much was left undone."""

    step: Step
    expected_s: float
    work: Callable[[], Awaitable[None]]
    undone: Callable[[], str]


def plan(expected_s: Sequence[float], left_s: float, partly: bool = False) -> tuple[tuple[float, ...], str]:
    """(seconds each step may take, the reason), for steps in order of which the last are left out that do not fit.

    A step may use all the slack there is, but not what the steps after it are expected to take. `partly`: the first is
    worth something when it is done in part, as finishing what is held is, and the others are not: where time is short
    it must make do with half. (With 5 s, held work took all of it and 256 of 512 samples learnt were not passed on,
    which takes 0.1 s; simulated.)
    """
    kept = len(expected_s)
    if partly and expected_s:
        expected_s = [min(expected_s[0], PARTLY * max(0.0, left_s)), *expected_s[1:]]
    while kept and sum(expected_s[:kept]) > left_s:
        kept -= 1
    slack = left_s - sum(expected_s[:kept])
    needed = f"{sum(expected_s):.1f} s are needed and {left_s:.1f} s left"
    if kept == len(expected_s):
        return tuple(seconds + slack for seconds in expected_s), needed
    if kept == 0 and expected_s:
        return (left_s,), f"{needed}: only the first is tried"
    return tuple(seconds + slack for seconds in expected_s[:kept]), f"{needed}: the last {len(expected_s) - kept} cut"


@dataclass(slots=True)
class Farewell:
    """How this node left. `cut` is what was left undone, in words; empty: nothing was."""

    notice: Notice
    seconds: float = 0.0
    held: int = 0  # microbatches in work when told
    finished: int = 0  # of these
    unsent: int = 0  # samples trained here that no other replica had a part of, when the last exchange was due
    sent: int = 0  # of these
    heir: str = ""  # who has the last replica's state
    cut: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.cut

    def text(self) -> str:
        """For a person, after why it left."""
        parts = [f"{self.finished} of {self.held} microbatches finished"] if self.held else []
        parts += [f"{self.sent} of {self.unsent} samples learnt passed on"] if self.unsent else []
        parts += [f"the stage is with {short(PeerId(self.heir))}"] if self.heir else []
        return "".join(f"; {part}" for part in [*parts, *(f"cut {cut}" for cut in self.cut)])

    def begin(self, left_s: float, telemetry: Telemetry) -> None:
        """What there is to bring home, in the log."""
        told = self.notice
        telemetry.event(
            "node.draining",
            source=told.source,
            reason=told.reason,
            left_s=round(left_s, 3),
            held=self.held,
            unsent=self.unsent,
        )

    def tell(self, telemetry: Telemetry) -> None:
        """The last line of the log."""
        telemetry.event(
            "node.left",
            held=self.held,
            finished=self.finished,
            unsent=self.unsent,
            sent=self.sent,
            heir=self.heir,
            cut=self.cut,
            seconds=round(self.seconds, 3),
        )


async def drain(
    farewell: Farewell, tasks: Sequence[Task], notices: Notices, presence: Presence, telemetry: Telemetry
) -> None:
    """Do `tasks` in order while time is left, then say goodbye. Never raises what a step fails with: it is cut."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for index, task in enumerate(tasks):
        left_s, partly = notices.left_s() - GOODBYE_S, task.step is Step.FINISH
        limits, reason = plan([later.expected_s for later in tasks[index:]], left_s, partly)
        if not limits or limits[0] <= 0.0:
            _cut(farewell, task, reason, telemetry)
            continue
        started = loop.time()
        try:
            async with notices.limit(limits[0]):
                await task.work()
        except TimeoutError:
            _cut(farewell, task, f"not done in {loop.time() - started:.1f} s", telemetry)
        except SwarmnodeError as error:
            _cut(farewell, task, str(error), telemetry)
        else:
            telemetry.event("drain.done", step=task.step, seconds=round(loop.time() - started, 3))
    await goodbye(notices, presence, telemetry)
    farewell.seconds = loop.time() - begun


async def goodbye(notices: Notices, presence: Presence, telemetry: Telemetry) -> None:
    """Tell everybody that this node is gone, as far as there is time."""
    presence.set_state(record_pb2.NODE_STATE_LEFT, "told to go")
    try:
        async with notices.limit(GOODBYE_MAX_S):
            await presence.announce()
    except TimeoutError:
        telemetry.event("directory.failed", level="warning", reason="no time was left to say goodbye")


def _cut(farewell: Farewell, task: Task, reason: str, telemetry: Telemetry) -> None:
    undone = task.undone()
    farewell.cut.append(f"{task.step}: {undone} ({reason})")
    telemetry.event("drain.cut", level="warning", step=task.step, undone=undone, reason=reason)
