"""Receipts on disk: the newest of each client and life, one file a node, written whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from swarmnode.errors import LocalFault
from swarmnode.wire import call_pb2 as wire

FILE_NAME = "receipts.bin"
RECEIPT_BYTES_MAX = 1024
FILE_BYTES_MAX = 16 << 20


class Receipts:
    """Those of `home`. `keep` replaces an older one of the same client and life."""

    def __init__(self, home: Path) -> None:
        """Raises LocalFault when what is there makes no sense."""
        self._path = home / FILE_NAME
        self._kept = {(one.run_id, one.client, one.from_unix_s): one for one in read(home)}

    def keep(self, receipt: wire.Receipt) -> None:
        """Keep it, and write all; a disk that refuses loses no more than the last of them."""
        own = wire.Receipt()
        own.CopyFrom(receipt)
        self._kept[own.run_id, own.client, own.from_unix_s] = own
        raw = b"".join(len(one).to_bytes(4, "big") + one for one in map(_raw, self._kept.values()))
        fresh = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            fresh.write_bytes(raw)
            os.replace(fresh, self._path)
        except OSError:
            fresh.unlink(missing_ok=True)


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
