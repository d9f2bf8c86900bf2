"""What a replica answered for a training microbatch, signed, so that it cannot say later that it answered otherwise.

A statement names the tensors of one hop by their fingerprints: what the server was asked with, what it sent on, what
came back to it and what it answered. Whoever has the tensors can do the hop again and compare (auditor.py); whoever has
a false answer and its statement can show both to others.
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
class Prints:
    """Fingerprints of the tensors of one hop; `sent` and `got` are empty at the last stage."""

    x: bytes
    tokens: bytes
    gradient: bytes
    sent: bytes = b""
    got: bytes = b""


def stated(
    run_id: str, process: wire.Process, server: PeerId, client: PeerId, prints: Prints, loss_sum: float
) -> wire.Statement:
    """The statement of `server` on `process` as it arrived there from `client`; not signed yet."""
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
        loss_sum=loss_sum,
        sent=prints.sent,
        got=prints.got,
    )


def sign(statement: wire.Statement, identity: Identity) -> None:
    """Sign as `statement.server`."""
    assert statement.server == identity.peer_id, f"{statement.server} is another"
    statement.signature = identity.sign(unsigned(_DOMAIN, statement))


def check(statement: wire.Statement) -> None:
    """Raises RemoteFault unless `statement.server` signed it as it is and it is whole."""
    server = PeerId(statement.server)
    named = [statement.x, statement.tokens, statement.gradient]
    if statement.sent or statement.got:
        named += [statement.sent, statement.got]
    if any(len(one) != FINGERPRINT_BYTES for one in named):
        raise RemoteFault(f"statement of {short(server)} with a fingerprint that has not {FINGERPRINT_BYTES} bytes")
    if len(statement.signature) != SIGNATURE_BYTES or not verify(
        server, unsigned(_DOMAIN, statement), statement.signature
    ):
        raise RemoteFault(f"statement of {short(server)} is forged: its signature does not verify")
