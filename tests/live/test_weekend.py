"""The weekend, with real processes: all leave and come back, one of them as a later version, the coordinator dies and
moves to another home, the owner amends twice and cuts the run into three stages, machines are added, the meeting point
is away; the run ends where an undisturbed one ends, its model is exported, and trains on in three stages and in two.
`make soak`: away for ten minutes, and three undisturbed runs."""

import asyncio
import json
import os
import re
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarmnode.app.daemon import ready_file
from tests.live.test_meeting_point import Run, run_of
from tests.live.test_versions import earlier_command, installed

pytestmark = pytest.mark.timeout(1800)  # eight minutes on two quiet cores
EARLIER = "d9c92553"  # the last commit before the package was cut into nine rooms; it knows all that `init` writes
SOAK = "SWARMNODE_SOAK" in os.environ
AWAY_S = 600.0 if SOAK else 10.0
SEEDS = (1, 2, 3) if SOAK else (1,)  # of undisturbed runs; the weekend has the first one's
SAMPLES = 3000
LOSSES = 1024  # samples before the end whose held-out losses count: each errs by some hundredths
NEAR = 0.05  # of single runs: three seeds of an undisturbed one differ by that


class Weekend(Run):
    """A coordinator that archives, and volunteers; `old`: an earlier version, for volunteers of that name."""

    old: Path | None = None

    def command(self, name: str, args: Sequence[str]) -> list[str]:
        command = super().command(name, args)
        return earlier_command(self.old, command) if self.old is not None and name == "old" else command

    async def coordinate(self, home: str, *more: str) -> None:
        """Start the coordinator of `home`; it is up, and its invite is what volunteers have."""
        before = self.text(f"{home}.out").count("/p2p/")
        where = ["--home", self.at(home), "--port", "0", "--archive-every", "20s"]
        await self.start(home, "coordinator", self.at("run"), *where, *more)
        await self.until(lambda: self.text(f"{home}.out").count("/p2p/") > before, f"the coordinator of {home} is up")
        (self.folder / "invite.txt").write_text(self.once("invite", "run", "--home", home))

    @property
    def homes(self) -> list[str]:
        return [path.parent.name for path in self.folder.glob("*/events.jsonl")]

    def measured(self) -> dict[int, float]:
        """Held-out losses by the samples of the run."""
        found = [told["fields"] for home in self.homes for told in self.events(home, "validation.done")]
        return {row["samples_total"]: row["loss"] for row in found}

    async def trained(self, samples: int) -> None:
        await self.until(lambda: max(self.measured(), default=0) >= samples, f"{samples} samples are trained")

    def loss(self) -> float:
        """The median of the last held-out losses."""
        found = self.measured()
        return statistics.median(found[at] for at in found if SAMPLES - LOSSES <= at <= SAMPLES + LOSSES)


def seeded(run: Run, seed: int) -> None:
    path = run.folder / "run" / "manifest.toml"
    path.write_text(re.sub(r"(?m)^seed = .*", f"seed = {seed}", path.read_text()))


async def undisturbed(folder: Path, seed: int) -> float:
    folder.mkdir()
    async with run_of(folder, "coordinator", Weekend) as run:
        seeded(run, seed)
        await run.coordinate("meet")
        for name in "abc":
            await run.join(name)
        await run.trained(SAMPLES)
        return run.loss()


async def test_a_weekend_ends_where_an_undisturbed_run_ends(tmp_path: Path) -> None:
    losses = [await undisturbed(tmp_path / f"calm-{seed}", seed) for seed in SEEDS]
    (tmp_path / "weekend").mkdir()
    async with run_of(tmp_path / "weekend", "coordinator", Weekend) as run:
        seeded(run, SEEDS[0])
        run.old = installed(EARLIER, tmp_path / "earlier", "swarmnode", "swarmnode_methods")
        where = ["--listen", f"/ip4/127.0.0.1/tcp/{run.port}"]
        await run.coordinate("meet", *where)
        for name, stage in (("a", "1"), ("b", "2"), ("old", "1")):
            await run.join(name, "--stage", stage)
        await run.until(lambda: all(run.events(name, "node.ready") for name in ("a", "b", "old")), "all serve")
        await run.trained(600)

        for name in ("a", "b", "old"):
            run.processes[name].send_signal(signal.SIGINT)
        for name in ("a", "b", "old"):
            process = run.processes.pop(name)
            await run.until(lambda process=process: process.returncode is not None, f"{name} has left")  # type: ignore[misc]
        run.old = None
        since = {name: run.lines(name) for name in ("a", "b", "old")}
        for name in ("a", "b", "old"):
            await run.join(name)
        await run.until(lambda: all(run.events(n, "node.ready", since[n]) for n in since), "all are back")
        assert not any(run.events(n, "state.fresh", since[n]) for n in since), "the run began anew"
        first = run.once("amend", "run", "inner.clip_norm=0.9", "--home", "meet")
        await run.trained(1200)

        await run.kill("meet")
        known = ready_file.read(run.folder / "a")
        assert known is not None
        await run.coordinate("moved", "--peer", known.addresses[0], *where)  # its old home is lost, and its key
        await run.join("c")
        await run.until(lambda: bool(run.events("c", "node.ready")), "one joins by the new coordinator")
        second = run.once("amend", "run", "inner.clip_norm=0.8", "--home", "moved")
        await run.trained(1800)
        volunteers = ("a", "b", "old", "c")
        cut = {name: run.lines(name) for name in volunteers}
        third = run.once("amend", "run", "pipeline.stages=3", "--home", "moved")
        new = "recovery.done"  # amendments that change a replica make it ready again, too
        await run.until(lambda: all(run.events(n, new, cut[n]) for n in volunteers), "all are in three stages")
        assert not any(run.events(n, "state.fresh", cut[n]) for n in volunteers), "a stage began anew at the cut"
        await run.trained(max(run.measured()) + 512)

        await run.kill("moved")
        before = max(run.measured())
        await run.trained(before + 256)
        await asyncio.sleep(AWAY_S)  # the outage that is tested
        await run.join("d")  # with an invite of the one that is away: it waits for it
        await run.coordinate("moved", *where)
        await run.until(lambda: bool(run.events("d", "node.ready")), "one joins when the meeting point is back")
        await run.trained(max(SAMPLES, max(run.measured()) + 512))

        for name in ("a", "b", "old", "c", "d"):
            assert not run.events(name, "state.fresh", since.get(name, 0)), f"{name} began the run anew"
            said = run.text(f"{name}/events.jsonl")
            assert "is forged" not in said and "peer.excluded" not in said, name
        listed = run.once("amend", "run", "--list")
        assert listed == first + second + third
        shown = json.loads(run.once("status", "--json", "--home", "d"))["amendments"]
        assert shown == [f"{line} (in force)" for line in listed.splitlines()], shown
        made = json.loads(run.once("export", "run", "--out", "model", "--json"))
        assert made["samples"] >= SAMPLES and (run.folder / "model" / "model.safetensors").exists()

        loss = run.loss()
        spread = max(NEAR, max(losses) - min(losses))
        print(f"undisturbed {losses}, weekend {loss}, exported {made['validation']} at {made['samples']} samples")
        assert loss - statistics.median(losses) <= spread, "something was lost"
        for name in list(run.processes):
            await run.kill(name)
        meeting = ready_file.read(run.folder / "moved")
        assert meeting is not None
        for stages, more in ((3, 1024), (2, 1536)):  # the archive was kept until now
            up = ["up", "--resume", "run/archive", "--nodes", str(stages), "--stages", str(stages)]
            samples = str(max(run.measured()) + more)
            found = json.loads(run.once(*up, "--samples", samples, "--out", f"of-{stages}", "--json"))
            assert found["samples"] >= int(samples) and found["loss_validation_last"] < loss + NEAR, found
            assert (found["run"] == meeting.run_id) == (stages == 3), "the run goes on as it was cut"
