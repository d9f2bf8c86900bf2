"""Damaged files of a node's own: put aside and told, never fatal. A torn disk, a careless hand or a stranger's bytes
cost what was in the file, not the node."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from swarmnode.base.errors import cause_of
from swarmnode.base.untrusted_text import printable

ASIDE_MAX = 4  # guess: damaged files of one name that are kept to be looked at; the last one is replaced
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""Raised where the content of a file is not what this program writes."""

T = TypeVar("T")


def put_aside(path: Path, why: str) -> None:
    """Rename what is at `path`, a file or a folder, to `path`.damaged, and say so on stderr. Where the folder cannot be
    written it stays, and that is said."""
    names = [path.with_name(f"{path.name}.damaged{'' if n == 1 else f'-{n}'}") for n in range(1, ASIDE_MAX + 1)]
    aside = next((name for name in names if not os.path.lexists(name)), names[-1])
    try:
        if os.path.lexists(aside):
            shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink()
        path.rename(aside)
        done = f"put aside as {aside.name}; a new one is made"
    except OSError as error:
        done = f"it cannot be put aside ({cause_of(error)}), and is not used"
    tell_damaged(str(path), why, done)


def put_aside_unless_file(path: Path) -> None:
    """Put aside what is at `path` where it is no regular file: a folder, a pipe, whose open waits for ever, a device, a
    link that leads nowhere. A link to a file is one, and so is a link to one that can be made. A device itself stays:
    it is the machine's."""
    to = os.path.realpath(path)
    makes = path.is_symlink() and not os.path.lexists(to) and os.path.isdir(os.path.dirname(to))
    device = os.path.lexists(path) and stat.S_ISCHR(os.lstat(path).st_mode)
    if os.path.lexists(path) and not (os.path.isfile(path) or makes or device):
        put_aside(path, "a folder" if os.path.isdir(path) else "no file")


def tell_damaged(name: str, why: str, done: str = "it is not used") -> None:
    """Say on stderr that the file `name` is damaged, and what is `done` about it."""
    sys.stderr.write(f"swarmnode: {name} is damaged ({printable(why, 200)}): {done}\n")


def read_small(path: Path, nbytes_max: int) -> bytes | None:
    """The bytes of `path`; None where there is none, or where it is put aside: no regular file, longer than
    `nbytes_max`, or unreadable."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            raw = file.read(nbytes_max + 1)
        if raw is None or len(raw) > nbytes_max:
            raise ValueError(f"longer than {nbytes_max} bytes" if raw else "no file")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        put_aside(path, cause_of(error) if isinstance(error, OSError) else str(error))
        return None
    return raw


def read_own_json(path: Path, nbytes_max: int, take: Callable[[Any], T]) -> T | None:
    """The value that `take` makes of the JSON in `path`. None where there is no file, or where it is put aside: it is
    no JSON, or `take` raises one of UNREADABLE."""
    raw = read_small(path, nbytes_max)
    if raw is None:
        return None
    try:
        return take(json.loads(raw))
    except UNREADABLE as error:
        put_aside(path, f"{type(error).__name__}: {str(error)[:80]}")
        return None
