"""`swarmnode quickstart` with real processes: from a recipe to a model that talks, with the help of another machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from swarmnode.app.local.child import Child, NodePlan, environment
from swarmnode.app.local.spawn import NODE
from tests.cli.test_starter import GOOD
from tests.support.processes import BOUND_S, HERE, end, until, worked

pytestmark = pytest.mark.nightly

JOIN = re.compile(r"other machines join with: swarmnode join (\S+)")
PAGE = re.compile(r"(http://127\.0\.0\.1:\d+/)#([0-9a-f]{32})")


class Quickstart:
    """A `swarmnode quickstart` process, and all that it said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, *words: str) -> Quickstart:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarmnode.app.cli.main", "quickstart", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(),
        )
        return cls(process)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(4096):
            self.said += data.decode(errors="replace")

    async def says(self, pattern: re.Pattern[str]) -> re.Match[str]:
        async with asyncio.timeout(BOUND_S):
            while (found := pattern.search(self.said)) is None:
                assert self.process.returncode is None, self.said
                await asyncio.sleep(0.1)
        return found

    async def end(self) -> int:
        """Its exit code after Ctrl-C, once it has read to the end."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(BOUND_S):
            await self._reading
            return await self.process.wait()


async def asked(page: re.Match[str], text: str) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": text}], "tokens": 8, "temperature": 0.0, "seed": 0}
    headers = {"Authorization": f"Bearer {page[2]}"}
    async with aiohttp.ClientSession() as client, client.post(f"{page[1]}v1/say", json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_a_recipe_becomes_a_model_that_talks_and_another_machine_helps(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    folder = tmp_path / "made"
    recipe.write_text(GOOD.replace("samples = 64", "samples = 600"))
    children: list[Child] = []
    begun = await Quickstart.start(str(recipe), str(folder), "--listen", "/ip4/0.0.0.0/tcp/0")
    try:
        invite = (await begun.says(JOIN))[1]
        plan = NodePlan("guest", tmp_path / "guest", folder / "run" / "manifest.signed", tmp_path / "cache")
        command = [*NODE, "join", invite, "--home", str(plan.home), "--notice", "none", "--name", "guest", *HERE]
        guest = await Child.start(plan, command)
        children.append(guest)
        await until(children, lambda: worked(guest), "a guest works")
        page = await begun.says(PAGE)
        code, text = await asked(page, "What is a stage?")
        assert code == 200, text
    finally:
        code = await begun.end()
        await end(children)
    assert code == 0, begun.said
    report = (folder / "REPORT.md").read_text()
    assert "> What is a stage?" in report and "swarmnode chat" in report
    names = [member["name"] for member in json.loads((folder / "report.json").read_text())["members"]]
    assert "guest" in names
    for verb in ("data tokenizer", "data make", "init", "manifest set", "up", "chat"):
        assert f"$ swarmnode {verb} " in begun.said, verb


async def test_the_same_command_goes_on_where_it_was(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    folder = tmp_path / "made"
    recipe.write_text(GOOD.replace("samples = 64", "samples = 1000000"))
    first = await Quickstart.start(str(recipe), str(folder), "--no-chat")
    await first.says(re.compile(r"nodes 2/2  samples (?:\d,|[1-9])\d\d"))
    assert await first.end() == 0, first.said
    assert "SIGINT: stopping all nodes" in first.said, "Ctrl-C ends the training, and the rest follows"
    assert (folder / "REPORT.md").is_file() and (folder / "model" / "model.safetensors").is_file()

    again = await Quickstart.start(str(recipe), str(folder), "--no-chat")
    async with asyncio.timeout(BOUND_S):
        assert await again.process.wait() == 0
    await again.end()
    assert "nothing is trained" in again.said and "$ swarmnode" not in again.said

    os.remove(folder / "model" / "model.safetensors")
    more = await Quickstart.start(str(recipe), str(folder), "--no-chat")
    resumed = await more.says(re.compile(r"resumes from \S+: ([\d,]+) samples"))
    assert int(resumed[1].replace(",", "")) >= 100
    await more.says(re.compile(r"nodes 2/2  samples [\d,]+  tokens/s [1-9]"))
    assert await more.end() == 0, more.said
