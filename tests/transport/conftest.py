"""Peers of these tests are forked from a server (peer.py); it ends with them."""

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def fork_server_ends() -> Iterator[None]:
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
