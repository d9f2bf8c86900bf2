"""For all tests: one thread a process, no deadline that a loaded machine could miss, and no process left behind.

An `async def test_...` runs in an event loop of its own. Each test is marked `unit`, `node` or `live` by its folder,
unless it or its module says otherwise."""

import asyncio
import contextlib
import inspect
import os
import pathlib
import re
import signal
from collections.abc import Coroutine, Generator, Iterator
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that tests start
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["SWARMNODE_PRIORITY"] = "normal"  # a test's nodes are not to wait for whatever else this machine does

import psutil
import pytest
import uvloop
from hypothesis import settings

from benchmarks.swarm.laws import called_forged, read_lines
from swarmnode.app.daemon import service_manager
from swarmnode.app.local.spawn import SPAWNER
from swarmnode_methods.rules import CODECS, METHODS
from swarmsim import virtual_time

pytest.register_assert_rewrite("tests.support")
# The same examples in each run, so that a test fails for what was changed. `make nightly` draws others, and `make soak`
# many more: `--hypothesis-profile soak`.
settings.register_profile("swarmnode", deadline=None, print_blob=True, max_examples=20, derandomize=True)
settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=100)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("swarmnode")

GOODBYE_S = 5.0
# This process begins long before the verbs in it, which would say at once what they do.
service_manager.SILENCE_S = 3600.0
# An async test is cancelled so long before pytest-timeout would interrupt the process: its nodes and processes then
# end as in any error.
CANCELLED_BEFORE_S = 10.0
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
# Why a test skips for want of a tool that .ci/run installs.
INSTALLED_IN_CI = re.compile(r"is missing: apt-get install")
MARKS = ("unit", "node", "live")
FOLDERS = dict.fromkeys(("bench", "cli", "dashboard", "deploy", "node", "simulation", "tidy"), "node")
FOLDERS |= dict.fromkeys(("chaos", "docs", "live"), "live")
# Left to `make nightly`: what nobody runs by default, and live tests whose subject another one has, too.
NIGHTLY_FILES = {
    *(f"tests/bench/test_{name}.py" for name in ("efficiency", "gossip", "gpu", "learning")),
    *(f"tests/gossip/test_{name}.py" for name in ("delta", "family", "fragment")),
    *(f"tests/live/test_{name}.py" for name in ("own_data", "people", "resumed_id", "served", "versions", "weekend")),
    "tests/docs/test_contributing.py",
    "tests/model/test_template_families.py",
}
CHOSEN = {"average", "gradient"}
"""Methods that `swarmnode init` chooses."""
RESEARCH = {rules.name for rules in METHODS} - CHOSEN | {rules.name for rules in CODECS if rules.of_delta}
"""Tests with one of these among their parameters are of research, too. Codecs of weights go with the chosen methods."""


def pytest_configure() -> None:
    """Told to end, as by `make` or a machine that stops, tests still end the processes they started."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A process that outlives the tests that started it fails the suite (p2pd leaves within 2 s by itself)."""
    yield
    SPAWNER.close()
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GOODBYE_S)
    told = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "torch_shm_manager":  # torch's own: it ends with us, who shared a tensor
                continue
            told.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    assert not told, f"left running by a test, ended now: {told}"


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """`-m unit` does not even import the folders whose tests are all something else."""
    return (config.option.markexpr == "unit" and collection_path.is_dir() and collection_path.name in FOLDERS) or None


def is_nightly(item: pytest.Item) -> bool:
    path = item.path.relative_to(item.config.rootpath)
    values = (
        list(item.callspec.params.values()) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
    )
    values += [one for value in values if isinstance(value, dict) for one in value.values()]
    return str(path) in NIGHTLY_FILES or any(
        isinstance(value, str) and RESEARCH & set(re.split(r"[-/+@ ]", value)) for value in values
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_nightly(item):
            item.add_marker("nightly")
    # Make says 0 or 1; else files named on the command line are run whole.
    wanted = os.environ.get("SWARMNODE_NIGHTLY") or str(int(any(".py" in argument for argument in config.args)))
    if wanted == "0":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    for item in items:
        if not any(item.get_closest_marker(mark) for mark in MARKS):
            folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
            item.add_marker(FOLDERS.get(folder, "unit"))


def missing_in_ci(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it skipped, if that is a failure: where .ci/run says so, all tools that it installs are there; else ""."""
    if os.environ.get("SWARMNODE_TOOLS") != "installed" or not report.skipped or not isinstance(report.longrepr, tuple):
        return ""
    reason = report.longrepr[2]
    return f"skipped in CI: {reason}" if INSTALLED_IN_CI.search(reason) else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if reason := missing_in_ci(report):
        report.outcome = "failed"
        report.longrepr = reason
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if reason := missing_in_ci(report):
        report.outcome = "failed"
        report.longrepr = reason
    return report


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """No node of a test says anything on stderr but our own lines, nor calls another a forger, in whichever home its
    log is, unless the test has a liar."""
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if folder is None:
        return
    if item.get_closest_marker("live") is not None:
        from tests.support.processes import OURS  # above, its assertions would not be rewritten

        said = [line for log in folder.rglob("stderr.log") for line in log.read_text(errors="replace").splitlines()]
        foreign = [line for line in said if not OURS.fullmatch(line)]
        assert not foreign, f"nodes said on stderr what is not ours: {foreign[:5]}"
    if item.get_closest_marker("liar") is not None:
        return
    forged = [reason for log in folder.rglob("events.jsonl*") for reason in called_forged(read_lines(log))]
    assert not forged, f"honest nodes are called forgers: {forged[:3]}"


def limit_s(item: pytest.Item) -> float:
    """Seconds after which pytest-timeout ends a test."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Async tests run in a loop of their own (asyncio's, or that of `@pytest.mark.loop`), or by their class's `run`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    marker = pyfuncitem.get_closest_marker("loop")
    loop = marker.args[0] if marker else "village" if pyfuncitem.path.parent.name == "node" else "asyncio"

    test: Coroutine[Any, Any, None] = pyfuncitem.obj(**arguments)

    async def bounded() -> None:
        async with asyncio.timeout(limit_s(pyfuncitem) - CANCELLED_BEFORE_S):
            await test

    # No bound in virtual time: its timer would hide a deadlock.
    if hasattr(pyfuncitem.instance, "run"):
        pyfuncitem.instance.run(test)
    elif loop == "virtual":
        virtual_time.run(test)
    elif loop == "village":
        from tests.support.village import VillageLoop

        VillageLoop().run(test)
    else:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(bounded())
    return True
