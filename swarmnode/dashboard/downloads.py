"""Offers the run's archive on the page: the numbers of each checkpoint, and its files if downloads are allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swarmnode.ids import PeerId, short
from swarmnode.machine.run_archive import Archive
from swarmnode.recovery.archive import ArchiveEntry

Json = dict[str, object]


class ModelDownloads:
    """The archive as the page shows it. `download` False offers numbers only, for a public page of a private run."""

    def __init__(self, archive: Archive, *, download: bool) -> None:
        self._archive = archive
        self._download = download

    def summary(self) -> Json:
        """All checkpoints without their files, newest first."""
        return {"status": self._archive.status, "entries": [self._row(entry) for entry in self._entries()]}

    def told(self) -> Iterator[Json]:
        """The numbers, scores and continuations of each checkpoint, newest first."""
        for entry in self._entries():
            row = {"label": entry.label, "round": entry.round, "samples": entry.samples, "t": round(entry.unix_s, 3)}
            yield {**row, "loss": entry.loss, "measured": entry.measured, **entry.scores.to_json()}

    def full(self) -> Json:
        """Like `summary`, with name, bytes, SHA-256 and path of each file."""
        rows = [{**self._row(entry), "files": self._files(entry)} for entry in self._entries()]
        return {"status": self._archive.status, "entries": rows}

    def names(self, label: str) -> list[str]:
        """Names of the files of `label` that may be downloaded."""
        entry = self._archive.entries.get(label)
        return [name for name, _, _ in entry.files] if entry is not None and self._download else []

    def file(self, label: str, name: str) -> Path | None:
        """The path of one file. None for a file that is not in the archive's own list."""
        entry = self._archive.entries.get(label)
        return self._archive.folder_of(entry) / name if entry is not None and name in self.names(label) else None

    def _entries(self) -> Iterator[ArchiveEntry]:
        return iter(sorted(self._archive.entries.values(), key=lambda entry: entry.label, reverse=True))

    def _row(self, entry: ArchiveEntry) -> Json:
        best = self._archive.best
        return {
            "label": entry.label,
            "round": entry.round,
            "samples": entry.samples,
            "t": round(entry.unix_s, 3),
            "loss": entry.loss,
            "measured": entry.measured,
            "nbytes": entry.nbytes,
            "best": best is not None and best.label == entry.label,
            "agree": [word.agree for word in entry.stages],
            "liars": sorted({short(PeerId(liar)) for word in entry.stages for liar in word.liars}),
            **entry.scores.to_json(),
            "urls": f"/archive/{entry.label}/urls.txt" if self._download else None,
        }

    def _files(self, entry: ArchiveEntry) -> list[Json]:
        href = f"/archive/{entry.label}/" if self._download else None
        return [
            {"name": name, "nbytes": nbytes, "sha256": sha256, "href": None if href is None else href + name}
            for name, nbytes, sha256 in entry.files
        ]
