"""C that is compiled once on the machine it runs on, into the user's cache: the wheel stays pure, and whoever has no
compiler does without. Needs the standard library only.

What is loaded runs as this user, so it is taken only from a folder and a file that this user (or root) owns and nobody
else can write. Both are checked by descriptor, and the library is loaded through the very descriptor that was checked:
between the look and the load nobody can put another in its place.
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

TUNED = "-march=native"
COMPILE_TIMEOUT_S = 60.0
FOLDER = "compiled"  # its own: what else is in the cache may be shared with a group
OTHERS_WRITE = 0o022


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A library made of `sources` by the C compiler with `flags`."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    tuned: bool
    """For this very kind of processor, where the compiler can."""
    kind: str = ""
    """What else makes one library differ from another."""

    def path(self) -> Path:
        """Where it lies. Raises OSError when a source cannot be read, RuntimeError when there is no home."""
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines() if self.tuned else []
            processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        except OSError:
            processor = platform.processor()
        sources = b"".join(source.read_bytes() for source in self.sources)
        how = repr((self.flags, self.tuned, self.kind, platform.machine(), processor))
        name = hashlib.sha256(sources + how.encode()).hexdigest()[:24]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "swarmnode" / FOLDER / f"{self.name}-{name}.so"

    def build(self) -> bool:
        """Compile unless that was done before. False, with nothing changed, when this machine cannot, or when the cache
        is somebody else's."""
        try:
            path = self.path()
            if (found := self.opened()) is not None:
                os.close(found)
                return True
            compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
            if compiler is None:
                return False
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(_own_folder(path.parent, make_private=True))
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / path.name
                for tuned in (True, False) if self.tuned else (False,):  # some compilers know this flag by another name
                    flags = [*self.flags, TUNED] if tuned else self.flags
                    command = [compiler, *flags, "-o", str(made), *map(str, self.sources), "-lm"]
                    done = subprocess.run(command, check=not tuned, capture_output=True, timeout=COMPILE_TIMEOUT_S)
                    if done.returncode == 0:
                        break
                made.chmod(0o700)  # whatever the umask
                made.replace(path)  # whole or not at all: others may be building too
        except (OSError, RuntimeError, subprocess.SubprocessError):
            return False
        return True

    def opened(self) -> int | None:
        """A descriptor of the library, if it was built and is ours alone; None otherwise."""
        try:
            path = self.path()
            folder = _own_folder(path.parent)
            try:
                found = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            finally:
                os.close(folder)
        except (OSError, RuntimeError):
            return None
        status = os.fstat(found)
        if stat.S_ISREG(status.st_mode) and _is_own(status):
            return found
        os.close(found)
        return None


def _own_folder(path: Path, *, make_private: bool = False) -> int:
    """A descriptor of the folder `path`. Raises OSError unless it is ours and nobody else can write there; with
    `make_private` its mode is mended."""
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
    """A path that leads to what `descriptor` is, where the system has one; else `path`."""
    place = Path(f"/proc/self/fd/{descriptor}")
    return place if place.exists() else path


Loaded = TypeVar("Loaded")


class Library(Generic[Loaded]):
    """What `load` makes of a compiled library, once it was built, and what stands for it elsewhere.

    `load` takes its path and may raise OSError or ImportError.
    """

    def __init__(self, compiled: Compiled, load: Callable[[Path], Loaded], otherwise: Loaded) -> None:
        self._compiled = compiled
        self._load = load
        self._otherwise = otherwise
        self._found = otherwise
        self._looked = self._unused = False

    def build(self) -> bool:
        """Compile unless that was done before. False, with nothing changed, when this machine cannot."""
        if not self._compiled.build():
            return False
        self._looked = self._found is not self._otherwise  # if not, it was looked for too early
        return True

    @contextlib.contextmanager
    def unused(self) -> Iterator[None]:
        """Whoever asks for it meanwhile gets what stands for it."""
        before, self._unused = self._unused, True
        try:
            yield
        finally:
            self._unused = before

    def best(self) -> Loaded:
        """The library, if `build` has made it and it is ours; else what stands for it."""
        if self._unused:
            return self._otherwise
        if not self._looked:
            self._found, self._looked = self._open(), True
        return self._found

    def _open(self) -> Loaded:
        descriptor = self._compiled.opened()
        if descriptor is None:
            return self._otherwise
        # Left open: the linker knows libraries by name, and another one must never get this number.
        try:
            return self._load(_name_of(descriptor, self._compiled.path()))
        except (OSError, ImportError):
            return self._otherwise


__all__ = ["Compiled", "Library"]
