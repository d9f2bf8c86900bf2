"""Keeps a node and its p2pd out of their user's other files and processes: Landlock, of Linux 6.2 or later, and
seccomp. Neither needs root."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

ABI_LEAST = 3  # of Linux 6.2, the first that tells truncation and moves between folders
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
# Rights (linux/landlock.h); `_FILE` has those of a file.
_READ = 0b1101
_FILE = 1 << 14 | 0b111
_ALL = (1 << 15) - 1


def available() -> bool:
    """Whether this kernel has what it takes."""
    return sys.platform == "linux" and int(ctypes.CDLL(None).syscall(_CREATE, None, 0, 1)) >= ABI_LEAST


def confine(read: Iterable[Path], write: Iterable[Path]) -> None:
    """Let this thread, and the threads and processes that it starts, open only what is below `read`, or below `write`
    to change it. What does not exist stays closed. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    rules = libc.syscall(_CREATE, struct.pack("Q", _ALL), ctypes.c_size_t(8), 0)
    for rights, paths in ((_READ, read), (_ALL, write)):
        for path in filter(Path.exists, paths):
            at = os.open(path, os.O_PATH)
            libc.syscall(_ADD, rules, 1, struct.pack("=Qi", rights if path.is_dir() else rights & _FILE, at), 0)
            os.close(at)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if libc.syscall(_RESTRICT, rules, 0) != 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses the rules of this process")
    os.close(rules)
