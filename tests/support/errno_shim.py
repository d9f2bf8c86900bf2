"""Make the system calls of a child process fail as another kernel's or file system's do: a small library, preloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FLOCK_FAILS = """
#include <errno.h>
int flock(int descriptor, int operation) {{ errno = {number}; return -1; }}
"""

FLOCK_OF_NFS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
int flock(int descriptor, int operation) {
  static int (*real)(int, int);
  int way = fcntl(descriptor, F_GETFL) & O_ACCMODE;
  if (!real) real = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
  if ((operation & LOCK_EX && way == O_RDONLY) || (operation & LOCK_SH && way == O_WRONLY)) {
    errno = EBADF;
    return -1;
  }
  return real(descriptor, operation);
}
"""
"""flock(2), "NFS details": locks are those of fcntl, an exclusive one needs a descriptor open for writing."""


def preloaded(folder: Path, source: str) -> dict[str, str]:
    """The environment of a process that finds the functions of the C `source` first; the library goes to `folder`.
    Skips without a compiler."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    code = folder / "shim.c"
    code.write_text(source)
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(code), "-ldl"], check=True, capture_output=True)
    return os.environ | {"LD_PRELOAD": str(library)}
