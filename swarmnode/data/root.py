"""Confines the paths of a manifest to one folder of this machine.

A manifest comes from the organiser, who is not trusted with this machine's files. Only this machine's user chooses the
folder that its paths start in. Symbolic links that lead out of the folder are refused.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

from swarmnode.base.errors import NotPermitted
from swarmnode.run.manifest.check import PATH, is_below


@dataclass(frozen=True, slots=True)
class DataRoot:
    """The folder that the user named. With None, nothing is opened."""

    folder: pathlib.Path | None

    def find(self, name: str) -> pathlib.Path:
        """The real path of `name` from a manifest. It need not exist.

        Raises NotPermitted when there is no folder, when `name` is not a relative path below it, and when symbolic
        links lead out of the folder or to a hidden file.
        """
        if self.folder is None:
            raise NotPermitted(
                f"the run reads {name[:60]!r} on machines of the first stage, and no folder of this one is open to it:"
                " give --data-root FOLDER, below which the run's files lie, or serve another stage"
            )
        if not is_below(name):
            raise NotPermitted(f"{name[:60]!r} is not {PATH}")
        return self.inside(self.folder / name)

    def inside(self, path: pathlib.Path) -> pathlib.Path:
        """Resolves `path` to a real path below the folder. Raises NotPermitted when it is outside or hidden."""
        assert self.folder is not None
        root = os.path.realpath(self.folder)
        real = os.path.realpath(path)
        below = os.path.relpath(real, root).split(os.sep)
        if below[0] == ".." or any(part.startswith(".") and part != "." for part in below):
            raise NotPermitted(
                f"{path}: a symbolic link leads out of {self.folder} or to a hidden file; name the folder where the"
                " files really are (--data-root, --from, --tokenizer)"
            )
        return pathlib.Path(real)


def model_root(folder: pathlib.Path) -> DataRoot:
    """The root of a folder that somebody else made: itself, or in a cache of the Hugging Face hub, whose snapshots are
    links, the model's own folder there."""
    folder = folder.resolve()
    in_hub = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return DataRoot(folder.parent.parent if in_hub else folder)
