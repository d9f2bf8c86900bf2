"""What leaving is made of, and what of it is cut when time is short."""

import asyncio

from hypothesis import strategies as st

from swarmnode.train.node.drain import DrainReport, DrainStep, DrainTask, drain, plan
from swarmnode.train.node.notice import Notice, NoticeKind, Notices
from swarmsim.trace import DecisionTrace, SimTelemetry

SECONDS = st.integers(0, 1000).map(lambda n: n / 8)


def test_the_last_steps_are_cut_where_time_is_short() -> None:
    limits, reason = plan([1.0, 2.0, 4.0], 4.0)
    assert limits == (2.0, 3.0) and "the last 1 cut" in reason


def test_held_work_leaves_time_for_what_takes_little() -> None:
    limits, _ = plan([10.0, 0.5, 0.1], 4.0, True)
    assert limits[0] == 3.4 and len(limits) == 3


async def test_steps_that_take_all_their_time_leave_that_of_saving() -> None:
    notices = Notices()
    notice = Notice("signal", NoticeKind.LEAVE, 3.0, "SIGTERM")
    done = list[str]()
    notices.give(notice)

    async def hang() -> None:
        await asyncio.sleep(60.0)

    async def save() -> None:
        await asyncio.sleep(0.1)
        done.append("saved")

    steps = ((DrainStep.FINISH, 0.1, hang), (DrainStep.EXCHANGE, 0.1, hang), (DrainStep.SAVE, 1.2, save))
    tasks = [DrainTask(step, seconds, work, lambda: "it") for step, seconds, work in steps]
    report = DrainReport(notice)
    telemetry = SimTelemetry(DecisionTrace(asyncio.get_running_loop().time), "n0")
    await drain(report, tasks, notices, telemetry)
    assert done == ["saved"] and len(report.cut) == 2, report.cut
