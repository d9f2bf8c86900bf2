"""Documents and the pieces of work that they are read in; what of an input is left out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from swarmnode.data.chat_template import Conversation
from swarmnode.errors import DataError

DOCUMENT_BYTES_MAX = 1 << 20
"""Longer documents are cut at a line's end (guess: 250,000 tokens, more than a context)."""
NAMED_MAX = 20
TEXT, MESSAGES = "text", "messages"

Document = bytes | Conversation
"""Text in UTF-8, or a conversation."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A document, and the file and line or row it comes from."""

    document: Document
    where: str


@dataclass(slots=True)
class BadRows:
    """The files and rows that are left out: at most `limit`. Empty rows are only counted."""

    limit: int = 0
    count: int = 0
    empty: int = 0
    lines: list[str] = field(default_factory=list)
    """The first NAMED_MAX of them, with the reason."""

    def add(self, where: str, why: str) -> None:
        """Leave out what is at `where`. Raises DataError when that is one too many."""
        self.count += 1
        if len(self.lines) < NAMED_MAX:
            self.lines.append(f"{where}: {why}")
        if self.count > self.limit:
            more = f"; with this one {self.count} are bad, and --skip-bad allows {self.limit}" if self.limit else ""
            raise DataError(f"{where}: {why}{more}")

    def add_empty(self) -> None:
        """Count an empty text."""
        self.empty += 1

    def merge(self, other: BadRows) -> None:
        """Count those of `other`, too. Raises DataError as `add`."""
        self.count += other.count
        self.empty += other.empty
        self.lines += other.lines[: NAMED_MAX - len(self.lines)]
        if self.count > self.limit:
            raise DataError(f"{other.lines[0]}; {self.count} files or rows are bad, and --skip-bad allows {self.limit}")


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for turning records into documents. `field` names the key of the text, `messages` that of the
    conversation; None: the usual one. Documents are cut to at most `cut_nbytes` bytes. `encoding` is that of files
    that are not UTF-8 and have no mark of their own."""

    field: str | None = None
    messages: str | None = None
    cut_nbytes: int = DOCUMENT_BYTES_MAX
    hub_split: str = "train"
    encoding: str = ""

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of text and conversation that may be read; "" for one that may not."""
        if self.field is None and self.messages is None:
            return TEXT, MESSAGES
        return self.field or "", self.messages or ""


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """A piece of work: some documents of one source. `first` and `last` bound bytes for text and jsonl (documents that
    begin in [first, last)), row groups for Parquet, and a shard out of `of` for a hub data set. Kind `files` is several
    whole text files. `version` changes with the input."""

    source: int
    kind: str
    name: str
    files: tuple[str, ...]
    first: int
    last: int
    nbytes: int
    version: str
    of: int = 1
    compression: str = ""
    encoding: str = ""


def shown(name: str | os.PathLike[str]) -> str:
    """`name` of a file as text, also where it is no UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")
