"""For all tests: one thread a process, no deadline that a loaded machine could miss, and no process left behind."""

import contextlib
import os
import signal
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in every process that tests start
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import psutil
import pytest
from hypothesis import settings

from swarmnode.local.starting import NURSERY

settings.register_profile("swarmnode", deadline=None, print_blob=True)
settings.load_profile("swarmnode")

GOODBYE_S = 5.0


def pytest_configure() -> None:
    """Told to end, as by `make` or a machine that stops, tests still end the processes they started."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A process that outlives the tests that started it fails the suite (p2pd leaves within 2 s by itself)."""
    yield
    NURSERY.close()
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GOODBYE_S)
    told = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    assert not told, f"left running by a test, ended now: {told}"
