"""For all tests: one thread a process, no deadline that a loaded machine could miss, and no process left behind."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that tests start
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import psutil
import pytest
from hypothesis import settings

settings.register_profile("swarmnode", deadline=None, print_blob=True)
settings.load_profile("swarmnode")

GOODBYE_S = 5.0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that outlives the tests that started it fails the suite (p2pd leaves within 2 s by itself)."""
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GOODBYE_S)
    for process in left:
        try:
            print(f"\nleft running by a test, ended now: {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
