"""What judges peers has one door: a run that judges nobody does not import it."""

import subprocess
import sys
from pathlib import Path

from swarmnode.net.membership.judge import Judge, Trusting
from swarmnode.trust.stage_judge import StageJudge

LIFE = """
import asyncio, sys
from dataclasses import replace
import swarmnode.app.daemon.process
assert not [name for name in sys.modules if name.startswith("swarmnode.trust")], "a node's process"
from swarmsim.virtual_time import VirtualLoop
from tests.support.village import VillageLoop, manifest, told, village

async def main():
    run = manifest(stages=2, acceptance="all")
    async with village(replace(run, pipeline=replace(run.pipeline, audit_share=0.0)), stages=(0, 1, 1)) as v:
        await v.heard(256)
        joiner = v.add(1)
        await v.until(lambda: bool(told(joiner, "exchange.paired")), "a newcomer takes a state and meets somebody")
        await v.trains(64, "and all go on")

VillageLoop().run(main())
print(*sorted(name for name in sys.modules if name.startswith("swarmnode.trust")))
"""


def test_a_run_that_judges_nobody_trains_without_importing_what_judges() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LIFE], capture_output=True, text=True, timeout=300, cwd=root, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr[-2000:]


def test_both_judges_answer_all_that_is_asked() -> None:
    asked = {name for name in vars(Judge) if not name.startswith("_")}
    for judge in (Trusting, StageJudge):
        assert all(callable(getattr(judge, name)) for name in asked)
