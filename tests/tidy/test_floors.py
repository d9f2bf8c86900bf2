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

# Third-party package -> the modules (and what is in them) that may import it.
HOMES = {
    "hivemind": ("swarmnode.transport", "benchmarks"),
    "prometheus_client": ("swarmnode.metrics.exporter",),
    "tokenizers": ("swarmnode.data.tokens", "swarmnode.data.chat_template"),
    "safetensors": ("swarmnode.model.export",),
    "aiohttp": (
        "swarmnode.cloud",
        "swarmnode.control",
        "swarmnode.dashboard",
        "swarmnode.local.node_page",
        "swarmnode.metrics.exporter",
        "swarmnode.metrics.http_server",
        "swarmnode.transport.web",
        "benchmarks.fake_cloud",
    ),
    "transformers": ("swarmnode.data.chat_template",),
    "rich": ("swarmnode.cli", "swarmnode.local", "swarmsim.command", "benchmarks.swarm.screenshots"),
    "click": ("swarmnode.cli", "swarmnode.daemon", "swarmsim.command", "benchmarks.command"),
    "torch": (
        "swarmnode.model",
        "swarmnode.gossip.outer",
        "swarmnode.gossip.compression",
        "swarmnode.recovery.checkfree",
        "swarmnode.machine.replica",
        "swarmnode.daemon.process",
        "swarmnode.bench",
        "benchmarks",
        "swarmnode_methods",
        "swarmsim.real_training",
    ),
}

# What is put together at the top: these modules may be imported only from these.
PROTECTED = {
    # The simulated directory loses and finds its contacts by the real rules, which are pure.
    "swarmnode.transport": (
        "swarmnode.cli",
        "benchmarks",
        "swarmnode.daemon",
        "swarmsim.directory",
        "swarmnode_methods.iroh_transport",
    ),
    "swarmnode.node.node": ("swarmnode.daemon", "swarmsim"),
    "swarmnode.metrics.exporter": ("swarmnode.daemon",),
    "swarmnode.control": ("swarmnode.cli", "swarmnode.daemon", "swarmnode.local", "benchmarks"),
}

# Network and processes, which no simulated node may reach.
REAL_WORLD = ("hivemind", "aiohttp", "swarmnode.transport.libp2p", "swarmnode.transport.directory")

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


@pytest.mark.parametrize("package", sorted(HOMES))
def test_a_dependency_has_one_home(package: str) -> None:
    if package not in graph().modules:
        pytest.skip(f"nobody imports {package} yet")
    strangers = [m for m in graph().find_modules_that_directly_import(package) if not within(m, HOMES[package])]
    assert not strangers, f"{package} belongs in {' or '.join(HOMES[package]) or 'tests'}"


@pytest.mark.parametrize("module", sorted(PROTECTED))
def test_parts_are_assembled_only_at_the_top(module: str) -> None:
    strangers = [
        f"{importer} imports {imported}"
        for imported in sorted(m for m in graph().modules if within(m, (module,)))
        for importer in sorted(graph().find_modules_that_directly_import(imported))
        if not within(importer, (module, *PROTECTED[module]))
    ]
    assert not strangers


def test_simulated_nodes_know_nothing_of_the_real_world() -> None:
    """What a simulation may import never reaches hivemind or sockets of ours, not even through others."""
    simulated = sorted(m for m in graph().modules if within(m, ("swarmnode.node", "swarmsim")))
    assert {"swarmnode.node.node", "swarmsim.life"} <= set(simulated)
    for real in REAL_WORLD:
        assert real in graph().modules, f"{real} has another name: change REAL_WORLD"
        for module in simulated:
            assert not graph().chain_exists(module, real, as_packages=False), f"{module} reaches {real}"


def test_every_import_is_a_declared_dependency() -> None:
    extras = PROJECT["optional-dependencies"]
    texts = PROJECT["dependencies"] + extras["data"]  # the last are imported where they are wanted
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
    vague = [m for m in graph().modules if within(m, OURS) and set(m.split(".")) & NAMES_THAT_SAY_NOTHING]
    assert not vague
