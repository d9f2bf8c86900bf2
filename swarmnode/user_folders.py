"""Folders of this user: data and caches, by the XDG base directory specification on Linux."""

from __future__ import annotations

import os
from pathlib import Path


def default_home(kind: str) -> Path:
    """The home of a `kind` of process, node or bootstrap: $XDG_DATA_HOME/swarmnode/`kind`, or below ~/.local/share."""
    from platformdirs import user_data_path

    return user_data_path("swarmnode") / kind


def default_cache() -> Path:
    """$XDG_CACHE_HOME/swarmnode, or ~/.cache/swarmnode: tokens and compiled code, which can be made again."""
    try:
        from platformdirs import user_cache_path
    except ImportError:  # virtual time also runs where no package is installed
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmnode"
    return user_cache_path("swarmnode")
