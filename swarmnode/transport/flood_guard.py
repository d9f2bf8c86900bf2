"""Apply the decisions of `flood_gate.py`: count once a period, open and close the filter, report every change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.transport import flood_gate, syn_filter
from swarmnode.transport.p2pd_process import P2pdProcess

PERIOD_S = 1.0


class FloodGuard:
    """The guard of one p2pd. `friends` are the addresses of peers that may take part; `event` gets reason and counts.

    If the kernel lacks a needed feature (not Linux; /proc not readable; p2pd does not share its port), the guard
    reports it once and does nothing.
    """

    def __init__(
        self,
        daemon: P2pdProcess,
        friends: Callable[[], frozenset[str]],
        event: Callable[[str, flood_gate.FloodGate], None],
    ) -> None:
        self.gate = flood_gate.FloodGate()
        self.sunk = 0
        self._daemon = daemon
        self._friends = friends
        self._event = event
        self._sink: syn_filter.SynFilter | None = None
        self._is_able = True

    async def watch(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            before, at = syn_filter.opened(), loop.time()
        except (OSError, ValueError):
            self._is_able = False
            return
        while True:
            await asyncio.sleep(PERIOD_S)
            opened, now = syn_filter.opened(), loop.time()
            sunk, sampled = self._sink.take() if self._sink is not None else (0, ())
            self.sunk += sunk
            friends = frozenset() if self.gate.is_open else self._friends()
            sight = flood_gate.FloodSample(now, now - at, opened - before, sunk, sampled, friends)
            self._stand(*flood_gate.step(self.gate, sight))
            before, at = opened, now

    def deny(self, address: str) -> None:
        """Keep `address` away from p2pd for a while, unless peers that may take part share it."""
        if address and self._is_able and address not in self._friends():
            denied = flood_gate.deny(self.gate, address, asyncio.get_running_loop().time())
            self._stand(denied, "a stranger keeps opening streams: its address is denied")

    def release(self) -> None:
        """Close the filter, because p2pd is gone: the next p2pd must be the first to listen on its port."""
        if self._sink is not None:
            self._sink.close()
        self._sink, self.gate = None, flood_gate.FloodGate()

    def _stand(self, new: flood_gate.FloodGate, reason: str) -> None:
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
                self._sink = syn_filter.SynFilter([one for one in self._daemon.listening() if one.port])
                is_changed = True
            if is_changed:
                self._sink.route(self.gate.denied, self._friends(), self.gate.share, self.gate.sample)
        except OSError as error:
            self.release()
            self._is_able = False
            self._event(f"this system cannot turn strangers away: {error}", self.gate)
