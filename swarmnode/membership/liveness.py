"""Waiting for a peer without mistaking a slow one for a dead one: when an answer is late, ask whether it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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


async def patiently(
    transport: Transport,
    run_id: str,
    peer: PeerId,
    work: Coroutine[Any, Any, T],
    patience_s: float,
    doubt: Callable[[], asyncio.Future[None]] | None = None,
) -> T:
    """The result of `work`, which waits for `peer`; each time it is late, `peer` is pinged, and at once when what
    `doubt` gives is done: others found it silent.

    Raises what `work` raises, PeerTimeout when a ping goes unanswered: then `work` is cancelled.
    """
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(_outcome(work))
        dead: RemoteFault | None = None
        while not task.done() and dead is None:
            awaited: set[asyncio.Future[Any]] = {task} if doubt is None else {task, doubt()}
            await asyncio.wait(awaited, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                dead = await late(transport, run_id, peer)
                patience_s *= PATIENCE_GROWTH
        if dead is not None and not task.done():
            task.cancel()
    if dead is not None and task.cancelled():
        raise PeerTimeout(f"{short(peer)} is late and answers no ping: {dead}")
    value, error = task.result()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


async def late(transport: Transport, run_id: str, peer: PeerId) -> RemoteFault | None:
    """Why a ping failed, None when it was answered."""
    try:
        await alive(transport, run_id, peer)
    except RemoteFault as fault:
        return fault
    return None


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, SwarmnodeError | None]:
    """An error as a value, so that it leaves the task group as itself and not as a group."""
    try:
        return await work, None
    except SwarmnodeError as error:
        return None, error
