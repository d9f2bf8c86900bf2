"""Looking is cheap: verbs that only look, and the modules nodes decide with, start without torch and hivemind."""

import os
import subprocess
import sys

from swarmnode.local.spawn import PRELOADED


def test_decisions_do_not_import_torch() -> None:
    program = (
        "import sys, swarmnode.manifest, swarmnode.data.corpus, swarmnode.data.blocks, swarmnode.ports\n"
        "assert 'torch' not in sys.modules and 'hivemind' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)


def test_a_replica_imports_neither_compiler_nor_symbolic_algebra_and_a_node_starts_no_thread() -> None:
    """torch.optim, and initialisation on the meta device, would: 70 MiB a node process each (measured). With a thread
    no node would be forked any more, and nobody would notice but by the clock."""
    code = (
        "import sys, swarmnode.daemon.process\n"
        "from swarmnode.manifest import PRESETS\n"
        "from swarmnode.machine.replica import TorchReplica\n"
        "[TorchReplica(PRESETS['tiny'], stage) for stage in (0, 1)]\n"
        "print(*[name for name in ('sympy', 'scipy', 'torch._dynamo', 'pydantic') if name in sys.modules])\n"
        f"import {', '.join(PRELOADED)}\n"
        "from swarmnode.local.fork_server import alone\n"
        "assert alone()\n"
    )
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True, env=alone
    )
    assert done.stdout.split() == []
