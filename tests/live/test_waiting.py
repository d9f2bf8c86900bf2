"""Real machines say on their panels what they wait for: causes are brought about, and read from `swarmnode status`."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.live.test_meeting_point import COMMAND, Run, run_of

TOLD_S = 30.0  # printed beside what it took: whoever waits is to be told within it
READ_S = 1.0


class Panels(Run):
    """A run whose panels are read."""

    async def panel(self, name: str) -> str:
        """What `swarmnode status` shows of `name`, on one line; "" while it does not answer."""
        command = [*COMMAND, "status", "--home", self.at(name)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        return " ".join(done.stdout.split())

    async def shows(self, name: str, words: str, *, gone: bool = False) -> None:
        """Returns once the panel of `name` has `words`, or with `gone` has them no more."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        text = ""
        try:
            async with asyncio.timeout(240.0):
                while not text or (words in text) is gone:
                    await asyncio.sleep(READ_S)
                    text = await self.panel(name)
        except TimeoutError:
            raise AssertionError(f"{name} {'still shows' if gone else 'never showed'} {words!r}: {text}") from None
        print(f"{words!r} {'gone' if gone else 'told'} after {loop.time() - begun_s:.0f} s, of {TOLD_S:g}")

    async def two(self) -> None:
        """Start a machine at each stage, "first" and "last"; returns once they train."""
        for name, stage in (("first", "1"), ("last", "2")):
            await self.join(name, "--stage", stage)
        await self.until(lambda: len(self.losses("first")) > 1, "they train")

    def p2pd(self, name: str) -> list[psutil.Process]:
        return psutil.Process(self.processes[name].pid).children(recursive=True)


@contextlib.asynccontextmanager
async def met(folder: Path, *settings: str) -> AsyncIterator[Panels]:
    """A run with its meeting point and an invite."""
    async with run_of(folder, "bootstrap", Panels) as run:
        if settings:
            run.once("manifest", "set", "run", *settings)
        await run.meet()
        (folder / "invite.txt").write_text(run.once("invite", "run", "--home", "meet"))
        yield run


async def test_a_lone_machine_says_what_it_waits_for_and_that_its_meeting_point_is_away(tmp_path: Path) -> None:
    async with met(tmp_path) as run:
        await run.join("n", "--stage", "1")
        alone = "nothing can be trained until a machine serves stage 2"
        await run.shows("n", alone)
        await run.until(lambda: alone in run.text("n.err") and "What helps: invite" in run.text("n.err"), "join tells")
        assert "trains stage" not in run.text("n.err"), "nothing has passed through it"
        for _ in range(2):
            await run.kill("meet")
            await run.shows("n", "meeting point")
            await run.meet()
            await run.shows("n", "meeting point", gone=True)


@pytest.mark.nightly
async def test_two_machines_say_what_they_wait_for_of_each_other(tmp_path: Path) -> None:
    async with met(tmp_path, "limits.microbatch_timeout_s=20", "limits.record_ttl_s=10") as run:
        await run.two()
        assert "waits" not in await run.panel("first")

        run.once("pause", "--for", "2h", "--home", "last")
        await run.shows("first", "stage 2 sleeps until")
        assert "paused" in await run.panel("last")
        run.once("resume", "--home", "last")
        await run.shows("first", "stage 2 sleeps", gone=True)

        os.kill(run.processes["last"].pid, signal.SIGSTOP)
        await run.shows("first", "until a machine serves stage 2")
        await run.shows("first", "took its work")
        os.kill(run.processes["last"].pid, signal.SIGCONT)
        await run.shows("first", "until a machine serves stage 2", gone=True)
        await run.shows("first", "took its work", gone=True)


@pytest.mark.nightly
async def test_a_machine_says_what_is_wrong_with_itself(tmp_path: Path) -> None:
    async with met(tmp_path) as run:
        await run.two()
        for died in (1, 2):
            for process in run.p2pd("first"):
                process.kill()
            await run.until(lambda died=died: len(run.events("first", "p2pd.restarted")) >= died, "it is restarted")  # type: ignore[misc]
        await run.shows("first", "p2pd died and starts again (2 times")
        await run.shows("first", "p2pd died", gone=True)

        limit = psutil.Process(run.processes["last"].pid)
        limit.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        await run.shows("last", "does not take what this machine keeps")
        limit.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await run.shows("last", "does not take", gone=True)

        await run.kill("first")
        await run.shows("last", "until a machine serves stage 1")


@pytest.mark.nightly
async def test_a_newcomer_on_a_thin_line_says_that_it_downloads(tmp_path: Path) -> None:
    async with met(tmp_path, "model.width=128", "model.ffn=256") as run:
        await run.two()
        await run.join("thin", "--stage", "2", "--max-down", "300kbit", "--max-up", "210kbit")
        await run.shows("thin", "downloads the weights of its stage")
