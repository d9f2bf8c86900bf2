"""What an error of somebody else's library says, which often is nothing."""

import asyncio
import errno
import socket
import urllib.error
import urllib.request

import pytest
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from swarmnode.base.errors import LocalFault, cause_of, os_errors


class Bound(Exception):
    """As a binding of another language keeps its message."""

    def message(self) -> str:
        return "no route\n\nto the host"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TimeoutError(), "no answer in time"),
        (asyncio.CancelledError(), "it was called off"),
        (asyncio.IncompleteReadError(b"abc", 8), "3 bytes read on a total of 8 expected bytes"),
        (EOFError(), "it ended early"),
        (ConnectionResetError(), "the connection broke off"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError(errno.ENOLCK, "No locks available", "/home"), "No locks available"),
        (OSError("odd"), "odd"),
        (P2PDaemonError(), "P2PDaemonError"),
        (P2PDaemonError("dial\nbackoff"), "dial backoff"),
        (Bound(), "no route to the host"),
        (ExceptionGroup("two", [TimeoutError(), ValueError("x")]), "no answer in time"),
        (urllib.error.URLError(TimeoutError()), "no answer in time"),
        (MemoryError(), "out of memory"),
        (AssertionError(), "AssertionError"),
        (ValueError("  "), "ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_error_says_something_on_one_line(error: BaseException, says: str) -> None:
    assert cause_of(error) == says


async def test_a_wait_that_timed_out_says_so() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0):
            await asyncio.sleep(60)
    assert cause_of(caught.value) == "no answer in time"
    with pytest.raises(LocalFault, match="^cannot: no answer in time$"), os_errors(LocalFault, "cannot"):
        raise caught.value
