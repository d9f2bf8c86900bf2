"""C that is compiled once on the machine it runs on, into the user's cache: the wheel stays pure, and whoever has no
compiler does without. Needs the standard library only."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

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


__all__ = ["Compiled"]
