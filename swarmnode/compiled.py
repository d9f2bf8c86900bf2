"""C that is compiled once on the machine it runs on, into the user's cache: the wheel stays pure, and whoever has no
compiler does without. Needs the standard library only."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

TUNED = "-march=native"
COMPILE_TIMEOUT_S = 60.0


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
        return cache / "swarmnode" / f"{self.name}-{name}.so"

    def build(self) -> bool:
        """Compile unless that was done before. False, with nothing changed, when this machine cannot."""
        try:
            path = self.path()
            if path.exists():
                return True
            compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
            if compiler is None:
                return False
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / path.name
                for tuned in (True, False) if self.tuned else (False,):  # some compilers know this flag by another name
                    flags = [*self.flags, TUNED] if tuned else self.flags
                    command = [compiler, *flags, "-o", str(made), *map(str, self.sources), "-lm"]
                    done = subprocess.run(command, check=not tuned, capture_output=True, timeout=COMPILE_TIMEOUT_S)
                    if done.returncode == 0:
                        break
                made.replace(path)  # whole or not at all: others may be building too
        except (OSError, RuntimeError, subprocess.SubprocessError):
            return False
        return True

    def trusted(self) -> Path | None:
        """Where it lies, if it was built, and by us or by root."""
        try:
            path = self.path()
            owner = path.stat().st_uid
        except (OSError, RuntimeError):
            return None
        return path if owner in (os.getuid(), 0) else None


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
        path = self._compiled.trusted()
        if path is None:
            return self._otherwise
        try:
            return self._load(path)
        except (OSError, ImportError):
            return self._otherwise


__all__ = ["Compiled", "Library"]
