"""Wait for a peer without mistaking a slow one for a dead one: ping it when its answer is late."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from swarmnode.base.errors import PeerTimeout, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.base.ids import PeerId, RunId, digest64, short
from swarmnode.base.ports import Call, Transport
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.swarm import Swarm

PING_TIMEOUT_S = 2.0  # guess: a busy machine answers a ping within a second; a frozen one never does
SMALL_CALL_S = 5.0  # guess: for a call that carries little; a busy uplink delays it by a second or two
TRIES = 3  # what fails so often in a row has failed: failureThreshold of Kubernetes' probes, by default
LOST_PERIODS = TRIES  # announce periods without a record after which a silent replica counts as gone
AGAIN_S = 60.0  # guess: at most, until what was refused or failed again and again is tried once more
SAMPLE = 8  # derived: of peers of whom half are dead one of so many lives, but in 1 of 256 draws
PINGED_MAX = 64  # guess: peers pinged at once; in larger swarms one more or less does not matter
LOOK_SHARE = 0.5  # guess: of the announce period, between two looks at what others announce
SOON_SHARE = LOOK_SHARE / 2.0  # while a stage stands empty, for which all training waits


async def ping_fault(transport: Transport, run_id: str, peer: PeerId) -> RemoteFault | None:
    """The reason why a ping to `peer` failed, None when it was answered within PING_TIMEOUT_S."""
    call = Call(wire.Request(run_id=run_id, ping=wire.Ping()))
    try:
        await transport.call(peer, call, timeout_s=PING_TIMEOUT_S, reply_bytes_max=0)
    except RemoteFault as fault:
        return fault
    except Unavailable:
        pass  # a refusal is an answer
    return None


class Pinger:
    """Pings many peers of one run at once."""

    def __init__(self, transport: Transport, run_id: RunId) -> None:
        self._transport = transport
        self._run_id = run_id

    async def answering(self, peers: Sequence[PeerId]) -> frozenset[PeerId]:
        """The peers that answer. The first PINGED_MAX are pinged; the others are taken to be alive."""
        async with asyncio.TaskGroup() as tasks:
            pings = [
                (peer, tasks.create_task(ping_fault(self._transport, self._run_id, peer)))
                for peer in peers[:PINGED_MAX]
            ]
        return frozenset(peer for peer, fault in pings if fault.result() is None) | frozenset(peers[PINGED_MAX:])

    async def answering_in(self, swarm: Swarm, stages: Sequence[int], sample: int) -> frozenset[PeerId]:
        """The members of `stages` that are alive, without this node. Of each stage `sample` members are pinged first.

        The rest of a stage is taken to be alive when half of its sample answers, else it is pinged.
        """
        me = self._transport.peer_id
        first_asked = []
        others = []
        for stage in dict.fromkeys(stages):
            peers = [member.peer for member in swarm.stages[stage] if member.peer != me]
            first = digest64("few", me) % max(1, len(peers))  # different nodes ping different samples
            peers = peers[first:] + peers[:first]
            first_asked.append(peers[:sample])
            others.append(peers[sample:])
        alive = set(await self.answering([peer for peers in first_asked for peer in peers]))
        for asked, rest in zip(first_asked, others, strict=True):
            doubtful = 2 * len(alive.intersection(asked)) < len(asked)
            alive |= await self.answering(rest) if doubtful else set(rest)
        return frozenset(alive)


T = TypeVar("T")

PATIENCE_GROWTH = 2.0  # as of TCP's timer, RFC 6298 (5.5): pings become rarer the longer a slow answer takes


class LivenessWatch:
    """Watches one piece of work that waits for `peer`: whenever it is late, `peer` is pinged.

    The work runs in the caller's own task. A ping is a task only while it is in flight, as most work is never late.
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
        self._task: asyncio.Task[Any] | None = None  # the task that waits for the work
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # the reason why the work was cancelled
        self._gives_up_at = math.inf

    async def over(self, work: Awaitable[T], give_up_s: float | None = None) -> T:
        """The result of `work`, whose errors propagate. Raises PeerTimeout if a ping fails, TimeoutError after
        `give_up_s`; in both cases `work` is cancelled first."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None and self._task is None, "a watch looks after one piece of work, in a task"
        self._task = task
        cancelling = task.cancelling()
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
            self._error = None  # break the reference cycle between the error and this frame

    def doubt(self) -> None:
        """Ping `peer` now, because others found it silent."""
        if self._asking is None and self._timer is not None:
            self._timer.cancel()
            self._late()

    def _wait(self) -> None:
        """Set one timer, for whichever comes first: the next ping or giving up."""
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
            if (fault := await ping_fault(self._transport, self._run_id, self._peer)) is not None:
                raise PeerTimeout(f"{short(self._peer)} is late and answers no ping: {fault}")
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
    """The result of `work`, which waits for `peer`. Each time it is late, `peer` is pinged.

    The errors of `work` propagate. Raises PeerTimeout if a ping fails; then `work` is cancelled.
    """
    return await LivenessWatch(transport, run_id, peer, patience_s).over(work)
