"""Notifications to whoever started this process: a service manager (ready, status, watchdog, stopping: the protocol of
sd_notify(3)), and a person who waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import click

BEAT_S = 15.0  # guess: period of the status line if no watchdog asks for more
DATAGRAM_BYTES_MAX = 4096
SILENCE_S = 3.0  # guess: people take longer silences for a hang

_said_s = time.monotonic()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Say on stderr what this process does, if it lasts until nothing has been said for SILENCE_S."""

    def say() -> None:
        global _said_s
        _said_s = time.monotonic()
        click.echo(f"{what} ...", err=True)

    timer = threading.Timer(max(0.0, _said_s + SILENCE_S - time.monotonic()), say)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Supervisor:
    """The process that set NOTIFY_SOCKET in our environment: systemd, or a container runtime.

    Without it, or after it has gone, all methods do nothing: a service manager never blocks a node.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        mine = environ.get("WATCHDOG_PID", "") in ("", str(pid or os.getpid()))
        asked = environ.get("WATCHDOG_USEC", "")
        self.watchdog_s = int(asked) / 1e6 if mine and asked.isdecimal() and int(asked) > 0 else None

    @property
    def beat_s(self) -> float:
        """Seconds between two notifications: half of the watchdog's limit, as sd_watchdog_enabled(3) advises."""
        return BEAT_S if self.watchdog_s is None else min(BEAT_S, self.watchdog_s / 2)

    def tell(self, **words: str) -> bool:
        """Send `words` as NAME=value lines. False if nobody listens."""
        if self._address[:1] not in ("/", "@"):
            return False
        # In the environment a leading @ stands for the NUL of an abstract socket.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        lines = "\n".join(f"{word}={value.splitlines()[0] if value else ''}" for word, value in words.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending:
                sending.setblocking(False)
                sending.sendto(lines.encode()[:DATAGRAM_BYTES_MAX], address)
        except OSError:
            return False
        return True

    async def attend(self, status: Callable[[], str]) -> None:
        """Send READY, then `status` and a watchdog notification every `beat_s` until cancelled; then STOPPING.

        It runs on the node's own event loop: if the loop hangs, no notification is sent, and the watchdog ends the
        process.
        """
        self.tell(READY="1", STATUS=status(), MAINPID=str(os.getpid()))
        try:
            while True:
                await asyncio.sleep(self.beat_s)
                self.tell(WATCHDOG="1", STATUS=status())
        finally:
            self.tell(STOPPING="1", STATUS="leaving")
