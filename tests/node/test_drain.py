"""What leaving is made of, and what of it is cut when time is short."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.node.drain import DrainReport, DrainStep, DrainTask, drain, plan
from swarmnode.node.notice import Notice, NoticeKind, Notices
from swarmsim.trace import DecisionTrace, SimTelemetry

SECONDS = st.integers(0, 1000).map(lambda n: n / 8)


def twin(expected_s: list[float], left_s: float) -> int:
    """How many steps fit, counted from the front."""
    fit = 0
    for count in range(len(expected_s) + 1):
        if sum(expected_s[:count]) <= left_s:
            fit = count
    return fit


@given(st.lists(SECONDS, max_size=5), SECONDS, st.booleans())
def test_drain_steps_beyond_the_time_are_cut_from_the_end(expected_s: list[float], left_s: float, partly: bool) -> None:
    limits, reason = plan(expected_s, left_s, partly)
    if partly and expected_s:
        expected_s = [min(expected_s[0], left_s / 2), *expected_s[1:]]
    fit = twin(expected_s, left_s)
    assert len(limits) == (max(1, fit) if expected_s else 0), "the first is tried whatever it may take"
    for index, limit in enumerate(limits[:fit]):
        assert limit >= expected_s[index]
        later = sum(expected_s[index + 1 : fit])
        done = sum(expected_s[:index])
        assert done + limit + later <= left_s + 1e-9, "a step may not use what later ones need"
    assert (fit == len(expected_s)) is ("cut" not in reason and "only" not in reason)


def test_held_work_leaves_time_for_what_takes_little() -> None:
    limits, _ = plan([10.0, 0.5, 0.1], 4.0, True)
    assert limits[0] == 3.4 and len(limits) == 3


async def test_steps_that_take_all_their_time_leave_that_of_saving() -> None:
    notices, notice, done = Notices(), Notice("signal", NoticeKind.LEAVE, 3.0, "SIGTERM"), list[str]()
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
