"""Folders of this user: data and caches, by the XDG base directory specification on Linux."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from swarmnode.base.errors import UsageError

CACHE_NBYTES = 8 * 10**9  # as --data-cache; derived: 4e9 tokens, half a day of a feeder at 100,000 a second


def default_home(kind: str) -> Path:
    """The home of a `kind` of process, node or bootstrap: $XDG_DATA_HOME/swarmnode/`kind`, or below ~/.local/share.
    Raises UsageError for a user without a home directory."""
    from platformdirs import user_data_path

    try:
        return user_data_path("swarmnode") / kind
    except RuntimeError:
        raise UsageError("this user has no home directory: give --home FOLDER, or set HOME") from None


def default_cache() -> Path:
    """$XDG_CACHE_HOME/swarmnode, or ~/.cache/swarmnode: tokens and compiled code, which can be made again. A user
    without a home directory has it among the temporary files."""
    try:
        from platformdirs import user_cache_path

        return user_cache_path("swarmnode")
    except ImportError:  # virtual time also runs where no package is installed
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmnode"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"swarmnode-{os.getuid()}"
