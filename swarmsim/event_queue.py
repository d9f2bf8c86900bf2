"""The event queue of virtual time: ready callbacks in order of request, and timers in order of deadline; timers of
equal deadline in an order drawn from the seed.

`EventQueue` is only what the loop needs, so that agenda.c can implement the same in C: a thousand simulated nodes run
millions of callbacks, and in Python a sixth of the time was spent here (measured: `simulate --scenario thousand`).
Needs only the standard library.
"""

from __future__ import annotations

import collections
import contextvars
import heapq
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from swarmnode_methods.native_build import Compiled, Library

COMPACT_TIMERS = 512  # rebuild the heap once it holds more cancelled timers than this, if they are the larger part
MODULE = "swarmnode_agenda"


class TaskState(Protocol):
    """The part of a task's interface that matters here."""

    def done(self) -> bool: ...


class Handle:
    """The part of asyncio.Handle that asyncio itself uses."""

    __slots__ = ("agenda", "args", "callback", "context", "is_cancelled", "when_due")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self.is_cancelled = False
        self.when_due = 0.0
        self.agenda: EventQueue | None = None  # the queue whose heap of timers holds it

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.callback = None
            self.args = ()
            if self.agenda is not None:
                self.agenda.timer_cancelled()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_due


class EventQueue:
    """`draw` returns a number for each timer, `owner` identifies a callback's process, and `raised` receives exceptions
    of callbacks, which are reported as by asyncio.Handle, not raised."""

    def __init__(
        self, draw: Callable[[], float], owner: contextvars.ContextVar[object], raised: Callable[[Exception], None]
    ) -> None:
        self._draw = draw
        self._owner = owner
        self._raised = raised
        self._now = 0.0
        self._ready: collections.deque[Handle] = collections.deque()
        self._timers: list[tuple[float, float, int, Handle]] = []
        self._timers_cancelled = 0
        self._serial = 0
        self.callbacks = 0
        """Callbacks run so far."""
        self.frozen: dict[object, list[Handle]] = {}
        """Frozen owners, and their callbacks that came due meanwhile, in order."""

    # ---- interface for asyncio

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        if when != when:
            raise ValueError("a timer for NaN")
        handle = Handle(callback, args, context)
        handle.when_due = when
        handle.agenda = self
        self._serial += 1
        heapq.heappush(self._timers, (when, self._draw(), self._serial, handle))
        return handle

    def timer_cancelled(self) -> None:
        self._timers_cancelled += 1
        if self._timers_cancelled > COMPACT_TIMERS and 2 * self._timers_cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[3].is_cancelled]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    # ---- running

    def live(self, main: TaskState, standstill: int, until: int) -> str:
        """Run ready callbacks and advance time until a stop condition; return its name.

        "done": `main` is done. "pause": `callbacks` reached `until` and nothing is ready. "deadlock": there are no
        timers. "standstill": time did not advance for `standstill` callbacks.
        """
        ready = self._ready
        limit = self.callbacks + standstill
        while not main.done():
            if not ready:
                if self.callbacks >= until:
                    return "pause"
                moment = self._now
                if not self._advance():
                    return "deadlock"
                if self._now > moment:
                    limit = self.callbacks + standstill
                continue
            if self.callbacks >= limit:
                return "standstill"
            handle = ready.popleft()
            if handle.is_cancelled:
                continue
            if self.frozen and (owner := handle.context.get(self._owner)) in self.frozen:
                self.frozen[owner].append(handle)
                continue
            self.callbacks += 1
            try:
                handle.context.run(handle.callback, *handle.args)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001  as asyncio.Handle
                self._raised(error)
        return "done"

    def _advance(self) -> bool:
        """Advance to the next deadline and make all timers due then ready. Returns False if there are no timers."""
        timers = self._timers
        while timers and timers[0][3].is_cancelled:
            heapq.heappop(timers)
            self._timers_cancelled -= 1
        if not timers:
            return False
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            handle = heapq.heappop(timers)[3]
            handle.agenda = None
            if handle.is_cancelled:
                self._timers_cancelled -= 1
            else:
                self._ready.append(handle)
        return True

    def again(self, handles: Iterable[Handle]) -> None:
        """Make the callbacks kept for a frozen owner ready."""
        self._ready.extend(handles)

    def upcoming(self) -> list[Callable[..., object]]:
        """The ready callbacks."""
        return [handle.callback for handle in self._ready if handle.callback is not None]

    def clear(self) -> None:
        self._ready.clear()
        self._timers.clear()


# The Python version is part of the build's key, because its C structures differ between versions.
COMPILED = Compiled(
    MODULE,
    (Path(__file__).with_name("agenda.c"),),
    ("-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}")
    + (("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
    tuned=False,
    kind=sys.version + str(sysconfig.get_config_var("EXT_SUFFIX")),
)


def _load(path: Path) -> type[EventQueue]:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    found: type[EventQueue] = module.Agenda
    return found


LIBRARY: Library[type[EventQueue]] = Library(COMPILED, _load, EventQueue)
build = LIBRARY.build
best = LIBRARY.best
unused = LIBRARY.unused
