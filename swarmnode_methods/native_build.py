"""Compile C code once on the machine that runs it, into the user's cache. The wheel stays pure Python, and machines
without a compiler use the Python fallback. Needs only the standard library.

A loaded library runs with this user's rights. So it is accepted only from a folder and a file that this user (or root)
owns and nobody else can write. Both are checked by descriptor, and the library is loaded through the checked
descriptor: nobody can swap the file between the check and the load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from swarmnode.base.user_folders import default_cache

TUNED = "-march=native"
COMPILE_TIMEOUT_S = 60.0
FOLDER = "compiled"  # a folder of its own: the rest of the cache may be shared with a group
OTHERS_WRITE = 0o022


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A library that the C compiler makes of `sources` with `flags`; headers are among the sources."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    tuned: bool
    """Optimised for this processor model, if the compiler supports it."""
    kind: str = ""
    """Anything else that distinguishes this library from another one."""

    def path(self) -> Path:
        """The library's path. Raises OSError if a source cannot be read, RuntimeError if there is no home folder."""
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines() if self.tuned else []
            processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        except OSError:
            processor = platform.processor()
        sources = b"".join(source.read_bytes() for source in self.sources)
        how = repr((self.flags, self.tuned, self.kind, platform.machine(), processor))
        name = hashlib.sha256(sources + how.encode()).hexdigest()[:24]
        return default_cache() / FOLDER / f"{self.name}-{name}.so"

    def build(self) -> bool:
        """Compile, unless already done. Returns False, with nothing changed, if this machine cannot compile or the
        cache belongs to somebody else."""
        try:
            path = self.path()
            if (descriptor := self.opened()) is not None:
                os.close(descriptor)
                return True
            compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
            if compiler is None:
                return False
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(_own_folder(path.parent, make_private=True))
            code = [str(source) for source in self.sources if source.suffix == ".c"]
            folders = [f"-I{source.parent}" for source in self.sources]
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / path.name
                for tuned in (True, False) if self.tuned else (False,):  # some compilers name this flag differently
                    flags = [*self.flags, TUNED] if tuned else self.flags
                    command = [compiler, *flags, *folders, "-o", str(made), *code, "-lm"]
                    done = subprocess.run(command, check=not tuned, capture_output=True, timeout=COMPILE_TIMEOUT_S)
                    if done.returncode == 0:
                        break
                made.chmod(0o700)  # independent of the umask
                made.replace(path)  # atomic: other processes may be building too
        except (OSError, RuntimeError, subprocess.SubprocessError):
            return False
        return True

    def opened(self) -> int | None:
        """A descriptor of the library if it was built and only we can write it; else None."""
        try:
            path = self.path()
            folder = _own_folder(path.parent)
            try:
                descriptor = os.open(
                    path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                )
            finally:
                os.close(folder)
        except (OSError, RuntimeError):
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and _is_own(status):
            return descriptor
        os.close(descriptor)
        return None


def _own_folder(path: Path, *, make_private: bool = False) -> int:
    """A descriptor of the folder `path`. Raises OSError unless we own it and nobody else can write there;
    `make_private` repairs its mode first."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if make_private and os.fstat(folder).st_uid == os.getuid():
            os.fchmod(folder, 0o700)
        if not _is_own(os.fstat(folder)):
            raise PermissionError(errno.EPERM, "others can write there", str(path))
    except BaseException:
        os.close(folder)
        raise
    return folder


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & OTHERS_WRITE


def _name_of(descriptor: int, path: Path) -> Path:
    """A path that leads to the open file `descriptor`, if the system offers one; else `path`."""
    place = Path(f"/proc/self/fd/{descriptor}")
    return place if place.exists() else path


Loaded = TypeVar("Loaded")


class Library(Generic[Loaded]):
    """The result of `load` on a compiled library once it is built, and the fallback `otherwise` before that.

    `load` takes the library's path and may raise OSError or ImportError.
    """

    def __init__(self, compiled: Compiled, load: Callable[[Path], Loaded], otherwise: Loaded) -> None:
        self._compiled = compiled
        self._load = load
        self._otherwise = otherwise
        self._found = otherwise
        self._looked = self._unused = False

    def build(self) -> bool:
        """Compile, unless already done. Returns False, with nothing changed, if this machine cannot compile."""
        if not self._compiled.build():
            return False
        # if it is still the fallback, `best` was asked before the build: look again
        self._looked = self._found is not self._otherwise
        return True

    @contextlib.contextmanager
    def unused(self) -> Iterator[None]:
        """Use the fallback within this context."""
        before = self._unused
        self._unused = True
        try:
            yield
        finally:
            self._unused = before

    def best(self) -> Loaded:
        """The library, if `build` has made it and only we can write it; else the fallback."""
        if self._unused:
            return self._otherwise
        if not self._looked:
            self._found = self._open()
            self._looked = True
        return self._found

    def _open(self) -> Loaded:
        descriptor = self._compiled.opened()
        if descriptor is None:
            return self._otherwise
        # The descriptor stays open: the linker knows libraries by name, so no other library may ever get this number.
        try:
            return self._load(_name_of(descriptor, self._compiled.path()))
        except (OSError, ImportError):
            return self._otherwise
