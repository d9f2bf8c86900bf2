"""Runs a function on a stranger's files in a child process with little time, little memory and no network.

What it is for: chat templates and tokenizers are programs of their own, which loop, allocate or crash where
their author wants so. Then the child dies, and the user gets one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

from swarmnode.errors import DataError, NotPermitted, SwarmnodeError
from swarmnode.untrusted_text import printable

CPU_S = 10
NBYTES = 2 << 30
WALL_SHARE = 30  # guess: seconds by the wall for one of the processor, on a machine that others load
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h: numbers of calls mean something on one of them only, and a kernel may have two."""
_DENIED = {"x86_64": (41, 42, 59, 322, 425), "aarch64": (198, 203, 221, 281, 425)}
"""Numbers of socket, connect, execve, execveat and io_uring_setup (asm/unistd.h)."""


def run_limited(function: str, *arguments: str, what: str, imports: Sequence[str] = (), cpu_s: int = CPU_S) -> None:
    """Call `function` ("module:name") with `arguments` in a child that has `cpu_s` of processor time and NBYTES of
    memory after it has imported `imports`. Raises DataError and NotPermitted as it does, DataError where it needs more
    or crashes; `what` names it."""
    command = [sys.executable, "-I", "-m", __name__, function, ",".join(imports), str(cpu_s), *arguments]
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR", "LANG")}
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    limits = f"{cpu_s} s and {NBYTES >> 30} GB"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
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
    """Raises TimeoutError when Python code of the block has taken CPU_S of processor time here, and on Linux
    MemoryError when it takes NBYTES more memory. In another than the main thread it is not bounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"it takes more than {CPU_S} s of processor time")

    memory = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    try:
        if sys.platform == "linux" and memory[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (_mapped_nbytes() + NBYTES, memory[1]))
        signal.setitimer(signal.ITIMER_PROF, CPU_S, 1.0)  # again: jinja goes on after what fails as it compiles
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


def _mapped_nbytes() -> int:
    """Addresses in use by this process; 0 where the system does not tell."""
    with open("/proc/self/statm") if sys.platform == "linux" else contextlib.nullcontext() as file:
        return int(file.read().split()[0]) * resource.getpagesize() if file else 0


def _limit(cpu_s: int) -> None:
    """Bound this process. Where the kernel has no seccomp, the network stays."""
    mapped = _mapped_nbytes()
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_AS, (mapped + NBYTES, mapped + NBYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (spent_s + cpu_s, spent_s + cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    numbers = _DENIED.get(os.uname().machine)
    if sys.platform == "linux" and numbers is not None:
        deny_calls(numbers)


def deny_calls(numbers: Sequence[int]) -> None:
    """Let system calls of these numbers fail in this process and its children from now on (seccomp(2), classic BPF)."""
    count = len(numbers)
    steps = [(0x20, 0, 0, 0), (0x35, count + 1, 0, 1 << 30)]  # load the number; those of another ABI are denied
    steps += [(0x15, count - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | 13)]  # allow; EACCES
    filter_calls(steps)


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
    module, _, name = function.partition(":")
    for each in (module, *filter(None, imports.split(","))):
        importlib.import_module(each)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _limit(int(cpu_s))
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
