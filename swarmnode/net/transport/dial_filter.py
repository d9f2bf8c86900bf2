"""Asks before p2pd dials: each TCP connection that it opens waits for a verdict of this process, and it dials no QUIC.

p2pd dials by itself what peers tell it: addresses they identify with, those of its own DHT, holes to punch. It has no
gate for that, but the kernel does: seccomp(2) hands each connect(2) of a process to its parent (Linux 5.5, no privilege
needed). Elsewhere p2pd dials unasked, and only the calls of this process are gated.

Run as a program (LISTENER SOCKETS KEY P2PD ...), this file puts the filter on itself, sends its listener to the parent
and becomes p2pd, in a box that is narrower than the node's: it reads its key and the system's files, writes in the
folder of its sockets alone, and runs no other program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from swarmnode.base import landlock
from swarmnode.base.limited_child import deny_calls, filter_calls

_CALLS = {"x86_64": (42, 46, 317), "aarch64": (203, 211, 277)}  # connect, sendmsg, seccomp: asm/unistd.h
# Requests and the flag of linux/seccomp.h.
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_CONTINUE = 1
_GETFD = 438  # pidfd_getfd, on every architecture
_DENIED = 13  # EACCES
_LENGTHS = 16, 28  # of sockaddr_in and sockaddr_in6

SUPPORTED = sys.platform == "linux" and os.uname().machine in _CALLS


class DialRequest:
    """One connect(2) that waits; `host` and `port` are what it names, "" where it is no TCP connection."""

    def __init__(self, listener: int, process: int) -> None:
        """Take the next one. Raises OSError if there is none."""
        self._listener = listener
        raw = bytearray(80)
        fcntl.ioctl(listener, _RECEIVE, raw)
        self._id, thread = struct.unpack_from("QI", raw)
        descriptor, address, length = struct.unpack_from("3Q", raw, 32)
        self.host = ""
        self.port = 0
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
                memory.seek(address)
                data = memory.read(length)
            family = int.from_bytes(data[:2], sys.byteorder)
            if family in (socket.AF_INET, socket.AF_INET6) and _is_stream(process, descriptor):
                host = data[4:8] if family == socket.AF_INET else data[8:24]
                self.host = socket.inet_ntop(family, host)
                self.port = int.from_bytes(data[2:4], "big")

    def answer(self, permit: bool) -> bool:
        """Let it go on or fail; False if it was interrupted meanwhile, so that it comes again."""
        verdict = struct.pack("QqiI", self._id, 0, 0 if permit else -_DENIED, _CONTINUE if permit else 0)
        try:
            fcntl.ioctl(self._listener, _SEND, bytearray(verdict))
        except OSError:
            return False
        return True


def _is_stream(process: int, descriptor: int) -> bool:
    """Whether the socket carries TCP; names are resolved, and routers found, over UDP."""
    pidfd = os.pidfd_open(process)
    try:
        copied = ctypes.CDLL(None, use_errno=True).syscall(_GETFD, pidfd, ctypes.c_int(descriptor), 0)
    finally:
        os.close(pidfd)
    if copied < 0:
        return True
    with socket.socket(fileno=copied) as sock:
        return sock.type == socket.SOCK_STREAM


def default_router() -> str:
    """The IPv4 address of the default gateway; "" if there is none."""
    with contextlib.suppress(OSError, ValueError), open("/proc/net/route") as file:
        for words in map(str.split, file.readlines()[1:]):
            if words[1] == "00000000":
                return socket.inet_ntoa(struct.pack("<I", int(words[2], 16)))
    return ""


def _confine(sockets: Path, key: Path, program: Path) -> None:
    system = [Path("/", name) for name in ("etc", "proc", "sys", "run/systemd/resolve", "usr/share")]
    loader = [Path("/", name) for name in ("lib", "lib64", "usr/lib", "usr/lib64", "nix/store")]
    files = [key, Path("/dev/urandom"), Path("/etc/resolv.conf").resolve()]
    landlock.confine([program, *loader], [sockets, Path("/dev/null")], opened=[*files, *system])


if __name__ == "__main__":
    number, sockets, key, *command = sys.argv[1:]
    connect, sendmsg, seccomp = _CALLS[os.uname().machine]
    steps = [
        (0x20, 0, 0, 0),  # the call's number
        (0x15, 0, 4, connect),
        (0x20, 0, 0, 32),  # the length of the address
        (0x15, 1, 0, _LENGTHS[0]),
        (0x15, 0, 1, _LENGTHS[1]),
        (0x06, 0, 0, 0x7FC00000),  # SECCOMP_RET_USER_NOTIF
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    with socket.socket(fileno=int(number)) as parent:
        if (listener := filter_calls(steps, seccomp)) >= 0:
            socket.send_fds(parent, [b"+"], [listener])
    deny_calls((sendmsg,))  # of QUIC alone: else peers that name UDP addresses make p2pd send packets to anybody
    if landlock.available():
        _confine(Path(sockets), Path(key), Path(command[0]))
    os.execv(command[0], command)
