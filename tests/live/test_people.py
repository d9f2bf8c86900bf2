"""Three people, each from nothing but the wheel: a volunteer, an organiser, a researcher (`make people`).

The commands are those of docs/volunteer.md, docs/run-a-swarm.md and docs/python.md; nothing of the checkout is used but
the notebooks and the method of examples/.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.machine.test_hub import REPO, TOKEN, Hub, hub
from tests.support.fresh import ROOT, make_environment, make_wheel
from tests.support.processes import BOUND_S, OURS

__all__ = ["hub"]  # a fixture
HERE = ("--listen", "/ip4/127.0.0.1/tcp/0")
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
KERNEL = """
import asyncio, json, sys
async def kernel():
    shared = {}
    for cell in json.load(sys.stdin):
        exec(compile(cell, "cell", "exec"), shared)
    if "comparison" in shared:
        print(json.dumps(shared["comparison"].rows()))
asyncio.run(kernel())
"""


def until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until `condition` holds."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + BOUND_S, f"not within {BOUND_S:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - begun


@dataclass
class Person:
    """Somebody with a home of their own and the wheel's commands; what they started ends with the test."""

    commands: Path
    home: Path
    variables: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home.mkdir()
        names = ("PATH", "OMP_NUM_THREADS", "TMPDIR", "SWARMNODE_PRIORITY")
        kept = {key: os.environ[key] for key in names if key in os.environ}
        cache = self.home.parent / "cache"  # tokens are made once for all
        self.variables = {**kept, "HOME": str(self.home), "XDG_CACHE_HOME": str(cache), **self.variables}

    def runs(self, *words: str, stdin: str = "") -> str:
        """stdout of a command that succeeds; on stderr nothing but our own lines."""
        done = subprocess.run(
            [str(self.commands / words[0]), *words[1:]],
            cwd=self.home,
            env=self.variables,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, f"{words}: {done.stderr}"
        return done.stdout

    def starts(self, log: str, *words: str) -> subprocess.Popen[str]:
        """A command that goes on; stdout and stderr are files of the person's home."""
        with (self.home / f"{log}.out").open("w") as out, (self.home / f"{log}.err").open("w") as error:
            command = [str(self.commands / "swarmnode"), *words]
            process = subprocess.Popen(command, cwd=self.home, env=self.variables, stdout=out, stderr=error, text=True)
        self.running.append(process)
        return process

    def read(self, name: str) -> str:
        return (self.home / name).read_text()

    def stops(self, process: subprocess.Popen[str], log: str) -> None:
        """Ctrl-C ends it in order, and on stderr it said nothing but our own lines."""
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 0, self.read(f"{log}.err")
        self.running.remove(process)
        assert [line for line in self.read(f"{log}.err").splitlines() if not OURS.fullmatch(line)] == []


@contextmanager
def person(commands: Path, home: Path, **variables: str) -> Iterator[Person]:
    one = Person(commands, home, variables)
    try:
        yield one
    finally:
        for process in reversed(one.running):
            process.send_signal(signal.SIGINT)
        for process in one.running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with nothing but the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    return make_environment(make_wheel(folder), folder / "environment")


@contextmanager
def swarm(commands: Path, folder: Path, **variables: str) -> Iterator[tuple[Person, str]]:
    """An organiser whose run is met at a coordinator, with one machine for each stage; and the page's address."""
    with person(commands, folder / "organiser", **variables) as organiser:
        organiser.runs("swarmnode", "init", "myrun", "--preset", "tiny")
        organiser.runs("swarmnode", "manifest", "set", "myrun", "about.by=Ada", "about.why=Stories for children")
        organiser.starts("meet", "coordinator", "myrun", "--home", "boot", "--port", "0", *HERE)
        until(lambda: "others join" in organiser.read("meet.err"), "the coordinator is up")
        (page,) = re.findall(r"dashboard (\S+)", organiser.read("meet.err"))
        wheel = f"file:///w.whl#sha256={'ab' * 32}"
        organiser.runs("swarmnode", "invite", "myrun", "--home", "boot", "--out", "invite.txt", "--wheel", wheel)
        for stage in ("1", "2"):
            words = ("--invite-file", "invite.txt", "--home", f"m{stage}", "--stage", stage, "--max-load", "50%", *HERE)
            organiser.starts(f"m{stage}", "join", *words)
        until(lambda: fetch(page, "summary")["round"] > 0, "a round is done")
        yield organiser, page


def fetch(page: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{page}api/v1/{path}", timeout=60) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def post(address: str, verb: str, **given: object) -> dict[str, Any]:
    """A call of the page of `swarmnode ui`, as its script makes it."""
    url, _, token = address.partition("#")
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}v1/{verb}", json.dumps(given).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def test_a_volunteer_joins_sees_herself_on_the_page_and_pauses(commands: Path, tmp_path: Path) -> None:
    with swarm(commands, tmp_path) as (organiser, page), person(commands, tmp_path / "volunteer") as ada:
        invite = organiser.read("invite.txt")
        assert invite.startswith("# install: uv tool install ")
        (ada.home / "invite.txt").write_text(invite)
        at = ("--home", "node")

        def on_the_page() -> bool:
            nodes = fetch(page, "nodes")["nodes"]
            return any(node["name"] == "ada@meadow" and node["state"] == "training" for node in nodes)

        joined = ada.starts("join", "join", "--invite-file", "invite.txt", "--name", "ada@meadow", *at, *HERE)
        print(f"a volunteer is on the page after {until(on_the_page, 'she is on the page'):.0f} s")
        until(lambda: "every stage has a machine" in ada.read("join.err"), "she is told so")

        ada.starts("ui", "ui", *at)
        until(lambda: ada.read("ui.out").endswith("\n"), "her own page is up")
        address = ada.read("ui.out").strip()
        until(lambda: int(post(address, "status")["tokens_given"]) > 0, "her page shows what she gave")
        post(address, "pause", for_s=3600, reason="snoozed")
        until(lambda: "paused: snoozed; until " in ada.read("join.err"), "join says that it pauses")
        assert "snoozed" in ada.runs("swarmnode", "status", *at)
        ada.runs("swarmnode", "resume", *at)
        ada.runs("swarmnode", "limit", "--hours", "mon-fri 22-07,sat-sun", "--on-ac-only", *at)
        assert post(address, "status")["limits"]["limits"]["on-ac-only"] == "yes"
        ada.runs("swarmnode", "limit", "--hours", "none", "--no-on-ac-only", *at)
        ada.stops(joined, "join")
        assert "thank you" in ada.read("join.err")
        assert post(address, "record")["samples"], "others signed for her work, also once she has left"


def test_an_organiser_exports_pushes_and_shares(commands: Path, tmp_path: Path, hub: Hub) -> None:
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    with swarm(commands, tmp_path, **variables) as (organiser, page):
        folder = organiser.runs("swarmnode", "archive", "myrun", "--once", "--home", "boot").strip()
        assert (organiser.home / folder).is_dir()
        organiser.runs("swarmnode", "export", folder, "--out", "model", "--push-to-hub", REPO)
        card = hub.files["README.md"].decode()
        assert "Stories for children" in card and "Run by Ada." in card and hub.private == {REPO: True}
        assert {"model.safetensors", "config.json"} <= set(hub.files)
        assert organiser.runs("swarmnode", "generate", "model", "--prompt", "def ", "--tokens", "8").strip()
        until(lambda: bool(fetch(page, "archive")["entries"]), "the page offers the model")
        label = fetch(page, "archive")["entries"][-1]["label"]
        with urllib.request.urlopen(f"{page}archive/{label}/urls.txt", timeout=60) as shared:
            assert b".safetensors" in shared.read(), "what `wget -i` takes"


def test_a_researcher_draws_three_methods_and_her_own(commands: Path, tmp_path: Path) -> None:
    python = str(commands / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*command, str(ROOT / "examples" / "own-method")], check=True, timeout=150)
    with person(commands, tmp_path / "researcher") as she:
        found = {}
        for path in NOTEBOOKS:
            cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
            begun = time.monotonic()
            out = she.runs("python", "-c", KERNEL, stdin=json.dumps(list(map("".join, cells))))
            print(f"{path.name} ran in {time.monotonic() - begun:.0f} s")
            found[path.stem] = out.splitlines()[-1]
        methods = {row["name"]: row["loss_validation"] for row in json.loads(found["compare-methods"])}
        assert set(methods) == {"noloco", "diloco", "none", "cautious"}
        assert all(methods[name] < methods["none"] for name in ("diloco", "cautious"))
        assert all(row["runs"] == 2 and row["spread"] > 0 for row in json.loads(found["papers-and-seeds"]))
        assert len(json.loads(she.read("papers.json"))) == 3
        figure = ElementTree.fromstring(she.read("papers.svg"))
        assert figure.tag.endswith("svg") and "diloco, 2 seeds" in "".join(figure.itertext())
        assert "tokens/s" in found["plan-a-run"]
