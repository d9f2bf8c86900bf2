"""A replica's signed statement of its answer to a training microbatch, which it cannot deny later.

A statement is made for each caller, also where several get one kept answer (hop.py). It names the tensors of one hop by
fingerprint: the request, what was sent on, what came back, and the answer. With the tensors, any peer can recompute the
hop and compare (auditor.py). A false answer and its statement can be shown to others as evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import SIGNATURE_BYTES, Identity, unsigned, verify
from swarmnode.base.ids import PeerId, short
from swarmnode.base.ports import WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.judge import TensorFingerprints

FINGERPRINT_BYTES = 32
_DOMAIN = b"swarmnode/statement/v1\0"

Fingerprint = Callable[[WireTensor], bytes]


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
        mark=prints.mark,
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
    if {*map(len, named)} != {FINGERPRINT_BYTES}:
        raise RemoteFault(f"statement of {short(server)} with a fingerprint that is not {FINGERPRINT_BYTES} bytes long")
    if len(statement.signature) != SIGNATURE_BYTES or not verify(
        server, unsigned(_DOMAIN, statement), statement.signature
    ):
        raise RemoteFault(f"statement of {short(server)} is forged: its signature does not verify")


@dataclass(frozen=True, slots=True)
class Statements:
    """Statements of our own answers and of those to us, in one run."""

    run_id: str
    identity: Identity

    def sign(self, process: wire.Process, client: PeerId, prints: TensorFingerprints, report: wire.Processed) -> None:
        """Add our signed statement of our answer to `client` to `report`, whose inner steps are set."""
        if process.mark_position != process.position:  # this caller did not ask
            prints = replace(prints, mark=b"")
        mine = stated(self.run_id, process, self.identity.peer_id, client, prints, report)
        sign(mine, self.identity)
        report.sent = mine.sent
        report.got = mine.got
        report.mark = mine.mark
        report.signature = mine.signature

    def checked(
        self, process: wire.Process, server: PeerId, report: wire.Processed, prints: TensorFingerprints
    ) -> wire.Statement:
        """The verified statement of `server` about its answer `report` to us. `process` is the request as it arrived
        there, `prints` our own fingerprints. Raises RemoteFault if it does not verify."""
        theirs = replace(prints, sent=report.sent, got=report.got, mark=report.mark)
        statement = stated(self.run_id, process, server, self.identity.peer_id, theirs, report)
        statement.signature = report.signature
        check(statement)
        last = process.position == len(process.itinerary) - 1
        if last != (not report.sent):
            raise RemoteFault(f"statement of {short(server)} that names {'activations' if last else 'no activations'}")
        return statement


@dataclass(frozen=True, slots=True)
class HopClaim:
    """A server's answer to one hop: its statement and the tensors that the statement names. `came_s`: the event loop's
    time when it came; None if another caller got it. `sketch`: of its gradient, over its length."""

    statement: wire.Statement
    samples: int
    x: WireTensor
    tokens: WireTensor
    gradient: WireTensor
    came_s: float | None = None
    sketch: Sequence[float] = ()

    @property
    def server(self) -> PeerId:
        return PeerId(self.statement.server)

    def answer(self, sent: WireTensor | None) -> HopAnswer:
        """The claimed result; `sent` are the activations shown as sent on, None at the last stage. Only there the
        stated loss is the server's own."""
        return HopAnswer(self.gradient, sent, self.statement.loss_sum if sent is None else 0.0)


@dataclass(frozen=True, slots=True)
class HopAnswer:
    """Result of one hop: the gradient of x and the activations sent on; at the last stage the loss instead of
    activations. `apart`: inner steps between the weights of a recomputation and those it stands for; `marked`: no
    round lies between."""

    gradient: WireTensor
    sent: WireTensor | None
    loss_sum: float
    statement: wire.Statement | None = None  # of a recomputed hop
    apart: int = 0
    marked: bool = False

    @classmethod
    def of(cls, tensors: Sequence[WireTensor], loss_sum: float) -> HopAnswer:
        """The result of a recomputed hop after the first stage. `tensors`: the activations sent on, but at the last
        stage, and the gradient of x."""
        return cls(tensors[-1], tensors[0] if len(tensors) == 2 else None, loss_sum)


@dataclass(frozen=True, slots=True)
class HopEvidence:
    """Evidence of an answer: the activations sent on, their gradient, and the next server's statement."""

    sent: WireTensor
    got: WireTensor
    next: wire.Statement

    @property
    def nbytes(self) -> int:
        return self.sent.nbytes + self.got.nbytes
