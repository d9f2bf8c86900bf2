"""The run's signed manifest, from whichever known peer gives it first."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from swarmnode.base.concurrency import background_tasks
from swarmnode.base.errors import (
    Forbidden,
    ManifestError,
    NotPermitted,
    PeerTimeout,
    RemoteFault,
    SwarmnodeError,
    Unavailable,
    Unreachable,
)
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.net.transport.call_directory import JOIN_TIMEOUT_S
from swarmnode.net.transport.path_check import HANDSHAKE, SMALL_NBYTES, knock, large_unanswered, small_unanswered
from swarmnode.net.transport.stream_transport import StreamTransport
from swarmnode.run.manifest import verify

MANIFEST_TIMEOUT_S = 5.0
MANIFEST_RETRY_S = 0.5
REFUSED_WAIT_S = 2.0  # guess: so long may another meeting point still let in whom one refused
TOLD_MAX = 3  # bootstraps in a message: more are one screen of text

Bootstraps = Sequence[tuple[PeerId, list[str]]]


async def fetch_manifest(
    transport: StreamTransport, bootstraps: Bootstraps, run_id: RunId
) -> record_pb2.SignedManifest:
    """The run's manifest from any bootstrap, verified against `run_id`.

    Raises Unreachable if none answers within JOIN_TIMEOUT_S, ManifestError if they give another run's manifest.
    """
    if not bootstraps:
        raise Unreachable("a run given by its id needs a meeting point to fetch the manifest from; give one")
    attempts = dict[PeerId, Attempt]()
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while True:
                async with background_tasks() as tasks:  # discovery in the local network may add to the bootstraps
                    fetch = partial(_manifest_of, transport, run_id, attempts)
                    answer = await _first_of({tasks.create_task(fetch(*one)) for one in list(bootstraps)})
                if isinstance(answer, record_pb2.SignedManifest):
                    return answer
                if answer is not None:
                    raise answer
                await asyncio.sleep(MANIFEST_RETRY_S)
    except TimeoutError:
        known = [f"{short(peer)}: {attempt.reason}" for peer, attempt in list(attempts.items())[:TOLD_MAX]]
        told = "; ".join(known) or "nobody was asked"
        raise Unreachable(
            f"no meeting point of run {run_id[:16]} answered within {JOIN_TIMEOUT_S:.0f} s ({told}). Look at this"
            " machine's network; then ask the organiser whether the run goes on, and for a new invite"
        ) from None


async def _first_of(
    requests: set[asyncio.Task[record_pb2.SignedManifest | SwarmnodeError]],
) -> record_pb2.SignedManifest | NotPermitted | ManifestError | None:
    """The first manifest of `requests`; else a refusal, REFUSED_WAIT_S after it came at the latest; else None."""
    refusal: NotPermitted | ManifestError | None = None
    until_s = math.inf
    loop = asyncio.get_running_loop()
    while requests and loop.time() < until_s:
        left_s = None if refusal is None else until_s - loop.time()
        done, requests = await asyncio.wait(requests, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for answer in (task.result() for task in done):
            if isinstance(answer, record_pb2.SignedManifest):
                return answer
            if isinstance(answer, NotPermitted | ManifestError):
                refusal = refusal or answer
                until_s = min(until_s, loop.time() + REFUSED_WAIT_S)
    return refusal


@dataclass(slots=True)
class Attempt:
    """The way to a peer's manifest: how far it was gone, over all attempts, and why no further."""

    reached: int = 0
    reason: str = "no answer"

    def waits(self, step: int, reason: str) -> None:
        """Step number `step` is waited for; `reason` is told if it never comes. A later attempt that gets less far says
        less."""
        if step >= self.reached:
            self.reached = step
            self.reason = reason

    def fails(self, reason: str) -> None:
        if "dial backoff" not in reason:  # libp2p's word for what failed a moment ago
            self.reason = reason


async def _manifest_of(
    transport: StreamTransport, run_id: RunId, attempts: dict[PeerId, Attempt], peer: PeerId, addresses: Sequence[str]
) -> record_pb2.SignedManifest | SwarmnodeError:
    """The run's manifest from `peer`, or why there is none, which `attempts` has, too, when the time is over."""
    loop = asyncio.get_running_loop()
    attempt = attempts.setdefault(peer, Attempt())
    request = Call(wire.Request(manifest=wire.ManifestRequest()))
    ping = Call(wire.Request(ping=wire.Ping(payload=bytes(SMALL_NBYTES))))
    try:
        where, why = await knock(addresses)
        if not where:
            raise Unavailable(why)
        attempt.waits(1, f"{where} accepts connections, {HANDSHAKE}")
        await transport.connect(peer, addresses)
        attempt.waits(2, small_unanswered(where))
        began_s = loop.time()
        await transport.call(peer, ping, timeout_s=PING_TIMEOUT_S, reply_bytes_max=0)
        attempt.waits(3, large_unanswered("the manifest", loop.time() - began_s, MANIFEST_TIMEOUT_S))
        answer = await transport.call(peer, request, timeout_s=MANIFEST_TIMEOUT_S, reply_bytes_max=0)
        verify(answer.header.manifest, run_id)
    except Forbidden as error:
        return NotPermitted(f"run {run_id[:16]}: {error}")
    except PeerTimeout as error:  # the step that was waited for says more
        return error
    except (RemoteFault, Unavailable, ManifestError) as error:
        other_run = "does not serve this run" in str(error) or isinstance(error, ManifestError)
        question = ": is the run id right and a meeting point of that run up?" if other_run else ""
        attempt.fails(f"{error}{question}")
        return error
    return answer.header.manifest
