"""A session of `swarmnode up`: start, watch, kill on purpose, stop, summarise."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from swarmnode.app.local.child import Child
from swarmnode.app.local.fleet import Fleet, FleetPlan, elapsed
from swarmnode.app.local.summary import NodeFacts, Summary, TokenRate, Totals, speeds, totals
from swarmnode.base.concurrency import interrupted, processors
from swarmnode.train.pipeline.microbatch_size import SETTLED_S, slowness

PERIOD_S = 1.0
"""Seconds between two queries of the nodes."""

EXIT_INTERRUPTED = 130
EXIT_FAILED = 70


@dataclass(frozen=True, slots=True)
class Conditions:
    """When to stop, whichever condition is met first; without any: on a signal. `for_s` counts from when all nodes are
    ready."""

    for_s: float | None = None
    rounds: int | None = None
    samples: int | None = None

    def why_stop(self, ready_s: float, seen: Totals) -> str | None:
        """The reason to stop now, or None."""
        if self.for_s is not None and ready_s >= self.for_s:
            return f"{self.for_s:g} s are over"
        if self.rounds is not None and seen.round >= self.rounds:
            return f"round {seen.round} is reached"
        if self.samples is not None and seen.samples >= self.samples:
            return f"{seen.samples} samples are trained"
        return None


@dataclass(frozen=True, slots=True)
class SessionView:
    """The state shown on a screen. `ready_s` is None while the swarm starts."""

    wall_s: float
    ready_s: float | None
    tokens_per_s: float
    nodes: tuple[NodeFacts, ...]
    totals: Totals
    page: str = ""


class Screen(Protocol):
    """Shows a running swarm to the user."""

    def show(self, picture: SessionView) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Session:
    """Runs `plan` until `conditions` are met, a signal arrives, or no node is left. For one use."""

    def __init__(
        self, plan: FleetPlan, conditions: Conditions, screen: Screen, *, run: str, kill_every_s: float | None = None
    ) -> None:
        self.stopping = asyncio.Event()
        self.fleet = Fleet(plan, screen.note)
        self._plan = plan
        self._conditions = conditions
        self._screen = screen
        self._run = run
        self._kill_every_s = kill_every_s
        self._slow = ""  # what was said of it
        self._rate = TokenRate()
        self._began_s = 0.0
        self._stopped = ""
        self._failure: str | None = None
        self._code = EXIT_FAILED

    async def run(self) -> Summary:
        """The summary, once every process has ended; its `failure` is set if no node was left. Raises LocalFault if the
        swarm does not start.

        SIGINT, SIGTERM or SIGHUP end it in order; a second one kills everything and raises CancelledError.
        """
        self._began_s = asyncio.get_running_loop().time()
        try:
            with self._signals():
                if await self.fleet.start(self.stopping):
                    self._screen.note(f"{self._plan.nodes} nodes are ready")
                    await self._watch()
                self._screen.note(f"stopping: {self._stopped}")
                await self.fleet.stop(self._stopped)
        finally:
            self._screen.close()
            await self.fleet.reap()
        return self._summary()

    def stop(self, reason: str) -> None:
        """Stop in order."""
        if not self.stopping.is_set():
            self._stopped = reason
            self.stopping.set()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        ready_at_s = loop.time()
        kill_at_s = None if self._kill_every_s is None else ready_at_s + self._kill_every_s
        while not self.stopping.is_set():
            for gone in await self.fleet.poll():
                await self._gone(gone)
            now_s = loop.time()
            picture = self._picture(now_s, now_s - ready_at_s)
            self._screen.show(picture)
            if now_s - ready_at_s >= SETTLED_S:
                self._warn(picture)
            why = "interrupted" if interrupted.is_set() else None
            why = why or self._conditions.why_stop(now_s - ready_at_s, picture.totals)
            if why is not None:
                self.stop(why)
            elif not self.fleet.alive:
                last = self.fleet.nodes[-1]
                self._failure = f"no node is left; the last, {last.name}: {last.reason}; see {self._plan.folder}"
                self.stop("no node is left")
            elif kill_at_s is not None and now_s >= kill_at_s and self.fleet.kill_one() is not None:
                assert self._kill_every_s is not None
                kill_at_s = now_s + self._kill_every_s
            await elapsed(self.stopping, PERIOD_S)

    def _warn(self, picture: SessionView) -> None:
        """Say once what makes the swarm slow (train/pipeline/microbatch_size.py)."""
        if (made := self._plan.settings) is None or self._slow:
            return
        rate = picture.tokens_per_s / made.model.context
        at_once = math.inf if self._plan.devices else processors()
        slow = slowness(made, speeds(picture.nodes), rate, at_once)
        if slow is not None:
            self._slow = f"{slow[0]}: {slow[1]}"
            self._screen.note(self._slow)

    async def _gone(self, child: Child) -> None:
        self._screen.note(f"{child.name} is gone: {child.reason}")
        if (fault := child.fault) is not None and not self.stopping.is_set():
            self._failure = str(fault)
            self._code = fault.exit_code
            self.stop(f"{child.name} cannot work")
            return
        if self._kill_every_s is not None and child is not self.fleet.bootstrap and child.trained:
            await self.fleet.replace(child)

    def _picture(self, now_s: float, ready_s: float | None) -> SessionView:
        facts = tuple(self.fleet.facts())
        seen = totals(facts)
        self._rate.see(now_s, seen.tokens)
        return SessionView(now_s - self._began_s, ready_s, self._rate.tokens_per_s, facts, seen, self.fleet.page)

    def _summary(self) -> Summary:
        facts = self.fleet.facts()
        return Summary(
            run=self._run,
            nodes=self._plan.nodes,
            wall_s=asyncio.get_running_loop().time() - self._began_s,
            tokens_per_s=self._rate.tokens_per_s,
            totals=totals(facts),
            killed=self.fleet.killed,
            stopped=self._stopped,
            folder=str(self._plan.folder),
            exit_reasons={node.name: node.reason for node in facts},
            failure=self._failure,
            exit_code=self._code if self._failure else 0,
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None
        signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        seen = 0

        def arrived(number: signal.Signals) -> None:
            nonlocal seen
            seen += 1
            if seen == 1:
                self.stop(number.name)
                self._screen.note(f"{number.name}: stopping all nodes; again to kill them at once")
            elif seen == 2:
                self.fleet.kill()
                main.cancel()
            else:
                self.fleet.kill()
                os._exit(EXIT_INTERRUPTED)

        if threading.current_thread() is not threading.main_thread():
            signals = ()  # a notebook's own
        for number in signals:
            loop.add_signal_handler(number, arrived, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
