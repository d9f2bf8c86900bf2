"""Virtual time: an asyncio event loop that jumps to the next timer when all tasks wait. One seed gives one order of
events.

It is deterministic: callbacks run in order of request; timers of equal deadline in an order drawn from the seed; tasks
hash by serial number, so that the sets inside `asyncio.TaskGroup` and `asyncio.wait` are iterated in one order; nothing
from outside can wake it. A process may be frozen (SIGSTOP): its callbacks are kept until it is thawed.

Needs only the standard library, so that it can be checked on other Python versions without an environment.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import gc
import random
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from swarmsim import sandbox
from swarmsim.event_queue import Handle, best
from swarmsim.sandbox import SandboxViolation

T = TypeVar("T")

OWNER: contextvars.ContextVar[object] = contextvars.ContextVar("swarmsim.owner", default=None)
"""The process of the virtual world that a task or a callback belongs to; None: the world itself."""

STANDSTILL_CALLBACKS = 2_000_000  # guess: more callbacks at one moment of virtual time mean a loop that never waits
WAITING_SHOWN = 20
FULL_COLLECTION_EVERY = 16
# collect cycles (of exceptions) this often; measured: some 5,000 objects a million callbacks
GARBAGE_CALLBACKS = 10_000_000


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set: nothing will ever happen."""


class Standstill(RuntimeError):
    """Callbacks call each other without end while time does not advance."""


class SerialTask(asyncio.Task[T]):
    """A task that hashes by its serial number, not by its address."""

    __slots__ = ("context", "serial")
    serial: int
    context: contextvars.Context

    def __hash__(self) -> int:
        return self.serial

    def __eq__(self, other: object) -> bool:
        return self is other


# Half of its methods raise; typeshed would require all of them to be written out.
Loop: Any = object if TYPE_CHECKING else asyncio.AbstractEventLoop


class VirtualLoop(Loop):  # type: ignore[misc,unused-ignore]
    """`run(main)` runs a coroutine to its end. Equal seeds run equal programs equally."""

    def __init__(self, seed: int = 0) -> None:
        # `random` hashes a text seed with SHA-512, independent of PYTHONHASHSEED.
        draw = random.Random(f"swarmnode virtual clock {seed}").random
        self._agenda = agenda = best()(draw, OWNER, self._callback_raised)
        self.time = agenda.time
        self.call_soon = agenda.call_soon
        self.call_at = agenda.call_at
        self.call_later = agenda.call_later
        self._tasks_made = 0
        self._thread: int | None = None
        self._closed = False
        self._collections = 0
        self.faults: list[dict[str, Any]] = []
        """Contexts given to the exception handler: exceptions that no code handled."""

    @property
    def callbacks(self) -> int:
        """Callbacks run so far: the events of the simulation."""
        return self._agenda.callbacks

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        if threading.get_ident() != self._thread:
            raise SandboxViolation("a wake-up from another thread in the virtual world")
        return self._agenda.call_soon(callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> SerialTask[T]:
        # The serial must be set before the constructor adds the task to asyncio's set of all tasks.
        self._tasks_made += 1
        task: SerialTask[T] = SerialTask.__new__(SerialTask)
        task.serial = self._tasks_made
        task.context = context = contextvars.copy_context() if context is None else context
        task.__init__(coro, loop=self, name=name or "", context=context, **more)  # type: ignore[misc]
        return task

    # ---- frozen processes

    def freeze(self, owner: object) -> None:
        """Stop all callbacks of `owner` until `thaw`; time advances without it."""
        self._agenda.frozen.setdefault(owner, [])

    def thaw(self, owner: object) -> None:
        """Run all callbacks that came due for `owner` meanwhile, in order."""
        self._agenda.again(self._agenda.frozen.pop(owner, ()))

    def frozen(self, owner: object) -> bool:
        return owner in self._agenda.frozen

    # ---- running

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """The result of `main`. Remaining tasks are then cancelled and awaited.

        Raises Deadlock, Standstill, the errors of `main`, and RuntimeError for an exception that no code handled.
        """
        sandbox.watch()
        garbage = gc.isenabled()
        gc.disable()  # finalizers would run at unpredictable times
        before = asyncio._get_running_loop()
        if before is not None:
            raise RuntimeError("a virtual loop cannot run inside another loop")
        hooks = sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)
        self._thread = threading.get_ident()
        sandbox.inside.add(self._thread)
        try:
            task = self.create_task(main)
            self._run_until(task)
            result = task.result()
            self._cancel_rest()
            if self.faults:
                fault = self.faults[0]
                raise RuntimeError(f"{fault.get('message')}: {fault.get('exception')!r}") from fault.get("exception")
            return result
        finally:
            sandbox.inside.discard(self._thread)
            self._thread = None
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            if garbage:
                gc.enable()

    def run_until_complete(self, future: Any) -> Any:
        return self.run(future)

    def _cancel_rest(self) -> None:
        rest = [task for task in asyncio.all_tasks(self) if not task.done()]
        self._agenda.frozen.clear()
        for task in sorted(rest, key=hash):
            task.cancel()
        for task in sorted(rest, key=hash):
            self._run_until(task)

    def _run_until(self, main: asyncio.Task[Any]) -> None:
        agenda = self._agenda
        while True:
            end = agenda.live(main, STANDSTILL_CALLBACKS, agenda.callbacks + GARBAGE_CALLBACKS)
            if end == "done":
                return
            if end == "standstill":
                first = ", ".join(map(repr, agenda.upcoming()[:5]))
                raise Standstill(f"{STANDSTILL_CALLBACKS} callbacks at {agenda.time():.6f} s: {first}")
            if end == "deadlock":
                raise Deadlock(f"at {agenda.time():.3f} s all tasks wait and no timer is set:\n{self.waiting(main)}")
            self._collections += 1
            gc.collect(1 if self._collections % FULL_COLLECTION_EVERY else 2)

    def waiting(self, main: asyncio.Task[Any] | None = None) -> str:
        """Place at which each task waits, one line per place."""
        places: collections.Counter[str] = collections.Counter()
        for task in sorted(asyncio.all_tasks(self), key=hash):
            owner = task.context.get(OWNER) if isinstance(task, SerialTask) else None
            label = "main" if task is main else str(owner) if owner is not None else task.get_name() or "a task"
            places[f"{label}: {_place(task)}"] += 1
        lines = [f"  {count} x {place}" if count > 1 else f"  {place}" for place, count in places.items()]
        more = len(lines) - WAITING_SHOWN
        return "\n".join(lines[:WAITING_SHOWN] + ([f"  and {more} more"] if more > 0 else []))

    # ---- further interface for asyncio

    get_debug = staticmethod(bool)  # never; each future asks, and a builtin answers at once

    def is_running(self) -> bool:
        return self._thread is not None

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._agenda.clear()
        self._closed = True

    def _callback_raised(self, error: Exception) -> None:
        self.call_exception_handler({"message": "a callback raised", "exception": error})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.faults.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.faults.append(context)

    async def shutdown_asyncgens(self) -> None:
        return None

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        return None

    run_in_executor = sandbox.forbidden("an executor (asyncio.to_thread)")
    set_default_executor = sandbox.forbidden("an executor")
    create_connection = sandbox.forbidden("a socket")
    create_server = sandbox.forbidden("a socket")
    create_unix_connection = sandbox.forbidden("a socket")
    create_unix_server = sandbox.forbidden("a socket")
    create_datagram_endpoint = sandbox.forbidden("a socket")
    connect_accepted_socket = sandbox.forbidden("a socket")
    sock_recv = sandbox.forbidden("a socket")
    sock_sendall = sandbox.forbidden("a socket")
    sock_connect = sandbox.forbidden("a socket")
    sock_accept = sandbox.forbidden("a socket")
    getaddrinfo = sandbox.forbidden("a name look-up")
    getnameinfo = sandbox.forbidden("a name look-up")
    subprocess_exec = sandbox.forbidden("a subprocess")
    subprocess_shell = sandbox.forbidden("a subprocess")
    connect_read_pipe = sandbox.forbidden("a pipe")
    connect_write_pipe = sandbox.forbidden("a pipe")
    add_reader = sandbox.forbidden("a file descriptor")
    add_writer = sandbox.forbidden("a file descriptor")
    add_signal_handler = sandbox.forbidden("a signal handler")


def _place(task: asyncio.Task[Any]) -> str:
    """The place where the innermost coroutine of `task` waits."""
    found: Any = task.get_coro()
    place = "not begun"
    for _ in range(100):
        frame = getattr(found, "cr_frame", None) or getattr(found, "gi_frame", None) or getattr(found, "ag_frame", None)
        if frame is not None:
            code = frame.f_code
            place = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_qualname}"
        inner = getattr(found, "cr_await", None)
        if inner is None:
            inner = getattr(found, "gi_yieldfrom", None)
        if inner is None or inner is found:
            break
        found = inner
    return place


def run(main: Coroutine[Any, Any, T], seed: int = 0) -> T:
    """Run `main` in a new virtual loop."""
    loop = VirtualLoop(seed)
    try:
        return loop.run(main)
    finally:
        loop.close()


def owned(owner: object) -> contextvars.Context:
    """A context whose tasks and callbacks belong to `owner`."""
    context = contextvars.copy_context()
    context.run(OWNER.set, owner)
    return context


__all__ = [
    "OWNER",
    "Deadlock",
    "SandboxViolation",
    "SerialTask",
    "Standstill",
    "VirtualLoop",
    "owned",
    "run",
]
