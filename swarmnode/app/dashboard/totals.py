"""Sums each node's work over its lives, for the contributors' table and the totals of the run."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.metrics import name
from swarmnode.base.metrics.name import series
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.receipt import RECEIPT_BYTES_MAX, check_receipt

LIVES_MAX = 64
"""Lives of one peer that are kept apart. Beyond this the oldest are merged, so invented lives take no memory. Guess."""

DENSE_BYTES = 8.0
"""Bytes per parameter and exchange in published NoLoCo: pseudo-gradient and slow weights in fp32 [paper]."""

SERIES: Mapping[str, tuple[str, ...]] = {
    "fed": (name.SAMPLES,),
    "steps": (name.INNER_STEPS,),
    "done": (series(name.MICROBATCHES, outcome="done"),),
    "lost": (series(name.MICROBATCHES, outcome="lost"),),
    "retried": (series(name.MICROBATCHES, outcome="retried"),),
    "paired": (series(name.EXCHANGES, outcome="paired"),),
    "lone": (series(name.EXCHANGES, outcome="lone"),),
    "recoveries": tuple(
        series(name.RECOVERIES, method=method)
        for method in name.METRICS[name.RECOVERIES].labels["method"]
        if method != "fresh"
    ),
    **{f"late_{index}": (series(name.GRADIENTS, staleness=label),) for index, label in enumerate(name.STALENESS)},
    "sent_pipeline": (series(name.LINK_BYTES, kind="pipeline", direction="sent"),),
    "sent_gossip": (series(name.LINK_BYTES, kind="gossip", direction="sent"),),
    "sent_state": (series(name.LINK_BYTES, kind="state", direction="sent"),),
    "sent_control": (series(name.LINK_BYTES, kind="control", direction="sent"),),
}
"""Maps the dashboard's name for a count to the series of a status that add up to it."""

KEYS = (*SERIES, "worked_s", "dense", "metered_s", "joules")
JOULES_A_KWH = 3.6e6
LATE = tuple(key for key in KEYS if key.startswith("late_"))
SENT = tuple(key for key in KEYS if key.startswith("sent_"))


# Keeps receipts by the node that earned them. Each is verified once; the newest for each client's life is kept. Pure.
#
# A node's report of its own work is a claim. A receipt is a client's signature for that work
# (net/membership/receipt.py). Keys cost nothing, so only clients that took part in the run themselves count.

KEPT_EACH = 1024  # guess: receipts that one node may show, one for each life of a client
KEPT_STRANGE = 64  # guess: of these, from clients not yet known to take part
DAY_S = 86_400
DAYS_KEPT = 60  # guess: a streak of two months is long enough to be proud of
KEPT_MAX = 100_000  # derived: 60 MB at 600 bytes each


@dataclass(slots=True)
class ReceiptTotals:
    """Sums of the receipts of one client over all its lives, or of all clients."""

    microbatches: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    peers: int = 0
    last_unix_s: int = 0

    def to_json(self) -> dict[str, object]:
        fields = asdict(self)
        return {"last": fields.pop("last_unix_s"), **fields}

    def add(self, receipt: wire.Receipt, sign: int = 1) -> None:
        """Count `receipt`; with `sign` -1 take it back."""
        self.microbatches += sign * receipt.microbatches
        self.samples += sign * receipt.samples
        self.tokens += sign * receipt.tokens
        self.targets += sign * receipt.targets


class Ledger:
    """The receipts of one run. `alone`: it has one stage, where machines sign for themselves."""

    def __init__(self, run_id: RunId, *, alone: bool = False) -> None:
        self._run_id = run_id
        self._alone = alone
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
        receipt = bounds.parse(wire.Receipt, raw, "a receipt")
        kept = self._kept.get(server, {}).get((PeerId(receipt.client), receipt.from_unix_s))
        if kept is not None and receipt.samples <= kept.samples:
            return None
        most = KEPT_EACH if receipt.client in members else KEPT_STRANGE
        if kept is None and (len(self._kept.get(server, ())) >= most or self._count >= KEPT_MAX):
            raise RemoteFault("too many receipts")
        check_receipt(receipt, self._run_id, server, now_s, alone=self._alone)
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
        server = PeerId(receipt.server)
        client = PeerId(receipt.client)
        kept = self._kept.setdefault(server, {})
        before = kept.get((client, receipt.from_unix_s))
        kept[client, receipt.from_unix_s] = receipt
        self._count += before is None
        thanks = self._sums.setdefault(server, {}).setdefault(client, ReceiptTotals(peers=1))
        thanks.add(receipt)
        if before is not None:
            thanks.add(before, -1)
        thanks.last_unix_s = max(thanks.last_unix_s, receipt.until_unix_s)

    def total(self, server: PeerId, members: Container[PeerId]) -> ReceiptTotals | None:
        """The sum of what `members` signed for `server`. None when it showed no receipt that counts."""
        totals = ReceiptTotals()
        for client, thanks in self._sums.get(server, {}).items():
            if client in members:
                totals.microbatches += thanks.microbatches
                totals.samples += thanks.samples
                totals.tokens += thanks.tokens
                totals.targets += thanks.targets
                totals.peers += 1
                totals.last_unix_s = max(totals.last_unix_s, thanks.last_unix_s)
        return totals if totals.peers else None

    def of(self, server: PeerId) -> Iterator[wire.Receipt]:
        """All receipts kept for `server`, so that others can verify them again."""
        yield from self._kept.get(server, {}).values()


def counts_of(counters: Mapping[str, float]) -> dict[str, float]:
    """The counts of a status by the names in SERIES, and `worked_s`. Negative values count as zero."""
    counts = {key: sum(max(0.0, counters.get(one, 0.0)) for one in summed) for key, summed in SERIES.items()}
    worked = sum(max(0.0, value) for key, value in counters.items() if key.startswith(name.COMPUTE_SECONDS))
    return {**counts, "worked_s": worked}


def energy_of(metered_s: float, joules: float) -> dict[str, float]:
    """Seconds of work for which owners told their machines' watts, and the kilowatt-hours of them."""
    return {"metered_s": round(metered_s, 1), "kwh": round(joules / JOULES_A_KWH, 6)}


CREDITED = "credited"  # of a life: 1 if its owner lets published models name it


@dataclass(slots=True)
class Contribution:
    """The work of one peer. `lives` maps an incarnation to the counts it last reported. Times are Unix seconds."""

    name: str = ""
    first_unix_s: float = 0.0
    last_unix_s: float = 0.0
    lives: dict[int, dict[str, float]] = field(default_factory=dict)

    def tell(self, incarnation: int, counts: Mapping[str, float], parameters: int, watts: int = 0) -> dict[str, float]:
        """Take in the counts of one life. Returns the growth by key. Counts that shrink keep their old value.

        `parameters` is the size of the stage it serves. It gives the bytes that an exchange would send uncompressed.
        `watts`: what its owner says that the machine takes at work; 0: not told.
        """
        life = self.lives.setdefault(incarnation, dict.fromkeys(KEYS, 0.0))
        if len(self.lives) > LIVES_MAX:
            oldest, next_oldest = list(self.lives)[:2]
            for key, value in self.lives.pop(next_oldest).items():
                self.lives[oldest][key] = self.lives[oldest].get(key, 0.0) + value
        grown = {key: max(0.0, value - life.get(key, 0.0)) for key, value in counts.items()}
        grown["dense"] = grown.get("paired", 0.0) * DENSE_BYTES * parameters
        grown["metered_s"] = grown.get("worked_s", 0.0) if watts else 0.0
        grown["joules"] = grown["metered_s"] * watts
        for key, value in grown.items():
            life[key] = life.get(key, 0.0) + value
        return grown

    def total(self, key: str) -> float:
        return sum(life.get(key, 0.0) for life in self.lives.values())

    def to_json(self, peer: str, thanks: ReceiptTotals | None) -> dict[str, object]:
        """The peer's own claims, and the receipts that others signed for it."""
        return {
            "peer": peer,
            "name": self.name,
            "first": round(self.first_unix_s, 3),
            "last": round(self.last_unix_s, 3),
            "lives": len(self.lives),
            "steps": round(self.total("steps")),
            "fed": round(self.total("fed")),
            "worked_s": round(self.total("worked_s"), 1),
            **energy_of(self.total("metered_s"), self.total("joules")),
            "sent": round(sum(self.total(key) for key in SENT)),
            "exchanges": round(self.total("paired")),
            "receipts": None if thanks is None else thanks.to_json(),
        }
