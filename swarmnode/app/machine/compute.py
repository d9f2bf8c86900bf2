"""The device as a port: one thread that runs one piece of arithmetic at a time, the most urgent first.

A round's arithmetic on weights in main memory needs no device. It runs beside, in a second thread, and the device goes
on with microbatches. All other pieces wait for it, because they read or write the same weights.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarmnode.base.errors import LocalFault
from swarmnode.base.metrics import name
from swarmnode.base.parted_work import GivenEarly, Outcome, Parts, following, outcome
from swarmnode.base.ports import Priority, StreamingMessage, Telemetry

T = TypeVar("T")
Pace = Callable[[Priority, int], float]
"""Seconds that a device takes for a piece of this priority and so many samples; 0: as long as it takes here."""

MICROBATCHES = (Priority.BACKWARD, Priority.FORWARD)  # they touch neither slow weights nor packets


@dataclass(order=True, slots=True)
class _Work:
    priority: Priority
    serial: int
    samples: int = field(compare=False)
    asked_s: float = field(compare=False)  # by time.perf_counter
    work: Callable[[], Any] = field(compare=False)
    result: asyncio.Future[Any] = field(compare=False)
    parts: Parts[Any] | None = field(compare=False, default=None)  # once begun, if the work comes in parts
    before: Outcome = field(compare=False, default=(None, None))  # of the part done beside
    seconds: float = field(compare=False, default=0.0)  # of this thread's processor, so far


class ThreadCompute:
    """ports.Compute on its own thread. `close` waits for the running piece and drops the queued ones.

    `load` is the share of its time that the device may work, in (0, 1]: after a piece of t seconds it rests for t (1 -
    load) / load. Outer steps do not wait for a rest to end, because other nodes wait for them.

    `pace` makes this thread as slow as another device (device_pace.py). A piece then starts when it is asked for or
    when the device has ended the one before, whichever is later, and its result is given when the device would give
    it. A piece that this machine does late does not delay the next one, so a busy machine shows the same device.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.load = 1.0
        self.pace: Pace | None = None
        self._device_free_s = -math.inf  # when the paced device has ended its last piece, by time.perf_counter
        self._rested_s = -math.inf  # end of the rest, by time.perf_counter
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._queue: list[_Work] = []
        self._aside: ThreadPoolExecutor | None = None  # made when first needed
        self._beside = False  # whether a piece is under way there
        self._serial = 0
        self.waiting = 0
        self._worked_s = 0.0  # in finished pieces, with their rests
        self._since_s: float | None = None  # start of the running piece, by the same clock
        self._closing = False
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        self._thread.start()

    @property
    def worked_s(self) -> float:
        with self._more:
            since_s = self._since_s
            return self._worked_s + (time.perf_counter() - since_s if since_s is not None else 0.0)

    async def run(self, priority: Priority, samples: int, work: Callable[[], T | Parts[T] | GivenEarly[T]]) -> T:
        if self._closing:
            raise LocalFault("the compute thread is closed")
        result: asyncio.Future[T] = self._loop.create_future()
        self._serial += 1
        piece = _Work(priority, self._serial, samples, time.perf_counter(), work, result)
        self.waiting += 1
        try:
            with self._more:
                self._queue.append(piece)
                self._more.notify()
            return await result
        finally:
            self.waiting -= 1
            self._telemetry.gauge(name.COMPUTE_WAITING, float(self.waiting))

    def close(self) -> None:
        """Finish the pieces that have begun, cancel the queued ones, end the threads."""
        with self._more:
            self._closing = True
            dropped = [piece for piece in self._queue if piece.parts is None]
            self._queue = [piece for piece in self._queue if piece.parts is not None]
            self._more.notify()
        for piece in dropped:
            piece.result.cancel()
        self._thread.join()
        if self._aside is not None:
            self._aside.shutdown()

    def _serve(self) -> None:
        """The compute thread: do one piece of work after the other until closed."""
        while (piece := self._take()) is not None:
            if piece.parts is None and piece.result.cancelled():
                continue
            cpu_s = time.thread_time()
            began_s = time.perf_counter()
            with self._more:
                self._since_s = began_s
            value, beside, error = self._do(piece)
            self._account(piece, time.thread_time() - cpu_s, began_s, goes_on=beside is not None)
            if beside is not None:
                self._go_beside(piece, beside)
            if piece.parts is None or beside is None:
                self._loop.call_soon_threadsafe(self._deliver, piece, value, error)

    def _take(self) -> _Work | None:
        """Wait for the next piece, and for the end of a rest; None when closed and nothing is left."""
        with self._more:
            while (rest_s := self._rest_s()) > 0.0:
                if self._closing and not self._queue and not self._beside:
                    return None
                self._more.wait(min(rest_s, threading.TIMEOUT_MAX))
            piece = self._next()
            assert piece is not None
            self._queue.remove(piece)
            return piece

    def _do(self, piece: _Work) -> tuple[Any, Callable[[], Any] | None, BaseException | None]:
        """(value, what the second thread does next, error) of `piece`. A value that is ready before its work is done is
        given at once."""
        value: Any = None
        beside: Callable[[], Any] | None = None
        try:
            value, beside = _begun(piece)
            if isinstance(value, GivenEarly):
                early = value
                value = early.value
                self._loop.call_soon_threadsafe(_give, piece, value)
                self._loop.call_soon_threadsafe(early.then, early.rest())
            elif isinstance(value, StreamingMessage) and not value.complete:
                self._loop.call_soon_threadsafe(_give, piece, value)
                if value.beside:
                    beside = value.finish
                else:
                    value.finish()  # its error is also raised for all waiters of its tensors
        except BaseException as caught:  # noqa: BLE001  handed to the waiter; a thread must not swallow it
            return value, beside, caught
        return value, beside, None

    def _account(self, piece: _Work, cpu_s: float, began_s: float, *, goes_on: bool) -> None:
        """Count the seconds of `piece`, those of the paced device where one is set, and the rest that follows them."""
        paced_s = self._wait_for_device(piece)
        piece.seconds = paced_s or piece.seconds + cpu_s
        with self._more:
            now_s = time.perf_counter()
            took_s = paced_s or now_s - began_s
            rest_s = took_s * (1.0 - self.load) / self.load
            self._worked_s += took_s + rest_s
            self._rested_s = max(now_s, self._rested_s) + rest_s
            self._since_s = None
            self._beside = self._beside or goes_on

    def _wait_for_device(self, piece: _Work) -> float:
        """Wait until the paced device has done `piece`; the seconds it takes, 0 where nothing paces it."""
        paced_s = 0.0 if self.pace is None else self.pace(piece.priority, piece.samples)
        if paced_s > 0.0:
            self._device_free_s = max(self._device_free_s, piece.asked_s) + paced_s
            with self._more:
                self._more.wait_for(lambda: self._closing, max(0.0, self._device_free_s - time.perf_counter()))
        return paced_s

    def _next(self) -> _Work | None:
        """The most urgent piece that may run now."""
        may = [piece for piece in self._queue if piece.priority in MICROBATCHES] if self._beside else self._queue
        return min(may, default=None)

    def _go_beside(self, piece: _Work, beside: Callable[[], Any]) -> None:
        """Do a part of `piece` in the second thread, or here if the system gives no other."""
        if self._aside is None:
            self._aside = ThreadPoolExecutor(1, "beside the device")
        try:
            self._aside.submit(self._do_beside, piece, beside)
        except RuntimeError:
            self._do_beside(piece, beside)

    def _do_beside(self, piece: _Work, beside: Callable[[], Any]) -> None:
        """Do a part of `piece` that needs no device, in the second thread."""
        piece.before = outcome(beside)
        with self._more:
            self._beside = False
            if piece.parts is not None:
                self._queue.append(piece)
            self._more.notify()

    def _rest_s(self) -> float:
        """Seconds until there may be work; 0 if there is some now."""
        if (piece := self._next()) is None:
            return math.inf
        return 0.0 if piece.priority == Priority.OUTER else max(0.0, self._rested_s - time.perf_counter())

    def _deliver(self, piece: _Work, value: Any, error: BaseException | None) -> None:
        self._telemetry.count(name.COMPUTE_SECONDS, piece.seconds, kind=piece.priority.name.lower())
        if piece.result.done():
            return
        if error is not None:
            piece.result.set_exception(error)
        else:
            piece.result.set_result(value)


def _begun(piece: _Work) -> tuple[Any, Callable[[], Any] | None]:
    """Do `piece` up to its next part that needs no device. Returns (its value, None), or (None, that part)."""
    if piece.parts is None:
        value = piece.work()
        if not isinstance(value, Generator):
            return value, None
        piece.parts = value
    try:
        return None, following(piece.parts, piece.before)
    except StopIteration as end:
        return end.value, None


def _give(piece: _Work, value: Any) -> None:
    """Deliver the value of `piece`, which continues."""
    if not piece.result.done():
        piece.result.set_result(value)
