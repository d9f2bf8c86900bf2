"""Imports go only downwards, and an external dependency is imported in one place (docs/architecture.md)."""

import functools
import graphlib
import pathlib
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

OURS = ("swarmnode", "swarmsim", "swarmnode_methods", "benchmarks")
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "common", "base", "manager", "misc"}


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "swarmnode", "swarmsim", "swarmnode_methods", "benchmarks", include_external_packages=True, cache_dir=None
    )


def within(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def test_imports_go_downwards() -> None:
    program = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


def test_every_import_is_a_declared_dependency() -> None:
    extras = PROJECT["optional-dependencies"]
    texts = PROJECT["dependencies"] + extras["data"] + extras["gguf"]  # the last are imported where they are wanted
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    distributions = packages_distributions()
    for package in sorted(m for m in graph().modules if not within(m, OURS)):
        root = package.partition(".")[0]
        if root not in sys.stdlib_module_names:
            homes = {canonicalize_name(name) for name in distributions.get(root, [])}
            assert homes & declared, (
                f"{package} ({', '.join(sorted(homes)) or 'not installed'}) is not in pyproject.toml"
            )


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports under TYPE_CHECKING and inside functions count: one cannot read either side of a circle alone."""
    imports = {m: graph().find_modules_directly_imported_by(m) for m in graph().modules if within(m, OURS)}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(reversed(error.args[1]))}", pytrace=False)


def test_module_names_say_something() -> None:
    """`swarmnode.base` is the ground floor; each of its modules has a name of its own."""
    vague = [
        module
        for module in graph().modules
        if within(module, OURS) and set(module.removeprefix("swarmnode.base").split(".")) & NAMES_THAT_SAY_NOTHING
    ]
    assert not vague
