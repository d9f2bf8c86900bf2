"""What the pages say to type works: shell blocks behind `<!-- run -->` are run, at a small size, page by page.

`<!-- run [background] [until=REGEX] [sed=EXPRESSION] -->`: `sed` makes a command small for the test; a background one
is waited for until it says REGEX, ended by SIGTERM after the page, and must then leave cleanly.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarmnode.run.manifest.folder import read_manifest
from tests.chaos.test_chaos import KILLS

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 500.0
BLOCK = re.compile(r"<!-- run(?P<options>[^\n]*?) -->\n```sh\n(?P<text>.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]*))?\)")
# The others' commands are left to `make nightly`.
EVERY_PUSH = ("README.md", "docs/quick-start.md", "docs/volunteer.md", "examples/simulate-1000/README.md")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), ROOT / "README.md"])


@dataclass(frozen=True, slots=True)
class Block:
    """One shell block as the test runs it."""

    text: str
    background: bool
    until: str


def blocks(page: Path) -> list[Block]:
    found = []
    for match in BLOCK.finditer(page.read_text()):
        options, _, sed = match["options"].strip().partition("sed=")
        text = match["text"]
        if sed:
            text = subprocess.run(["sed", sed], input=text, capture_output=True, text=True, check=True).stdout
            assert text != match["text"], f"{page.name}: {sed} changes nothing"
        words = dict(word.partition("=")[::2] for word in options.split())
        assert words.keys() <= {"background", "until"}, f"{page.name}: {options}"
        found.append(Block(text, "background" in words, words.get("until", "")))
    return found


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=id_of(page), marks=() if id_of(page) in EVERY_PUSH else pytest.mark.nightly)
        for page in PAGES
        if blocks(page)
    ],
)
def test_commands_of_a_page_run(page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cache = tmp_path_factory.getbasetemp() / "cache"  # tokens are made once for all pages
    environ = os.environ | {"PATH": path, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(cache)}
    for example in page.parent.glob("*.*ml"):  # what a page's own folder holds is there
        if page.parent != ROOT:
            (tmp_path / example.name).write_text(example.read_text())
    for pattern in ("*.csv", "*.sed", "*.py") if page.parent != ROOT and page.parent.name != "docs" else ():
        for file in page.parent.glob(pattern):
            (tmp_path / file.name).write_text(file.read_text())
    running: list[tuple[Block, subprocess.Popen[bytes], Path]] = []
    try:
        for number, block in enumerate(blocks(page)):
            log = tmp_path / f"block-{number}.log"
            command = ["bash", "-euo", "pipefail", "-c", ("exec " if block.background else "") + block.text]
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command,
                    cwd=tmp_path,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            if block.background:
                running.append((block, process, log))
                wait_for(block, process, log)
            else:
                running.append((block, process, log))
                code = process.wait(BOUND_S)
                running.pop()
                assert code == 0, f"{block.text}\nended with {code}\n{log.read_text()[-3000:]}"
        for block, process, log in reversed(running):
            if not re.search(r"^left: ", log.read_text(), re.MULTILINE):  # a command of the page ended it
                process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0, f"{block.text}\n{log.read_text()[-3000:]}"
    finally:
        for _, process, _ in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the shell, and what it started
            process.wait()


def wait_for(block: Block, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + BOUND_S
    while not re.search(block.until, log.read_text()):
        assert process.poll() is None, f"{block.text}\nended with {process.returncode}\n{log.read_text()[-3000:]}"
        assert time.monotonic() < end, f"{block.text}\ndid not say {block.until!r}\n{log.read_text()[-3000:]}"
        time.sleep(0.1)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("manifest.toml")), ids=id_of)
def test_the_manifest_of_an_example_is_one(path: Path) -> None:
    assert read_manifest(path).pipeline.stages >= 1


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path = (page.parent / target).resolve()
        assert path.exists(), f"{page.name} links to {target}"
        if anchor and path.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_the_site_has_every_page_once() -> None:
    """mkdocs.yml, which `make site` builds strictly, without mkdocs."""
    import yaml

    def pages(entry: object) -> list[str]:
        inner = entry.values() if isinstance(entry, dict) else entry
        return [entry] if isinstance(entry, str) else [page for each in inner for page in pages(each)]  # type: ignore[attr-defined]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_readme_stays_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_a_page_that_names_a_benchmark_says_where_it_is_run() -> None:
    """Most of them compare methods or whole swarms, and are not in the wheel."""
    in_wheel = re.compile(r"swarmnode bench (?!gpu\b|wan\b|foreground\b)[a-z-]+")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    naming = [page for page in pages if in_wheel.search(page.read_text())]
    made = {
        "manifest.md",
        "architecture.md",
    }  # made from the code, whose reader has a checkout; for those who change it
    assert len(naming) > 5
    assert not [page.name for page in naming if "from a checkout" not in page.read_text() and page.name not in made]


def test_figures_of_the_readme_stand_beside_a_command() -> None:
    """Each paragraph or item with a number outside links and code names what prints it."""
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    for paragraph in re.split(r"\n\n|\n(?=\* )", prose):
        plain = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", "", paragraph)
        if re.search(r"(?<![\w.-])\.?\d", plain):
            assert re.search(r"`(swarmnode|make) ", paragraph), paragraph


def test_the_readme_claims_as_many_kills_as_a_test_asserts() -> None:
    assert f"`make nightly` kills at least {KILLS} in one life" in " ".join((ROOT / "README.md").read_text().split())


def test_measurements_are_not_older_than_the_code() -> None:
    page = (ROOT / "docs" / "measurements" / "README.md").read_text()
    months = re.findall(r"\b([A-Z][a-z]+) (20\d\d)\b", page)
    assert months
    assert min(time.strptime(" ".join(month), "%B %Y") for month in months) >= time.strptime("November 2026", "%B %Y")
