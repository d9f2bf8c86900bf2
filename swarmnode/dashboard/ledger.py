"""Keeps receipts by the node that earned them. Each is verified once; the newest for each client's life is kept. Pure.

A node's report of its own work is a claim. A receipt is a client's signature for that work (membership/receipt.py).
Keys cost nothing, so only clients that took part in the run themselves count.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass

from google.protobuf.message import DecodeError

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId, RunId
from swarmnode.membership.receipt import RECEIPT_BYTES_MAX, check_receipt
from swarmnode.wire import call_pb2 as wire

KEPT_EACH = 1024  # guess: receipts that one node may show, one for each life of a client
KEPT_STRANGE = 64  # guess: of these, from clients not yet known to take part
DAY_S = 86_400
DAYS_KEPT = 60  # guess: a streak of two months is long enough to be proud of
KEPT_MAX = 100_000  # guess: 60 MB


@dataclass(slots=True)
class ReceiptTotals:
    """Sums of the receipts of one client over all its lives, or of all clients."""

    microbatches: int = 0
    samples: int = 0
    peers: int = 0
    last_unix_s: int = 0

    def to_json(self) -> dict[str, object]:
        fields = asdict(self)
        return {"last": fields.pop("last_unix_s"), **fields}


class Ledger:
    """The receipts of one run."""

    def __init__(self, run_id: RunId) -> None:
        self._run_id = run_id
        self._kept: dict[PeerId, dict[tuple[PeerId, int], wire.Receipt]] = {}
        self._sums: dict[PeerId, dict[PeerId, ReceiptTotals]] = {}
        self._count = 0
        self.days: dict[tuple[PeerId, int], int] = {}
        """Samples that members signed for a node, by the day (since 1970, UTC) on which it showed them."""
        self._dirty: set[tuple[PeerId, int]] = set()

    def take(self, server: PeerId, raw: bytes, members: Container[PeerId], now_s: float) -> wire.Receipt | None:
        """Take in a receipt that `server` shows. Returns it if it is new, else None. Raises RemoteFault unless it is
        for `server`, of this run, signed and of the past, and when there are too many. Clients outside `members` have a
        lower limit.
        """
        if len(raw) > RECEIPT_BYTES_MAX:
            raise RemoteFault(f"a receipt of {len(raw)} bytes; at most {RECEIPT_BYTES_MAX}")
        try:
            receipt = wire.Receipt.FromString(raw)
        except DecodeError:
            raise RemoteFault("a receipt that is none") from None
        kept = self._kept.get(server, {}).get((PeerId(receipt.client), receipt.from_unix_s))
        if kept is not None and receipt.samples <= kept.samples:
            return None
        most = KEPT_EACH if receipt.client in members else KEPT_STRANGE
        if kept is None and (len(self._kept.get(server, ())) >= most or self._count >= KEPT_MAX):
            raise RemoteFault("too many receipts")
        check_receipt(receipt, self._run_id, server, now_s)
        self.put(receipt)
        if receipt.client in members:
            key = server, int(now_s // DAY_S)
            self.days[key] = self.days.get(key, 0) + receipt.samples - (kept.samples if kept is not None else 0)
            self._dirty.add(key)
        return receipt

    def take_days(self) -> list[tuple[PeerId, int, int]]:
        """(node, day, samples) of `days` that changed since the last call; those older than DAYS_KEPT are dropped."""
        changed = [(*key, self.days[key]) for key in sorted(self._dirty)]
        newest = max((day for _, day, _ in changed), default=0)
        for key in [key for key in self.days if key[1] < newest - DAYS_KEPT] if changed else ():
            del self.days[key]
        self._dirty.clear()
        return changed

    def put(self, receipt: wire.Receipt) -> None:
        """Store a verified receipt."""
        server, client = PeerId(receipt.server), PeerId(receipt.client)
        kept = self._kept.setdefault(server, {})
        before = kept.get((client, receipt.from_unix_s))
        kept[client, receipt.from_unix_s] = receipt
        self._count += before is None
        thanks = self._sums.setdefault(server, {}).setdefault(client, ReceiptTotals(peers=1))
        thanks.samples += receipt.samples - (before.samples if before is not None else 0)
        thanks.microbatches += receipt.microbatches - (before.microbatches if before is not None else 0)
        thanks.last_unix_s = max(thanks.last_unix_s, receipt.until_unix_s)

    def total(self, server: PeerId, members: Container[PeerId]) -> ReceiptTotals | None:
        """The sum of what `members` signed for `server`. None when it showed no receipt that counts."""
        totals = ReceiptTotals()
        for client, thanks in self._sums.get(server, {}).items():
            if client in members:
                totals.samples += thanks.samples
                totals.microbatches += thanks.microbatches
                totals.peers += 1
                totals.last_unix_s = max(totals.last_unix_s, thanks.last_unix_s)
        return totals if totals.peers else None

    def of(self, server: PeerId) -> Iterator[wire.Receipt]:
        """All receipts kept for `server`, so that others can verify them again."""
        yield from self._kept.get(server, {}).values()
