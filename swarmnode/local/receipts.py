"""Receipts on disk: the newest of each client and life, one file a node, written whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from swarmnode.errors import LocalFault
from swarmnode.ids import RunId
from swarmnode.membership.receipt import RECEIPT_BYTES_MAX
from swarmnode.wire import call_pb2 as wire

FILE_NAME = "receipts.bin"
FILE_BYTES_MAX = 16 << 20


class Receipts:
    """Those of `home`. `keep` replaces an older one of the same client and life."""

    def __init__(self, home: Path) -> None:
        """Raises LocalFault when what is there makes no sense."""
        self._path = home / FILE_NAME
        self._kept = {(one.run_id, one.client, one.from_unix_s): one for one in read(home)}
        self._serials = {key: serial for serial, key in enumerate(self._kept, start=1)}
        self._serial = len(self._kept)

    def keep(self, receipt: wire.Receipt) -> None:
        """Keep it, and write all; a disk that refuses loses no more than the last of them."""
        own = wire.Receipt()
        own.CopyFrom(receipt)
        key = own.run_id, own.client, own.from_unix_s
        self._kept.pop(key, None)  # the newest is last
        self._kept[key] = own
        self._serial += 1
        self._serials[key] = self._serial
        raw = b"".join(len(one).to_bytes(4, "big") + one for one in map(_raw, self._kept.values()))
        fresh = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            fresh.write_bytes(raw)
            os.replace(fresh, self._path)
        except OSError:
            fresh.unlink(missing_ok=True)

    def after(self, run_id: RunId, serial: int, most: int) -> tuple[int, list[bytes]]:
        """The oldest `most` of `run_id` that came after `serial`, serialised, and the serial of the last of them."""
        newer = []
        for key in reversed(self._kept):
            if self._serials[key] <= serial:
                break
            if key[0] == run_id:
                newer.append(key)
        told = newer[::-1][:most]
        return (self._serials[told[-1]] if told else serial), [_raw(self._kept[key]) for key in told]


def read(home: Path) -> Iterator[wire.Receipt]:
    """All of `home`, oldest first, not verified. Raises LocalFault for a file that makes no sense."""
    path = home / FILE_NAME
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LocalFault(f"{path} cannot be read: {error.strerror}") from None
    at = 0
    while at < len(raw):
        nbytes = int.from_bytes(raw[at : at + 4], "big")
        at += 4
        try:
            if not 0 < nbytes <= min(RECEIPT_BYTES_MAX, len(raw) - at):
                raise DecodeError
            yield wire.Receipt.FromString(raw[at : at + nbytes])
        except DecodeError:
            raise LocalFault(f"{path} is damaged: move it away") from None
        at += nbytes


def _raw(receipt: wire.Receipt) -> bytes:
    return receipt.SerializeToString(deterministic=True)
