"""Receipts on disk: the newest of each client and process lifetime, in one file per node, written atomically.

The file is bounded in number and bytes. What is read at start is verified as it was when it came; a damaged file is put
aside, and what verifies of it is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from swarmnode.base import bounds
from swarmnode.base.atomic_file import atomic_write
from swarmnode.base.damaged_file import put_aside
from swarmnode.base.errors import LocalFault, RemoteFault, cause_of
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.work import Work
from swarmnode.net.membership.receipt import RECEIPT_BYTES_MAX, check_receipt, work_of

FILE_NAME = "receipts.bin"
RECEIPTS_MAX = 16_384  # guess: a year of 40 clients a day; 4 MB. Beyond it those of the least work go
FILE_BYTES_MAX = RECEIPTS_MAX * (4 + RECEIPT_BYTES_MAX)


Key = tuple[str, str, int]
"""(run id, client, begin of the client's life as Unix seconds)."""


class Receipts:
    """The receipts in `home`. `keep` replaces an older one of the same client and lifetime. Use it from one task."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME
        self._kept: dict[Key, bytes] = {}
        self._sums: dict[str, Work] = {}
        for one in self._sound(home):
            self._put(one)
        self._serials = {key: serial for serial, key in enumerate(self._kept, start=1)}
        self._serial = len(self._kept)

    def _sound(self, home: Path) -> Iterator[wire.Receipt]:
        """The receipts of the file that verify. Where some do not, or it is damaged, it is put aside."""
        bad = 0
        try:
            for receipt, fault in checked(home):
                bad += bool(fault)
                if not fault:
                    yield receipt
            if bad:
                put_aside(self._path, f"{bad} receipts do not verify")
        except LocalFault as fault:
            put_aside(self._path, str(fault).removeprefix(f"{self._path} "))

    async def keep(self, receipt: wire.Receipt) -> None:
        """Store `receipt` and write all, beside the event loop: a sync of a busy disk takes 60 ms (measured). A failing
        disk loses at most the last one."""
        key = self._put(receipt)
        self._serial += 1
        self._serials[key] = self._serial
        raw = b"".join(len(one).to_bytes(4, "big") + one for one in self._kept.values())
        with contextlib.suppress(OSError):
            await asyncio.to_thread(atomic_write, self._path, raw)

    def _put(self, receipt: wire.Receipt) -> Key:
        """Keep `receipt`, the newest last. Of more than RECEIPTS_MAX the one of least work goes."""
        key = receipt.run_id, receipt.client, receipt.from_unix_s
        before = self._kept.pop(key, None)
        if before is None and len(self._kept) >= RECEIPTS_MAX:
            least = min(self._kept, key=lambda other: _read_own(self._kept[other]).samples)
            gone = _read_own(self._kept.pop(least))
            self._serials.pop(least, None)
            self._sums[gone.run_id] -= work_of(gone)
        self._count(receipt, before)
        self._kept[key] = _raw(receipt)
        return key

    def total(self, run_id: RunId) -> Work:
        """The work that all receipts of `run_id` are for: what this machine gave to the run."""
        return self._sums.get(run_id, Work())

    def _count(self, receipt: wire.Receipt, before: bytes | None = None) -> None:
        """Count `receipt`, which replaces the one `before`."""
        added = work_of(receipt) - (Work() if before is None else work_of(_read_own(before)))
        self._sums[receipt.run_id] = self._sums.get(receipt.run_id, Work()) + added

    def after(self, run_id: RunId, serial: int, most: int) -> tuple[int, list[bytes]]:
        """The oldest `most` receipts of `run_id` after `serial`, serialised, and the serial of the last of them."""
        newer = []
        for key in reversed(self._kept):
            if self._serials[key] <= serial:
                break
            if key[0] == run_id:
                newer.append(key)
        rows = newer[::-1][:most]
        return (self._serials[rows[-1]] if rows else serial), [self._kept[key] for key in rows]


def read(home: Path) -> Iterator[wire.Receipt]:
    """All receipts of `home`, oldest first, unverified. Raises LocalFault for an invalid file."""
    path = home / FILE_NAME
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            raw = file.read(FILE_BYTES_MAX)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LocalFault(f"{path} cannot be read: {cause_of(error)}") from None
    at = 0
    while at < len(raw):
        nbytes = int.from_bytes(raw[at : at + 4], "big")
        at += 4
        try:
            if not 0 < nbytes <= min(RECEIPT_BYTES_MAX, len(raw) - at):
                raise RemoteFault("no receipt")
            yield _read_own(raw[at : at + nbytes])
        except RemoteFault:
            raise LocalFault(f"{path} holds no receipt at byte {at}; a node that starts puts it aside") from None
        at += nbytes


def checked(home: Path) -> Iterator[tuple[wire.Receipt, str]]:
    """All receipts of `home`, oldest first, each verified again: with its fault, or "". Raises LocalFault as `read`."""
    for receipt in read(home):
        try:
            check_receipt(receipt, RunId(receipt.run_id), PeerId(receipt.server), alone=True)
        except (RemoteFault, ValueError) as fault:
            yield receipt, str(fault)
        else:
            yield receipt, ""


def given(home: Path, run_id: str) -> Work:
    """The work that the receipts of `run_id` in `home` are for. Raises LocalFault as `read`."""
    return sum((work_of(one) for one in read(home) if one.run_id == run_id), Work())


def _read_own(raw: bytes) -> wire.Receipt:
    return bounds.parse(wire.Receipt, raw, "a receipt")


def _raw(receipt: wire.Receipt) -> bytes:
    return receipt.SerializeToString(deterministic=True)
