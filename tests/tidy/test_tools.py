"""Tidy is a test: format, lint, types, generated code and pins, so that there is one command to know."""

import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACES = ["swarmnode", "swarmsim", "swarmnode_methods", "benchmarks", "proto", "docs", "deploy", "tests"]


def run(*command: str, timeout_s: float = 800) -> None:
    """Run a tool of this environment in the root; its own words are the failure's."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)


def test_lint() -> None:
    run("ruff", "check", "--no-cache", "--output-format", "concise", *PLACES)


def test_functions_have_few_local_variables() -> None:
    """PLR0914 is in ruff's preview, where other rules would change with it."""
    places = [place for place in PLACES if place != "tests"]
    run("ruff", "check", "--no-cache", "--preview", "--select", "PLR0914", "--output-format", "concise", *places)


def test_format() -> None:
    run("ruff", "format", "--no-cache", "--check", "--diff", *PLACES)


def test_types() -> None:
    run("mypy", "--no-error-summary")


def test_wire_is_generated_from_proto(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "proto" / "generate.py"), str(tmp_path)], check=True, timeout=120)
    wire = ROOT / "swarmnode" / "base" / "wire"
    made = {path.name: path.read_text() for path in tmp_path.glob("*.py*")}
    committed = {path.name: path.read_text() for path in wire.glob("*.py*")}
    stale = sorted(name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name))
    assert not stale, f"swarmnode/base/wire is stale ({', '.join(stale)}); say: make proto"


def test_every_dependency_is_pinned_within_its_range() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pins = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), text


def test_generated_pages_are_current(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py"), str(tmp_path)], check=True, timeout=120)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made
    stale = sorted(page for page, text in made.items() if (ROOT / "docs" / page).read_text() != text)
    assert not stale, f"docs/ is stale ({', '.join(stale)}); say: make docs"
