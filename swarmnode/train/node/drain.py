"""Leaving without loss: held work, the last exchange, the state, in this order, within the time left."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from swarmnode.base.errors import SwarmnodeError
from swarmnode.base.ids import PeerId, short
from swarmnode.base.ports import Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.liveness import SMALL_CALL_S
from swarmnode.net.membership.swarm import Swarm
from swarmnode.train.node.notice import Notice, Notices
from swarmnode.train.node.presence import Presence

GOODBYE_S = 0.5  # guess: part of the time left, for the record that says this node is gone
PARTLY = 0.5  # guess: share of the time left that finishing what is held gets at least


class DrainStep(enum.StrEnum):
    """The steps of leaving, in order."""

    FINISH = "finish"  # finish the held microbatches
    EXCHANGE = "exchange"  # give the update since the last round to another replica
    HANDOVER = "handover"  # give the state of the last replica to a successor
    ARCHIVE = "archive"  # give the slow weights of the last replica to the run's archive
    SAVE = "save"  # write the stage to this machine's disk


@dataclass(frozen=True, slots=True)
class DrainTask:
    """A step of leaving. `expected_s`: the seconds it should take; `undone` describes the work that is left."""

    step: DrainStep
    expected_s: float
    work: Callable[[], Awaitable[None]]
    undone: Callable[[], str]


def plan(expected_s: Sequence[float], left_s: float, partly: bool = False) -> tuple[tuple[float, ...], str]:
    """(seconds that each step may take, the reason), for steps in order. The last ones are left out if they do not fit.

    A step may use all slack, but not the time that the steps after it should take. `partly`: the first step is worth
    something when it is done in part, as finishing held work is; the others are not. Where time is short the first step
    must make do with half of it. (With 5 s left, held work took all of it, and 256 of 512 samples were not passed on,
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
class DrainReport:
    """The outcome of leaving. `cut` lists in words what was left undone."""

    notice: Notice
    seconds: float = 0.0
    held: int = 0  # microbatches in work when the notice came
    finished: int = 0  # of these
    unsent: int = 0  # samples trained here that no other replica had a part of, when the last exchange was due
    sent: int = 0  # of these
    successor: str = ""  # the node that keeps the last replica's state
    cut: list[str] = field(default_factory=list)

    def expect(self, *, unsent: int | None = None, held: int | None = None) -> None:
        """Note what is to be brought home: samples that are `unsent`, and the microbatches `held` at the beginning."""
        self.unsent = self.unsent if unsent is None else unsent
        self.held = self.held if held is None else held

    def count_finished(self, finished: int) -> str:
        """Note that `finished` microbatches ended since the beginning; other ones than the held may be among them.
        Returns what is left of these, in words."""
        self.finished = min(self.held, finished)
        return f"{self.held - self.finished} of {self.held} microbatches"

    def all_sent(self, successor: str = "") -> None:
        """Note that another node has all samples that were unsent; `successor`: and the stage's state."""
        self.sent = self.unsent
        self.successor = successor or self.successor

    @property
    def clean(self) -> bool:
        return not self.cut

    def text(self) -> str:
        """The outcome in words, to follow the reason why the node left."""
        parts = [f"{self.finished} of {self.held} microbatches finished"] if self.held else []
        parts += [f"{self.sent} of {self.unsent} samples learnt passed on"] if self.unsent else []
        parts += [f"the stage was handed to {short(PeerId(self.successor))}"] if self.successor else []
        return "".join(f"; {part}" for part in [*parts, *(f"not done: {cut}" for cut in self.cut)])

    def begin(self, left_s: float, telemetry: Telemetry) -> None:
        """Log what is to be handed on."""
        told = self.notice
        telemetry.event(
            "node.draining",
            source=told.source,
            reason=told.reason,
            left_s=round(left_s, 3),
            held=self.held,
            unsent=self.unsent,
        )

    def end(self, seconds: float, swarm: Swarm, telemetry: Telemetry) -> None:
        """Log the outcome after `seconds`, as the last event of the node. A successor that leaves, too, by its record
        in `swarm`, is none."""
        staying = {member.peer for member in swarm.members() if member.state == record_pb2.NODE_STATE_TRAINING}
        self.seconds = seconds
        self.successor = self.successor if self.successor in staying else ""
        telemetry.event(
            "node.left",
            held=self.held,
            finished=self.finished,
            unsent=self.unsent,
            sent=self.sent,
            successor=self.successor,
            cut=self.cut,
            seconds=round(self.seconds, 3),
        )


async def drain(report: DrainReport, tasks: Sequence[DrainTask], notices: Notices, telemetry: Telemetry) -> None:
    """Do `tasks` in order while time is left. A step that fails is reported as cut; its error is not raised.

    Saving keeps its time where that is at most half of all: when everybody leaves, nobody else has the stage. (Held
    work that took all its time, and some microseconds, left none to save, and the run began anew; simulated: weekend.)
    """
    loop = asyncio.get_running_loop()
    saving_s = sum(task.expected_s for task in tasks if task.step is DrainStep.SAVE)
    kept_s = saving_s if saving_s <= PARTLY * (notices.left_s() - GOODBYE_S) else 0.0
    for index, task in enumerate(tasks):
        left_s = notices.left_s() - GOODBYE_S
        partly = task.step is DrainStep.FINISH
        due = tasks[index:]
        if kept_s and task.step is not DrainStep.SAVE:
            left_s -= kept_s
            due = [later for later in due if later.step is not DrainStep.SAVE]
        limits, reason = plan([later.expected_s for later in due], left_s, partly)
        if not limits or limits[0] <= 0.0:
            _cut(report, task, reason, telemetry)
            continue
        started = loop.time()
        try:
            async with notices.limit(limits[0]):
                await task.work()
        except TimeoutError:
            _cut(report, task, f"not done in {loop.time() - started:.1f} s", telemetry)
        except SwarmnodeError as error:
            _cut(report, task, str(error), telemetry)
        else:
            telemetry.event("drain.done", step=task.step, seconds=round(loop.time() - started, 3))


async def goodbye(notices: Notices, presence: Presence, telemetry: Telemetry) -> None:
    """Announce that this node is gone, as far as there is time."""
    presence.own.set_state(record_pb2.NODE_STATE_LEFT, "told to go")
    try:
        async with notices.limit(SMALL_CALL_S):
            await presence.announce()
    except TimeoutError:
        telemetry.event("directory.failed", level="warning", reason="no time was left to say goodbye")


def _cut(report: DrainReport, task: DrainTask, reason: str, telemetry: Telemetry) -> None:
    undone = task.undone()
    report.cut.append(f"{task.step}: {undone} ({reason})")
    telemetry.event("drain.cut", level="warning", step=task.step, undone=undone, reason=reason)
