"""The console for tables: a terminal with its own width, or a file with longer lines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console


FILE_COLUMNS = 160  # no table of ours is wider


def note(text: str) -> None:
    """Print a line for the person, beside what a program reads."""
    click.echo(text, err=True)


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes so far, total bytes)."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda done, of: progress.update(task, completed=done, total=of or None)


def paper() -> Console:
    """The standard output, for rich's tables."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = FILE_COLUMNS
    return console
