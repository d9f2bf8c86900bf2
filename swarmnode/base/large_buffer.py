"""Buffers for states: small ones in this process's memory, large ones in a file without a name that the kernel can
write out when memory is short."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from swarmnode.base.errors import LocalFault, os_errors

IN_MEMORY_NBYTES = 256 << 20  # guess: below it a file saves nothing that matters
FOLDER = Path("/var/tmp")  # kept on disk by the Filesystem Hierarchy Standard; /tmp is often memory


def large_buffer(nbytes: int) -> memoryview:
    """A writable buffer of `nbytes`. Its room on disk is reserved at once. Raises LocalFault if it does not fit."""
    if nbytes < IN_MEMORY_NBYTES:
        return np.empty(nbytes, np.uint8).data
    folder = FOLDER if os.access(FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    full = os_errors(LocalFault, f"{nbytes} bytes for a state do not fit in {folder}", "; make room")
    with full, tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return memoryview(mmap.mmap(file.fileno(), nbytes))
