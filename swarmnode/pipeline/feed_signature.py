"""A feeder's signature over the tokens of a microbatch that a replica of the first stage takes on for it.

The next stage learns from it that these are the feeder's tokens and not the replica's. So each answers for its own
part: the feeder for the text, the replica for the activations (input_check.py).
"""

from __future__ import annotations

import hashlib

from swarmnode.errors import RemoteFault
from swarmnode.identity import SIGNATURE_BYTES, Identity, verify
from swarmnode.ids import PeerId, RunId, short
from swarmnode.ports import WireTensor
from swarmnode.wire import call_pb2 as wire

_DOMAIN = b"swarmnode/feed/v1\0"


def sign_feed(process: wire.Process, tokens: WireTensor, run_id: RunId, identity: Identity) -> None:
    """Sign `process`, a microbatch of `tokens`, as `process.feeder`."""
    assert process.feeder == identity.peer_id, f"microbatch of another feeder: {process.feeder}"
    process.feed_signature = identity.sign(_signed(process, tokens, run_id))


def check_feed(process: wire.Process, tokens: WireTensor, run_id: RunId) -> None:
    """Raises RemoteFault unless `process.feeder` signed that it feeds `tokens` in this microbatch."""
    feeder = PeerId(process.feeder)
    if len(process.feed_signature) != SIGNATURE_BYTES or not verify(
        feeder, _signed(process, tokens, run_id), process.feed_signature
    ):
        raise RemoteFault(f"tokens that feeder {short(feeder)} has not signed")


def _signed(process: wire.Process, tokens: WireTensor, run_id: RunId) -> bytes:
    named = wire.Process(
        microbatch_id=process.microbatch_id,
        feeder=process.feeder,
        samples=process.samples,
        purpose=process.purpose,
        first_sample=process.first_sample,
    )
    content = hashlib.sha256(f"{run_id} {tokens.dtype} {tokens.shape}".encode())
    content.update(tokens.data)
    return _DOMAIN + content.digest() + named.SerializeToString(deterministic=True)
