"""The book of what an owner issued, in the run's folder: marks of invites' grants and of archives' warrants. When the
owner's keys are replaced, these live on, and nothing else that earlier keys signed."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection

from swarmnode.base.atomic_file import write_whole
from swarmnode.base.damaged_file import UNREADABLE
from swarmnode.base.errors import ManifestError, cause_of

FILE_NAME = "issued.json"
FILE_BYTES_MAX = 1 << 20
LIVING_MAX = 256  # derived: of 8 bytes each, in an amendment of 4 KiB

Row = dict[str, str | int]


def read(run: pathlib.Path) -> list[Row]:
    """Rows of mark, name (of a grant; empty: a warrant) and end (Unix seconds), oldest first. Raises ManifestError."""
    path = run / FILE_NAME
    try:
        with path.open("rb") as file:
            rows = json.loads(file.read(FILE_BYTES_MAX))
        found: list[Row] = [
            {"mark": bytes.fromhex(row["mark"]).hex(), "name": str(row["name"]), "end": int(row["end"])} for row in rows
        ]
    except FileNotFoundError:
        return []
    except (OSError, *UNREADABLE) as error:
        raise ManifestError(
            f"{path} is damaged ({cause_of(error)}): move it away; invites and warrants issued so far then end when "
            "the owner's keys are replaced"
        ) from None
    return found


def note(run: pathlib.Path, mark: bytes, end_unix_s: int, now_unix_s: float, name: bytes = b"") -> None:
    """Add what was issued now, and drop what has ended. Raises ManifestError, NotPermitted."""
    row: Row = {"mark": mark.hex(), "name": name.hex(), "end": end_unix_s}
    rows = [*(old for old in read(run) if int(old["end"]) > now_unix_s and old["mark"] != row["mark"]), row]
    write_whole(run / FILE_NAME, (json.dumps(rows, indent=1) + "\n").encode())


def living(run: pathlib.Path, revoked: Collection[bytes], now_unix_s: float) -> list[bytes]:
    """Marks of what was issued, has not ended and was not revoked: the LIVING_MAX that end last. Raises
    ManifestError."""
    gone = {name.hex() for name in revoked}
    rows = [row for row in read(run) if int(row["end"]) > now_unix_s and row["name"] not in gone]
    rows.sort(key=lambda row: -int(row["end"]))
    return [bytes.fromhex(str(row["mark"])) for row in rows[:LIVING_MAX]]
