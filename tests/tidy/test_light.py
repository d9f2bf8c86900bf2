"""Looking is cheap: verbs that only look, and the modules nodes decide with, start without torch and hivemind."""

import os
import subprocess
import sys

import pytest

from swarmnode.app.local.spawn import PRELOADED


def test_decisions_do_not_import_torch() -> None:
    program = (
        "import sys, swarmnode.run.manifest, swarmnode.data.corpus, swarmnode.data.blocks, swarmnode.base.ports\n"
        "assert 'torch' not in sys.modules and 'hivemind' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)


# With slack: a feature that needs a module takes it. A module that only some nodes need is imported where it is used.
IMPORTS_MAX = {
    "swarmnode.app.daemon.process": (255, 48_500),
    "swarmnode.train.pipeline.hop": (80, 13_000),
}
"""(modules, lines) of ours that a module imports."""

COUNT = """
import importlib, pathlib, sys
importlib.import_module(sys.argv[1])
ours = ("swarmnode", "swarmnode_methods", "swarmsim", "benchmarks")
files = {module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] in ours and module.__file__}
print(len(files), sum(len(pathlib.Path(file).read_text().splitlines()) for file in files))
"""


@pytest.mark.parametrize("module", IMPORTS_MAX)
def test_imports_of_a_node_are_bounded(module: str) -> None:
    """A reader and an auditor must hold all of it."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, module], capture_output=True, text=True, timeout=150, check=True
    )
    found = tuple(map(int, done.stdout.split()))
    assert all(count <= most for count, most in zip(found, IMPORTS_MAX[module], strict=True)), found


def test_a_node_without_page_and_cloud_imports_neither() -> None:
    code = "import sys, swarmnode.app.daemon.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    lazy = (
        "swarmnode.app.dashboard",
        "swarmnode.app.cloud",
        "swarmnode.app.cli",
        "swarmnode.app.planner",
        "swarmnode.app.local",
    )
    assert not [name for name in done.stdout.split() if name.startswith(lazy)]


def test_a_replica_imports_neither_compiler_nor_symbolic_algebra_and_a_node_starts_no_thread() -> None:
    """torch.optim, and initialisation on the meta device, would: 70 MiB a node process each (measured). With a thread
    no node would be forked any more, and nobody would notice but by the clock."""
    code = (
        "import sys, swarmnode.app.daemon.process\n"
        "from swarmnode.run.manifest.recipe import PRESETS\n"
        "from swarmnode.app.machine.replica import TorchReplica\n"
        "[TorchReplica(PRESETS['tiny'], stage) for stage in (0, 1)]\n"
        "print(*[name for name in ('sympy', 'scipy', 'torch._dynamo', 'pydantic') if name in sys.modules])\n"
        f"import {', '.join(PRELOADED)}\n"
        "from swarmnode.app.local.fork_server import alone\n"
        "assert alone()\n"
    )
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True, env=alone
    )
    assert done.stdout.split() == []
