"""Which stages of a run this machine can serve, by its memory and by the files that it may read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.manifest import Manifest
from swarmnode.model.memory import replica_nbytes
from swarmnode.model.split import split


@dataclass(frozen=True, slots=True)
class Able:
    """`unable`: the stages that this machine cannot serve. `needed`: bytes of memory that a replica of each stage
    takes, of which there are `free_nbytes`. `no_files`: stage 0 reads files, and this machine opens none."""

    unable: frozenset[int]
    needed: tuple[int, ...]
    free_nbytes: int
    no_files: bool


def able(manifest: Manifest, free_nbytes: int, *, has_data: bool) -> Able:
    """What fits into `free_nbytes`, by formula (model/memory.py); `has_data`: the user has named a folder of files."""
    needed = tuple(replica_nbytes(manifest, part) for part in split(manifest.model, manifest.pipeline.stages))
    unable = {stage for stage, nbytes in enumerate(needed) if nbytes > free_nbytes}
    no_files = manifest.data.names_files and not has_data
    return Able(frozenset(unable | {0} if no_files else unable), needed, free_nbytes, no_files)
