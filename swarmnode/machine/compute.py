"""The device as a port: one thread that runs one piece of arithmetic at a time, the most urgent first."""

from __future__ import annotations

import asyncio
import heapq
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarmnode.errors import LocalFault
from swarmnode.metrics import name
from swarmnode.ports import Priority, StreamingMessage, Telemetry

T = TypeVar("T")
WAITING_MAX = 4096  # guess: far above what slots and windows allow; more indicates a bug


@dataclass(order=True, slots=True)
class _Work:
    priority: Priority
    serial: int
    work: Callable[[], Any] = field(compare=False)
    result: asyncio.Future[Any] = field(compare=False)


class ThreadCompute:
    """ports.Compute on its own thread. `close` waits for the running piece and drops the queued ones.

    `load` is the share of its time that the device may work, in (0, 1]: after a piece of t seconds it rests for t (1 -
    load) / load. Outer steps do not wait for a rest to end, because other nodes wait for them.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self.load = 1.0
        self._rested_s = -math.inf  # end of the rest, by time.perf_counter
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._queue: list[_Work] = []
        self._serial = 0
        self._waiting = 0
        self._worked_s = 0.0  # in finished pieces, with their rests
        self._since_s: float | None = None  # start of the running piece, by the same clock
        self._closing = False
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def worked_s(self) -> float:
        with self._more:
            since_s = self._since_s
            return self._worked_s + (time.perf_counter() - since_s if since_s is not None else 0.0)

    async def run(self, priority: Priority, samples: int, work: Callable[[], T]) -> T:
        if self._closing:
            raise LocalFault("the compute thread is closed")
        if self._waiting >= WAITING_MAX:
            raise LocalFault(f"{self._waiting} pieces of work are queued for the compute thread; at most {WAITING_MAX}")
        result: asyncio.Future[T] = self._loop.create_future()
        self._serial += 1
        piece = _Work(priority, self._serial, work, result)
        self._waiting += 1
        try:
            with self._more:
                heapq.heappush(self._queue, piece)
                self._more.notify()
            return await result
        finally:
            self._waiting -= 1
            self._telemetry.gauge(name.COMPUTE_WAITING, float(self._waiting))

    def close(self) -> None:
        """Finish the running piece, cancel the queued ones, end the thread."""
        with self._more:
            self._closing = True
            dropped, self._queue = self._queue, []
            self._more.notify()
        for piece in dropped:
            piece.result.cancel()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._more:
                while not self._closing and (rest_s := self._rest_s()) > 0.0:
                    self._more.wait(min(rest_s, threading.TIMEOUT_MAX))
                if self._closing:
                    return
                piece = heapq.heappop(self._queue)
            if piece.result.cancelled():
                continue
            begun, began_s = time.thread_time(), time.perf_counter()
            with self._more:
                self._since_s = began_s
            value: Any = None
            error: BaseException | None = None
            try:
                value = piece.work()
                if isinstance(value, StreamingMessage) and not value.complete:
                    self._loop.call_soon_threadsafe(_give, piece, value)
                    value.finish()  # its error is also raised for all waiters of its tensors
            except BaseException as caught:  # noqa: BLE001  handed to the waiter; a thread must not swallow it
                error = caught
            seconds = time.thread_time() - begun
            with self._more:
                now_s = time.perf_counter()
                rest_s = (now_s - began_s) * (1.0 - self.load) / self.load
                self._worked_s += now_s - began_s + rest_s
                self._rested_s = max(now_s, self._rested_s) + rest_s
                self._since_s = None
            self._loop.call_soon_threadsafe(self._deliver, piece, value, error, seconds)

    def _rest_s(self) -> float:
        """Seconds until there may be work; 0 if there is some now."""
        if not self._queue:
            return math.inf
        urgent = self._queue[0].priority == Priority.OUTER
        return 0.0 if urgent else max(0.0, self._rested_s - time.perf_counter())

    def _deliver(self, piece: _Work, value: Any, error: BaseException | None, seconds: float) -> None:
        self._telemetry.count(name.COMPUTE_SECONDS, seconds, kind=piece.priority.name.lower())
        if piece.result.done():
            return
        if error is not None:
            piece.result.set_exception(error)
        else:
            piece.result.set_result(value)


def _give(piece: _Work, value: StreamingMessage) -> None:
    """Deliver the value of `piece`, which continues."""
    if not piece.result.done():
        piece.result.set_result(value)
