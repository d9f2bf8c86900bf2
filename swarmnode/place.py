"""Where things are kept on this machine, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def default_home(kind: str) -> Path:
    """`kind` is node or bootstrap: $XDG_DATA_HOME/swarmnode/`kind`, or ~/.local/share/swarmnode/`kind`."""
    return _xdg("XDG_DATA_HOME", ".local/share") / kind


def default_cache() -> Path:
    """$XDG_CACHE_HOME/swarmnode, or ~/.cache/swarmnode: tokens, which can be made again."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def _xdg(variable: str, fallback: str) -> Path:
    base = os.environ.get(variable, "")
    return (Path(base) if base.startswith("/") else Path.home() / fallback) / "swarmnode"
