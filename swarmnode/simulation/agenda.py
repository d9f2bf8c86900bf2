"""What is due in virtual time: callbacks that are ready, in the order they were asked for, and timers, in the order of
their deadlines, equal ones in an order drawn from the seed.

`Agenda` is what the loop needs and no more, so that agenda.c can be the same in C: a thousand simulated nodes run
millions of callbacks, and in Python a sixth of the time was spent here (measured: `simulate --scenario thousand`).
Needs the standard library only.
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

from swarmnode.compiled import Compiled, Library

COMPACT_TIMERS = 512  # cancelled timers kept before the heap is rebuilt, if they are the larger part
MODULE = "swarmnode_agenda"


class Done(Protocol):
    """As far as a task matters here."""

    def done(self) -> bool: ...


class Handle:
    """asyncio.Handle as far as asyncio itself uses it."""

    __slots__ = ("agenda", "args", "callback", "context", "is_cancelled", "when_due")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self.is_cancelled = False
        self.when_due = 0.0
        self.agenda: Agenda | None = None  # while it is in the heap of timers

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.callback, self.args = None, ()
            if self.agenda is not None:
                self.agenda.timer_cancelled()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_due


class Agenda:
    """`draw` is asked for a number with each timer; `owner` says whose a callback is; `raised` is told the exceptions
    of callbacks, as asyncio.Handle would: told, not raised."""

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
        """Run so far."""
        self.frozen: dict[object, list[Handle]] = {}
        """Owners that stand still, and what came due for them meanwhile, in its order."""

    # ---- as asyncio asks for them

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
        handle.when_due, handle.agenda = when, self
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

    def live(self, main: Done, standstill: int, until: int) -> str:
        """Run what is ready, then go to the next moment something is due, until `main` is done ("done"), `callbacks` is
        `until` and nothing is ready ("pause"), there are no timers ("deadlock"), or time did not pass for `standstill`
        callbacks."""
        ready, limit = self._ready, self.callbacks + standstill
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
        """To the next moment something is due; all that is due at that very moment becomes ready. False: no timers."""
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
        """What was kept for a frozen owner is ready."""
        self._ready.extend(handles)

    def upcoming(self) -> list[Callable[..., object]]:
        """The callbacks that are ready."""
        return [handle.callback for handle in self._ready if handle.callback is not None]

    def clear(self) -> None:
        self._ready.clear()
        self._timers.clear()


# Which Python, to the build: its C structures are not those of another.
COMPILED = Compiled(
    MODULE,
    (Path(__file__).with_name("agenda.c"),),
    ("-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}")
    + (("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
    tuned=False,
    kind=sys.version + str(sysconfig.get_config_var("EXT_SUFFIX")),
)


def _load(path: Path) -> type[Agenda]:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    found: type[Agenda] = module.Agenda
    return found


LIBRARY: Library[type[Agenda]] = Library(COMPILED, _load, Agenda)
build, best, unused = LIBRARY.build, LIBRARY.best, LIBRARY.unused
