"""The run's signed manifest, from whichever known peer gives it first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmnode.concurrency import background_tasks
from swarmnode.errors import (
    Forbidden,
    ManifestError,
    NotPermitted,
    RemoteFault,
    SwarmnodeError,
    Unavailable,
    Unreachable,
)
from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import verify
from swarmnode.ports import Call
from swarmnode.transport.address import first_that_accepts
from swarmnode.transport.call_directory import JOIN_TIMEOUT_S
from swarmnode.transport.stream_transport import StreamTransport
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

MANIFEST_TIMEOUT_S = 5.0
MANIFEST_RETRY_S = 0.5

Bootstraps = Sequence[tuple[PeerId, list[str]]]


async def fetch_manifest(
    transport: StreamTransport, bootstraps: Bootstraps, run_id: RunId
) -> record_pb2.SignedManifest:
    """The run's manifest from any bootstrap, verified against `run_id`.

    Raises Unreachable if none answers within JOIN_TIMEOUT_S, ManifestError if they give another run's manifest.
    """
    if not bootstraps:
        raise Unreachable("a run given by its id needs a bootstrap to fetch the manifest from; give one")
    reason = "no answer"
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while True:
                refusal: NotPermitted | ManifestError | None = None
                async with background_tasks() as tasks:  # discovery in the local network may add to the bootstraps
                    requests = [tasks.create_task(_manifest_of(transport, *one, run_id)) for one in list(bootstraps)]
                    for answer in asyncio.as_completed(requests):
                        signed = await answer
                        if isinstance(signed, record_pb2.SignedManifest):
                            return signed
                        if isinstance(signed, NotPermitted | ManifestError):
                            refusal = signed
                        reason = str(signed)
                if refusal is not None:
                    raise refusal
                await asyncio.sleep(MANIFEST_RETRY_S)
    except TimeoutError:
        raise Unreachable(
            f"no bootstrap gave the manifest of run {run_id[:16]} within {JOIN_TIMEOUT_S:.0f} s (last: {reason}): "
            "is the run id right and a bootstrap of that run up?"
        ) from None


async def _manifest_of(
    transport: StreamTransport, peer: PeerId, addresses: Sequence[str], run_id: RunId
) -> record_pb2.SignedManifest | SwarmnodeError:
    """The run's manifest from `peer`, or why there is none."""
    request = Call(wire.Request(manifest=wire.ManifestRequest()))
    try:
        if await first_that_accepts(addresses) is None:
            return Unavailable(f"no process listens at {', '.join(addresses)}")
        await transport.connect(peer, addresses)
        answer = await transport.call(peer, request, timeout_s=MANIFEST_TIMEOUT_S, reply_bytes_max=0)
        verify(answer.header.manifest, run_id)
    except Forbidden as error:
        return NotPermitted(f"run {run_id[:16]}: {error}")
    except (RemoteFault, Unavailable, ManifestError) as error:
        return error
    return answer.header.manifest
