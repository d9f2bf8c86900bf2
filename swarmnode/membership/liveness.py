"""Waiting for a peer without mistaking a slow one for a dead one: when an answer is late, ask whether it lives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import Any, TypeVar

from swarmnode.errors import PeerTimeout, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.ids import PeerId, short
from swarmnode.ports import Call, Transport
from swarmnode.wire import call_pb2 as wire

T = TypeVar("T")

PING_TIMEOUT_S = 2.0  # guess: a busy machine answers a ping within a second; a frozen one never does
PATIENCE_GROWTH = 2.0  # guess: pings get rarer the longer a slow answer takes


async def alive(transport: Transport, run_id: str, peer: PeerId) -> None:
    """Returns when `peer` answers a ping. Raises RemoteFault when it does not within PING_TIMEOUT_S."""
    try:
        await transport.call(
            peer, Call(wire.Request(run_id=run_id, ping=wire.Ping())), timeout_s=PING_TIMEOUT_S, reply_bytes_max=0
        )
    except Unavailable:
        return  # it answered


class Watch:
    """Looks after one piece of work that waits for `peer`: whenever it is late, `peer` is asked whether it lives.

    The work runs in the caller's own task, and a ping is a task only while it is under way: most work is never late.
    """

    __slots__ = (
        "_asking",
        "_error",
        "_gives_up_at",
        "_patience_s",
        "_peer",
        "_run_id",
        "_task",
        "_timer",
        "_transport",
    )

    def __init__(self, transport: Transport, run_id: str, peer: PeerId, patience_s: float) -> None:
        self._transport = transport
        self._run_id = run_id
        self._peer = peer
        self._patience_s = patience_s  # until the next ping
        self._task: asyncio.Task[Any] | None = None  # that waits for the work
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # why the work was cancelled
        self._gives_up_at = math.inf

    async def over(self, work: Awaitable[T], give_up_s: float | None = None) -> T:
        """The result of `work`. Raises what it raises, PeerTimeout when a ping goes unanswered, TimeoutError after
        `give_up_s`: in both cases `work` is cancelled first."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None and self._task is None, "a watch looks after one piece of work, in a task"
        self._task, cancelling = task, task.cancelling()
        if give_up_s is not None:
            self._gives_up_at = loop.time() + give_up_s
        self._wait()
        try:
            return await work
        except asyncio.CancelledError:
            if self._error is None or task.uncancel() > cancelling:
                raise
            raise self._error from None
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._asking is not None:
                self._asking.cancel()
                await asyncio.wait([self._asking])
            self._error = None  # else the error knows this frame, and the frame the error

    def doubt(self) -> None:
        """Others found `peer` silent: it is asked now."""
        if self._asking is None and self._timer is not None:
            self._timer.cancel()
            self._late()

    def _wait(self) -> None:
        """One timer, for whatever comes first."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(min(loop.time() + self._patience_s, self._gives_up_at), self._late)

    def _late(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() >= self._gives_up_at:
            self._end(TimeoutError())
            return
        self._asking = loop.create_task(self._ask())
        self._timer = loop.call_at(self._gives_up_at, self._late) if math.isfinite(self._gives_up_at) else None

    async def _ask(self) -> None:
        try:
            await alive(self._transport, self._run_id, self._peer)
        except RemoteFault as fault:
            self._end(PeerTimeout(f"{short(self._peer)} is late and answers no ping: {fault}"))
        except SwarmnodeError as error:
            self._end(error)
        else:
            self._patience_s *= PATIENCE_GROWTH
            if self._timer is not None:
                self._timer.cancel()
            self._wait()
        self._asking = None

    def _end(self, error: Exception) -> None:
        assert self._task is not None
        if self._error is None:
            self._error = error
            self._task.cancel()


async def patiently(transport: Transport, run_id: str, peer: PeerId, work: Awaitable[T], patience_s: float) -> T:
    """The result of `work`, which waits for `peer`; each time it is late, `peer` is pinged.

    Raises what `work` raises, PeerTimeout when a ping goes unanswered: then `work` is cancelled.
    """
    return await Watch(transport, run_id, peer, patience_s).over(work)


async def late(transport: Transport, run_id: str, peer: PeerId) -> RemoteFault | None:
    """Why a ping failed, None when it was answered."""
    try:
        await alive(transport, run_id, peer)
    except RemoteFault as fault:
        return fault
    return None
