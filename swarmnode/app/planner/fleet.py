"""A fleet: the simulated machines, in a CSV file with one kind of machine per row, editable in any spreadsheet."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.app.planner.geography import RTT_MS_PLACES, Address, Nat
from swarmnode.base.errors import UsageError, os_errors
from swarmnode.base.text_file import decoded

COLUMNS = (
    "name",
    "count",
    "flops",
    "up_mbps",
    "down_mbps",
    "region",
    "access_ms",
    "nat",
    "life_h",
    "memory_gb",
    "host_gb",
    "price",
    "egress_price",
    "stage",
)
REQUIRED = ("count", "flops", "up_mbps", "down_mbps")
COUNT_MAX = 100_000


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A row: `count` machines of `flops` FLOP/s (as achieved in training, not the data sheet's), links in bytes per
    second, mean lifetime in hours (infinite: they stay). `memory_gb`: of the device that computes. `host_gb`: main
    memory beside it; 0: `memory_gb` is all that the machine has, and its processor computes. `price`: money for an hour
    of one machine; `egress_price`: for a GB that it sends."""

    name: str
    count: int
    flops: float
    up: float
    down: float
    address: Address
    life_h: float = math.inf
    memory_gb: float = 24.0
    host_gb: float = 0.0
    price: float = 0.0
    egress_price: float = 0.0
    stage: int | None = None  # stage its machines begin with; None: where they are needed


def read_fleet(path: Path) -> tuple[MachineKind, ...]:
    """The rows of `path`. Raises UsageError that names the file, the line and the expected value."""
    with os_errors(UsageError, f"{path} cannot be read"):
        raw = path.read_bytes()
    try:
        text = decoded(raw)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from None
    lines = [line for line in io.StringIO(text, newline="") if line.strip() and not line.lstrip().startswith("#")]
    return parse_fleet(csv.DictReader(lines), str(path))


def parse_fleet(rows: Iterable[dict[str, str]], origin: str) -> tuple[MachineKind, ...]:
    kinds = []
    for number, row in enumerate(rows, start=1):
        unknown = [str(key) for key in row if key not in COLUMNS]
        if unknown:
            raise UsageError(f"{origin}: unknown column {unknown[0]!r}; columns are {', '.join(COLUMNS)}")
        for key in REQUIRED:
            if not (row.get(key) or "").strip():
                raise UsageError(f"{origin}, machine {number}: {key} is missing; {', '.join(REQUIRED)} are needed")
        kinds.append(_kind(row, f"{origin}, machine {number}", number))
    if not kinds:
        raise UsageError(f"{origin}: contains no machine; a row is a kind of machine, columns are {', '.join(COLUMNS)}")
    return tuple(kinds)


def _kind(row: dict[str, str], where: str, number: int) -> MachineKind:
    def real(key: str, default: float, low: float) -> float:
        text = (row.get(key) or "").strip()
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not value >= low:
            raise UsageError(f"{where}: {key} = {text[:40]!r}; expected a number of at least {low:g}")
        return value

    region = (row.get("region") or "local").strip()
    if region not in RTT_MS_PLACES:
        raise UsageError(f"{where}: region {region[:40]!r}; known are {', '.join(RTT_MS_PLACES)}")
    nat = (row.get("nat") or "open").strip()
    if nat not in list(Nat):
        raise UsageError(f"{where}: nat {nat[:40]!r}; known are {', '.join(Nat)}")
    count = int(real("count", 1.0, 1.0))
    if count > COUNT_MAX:
        raise UsageError(f"{where}: count = {count}; at most {COUNT_MAX}")
    return MachineKind(
        name=(row.get("name") or f"kind {number}").strip(),
        count=count,
        flops=real("flops", 0.0, 1.0),
        up=real("up_mbps", 0.0, 1e-3) * 1e6 / 8,
        down=real("down_mbps", 0.0, 1e-3) * 1e6 / 8,
        address=Address(region, real("access_ms", 5.0, 0.0) / 1000.0, Nat(nat)),
        life_h=real("life_h", math.inf, 1e-6),
        memory_gb=real("memory_gb", 24.0, 1e-3),
        host_gb=real("host_gb", 0.0, 0.0),
        price=real("price", 0.0, 0.0),
        egress_price=real("egress_price", 0.0, 0.0),
        stage=int(real("stage", 0.0, 0.0)) if (row.get("stage") or "").strip() else None,
    )


def scaled(kinds: Sequence[MachineKind], nodes: int) -> tuple[MachineKind, ...]:
    """The same mixture with `nodes` machines: largest remainders [Hamilton's method]."""
    total = sum(kind.count for kind in kinds)
    exact = [nodes * kind.count / total for kind in kinds]
    counts = [math.floor(share) for share in exact]
    order = sorted(range(len(kinds)), key=lambda i: (counts[i] - exact[i], i))
    for index in order[: nodes - sum(counts)]:
        counts[index] += 1
    return tuple(replace(kind, count=count) for kind, count in zip(kinds, counts, strict=True) if count)
