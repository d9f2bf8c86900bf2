"""Real processes: the owner cuts a run of two stages into three; all members save, start again at once, and go on with
the same run, invite and history."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from swarmnode.daemon import ready_file
from tests.live.test_meeting_point import Run, run_of

SAMPLES = 1500
LAST = 4  # held-out losses whose median counts


def measured(run: Run, homes: str, since: dict[str, int] | None = None) -> list[tuple[int, float]]:
    """(samples, held-out loss) as all measured them."""
    told = [row["fields"] for home in homes for row in run.events(home, "validation.done", (since or {}).get(home, 0))]
    return sorted((row["samples_total"], row["loss"]) for row in told)


async def test_a_run_goes_on_in_three_stages(tmp_path: Path) -> None:
    async with run_of(tmp_path, "coordinator") as run:
        where = ["--home", run.at("meet"), "--port", "0", "--listen", f"/ip4/127.0.0.1/tcp/{run.port}"]
        await run.start("meet", "coordinator", run.at("run"), *where, "--archive-every", "20s")
        await run.until(lambda: "/p2p/" in run.text("meet.out"), "the coordinator is up")
        (tmp_path / "invite.txt").write_text(run.once("invite", "run", "--home", "meet"))
        for name in "abc":
            await run.join(name)
        await run.until(lambda: max(measured(run, "abc"), default=(0, 0.0))[0] >= SAMPLES, f"{SAMPLES} samples")
        since = {name: run.lines(name) for name in "abc"}
        homes = [ready_file.read(tmp_path / name) for name in "abc"]
        before = measured(run, "abc")[-LAST:]
        made = run.once("amend", "run", "pipeline.stages=3", "--home", "meet")
        assert "pipeline.stages 2 -> 3" in made, made

        def ready(name: str) -> bool:
            return len(run.events(name, "node.ready", since[name])) > 0 and "starts again" in run.text(f"{name}.err")

        await run.until(lambda: all(map(ready, "abc")), "all serve in the new stages")
        done = [run.events(name, "recovery.done", since[name])[0]["fields"] for name in "abc"]
        for name, known in zip("abc", homes, strict=True):
            now = ready_file.read(tmp_path / name)
            assert now is not None and known is not None and now.addresses == known.addresses, "it keeps its port"
        print(made, [(row["stage"], row["method"], row["behind"], row["reason"]) for row in done])
        await run.until(lambda: len(measured(run, "abc", since)) >= 2 * LAST, "held-out losses")
        await run.join("d")  # with the invite of before
        await run.until(lambda: bool(run.events("d", "node.ready")), "a joiner serves")
        after = [row for row in measured(run, "abc", since) if row[0] > before[-1][0]]
        print("before", before, "after", after)
        at = int(made.split("from round ")[1].split(":")[0])
        status = [json.loads(run.once("status", "--json", "--home", name)) for name in "abcd"]
        assert {row["stages"] for row in status} == {3} and {row["stage"] for row in status[:3]} == {0, 1, 2}
        meeting = ready_file.read(tmp_path / "meet")
        assert meeting is not None and {row["run_id"] for row in status} == {meeting.run_id}
        assert not any(run.events(name, "state.fresh", since.get(name, 0)) for name in "abcd")
        assert not any("is forged" in run.text(f"{name}/events.jsonl") for name in "abcd")
        last = statistics.median(loss for samples, loss in after if samples <= 64 * at)
        first = statistics.median([loss for samples, loss in after if samples > 64 * at][:LAST])
        assert first < last + 0.02, (last, first)
        assert status[0]["amendments"] == [f"{made.strip()} (in force)"], status[0]
        model = json.loads(run.once("export", "run", "--out", "model", "--json"))
        assert model["samples"] >= 64 * at and (tmp_path / "model" / "model.safetensors").exists()
