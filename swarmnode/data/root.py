"""The one folder of this machine that a manifest may name files in, and only below it.

A manifest comes from whoever made the run. Which folder its paths begin in is said by this machine's user alone; what
leads out of it, by a symbolic link, is refused.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

from swarmnode.errors import NotPermitted
from swarmnode.manifest.check import PATH, is_below


@dataclass(frozen=True, slots=True)
class DataRoot:
    """`folder` as the user named it; None: none was named, and nothing is opened."""

    folder: pathlib.Path | None

    def find(self, name: str) -> pathlib.Path:
        """The real path of `name`, which a manifest gives. It need not exist.

        Raises NotPermitted without a folder, for a name that is no path below one, and when symbolic links lead out of
        the folder or to a hidden file.
        """
        if self.folder is None:
            raise NotPermitted(
                f"the run reads {name[:60]!r} on machines of stage 0, and no folder of this one is open to it: give"
                " --data-root FOLDER, below which the run's files lie, or serve another stage"
            )
        if not is_below(name):
            raise NotPermitted(f"{name[:60]!r} is not {PATH}")
        return self.inside(self.folder / name)

    def inside(self, path: pathlib.Path) -> pathlib.Path:
        """`path`, a link or not, as the real path below the folder. Raises NotPermitted when it is not below it."""
        assert self.folder is not None
        root, real = os.path.realpath(self.folder), os.path.realpath(path)
        below = os.path.relpath(real, root).split(os.sep)
        if below[0] == ".." or any(part.startswith(".") and part != "." for part in below):
            raise NotPermitted(
                f"{path}: a symbolic link leads out of {self.folder} or to a hidden file; --data-root is to be the"
                " folder where the files really are"
            )
        return pathlib.Path(real)
