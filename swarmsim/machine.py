"""A simulated node's device and disk: work takes the time its arithmetic would take."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from swarmnode.base.errors import DataError, LocalFault
from swarmnode.base.parted_work import GivenEarly, Parts, run_whole
from swarmnode.base.ports import Priority
from swarmnode.keep.recovery.tensorfile import scatter

T = TypeVar("T")
WAITING_MAX = 4096  # as app/machine/compute.py
HASH_RATE = 2e9  # measured: SHA-256 on one core


class Meter:
    """Cost of arithmetic: replicas add to it while a piece of work runs; the machine takes it and charges time."""

    def __init__(self) -> None:
        self._flops = 0.0
        self._idle = 0.0
        self._nbytes = 0.0
        self._seconds = 0.0
        self.state_nbytes = 0.0  # of the replica on this machine: the bytes that hashing reads

    def add(self, flops: float = 0.0, nbytes: float = 0.0, idle: float = 0.0, seconds: float = 0.0) -> None:
        """Add costs. `idle`: FLOP that the device could have done meanwhile but did not; `seconds`: of a processor,
        whatever the device."""
        self._flops += flops
        self._idle += idle
        self._nbytes += nbytes
        self._seconds += seconds

    def take(self) -> tuple[float, float, float, float]:
        """(FLOP, FLOP not done meanwhile, bytes of memory traffic, seconds of a processor) since the last call."""
        taken = self._flops, self._idle, self._nbytes, self._seconds
        self._flops = self._idle = self._nbytes = self._seconds = 0.0
        return taken


class _SimWork:
    __slots__ = ("priority", "result", "work")

    def __init__(self, priority: Priority, work: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        self.priority = priority
        self.work = work
        self.result = result


class SimMachine:
    """ports.Compute: one piece at a time, most urgent first, then oldest first, as app/machine/compute.py.

    A piece runs when its time begins; its result is delivered when its time is over.
    """

    def __init__(self, flops: float, memory_rate: float, meter: Meter, rng: random.Random, noise: float) -> None:
        """`flops` in FLOP per second, `memory_rate` in bytes per second; `noise` is the relative spread of times."""
        self._loop = asyncio.get_running_loop()
        self.flops = flops
        self._memory_rate = memory_rate
        self._meter = meter
        self._rng = rng
        self._noise = noise
        self._queue: list[tuple[int, int, _SimWork]] = []
        self._serial = 0
        self._waiting = 0
        self._busy = False
        self._closed = False
        self.slowness = 1.0
        """Factor on the duration of all work started from now on."""
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        """Seconds worked so far, by kind."""
        self.flop = 0.0
        """FLOP of training done so far."""

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def worked_s(self) -> float:
        return sum(self.busy_s.values())

    async def run(self, priority: Priority, samples: int, work: Callable[[], T | Parts[T] | GivenEarly[T]]) -> T:
        if self._closed:
            raise LocalFault("the compute thread is closed")
        if self._waiting >= WAITING_MAX:
            raise LocalFault(f"{self._waiting} pieces of work are queued for the compute thread; at most {WAITING_MAX}")
        result: asyncio.Future[T] = self._loop.create_future()
        self._serial += 1
        heapq.heappush(self._queue, (priority, self._serial, _SimWork(priority, work, result)))
        self._waiting += 1
        try:
            if not self._busy:
                self._next()
            return await result
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the process: queued work is never done."""
        self._closed = True
        self._queue.clear()

    def _next(self) -> None:
        while self._queue:
            piece = heapq.heappop(self._queue)[2]
            if piece.result.done():
                continue
            self._busy = True
            value: Any = None
            error: BaseException | None = None
            then: Callable[[], None] | None = None
            try:
                value = piece.work()
                if isinstance(value, Generator):
                    value = run_whole(value)
                if isinstance(value, GivenEarly):
                    then = partial(value.then, value.rest())
                    value = value.value
            except BaseException as caught:  # noqa: BLE001  handed to the waiter
                error = caught
            seconds = self._seconds()
            self._loop.call_later(seconds, self._done, piece, seconds, value, error, then)
            return

    def _seconds(self) -> float:
        flops, idle, nbytes, metered_s = self._meter.take()
        seconds = (flops + idle) / self.flops + nbytes / self._memory_rate + metered_s
        if not flops and not nbytes and not metered_s:  # making or hashing a state; all else is metered
            seconds = self._meter.state_nbytes / HASH_RATE
        self.flop += flops
        if self._noise:
            seconds *= 1.0 + self._noise * (2.0 * self._rng.random() - 1.0)
        return seconds * self.slowness

    def _done(
        self,
        piece: _SimWork,
        seconds: float,
        value: Any,
        error: BaseException | None,
        then: Callable[[], None] | None,
    ) -> None:
        self._busy = False
        self.busy_s[piece.priority.name.lower()] += seconds
        if not piece.result.done():
            if error is not None:
                piece.result.set_exception(error)
            else:
                piece.result.set_result(value)
        if then is not None:
            then()
        if not self._closed:
            self._next()


class Disk:
    """A node's persistent disk, or a shared folder: ports.Store. It fills up, discards a write interrupted by a crash,
    and in `betray` loses writes that it reported as synced."""

    def __init__(self, capacity: int, rate: float = 2e8) -> None:
        self.capacity = capacity
        self._rate = rate
        self._blobs: dict[str, bytes] = {}  # oldest write first
        self.torn = 0

    @property
    def used(self) -> int:
        return sum(map(len, self._blobs.values()))

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write atomically: the blob becomes visible once it is synced. Raises LocalFault if the disk is full."""
        nbytes = sum(memoryview(part).nbytes for part in parts)
        if self.used - len(self._blobs.get(name, b"")) + nbytes > self.capacity:
            raise LocalFault(f"cannot write {name}: no space left; free space or choose another --home")
        data = b"".join(parts)
        try:
            await asyncio.sleep(nbytes / self._rate)
        except asyncio.CancelledError:
            self.torn += 1
            raise
        self._blobs.pop(name, None)
        self._blobs[name] = data
        return hashlib.sha256(data).hexdigest()

    async def read(self, name: str, sha256: str | None = None) -> bytes | None:
        data = self._blobs.get(name)
        if data is not None:
            await asyncio.sleep(len(data) / self._rate)
            if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
                raise DataError(f"{name}: damaged; use another checkpoint")
        return data

    async def fill(self, name: str, parts: Sequence[memoryview], sha256: str) -> bool:
        return scatter(await self.read(name, sha256), parts, name)

    async def names(self, prefix: str = "") -> dict[str, int]:
        return {name: len(data) for name, data in sorted(self._blobs.items()) if name.startswith(prefix)}

    async def delete(self, name: str) -> None:
        self._blobs.pop(name, None)

    def betray(self, count: int) -> None:
        """Simulate a power cut behind a disk that lied: the last `count` blobs are gone, the one before is
        truncated."""
        names = list(self._blobs)
        for name in names[len(names) - count :] if count else []:
            del self._blobs[name]
        if count and len(names) > count:
            kept = names[len(names) - count - 1]
            self._blobs[kept] = self._blobs[kept][: len(self._blobs[kept]) // 2]
