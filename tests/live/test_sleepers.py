"""Three machines with other hours each, in two stages, through a day whose clock runs fast: real processes."""

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.live.test_meeting_point import Run, run_of

PACE = 120.0  # seconds of the day in one: an hour takes 30 s
DAY_S = 86_400


def hour_of_day(unix_s: float) -> float:
    """The hour of the machines' day, which goes on PACE times as fast from midnight in UTC."""
    return (PACE * (unix_s % DAY_S)) % DAY_S / 3600


def span(begin: float, end: float) -> str:
    """Hours as people write them: "22:30-07:15"."""
    return "-".join(f"{int(hour % 24):02}:{int(hour * 60 % 60):02}" for hour in (begin, end))


def unix_s(told: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(str(told["ts"])).timestamp()


@pytest.mark.nightly
async def test_a_snooze_of_the_only_machine_of_a_stage_stops_nobody(tmp_path: Path) -> None:
    async with run_of(tmp_path, "coordinator", Run) as run:
        await run.meet()
        (tmp_path / "invite.txt").write_text(run.once("invite", "run", "--home", "meet"))
        names = ("a", "b", "c")
        for name in names:
            await run.join(name)
        await run.until(lambda: all(run.events(name, "node.ready") for name in names), "all serve")
        await run.until(lambda: any(len(run.losses(name)) > 4 for name in names), "the run trains")
        stages = {name: run.events(name, "node.ready")[-1]["fields"]["serves"] for name in names}
        sleeper = next(name for name in names if [*stages.values()].count(stages[name]) == 1)
        others = [name for name in names if name != sleeper]
        since = {name: run.lines(name) for name in names}
        run.once("snooze", "2h", "--home", sleeper)
        await run.until(lambda: any(run.events(n, "recovery.done", since[n]) for n in others), "one takes the stage")
        await run.until(lambda: sum(len(run.losses(n, since[n])) for n in others) > 3, "the run goes on")
        assert run.events(sleeper, "node.paused", since[sleeper]) and not run.events(sleeper, "node.resumed")


@pytest.mark.skipif("SWARMNODE_SOAK" not in os.environ, reason="a quarter of an hour: make soak")
@pytest.mark.timeout(1800)
async def test_a_day_of_three_sleepers_goes_on_wherever_one_machine_a_stage_is_awake(tmp_path: Path) -> None:
    async with run_of(tmp_path, "coordinator", Run) as run:
        await run.meet()
        (tmp_path / "invite.txt").write_text(run.once("invite", "run", "--home", "meet"))
        names = ("a", "b", "c")
        for name in names:
            await run.join(name, "--pace", str(PACE), TZ="UTC")
        await run.until(lambda: all(run.events(name, "node.ready") for name in names), "all serve")
        await run.until(lambda: any(len(run.losses(name)) > 4 for name in names), "the run trains")
        now = hour_of_day(time.time())
        for index, name in enumerate(names):
            asleep = now + 2 + 7 * index
            run.once("limit", "--hours", span(asleep + 6, asleep), "--home", name)
        since = {name: run.lines(name) for name in names}
        for name in names:
            await run.until(lambda name=name: bool(run.events(name, "node.paused", since[name])), f"{name} sleeps")  # type: ignore[misc]
            asleep_s = time.time()

            def trained(name: str = name, asleep_s: float = asleep_s) -> bool:
                """Whether a loss was measured in the pause of `name`, of microbatches begun in it."""
                told = [one for other in names if other != name for one in run.events(other, "validation.done")]
                return sum(unix_s(one) > asleep_s for one in told) > 1

            await run.until(trained, f"the others go on while {name} sleeps")
            assert not run.events(name, "node.resumed", since[name]), f"{name} still slept when they did"
            await run.until(lambda name=name: bool(run.events(name, "node.resumed", since[name])), f"{name} wakes")  # type: ignore[misc]
        for name in names:
            assert not run.events(name, "state.fresh", since[name]), f"{name} began a stage anew"
            assert "is forged" not in run.text(f"{name}/events.jsonl")
