"""Boxes for a node, its p2pd and the parsers of strangers' files: out of their user's other files and processes.
Landlock, of Linux 6.2 or later, and seccomp (limited_child.py). Neither needs root."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

ABI_LEAST = 3  # of Linux 6.2, the first that tells truncation and moves between folders
ABI_TCP = 4  # of Linux 6.7: TCP ports
ABI_SCOPES = 6  # of Linux 6.12: signals and abstract sockets
# System calls, the same on all machines (asm-generic/unistd.h).
_CREATE = 444
_ADD = 445
_RESTRICT = 446
DENIED = {
    "x86_64": (101, 310, 311, 165, 166, 155, 246, 320, 175, 313, 176, 321, 298, 323, 248, 249, 250, 304, 169, 167),
    "aarch64": (117, 270, 271, 40, 39, 41, 104, 294, 105, 273, 106, 280, 241, 282, 217, 218, 219, 265, 142, 224),
}
"""Numbers of ptrace, process_vm_readv, process_vm_writev, mount, umount2, pivot_root, kexec_load, kexec_file_load,
init_module, finit_module, delete_module, bpf, perf_event_open, userfaultfd, add_key, request_key, keyctl,
open_by_handle_at, reboot and swapon (asm/unistd.h): of no use to a node, and the doors of most faults of kernels."""
# Rights (linux/landlock.h); `_FILE` has those of a file, `_LIST` sees names in folders, `_OPEN` and `_WRITE` run
# nothing.
_READ = 0b1101
_OPEN = 0b1100
_LIST = 0b1000
_FILE = 1 << 14 | 0b111
_ALL = (1 << 15) - 1
_WRITE = _ALL & ~1
_TCP = 0b11
_ABSTRACT = 0b01
_SIGNAL = 0b10
LIBRARIES = ("/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/proc/self", "/dev/urandom")
"""All that a process which parses needs of the system."""


def abi() -> int:
    """The version of Landlock that this kernel has; 0 or less: none."""
    return int(ctypes.CDLL(None).syscall(_CREATE, None, 0, 1)) if sys.platform == "linux" else 0


def available() -> bool:
    """Whether this kernel has what it takes."""
    return abi() >= ABI_LEAST


def confine(
    read: Iterable[Path] = (),
    write: Iterable[Path] = (),
    *,
    opened: Iterable[Path] = (),
    listed: Iterable[Path] = (),
    tcp: bool = True,
    desktop: bool = False,
) -> None:
    """Let this thread, and the threads and processes that it starts, open only what is below `read`, which they may
    also run, below `opened`, which they may not, or below `write` to change it and not to run it; below `listed` they
    see names. What does not exist stays closed.

    From Linux 6.7 on they use no TCP port without `tcp`; from 6.12 on they signal nobody else, and reach no abstract
    socket of others without `desktop`. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = abi()
    scopes = _SIGNAL | (0 if desktop else _ABSTRACT)
    size = 24 if version >= ABI_SCOPES else 16 if version >= ABI_TCP else 8
    handled = struct.pack("QQQ", _ALL, 0 if tcp else _TCP, scopes)[:size]
    rules = libc.syscall(_CREATE, handled, ctypes.c_size_t(size), 0)
    for rights, paths in ((_READ, read), (_OPEN, opened), (_LIST, listed), (_WRITE, write)):
        for path in filter(Path.exists, paths):
            at = os.open(path, os.O_PATH)
            libc.syscall(_ADD, rules, 1, struct.pack("=Qi", rights if path.is_dir() else rights & _FILE, at), 0)
            os.close(at)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if libc.syscall(_RESTRICT, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses the rules of this process")
    os.close(rules)


def python_folders() -> list[Path]:
    """Python's own folders and this package's; never a home as a whole."""
    home = Path(os.environ.get("HOME", "/root"))
    found = map(Path, (str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix, *sys.path))
    return [one for one in found if one not in (Path(), home, *home.parents)]


def system_folders() -> list[Path]:
    """Python's own folders, and those of the system but homes."""
    home = Path(os.environ.get("HOME", "/root"))
    homes = ("/home", "/root", "/".join(home.parts[:2])[1:])
    return python_folders() + [one for one in Path("/").iterdir() if str(one) not in homes]


def missing() -> str:
    """The end of a sentence that says what the boxes lack on this kernel; "" if nothing."""
    version = abi()
    if version < ABI_LEAST:
        return "the node can open its user's files: Landlock of Linux 6.2 would close them"
    if version < ABI_SCOPES:
        return "the node can signal other programs and reach their abstract sockets: Linux 6.12 would close both"
    return ""
