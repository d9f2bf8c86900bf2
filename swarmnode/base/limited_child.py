"""Runs a function on a stranger's files in a child process with little time, little memory, no network and no file of
this user but those that it is given. Other boxes use its filters of system calls, too.

What it is for: chat templates and tokenizers are programs of their own, which loop, allocate or crash where
their author wants so. Then the child dies, and the user gets one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from swarmnode.base import landlock
from swarmnode.base.errors import DataError, NotPermitted, SwarmnodeError
from swarmnode.base.untrusted_text import printable

CPU_S = 10
NBYTES = 2 << 30
WALL_SHARE = 30  # guess: seconds by the wall for one of the processor, on a machine that others load
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h: numbers of calls mean something on one of them only, and a kernel may have two."""
_DENIED = {"x86_64": (41, 42, 59, 322, 425), "aarch64": (198, 203, 221, 281, 425)}
"""Numbers of socket, connect, execve, execveat and io_uring_setup (asm/unistd.h)."""


def run_limited(
    function: str,
    *arguments: str,
    what: str,
    imports: Sequence[str] = (),
    cpu_s: int = CPU_S,
    reads: Iterable[Path] = (),
) -> None:
    """Call `function` ("module:name") with `arguments` in a child that has `cpu_s` of processor time and NBYTES of
    memory after it has imported `imports`. Of this user it reads the files of `reads`, and sees names in its folders.

    Raises DataError and NotPermitted as `function` does, DataError where it needs more or crashes; `what` names it.
    """
    command = [sys.executable, "-I", "-m", __name__, function, ",".join(imports), str(cpu_s), *arguments]
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR", "LANG")}
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    limits = f"{cpu_s} s and {NBYTES >> 30} GB"
    try:
        done = subprocess.run(
            command,
            input=json.dumps([str(path) for path in reads]).encode(),
            capture_output=True,
            cwd="/",
            env=kept | quiet | {"OMP_NUM_THREADS": "1"},
            timeout=WALL_SHARE * cpu_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{what}: it hangs (a trial has {limits})") from None
    said = printable((done.stdout.decode(errors="replace").strip().splitlines() or [""])[-1])
    match done.returncode:
        case 0:
            return
        case 64:
            raise NotPermitted(said)
        case 65:
            raise DataError(said if what in said else f"{what}: {said}")
        case 66 | -6:
            raise DataError(f"{what}: its trial takes more than {NBYTES >> 30} GB of memory, or breaks off")
        case -9 | -24:
            raise DataError(f"{what}: its trial takes more than {cpu_s} s of processor time")
    last = printable((done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1], 200)
    raise DataError(f"{what}: its trial ends with code {done.returncode}: {last}")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raises TimeoutError when Python code of the block has taken CPU_S of its thread's processor time, and on Linux,
    in the main thread, MemoryError when it takes NBYTES more memory."""
    memory = resource.getrlimit(resource.RLIMIT_AS)
    alone = threading.current_thread() is threading.main_thread()  # that bound holds for all threads at once
    clock = _Deadline(threading.get_ident(), CPU_S)
    try:
        if sys.platform == "linux" and alone and memory[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (_mapped_nbytes() + NBYTES, memory[1]))
        clock.start()
        yield
    except TimeoutError:
        raise TimeoutError(f"it takes more than {CPU_S} s of processor time") from None
    finally:
        try:
            clock.stop()
        finally:
            if alone:
                resource.setrlimit(resource.RLIMIT_AS, memory)


class _Deadline:
    """Raises TimeoutError in the thread `ident` once it has taken `cpu_s` more of the processor, and then each AGAIN_S:
    jinja goes on after what fails as it compiles."""

    AGAIN_S = 1.0

    def __init__(self, ident: int, cpu_s: float) -> None:
        self._ident = ctypes.c_ulong(ident)
        self._cpu_s = cpu_s
        clock = getattr(time, "pthread_getcpuclockid", None)  # macOS has none: all threads count there
        self._spent_s = time.process_time if clock is None else functools.partial(time.clock_gettime, clock(ident))
        self._over = threading.Event()
        self._raising = threading.Lock()
        self._watch = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to count."""
        self._watch.start()

    def stop(self) -> None:
        """End it; nothing is raised afterwards."""
        with self._raising:
            self._over.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._ident, None)

    def _run(self) -> None:
        due_s = self._spent_s() + self._cpu_s
        while not self._over.wait(max(0.01, due_s - self._spent_s())):
            with self._raising:
                if self._spent_s() >= due_s and not self._over.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._ident, ctypes.py_object(TimeoutError))
                    due_s += self.AGAIN_S


def _mapped_nbytes() -> int:
    """Addresses in use by this process; 0 where the system does not tell."""
    with open("/proc/self/statm") if sys.platform == "linux" else contextlib.nullcontext() as file:
        return int(file.read().split()[0]) * resource.getpagesize() if file else 0


def _limit(cpu_s: int, reads: Iterable[Path]) -> None:
    """Bound this process: it writes no file, and reads `reads`, Python's own folders and the system's libraries. Where
    the kernel has no seccomp, the network stays; where it has no Landlock, the files that this user can read."""
    mapped = _mapped_nbytes()
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_AS, (mapped + NBYTES, mapped + NBYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (spent_s + cpu_s, spent_s + cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if landlock.available():
        files = [*landlock.python_folders(), *map(Path, landlock.LIBRARIES)]
        given = list(reads)
        files += [path for path in given if not path.is_dir()]
        listed = [path for path in given if path.is_dir()]
        landlock.confine(write=[Path("/dev/null")], opened=files, listed=listed, tcp=False)
    if numbers := _DENIED.get(os.uname().machine):
        deny_calls(numbers)


def deny_calls(numbers: Sequence[int]) -> bool:
    """Let system calls of these numbers fail in this process and its children from now on (seccomp(2), classic BPF).
    False where the kernel refuses."""
    count = len(numbers)
    steps = [(0x20, 0, 0, 0), (0x35, count + 1, 0, 1 << 30)]  # load the number; those of another ABI are denied
    steps += [(0x15, count - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 13)]  # allow; EACCES
    return filter_calls(steps) == 0


def filter_calls(steps: Sequence[tuple[int, int, int, int]], seccomp: int = 0) -> int:
    """Filter the system calls of this process and its children by `steps`, after those of another architecture than
    this machine's are refused: their numbers mean other calls. With `seccomp`, the number of that call, the listener of
    the filter is returned, -1 where the kernel refuses."""
    ours = ARCHITECTURES[os.uname().machine]
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, ours), (0x06, 0, 0, 0x00050000 | 13), *steps]  # EACCES
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if seccomp:
        return int(libc.syscall(seccomp, 1, 8, program))  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER
    return int(libc.prctl(22, 2, program, 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _main(function: str, imports: str, cpu_s: str, *arguments: str) -> int:
    reads = map(Path, json.load(sys.stdin))
    module, _, name = function.partition(":")
    for each in (module, *filter(None, imports.split(","))):
        importlib.import_module(each)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    tempfile.gettempdir()  # libraries ask for it as they are imported; later it would try to write there
    _limit(int(cpu_s), reads)
    try:
        getattr(sys.modules[module], name)(*arguments)
    except MemoryError:
        return 66
    except SwarmnodeError as error:
        sys.stdout.write(f"{error}\n")
        return 64 if isinstance(error, NotPermitted) else 65
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
