"""How much of a tensor's bytes is final while a thread still writes the rest: what may already be sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from swarmnode.errors import LocalFault


class Filling:
    """The watermark of `nbytes` that are written from the first to the last. It only rises; it stops for good when
    writing fails. One thread writes; any number of coroutines, of whatever event loops, wait."""

    __slots__ = ("_error", "_lock", "_ready_nbytes", "_waiters", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ready_nbytes = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiters: dict[asyncio.Future[None], int] = {}

    @property
    def ready_nbytes(self) -> int:
        """Bytes from the first on that do not change any more."""
        return self._ready_nbytes

    @property
    def complete(self) -> bool:
        return self._ready_nbytes == self.nbytes

    @property
    def error(self) -> BaseException | None:
        """Why the rest will never come."""
        return self._error

    # The writer.

    def reach(self, nbytes: int) -> None:
        """The first `nbytes` are final. Wakes only those who wait for no more, and nobody when none waits."""
        assert self._ready_nbytes <= nbytes <= self.nbytes, f"{nbytes} bytes after {self._ready_nbytes}"
        with self._lock:
            self._ready_nbytes = nbytes
            self._wake([waiter for waiter, wanted in self._waiters.items() if wanted <= nbytes])

    def fail(self, error: BaseException) -> None:
        """What is not final yet never will be. Nothing once all of it is."""
        with self._lock:
            if not self.complete and self._error is None:
                self._error = error
                self._wake(list(self._waiters))

    def _wake(self, waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            del self._waiters[waiter]
            loop = waiter.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, waiter)

    # Who reads.

    def check(self) -> None:
        """Raises LocalFault when the rest will never come."""
        if self._error is not None:
            raise LocalFault(f"what was to be sent could not be made: {self._error!r}") from self._error

    def wake(self, waiter: asyncio.Future[None], nbytes: int) -> None:
        """Resolve `waiter` as soon as the first `nbytes` are final, or never will be; `forget` it when done."""
        with self._lock:
            self._waiters[waiter] = nbytes
            if self._ready_nbytes >= nbytes or self._error is not None:
                self._wake([waiter])

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Whoever `wake` was asked for waits no longer."""
        with self._lock:
            self._waiters.pop(waiter, None)

    async def until(self, nbytes: int) -> None:
        """Returns when the first `nbytes` are final. Raises LocalFault when they never will be."""
        while self._ready_nbytes < nbytes:
            self.check()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.wake(waiter, nbytes)
            try:
                await waiter
            finally:
                self.forget(waiter)


def finish(fillings: Sequence[Filling], write: Callable[[], None] | None) -> None:
    """Let `write` complete them. What it raises is raised here, and at all who wait, as a LocalFault."""
    try:
        if write is not None:
            write()
        assert all(filling.complete for filling in fillings), "not written to the end, or being written"
    except BaseException as error:
        for filling in fillings:
            filling.fail(error)
        raise


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
