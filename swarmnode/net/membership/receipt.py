"""Receipts: a signed count of one peer's work for another, signed by the client.

Each node counts the microbatches that others did for it, and signs the totals on request. The server keeps the newest
receipt of each client. Clients may exaggerate for their friends, so receipts give credit, not payment.

What a machine gave is the sum of its receipts, wherever it is shown. So each microbatch counts once at each stage: the
machine of stage 0 has it from the one that it called, every other machine from its caller. A microbatch counts when its
gradient is added, so answers that were lost, refused, or only made again for an audit do not. In a run of one stage
nobody else takes part in a microbatch: there a machine signs for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import SIGNATURE_BYTES, Identity, verify
from swarmnode.base.ids import PeerId, RunId, digest, machine_of
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.work import SampleCount, TargetCount, TokenCount, Work
from swarmnode.net.membership.record import CLOCK_SKEW_MAX_S

RECEIPT_BYTES_MAX = 1024  # serialised; real ones have about 260
_DOMAIN = b"swarmnode/receipt/v1\0"
_COUNTED = ("server", "client", "microbatches", "samples", "tokens", "targets", "from_unix_s", "until_unix_s")
_JSON_KEYS = {"run", "signature", *_COUNTED}


def receipt_to_json(receipt: wire.Receipt) -> dict[str, object]:
    """All that a signature covers, and the signature, so that anybody can check it."""
    shown = {field: getattr(receipt, field) for field in _COUNTED}
    return {"run": receipt.run_id, **shown, "signature": receipt.signature.hex()}


def receipt_from_json(row: object) -> wire.Receipt:
    """The receipt that `receipt_to_json` made `row` of, verified for the machine that it names. Raises RemoteFault."""
    try:
        if not isinstance(row, dict) or row.keys() != _JSON_KEYS:
            raise ValueError("other keys than a receipt's")
        fields = {key: value for key, value in row.items() if key not in ("run", "signature")}
        receipt = wire.Receipt(run_id=row["run"], signature=bytes.fromhex(row["signature"]), **fields)
        check_receipt(receipt, RunId(receipt.run_id), PeerId(receipt.server), alone=True)
    except (TypeError, ValueError, AttributeError) as error:
        raise RemoteFault(f"no receipt: {error!s:.100}") from None
    return receipt


@dataclass(slots=True)
class WorkDone:
    """Work of one peer for us."""

    microbatches: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0

    def add(self, work: Work) -> None:
        """Count a microbatch of `work`."""
        self.microbatches += 1
        self.samples += work.samples
        self.tokens += work.tokens
        self.targets += work.targets


class WorkBook:
    """Work that others did for this node, and the clients it worked for, since start."""

    def __init__(self) -> None:
        self.done = Remembered[PeerId, WorkDone]()
        self.clients = Remembered[PeerId, int]()
        """Those that sign for our work, and the samples that we trained for each."""

    def record_gradient(self, peer: PeerId, work: Work) -> None:
        """Record a microbatch of `work` that `peer` did for us: we sign for its machine's stages together."""
        peer = machine_of(peer)
        done = self.done.get(peer)
        if done is None:
            done = self.done[peer] = WorkDone()
        self.done.move_to_end(peer)
        done.add(work)

    def record_service(self, peer: PeerId, work: Work) -> None:
        """Record a microbatch of `work` that we did for `peer`: it signs for it."""
        peer = machine_of(peer)
        self.clients[peer] = self.clients.get(peer, 0) + work.samples


def sign_receipt(
    identity: Identity, run_id: RunId, server: PeerId, done: WorkDone, from_unix_s: int, until_unix_s: int
) -> wire.Receipt:
    """A signed receipt of what `server` did for us between the two times."""
    receipt = wire.Receipt(
        run_id=run_id,
        server=server,
        client=identity.peer_id,
        microbatches=done.microbatches,
        samples=done.samples,
        tokens=done.tokens,
        targets=done.targets,
        from_unix_s=from_unix_s,
        until_unix_s=until_unix_s,
    )
    receipt.signature = identity.sign(_DOMAIN + _digest(receipt))
    return receipt


def check_receipt(
    receipt: wire.Receipt, run_id: RunId, server: PeerId, now_s: float | None = None, *, alone: bool = False
) -> None:
    """Raises RemoteFault unless `receipt` is for `server` in this run and signed by its client; given the Unix time
    `now_s`, also unless it ends in the past. `alone`: in a run of one stage, where a machine signs for itself."""
    bounds.check(receipt)
    if (nbytes := receipt.ByteSize()) > RECEIPT_BYTES_MAX:
        raise RemoteFault(f"a receipt of {nbytes} bytes; at most {RECEIPT_BYTES_MAX}")
    if receipt.run_id != run_id or receipt.server != server or (receipt.client == server and not alone):
        raise RemoteFault("a receipt of another run, or for another node")
    if receipt.until_unix_s < receipt.from_unix_s or receipt.samples < receipt.microbatches:
        raise RemoteFault("a receipt that contradicts itself")
    if receipt.targets > receipt.tokens or (receipt.tokens and receipt.tokens < receipt.samples):
        raise RemoteFault("a receipt that contradicts itself")
    if now_s is not None and receipt.until_unix_s > now_s + CLOCK_SKEW_MAX_S:
        raise RemoteFault("a receipt of the future")
    if len(receipt.signature) != SIGNATURE_BYTES or not verify(
        PeerId(receipt.client), _DOMAIN + _digest(receipt), receipt.signature
    ):
        raise RemoteFault(f"a receipt that {receipt.client[-8:]!r} did not sign")


def _digest(receipt: wire.Receipt) -> bytes:
    return digest(
        receipt.run_id,
        receipt.server,
        receipt.client,
        receipt.microbatches,
        receipt.samples,
        receipt.tokens,
        receipt.targets,
        receipt.from_unix_s,
        receipt.until_unix_s,
    )


def work_of(receipt: wire.Receipt) -> Work:
    """The work that `receipt` is for."""
    return Work(SampleCount(receipt.samples), TokenCount(receipt.tokens), TargetCount(receipt.targets))
