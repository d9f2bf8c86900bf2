"""The owner of a run of volunteers takes the model out: real processes, strangers' homes, no --checkpoints anywhere."""

import asyncio
import hashlib
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from swarmnode import manifest as manifests
from swarmnode.data.corpus import open_corpus
from swarmnode.local.child import Child, NodePlan, node_command
from swarmnode.local.model_scores import PROMPTS
from swarmnode.local.spawn import NODE
from swarmnode.manifest import PRESETS, SIGNED_FILE, Manifest
from tests.support.live_swarm import settled
from tests.support.processes import said

BOUND_S = 240.0
DECAYED = 1200  # samples; from there on the learning rate is 0, and what the swarm measures is of weights that stay


def run_of() -> Manifest:
    """Exact where a run usually is not: what travels is float32."""
    tiny = PRESETS["tiny"]
    return replace(
        tiny,
        inner=replace(tiny.inner, decay_samples=DECAYED, learning_rate_min_ratio=0.0),
        pipeline=replace(tiny.pipeline, boundary="fp32", validation_every_samples=256, rebalance_period_s=0.0),
        gossip=replace(tiny.gossip, codec="fp32", round_seconds_min=0.0),
    )


class Owners:
    """What the organiser runs, and three volunteers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        manifests.init(self.run, run_of())
        manifests.sign_folder(self.run)
        self.children: list[Child] = []

    async def start(self, name: str, *arguments: str) -> Child:
        home = self.folder / name
        home.mkdir()
        plan = NodePlan(name, home, self.run / SIGNED_FILE, self.folder / "cache", bootstrap=name == "bootstrap")
        where = ("--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(home), "--metrics-port", "0", "--name", name)
        command = [*NODE, *arguments, *where] if arguments else node_command(plan)
        child = await Child.start(plan, command)
        self.children.append(child)
        await self.until(lambda: child.ready is not None, f"{name} is ready")
        return child

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                for child in self.children:
                    await child.poll()
                    assert child.alive or child.told, f"{child.name} ended before {what}"
                await asyncio.sleep(0.2)

    async def stop(self) -> None:
        for child in reversed(self.children):
            child.signal(signal.SIGTERM)
        for child in self.children:
            if not await child.wait(60.0):
                child.kill()
            await child.wait(10.0)
            child.bury()


async def page(child: Child, path: str) -> Any:
    assert child.ready is not None
    async with aiohttp.ClientSession(child.ready.dashboard) as session, session.get(path) as answer:
        return await answer.json()


async def archived(owners: Owners, child: Child, fits: Callable[[dict[str, Any], dict[str, Any]], bool]) -> Any:
    """The newest entry on the page with its files, once it `fits` (entry, picture)."""
    found: dict[str, Any] = {}
    picture: dict[str, Any] = {"validations": []}
    try:
        async with asyncio.timeout(BOUND_S):
            while True:
                found = await page(child, "/api/v1/archive")
                picture = await page(child, "/api/v1/picture")
                if found["entries"] and fits(found["entries"][0], picture):
                    return found["entries"][0], picture
                assert all(each.alive or each.told for each in owners.children)
                await asyncio.sleep(0.3)
    except TimeoutError:
        measured = picture["validations"][-12:]
        raise AssertionError(f"no such checkpoint, with {measured}: {json.dumps(found)[:1500]}") from None


def loss_in_transformers(folder: Path, run: Manifest, cache: Path) -> float:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    corpus = open_corpus(run, None, cache)
    wanted = run.pipeline.validation_samples
    tokens = torch.from_numpy(corpus.validation_batch(0, wanted, wanted).tokens.astype("int64"))
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


async def test_the_owner_takes_the_model_out_of_a_run_of_volunteers(tmp_path: Path) -> None:
    owners = Owners(tmp_path)
    cache = ("--cache", str(tmp_path / "cache"))
    try:
        bootstrap = await owners.start("bootstrap")
        assert bootstrap.ready is not None
        here = bootstrap.ready.addresses[0]
        kept = ("coordinator", str(owners.run), "--peer", here, "--port", "0", "--archive-every", "3s")
        pushed = ("--push", str(tmp_path / "pushed"))
        backup = await owners.start("coordinator", *kept, *pushed)
        for index, stage in enumerate((0, 1, 1)):
            volunteer = ("join", here, "--run", str(tmp_path / "run" / SIGNED_FILE), *cache, "--notice", "none")
            await owners.start(f"volunteer-{index}", *volunteer, "--stage", str(stage), "--precision", "fp32")
        first, _ = await archived(owners, backup, lambda entry, seen: entry["samples"] > 0)

        # Killed at any moment: what it had is offered again, and it goes on.
        backup.kill(told="killed by the test")
        await backup.wait(10.0)
        (tmp_path / "again").mkdir()
        owners.children.remove(backup)
        backup.bury()
        backup = await owners.start("again-coordinator", *kept, *pushed)
        entry, picture = await archived(
            owners,
            backup,
            lambda entry, seen: (  # type: ignore[arg-type]
                entry["measured"] == "archive"  # type: ignore[return-value]
                and entry["samples"] > first["samples"]  # not what it had before
                and settled(seen["validations"], DECAYED + 512)
                and entry["samples"] > settled(seen["validations"], DECAYED + 512)
            ),
        )
        assert entry["liars"] == [] and max(entry["agree"]) == 1
        assert [one["prompt"] for one in entry["continuations"]] == list(PROMPTS), "of a run that lists none"
        reported = [loss for at, _, loss in picture["validations"] if at > DECAYED + 512][-1]

        model = tmp_path / "model"
        model.mkdir()
        assert backup.ready is not None
        async with aiohttp.ClientSession() as session:
            async with session.get(backup.ready.dashboard + entry["urls"][1:]) as answer:
                urls = (await answer.text()).split()
            assert len(urls) == len(entry["files"])
            for url, file in zip(urls, entry["files"], strict=True):
                async with session.get(url) as answer:
                    data = await answer.read()
                assert (len(data), hashlib.sha256(data).hexdigest()) == (file["nbytes"], file["sha256"])
                (model / file["name"]).write_bytes(data)
        loss = await asyncio.to_thread(loss_in_transformers, model, run_of(), tmp_path / "cache")
        assert abs(loss - entry["loss"]) < 1e-3, "as the archive measured"
        assert abs(loss - reported) < 1e-3, "as the swarm reported"

        # The verbs take the run's folder, and what was pushed, for the checkpoint.
        exported, error = await said("export", str(owners.run), "--out", str(tmp_path / "exported"))
        assert exported == 0, error
        assert abs(loss_in_transformers(tmp_path / "exported", run_of(), tmp_path / "cache") - loss) < 1e-2
        assert list((tmp_path / "pushed").rglob("checkpoint.json"))

        # The same at once, without a coordinator.
        out = tmp_path / "once"
        where = ("--out", str(out), "--home", str(tmp_path / "archivist"), "--listen", "/ip4/127.0.0.1/tcp/0")
        code, error = await said("archive", str(owners.run), "--peer", here, "--once", *where)
        assert code == 0, error
        assert abs(loss_in_transformers(next(out.glob("*/round-*")), run_of(), tmp_path / "cache") - loss) < 1e-2
    finally:
        await owners.stop()
