"""The console for tables: a terminal with its own width, or a file with longer lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FILE_COLUMNS = 160  # no table of ours is wider


def paper() -> Console:
    """The standard output, for rich's tables."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    return console
