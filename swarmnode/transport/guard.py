"""Carries out what `gate.py` decides: counts once a period, opens and closes the sink, tells of every change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.transport import gate, sink
from swarmnode.transport.daemon import Daemon

PERIOD_S = 1.0


class Guard:
    """Of one p2pd. `friends` are the addresses of peers that may take part; `event` is told reason and counts.

    Where the kernel does not offer what it needs (not Linux; /proc not readable; p2pd alone on its port) it says so
    once and does nothing.
    """

    def __init__(
        self, daemon: Daemon, friends: Callable[[], frozenset[str]], event: Callable[[str, gate.Gate], None]
    ) -> None:
        self.gate = gate.Gate()
        self.sunk = 0
        self._daemon = daemon
        self._friends = friends
        self._event = event
        self._sink: sink.Sink | None = None
        self._is_able = True

    async def watch(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        try:
            before, at = sink.opened(), loop.time()
        except (OSError, ValueError):
            self._is_able = False
            return
        while True:
            await asyncio.sleep(PERIOD_S)
            opened, now = sink.opened(), loop.time()
            sunk, sampled = self._sink.take() if self._sink is not None else (0, ())
            self.sunk += sunk
            friends = frozenset() if self.gate.is_open else self._friends()
            sight = gate.Sight(now, now - at, opened - before, sunk, sampled, friends)
            self._stand(*gate.step(self.gate, sight))
            before, at = opened, now

    def deny(self, address: str) -> None:
        """Nothing from `address` reaches p2pd for a while, unless peers that may take part are there, too."""
        if address and self._is_able and address not in self._friends():
            denied = gate.deny(self.gate, address, asyncio.get_running_loop().time())
            self._stand(denied, "a stranger opened stream after stream: its address is denied")

    def release(self) -> None:
        """p2pd is gone: the next one must be the first on its port."""
        if self._sink is not None:
            self._sink.close()
        self._sink, self.gate = None, gate.Gate()

    def _stand(self, new: gate.Gate, reason: str) -> None:
        old, self.gate = self.gate, new
        if new.is_open:
            if self._sink is not None:
                self._sink.close()
                self._sink = None
        elif self._daemon.running.is_set():
            self._route(reason or (old.share, old.denied.keys()) != (new.share, new.denied.keys()))
        if reason:
            self._event(reason, self.gate)

    def _route(self, is_changed: bool | str) -> None:
        try:
            if self._sink is None:
                self._sink = sink.Sink([one for one in self._daemon.listening() if one.port])
                is_changed = True
            if is_changed:
                self._sink.route(self.gate.denied, self._friends(), self.gate.share, self.gate.sample)
        except OSError as error:
            self.release()
            self._is_able = False
            self._event(f"this system cannot turn strangers away: {error}", self.gate)
