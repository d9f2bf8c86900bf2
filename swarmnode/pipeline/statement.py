"""A replica's signed statement of its answer to a training microbatch, which it cannot deny later.

A statement is made for each caller, also where several get one kept answer (hop.py). It names the tensors of one hop by
fingerprint: the request, what was sent on, what came back, and the answer. With the tensors, any peer can recompute the
hop and compare (auditor.py). A false answer and its statement can be shown to others as evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import RemoteFault
from swarmnode.identity import SIGNATURE_BYTES, Identity, unsigned, verify
from swarmnode.ids import PeerId, short
from swarmnode.ports import WireTensor
from swarmnode.wire import call_pb2 as wire

FINGERPRINT_BYTES = 32
_DOMAIN = b"swarmnode/statement/v1\0"

Fingerprint = Callable[[WireTensor], bytes]


@dataclass(frozen=True, slots=True)
class TensorFingerprints:
    """Fingerprints of the tensors of one hop; `sent` and `got` are empty at the last stage."""

    x: bytes
    tokens: bytes
    gradient: bytes
    sent: bytes = b""
    got: bytes = b""


def stated(
    run_id: str,
    process: wire.Process,
    server: PeerId,
    client: PeerId,
    prints: TensorFingerprints,
    report: wire.Processed,
) -> wire.Statement:
    """The unsigned statement of `server` on `process` as it arrived there from `client`, answered with `report`."""
    return wire.Statement(
        run_id=run_id,
        microbatch_id=process.microbatch_id,
        stage=process.itinerary[process.position],
        position=process.position,
        server=server,
        client=client,
        x=prints.x,
        tokens=prints.tokens,
        gradient=prints.gradient,
        loss_sum=report.loss_sum,
        sent=prints.sent,
        got=prints.got,
        inner_steps=report.inner_steps,
    )


def sign(statement: wire.Statement, identity: Identity) -> None:
    """Sign as `statement.server`."""
    assert statement.server == identity.peer_id, f"statement of another server: {statement.server}"
    statement.signature = identity.sign(unsigned(_DOMAIN, statement))


def check(statement: wire.Statement) -> None:
    """Raises RemoteFault unless the statement is complete and signed by `statement.server`."""
    server = PeerId(statement.server)
    named = [statement.x, statement.tokens, statement.gradient]
    if statement.sent or statement.got:
        named += [statement.sent, statement.got]
    if any(len(one) != FINGERPRINT_BYTES for one in named):
        raise RemoteFault(f"statement of {short(server)} with a fingerprint that is not {FINGERPRINT_BYTES} bytes long")
    if len(statement.signature) != SIGNATURE_BYTES or not verify(
        server, unsigned(_DOMAIN, statement), statement.signature
    ):
        raise RemoteFault(f"statement of {short(server)} is forged: its signature does not verify")
